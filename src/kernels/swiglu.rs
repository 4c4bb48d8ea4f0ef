//! `swiglu`: silu(gate) * up (Shazeer, 2020, arXiv 2002.05202) from the fused product of both, as f32 or quantised.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{KernelContext, RowOutput};
use super::{Class, GROUP, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of swiglu.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub k: u32,
    pub x_stride: u32,
    pub up_offset: u32,
    pub y_stride: u32,
}

/// The product with its buffers bound.
#[derive(Debug)]
pub struct Swiglu {
    label: String,
    bound: Arc<Bound>,
    groups: u32,
    lanes: u32,
}

/// The defines of one variant.
pub fn defines(class: Class, is_quantised: bool) -> Defines {
    if is_quantised { class.defines().flag("I8") } else { class.defines() }
}

impl Swiglu {
    /// Reads gate at element 0 and up at `up_offset` of rows of `x_stride` elements; both have `k` elements. `k`,
    /// `up_offset` and `x_stride` must be multiples of 4. Writes rows of `stride(k)`.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        x: &BufferSlice,
        (k, up_offset, x_stride): (u32, u32, u32),
        y: RowOutput<'_>,
    ) -> Result<Swiglu, GpuError> {
        if !(k | up_offset | x_stride).is_multiple_of(4) {
            let message = format!("{k}, {up_offset} and {x_stride} are not all multiples of 4");
            return Err(GpuError::Validation { what: label.into(), message });
        }
        let params = ctx.params.push(ctx.gpu, &Params { k, x_stride, up_offset, y_stride: stride(k) })?;
        let kernel = ctx.gpu.kernel("swiglu", &defines(ctx.class, matches!(y, RowOutput::I8(_))))?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("params", &params)];
        bindings.extend(y.bindings());
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(Swiglu { label: label.into(), bound, groups: stride(k) / GROUP, lanes: ctx.class.lanes() })
    }

    /// Records it for `m` tokens.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, (m * self.groups).div_ceil(self.lanes));
    }
}

/// One element.
pub fn reference(gate: f32, up: f32) -> f32 {
    let gate = f64::from(gate);
    (gate / (1.0 + (-gate).exp()) * f64::from(up)) as f32
}
