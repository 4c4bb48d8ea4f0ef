//! SmolLM 3: llama in which some layers do not rotate, every fourth if nothing else is said.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, RopePairing};

pub const FAMILY: Family = Family {
    name: "smollm3",
    hf_class: "SmolLM3ForCausalLM",
    gguf_name: Some("smollm3"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

const INTERVAL: u32 = 4;

fn every(num_layers: u32, interval: u32) -> Vec<u32> {
    (0..num_layers).filter(|l| (l + 1).is_multiple_of(interval)).collect()
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let defaults = Defaults { tie_embeddings: true, ..Defaults::llama(32_768) };
    let spec = config.base_spec("smollm3", &defaults)?;
    let interval = config.count("no_rope_layer_interval")?.unwrap_or(INTERVAL);
    let layers_without_rope = match config.flags("no_rope_layers", spec.num_layers)? {
        // In spite of the key's name, true is a layer that rotates.
        Some(rotates) => (0..spec.num_layers).filter(|&l| !rotates[l as usize]).collect(),
        None => every(spec.num_layers, interval),
    };
    let bias = config.flag("attention_bias", false)?;
    let mlp_bias = config.flag("mlp_bias", false)?;
    let windows = config.qwen_windows(spec.num_layers)?;
    let block = BlockSpec { layers_without_rope, ..spec.block };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias, windows, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("smollm3", RopePairing::Interleaved)?;
    let block = BlockSpec { layers_without_rope: every(spec.num_layers, INTERVAL), ..spec.block };
    Ok(ModelSpec { block, ..spec })
}
