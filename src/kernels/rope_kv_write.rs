//! `rope_kv_write`: from the fused QKV projection to attention's inputs. RMSNorm of q and k heads (qwen3), rotary
//! embedding (RoFormer, arXiv 2104.09864), q scaled for a base-2 softmax, K and V into their slots of the paged cache.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::kv_layout::{KvFormat, KvLayout, padded_head_dim};
use super::{Class, KernelContext, stride};
use crate::batch::StepBatch;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of rope_kv_write.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_heads: u32,
    pub num_kv_heads: u32,
    pub qkv_stride: u32,
    pub q_stride: u32,
    pub q_scale: f32,
    pub rms_eps: f32,
    /// The layer group whose slots are written.
    pub group: u32,
}

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// Even.
    pub head_dim: u32,
    /// Leading dims that turn: even, and a multiple of 4 unless `interleaved`.
    pub rotary_dim: u32,
    /// Pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    pub interleaved: bool,
    /// RMSNorm over each q and k head first.
    pub qk_norm: bool,
    pub kv: KvFormat,
}

/// log2(e) times what multiplies q·k: attention's softmax is in base 2.
pub fn q_scale(attention_scale: f64) -> f32 {
    (std::f64::consts::LOG2_E * attention_scale) as f32
}

impl Shape {
    /// Elements of a row of the fused projection: q heads, k heads, v heads, padded.
    pub fn qkv_stride(&self) -> u32 {
        stride((self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
    }

    /// Elements of a row of q: heads of [`padded_head_dim`] dims, padded.
    pub fn q_stride(&self) -> u32 {
        stride(self.num_heads * padded_head_dim(self.head_dim))
    }

    /// `attention_scale` multiplies q·k: 1 / sqrt(head dim) in most models.
    pub fn params(&self, rms_eps: f32, attention_scale: f64, group: u32) -> Params {
        Params {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            qkv_stride: self.qkv_stride(),
            q_stride: self.q_stride(),
            q_scale: q_scale(attention_scale),
            rms_eps,
            group,
        }
    }

    /// The defines of this shape.
    ///
    /// Panics on a head or rotary dim that the kernel cannot pair; model specs are validated before.
    pub fn defines(&self, class: Class) -> Defines {
        assert!(self.head_dim.is_multiple_of(2), "head dim {} is odd", self.head_dim);
        let step = if self.interleaved { 2 } else { 4 };
        assert!(
            self.rotary_dim.is_multiple_of(step) && self.rotary_dim <= self.head_dim && self.rotary_dim > 0,
            "rotary dim {} of head dim {}",
            self.rotary_dim,
            self.head_dim
        );
        let mut defines = Defines::new()
            .set("WG", i64::from(class.lanes()))
            .set("D", i64::from(self.head_dim))
            .set("DP", i64::from(padded_head_dim(self.head_dim)))
            .set("ROT", i64::from(self.rotary_dim));
        if self.interleaved {
            defines = defines.flag("INTERLEAVED");
        }
        if self.qk_norm {
            defines = defines.flag("QK_NORM");
        }
        match self.kv.flag() {
            Some(flag) => defines.flag(flag),
            None => defines,
        }
    }
}

impl Shape {
    /// The defines of this shape with a cache that is a line of texels.
    pub fn texel_defines(&self, class: Class) -> Defines {
        self.defines(class).flag("KV_TEXELS")
    }
}

/// What [`RopeKvWrite::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// f32 `[num_tokens, qkv_stride]`
    pub qkv: &'a BufferSlice,
    /// f32 pairs `[max_position, rotary_dim / 2]`, see [`rope_table`].
    pub rope: &'a BufferSlice,
    /// f32 `[2, head_dim]`: gains of the q norm, then of the k norm; given exactly when the shape has `qk_norm`.
    pub gains: Option<&'a BufferSlice>,
    /// f32 `[num_tokens, q_stride]`, written.
    pub q: &'a BufferSlice,
    /// See [`KvLayout`], written; both are texels or neither is.
    pub k_cache: &'a BufferSlice,
    pub v_cache: &'a BufferSlice,
}

/// The kernel with one layer's buffers.
#[derive(Clone, Debug)]
pub struct RopeKvWrite {
    label: String,
    bound: Arc<Bound>,
    heads: u32,
    lanes: u32,
}

impl RopeKvWrite {
    /// `attention_scale` multiplies q·k: 1 / sqrt(head dim) in most models.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        shape: &Shape,
        ((rms_eps, attention_scale), group): ((f32, f64), u32),
        buffers: &Buffers<'_>,
    ) -> Result<RopeKvWrite, GpuError> {
        let has_texels = buffers.k_cache.buffer.is_texels();
        let defines = if has_texels { shape.texel_defines(ctx.class) } else { shape.defines(ctx.class) };
        let kernel = ctx.gpu.kernel("rope_kv_write", &defines)?;
        let params = ctx.params.push(ctx.gpu, &shape.params(rms_eps, attention_scale, group))?;
        let mut bindings = vec![
            ("step_meta", ctx.step_meta),
            ("qkv", buffers.qkv),
            ("rope", buffers.rope),
            ("q", buffers.q),
            ("k_cache", buffers.k_cache),
            ("v_cache", buffers.v_cache),
            ("params", &params),
        ];
        bindings.extend(buffers.gains.map(|gains| ("gains", gains)));
        Ok(RopeKvWrite {
            label: label.into(),
            bound: ctx.gpu.bind(&kernel, &bindings)?,
            heads: shape.num_heads + 2 * shape.num_kv_heads,
            lanes: ctx.class.lanes(),
        })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch(self.label.clone(), &self.bound, (num_tokens * self.heads).div_ceil(self.lanes));
    }
}

/// Cosines and sines side by side, as the kernel reads them: `[max_position][rotary_dim / 2]` pairs.
pub fn rope_table(cos: &[f32], sin: &[f32]) -> Vec<[f32; 2]> {
    assert_eq!(cos.len(), sin.len());
    cos.iter().zip(sin).map(|(&c, &s)| [c, s]).collect()
}

/// What the kernel computes, in f64 but for what is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[num_tokens, q_stride]`
    pub q: Vec<f32>,
    /// Values to be cached, before they become f16: `[num_tokens, num_kv_heads, head_dim]`
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// `gains` is `[2, head_dim]`, read when the shape has `qk_norm`.
pub fn reference(
    shape: &Shape,
    batch: &StepBatch,
    qkv: &[f32],
    rope: &[[f32; 2]],
    gains: &[f32],
    (rms_eps, attention_scale): (f32, f64),
) -> Reference {
    let dim = shape.head_dim as usize;
    let padded = padded_head_dim(shape.head_dim) as usize;
    let (num_heads, num_kv) = (shape.num_heads as usize, shape.num_kv_heads as usize);
    let mut out = Reference { q: vec![0.0; batch.num_tokens() * shape.q_stride() as usize], k: vec![], v: vec![] };
    for token in 0..batch.num_tokens() {
        let angles = &rope[batch.positions[token] as usize * shape.rotary_dim as usize / 2..];
        let head = |idx: usize| &qkv[token * shape.qkv_stride() as usize + idx * dim..][..dim];
        let turned = |idx: usize, gain_row: usize| {
            let mut x: Vec<f64> = head(idx).iter().map(|&v| f64::from(v)).collect();
            if shape.qk_norm {
                normalise(&mut x, &gains[gain_row * dim..][..dim], rms_eps);
            }
            turn(&mut x, angles, shape);
            x
        };
        for h in 0..num_heads {
            let at = token * shape.q_stride() as usize + h * padded;
            for (to, x) in out.q[at..].iter_mut().zip(turned(h, 0)) {
                *to = (x * f64::from(q_scale(attention_scale))) as f32;
            }
        }
        for h in 0..num_kv {
            out.k.extend(turned(num_heads + h, 1).iter().map(|&x| x as f32));
            out.v.extend(head(num_heads + num_kv + h));
        }
    }
    out
}

fn normalise(x: &mut [f64], gains: &[f32], rms_eps: f32) {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(rms_eps)).sqrt();
    for (v, &gain) in x.iter_mut().zip(gains) {
        *v *= scale * f64::from(gain);
    }
}

fn turn(x: &mut [f64], angles: &[[f32; 2]], shape: &Shape) {
    let half = shape.rotary_dim as usize / 2;
    for (i, &[cos, sin]) in angles.iter().take(half).enumerate() {
        let (a, b) = if shape.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (xa, xb) = (x[a], x[b]);
        x[a] = xa * f64::from(cos) - xb * f64::from(sin);
        x[b] = xb * f64::from(cos) + xa * f64::from(sin);
    }
}

/// The slots and values of a reference as a cache, for tests: writes `k` and `v` into f32 caches of the layout.
pub fn write_reference(layout: &KvLayout, batch: &StepBatch, out: &Reference, k: &mut [f32], v: &mut [f32]) {
    let (dim, heads) = (layout.head_dim as usize, layout.num_kv_heads as usize);
    for token in 0..batch.num_tokens() {
        for h in 0..heads {
            let to = layout.value_idx(batch.kv_slots[token], h as u32);
            let from = (token * heads + h) * dim;
            k[to..to + dim].copy_from_slice(&out.k[from..from + dim]);
            v[to..to + dim].copy_from_slice(&out.v[from..from + dim]);
        }
    }
}
