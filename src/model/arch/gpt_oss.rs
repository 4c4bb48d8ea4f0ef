//! gpt-oss: attention with sinks, a window in every other layer, biases, and experts with a bounded SwiGLU.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{ExpertLayout, Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::experts::{ExpertPart, ExpertSpec, MixPart, Routing};
use crate::model::spec::{Activation, BlockSpec, ModelSpec, RopePairing, RopeScaling, RopeSpec, WeightRole};

pub const FAMILY: Family = Family {
    name: "gpt_oss",
    hf_class: "GptOssForCausalLM",
    gguf_name: Some("gpt-oss"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor,
};

/// What the activation is compiled for.
const LIMIT: f64 = 7.0;

fn with_experts(spec: ModelSpec, num_experts: u32, num_active: u32) -> ModelSpec {
    let experts = ExpertSpec {
        num_experts,
        num_active,
        intermediate_size: spec.intermediate_size,
        routing: Routing::SOFTMAX,
        shared_size: 0,
        has_shared_gate: false,
        dense_layers: Vec::new(),
        router_bias: true,
        expert_bias: true,
    };
    let activation = Activation::ClampedSwiglu;
    let block = BlockSpec { has_sinks: true, activation, experts: Some(experts), ..spec.block };
    ModelSpec { q_bias: true, k_bias: true, v_bias: true, o_bias: true, block, ..spec }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let defaults = Defaults { head_dim: Some(64), ..Defaults::llama(131_072) };
    let spec = config.base_spec("gpt_oss", &defaults)?;
    for (key, only) in [("swiglu_limit", LIMIT), ("swiglu_alpha", 1.702)] {
        if config.number(key)?.is_some_and(|given| given != only) {
            return Err(Fault::Unsupported(format!("{key} other than {only} is not supported")));
        }
    }
    let window = if config.contains("sliding_window") { config.count("sliding_window")? } else { Some(128) };
    let windows = match config.contains("layer_types") {
        true => config.pattern_windows(spec.num_layers, 2)?,
        false => every_other(spec.num_layers, window),
    };
    let num_experts = config.count("num_local_experts")?.unwrap_or(128);
    let num_active = config.count("num_experts_per_tok")?.or(config.count("experts_per_token")?).unwrap_or(4);
    if !config.flag("attention_bias", true)? {
        return Err(Fault::Unsupported("attention_bias = false is not supported".into()));
    }
    Ok(with_experts(ModelSpec { windows, ..spec }, num_experts, num_active))
}

/// Layers 0, 2, 4, … have the window.
fn every_other(num_layers: u32, window: Option<u32>) -> Vec<Option<u32>> {
    (0..num_layers).map(|l| window.filter(|_| l.is_multiple_of(2))).collect()
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec_with_experts("gpt_oss", RopePairing::Half)?;
    let (num_experts, num_active) = metadata.experts()?;
    let intermediate_size = metadata.count("expert_feed_forward_length")?.unwrap_or(spec.intermediate_size);
    let windows = every_other(spec.num_layers, spec.windows.first().copied().flatten());
    let rope = RopeSpec { scaling: untruncated(spec.rope.scaling), ..spec.rope };
    Ok(with_experts(ModelSpec { intermediate_size, windows, rope, ..spec }, num_experts, num_active))
}

/// Files do not say that these models leave YaRN's ramp as it is.
fn untruncated(scaling: RopeScaling) -> RopeScaling {
    match scaling {
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, .. } => {
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, truncate: false }
        }
        other => other,
    }
}

fn gguf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    match role {
        WeightRole::FfnNorm(l) => format!("blk.{l}.post_attention_norm.weight").into(),
        other => names::gguf(spec, other),
    }
}

/// Gate and up are the even and odd columns of one tensor.
fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use ExpertPart::{Down, DownBias, Gate, GateBias, Up, UpBias};
    let columns = |from, step| ExpertLayout::Columns { from, step };
    let (l, e, name, layout) = match role {
        WeightRole::Mix(l, MixPart::Router) => return format!("model.layers.{l}.mlp.router.weight").into(),
        WeightRole::Mix(l, MixPart::RouterBias) => return format!("model.layers.{l}.mlp.router.bias").into(),
        WeightRole::Expert(l, e, Gate) => (l, e, "gate_up_proj", columns(0, 2)),
        WeightRole::Expert(l, e, Up) => (l, e, "gate_up_proj", columns(1, 2)),
        WeightRole::Expert(l, e, Down) => (l, e, "down_proj", columns(0, 1)),
        WeightRole::Expert(l, e, GateBias) => (l, e, "gate_up_proj_bias", columns(0, 2)),
        WeightRole::Expert(l, e, UpBias) => (l, e, "gate_up_proj_bias", columns(1, 2)),
        WeightRole::Expert(l, e, DownBias) => (l, e, "down_proj_bias", ExpertLayout::Rows),
        other => return names::hf(spec, other),
    };
    let of = spec.block.experts.as_ref().map_or(1, |experts| experts.num_experts);
    let part = Part::Expert { expert: e.into(), of: of.into(), layout };
    Source::part(format!("model.layers.{l}.mlp.experts.{name}"), part)
}
