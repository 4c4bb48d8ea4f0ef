//! Gemma 1 to 3 (text): gains stored less 1, GeGLU, scaled embeddings; from 2 on norms before and after; Gemma 2 with soft
//! caps, Gemma 3 with q and k norms and another rope in its windowed layers.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::rope_config;
use super::source::Source;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{
    Activation, BlockSpec, ModelSpec, NormPlacement, QkNorm, RopePairing, RopeScaling, RopeSpec, WeightRole,
};

pub const GEMMA: Family = Family {
    name: "gemma",
    hf_class: "GemmaForCausalLM",
    gguf_name: Some("gemma"),
    spec_of_config: |config| Ok(first(base(config, "gemma")?)),
    spec_of_gguf: |metadata| Ok(first(gguf_base(metadata, "gemma", 1)?)),
    hf_tensor,
    gguf_tensor: names::gguf,
};

pub const GEMMA2: Family = Family {
    name: "gemma2",
    hf_class: "Gemma2ForCausalLM",
    gguf_name: Some("gemma2"),
    spec_of_config: gemma2_of_config,
    spec_of_gguf: gemma2_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

pub const GEMMA3: Family = Family {
    name: "gemma3_text",
    hf_class: "Gemma3ForCausalLM",
    gguf_name: Some("gemma3"),
    spec_of_config: gemma3_of_config,
    spec_of_gguf: gemma3_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

fn block() -> BlockSpec {
    BlockSpec { norm_placement: NormPlacement::BeforeAndAfter, activation: Activation::GeluTanh, ..BlockSpec::LLAMA }
}

/// Gemma 1: norms before alone, scores scaled by the head dim.
fn first(spec: ModelSpec) -> ModelSpec {
    let block = BlockSpec { norm_placement: NormPlacement::Before, attention_scale: None, ..spec.block };
    ModelSpec { block, ..spec }
}

fn gemma2_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = base(config, "gemma2")?;
    let windows = config.pattern_windows(spec.num_layers, 2)?;
    let cap = |key: &str, default: f64| match config.contains(key) {
        true => config.number(key),
        false => Ok(Some(default)),
    };
    let block = BlockSpec {
        attention_softcap: cap("attn_logit_softcapping", 50.0)?.map(|c| c as f32),
        logit_softcap: cap("final_logit_softcapping", 30.0)?.map(|c| c as f32),
        ..spec.block
    };
    Ok(ModelSpec { windows, block, ..spec })
}

fn gemma3_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let pattern = config.count("sliding_window_pattern")?.or(config.count("_sliding_window_pattern")?).unwrap_or(6);
    let spec = base(config, "gemma3_text")?;
    let windows = config.pattern_windows(spec.num_layers, pattern)?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.number(key)?.is_some() {
            return Err(Fault::Unsupported(format!("{key} is not supported for gemma3")));
        }
    }
    let windowed = rope_config::windowed(config, &spec.rope, spec.max_position)?;
    let block = BlockSpec { windowed_rope: Some(windowed), ..spec.block };
    Ok(ModelSpec { windows, qk_norm: QkNorm::Head, block, ..spec })
}

fn base(config: &Config, family: &str) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[("hidden_act", "hidden_activation")]);
    let defaults = Defaults {
        head_dim: Some(256),
        activation: Activation::GeluTanh,
        tie_embeddings: true,
        ..Defaults::llama(if family == "gemma3_text" { 131_072 } else { 8192 })
    };
    let spec = Config::new(&renamed).base_spec(family, &defaults)?;
    let query = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    let bias = config.flag("attention_bias", false)?;
    let block = BlockSpec {
        activation: spec.block.activation,
        embedding_scale: f64::from(spec.hidden_size).sqrt() as f32,
        attention_scale: Some((1.0 / query.sqrt()) as f32),
        ..block()
    };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, block, ..spec })
}

fn gemma2_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = gguf_base(metadata, "gemma2", 2)?;
    let block = BlockSpec {
        attention_softcap: metadata.number("attn_logit_softcapping")?.map(|c| c as f32),
        logit_softcap: metadata.number("final_logit_softcapping")?.map(|c| c as f32),
        // The 27B model (46 layers) scales by hidden size / heads, the others by the head dim.
        attention_scale: (spec.num_layers == 46)
            .then(|| (f64::from(spec.num_heads) / f64::from(spec.hidden_size)).sqrt() as f32),
        ..spec.block
    };
    Ok(ModelSpec { block, ..spec })
}

fn gemma3_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = gguf_base(metadata, "gemma3", 6)?;
    let theta = metadata.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let windowed = RopeSpec { theta, scaling: RopeScaling::None, ..spec.rope.clone() };
    let block = BlockSpec {
        windowed_rope: Some(windowed),
        // The 27B model (62 layers) scales by hidden size / heads, the others by the head dim.
        attention_scale: (spec.num_layers == 62)
            .then(|| (f64::from(spec.num_heads) / f64::from(spec.hidden_size)).sqrt() as f32),
        ..spec.block
    };
    Ok(ModelSpec { arch: "gemma3_text".into(), qk_norm: QkNorm::Head, block, ..spec })
}

/// Every `pattern`-th layer sees all keys, the others a window.
fn gguf_base(metadata: &Metadata, family: &str, pattern: u32) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec(family, RopePairing::Half)?;
    let window = spec.windows.first().copied().flatten();
    let windows = (0..spec.num_layers).map(|l| window.filter(|_| !(l + 1).is_multiple_of(pattern))).collect();
    let block = BlockSpec { embedding_scale: f64::from(spec.hidden_size).sqrt() as f32, ..block() };
    Ok(ModelSpec { windows, block, ..spec })
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let source = match role {
        FfnNorm(l) if spec.block.norm_placement == NormPlacement::BeforeAndAfter => {
            format!("model.layers.{l}.pre_feedforward_layernorm.weight").into()
        }
        other => names::hf(spec, other),
    };
    let is_gain =
        matches!(role, OutputNorm | AttnNorm(_) | PostAttnNorm(_) | FfnNorm(_) | PostFfnNorm(_) | QNorm(_) | KNorm(_));
    Source { add: if is_gain { 1.0 } else { 0.0 }, ..source }
}
