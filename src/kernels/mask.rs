//! `mask`: logits of tokens that a row may not draw, set far below all others. The reference is [`reference`].

use std::sync::Arc;

use super::KernelContext;
use super::sample::Params;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// One row is one workgroup; the whole row is looked at.
const WORKGROUP_SIZE: i64 = 256;

/// What a masked logit becomes: finite, and too low for any draw.
pub const MASKED: f32 = -1e30;

/// The defines of the one variant.
pub fn defines() -> Defines {
    Defines::new().set("WG", WORKGROUP_SIZE)
}

/// The kernel with its buffers. Record it only when the batch has masks.
#[derive(Clone, Debug)]
pub struct Mask(Arc<Bound>);

impl Mask {
    /// `logits` is f32 `[num_logits, stride]`.
    pub fn new(ctx: &mut KernelContext<'_>, params: Params, logits: &BufferSlice) -> Result<Mask, GpuError> {
        let params = params.push(ctx)?;
        let kernel = ctx.gpu.kernel("mask", &defines())?;
        let bindings = [("step_meta", ctx.step_meta), ("logits", logits), ("params", &params)];
        Ok(Mask(ctx.gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("mask", &self.0, num_logits);
    }
}

/// One row in place; `may_draw` says which tokens stay.
pub fn reference(logits: &mut [f32], may_draw: impl Fn(u32) -> bool) {
    for (token, logit) in logits.iter_mut().enumerate() {
        if !may_draw(token as u32) {
            *logit = MASKED;
        }
    }
}
