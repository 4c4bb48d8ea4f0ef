//! `sample`: one token per logit row, greedy or drawn, without sorting; only (id, flag) comes back. The reference is
//! [`crate::sampling::reference::sample`]: the same kept set up to rounding at the cut, the same draw up to rounding of
//! two nearly equal scores. The same logits always give the same token on one adapter.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of sample.wgsl, penalties.wgsl and logprobs.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Params {
    pub vocab: u32,
    /// Elements of a logit row; a multiple of 4.
    pub stride: u32,
}

impl Params {
    pub(super) fn push(self, ctx: &mut KernelContext<'_>) -> Result<BufferSlice, GpuError> {
        if self.vocab == 0 || self.stride < self.vocab || !self.stride.is_multiple_of(4) {
            return Err(GpuError::Validation { what: "logits".into(), message: format!("{self:?}") });
        }
        ctx.params.push(ctx.gpu, &self)
    }
}

/// One row's result.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Sampled {
    pub token: u32,
    /// 1 when a logit is a NaN or an infinity; the token is then not to be used.
    pub not_finite: u32,
}

/// The defines of one variant.
pub fn defines(class: Class) -> Defines {
    Defines::new().set("WG", i64::from(workgroup_size(class)))
}

/// One row is one workgroup: small where a workgroup is one thread's work, as large as any adapter has it elsewhere.
pub(super) fn workgroup_size(class: Class) -> u32 {
    match class {
        Class::Subgroup(lanes) if lanes <= 16 => lanes,
        _ => 256,
    }
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct Sample(Arc<Bound>);

impl Sample {
    /// `logits` is f32 `[num_logits, stride]` with padding of any value; `sampled` is [`Sampled`] `[num_logits]`.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        params: Params,
        logits: &BufferSlice,
        sampled: &BufferSlice,
    ) -> Result<Sample, GpuError> {
        let params = params.push(ctx)?;
        let kernel = ctx.gpu.kernel("sample", &defines(ctx.class))?;
        let bindings = [("step_meta", ctx.step_meta), ("logits", logits), ("sampled", sampled), ("params", &params)];
        Ok(Sample(ctx.gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("sample", &self.0, num_logits);
    }
}
