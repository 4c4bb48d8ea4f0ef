//! Mistral 7B and relatives: llama with a sliding window. Their GGUF files carry the name `llama`.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{ModelSpec, RopePairing};

pub const FAMILY: Family = Family {
    name: "mistral",
    hf_class: "MistralForCausalLM",
    gguf_name: None,
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

/// transformers' window when the key is missing; null means none.
const DEFAULT_WINDOW: u32 = 4096;

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("mistral", &Defaults { max_position: 131_072, head_dim: None })?;
    let window = if config.has("sliding_window") { config.count("sliding_window")? } else { Some(DEFAULT_WINDOW) };
    Ok(ModelSpec { windows: vec![window; spec.windows.len()], ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    metadata.base_spec("mistral", RopePairing::Interleaved)
}
