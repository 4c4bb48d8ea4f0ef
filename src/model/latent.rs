//! Latent attention (MLA: DeepSeek, 2024, arXiv 2405.04434) as a spec: keys and values of all heads are read out of one
//! compressed row for each token, which is what the cache holds.

use super::spec::ModelSpec;
use serde::{Deserialize, Serialize};

/// Dims of the projections. `num_kv_heads` of such a model is 1 and `head_dim` that of a row of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentSpec {
    /// Dims through which queries pass; 0 where they are projected at once.
    pub q_rank: u32,
    /// Dims of the latent.
    pub kv_rank: u32,
    /// Dims of a query head that do not rotate.
    pub nope_dim: u32,
    /// Dims that rotate, of each query head and of the key that all heads share.
    pub rope_dim: u32,
    /// Dims of a value head.
    pub v_dim: u32,
}

/// Tensors of such a layer beside those that other families have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LatentPart {
    QDown,
    QNorm,
    QUp,
    KvDown,
    KvNorm,
    /// `[kv_rank, nope_dim]` of a head: from its queries to latent ones.
    KUp(u32),
    /// `[v_dim, kv_rank]` of a head: from what it attended to values.
    VUp(u32),
}

impl LatentSpec {
    /// Dims of a query head.
    pub fn q_dim(&self) -> u32 {
        self.nope_dim + self.rope_dim
    }

    /// Dims of a row of the cache.
    pub fn row_dim(&self) -> u32 {
        self.kv_rank + self.rope_dim
    }

    /// Checks ranges; the message names the field and the value.
    pub(super) fn validate(&self, num_heads: u32) -> Result<(), String> {
        let ranges = [
            ("kv_lora_rank", self.kv_rank, 1, 960),
            ("qk_nope_head_dim", self.nope_dim, 1, 1024),
            ("qk_rope_head_dim", self.rope_dim, 2, 64),
            ("v_head_dim", self.v_dim, 1, 1024),
            ("q_lora_rank", self.q_rank, 0, 1 << 20),
        ];
        for (what, value, min, max) in ranges {
            if value < min || value > max {
                return Err(format!("{what} must be from {min} to {max}, not {value}"));
            }
        }
        // Rows of heads are read as rows of a matrix, in groups of 32 and without gaps.
        if !self.kv_rank.is_multiple_of(32) || !self.nope_dim.is_multiple_of(32) || !self.rope_dim.is_multiple_of(8) {
            let LatentSpec { kv_rank, nope_dim, rope_dim, .. } = self;
            return Err(format!(
                "kv_lora_rank {kv_rank} and qk_nope_head_dim {nope_dim} must be multiples of 32, qk_rope_head_dim \
                 {rope_dim} of 8"
            ));
        }
        for (what, dim) in
            [("a latent row", self.row_dim()), ("a value head", self.v_dim), ("a query head", self.q_dim())]
        {
            if !(num_heads * dim).is_multiple_of(32) {
                return Err(format!("{num_heads} heads with {dim} dims of {what} must be a multiple of 32"));
            }
        }
        Ok(())
    }
}

impl LatentPart {
    /// The parts of a layer of so many heads.
    pub fn all(num_heads: u32) -> impl Iterator<Item = LatentPart> {
        use LatentPart::*;
        let heads = (0..num_heads).flat_map(|h| [KUp(h), VUp(h)]);
        [QDown, QNorm, QUp, KvDown, KvNorm].into_iter().chain(heads)
    }

    pub fn is_vector(self) -> bool {
        matches!(self, LatentPart::QNorm | LatentPart::KvNorm)
    }

    /// As [`super::spec::WeightRole::shape`].
    pub(super) fn shape(self, spec: &ModelSpec, latent: &LatentSpec) -> (bool, Vec<u64>) {
        let [hidden, q_rank, kv_rank, nope, v] =
            [spec.hidden_size, latent.q_rank, latent.kv_rank, latent.nope_dim, latent.v_dim].map(u64::from);
        let q = u64::from(spec.num_heads) * u64::from(latent.q_dim());
        match self {
            LatentPart::QDown => (q_rank > 0, vec![q_rank, hidden]),
            LatentPart::QNorm => (q_rank > 0, vec![q_rank]),
            LatentPart::QUp => (q_rank > 0, vec![q, q_rank]),
            LatentPart::KvDown => (true, vec![kv_rank + u64::from(latent.rope_dim), hidden]),
            LatentPart::KvNorm => (true, vec![kv_rank]),
            LatentPart::KUp(h) => (h < spec.num_heads, vec![kv_rank, nope]),
            LatentPart::VUp(h) => (h < spec.num_heads, vec![v, kv_rank]),
        }
    }
}
