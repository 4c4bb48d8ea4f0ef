//! `matmul_i8` and `matmul_f32` with GROUPED: each row of x meets the weights of its own expert, in tiles of pairs that
//! [`super::expert_pairs`] sorted.
//!
//! Guarantees: as [`super::matmul`]: an output's bits depend on its row of weights and its row of x alone, not on which
//! other pairs there are nor on how tiles are cut.

use std::sync::Arc;

use super::context::{Activations, KernelContext};
use super::expert_pairs::Layout;
use super::matmul::{COLUMNS, Ends, Fusion, Params, Precision, prior, variant};
use super::pack::Format;
use super::tile::Tile;
use super::weights::ExpertMatrix;
use super::{Class, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Where the rows come from and go to.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub layout: Layout,
    /// As `expert_pairs` wrote it.
    pub work: &'a BufferSlice,
    /// Pairs that share a row of x: all of a token's, or 1.
    pub pairs_per_row: u32,
    /// Elements from row to row of x (f32 alone); `None` is k, padded.
    pub x_stride: Option<u32>,
    /// f32 `[num_pairs, y_stride]`
    pub y: &'a BufferSlice,
    pub y_stride: u32,
    pub y_offset: u32,
}

/// A product with its buffers bound.
#[derive(Debug)]
pub struct ExpertMatmul {
    label: String,
    layout: Layout,
    tiles: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    columns: u32,
    /// One for each slice of the weights.
    parts: Vec<Arc<Bound>>,
    workgroups: u32,
}

/// What the class begins with: other ways are not tried.
fn tile(format: Format, precision: Precision, class: Class, pairs: bool, columns: u32) -> Tile {
    prior((format, 1), precision, class, pairs, (columns, Ends::Sums))
}

fn grouped(format: Format, precision: Precision, class: Class, pairs: bool, columns: u32) -> (&'static str, Defines) {
    let (name, defines) =
        variant(format, precision, class, tile(format, precision, class, pairs, columns), Fusion::default());
    (name, defines.flag("GROUPED"))
}

impl ExpertMatmul {
    /// Every kernel that a product may use, for compiling ahead.
    pub fn kernels(format: Format, precision: Precision, class: Class, pairs: bool) -> Vec<(String, Defines)> {
        let variants = COLUMNS.iter().map(|&columns| grouped(format, precision, class, pairs, columns));
        variants.map(|(name, defines)| (name.to_string(), defines)).collect()
    }

    /// Binds a product. `bias` is f32 `[num_experts, n]`.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        weights: &ExpertMatrix,
        x: Activations<'_>,
        rows: Rows<'_>,
        bias: Option<&BufferSlice>,
    ) -> Result<ExpertMatmul, GpuError> {
        let precision = match x {
            Activations::F32(_) => Precision::F32,
            Activations::I8(_) | Activations::Folded(..) => Precision::I8,
        };
        if let Activations::Folded(..) = x {
            let message = "experts do not take rows whose norm is folded".into();
            return Err(GpuError::Validation { what: weights.label.clone(), message });
        }
        let mut tiles = Vec::new();
        for columns in COLUMNS {
            let (name, defines) = grouped(weights.format, precision, ctx.class, ctx.multiply_pairs, columns);
            let kernel = ctx.gpu.kernel(name, &defines)?;
            let mut parts = Vec::new();
            for slice in &weights.slices {
                let params = Params {
                    n: weights.n,
                    groups: stride(weights.k) / super::GROUP,
                    x_stride: rows.x_stride.unwrap_or(stride(weights.k)),
                    y_stride: rows.y_stride,
                    y_offset: rows.y_offset,
                    has_bias: u32::from(bias.is_some()),
                    expert_rows: weights.expert_rows(),
                    first_row: slice.first_row,
                    num_rows: slice.num_rows,
                    slots: rows.layout.slots(),
                    pairs_per_row: rows.pairs_per_row,
                    ..Params::default()
                };
                let params = ctx.params.push(ctx.gpu, &params)?;
                // Any buffer does where there is no bias: it is not read.
                let bias = bias.unwrap_or(&slice.q);
                let mut bindings =
                    vec![("work", rows.work), ("wq", &slice.q), ("biases", bias), ("y", rows.y), ("params", &params)];
                match x {
                    Activations::F32(x) => bindings.push(("x", x)),
                    Activations::I8(x) | Activations::Folded(x, _) => {
                        bindings.extend([("xq", &x.q), ("xs", &x.scales)]);
                    }
                }
                bindings.extend(slice.h.iter().map(|h| ("wh", h)));
                bindings.extend(slice.s.iter().map(|s| ("ws", s)));
                parts.push(ctx.gpu.bind(&kernel, &bindings)?);
            }
            let tile = tile(weights.format, precision, ctx.class, ctx.multiply_pairs, columns);
            let rows_per_workgroup = tile.rows * ctx.class.lanes();
            tiles.push(Part { columns, parts, workgroups: weights.n.div_ceil(rows_per_workgroup) });
        }
        Ok(ExpertMatmul { label: weights.label.clone(), layout: rows.layout, tiles })
    }

    /// Records the product for a step of so many tokens.
    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        let columns = self.layout.columns(num_tokens);
        let tile = self.tiles.iter().find(|t| t.columns == columns).expect("there is one for each width");
        for bound in &tile.parts {
            recording.dispatch(self.label.clone(), bound, tile.workgroups * self.layout.max_tiles(num_tokens));
        }
    }
}
