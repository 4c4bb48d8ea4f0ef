//! `heads_norm`: norms of q and k that are no RMSNorm of single heads with one gain: RMSNorm over all heads together (olmo2)
//! or LayerNorm over each head (cohere, phi). In place, before rope. RMSNorms of single heads with one gain are part of
//! [`super::rope_kv_write`].

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Class, KernelContext};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of heads_norm.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub q_len: u32,
    pub k_len: u32,
    pub num_q: u32,
    pub num_segments: u32,
    pub stride: u32,
    pub eps: f32,
}

/// What is normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// LayerNorm of each head; else RMSNorm of all heads of q, and of all of k.
    pub is_layer_per_head: bool,
}

impl Shape {
    fn params(&self, stride: u32, eps: f32) -> Params {
        let (q, k) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let (q_len, k_len) = if self.is_layer_per_head { (self.head_dim, self.head_dim) } else { (q, k) };
        Params { q_len, k_len, num_q: q / q_len, num_segments: q / q_len + k / k_len, stride, eps }
    }
}

/// The defines of one variant.
pub fn defines(class: Class, is_layer_per_head: bool) -> Defines {
    if is_layer_per_head { class.defines().flag("LAYER") } else { class.defines() }
}

/// The kernel with its buffers.
#[derive(Clone, Debug)]
pub struct HeadsNorm {
    bound: Arc<Bound>,
    num_segments: u32,
}

impl HeadsNorm {
    /// `qkv` is f32 `[num_tokens, stride]`: q heads, k heads, v heads. `gains` has one for each element of q, then of k; with
    /// LayerNorm then as many biases.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        shape: &Shape,
        (stride, eps): (u32, f32),
        gains: &BufferSlice,
        qkv: &BufferSlice,
    ) -> Result<HeadsNorm, GpuError> {
        let params = shape.params(stride, eps);
        let uniform = ctx.params.push(ctx.gpu, &params)?;
        let kernel = ctx.gpu.kernel("heads_norm", &defines(ctx.class, shape.is_layer_per_head))?;
        let bindings = [("step_meta", ctx.step_meta), ("gains", gains), ("qkv", qkv), ("params", &uniform)];
        Ok(HeadsNorm { bound: ctx.gpu.bind(&kernel, &bindings)?, num_segments: params.num_segments })
    }

    /// Records it for `num_tokens` rows.
    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("q and k norm", &self.bound, num_tokens * self.num_segments);
    }
}

/// One row of q, k and v (padded or not) with q and k normalised, in f64.
pub fn reference(shape: &Shape, gains: &[f32], row: &[f32], eps: f32) -> Vec<f32> {
    let params = shape.params(row.len() as u32, eps);
    let mut out = row.to_vec();
    let (mut from, width) = (0, gains.len() / 2);
    for segment in 0..params.num_segments {
        let len = if segment < params.num_q { params.q_len } else { params.k_len } as usize;
        let x = &row[from..from + len];
        let mean = match shape.is_layer_per_head {
            true => x.iter().map(|v| f64::from(*v)).sum::<f64>() / len as f64,
            false => 0.0,
        };
        let square = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / len as f64;
        let scale = 1.0 / (square + f64::from(eps)).sqrt();
        for i in 0..len {
            let bias = if shape.is_layer_per_head { f64::from(gains[width + from + i]) } else { 0.0 };
            out[from + i] = ((f64::from(x[i]) - mean) * scale * f64::from(gains[from + i]) + bias) as f32;
        }
        from += len;
    }
    out
}
