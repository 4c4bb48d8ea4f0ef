//! `sample`: one token per logit row, greedy or drawn, without sorting; only (id, flag) comes back. The reference is
//! [`crate::sampling::reference::sample`]: the same kept set up to rounding at the cut, the same draw up to rounding of
//! two nearly equal scores. The same logits always give the same token on one adapter.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::Class;
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

/// Mirrors `Params` of sample.wgsl, penalties.wgsl and logprobs.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Params {
    pub vocab: u32,
    /// Elements of a logit row; a multiple of 4.
    pub stride: u32,
}

/// One row's result.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Sampled {
    pub token: u32,
    /// 1 when a logit is a NaN or an infinity; the token is then not to be used.
    pub not_finite: u32,
}

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class) -> (&'static str, Defines) {
    ("sample", Defines::new().set("WG", i64::from(workgroup_size(class))))
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
    /// `logits` is f32 `[num_logits, stride]`, `sampled` is [`Sampled`] `[num_logits]`; `params` holds [`Params`].
    pub fn new(
        gpu: &Gpu,
        class: Class,
        step_meta: &BufferSlice,
        logits: &BufferSlice,
        sampled: &BufferSlice,
        params: &BufferSlice,
    ) -> Result<Sample, GpuError> {
        let (name, defines) = kernel(class);
        let kernel = gpu.kernel(name, &defines)?;
        let bindings = [("step_meta", step_meta), ("logits", logits), ("sampled", sampled), ("params", params)];
        Ok(Sample(gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("sample", &self.0, num_logits);
    }
}
