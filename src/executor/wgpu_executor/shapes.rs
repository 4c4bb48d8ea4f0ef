//! What a model's spec, the executor's settings and a step mean for kernels.

use super::weights::NormWeights;
use super::{ExecutorConfig, LoraLimits};
use crate::gpu::{Buffer, BufferSlice, Gpu};
use crate::kernels::attention::{self, AttentionCut};
use crate::kernels::attention_work::{AttentionWork, Take, WorkCounts, WorkLimits};
use crate::kernels::kv_layout::KvLayout;
use crate::kernels::lora_work::{LoraShape, LoraWork, TILE_TOKENS};
use crate::kernels::norm::Kind;
use crate::kernels::{DeviceClass, step_meta};
use crate::memory;
use crate::model::spec::{ModelSpec, NormKind};

/// What attention is compiled for.
pub fn attention_shape(spec: &ModelSpec, cfg: &ExecutorConfig) -> attention::Shape {
    attention::Shape {
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        kv: cfg.kv,
        softcap: spec.block.attention_softcap,
        has_sinks: spec.block.has_sinks,
    }
}

/// Partial results of attention that there is room for, in one binding of at most so many bytes.
pub fn attention_slots(spec: &ModelSpec, cfg: &ExecutorConfig, max_binding_bytes: u64) -> u64 {
    let slots = memory::attention_slots(spec, cfg.max_model_len, cfg.max_num_seqs);
    slots.min(max_binding_bytes / attention_shape(spec, cfg).partial_bytes().max(1)).max(1)
}

/// Logits of one round are at most this many bytes (but always a row for each sequence).
const LOGITS_BYTES: u64 = 16 << 20;

/// Rows of logits that are computed at once, in one binding of at most so many bytes.
pub fn max_logits(spec: &ModelSpec, cfg: &ExecutorConfig, max_binding_bytes: u64) -> u32 {
    let row_bytes = u64::from(spec.vocab_size.next_multiple_of(4)) * 4;
    ((LOGITS_BYTES.min(max_binding_bytes) / row_bytes) as u32).max(cfg.max_num_seqs)
}

/// How each layer's cache lies.
pub fn kv_layout(spec: &ModelSpec, cfg: &ExecutorConfig) -> KvLayout {
    KvLayout {
        num_blocks: cfg.num_blocks,
        block_size: cfg.block_size,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        format: cfg.kv,
    }
}

/// Gain and bias, where a norm has them.
pub fn norm_buffers(norm: Option<&NormWeights>) -> (Option<BufferSlice>, Option<BufferSlice>) {
    (norm.map(|n| n.gain.whole()), norm.and_then(|n| n.bias.as_ref()).map(Buffer::whole))
}

/// The kernel's kind; a copy where there is no gain.
pub fn norm_kind<'a>(kind: NormKind, gain: Option<&'a BufferSlice>, bias: Option<&'a BufferSlice>) -> Kind<'a> {
    match (gain, kind) {
        (None, _) => Kind::Copy,
        (Some(gain), NormKind::Rms) => Kind::Rms { gain },
        (Some(gain), NormKind::Layer { .. }) => Kind::Layer { gain, bias },
    }
}

/// What a step is recorded for.
#[derive(Clone, Copy, Debug)]
pub struct StepShape {
    pub num_tokens: u32,
    pub num_logits: u32,
    pub attention: WorkCounts,
    pub has_penalties: bool,
    pub has_masks: bool,
    pub has_logprobs: bool,
    pub has_hidden: bool,
    pub lora: LoraShape,
}

/// Steps that use every kernel: of each number of tokens in `counts`, without adapters and, where there is room for some,
/// with them.
pub fn warm_up_shapes(counts: &[u32], max_logits: u32, has_loras: bool) -> impl Iterator<Item = StepShape> {
    let lora = |columns| LoraShape { num_tiles: 1, columns, parts: u32::MAX };
    let loras = [LoraShape::default(), lora(1), lora(TILE_TOKENS)];
    let loras = loras.into_iter().take(if has_loras { 3 } else { 1 });
    loras.flat_map(move |lora| {
        counts.iter().map(move |&tokens| StepShape {
            num_tokens: tokens,
            num_logits: tokens.min(max_logits),
            attention: WorkCounts::some(tokens),
            has_penalties: true,
            has_masks: true,
            has_logprobs: true,
            has_hidden: true,
            lora,
        })
    })
}

/// Words that the largest step's metadata can take.
pub fn meta_words(spec: &ModelSpec, cfg: &ExecutorConfig, groups: u64, attention_slots: u64) -> u64 {
    let (tokens, rows) = (u64::from(cfg.max_tokens_per_step), u64::from(cfg.max_num_seqs));
    let blocks = u64::from(cfg.max_model_len.div_ceil(cfg.block_size));
    let seen = u64::from(cfg.max_model_len.min(spec.vocab_size));
    let most_biases = 1024;
    let copy = 2;
    let mask = 1 + u64::from(spec.vocab_size.div_ceil(32));
    let per_row =
        groups * (blocks + 1) + copy + mask + 9 + step_meta::SAMPLING_WORDS as u64 + 2 * seen + 2 * most_biases;
    let work = AttentionWork::max_words(tokens, attention_slots);
    let loras = if cfg.lora == LoraLimits::NONE { 0 } else { LoraWork::max_words(tokens) };
    let feed = 1;
    let per_token = 4 + feed + groups + step_meta::SAMPLING_WORDS as u64;
    step_meta::HEADER_WORDS as u64 + tokens * per_token + rows * per_row + work + loras
}

/// What the step's attention is cut for, which its kernels were bound for.
pub fn work_limits(gpu: &Gpu, spec: &ModelSpec, cfg: &ExecutorConfig, cut: AttentionCut) -> WorkLimits {
    let slots = attention_slots(spec, cfg, gpu.caps().max_binding_bytes);
    WorkLimits {
        tokens_per_workgroup: cut.tokens_per_workgroup,
        parts: cut.parts,
        parallel: DeviceClass::of(gpu.caps()).parallel_workgroups(),
        max_slots: u32::try_from(slots).unwrap_or(u32::MAX),
        // The layer that sees most.
        window: spec.windows.iter().copied().max_by_key(|w| w.unwrap_or(u32::MAX)).flatten(),
        split: Take::WhenItPays,
        share: Take::WhenItPays,
    }
}
