//! StableLM 2: llama with LayerNorms and a part of each head that rotates; the 12B also norms each head of Q and K, with a
//! tensor for each head in folders and one for all of a layer in GGUF files.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, NormKind, QkNorm, Residual, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "stablelm",
    hf_class: "StableLmForCausalLM",
    gguf_name: Some("stablelm"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

fn block() -> BlockSpec {
    BlockSpec { norm: NormKind::Layer { bias: true }, ..BlockSpec::LLAMA }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[("rms_norm_eps", "layer_norm_eps")]);
    let defaults = Defaults { partial_rotary: Some(0.25), ..Defaults::llama(4096) };
    let spec = Config::new(&renamed).base_spec("stablelm", &defaults)?;
    let bias = config.flag("use_qkv_bias", false)?;
    let is_parallel = config.flag("use_parallel_residual", false)?;
    let residual = if is_parallel { Residual::ParallelOneNorm } else { Residual::Sequential };
    let block = BlockSpec { residual, activation: spec.block.activation, ..block() };
    let qk_norm = qk_norm(config.flag("qk_layernorm", false)?);
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, qk_norm, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("stablelm", RopePairing::Half)?;
    let is_parallel = metadata.flag("use_parallel_residual")?.unwrap_or(false);
    let residual = if is_parallel { Residual::ParallelOneNorm } else { Residual::Sequential };
    let qk_norm = qk_norm(metadata.has_tensor("blk.0.attn_q_norm.weight"));
    Ok(ModelSpec { qk_norm, block: BlockSpec { residual, ..block() }, ..spec })
}

fn qk_norm(is_there: bool) -> QkNorm {
    if is_there { QkNorm::LayerPerHead } else { QkNorm::None }
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    let of_heads = |l: u32, which: &str| {
        Source::part(format!("model.layers.{l}.self_attn.{which}_layernorm.norms.{{}}.weight"), Part::RowEach)
    };
    match role {
        WeightRole::QNorm(l) => of_heads(l, "q"),
        WeightRole::KNorm(l) => of_heads(l, "k"),
        other => names::hf(spec, other),
    }
}
