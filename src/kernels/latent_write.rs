//! `latent_write`: from the compressed projections of latent attention (MLA: DeepSeek, 2024, arXiv 2405.04434) to attention's
//! inputs. The cache holds one row for a token, its normalised latent and the rotary key that all heads share; queries are
//! brought into the same space before ([`super::expert_matmul`] with a head's up-projection of keys), so that attention
//! reads keys and values from the one row.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::kv_layout::{KvFormat, padded_head_dim};
use super::rope_kv_write::q_scale;
use super::{Class, KernelContext, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of latent_write.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_heads: u32,
    pub raw_q_stride: u32,
    pub raw_kv_stride: u32,
    pub q_stride: u32,
    pub q_scale: f32,
    pub eps: f32,
}

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub num_heads: u32,
    /// Dims of the latent.
    pub rank: u32,
    /// Dims that rotate, of the shared key and of each query head; even.
    pub rope_dim: u32,
    /// Other dims of a query head.
    pub nope_dim: u32,
    /// Pairs are (2i, 2i + 1) instead of (i, i + rope_dim / 2).
    pub interleaved: bool,
    pub kv: KvFormat,
}

impl Shape {
    /// Dims of a row of the cache.
    pub fn row_dim(&self) -> u32 {
        self.rank + self.rope_dim
    }

    /// Elements of a row of q as attention reads it.
    pub fn q_stride(&self) -> u32 {
        stride(self.num_heads * padded_head_dim(self.row_dim()))
    }

    /// Elements of a row of the queries' projection.
    pub fn raw_q_stride(&self) -> u32 {
        stride(self.num_heads * (self.nope_dim + self.rope_dim))
    }

    /// Elements of a row of the compressed projection.
    pub fn raw_kv_stride(&self) -> u32 {
        stride(self.row_dim())
    }

    pub fn defines(&self, class: Class) -> Defines {
        let mut defines = class
            .defines()
            .set("RANK", i64::from(self.rank))
            .set("ROT", i64::from(self.rope_dim))
            .set("NOPE", i64::from(self.nope_dim))
            .set("DP", i64::from(padded_head_dim(self.row_dim())));
        if self.interleaved {
            defines = defines.flag("INTERLEAVED");
        }
        match self.kv.flag() {
            Some(flag) => defines.flag(flag),
            None => defines,
        }
    }
}

/// What [`LatentWrite::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// f32 `[num_tokens, raw_q_stride]`
    pub raw_q: &'a BufferSlice,
    /// f32 `[num_tokens, raw_kv_stride]`
    pub raw_kv: &'a BufferSlice,
    /// f32 pairs `[max_position, rope_dim / 2]`
    pub rope: &'a BufferSlice,
    /// f32 `[rank]`
    pub gain: &'a BufferSlice,
    /// f32 `[num_tokens, q_stride]`: its heads hold the latent queries, which are scaled in place.
    pub q: &'a BufferSlice,
    /// One key-value head of `row_dim` dims, see [`super::kv_layout::KvLayout`]; written.
    pub k_cache: &'a BufferSlice,
}

/// The kernel with one layer's buffers.
#[derive(Clone, Debug)]
pub struct LatentWrite {
    bound: Arc<Bound>,
    num_items: u32,
}

impl LatentWrite {
    /// `attention_scale` multiplies q·k.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        shape: &Shape,
        (eps, attention_scale): (f32, f64),
        buffers: &Buffers<'_>,
    ) -> Result<LatentWrite, GpuError> {
        let params = Params {
            num_heads: shape.num_heads,
            raw_q_stride: shape.raw_q_stride(),
            raw_kv_stride: shape.raw_kv_stride(),
            q_stride: shape.q_stride(),
            q_scale: q_scale(attention_scale),
            eps,
        };
        let params = ctx.params.push(ctx.gpu, &params)?;
        let kernel = ctx.gpu.kernel("latent_write", &shape.defines(ctx.class))?;
        let bindings = [
            ("step_meta", ctx.step_meta),
            ("raw_q", buffers.raw_q),
            ("raw_kv", buffers.raw_kv),
            ("rope", buffers.rope),
            ("gain", buffers.gain),
            ("q", buffers.q),
            ("k_cache", buffers.k_cache),
            ("params", &params),
        ];
        Ok(LatentWrite { bound: ctx.gpu.bind(&kernel, &bindings)?, num_items: shape.num_heads + 1 })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("latent write", &self.bound, num_tokens * self.num_items);
    }
}

/// One token's row of the cache from its compressed projection (`row_dim` elements), in f64. `angles` are (cos, sin) of its
/// position.
pub fn reference(shape: &Shape, gain: &[f32], raw_kv: &[f32], angles: &[[f32; 2]], eps: f32) -> Vec<f32> {
    let (latent, key) = raw_kv.split_at(shape.rank as usize);
    let mean = latent.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / latent.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    let normed = latent.iter().zip(gain).map(|(v, g)| (f64::from(*v) * scale * f64::from(*g)) as f32);
    normed.chain(turned(key, angles, shape.interleaved)).collect()
}

/// Rotates a part of a head (RoFormer, arXiv 2104.09864).
pub fn turned(x: &[f32], angles: &[[f32; 2]], interleaved: bool) -> Vec<f32> {
    let mut y = x.to_vec();
    for (i, [c, s]) in angles.iter().enumerate() {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + angles.len()) };
        (y[a], y[b]) = (x[a] * c - x[b] * s, x[b] * c + x[a] * s);
    }
    y
}
