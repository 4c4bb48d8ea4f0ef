//! OLMo 2: norms after attention and MLP alone, RMSNorm over all heads of Q and of K together.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, NormPlacement, QkNorm, RopePairing};

pub const FAMILY: Family = Family {
    name: "olmo2",
    hf_class: "Olmo2ForCausalLM",
    gguf_name: Some("olmo2"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("olmo2", &Defaults::llama(2048))?;
    let bias = config.flag("attention_bias", false)?;
    let block = BlockSpec { norm_placement: NormPlacement::After, ..spec.block };
    let qk_norm = QkNorm::Width;
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, qk_norm, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("olmo2", RopePairing::Half)?;
    if spec.windows.iter().any(Option::is_some) {
        return metadata.unsupported("architecture `olmo2` with a sliding window is not supported".into());
    }
    let block = BlockSpec { norm_placement: NormPlacement::After, ..spec.block };
    Ok(ModelSpec { qk_norm: QkNorm::Width, block, ..spec })
}
