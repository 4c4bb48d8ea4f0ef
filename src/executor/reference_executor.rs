//! The whole model on the CPU in plain loops: what the GPU executor is held against.
//!
//! Guarantees: f32 weights (dequantised by [`crate::model::quant`]), f32 activations, f64 accumulation, K and V in a
//! paged pool read through the block table. It does not attempt to be fast: it is for small models and tests.

use crate::batch::StepBatch;
use crate::executor::host_store::HostStore;
use crate::executor::reference_draw::finish;
use crate::executor::reference_ffn::Ffn;
use crate::executor::reference_latent::Latent;
use crate::executor::reference_lora::{Adapters, adapted};
use crate::executor::{ExecError, Executor, LoadError, StepHandle, StepOutput};
use crate::ids::{BlockId, HostSlot};
use crate::model::groups::LayerGroups;
use crate::model::lora::Adapter;
use crate::model::spec::{ModelSpec, NormKind, QkNorm, Residual, RopePairing, RopeSpec, WeightRole};
use crate::model::{Model, rope};
use crate::protocol::TokenLogprobs;
use crate::sampling::reference;
use std::sync::{Arc, Mutex};

/// Sizes of the pool.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceConfig {
    pub num_blocks: u32,
    pub block_size: u32,
}

/// A row-major f32 matrix `[rows, cols]`, or a vector with one row.
pub(super) struct Matrix {
    pub(super) role: WeightRole,
    rows: usize,
    cols: usize,
    pub(super) data: Vec<f32>,
    /// Sums of squares of each input, while they are watched. [cols]
    seen: Option<Mutex<Vec<f64>>>,
}

/// A norm's gain, and the bias of a LayerNorm that has one.
struct Norm {
    gain: Matrix,
    bias: Option<Matrix>,
}

/// Cosines and sines by position. [num_positions, rotary_dim / 2]
struct RopeTable {
    spec: RopeSpec,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

struct Layer {
    attn_norm: Option<Norm>,
    /// `None` where attention is latent, as K and V.
    q: Option<Matrix>,
    k: Option<Matrix>,
    v: Option<Matrix>,
    latent: Option<Latent>,
    o: Matrix,
    q_bias: Option<Matrix>,
    k_bias: Option<Matrix>,
    v_bias: Option<Matrix>,
    o_bias: Option<Matrix>,
    q_norm: Option<Matrix>,
    k_norm: Option<Matrix>,
    sinks: Option<Matrix>,
    post_attn_norm: Option<Norm>,
    ffn_norm: Option<Norm>,
    post_ffn_norm: Option<Norm>,
    ffn: Ffn,
}

/// Paged K and V of the layers that share them: `[num_blocks * block_size, num_kv_heads * head_dim]`.
struct Pool {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Implements [`Executor`] with plain loops.
pub struct ReferenceExecutor {
    spec: ModelSpec,
    cfg: ReferenceConfig,
    embedding: Matrix,
    positions: Option<Matrix>,
    output_norm: Norm,
    head: Option<Matrix>,
    head_bias: Option<Matrix>,
    layers: Vec<Layer>,
    groups: LayerGroups,
    pools: Vec<Pool>, // [groups.size]
    rope: RopeTable,
    windowed_rope: Option<RopeTable>,
    host: HostStore,
    adapters: Adapters,
    done: Option<StepOutput>,
}

impl ReferenceExecutor {
    /// Dequantises every weight to f32. Fails when the file lacks a tensor the spec asks for.
    pub fn new(model: &Model, cfg: ReferenceConfig) -> Result<Self, LoadError> {
        let spec = model.spec().clone();
        let pool = (cfg.num_blocks * cfg.block_size * spec.num_kv_heads * spec.head_dim) as usize;
        let layers = (0..spec.num_layers).map(|l| load_layer(model, l)).collect::<Result<_, _>>()?;
        let output_norm = norm(model, WeightRole::OutputNorm, Some(WeightRole::OutputNormBias))?;
        let groups = LayerGroups::of(&spec);
        let pools = (0..groups.size).map(|_| Pool { k: vec![0.0; pool], v: vec![0.0; pool] }).collect();
        Ok(ReferenceExecutor {
            embedding: required(model, WeightRole::TokenEmbedding)?,
            positions: optional(model, WeightRole::PositionEmbedding)?,
            output_norm: output_norm.ok_or(LoadError::MissingWeight { role: WeightRole::OutputNorm })?,
            head: optional(model, WeightRole::LmHead)?,
            head_bias: optional(model, WeightRole::HeadBias)?,
            layers,
            groups,
            pools,
            rope: RopeTable::new(&spec.rope, spec.max_position),
            windowed_rope: spec.block.windowed_rope.as_ref().map(|rope| RopeTable::new(rope, spec.max_position)),
            host: HostStore::default(),
            adapters: Adapters::default(),
            done: None,
            cfg,
            spec,
        })
    }

    /// From now on, sums of squares of what each projection of each layer reads are kept.
    pub fn watch_inputs(&mut self) {
        self.projections().for_each(|m| m.seen = Some(Mutex::new(vec![0.0; m.cols])));
    }

    /// The sums so far, by projection. `[inputs]`
    pub fn input_squares(&mut self) -> Vec<(WeightRole, Vec<f64>)> {
        let squares = |m: &mut Matrix| {
            let role = m.role;
            m.seen.as_mut().map(|seen| (role, seen.get_mut().unwrap_or_else(|e| e.into_inner()).clone()))
        };
        self.projections().filter_map(squares).collect()
    }

    fn projections(&mut self) -> impl Iterator<Item = &mut Matrix> {
        self.layers.iter_mut().flat_map(|layer| {
            let attention = [&mut layer.q, &mut layer.k, &mut layer.v].into_iter().flatten();
            let latent = layer.latent.iter_mut().flat_map(Latent::projections);
            attention.chain(latent).chain([&mut layer.o]).chain(layer.ffn.projections())
        })
    }

    /// With so many places for blocks in host memory.
    pub fn with_host_blocks(mut self, num_host_blocks: u32) -> Self {
        self.host = HostStore::new(num_host_blocks, self.kv_bytes_per_block());
        self
    }

    /// Values of K (or V) of one block in one layer.
    fn block_range(&self, block: BlockId) -> std::ops::Range<usize> {
        let values = (self.cfg.block_size * self.spec.num_kv_heads * self.spec.head_dim) as usize;
        block.idx() * values..(block.idx() + 1) * values
    }

    /// Layer by layer K, then V. Content goes out before any comes in.
    fn swap(&mut self, batch: &StepBatch) {
        for t in &batch.swap_out {
            let range = self.block_range(t.block);
            let mut rest = self.host.get_mut(t.host);
            for pool in self.pools.iter().flat_map(|pool| [&pool.k, &pool.v]) {
                let bytes: &[u8] = bytemuck::cast_slice(&pool[range.clone()]);
                let (part, after) = rest.split_at_mut(bytes.len());
                part.copy_from_slice(bytes);
                rest = after;
            }
        }
        for t in &batch.swap_in {
            let range = self.block_range(t.block);
            let mut rest: &[u8] = self.host.get_mut(t.host);
            for pool in self.pools.iter_mut().flat_map(|pool| [&mut pool.k, &mut pool.v]) {
                let to: &mut [u8] = bytemuck::cast_slice_mut(&mut pool[range.clone()]);
                let (part, after) = rest.split_at(to.len());
                to.copy_from_slice(part);
                rest = after;
            }
        }
    }

    fn run(&mut self, batch: &StepBatch) -> StepOutput {
        self.swap(batch);
        self.copy_blocks(batch);
        let (hidden, block) = (self.spec.hidden_size as usize, &self.spec.block);
        let mut x: Vec<f32> = Vec::with_capacity(batch.num_tokens() * hidden);
        for (&id, &position) in batch.input_ids.iter().zip(&batch.positions) {
            x.extend(self.embedding.row(id as usize).iter().map(|v| v * block.embedding_scale));
            if let Some(positions) = &self.positions {
                let at = x.len() - hidden;
                add(&mut x[at..], positions.row(position as usize), 1.0);
            }
        }
        for l in 0..self.layers.len() {
            self.layer(l, batch, &mut x);
        }
        let vocab = self.spec.vocab_size as usize;
        let logits_of = |t: u32| -> Vec<f32> {
            let row = &x[t as usize * hidden..(t as usize + 1) * hidden];
            let normed = self.output_norm.apply(&self.spec, row);
            let row = matvec(self.head.as_ref().unwrap_or(&self.embedding), &normed, self.head_bias.as_ref());
            let capped = row
                .iter()
                .map(|v| soft_cap(f64::from(v * self.spec.block.logit_scale), self.spec.block.logit_softcap) as f32);
            capped.collect()
        };
        let logits: Vec<f32> = batch.logit_tokens.iter().flat_map(|&t| logits_of(t)).collect();
        let scored = batch.scored.iter().map(|s| {
            let logits = logits_of(s.token_idx);
            let row = reference::logprobs(&logits, usize::from(s.num_top));
            let logprob = (f64::from(logits[s.next as usize]) - row.logsumexp) as f32;
            TokenLogprobs { token: s.next, logprob, top: row.top.iter().map(|&(t, p)| (t, p as f32)).collect() }
        });
        let scored = scored.collect();
        let states = |&(first, number): &(u32, u32)| {
            let rows = x[first as usize * hidden..(first + number) as usize * hidden].chunks_exact(hidden);
            rows.flat_map(|row| self.output_norm.apply(&self.spec, row)).collect()
        };
        let hidden = batch.hidden.iter().map(states).collect();
        StepOutput { hidden, scored, ..finish(batch, logits, vocab) }
    }

    fn copy_blocks(&mut self, batch: &StepBatch) {
        let block = (self.cfg.block_size * self.spec.num_kv_heads * self.spec.head_dim) as usize;
        for pool in self.pools.iter_mut().flat_map(|pool| [&mut pool.k, &mut pool.v]) {
            for copy in &batch.copies {
                let from = copy.from as usize * block;
                pool.copy_within(from..from + block, copy.to as usize * block);
            }
        }
    }

    fn layer(&mut self, l: usize, batch: &StepBatch, x: &mut [f32]) {
        let spec = self.spec.clone();
        let (hidden, d) = (spec.hidden_size as usize, spec.head_dim as usize);
        let kv_width = spec.num_kv_heads as usize * d;
        let place = self.groups.layers[l];
        let mut queries = Vec::with_capacity(batch.num_tokens());
        for t in 0..batch.num_tokens() {
            let adapter = self.adapters.of_token(batch, t);
            let (q, k, v) = self.inputs(l, batch.positions[t], &x[t * hidden..(t + 1) * hidden], adapter);
            let at = batch.kv_slot(t, place.group as usize) as usize * kv_width;
            let pool = &mut self.pools[place.buffer as usize];
            pool.k[at..at + kv_width].copy_from_slice(&k);
            pool.v[at..at + kv_width].copy_from_slice(&v);
            queries.push(q);
        }
        for (t, q) in queries.iter().enumerate() {
            let attended = self.attend(l, batch, t, q);
            let (layer, adapter) = (&self.layers[l], self.adapters.of_token(batch, t));
            let row = &mut x[t * hidden..(t + 1) * hidden];
            let before = row.to_vec();
            let attended = layer.latent.as_ref().map_or(attended.clone(), |latent| latent.values(&spec, &attended));
            let attended = adapted(&layer.o, &attended, layer.o_bias.as_ref(), adapter);
            add(row, &normed(&layer.post_attn_norm, &spec, &attended), spec.block.residual_scale);
            let seen = match spec.block.residual {
                Residual::Sequential => normed(&layer.ffn_norm, &spec, row),
                Residual::Parallel => normed(&layer.ffn_norm, &spec, &before),
                Residual::ParallelOneNorm => normed(&layer.attn_norm, &spec, &before),
            };
            let mlp = layer.ffn.apply(&spec, &seen, adapter);
            add(row, &normed(&layer.post_ffn_norm, &spec, &mlp), spec.block.residual_scale);
        }
    }

    /// Q, K and V of one token as attention sees them.
    fn inputs(&self, l: usize, position: u32, x: &[f32], adapter: Option<&Adapter>) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let (layer, spec) = (&self.layers[l], &self.spec);
        if let Some(latent) = &layer.latent {
            let half = spec.rope.rotary_dim as usize / 2;
            let at = position as usize * half;
            let angles: Vec<[f32; 2]> = (at..at + half).map(|i| [self.rope.cos[i], self.rope.sin[i]]).collect();
            let (q, row) = latent.inputs(spec, &normed(&layer.attn_norm, spec, x), &angles);
            return (q, row.clone(), row);
        }
        let (mut q, mut k, v) = layer.project(spec, x, adapter);
        self.rotate(l, position, &mut q);
        self.rotate(l, position, &mut k);
        (q, k, v)
    }

    /// Rotates each head of `heads` in place (RoFormer, arXiv 2104.09864).
    fn rotate(&self, l: usize, position: u32, heads: &mut [f32]) {
        let Some(spec) = self.spec.rope_of(l as u32) else { return };
        let own = self.windowed_rope.as_ref().filter(|table| table.spec == *spec);
        let table = own.unwrap_or(&self.rope);
        let half = spec.rotary_dim as usize / 2;
        let at = position as usize * half;
        for head in heads.chunks_exact_mut(self.spec.head_dim as usize) {
            for i in 0..half {
                let (a, b) = match spec.pairing {
                    RopePairing::Half => (i, i + half),
                    RopePairing::Interleaved => (2 * i, 2 * i + 1),
                };
                let (c, s) = (table.cos[at + i], table.sin[at + i]);
                (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
            }
        }
    }

    /// Softmax attention of one token over its own row's keys, read through the block table.
    fn attend(&self, l: usize, batch: &StepBatch, t: usize, q: &[f32]) -> Vec<f32> {
        let spec = &self.spec;
        let d = spec.head_dim as usize;
        let kv_width = spec.num_kv_heads as usize * d;
        let row = batch.row_of_token[t] as usize;
        let place = self.groups.layers[l];
        let table = batch.table(row, place.group as usize);
        let pool = &self.pools[place.buffer as usize];
        let position = batch.positions[t];
        let first = spec.windows[l].map_or(0, |w| (position + 1).saturating_sub(w));
        let slot = |p: u32| table[(p / self.cfg.block_size) as usize] * self.cfg.block_size + p % self.cfg.block_size;
        let group = (spec.num_heads / spec.num_kv_heads) as usize;
        let mut out = vec![0.0; spec.num_heads as usize * d];
        for h in 0..spec.num_heads as usize {
            let kv = h / group * d;
            let key = |p: u32| &pool.k[slot(p) as usize * kv_width + kv..][..d];
            let value = |p: u32| &pool.v[slot(p) as usize * kv_width + kv..][..d];
            let (scale, cap) = (spec.attention_scale(), spec.block.attention_softcap);
            let score = |p: u32| soft_cap(dot(&q[h * d..(h + 1) * d], key(p)) * scale, cap);
            let scores: Vec<f64> = (first..=position).map(score).collect();
            let sink = self.layers[l].sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks.data[h]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum = weights.iter().sum::<f64>() + (sink - max).exp();
            let mut mixed = vec![0.0; d];
            for (w, p) in weights.iter().zip(first..) {
                mixed.iter_mut().zip(value(p)).for_each(|(m, v)| *m += w * f64::from(*v));
            }
            out[h * d..(h + 1) * d].iter_mut().zip(&mixed).for_each(|(o, m)| *o = (m / sum) as f32);
        }
        out
    }
}

impl Layer {
    /// Q, K and V of one token, normed per head where the model does so; not yet rotated.
    fn project(&self, spec: &ModelSpec, x: &[f32], adapter: Option<&Adapter>) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let normed = normed(&self.attn_norm, spec, x);
        let product = |w: &Option<Matrix>, bias: &Option<Matrix>| {
            w.as_ref().map_or_else(Vec::new, |w| adapted(w, &normed, bias.as_ref(), adapter))
        };
        let (mut q, mut k) = (product(&self.q, &self.q_bias), product(&self.k, &self.k_bias));
        let v = product(&self.v, &self.v_bias);
        for (row, gain) in [(&mut q, &self.q_norm), (&mut k, &self.k_norm)] {
            if let Some(gain) = gain {
                normalise_heads(spec, row, &gain.data);
            }
        }
        (q, k, v)
    }
}

impl Norm {
    fn apply(&self, spec: &ModelSpec, x: &[f32]) -> Vec<f32> {
        match spec.block.norm {
            NormKind::Rms => rms_norm(x, &self.gain.data, spec.rms_eps),
            NormKind::Layer { .. } => {
                let mut y = rms_norm(&centred(x), &self.gain.data, spec.rms_eps);
                if let Some(bias) = &self.bias {
                    add(&mut y, &bias.data, 1.0);
                }
                y
            }
        }
    }
}

impl RopeTable {
    fn new(spec: &RopeSpec, num_positions: u32) -> RopeTable {
        let (cos, sin) = rope::cos_sin_table(spec, num_positions);
        RopeTable { spec: spec.clone(), cos, sin }
    }
}

/// Q or K of one token, normed in place as the spec says.
fn normalise_heads(spec: &ModelSpec, row: &mut [f32], gain: &[f32]) {
    let len = if spec.qk_norm == QkNorm::Width { row.len() } else { spec.head_dim as usize };
    for (i, head) in row.chunks_exact_mut(len).enumerate() {
        let normed = match spec.qk_norm {
            QkNorm::LayerPerHead => rms_norm(&centred(head), &gain[i * len..(i + 1) * len], spec.rms_eps),
            _ => rms_norm(head, gain, spec.rms_eps),
        };
        head.copy_from_slice(&normed);
    }
}

fn centred(x: &[f32]) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / x.len() as f64;
    x.iter().map(|&v| (f64::from(v) - mean) as f32).collect()
}

/// The norm of `x`; `x` itself where the model has none.
fn normed(norm: &Option<Norm>, spec: &ModelSpec, x: &[f32]) -> Vec<f32> {
    norm.as_ref().map_or_else(|| x.to_vec(), |norm| norm.apply(spec, x))
}

fn soft_cap(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

impl Executor for ReferenceExecutor {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        let limit = self.cfg.num_blocks * self.cfg.block_size;
        if let Some(slot) = batch.kv_slots.iter().find(|&&s| s >= limit) {
            return Err(ExecError::Rejected(format!("KV slot {slot} is outside the pool of {limit} slots")));
        }
        batch.check_transfers(self.cfg.num_blocks, self.host.num_slots()).map_err(ExecError::Rejected)?;
        if let Some(copy) = batch.copies.iter().find(|c| c.from.max(c.to) >= self.cfg.num_blocks) {
            let limit = self.cfg.num_blocks;
            return Err(ExecError::Rejected(format!("{copy:?} is outside the pool of {limit} blocks")));
        }
        self.adapters.check(batch).map_err(ExecError::Rejected)?;
        self.done = Some(self.run(batch));
        Ok(StepHandle(batch.step))
    }

    fn wait(&mut self, _handle: StepHandle) -> Result<StepOutput, ExecError> {
        self.done.take().ok_or_else(|| ExecError::Rejected("no step is in flight".into()))
    }

    fn num_blocks(&self) -> u32 {
        self.cfg.num_blocks
    }

    fn block_size(&self) -> u32 {
        self.cfg.block_size
    }

    fn vocab_size(&self) -> u32 {
        self.spec.vocab_size
    }

    fn kv_bytes_per_block(&self) -> u64 {
        let per_token = 2 * 4 * u64::from(self.spec.num_kv_heads * self.spec.head_dim * self.groups.size);
        per_token * u64::from(self.cfg.block_size)
    }

    fn windows(&self) -> Vec<Option<u32>> {
        self.groups.windows.clone()
    }

    fn load_adapter(&mut self, adapter: &Arc<Adapter>) -> Result<(), ExecError> {
        self.adapters.load(adapter);
        Ok(())
    }

    fn unload_adapter(&mut self, adapter: u64) {
        self.adapters.unload(adapter);
    }

    fn num_host_blocks(&self) -> u32 {
        self.host.num_slots()
    }

    fn read_host(&self, slot: HostSlot) -> Option<&[u8]> {
        self.host.get(slot)
    }

    fn write_host(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        self.host.put(slot, bytes)
    }
}

fn load_layer(model: &Model, l: u32) -> Result<Layer, LoadError> {
    Ok(Layer {
        attn_norm: norm(model, WeightRole::AttnNorm(l), Some(WeightRole::AttnNormBias(l)))?,
        q: optional(model, WeightRole::Q(l))?,
        k: optional(model, WeightRole::K(l))?,
        v: optional(model, WeightRole::V(l))?,
        latent: Latent::load(model, l)?,
        o: required(model, WeightRole::O(l))?,
        q_bias: optional(model, WeightRole::QBias(l))?,
        k_bias: optional(model, WeightRole::KBias(l))?,
        v_bias: optional(model, WeightRole::VBias(l))?,
        o_bias: optional(model, WeightRole::OBias(l))?,
        q_norm: optional(model, WeightRole::QNorm(l))?,
        k_norm: optional(model, WeightRole::KNorm(l))?,
        sinks: optional(model, WeightRole::Sinks(l))?,
        post_attn_norm: norm(model, WeightRole::PostAttnNorm(l), None)?,
        ffn_norm: norm(model, WeightRole::FfnNorm(l), Some(WeightRole::FfnNormBias(l)))?,
        post_ffn_norm: norm(model, WeightRole::PostFfnNorm(l), None)?,
        ffn: Ffn::load(model, l)?,
    })
}

/// `None` when the model has no such norm.
fn norm(model: &Model, gain: WeightRole, bias: Option<WeightRole>) -> Result<Option<Norm>, LoadError> {
    let Some(gain) = optional(model, gain)? else { return Ok(None) };
    let bias = bias.map(|role| optional(model, role)).transpose()?.flatten();
    Ok(Some(Norm { gain, bias }))
}

pub(super) fn required(model: &Model, role: WeightRole) -> Result<Matrix, LoadError> {
    optional(model, role)?.ok_or(LoadError::MissingWeight { role })
}

pub(super) fn optional(model: &Model, role: WeightRole) -> Result<Option<Matrix>, LoadError> {
    let Some(view) = model.weight(role)? else { return Ok(None) };
    let cols = *view.shape.last().unwrap_or(&1) as usize;
    let rows = view.shape.iter().product::<u64>() as usize / cols.max(1);
    let data =
        view.to_f32().map_err(|e| LoadError::Unreadable { tensor: view.name.to_string(), fault: e.to_string() })?;
    Ok(Some(Matrix { role, rows, cols, data, seen: None }))
}

impl Matrix {
    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

pub(super) fn matvec(w: &Matrix, x: &[f32], bias: Option<&Matrix>) -> Vec<f32> {
    if let Some(seen) = &w.seen {
        let mut sums = seen.lock().unwrap_or_else(|e| e.into_inner());
        sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
    }
    (0..w.rows).map(|r| (dot(w.row(r), x) + bias.map_or(0.0, |b| f64::from(b.data[r]))) as f32).collect()
}

pub(super) fn rms_norm(x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let mean = dot(x, x) / x.len() as f64;
    let inv = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(gain).map(|(&v, &g)| (f64::from(v) * inv) as f32 * g).collect()
}

/// x += scale * y
fn add(x: &mut [f32], y: &[f32], scale: f32) {
    for (a, b) in x.iter_mut().zip(y) {
        *a += scale * b;
    }
}
