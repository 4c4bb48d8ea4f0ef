//! `gather`: f32 rows with their elements in another order, as f32 or quantised. For matrices whose columns were sorted
//! (GPTQ's order of activations).
//!
//! Guarantees: f32 results are the inputs' own bits; quantised ones are what `quantise` makes of them.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{KernelContext, RowCount, RowOutput};
use super::{Class, GROUP};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of gather.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub stride: u32,
    pub counts_logits: u32,
}

/// The kernel with its buffers bound.
#[derive(Debug)]
pub struct Gather {
    label: String,
    bound: Arc<Bound>,
    groups: u32,
    lanes: u32,
}

/// The defines of one variant.
pub fn defines(class: Class, is_quantised: bool) -> Defines {
    if is_quantised { class.defines().flag("I8") } else { class.defines() }
}

impl Gather {
    /// Rows of `stride` elements, a multiple of 32; `order` has `stride` indices below `stride`.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        (x, order): (&BufferSlice, &BufferSlice),
        stride: u32,
        y: RowOutput<'_>,
        rows: RowCount,
    ) -> Result<Gather, GpuError> {
        let params = ctx.params.push(ctx.gpu, &Params { stride, counts_logits: rows.flag() })?;
        let kernel = ctx.gpu.kernel("gather", &defines(ctx.class, matches!(y, RowOutput::I8(_))))?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("order", order), ("params", &params)];
        bindings.extend(y.bindings());
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(Gather { label: label.into(), bound, groups: stride / GROUP, lanes: ctx.class.lanes() })
    }

    /// Records it for `m` rows.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, (m * self.groups).div_ceil(self.lanes));
    }
}
