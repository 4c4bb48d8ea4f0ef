//! Bytes that a load will take, from headers alone: what `weights` and `forward` allocate, counted by the same rules.
//!
//! Guarantees: within 3 % of what is allocated, which a test compares for every checkpoint of the fixtures. It opens no
//! adapter, so it does not know which of two forms attention writes there; it counts both.

use super::activation::{Forms, SQUARES_BYTES};
use super::shapes::{self, meta_words};
use super::weights::RING;
use super::{ExecutorConfig, loras};
use crate::kernels::expert_pairs::Layout;
use crate::kernels::pack::Format;
use crate::kernels::{GROUP, logprobs, stride};
use crate::model::experts::{ExpertPart, ExpertSpec, MixPart};
use crate::model::groups::LayerGroups;
use crate::model::latent::LatentPart;
use crate::model::spec::{MlpKind, ModelSpec, NormPlacement, WeightRole};
use crate::model::{Model, ModelError, WeightForm};

/// Between the planes of a matrix, on average.
const PLANE_GAP: u64 = 128;

/// Bytes of weights as they are packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSizes {
    /// Of what never leaves the GPU: embedding, head, norms and biases.
    pub fixed: u64,
    /// Of each matrix of each layer.
    pub layers: Vec<Vec<u64>>,
}

impl WeightSizes {
    pub fn total(&self) -> u64 {
        self.layers.iter().map(|layer| sum(layer)).fold(self.fixed, u64::saturating_add)
    }

    /// On the GPU, with the last `num_streamed` layers in host memory.
    pub fn on_gpu(&self, num_streamed: u32) -> u64 {
        let (kept, streamed) = self.layers.split_at(self.layers.len().saturating_sub(num_streamed as usize));
        // Matrices of one size share their place in a slot of the ring.
        let mut ring: [Vec<u64>; RING] = Default::default();
        for (i, layer) in streamed.iter().enumerate() {
            let slot = &mut ring[(kept.len() + i) % RING];
            let mut free = slot.clone();
            for &bytes in layer {
                match free.iter().position(|&b| b == bytes) {
                    Some(at) => drop(free.swap_remove(at)),
                    None => slot.push(bytes),
                }
            }
        }
        kept.iter().chain(&ring).map(|matrices| sum(matrices)).fold(self.fixed, u64::saturating_add)
    }

    /// In host memory then.
    pub fn on_host(&self, num_streamed: u32) -> u64 {
        self.layers.iter().rev().take(num_streamed as usize).map(|layer| sum(layer)).fold(0, u64::saturating_add)
    }

    /// The most layers whose matrices take at most so many bytes.
    pub fn layers_within(&self, host_bytes: u64) -> u32 {
        (0..=self.layers.len() as u32).rev().find(|&n| self.on_host(n) <= host_bytes).unwrap_or(0)
    }

    /// The fewest layers without which the weights take at most so many bytes on the GPU, if any number does.
    pub fn layers_over(&self, gpu_bytes: u64) -> Option<u32> {
        (0..=self.layers.len() as u32).find(|&n| self.on_gpu(n) <= gpu_bytes)
    }
}

fn sum(bytes: &[u64]) -> u64 {
    bytes.iter().fold(0, |sum, b| sum.saturating_add(*b))
}

/// Bytes of all weights as they are packed.
pub fn weights_bytes(model: &Model) -> Result<u64, ModelError> {
    Ok(weight_sizes(model)?.total())
}

/// The same by layer.
pub fn weight_sizes(model: &Model) -> Result<WeightSizes, ModelError> {
    let spec = model.spec();
    let mut sizes = WeightSizes { fixed: 0, layers: vec![Vec::new(); spec.num_layers as usize] };
    let mut runs: Vec<Run> = Vec::new();
    for role in spec.roles() {
        let Some(form) = model.weight_form(role)? else { continue };
        let (n, k) = match form.shape[..] {
            [n, k] if !role.is_vector() => (n, k),
            _ => {
                let elements = form.shape.iter().product::<u64>().next_multiple_of(u64::from(GROUP));
                sizes.fixed = sizes.fixed.saturating_add(elements.saturating_mul(4));
                continue;
            }
        };
        let joined = Joined::of(spec, role);
        // Other matrices may stand between two that are joined.
        match runs.iter_mut().rev().take(8).find(|run| run.joined == joined && joined.joins()) {
            Some(run) if run.form.is_like(&form) => run.rows += n,
            _ => {
                runs.push(Run { joined, layer: role.layer(), form: WeightForm { shape: vec![n, k], ..form }, rows: n })
            }
        }
    }
    for run in &runs {
        if run.form.order.is_some() {
            sizes.fixed = sizes.fixed.saturating_add(run.form.shape[1].saturating_mul(4));
        }
        match run.layer {
            Some(layer) => sizes.layers[layer as usize].push(run.bytes()),
            None => sizes.fixed = sizes.fixed.saturating_add(run.bytes()),
        }
    }
    Ok(sizes)
}

/// Matrices that become one.
struct Run {
    joined: Joined,
    layer: Option<u32>,
    form: WeightForm,
    rows: u64,
}

impl WeightForm {
    /// Rows of both can be one matrix.
    fn is_like(&self, other: &WeightForm) -> bool {
        (self.dtype, &self.order) == (other.dtype, &other.order)
    }
}

impl Run {
    fn bytes(&self) -> u64 {
        let format = Format::of(self.form.dtype);
        let k = u32::try_from(self.form.shape[1]).unwrap_or(u32::MAX);
        // All matrices of a mixture, or of the heads, are one.
        let gap = if format.is_quantised() && !self.joined.is_one_of_many() { 2 * PLANE_GAP } else { 0 };
        format.matrix_bytes(self.rows, k) + gap
    }
}

/// Which matrices become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joined {
    No,
    Attention(u32),
    Mlp(u32),
    Router(u32),
    SharedMlp(u32),
    Expert(u32, u32),
    Many,
}

impl Joined {
    fn of(spec: &ModelSpec, role: WeightRole) -> Joined {
        let has_gap = |size: u32| !size.is_multiple_of(GROUP);
        let inner = |l| spec.experts_of(l).map_or(0, |e| e.intermediate_size);
        let shared = |l| spec.experts_of(l).map_or(0, |e| e.shared_size);
        match role {
            WeightRole::Q(l) | WeightRole::K(l) | WeightRole::V(l) => Joined::Attention(l),
            WeightRole::Gate(l) | WeightRole::Up(l) if !has_gap(spec.intermediate_size) => Joined::Mlp(l),
            WeightRole::Mix(l, MixPart::Router | MixPart::SharedMix) => Joined::Router(l),
            WeightRole::Mix(l, MixPart::SharedGate | MixPart::SharedUp) if !has_gap(shared(l)) => Joined::SharedMlp(l),
            WeightRole::Expert(l, e, ExpertPart::Gate | ExpertPart::Up) if !has_gap(inner(l)) => Joined::Expert(l, e),
            WeightRole::Expert(..) | WeightRole::Latent(_, LatentPart::KUp(_) | LatentPart::VUp(_)) => Joined::Many,
            _ => Joined::No,
        }
    }

    fn joins(self) -> bool {
        !matches!(self, Joined::No | Joined::Many)
    }

    fn is_one_of_many(self) -> bool {
        matches!(self, Joined::Many | Joined::Expert(..))
    }
}

/// Bytes of activations, attention's partial results, logits, tables of cosines and sines, the step's metadata, and the
/// slots of LoRA adapters.
/// Where an adapter's products keep gate and up to themselves, as much less as these take is allocated.
pub fn workspace_bytes(model: &Model, cfg: &ExecutorConfig) -> Result<u64, ModelError> {
    let spec = model.spec();
    let inputs = Inputs::of(model, cfg)?;
    let rows = u64::from(cfg.max_tokens_per_step);
    let attention = shapes::attention_shape(spec, cfg);
    // No adapter has bindings so small that they bound what follows, but for models that it then refuses.
    let slots = shapes::attention_slots(spec, cfg, u64::MAX);
    let partials = slots.saturating_mul(attention.partial_bytes());
    let vocab = u64::from(spec.vocab_size.next_multiple_of(4)) * 4;
    let logits = u64::from(shapes::max_logits(spec, cfg, u64::MAX))
        * (vocab + logprobs::ROW_BYTES + 8 + inputs.bytes(inputs.head, spec.hidden_size));
    let meta = meta_words(spec, cfg, u64::from(LayerGroups::of(spec).num_groups()), slots) * 4;
    let per_token = attention_row_bytes(spec, &inputs) + latent_row_bytes(spec, &inputs) + ffn_row_bytes(spec, &inputs);
    let per_token = per_token + loras::row_bytes(spec, cfg.lora);
    let slots = loras::slot_bytes(spec, cfg.lora);
    let sum = [rows.saturating_mul(per_token), partials, logits, rope_bytes(spec, cfg), meta, slots];
    Ok(sum.into_iter().fold(0, u64::saturating_add))
}

/// Hidden state, what norms and attention make of it, Q, K and V.
fn attention_row_bytes(spec: &ModelSpec, inputs: &Inputs) -> u64 {
    let hidden = 4 * u64::from(stride(spec.hidden_size));
    let adds_as_is = spec.block.norm_placement == NormPlacement::Before && spec.block.residual_scale == 1.0;
    let qkv = match spec.block.latent {
        Some(_) => stride(1),
        None => stride((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim),
    };
    let q = stride(spec.num_heads * spec.head_dim.next_multiple_of(8));
    let attended = inputs.bytes(inputs.attended, spec.attended_dim());
    let branch = if adds_as_is { 0 } else { hidden };
    let squares = if inputs.normed.i8 { u64::from(stride(spec.hidden_size) / GROUP) * SQUARES_BYTES } else { 0 };
    let reordered = inputs.reordered.iter().map(|&size| inputs.bytes(Forms::I8, size)).sum::<u64>();
    let normed = inputs.bytes(inputs.normed, spec.hidden_size) + squares;
    hidden + branch + normed + 4 * u64::from(qkv + q) + attended + reordered
}

fn latent_row_bytes(spec: &ModelSpec, inputs: &Inputs) -> u64 {
    let Some(latent) = &spec.block.latent else { return 0 };
    let heads = spec.num_heads;
    let pairs = 4 * u64::from(heads) * 6;
    let q_rank = latent.q_rank.max(1);
    let rows = [stride(q_rank), stride(heads * latent.q_dim()), stride(latent.row_dim())];
    let rows = rows.into_iter().chain([stride(heads * latent.row_dim())]).map(|n| 4 * u64::from(n)).sum::<u64>();
    pairs + rows + inputs.bytes(inputs.normed, q_rank)
}

/// Gate, up and their product; for a mixture those of each of its experts and of the shared one, what they add, and the
/// router's logits.
fn ffn_row_bytes(spec: &ModelSpec, inputs: &Inputs) -> u64 {
    let num = if spec.block.mlp == MlpKind::Gated { 2 } else { 1 };
    let mlp = |size: u32| 4 * num * u64::from(stride(size)) + inputs.bytes(inputs.gated, size);
    let is_dense = |l| spec.experts_of(l).is_none();
    let dense = if (0..spec.num_layers).any(is_dense) { mlp(spec.intermediate_size) } else { 0 };
    let experts = spec.block.experts.as_ref().filter(|_| !(0..spec.num_layers).all(is_dense));
    dense + experts.map_or(0, |experts| expert_row_bytes(spec, experts, mlp))
}

fn expert_row_bytes(spec: &ModelSpec, experts: &ExpertSpec, mlp: impl Fn(u32) -> u64) -> u64 {
    let hidden = 4 * u64::from(stride(spec.hidden_size));
    let pairs = u64::from(experts.num_active);
    let work = Layout::new(experts, 1).bytes() / pairs;
    let logits = 4 * u64::from(stride(experts.num_experts + u32::from(experts.has_shared_gate)));
    let shared = if experts.shared_size > 0 { mlp(experts.shared_size) + hidden } else { 0 };
    logits + shared + pairs * (8 + work + mlp(experts.intermediate_size) + hidden)
}

fn rope_bytes(spec: &ModelSpec, cfg: &ExecutorConfig) -> u64 {
    let of = |l| spec.rope_of(l);
    let has = |rope| (0..spec.num_layers).any(|l| of(l) == rope);
    let tables = [has(Some(&spec.rope)), has(None), spec.block.windowed_rope.is_some()];
    let num = tables.into_iter().filter(|&is_there| is_there).count() as u64;
    num * u64::from(cfg.max_model_len) * u64::from(spec.rope.rotary_dim) * 4
}

/// In which forms matrices want what they read.
struct Inputs {
    normed: Forms,
    attended: Forms,
    gated: Forms,
    head: Forms,
    /// Sizes of inputs that are brought into another order.
    reordered: Vec<u32>,
}

impl Inputs {
    fn of(model: &Model, cfg: &ExecutorConfig) -> Result<Inputs, ModelError> {
        const NONE: Forms = Forms { f32: false, i8: false };
        let spec = model.spec();
        let mut inputs = Inputs { normed: NONE, attended: NONE, gated: NONE, head: NONE, reordered: Vec::new() };
        for role in spec.roles().filter(|role| !role.is_vector()) {
            let Some(form) = model.weight_form(role)? else { continue };
            let takes_i8 = Format::of(form.dtype).takes_i8() && !cfg.precise;
            let forms = if takes_i8 && form.order.is_none() { Forms::I8 } else { Forms::F32 };
            let size = form.shape.last().map_or(0, |&k| k as u32);
            if form.order.is_some() && !inputs.reordered.contains(&size) {
                inputs.reordered.push(size);
            }
            let to = match role {
                WeightRole::TokenEmbedding if spec.tie_embeddings => &mut inputs.head,
                WeightRole::LmHead => &mut inputs.head,
                WeightRole::TokenEmbedding | WeightRole::PositionEmbedding => continue,
                WeightRole::O(_) => &mut inputs.attended,
                WeightRole::Down(_)
                | WeightRole::Expert(_, _, ExpertPart::Down)
                | WeightRole::Mix(_, MixPart::SharedDown) => &mut inputs.gated,
                _ => &mut inputs.normed,
            };
            *to = to.union(forms);
        }
        // Attention quantises whole groups of 32 dims itself; else from f32.
        let quantises = spec.head_dim.is_multiple_of(GROUP) && spec.block.latent.is_none() && !inputs.attended.f32;
        if inputs.attended.i8 && !quantises {
            inputs.attended.f32 = true;
        }
        Ok(inputs)
    }

    /// Of a row in these forms.
    fn bytes(&self, forms: Forms, size: u32) -> u64 {
        let elements = u64::from(stride(size));
        let i8 = if forms.i8 { elements + elements / u64::from(GROUP) * 8 } else { 0 };
        i8 + if forms.f32 { 4 * elements } else { 0 }
    }
}
