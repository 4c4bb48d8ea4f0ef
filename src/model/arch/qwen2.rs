//! Qwen 2 and 2.5: biases on Q, K and V.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{ModelSpec, RopePairing};

pub const FAMILY: Family = Family {
    name: "qwen2",
    hf_class: "Qwen2ForCausalLM",
    gguf_name: Some("qwen2"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("qwen2", &Defaults::llama(32_768))?;
    let windows = config.qwen_windows(spec.num_layers)?;
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, windows, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("qwen2", RopePairing::Half)?;
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, ..spec })
}
