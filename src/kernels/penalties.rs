//! `penalties`: logits changed in place by what came before and by the bias lists of the step's metadata. The reference
//! is [`crate::sampling::reference::apply_penalties`].

use std::sync::Arc;

use super::KernelContext;
use super::sample::Params;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// One row is one workgroup; a beam's whole row is scanned, in few enough rounds for software drivers (see `logprobs`).
const WORKGROUP_SIZE: i64 = 256;

/// The defines of the one variant.
pub fn defines() -> Defines {
    Defines::new().set("WG", WORKGROUP_SIZE)
}

/// The kernel with its buffers. Record it only when the batch has penalties or biases.
#[derive(Clone, Debug)]
pub struct Penalties(Arc<Bound>);

impl Penalties {
    /// `logits` is f32 `[num_logits, stride]`.
    pub fn new(ctx: &mut KernelContext<'_>, params: Params, logits: &BufferSlice) -> Result<Penalties, GpuError> {
        let params = params.push(ctx)?;
        let kernel = ctx.gpu.kernel("penalties", &defines())?;
        let bindings = [("step_meta", ctx.step_meta), ("logits", logits), ("params", &params)];
        Ok(Penalties(ctx.gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("penalties", &self.0, num_logits);
    }
}
