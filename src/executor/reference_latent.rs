//! Latent attention on the CPU in plain loops: what stands before and after the softmax.

use crate::executor::LoadError;
use crate::executor::reference_executor::{Matrix, matvec, optional, required, rms_norm};
use crate::kernels::kv_layout::KvFormat;
use crate::kernels::latent_write::{self, Shape};
use crate::model::Model;
use crate::model::latent::{LatentPart, LatentSpec};
use crate::model::spec::{ModelSpec, RopePairing, WeightRole};

/// One layer's.
pub(super) struct Latent {
    spec: LatentSpec,
    q_down: Option<Matrix>,
    q_norm: Option<Matrix>,
    q: Matrix,
    kv_down: Matrix,
    kv_norm: Matrix,
    k_up: Vec<Matrix>,
    v_up: Vec<Matrix>,
}

impl Latent {
    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Matrix> {
        self.q_down.iter_mut().chain([&mut self.q, &mut self.kv_down])
    }

    /// `None` where attention is not latent.
    pub(super) fn load(model: &Model, l: u32) -> Result<Option<Latent>, LoadError> {
        let Some(spec) = model.spec().block.latent else { return Ok(None) };
        let role = |part| WeightRole::Latent(l, part);
        let of_heads = |part: fn(u32) -> LatentPart| -> Result<Vec<Matrix>, LoadError> {
            (0..model.spec().num_heads).map(|h| required(model, role(part(h)))).collect()
        };
        let q_down = optional(model, role(LatentPart::QDown))?;
        let q = if q_down.is_some() { role(LatentPart::QUp) } else { WeightRole::Q(l) };
        Ok(Some(Latent {
            spec,
            q_down,
            q_norm: optional(model, role(LatentPart::QNorm))?,
            q: required(model, q)?,
            kv_down: required(model, role(LatentPart::KvDown))?,
            kv_norm: required(model, role(LatentPart::KvNorm))?,
            k_up: of_heads(LatentPart::KUp)?,
            v_up: of_heads(LatentPart::VUp)?,
        }))
    }

    /// Queries in the space of the cache's rows, and the row of one token. `x` is normed; `angles` are of its position.
    pub(super) fn inputs(&self, model: &ModelSpec, x: &[f32], angles: &[[f32; 2]]) -> (Vec<f32>, Vec<f32>) {
        let LatentSpec { kv_rank, nope_dim, rope_dim, .. } = self.spec;
        let interleaved = model.rope.pairing == RopePairing::Interleaved;
        let (num_heads, kv) = (model.num_heads, KvFormat::F32);
        let shape = Shape { num_heads, rank: kv_rank, rope_dim, nope_dim, interleaved, kv };
        let raw_q = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(gain)) => {
                matvec(&self.q, &rms_norm(&matvec(down, x, None), &gain.data, model.rms_eps), None)
            }
            _ => matvec(&self.q, x, None),
        };
        let heads = raw_q.chunks_exact(self.spec.q_dim() as usize).zip(&self.k_up);
        let q = heads.flat_map(|(head, k_up)| {
            let (nope, rotary) = head.split_at(nope_dim as usize);
            let mut q = matvec(k_up, nope, None);
            q.extend(latent_write::turned(rotary, angles, interleaved));
            q
        });
        let raw_kv = matvec(&self.kv_down, x, None);
        (q.collect(), latent_write::reference(&shape, &self.kv_norm.data, &raw_kv, angles, model.rms_eps))
    }

    /// Values of all heads from what each attended to.
    pub(super) fn values(&self, model: &ModelSpec, attended: &[f32]) -> Vec<f32> {
        let heads = attended.chunks_exact(model.head_dim as usize).zip(&self.v_up);
        heads.flat_map(|(head, v_up)| matvec(v_up, &head[..self.spec.kv_rank as usize], None)).collect()
    }
}
