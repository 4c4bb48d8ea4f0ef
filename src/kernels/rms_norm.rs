//! `rms_norm`: root mean square layer normalisation (Zhang and Sennrich, arXiv 1910.07467), for every token or, before
//! the head, for the tokens whose logits are wanted. Writes the forms that its readers need.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::activation::{Activation, Forms};
use super::{Class, GROUP, ParamArena, stride};
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

/// Mirrors `Params` of rms_norm.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub size: u32,
    pub groups: u32,
    pub eps: f32,
}

/// Which rows are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Row r of the result is token r.
    Tokens,
    /// Row r of the result is the token of logit row r.
    Logits,
}

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class, forms: Forms, rows: Rows) -> (&'static str, Defines) {
    let defines = match class {
        Class::Subgroup(lanes) => Defines::new().flag("SUBGROUP").set("WG", i64::from(lanes)),
        Class::Floor => Defines::new().set("WG", 64),
    };
    let defines = forms.defines(defines);
    ("rms_norm", if rows == Rows::Logits { defines.flag("GATHER") } else { defines })
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct RmsNorm(Arc<Bound>);

/// What [`RmsNorm::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    pub step_meta: &'a BufferSlice,
    /// f32 `[num_tokens, stride(size)]`, padding zero.
    pub x: &'a BufferSlice,
    /// f32 `[stride(size)]`, padding zero.
    pub gain: &'a BufferSlice,
    pub out: &'a Activation,
}

impl RmsNorm {
    pub fn new(
        gpu: &Gpu,
        class: Class,
        arena: &mut ParamArena,
        (size, eps, rows): (u32, f32, Rows),
        buffers: &Buffers<'_>,
    ) -> Result<RmsNorm, GpuError> {
        let params = arena.push(gpu, &Params { size, groups: stride(size) / GROUP, eps })?;
        let (name, defines) = kernel(class, buffers.out.forms(), rows);
        let outputs = buffers.out.outputs();
        let mut bindings =
            vec![("step_meta", buffers.step_meta), ("x", buffers.x), ("gain", buffers.gain), ("params", &params)];
        bindings.extend(outputs.iter().map(|(name, slice)| (*name, slice)));
        Ok(RmsNorm(gpu.bind(&gpu.kernel(name, &defines)?, &bindings)?))
    }

    /// `num_rows` counts tokens or logit rows, as the kernel was made for.
    pub fn record(&self, recording: &mut Recording, num_rows: u32) {
        recording.dispatch("rms_norm", &self.0, num_rows);
    }
}

/// One row, accumulated in f64.
pub fn reference(x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(gain).map(|(&v, &g)| (f64::from(v) * inverse * f64::from(g)) as f32).collect()
}
