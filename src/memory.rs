//! Bytes needed for weights, KV pool and workspace: one pure function for loading, estimates and the app.
//!
//! Guarantees: no arithmetic here overflows (it saturates), and the same numbers come out wherever it is called. It knows
//! no adapter: the executor counts what it allocates for weights and workspace. It does not attempt what drivers add on
//! top.

use crate::kv::KvGroups;
use crate::model::groups::LayerGroups;
use crate::model::spec::ModelSpec;
use serde::Serialize;

/// How the KV pool is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSize {
    /// This many blocks, the null block included.
    Blocks(u32),
    /// What is left of this many bytes after weights and workspace.
    Budget { total_bytes: u64 },
}

/// What the engine will be run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    pub kv: KvSize,
    /// Tokens in a block.
    pub block_size: u32,
    pub max_tokens_per_step: u32,
    pub max_num_seqs: u32,
    /// Longest context that a request may use; bounds the rope table and the pool.
    pub max_model_len: u32,
    pub kv_token: KvTokenBytes,
}

/// What a cached token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTokenBytes {
    /// 1 for int8, 2 for f16, 4 for f32.
    pub per_element: u32,
    /// Of each head's K, and of its V: 4 for the scale of int8.
    pub per_head: u32,
    /// Once for all layers: the canary.
    pub per_token: u32,
}

/// Bytes by purpose. All of them lie on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    pub weights_bytes: u64,
    /// K and V of one token over all layers.
    pub kv_bytes_per_token: u64,
    /// Blocks of the pool, the null block included.
    pub num_blocks: u32,
    pub kv_bytes: u64,
    /// Activations, attention partials, logits, the rope table and the step's metadata.
    pub workspace_bytes: u64,
    pub total_bytes: u64,
}

/// Fewest blocks that an engine runs with: the null block and one to write to.
pub const MIN_BLOCKS: u32 = 2;
/// Keys in one attention partial: partials always cover the same absolute ranges of this length.
const PARTIAL_KEYS: u64 = 256;
/// Heads are cached in steps of so many dims.
const HEAD_DIM_STEP: u64 = 8;
/// Attention's scratch takes at most this much, but always room for one row at the longest context.
const MAX_PARTIAL_BYTES: u64 = 32 << 20;

/// What does not depend on the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedBytes {
    /// As stored on the device.
    pub weights: u64,
    pub workspace: u64,
}

/// The plan for a model that takes `fixed` beside its pool.
pub fn estimate(spec: &ModelSpec, fixed: FixedBytes, config: &MemoryConfig) -> MemoryPlan {
    let kv_bytes_per_token = kv_bytes_per_token(spec, config.kv_token);
    let FixedBytes { weights: weights_bytes, workspace: workspace_bytes } = fixed;
    let num_blocks = match config.kv {
        KvSize::Blocks(blocks) => blocks,
        KvSize::Budget { total_bytes } => {
            let left = total_bytes.saturating_sub(weights_bytes).saturating_sub(workspace_bytes);
            default_num_blocks(spec, config, left)
        }
    };
    let kv_bytes = kv_bytes_per_block(spec, config).saturating_mul(num_blocks.into());
    MemoryPlan {
        weights_bytes,
        kv_bytes_per_token,
        num_blocks,
        kv_bytes,
        workspace_bytes,
        total_bytes: weights_bytes.saturating_add(kv_bytes).saturating_add(workspace_bytes),
    }
}

/// Blocks for a pool of at most `kv_budget_bytes`, the null block included: never more than all sequences can fill at
/// the longest context, never fewer than [`MIN_BLOCKS`].
pub fn default_num_blocks(spec: &ModelSpec, config: &MemoryConfig, kv_budget_bytes: u64) -> u32 {
    let per_block = kv_bytes_per_block(spec, config).max(1);
    let of_context = u64::from(blocks_of(spec, config, config.max_model_len.min(spec.most_positions())));
    let useful = of_context.saturating_mul(config.max_num_seqs.into()).saturating_add(1);
    let blocks = (kv_budget_bytes / per_block).min(useful);
    u32::try_from(blocks).unwrap_or(u32::MAX).max(MIN_BLOCKS)
}

/// Longest context that one request can use in a pool of `num_blocks` blocks.
pub fn max_context(spec: &ModelSpec, config: &MemoryConfig, num_blocks: u32) -> u32 {
    let chunk = config.max_tokens_per_step;
    groups(spec).tokens_in(num_blocks.saturating_sub(1), spec.most_positions(), chunk, config.block_size.max(1))
}

/// Blocks that a context of `len` tokens takes at most.
pub fn blocks_of(spec: &ModelSpec, config: &MemoryConfig, len: u32) -> u32 {
    groups(spec).blocks_for(len, config.max_tokens_per_step, config.block_size.max(1))
}

fn groups(spec: &ModelSpec) -> KvGroups {
    KvGroups::new(&LayerGroups::of(spec).windows)
}

/// K and V of one block: over the layers of one group, all of them where the model has no windows.
fn kv_bytes_per_block(spec: &ModelSpec, config: &MemoryConfig) -> u64 {
    let bytes = token_bytes(spec, LayerGroups::of(spec).size, config.kv_token);
    bytes.saturating_mul(config.block_size.max(1).into())
}

/// K and V of one token over all layers.
pub fn kv_bytes_per_token(spec: &ModelSpec, bytes: KvTokenBytes) -> u64 {
    token_bytes(spec, spec.num_layers, bytes)
}

fn token_bytes(spec: &ModelSpec, num_layers: u32, bytes: KvTokenBytes) -> u64 {
    // Latent rows are keys and values at once.
    let num = if spec.block.latent.is_some() { 1 } else { 2 };
    let heads = num * u64::from(num_layers) * u64::from(spec.num_kv_heads);
    // Heads are cached with padding.
    let head_dim = u64::from(spec.head_dim).next_multiple_of(HEAD_DIM_STEP);
    let values = heads.saturating_mul(head_dim).saturating_mul(bytes.per_element.into());
    values.saturating_add(heads.saturating_mul(bytes.per_head.into())).saturating_add(bytes.per_token.into())
}

/// Partial results of attention that there is room for: one for each range of keys of each sequence, within bounds. Rows
/// that find no room are computed in one piece.
pub fn attention_slots(spec: &ModelSpec, max_model_len: u32, max_num_seqs: u32) -> u64 {
    let ranges = u64::from(max_model_len.min(spec.most_positions())).div_ceil(PARTIAL_KEYS);
    let most = MAX_PARTIAL_BYTES / (4 * partial_floats(spec)).max(1);
    ranges.saturating_mul(max_num_seqs.into()).min(most).max(ranges)
}

/// Numerators (padded heads), maximum and sum of all heads.
fn partial_floats(spec: &ModelSpec) -> u64 {
    u64::from(spec.num_heads) * (u64::from(spec.head_dim).next_multiple_of(HEAD_DIM_STEP) + 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{QkNorm, RopePairing, RopeScaling, RopeSpec};

    const FIXED: FixedBytes = FixedBytes { weights: 100_000_000, workspace: 10_000_000 };

    fn spec() -> ModelSpec {
        ModelSpec {
            arch: "llama".into(),
            num_layers: 30,
            hidden_size: 576,
            intermediate_size: 1536,
            num_heads: 9,
            num_kv_heads: 3,
            head_dim: 64,
            vocab_size: 49152,
            max_position: 8192,
            rms_eps: 1e-5,
            rope: RopeSpec {
                theta: 1e5,
                rotary_dim: 64,
                pairing: RopePairing::Interleaved,
                scaling: RopeScaling::None,
            },
            qk_norm: QkNorm::None,
            block: crate::model::spec::BlockSpec::LLAMA,
            q_bias: false,
            k_bias: false,
            v_bias: false,
            o_bias: false,
            mlp_bias: false,
            windows: vec![None; 30],
            tie_embeddings: true,
            bos_token_id: None,
            eos_token_ids: vec![2],
        }
    }

    fn config(kv: KvSize) -> MemoryConfig {
        MemoryConfig {
            kv,
            block_size: 16,
            max_tokens_per_step: 256,
            max_num_seqs: 8,
            max_model_len: 8192,
            kv_token: KvTokenBytes { per_element: 2, per_head: 0, per_token: 0 },
        }
    }

    #[test]
    fn kv_of_a_token_is_two_vectors_per_layer_and_kv_head() {
        let plan = estimate(&spec(), FIXED, &config(KvSize::Blocks(129)));
        assert_eq!(plan.kv_bytes_per_token, 2 * 30 * 3 * 64 * 2);
        assert_eq!(plan.kv_bytes, plan.kv_bytes_per_token * 16 * 129);
        assert_eq!(plan.total_bytes, plan.weights_bytes + plan.kv_bytes + plan.workspace_bytes);
        assert_eq!(max_context(&spec(), &config(KvSize::Blocks(129)), 129), 2048);
        let int8 = KvTokenBytes { per_element: 1, per_head: 4, per_token: 16 };
        assert_eq!(kv_bytes_per_token(&spec(), int8), 2 * 30 * 3 * (64 + 4) + 16);
    }

    #[test]
    fn a_budget_is_filled_and_not_exceeded() {
        let budget = 1 << 28;
        let plan = estimate(&spec(), FIXED, &config(KvSize::Budget { total_bytes: budget }));
        assert!(plan.total_bytes <= budget, "{plan:?}");
        assert!(plan.total_bytes + plan.kv_bytes_per_token * 16 > budget, "one more block would not fit: {plan:?}");
    }

    #[test]
    fn the_pool_stops_where_more_blocks_could_not_be_used() {
        assert_eq!(default_num_blocks(&spec(), &config(KvSize::Blocks(0)), u64::MAX), 8 * 512 + 1);
        assert_eq!(default_num_blocks(&spec(), &config(KvSize::Blocks(0)), 0), MIN_BLOCKS);
    }

    #[test]
    fn windowed_layers_make_a_long_context_cheap() {
        // 24 of 30 layers see 1,024 positions: 3 groups of them and one of the others, at most 8 layers each.
        let windows = (0..30).map(|l| if l % 5 == 4 { None } else { Some(1024) }).collect();
        let (full, mixed) = (spec(), ModelSpec { windows, ..spec() });
        let config = config(KvSize::Blocks(1001));
        assert_eq!(estimate(&mixed, FIXED, &config).kv_bytes * 30, estimate(&full, FIXED, &config).kv_bytes * 8);
        // A window and a step of 256 tokens lie in 81 blocks at most.
        assert_eq!(blocks_of(&mixed, &config, 8192), 512 + 3 * 81);
        assert_eq!(blocks_of(&full, &config, 8192), 512);
        assert_eq!(max_context(&mixed, &config, 1 + 512 + 3 * 81), 8192);
        assert!(max_context(&mixed, &config, 512 + 3 * 81) < 8192);
    }

    #[test]
    fn scratch_of_attention_is_bounded_but_holds_the_longest_row() {
        let spec = spec();
        assert_eq!(attention_slots(&spec, 8192, 1), 32);
        assert_eq!(attention_slots(&spec, 8192, 8), 256);
        let bounded = attention_slots(&spec, 8192, 100_000);
        assert!(bounded * partial_floats(&spec) * 4 <= MAX_PARTIAL_BYTES && bounded > 10_000, "{bounded}");
        let long = ModelSpec { max_position: 1 << 30, ..spec };
        assert_eq!(attention_slots(&long, 1 << 30, 8), 1 << 22);
    }

    #[test]
    fn huge_numbers_saturate() {
        let mut spec = spec();
        spec.num_layers = u32::MAX;
        let config = MemoryConfig {
            max_tokens_per_step: u32::MAX,
            max_num_seqs: u32::MAX,
            kv_token: KvTokenBytes { per_element: u32::MAX, per_head: u32::MAX, per_token: u32::MAX },
            ..config(KvSize::Blocks(u32::MAX))
        };
        assert_eq!(
            estimate(&spec, FixedBytes { weights: u64::MAX, workspace: u64::MAX }, &config).total_bytes,
            u64::MAX
        );
    }
}
