//! Granite 3: llama with multipliers of the embedding, of scores, of what a block adds, and a divisor of the logits.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, RopePairing};

pub const FAMILY: Family = Family {
    name: "granite",
    hf_class: "GraniteForCausalLM",
    gguf_name: Some("granite"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("granite", &Defaults::llama(2048))?;
    let number = |key: &str| Ok::<_, Fault>(config.number(key)?.unwrap_or(1.0));
    let block = BlockSpec {
        embedding_scale: number("embedding_multiplier")? as f32,
        residual_scale: number("residual_multiplier")? as f32,
        attention_scale: Some(number("attention_multiplier")? as f32),
        logit_scale: (1.0 / number("logits_scaling")?) as f32,
        ..spec.block
    };
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias, block, ..spec })
}

/// Q and K rows are permuted as a llama's.
fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("granite", RopePairing::Interleaved)?;
    let number = |key: &str| metadata.number(key);
    let block = BlockSpec {
        embedding_scale: number("embedding_scale")?.unwrap_or(1.0) as f32,
        residual_scale: number("residual_scale")?.unwrap_or(1.0) as f32,
        attention_scale: number("attention.scale")?.map(|scale| scale as f32),
        logit_scale: (1.0 / number("logit_scale")?.unwrap_or(1.0)) as f32,
        ..spec.block
    };
    Ok(ModelSpec { block, ..spec })
}
