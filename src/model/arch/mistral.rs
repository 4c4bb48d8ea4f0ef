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

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("mistral", &Defaults::llama(131_072))?;
    let window = config.window()?;
    Ok(ModelSpec { windows: vec![window; spec.windows.len()], ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    metadata.base_spec("mistral", RopePairing::Interleaved)
}
