//! `penalties`: logits changed in place by what came before and by the bias lists of the step's metadata. The reference
//! is [`crate::sampling::reference::apply_penalties`].

use std::sync::Arc;

use super::sample::{Params, workgroup_size};
use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// The defines of one variant.
pub fn defines(class: Class) -> Defines {
    Defines::new().set("WG", i64::from(workgroup_size(class)))
}

/// The kernel with its buffers. Record it only when the batch has penalties or biases.
#[derive(Clone, Debug)]
pub struct Penalties(Arc<Bound>);

impl Penalties {
    /// `logits` is f32 `[num_logits, stride]`.
    pub fn new(ctx: &mut KernelContext<'_>, params: Params, logits: &BufferSlice) -> Result<Penalties, GpuError> {
        let params = params.push(ctx)?;
        let kernel = ctx.gpu.kernel("penalties", &defines(ctx.class))?;
        let bindings = [("step_meta", ctx.step_meta), ("logits", logits), ("params", &params)];
        Ok(Penalties(ctx.gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("penalties", &self.0, num_logits);
    }
}
