//! `embed`: rows of the embedding table by token id, dequantised to f32. The table may be the head's as well.
//!
//! Guarantees: the values equal the CPU's dequantisation. Ids beyond the table leave their row as it was: callers check.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::KernelContext;
use super::weights::PackedMatrix;
use super::{Class, GROUP, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};
use crate::kernels::pack::Format;

/// Mirrors `Params` of embed.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub first_row: u32,
    pub num_rows: u32,
    pub stride: u32,
    pub scale: f32,
}

/// The kernel with its buffers bound: a dispatch for each slice of the table.
#[derive(Debug)]
pub struct Embed {
    parts: Vec<Arc<Bound>>,
    groups: u32,
    lanes: u32,
}

/// The defines of one variant.
pub fn defines(class: Class, format: Format, by_position: bool) -> Defines {
    let defines = format.defines().and(&class.defines());
    if by_position { defines.flag("POSITIONS") } else { defines }
}

impl Embed {
    /// Writes rows of `stride(k)` elements, multiplied by `scale`, padding zero.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        table: &PackedMatrix,
        x: &BufferSlice,
        scale: f32,
    ) -> Result<Embed, GpuError> {
        Embed::of(ctx, table, x, scale, false)
    }

    /// Adds the row of each token's position in a table of positions.
    pub fn positions(ctx: &mut KernelContext<'_>, table: &PackedMatrix, x: &BufferSlice) -> Result<Embed, GpuError> {
        Embed::of(ctx, table, x, 1.0, true)
    }

    fn of(
        ctx: &mut KernelContext<'_>,
        table: &PackedMatrix,
        x: &BufferSlice,
        scale: f32,
        by_position: bool,
    ) -> Result<Embed, GpuError> {
        let kernel = ctx.gpu.kernel("embed", &defines(ctx.class, table.format, by_position))?;
        let mut parts = Vec::new();
        for slice in &table.slices {
            let params =
                Params { first_row: slice.first_row, num_rows: slice.num_rows, stride: stride(table.k), scale };
            let params = ctx.params.push(ctx.gpu, &params)?;
            let mut bindings = vec![("step_meta", ctx.step_meta), ("wq", &slice.q), ("x", x), ("params", &params)];
            bindings.extend(slice.h.iter().map(|h| ("wh", h)));
            bindings.extend(slice.s.iter().map(|s| ("ws", s)));
            parts.push(ctx.gpu.bind(&kernel, &bindings)?);
        }
        Ok(Embed { parts, groups: stride(table.k) / GROUP, lanes: ctx.class.lanes() })
    }

    /// Records it for `m` tokens.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        for bound in &self.parts {
            recording.dispatch("embed", bound, (m * self.groups).div_ceil(self.lanes));
        }
    }
}
