//! `matmul_i8`, `matmul_f32`: y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n].
//!
//! Guarantees: an output's bits depend on its row of weights and its token alone, whatever the number of tokens: one f32
//! accumulator, k ascending, in every tile. The precision class follows from the activations that the caller binds, once,
//! at load. Rows of y beyond the step's count are not written.
//!
//! It does not attempt to split k over workgroups.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{Activations, KernelContext, RowCount};
use super::pack::{BLOCK_ROWS, Format};
use super::weights::{PackedMatrix, PackedSlice};
use super::{Class, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of matmul_i8.wgsl and matmul_f32.wgsl.
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

/// Tokens of a tile, ascending. One token alone takes a tile of two: a tile of one is 10 % faster by itself, but Mesa
/// 22.3's software driver loads its code anew at each change of pipeline (1.7 ms, where a layer changes it four times).
pub const COLUMNS: [u32; 3] = [2, 4, 8];

/// A product with its buffers bound.
#[derive(Debug)]
pub struct Matmul {
    label: String,
    tiles: Vec<Tile>,
}

#[derive(Debug)]
struct Tile {
    columns: u32,
    /// A dispatch for each slice of the weights, with its workgroups per tile of tokens.
    parts: Vec<(Arc<Bound>, u32)>,
}

/// Rows of a lane. More rows share the activations' loads, fewer keep accumulators in registers.
pub(super) fn rows_per_lane(class: Class, precision: Precision, columns: u32) -> u32 {
    let wanted = if precision == Precision::I8 && columns == 8 { 8 } else { 4 };
    match class {
        Class::Subgroup(lanes) => wanted.min(BLOCK_ROWS / lanes),
        Class::Floor => 1,
    }
}

/// File and defines of a tile.
pub(super) fn variant(
    format: Format,
    precision: Precision,
    class: Class,
    pairs: bool,
    columns: u32,
) -> (&'static str, Defines) {
    let rows = rows_per_lane(class, precision, columns);
    let defines = format.defines().and(&class.defines()).set("R", i64::from(rows)).set("C", i64::from(columns));
    match precision {
        Precision::F32 => ("matmul_f32", defines),
        Precision::I8 if pairs && format.is_four_bit() => ("matmul_i8", defines.flag("PAIRS")),
        Precision::I8 => ("matmul_i8", defines),
    }
}

impl Matmul {
    /// Every kernel that a product may use, for compiling ahead.
    pub fn kernels(format: Format, precision: Precision, class: Class, pairs: bool) -> Vec<(String, Defines)> {
        let variants = COLUMNS.iter().map(|&columns| variant(format, precision, class, pairs, columns));
        variants.map(|(name, defines)| (name.to_string(), defines)).collect()
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
        let mut tiles: Vec<Tile> = COLUMNS.iter().map(|&columns| Tile { columns, parts: Vec::new() }).collect();
        for slice in &weights.slices {
            let params = Params {
                n: slice.num_rows,
                groups: stride(weights.k) / super::GROUP,
                x_stride: stride(weights.k),
                y_stride: y.stride,
                y_offset: y.offset + slice.first_row,
                counts_logits: rows.flag(),
                accumulate: u32::from(y.accumulate),
                has_bias: u32::from(bias.is_some()),
                ..Params::default()
            };
            let params = ctx.params.push(ctx.gpu, &params)?;
            // Any buffer does where there is no bias: it is not read.
            let bias = bias.map_or_else(
                || slice.q.clone(),
                |b| b.buffer.slice(b.offset + 4 * u64::from(slice.first_row), 4 * u64::from(slice.num_rows)),
            );
            for tile in &mut tiles {
                tile.parts.push(bind(ctx, weights.format, slice, x, y.slice, &bias, &params, tile.columns)?);
            }
        }
        Ok(Matmul { label: label.into(), tiles })
    }

    /// Records the product for `m` rows of x.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        let fits = self.tiles.iter().find(|t| t.columns >= m);
        let tile = fits.or(self.tiles.last()).expect("there are always tiles");
        for (bound, workgroups) in &tile.parts {
            recording.dispatch(self.label.clone(), bound, workgroups * m.div_ceil(tile.columns));
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "one call site, which has each of them at hand")]
fn bind(
    ctx: &KernelContext<'_>,
    format: Format,
    slice: &PackedSlice,
    x: Activations<'_>,
    y: &BufferSlice,
    bias: &BufferSlice,
    params: &BufferSlice,
    columns: u32,
) -> Result<(Arc<Bound>, u32), GpuError> {
    let precision = match x {
        Activations::F32(_) => Precision::F32,
        Activations::I8(_) => Precision::I8,
    };
    let (name, defines) = variant(format, precision, ctx.class, ctx.multiply_pairs, columns);
    let kernel = ctx.gpu.kernel(name, &defines)?;
    let mut bindings =
        vec![("step_meta", ctx.step_meta), ("wq", &slice.q), ("biases", bias), ("y", y), ("params", params)];
    match x {
        Activations::F32(x) => bindings.push(("x", x)),
        Activations::I8(x) => bindings.extend([("xq", &x.q), ("xs", &x.scales)]),
    }
    bindings.extend(slice.h.iter().map(|h| ("wh", h)));
    bindings.extend(slice.s.iter().map(|s| ("ws", s)));
    let rows_per_workgroup = rows_per_lane(ctx.class, precision, columns) * ctx.class.lanes();
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
