//! `logit_cap`: logits multiplied by a model's constant (cohere, granite) and bounded by a soft cap (gemma2), in place.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::sample::workgroup_size;
use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of logit_cap.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    /// A multiple of 4.
    pub stride: u32,
    pub scale: f32,
    /// 0 is none.
    pub cap: f32,
}

/// The defines of one variant.
pub fn defines(class: Class) -> Defines {
    Defines::new().set("WG", i64::from(workgroup_size(class)))
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct LogitCap {
    bound: Arc<Bound>,
    quads: u32,
    lanes: u32,
}

impl LogitCap {
    /// `logits` is f32 `[num_logits, stride]`.
    pub fn new(ctx: &mut KernelContext<'_>, params: Params, logits: &BufferSlice) -> Result<LogitCap, GpuError> {
        let uniform = ctx.params.push(ctx.gpu, &params)?;
        let kernel = ctx.gpu.kernel("logit_cap", &defines(ctx.class))?;
        let bindings = [("step_meta", ctx.step_meta), ("logits", logits), ("params", &uniform)];
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(LogitCap { bound, quads: params.stride / 4, lanes: workgroup_size(ctx.class) })
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("logit cap", &self.bound, (num_logits * self.quads).div_ceil(self.lanes));
    }
}

/// One logit, in f64.
pub fn reference(x: f32, scale: f32, cap: Option<f32>) -> f32 {
    let x = f64::from(x) * f64::from(scale);
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh()) as f32
}
