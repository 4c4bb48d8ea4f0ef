//! StableLM 2: llama with LayerNorms and a part of each head that rotates.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, NormKind, Residual, RopePairing};

pub const FAMILY: Family = Family {
    name: "stablelm",
    hf_class: "StableLmForCausalLM",
    gguf_name: Some("stablelm"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

fn block() -> BlockSpec {
    BlockSpec { norm: NormKind::Layer { bias: true }, ..BlockSpec::LLAMA }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    if config.flag("qk_layernorm", false)? {
        return Err(Fault::Unsupported("qk_layernorm is not supported".into()));
    }
    let renamed = config.renamed(&[("rms_norm_eps", "layer_norm_eps")]);
    let defaults = Defaults { partial_rotary: Some(0.25), ..Defaults::llama(4096) };
    let spec = Config::new(&renamed).base_spec("stablelm", &defaults)?;
    let bias = config.flag("use_qkv_bias", false)?;
    let is_parallel = config.flag("use_parallel_residual", false)?;
    let residual = if is_parallel { Residual::ParallelOneNorm } else { Residual::Sequential };
    let block = BlockSpec { residual, activation: spec.block.activation, ..block() };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    if metadata.has_tensor("blk.0.attn_q_norm.weight") {
        return metadata.unsupported("qk_layernorm is not supported".into());
    }
    let spec = metadata.base_spec("stablelm", RopePairing::Half)?;
    let is_parallel = metadata.flag("use_parallel_residual")?.unwrap_or(false);
    let residual = if is_parallel { Residual::ParallelOneNorm } else { Residual::Sequential };
    Ok(ModelSpec { block: BlockSpec { residual, ..block() }, ..spec })
}
