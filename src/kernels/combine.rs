//! `combine`: what experts computed joins the hidden state, weighted by their shares, in the order in which a token chose
//! them; with the expert that all tokens pass, where there is one.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of combine.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_active: u32,
    /// Of y, parts and shared; a multiple of 4.
    pub stride: u32,
    pub scale: f32,
    pub logits_stride: u32,
    /// Element of a row of logits that mixes the shared expert in.
    pub mix_at: u32,
}

/// What [`Combine::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// f32 `[num_tokens, num_active]`
    pub shares: &'a BufferSlice,
    /// f32 `[num_tokens, num_active, stride]`
    pub parts: &'a BufferSlice,
    /// f32 `[num_tokens, stride]`
    pub shared: Option<&'a BufferSlice>,
    /// f32 `[num_tokens, logits_stride]`, where the shared expert has a gate.
    pub mix_logits: Option<&'a BufferSlice>,
    /// f32 `[num_tokens, stride]`, added to.
    pub y: &'a BufferSlice,
}

/// The defines of one variant.
pub fn defines(class: Class, has_shared: bool, has_mix: bool) -> Defines {
    let flags = [("SHARED", has_shared), ("MIX", has_shared && has_mix)];
    flags.iter().filter(|f| f.1).fold(class.defines(), |defines, flag| defines.flag(flag.0))
}

/// The kernel with one layer's buffers.
#[derive(Clone, Debug)]
pub struct Combine {
    bound: Arc<Bound>,
    quads: u32,
    lanes: u32,
}

impl Combine {
    pub fn new(ctx: &mut KernelContext<'_>, params: Params, buffers: &Buffers<'_>) -> Result<Combine, GpuError> {
        let uniform = ctx.params.push(ctx.gpu, &params)?;
        let defines = defines(ctx.class, buffers.shared.is_some(), buffers.mix_logits.is_some());
        let kernel = ctx.gpu.kernel("combine", &defines)?;
        let mut bindings = vec![
            ("step_meta", ctx.step_meta),
            ("shares", buffers.shares),
            ("parts", buffers.parts),
            ("y", buffers.y),
            ("params", &uniform),
        ];
        bindings.extend(buffers.shared.map(|shared| ("shared_part", shared)));
        bindings.extend(buffers.mix_logits.filter(|_| buffers.shared.is_some()).map(|logits| ("logits", logits)));
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(Combine { bound, quads: params.stride / 4, lanes: ctx.class.lanes() })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("combine", &self.bound, (num_tokens * self.quads).div_ceil(self.lanes));
    }
}

/// What is added to one row of y, in f64. `parts` are `[num_active, n]`; `shared` with what multiplies it.
pub fn reference(shares: &[f32], parts: &[f32], shared: Option<(&[f32], f64)>, scale: f32) -> Vec<f32> {
    let n = parts.len() / shares.len();
    (0..n)
        .map(|i| {
            let sum: f64 = shares.iter().enumerate().map(|(e, s)| f64::from(*s) * f64::from(parts[e * n + i])).sum();
            let shared = shared.map_or(0.0, |(shared, mix)| f64::from(shared[i]) * mix);
            (f64::from(scale) * (sum + shared)) as f32
        })
        .collect()
}
