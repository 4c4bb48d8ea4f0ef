//! `quantise`: f32 rows to signed bytes with a scale for each group of 32.
//!
//! Guarantees: |x - scale * q| <= scale / 2 up to rounding of the division; zeros stay zero.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::GROUP;
use super::context::{KernelContext, QuantisedRows, RowOutput};
use crate::gpu::{Bound, BufferSlice, GpuError, Recording};

/// Mirrors `Params` of quantise.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub stride: u32,
}

/// The kernel with its buffers bound.
#[derive(Debug)]
pub struct Quantise {
    label: String,
    bound: Arc<Bound>,
    groups: u32,
    lanes: u32,
}

impl Quantise {
    /// Quantises rows of `stride` elements, a multiple of 32.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        x: &BufferSlice,
        stride: u32,
        y: &QuantisedRows,
    ) -> Result<Quantise, GpuError> {
        let params = ctx.params.push(ctx.gpu, &Params { stride })?;
        let kernel = ctx.gpu.kernel("quantise", &ctx.class.defines())?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("params", &params)];
        bindings.extend(RowOutput::I8(y).bindings());
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(Quantise { label: label.into(), bound, groups: stride / GROUP, lanes: ctx.class.lanes() })
    }

    /// Records it for `m` tokens.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, (m * self.groups).div_ceil(self.lanes));
    }
}

/// One group of 32: bytes and (scale, scale * sum).
pub fn reference(x: &[f32]) -> (Vec<i8>, [f32; 2]) {
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let inverse = if largest > 1.2e-38 { 127.0 / largest } else { 0.0 };
    let q: Vec<i8> = x.iter().map(|v| (v * inverse).round_ties_even() as i8).collect();
    let scale = largest / 127.0;
    let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
    (q, [scale, scale * sum as f32])
}
