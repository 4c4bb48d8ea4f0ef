//! Mixtral: mistral with a mixture of experts. In GGUF such files call themselves llama.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::Source;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::experts::{ExpertPart, ExpertSpec, MixPart, Routing};
use crate::model::spec::{BlockSpec, ModelSpec, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "mixtral",
    hf_class: "MixtralForCausalLM",
    gguf_name: None,
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

fn with_experts(spec: ModelSpec, num_experts: u32, num_active: u32) -> ModelSpec {
    let experts = ExpertSpec {
        num_experts,
        num_active,
        intermediate_size: spec.intermediate_size,
        routing: Routing::SOFTMAX,
        shared_size: 0,
        has_shared_gate: false,
        dense_layers: Vec::new(),
        router_bias: false,
        expert_bias: false,
    };
    ModelSpec { block: BlockSpec { experts: Some(experts), ..spec.block }, ..spec }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("mixtral", &Defaults::llama(131_072))?;
    let window = if config.contains("sliding_window") { config.count("sliding_window")? } else { None };
    let num_experts = config.count("num_local_experts")?.unwrap_or(8);
    let num_active = config.count("num_experts_per_tok")?.unwrap_or(2);
    let windows = vec![window; spec.windows.len()];
    Ok(with_experts(ModelSpec { windows, ..spec }, num_experts, num_active))
}

/// Of a llama GGUF with experts.
pub fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec_with_experts("mixtral", RopePairing::Interleaved)?;
    let (num_experts, num_active) = metadata.experts()?;
    Ok(with_experts(spec, num_experts, num_active))
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    let (layer, name) = match role {
        WeightRole::Mix(l, MixPart::Router) => (l, "gate.weight".to_owned()),
        WeightRole::Expert(l, e, ExpertPart::Gate) => (l, format!("experts.{e}.w1.weight")),
        WeightRole::Expert(l, e, ExpertPart::Down) => (l, format!("experts.{e}.w2.weight")),
        WeightRole::Expert(l, e, ExpertPart::Up) => (l, format!("experts.{e}.w3.weight")),
        other => return names::hf(spec, other),
    };
    format!("model.layers.{layer}.block_sparse_moe.{name}").into()
}
