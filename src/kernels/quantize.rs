//! `quantize`: f32 activations to signed bytes with a scale for each 32, where no producer does it in its epilogue.
//! The reference is [`super::activation::quantise_reference`].

use std::sync::Arc;

use super::swiglu::{Params, lanes};
use super::{Class, GROUP, ParamArena, stride};
use crate::gpu::{Bound, Buffer, BufferSlice, Defines, Gpu, GpuError, Recording};

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class) -> (&'static str, Defines) {
    ("quantize", Defines::new().set("WG", i64::from(lanes(class))))
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct Quantize {
    bound: Arc<Bound>,
    groups: u32,
    lanes: u32,
}

impl Quantize {
    /// `x` is f32 `[num_tokens, stride(size)]`, padding zero; `out` is bytes and (scale, scale * sum) of the same rows.
    pub fn new(
        gpu: &Gpu,
        class: Class,
        arena: &mut ParamArena,
        size: u32,
        step_meta: &BufferSlice,
        x: &BufferSlice,
        out: &(Buffer, Buffer),
    ) -> Result<Quantize, GpuError> {
        let groups = stride(size) / GROUP;
        let params = arena.push(gpu, &Params { groups })?;
        let (name, defines) = kernel(class);
        let (q, s) = (out.0.whole(), out.1.whole());
        let bindings = [("step_meta", step_meta), ("x", x), ("yq", &q), ("ys", &s), ("params", &params)];
        Ok(Quantize { bound: gpu.bind(&gpu.kernel(name, &defines)?, &bindings)?, groups, lanes: lanes(class) })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("quantize", &self.bound, (num_tokens * self.groups).div_ceil(self.lanes));
    }
}
