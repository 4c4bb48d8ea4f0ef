//! Qwen 2 and 3 with a mixture of experts in most layers; Qwen 2's have a shared expert with a gate of its own.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::experts::{ExpertSpec, Routing};
use crate::model::spec::{BlockSpec, ModelSpec, QkNorm, RopePairing};

pub const QWEN2: Family = Family {
    name: "qwen2_moe",
    hf_class: "Qwen2MoeForCausalLM",
    gguf_name: Some("qwen2moe"),
    spec_of_config: qwen2_of_config,
    spec_of_gguf: qwen2_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

pub const QWEN3: Family = Family {
    name: "qwen3_moe",
    hf_class: "Qwen3MoeForCausalLM",
    gguf_name: Some("qwen3moe"),
    spec_of_config: qwen3_of_config,
    spec_of_gguf: qwen3_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn experts(num_experts: u32, num_active: u32, intermediate_size: u32, is_normalised: bool) -> ExpertSpec {
    ExpertSpec {
        num_experts,
        num_active,
        intermediate_size,
        routing: Routing { is_normalised, ..Routing::SOFTMAX },
        shared_size: 0,
        has_shared_gate: false,
        dense_layers: Vec::new(),
        router_bias: false,
        expert_bias: false,
    }
}

/// `(default number of experts, experts per token, intermediate size)` where keys are missing.
fn of_config(config: &Config, spec: &ModelSpec, defaults: (u32, u32, u32)) -> Result<ExpertSpec, Fault> {
    let num_experts = config.count("num_experts")?.or(config.count("num_local_experts")?).unwrap_or(defaults.0);
    let num_active = config.count("num_experts_per_tok")?.unwrap_or(defaults.1);
    let size = config.count("moe_intermediate_size")?.unwrap_or(defaults.2);
    let step = config.count("decoder_sparse_step")?.unwrap_or(1);
    let dense = config.whole_numbers("mlp_only_layers")?.unwrap_or_default();
    let is_dense = |l: &u32| dense.contains(l) || !(l + 1).is_multiple_of(step);
    Ok(ExpertSpec {
        dense_layers: (0..spec.num_layers).filter(is_dense).collect(),
        ..experts(num_experts, num_active, size, config.flag("norm_topk_prob", false)?)
    })
}

fn qwen2_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("qwen2_moe", &Defaults::llama(32_768))?;
    let experts = of_config(config, &spec, (60, 4, 1408))?;
    let shared_size = config.count("shared_expert_intermediate_size")?.unwrap_or(5632);
    let experts = ExpertSpec { shared_size, has_shared_gate: true, ..experts };
    let windows = config.qwen_windows(spec.num_layers)?;
    let bias = config.flag("qkv_bias", true)?;
    let block = BlockSpec { experts: Some(experts), ..spec.block };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, windows, block, ..spec })
}

fn qwen3_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("qwen3_moe", &Defaults::llama(32_768))?;
    let experts = of_config(config, &spec, (128, 8, 768))?;
    let bias = config.flag("attention_bias", false)?;
    let windows = config.qwen_windows(spec.num_layers)?;
    let block = BlockSpec { experts: Some(experts), ..spec.block };
    let qk_norm = QkNorm::Head;
    Ok(ModelSpec { qk_norm, q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, windows, block, ..spec })
}

fn of_gguf(metadata: &Metadata, family: &str, is_normalised: bool) -> Result<(ModelSpec, ExpertSpec), ModelError> {
    let spec = metadata.base_spec_with_experts(family, RopePairing::Half)?;
    let (num_experts, num_active) = metadata.experts()?;
    let size = metadata.count("expert_feed_forward_length")?.unwrap_or(spec.intermediate_size);
    Ok((spec, experts(num_experts, num_active, size, is_normalised)))
}

fn qwen2_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let (spec, experts) = of_gguf(metadata, "qwen2_moe", false)?;
    let shared_size = metadata.count("expert_shared_feed_forward_length")?.unwrap_or(spec.intermediate_size);
    let experts = ExpertSpec { shared_size, has_shared_gate: true, ..experts };
    Ok(ModelSpec { block: BlockSpec { experts: Some(experts), ..spec.block }, ..spec })
}

fn qwen3_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let (spec, experts) = of_gguf(metadata, "qwen3_moe", true)?;
    let block = BlockSpec { experts: Some(experts), ..spec.block };
    Ok(ModelSpec { qk_norm: QkNorm::Head, block, ..spec })
}
