//! Latent attention around the attention kernel: queries into the space of the cache's rows before, values out of it after.

use super::super::LoadError;
use super::activation::{Activation, Forms};
use super::forward::Builder;
use super::product::Product;
use super::weights::{LatentWeights, ModelWeights};
use crate::gpu::{BufferSlice, BufferUse, Recording, Uploader};
use crate::kernels::context::{Activations, RowCount};
use crate::kernels::expert_matmul::{self, ExpertMatmul};
use crate::kernels::expert_pairs::{ExpertPairs, Layout};
use crate::kernels::kv_layout::padded_head_dim;
use crate::kernels::latent_write::{self, LatentWrite};
use crate::kernels::norm::{Kind, Norm, Target};
use crate::kernels::stride;
use crate::model::latent::LatentSpec;
use crate::model::spec::RopePairing;

/// Bound kernels of one layer.
pub(super) struct Latent {
    /// Where queries pass through a latent of their own.
    q_down: Vec<Product>,
    q_norm: Vec<Norm>,
    projections: Vec<Product>,
    /// Once a step: every token visits every head.
    pairs: Option<ExpertPairs>,
    k_up: ExpertMatmul,
    write: LatentWrite,
    v_up: ExpertMatmul,
}

/// Activations that all layers share.
pub(super) struct LatentScratch {
    layout: Layout,
    heads: BufferSlice,        // u32 [tokens, heads]: 0, 1, …
    work: BufferSlice,         // see expert_pairs
    q_latent: BufferSlice,     // f32 [tokens, stride(q_rank)]
    q_normed: Activation,      // [tokens, q_rank]
    raw_q: BufferSlice,        // f32 [tokens, heads * q_dim]
    raw_kv: BufferSlice,       // f32 [tokens, stride(row_dim)]
    pub attended: BufferSlice, // f32 [tokens, heads * row_dim]
}

impl Latent {
    /// Up to attention.
    pub(super) fn record(&self, recording: &mut Recording, n: u32) {
        self.q_down.iter().for_each(|m| m.record(recording, n));
        self.q_norm.iter().for_each(|k| k.record(recording, n));
        self.projections.iter().for_each(|m| m.record(recording, n));
        self.pairs.iter().for_each(|k| k.record(recording, n));
        self.k_up.record(recording, n);
        self.write.record(recording, n);
    }

    /// From attention on.
    pub(super) fn record_values(&self, recording: &mut Recording, n: u32) {
        self.v_up.record(recording, n);
    }
}

impl LatentWeights {
    /// The matrices that read the normed hidden state.
    pub(super) fn input_forms(&self, b: &Builder<'_>) -> Vec<Forms> {
        let q = if self.q_down.is_some() { &self.q_down } else { &self.q };
        q.iter().chain([&self.kv_down]).map(|p| b.input_forms(&p.matrix)).collect()
    }
}

impl Builder<'_> {
    fn latent_shape(&self, latent: &LatentSpec) -> latent_write::Shape {
        latent_write::Shape {
            num_heads: self.spec.num_heads,
            rank: latent.kv_rank,
            rope_dim: latent.rope_dim,
            nope_dim: latent.nope_dim,
            interleaved: self.spec.rope.pairing == RopePairing::Interleaved,
            kv: self.cfg.kv,
        }
    }

    pub(super) fn latent_scratch(&self, weights: &ModelWeights) -> Result<Option<LatentScratch>, LoadError> {
        let Some(latent) = &self.spec.block.latent else { return Ok(None) };
        let (rows, heads) = (self.cfg.max_tokens_per_step, self.spec.num_heads);
        let layout = Layout { num_experts: heads, num_active: heads, max_tokens: rows };
        let shape = self.latent_shape(latent);
        let alloc = |label: &str, bytes: u64| -> Result<BufferSlice, LoadError> {
            Ok(self.gpu.alloc(label, bytes, BufferUse::Storage)?.whole())
        };
        let list = alloc("heads", u64::from(rows * heads) * 4)?;
        let ids: Vec<u32> = (0..rows * heads).map(|pair| pair % heads).collect();
        let mut uploader = Uploader::new(self.gpu);
        uploader.write(&list, bytemuck::cast_slice(&ids))?;
        uploader.flush()?;
        let up = weights.layers.iter().filter_map(|l| l.latent.as_ref()).filter(|l| l.q_down.is_some());
        let forms = self.forms_of(up.flat_map(|l| &l.q).map(|p| self.input_forms(&p.matrix)));
        let q_rank = latent.q_rank.max(1);
        Ok(Some(LatentScratch {
            layout,
            heads: list,
            work: alloc("head pairs", layout.bytes())?,
            q_latent: self.f32_rows("latent of q", rows, stride(q_rank))?,
            q_normed: Activation::alloc(self.gpu, "normed latent of q", rows, q_rank, forms)?,
            raw_q: self.f32_rows("raw q", rows, shape.raw_q_stride())?,
            raw_kv: self.f32_rows("raw kv", rows, shape.raw_kv_stride())?,
            attended: self.f32_rows("attended latents", rows, stride(heads * shape.row_dim()))?,
        }))
    }

    /// `values` is where attention's output goes on from, f32 `[tokens, heads * v_dim]`.
    #[allow(clippy::too_many_arguments, reason = "one call site, which has each of them at hand")]
    pub(super) fn latent(
        &mut self,
        latent: &LatentSpec,
        is_first: bool,
        weights: &LatentWeights,
        normed: &Activation,
        scratch: &LatentScratch,
        table: &BufferSlice,
        q: &BufferSlice,
        k_cache: &BufferSlice,
        values: &BufferSlice,
    ) -> Result<Latent, LoadError> {
        let shape = self.latent_shape(latent);
        let (q_rank, eps) = (latent.q_rank, self.spec.rms_eps);
        let row = padded_head_dim(shape.row_dim());
        let mut q_norm = Vec::new();
        if let Some(gain) = &weights.q_norm {
            let gain = gain.whole();
            for y in scratch.q_normed.outputs() {
                let (x, kind, y) = (&scratch.q_latent, Kind::Rms { gain: &gain }, Target::Row(y));
                let size = (q_rank, eps);
                q_norm.push(Norm::new(&mut self.context(), "q norm", x, kind, y, size, RowCount::Tokens)?);
            }
        }
        let mut q_down = Vec::new();
        if let Some(part) = &weights.q_down {
            q_down.push(self.matmul(part, normed, (&scratch.q_latent, stride(q_rank)), false)?);
        }
        let mut projections = Vec::new();
        if let Some(part) = &weights.q {
            let x = if weights.q_down.is_some() { &scratch.q_normed } else { normed };
            projections.push(self.matmul(part, x, (&scratch.raw_q, shape.raw_q_stride()), false)?);
        }
        projections.push(self.matmul(&weights.kv_down, normed, (&scratch.raw_kv, shape.raw_kv_stride()), false)?);
        let rows = |y, x_stride, y_stride| expert_matmul::Rows {
            layout: scratch.layout,
            work: &scratch.work,
            pairs_per_row: 1,
            x_stride: Some(x_stride),
            y,
            y_stride,
            y_offset: 0,
        };
        let (to_q, to_values) = (rows(q, latent.q_dim(), row), rows(values, shape.row_dim(), latent.v_dim));
        let gain = weights.kv_norm.whole();
        let buffers = latent_write::Buffers {
            raw_q: &scratch.raw_q,
            raw_kv: &scratch.raw_kv,
            rope: table,
            gain: &gain,
            q,
            k_cache,
        };
        let numbers = (eps, self.spec.attention_scale());
        // What heads read are rows of f32, whatever the weights.
        let (raw_q, attended) = (Activations::F32(&scratch.raw_q), Activations::F32(&scratch.attended));
        let pairs = match is_first {
            true => Some(ExpertPairs::new(&mut self.context(), scratch.layout, &scratch.heads, &scratch.work)?),
            false => None,
        };
        Ok(Latent {
            q_down,
            q_norm,
            projections,
            pairs,
            k_up: ExpertMatmul::new(&mut self.context(), &weights.k_up, raw_q, to_q, None)?,
            write: LatentWrite::new(&mut self.context(), &shape, numbers, &buffers)?,
            v_up: ExpertMatmul::new(&mut self.context(), &weights.v_up, attended, to_values, None)?,
        })
    }
}
