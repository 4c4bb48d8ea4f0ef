//! `embed`: a token's row of the packed embedding table, as f32. The table may be the head's matrix as well.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::pack::Format;
use super::swiglu::lanes;
use super::weights::PackedMatrix;
use super::{Class, GROUP, ParamArena, stride};
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

/// Mirrors `Params` of embed.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Params {
    pub first_row: u32,
    pub num_rows: u32,
    pub groups: u32,
}

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class, format: Format) -> (&'static str, Defines) {
    ("embed", format.defines().set("WG", i64::from(lanes(class))))
}

/// The kernel with its buffers: one for each slice of the table.
#[derive(Clone, Debug)]
pub struct Embed {
    bound: Vec<Arc<Bound>>,
    groups: u32,
    lanes: u32,
}

impl Embed {
    /// `x` is f32 `[num_tokens, stride(k)]`. Its padding is written where the table's groups are padded.
    pub fn new(
        gpu: &Gpu,
        class: Class,
        arena: &mut ParamArena,
        table: &PackedMatrix,
        step_meta: &BufferSlice,
        x: &BufferSlice,
    ) -> Result<Embed, GpuError> {
        let (name, defines) = kernel(class, table.format);
        let kernel = gpu.kernel(name, &defines)?;
        let groups = stride(table.k) / GROUP;
        let mut bound = Vec::with_capacity(table.slices.len());
        for slice in &table.slices {
            let params = Params { first_row: slice.first_row, num_rows: slice.num_rows, groups };
            let params = arena.push(gpu, &params)?;
            let mut bindings = vec![("step_meta", step_meta), ("wq", &slice.q), ("x", x), ("params", &params)];
            bindings.extend(slice.h.iter().map(|h| ("wh", h)));
            bindings.extend(slice.s.iter().map(|s| ("ws", s)));
            bound.push(gpu.bind(&kernel, &bindings)?);
        }
        Ok(Embed { bound, groups, lanes: lanes(class) })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        for bound in &self.bound {
            recording.dispatch("embed", bound, (num_tokens * self.groups).div_ceil(self.lanes));
        }
    }
}
