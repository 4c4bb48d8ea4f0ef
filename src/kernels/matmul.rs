//! `matmul_i8`, `matmul_f32`: y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n].
//!
//! Guarantees: an output's bits depend on its row of weights and its token alone, whatever the number of tokens: one f32
//! accumulator, k ascending, in every tile. The precision class follows from the activations that the caller binds, once,
//! at load. Rows of y beyond the step's count are not written. Where [`KernelContext::matrix_units`] is set, that holds for
//! less than [`matrix_units::MIN_TOKENS`] tokens only.
//!
//! It does not attempt to split k over workgroups.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{Activations, KernelContext, QuantisedRows, RowCount, RowOutput};
use super::mlp::activation_flag;
use super::pack::{BLOCK_ROWS, Format};
use super::tile::{ProductKey, Tile};
use super::weights::{PackedMatrix, PackedSlice};
use super::{Class, GROUP, matrix_units, stride};
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};
use crate::model::spec::Activation;

/// Mirrors `Params` of matmul_params.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub n: u32,
    pub groups: u32,
    pub x_stride: u32,
    pub y_stride: u32,
    pub y_offset: u32,
    pub counts_logits: u32,
    pub accumulate: u32,
    pub has_bias: u32,
    /// This and what follows: of [`super::expert_matmul`] alone.
    pub expert_rows: u32,
    pub first_row: u32,
    pub num_rows: u32,
    pub slots: u32,
    pub pairs_per_row: u32,
    /// This and what follows: of fused products alone.
    pub squares_at: u32,
    pub norm_k: u32,
    pub eps: f32,
    pub to_squares_at: u32,
    pub added_stride: u32,
    pub added_offset: u32,
}

/// Precision of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    F32,
    /// Integer dot products; for quantised weights only.
    I8,
}

/// Where the result goes: element `offset + n` of rows of `stride` elements.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    pub slice: &'a BufferSlice,
    pub stride: u32,
    pub offset: u32,
    /// Add to what is there.
    pub accumulate: bool,
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// They are stored or added, with the bias.
    Sums(Output<'a>),
    /// They are added to the hidden state `x` (f32 `[m, stride(n)]`), and what the next RMS norm's readers take is
    /// written: `gain * x` and the sums of squares ([`Activations::Folded`]). The product has no bias.
    Hidden { x: &'a BufferSlice, gain: &'a BufferSlice, folded: &'a QuantisedRows },
    /// The matrix has gate and up in turns of 32 rows, `n / 2` of each: `act(gate) * up` is written, quantised.
    Gated { activation: Activation, y: &'a QuantisedRows },
    /// The same, with `added` (f32 `[m, n]`) on gate and up of the tokens whose LoRA changes one of them.
    Adapted { activation: Activation, y: &'a QuantisedRows, added: &'a BufferSlice },
}

/// What a product does beside multiplying, as far as kernels are compiled for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fusion {
    /// The factor of a norm that was folded into the rows is multiplied at the end.
    pub is_normed: bool,
    pub ends: Ends,
}

/// The kind of a [`Target`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ends {
    #[default]
    Sums,
    Hidden,
    Gated(Activation),
    Adapted(Activation),
}

impl Fusion {
    /// Storage buffers that a product with all of it binds.
    pub const BUFFERS: u32 = 10;

    /// Whether products of a class can do more than multiply: that takes whole groups of 32 rows in a workgroup.
    pub fn is_possible(class: Class) -> bool {
        matches!(class, Class::Subgroup(lanes) if lanes >= 8)
    }

    /// Whether a product of i8 activations can be [`Target::Gated`]: 64 rows then fit a workgroup's registers.
    pub fn can_gate(format: Format, class: Class) -> bool {
        let has_room = |lanes: u32| lanes >= 16 || format.is_texels() && format.is_four_bit();
        Fusion::is_possible(class) && format.takes_i8() && has_room(class.lanes())
    }

    /// What a kernel does beside multiplying, as its flags.
    pub(super) fn flags(self, defines: Defines) -> Defines {
        let defines = if self.is_normed { defines.flag("NORMED") } else { defines };
        let gated =
            |defines: Defines, activation| defines.flag("QUANTISES").flag("GATED").flag(activation_flag(activation));
        match self.ends {
            Ends::Sums => defines,
            Ends::Hidden => defines.flag("QUANTISES").flag("TO_HIDDEN"),
            Ends::Gated(activation) => gated(defines, activation),
            Ends::Adapted(activation) => gated(defines, activation).flag("ADDED"),
        }
    }

    fn defines(self, defines: Defines, class: Class) -> Defines {
        let defines = self.flags(defines);
        match self.ends {
            Ends::Sums => defines,
            _ => defines.set("P", i64::from((GROUP / class.lanes()).max(1))),
        }
    }
}

impl<'a> Target<'a> {
    fn ends(&self) -> Ends {
        match self {
            Target::Sums(_) => Ends::Sums,
            Target::Hidden { .. } => Ends::Hidden,
            Target::Gated { activation, .. } => Ends::Gated(*activation),
            Target::Adapted { activation, .. } => Ends::Adapted(*activation),
        }
    }

    fn bindings(&self) -> Vec<(&'static str, &'a BufferSlice)> {
        match self {
            Target::Sums(y) => vec![("y", y.slice)],
            Target::Hidden { x, folded, .. } => {
                RowOutput::I8(folded).bindings().into_iter().chain([("y", *x)]).collect()
            }
            Target::Gated { y, .. } => RowOutput::I8(y).bindings(),
            Target::Adapted { y, added, .. } => {
                RowOutput::I8(y).bindings().into_iter().chain([("added", *added)]).collect()
            }
        }
    }
}

/// Tokens of a tile, ascending.
pub const COLUMNS: [u32; 4] = [1, 2, 4, 8];

/// Numbers of tokens that stand for all on this device: each way of a product is taken by one of them.
pub fn token_counts(gpu: &Gpu) -> Vec<u32> {
    let units = gpu.matrix_units().map(|_| matrix_units::MIN_TOKENS);
    COLUMNS.into_iter().chain(units).collect()
}

/// A product with its buffers bound.
#[derive(Debug)]
pub struct Matmul {
    label: String,
    ways: Vec<Way>,
    /// By cooperative matrices: as the parts of a way.
    units: Option<Vec<(Arc<Bound>, u32)>>,
}

/// How it is computed for some numbers of tokens.
#[derive(Debug)]
struct Way {
    /// Most tokens; the last takes any number.
    tokens: u32,
    tile: Tile,
    /// A dispatch for each slice of the weights, with its workgroups per tile of tokens.
    parts: Vec<(Arc<Bound>, u32)>,
}

/// Rows of a lane. More rows share the activations' loads, fewer keep accumulators in registers.
fn rows_per_lane(format: Format, class: Class, precision: Precision, columns: u32, ends: Ends) -> u32 {
    let wanted = match precision {
        Precision::F32 => 4,
        // Whole bytes are unpacked into more registers than nibbles.
        Precision::I8 if format.is_texels() => {
            if columns == 8 && !format.is_four_bit() {
                4
            } else {
                8
            }
        }
        Precision::I8 => {
            if columns == 8 {
                8
            } else {
                4
            }
        }
    };
    match class {
        // Gate and up of a group of 32.
        Class::Subgroup(lanes) if matches!(ends, Ends::Gated(_) | Ends::Adapted(_)) => BLOCK_ROWS / lanes,
        Class::Subgroup(lanes) => wanted.min(BLOCK_ROWS / lanes),
        Class::Floor => 1,
    }
}

/// Groups of a pass over k. Two share loads of scales and activations; with many tokens there are no registers left.
fn groups_per_pass(format: Format, groups: u32, columns: u32) -> u32 {
    if format.is_texels() && columns <= 2 && groups.is_multiple_of(2) { 2 } else { 1 }
}

/// What a class begins with, for so many tokens and rows of this many groups. `pairs` is whether 4-bit weights are
/// multiplied in pairs.
pub(super) fn prior(
    (format, groups): (Format, u32),
    precision: Precision,
    class: Class,
    pairs: bool,
    (columns, ends): (u32, Ends),
) -> Tile {
    let rows = rows_per_lane(format, class, precision, columns, ends);
    match precision {
        Precision::F32 => Tile { columns, rows, groups: 1, pairs: false },
        Precision::I8 => {
            let groups = groups_per_pass(format, groups, columns);
            Tile { columns, rows, groups, pairs: pairs && format.is_four_bit() }
        }
    }
}

/// File and defines of a tile.
pub(super) fn variant(
    format: Format,
    precision: Precision,
    class: Class,
    tile: Tile,
    fusion: Fusion,
) -> (&'static str, Defines) {
    let Tile { columns, rows, groups, pairs } = tile;
    let defines = format.defines().and(&class.defines()).set("R", i64::from(rows)).set("C", i64::from(columns));
    match precision {
        Precision::F32 => ("matmul_f32", defines),
        Precision::I8 => {
            let defines = fusion.defines(defines.set("U", i64::from(groups)), class);
            ("matmul_i8", if pairs { defines.flag("PAIRS") } else { defines })
        }
    }
}

impl Matmul {
    /// Every kernel that a product may use, for compiling ahead.
    pub fn kernels(
        format: Format,
        precision: Precision,
        class: Class,
        pairs: bool,
        fusion: Fusion,
    ) -> Vec<(String, Defines)> {
        let of = |&columns: &u32| {
            [1, 2].map(|groups| prior((format, groups), precision, class, pairs, (columns, fusion.ends)))
        };
        let of = |columns| of(columns).map(|tile| variant(format, precision, class, tile, fusion));
        COLUMNS.iter().flat_map(of).map(|(name, defines)| (name.to_string(), defines)).collect()
    }

    /// Binds a product. `bias` has n elements. i8 activations need quantised weights.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        weights: &PackedMatrix,
        x: Activations<'_>,
        y: Output<'_>,
        bias: Option<&BufferSlice>,
        rows: RowCount,
    ) -> Result<Matmul, GpuError> {
        Matmul::to(ctx, label, weights, x, Target::Sums(y), bias, rows)
    }

    /// As [`Matmul::new`], with more to do; rows that are folded, and targets other than sums, need i8 activations and a
    /// class for which fusion [is possible](Fusion::is_possible).
    pub fn to(
        ctx: &mut KernelContext<'_>,
        label: &str,
        weights: &PackedMatrix,
        x: Activations<'_>,
        target: Target<'_>,
        bias: Option<&BufferSlice>,
        rows: RowCount,
    ) -> Result<Matmul, GpuError> {
        let precision = match x {
            Activations::F32(_) => Precision::F32,
            Activations::I8(_) | Activations::Folded(..) => Precision::I8,
        };
        let fusion = Fusion { is_normed: matches!(x, Activations::Folded(..)), ends: target.ends() };
        let mut way = |&tokens: &u32| {
            let key = ProductKey { format: weights.format, precision, n: weights.n, k: weights.k, fusion, tokens };
            Way { tokens, tile: ctx.choices.take(&key, ctx.class, ctx.multiply_pairs), parts: Vec::new() }
        };
        let mut ways: Vec<Way> = COLUMNS.iter().map(&mut way).collect();
        let side = ctx.matrix_units.filter(|&side| matrix_units::is_possible(side, ctx.class));
        let mut units = side.map(|_| Vec::new());
        let vector = if let Target::Hidden { gain, .. } = target { Some(gain) } else { bias };
        for slice in &weights.slices {
            let mut params = Params {
                n: slice.num_rows,
                groups: stride(weights.k) / super::GROUP,
                x_stride: stride(weights.k),
                counts_logits: rows.flag(),
                has_bias: u32::from(bias.is_some()),
                ..Params::default()
            };
            if let Activations::Folded(x, factor) = x {
                (params.squares_at, params.norm_k, params.eps) = (x.squares_at(), factor.k, factor.eps);
            }
            match target {
                Target::Sums(y) => {
                    (params.y_stride, params.y_offset) = (y.stride, y.offset + slice.first_row);
                    params.accumulate = u32::from(y.accumulate);
                }
                Target::Hidden { folded, .. } => {
                    (params.y_stride, params.y_offset) = (stride(weights.n), slice.first_row);
                    params.to_squares_at = folded.squares_at();
                }
                Target::Gated { .. } | Target::Adapted { .. } => {
                    (params.y_stride, params.y_offset) = (weights.n / 2, slice.first_row / 2);
                    (params.added_stride, params.added_offset) = (weights.n, slice.first_row);
                }
            }
            let params = ctx.params.push(ctx.gpu, &params)?;
            // Any buffer does where there is no bias: it is not read.
            let vector = vector.map_or_else(
                || ctx.step_meta.clone(),
                |b| b.buffer.slice(b.offset + 4 * u64::from(slice.first_row), 4 * u64::from(slice.num_rows)),
            );
            for way in &mut ways {
                let kernel = variant(weights.format, precision, ctx.class, way.tile, fusion);
                let rows = way.tile.rows * ctx.class.lanes();
                way.parts.push(bind(ctx, kernel, slice, x, target, &vector, &params, rows)?);
            }
            if let (Some(parts), Some(side)) = (&mut units, side) {
                let kernel = matrix_units::variant(weights.format, precision, ctx.class, side, fusion);
                parts.push(bind(ctx, kernel, slice, x, target, &vector, &params, BLOCK_ROWS)?);
            }
        }
        Ok(Matmul { label: label.into(), ways, units })
    }

    /// Records the product for `m` rows of x.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        let fits = self.ways.iter().find(|way| way.tokens >= m);
        let way = fits.or(self.ways.last()).expect("there are always some");
        let (parts, columns) = match &self.units {
            Some(parts) if m >= matrix_units::MIN_TOKENS => (parts, matrix_units::TOKENS),
            _ => (&way.parts, way.tile.columns),
        };
        for (bound, workgroups) in parts {
            recording.dispatch(self.label.clone(), bound, workgroups * m.div_ceil(columns));
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "one call site, which has each of them at hand")]
fn bind(
    ctx: &KernelContext<'_>,
    (name, defines): (&str, Defines),
    slice: &PackedSlice,
    x: Activations<'_>,
    target: Target<'_>,
    vector: &BufferSlice,
    params: &BufferSlice,
    rows_per_workgroup: u32,
) -> Result<(Arc<Bound>, u32), GpuError> {
    let kernel = ctx.gpu.kernel(name, &defines)?;
    let mut bindings = vec![("step_meta", ctx.step_meta), ("wq", &slice.q), ("params", params)];
    bindings.push((if target.ends() == Ends::Hidden { "gain" } else { "biases" }, vector));
    bindings.extend(target.bindings());
    match x {
        Activations::F32(x) => bindings.push(("x", x)),
        Activations::I8(x) | Activations::Folded(x, _) => bindings.extend([("xq", &x.q), ("xs", &x.scales)]),
    }
    bindings.extend(slice.h.iter().map(|h| ("wh", h)));
    bindings.extend(slice.s.iter().map(|s| ("ws", s)));
    Ok((ctx.gpu.bind(&kernel, &bindings)?, slice.num_rows.div_ceil(rows_per_workgroup)))
}

/// y `[m, n]` without bias, accumulated in f64. `w` is `[n, k]`, `x` is `[m, k]`.
pub fn reference(w: &[f32], x: &[f32], k: usize) -> Vec<f32> {
    let mut y = Vec::with_capacity(w.len() / k * (x.len() / k));
    for x in x.chunks_exact(k) {
        for w in w.chunks_exact(k) {
            let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            y.push(sum as f32);
        }
    }
    y
}
