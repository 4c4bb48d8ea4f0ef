//! Llama 1 to 3 and what is built alike (SmolLM2, TinyLlama, …).

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{ModelSpec, RopePairing};

pub const FAMILY: Family = Family {
    name: "llama",
    hf_class: "LlamaForCausalLM",
    gguf_name: Some("llama"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("llama", &Defaults::llama(2048))?;
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias, ..spec })
}

/// Q and K rows are permuted in these files: pairs are neighbours.
fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    metadata.base_spec("llama", RopePairing::Interleaved)
}
