//! `penalties`: logits changed in place by what came before and by the bias lists of the step's metadata. The reference
//! is [`crate::sampling::reference::apply_penalties`].

use std::sync::Arc;

use super::Class;
use super::sample::workgroup_size;
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class) -> (&'static str, Defines) {
    ("penalties", Defines::new().set("WG", i64::from(workgroup_size(class))))
}

/// The kernel with its buffers. Record it only when the batch has penalties or biases.
#[derive(Clone, Debug)]
pub struct Penalties(Arc<Bound>);

impl Penalties {
    /// `logits` is f32 `[num_logits, stride]`; `params` holds [`super::sample::Params`].
    pub fn new(
        gpu: &Gpu,
        class: Class,
        step_meta: &BufferSlice,
        logits: &BufferSlice,
        params: &BufferSlice,
    ) -> Result<Penalties, GpuError> {
        let (name, defines) = kernel(class);
        let kernel = gpu.kernel(name, &defines)?;
        let bindings = [("step_meta", step_meta), ("logits", logits), ("params", params)];
        Ok(Penalties(gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("penalties", &self.0, num_logits);
    }
}
