//! `swiglu`: the gated activation of llama's feed-forward block (Shazeer, arXiv 2002.05202).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::activation::{Activation, Forms};
use super::{Class, GROUP, ParamArena, stride};
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

/// Mirrors `Params` of swiglu.wgsl and quantize.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Params {
    pub groups: u32,
}

pub(super) fn lanes(class: Class) -> u32 {
    match class {
        Class::Subgroup(lanes) => lanes,
        Class::Floor => 64,
    }
}

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class, forms: Forms) -> (&'static str, Defines) {
    ("swiglu", forms.defines(Defines::new().set("WG", i64::from(lanes(class)))))
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct Swiglu {
    bound: Arc<Bound>,
    groups: u32,
    lanes: u32,
}

impl Swiglu {
    /// `gate_up` is f32 `[num_tokens, 2, stride(size)]`, padding zero; `out` has rows of `size`.
    pub fn new(
        gpu: &Gpu,
        class: Class,
        arena: &mut ParamArena,
        size: u32,
        step_meta: &BufferSlice,
        gate_up: &BufferSlice,
        out: &Activation,
    ) -> Result<Swiglu, GpuError> {
        let groups = stride(size) / GROUP;
        let params = arena.push(gpu, &Params { groups })?;
        let (name, defines) = kernel(class, out.forms());
        let outputs = out.outputs();
        let mut bindings = vec![("step_meta", step_meta), ("gate_up", gate_up), ("params", &params)];
        bindings.extend(outputs.iter().map(|(name, slice)| (*name, slice)));
        Ok(Swiglu { bound: gpu.bind(&gpu.kernel(name, &defines)?, &bindings)?, groups, lanes: lanes(class) })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("swiglu", &self.bound, (num_tokens * self.groups).div_ceil(self.lanes));
    }
}

/// One row in f64.
pub fn reference(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter()
        .zip(up)
        .map(|(&g, &u)| {
            let g = f64::from(g);
            (g / (1.0 + (-g).exp()) * f64::from(u)) as f32
        })
        .collect()
}
