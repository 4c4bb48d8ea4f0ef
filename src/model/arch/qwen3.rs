//! Qwen 3: RMSNorm over each head of Q and K, no biases unless the config asks for them.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{ModelSpec, QkNorm, RopePairing};

pub const FAMILY: Family = Family {
    name: "qwen3",
    hf_class: "Qwen3ForCausalLM",
    gguf_name: Some("qwen3"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("qwen3", &Defaults { head_dim: Some(128), ..Defaults::llama(32_768) })?;
    let bias = config.flag("attention_bias", false)?;
    let windows = config.qwen_windows(spec.num_layers)?;
    Ok(ModelSpec { qk_norm: QkNorm::Head, q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, windows, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("qwen3", RopePairing::Half)?;
    Ok(ModelSpec { qk_norm: QkNorm::Head, ..spec })
}
