//! What a model's spec and the executor's settings mean for kernels.

use super::ExecutorConfig;
use crate::kernels::attention;
use crate::kernels::kv_layout::KvLayout;
use crate::model::spec::ModelSpec;

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
