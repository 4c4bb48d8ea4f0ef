//! `norm`: RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467) as f32 or quantised, also of the gathered logit rows.
//!
//! Guarantees: a row's result depends on that row alone. Padding of x and gain must be zero; that of the result then is.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{KernelContext, RowCount, RowOutput};
use super::{Class, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of norm.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub k: u32,
    pub stride: u32,
    pub eps: f32,
}

/// A norm with its buffers bound.
#[derive(Debug)]
pub struct Norm {
    label: String,
    bound: Arc<Bound>,
}

/// The defines of one variant.
pub fn defines(class: Class, is_quantised: bool, rows: RowCount) -> Defines {
    let defines = if is_quantised { class.defines().flag("I8") } else { class.defines() };
    if rows == RowCount::Logits { defines.flag("GATHER") } else { defines }
}

impl Norm {
    /// Normalises rows of `k` elements of `x` by `gain` (`stride(k)` elements, zero beyond k). `RowCount::Logits` reads
    /// the tokens whose logits are wanted and writes one row for each.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        x: &BufferSlice,
        gain: &BufferSlice,
        y: RowOutput<'_>,
        (k, eps): (u32, f32),
        rows: RowCount,
    ) -> Result<Norm, GpuError> {
        let params = ctx.params.push(ctx.gpu, &Params { k, stride: stride(k), eps })?;
        let kernel = ctx.gpu.kernel("norm", &defines(ctx.class, matches!(y, RowOutput::I8(_)), rows))?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("gain", gain), ("params", &params)];
        bindings.extend(y.bindings());
        Ok(Norm { label: label.into(), bound: ctx.gpu.bind(&kernel, &bindings)? })
    }

    /// Records it for `m` rows.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, m);
    }
}

/// One row, in f64. `gain` has as many elements as `x`.
pub fn reference(x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(gain).map(|(x, g)| (f64::from(*x) * scale * f64::from(*g)) as f32).collect()
}
