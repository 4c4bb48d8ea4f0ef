//! Phi 1 and 2: attention and a plain MLP side by side through one LayerNorm, half of each head rotates, biases
//! everywhere, the head included. Some norm each head of Q and K.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::Source;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{
    Activation, BlockSpec, MlpKind, ModelSpec, NormKind, QkNorm, Residual, RopePairing, WeightRole,
};

pub const FAMILY: Family = Family {
    name: "phi",
    hf_class: "PhiForCausalLM",
    gguf_name: Some("phi2"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

fn block() -> BlockSpec {
    BlockSpec {
        norm: NormKind::Layer { bias: true },
        residual: Residual::ParallelOneNorm,
        mlp: MlpKind::Plain,
        activation: Activation::GeluTanh,
        head_bias: true,
        ..BlockSpec::LLAMA
    }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[("rms_norm_eps", "layer_norm_eps")]);
    let defaults = Defaults { partial_rotary: Some(0.5), activation: Activation::GeluTanh, ..Defaults::llama(2048) };
    let spec = Config::new(&renamed).base_spec("phi", &defaults)?;
    if spec.tie_embeddings {
        return Err(Fault::Unsupported("tie_word_embeddings = true is not supported".into()));
    }
    let block = BlockSpec { activation: spec.block.activation, ..block() };
    let qk_norm = if config.flag("qk_layernorm", false)? { QkNorm::LayerShared } else { QkNorm::None };
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, o_bias: true, mlp_bias: true, qk_norm, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("phi", RopePairing::Half)?;
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, block: block(), ..spec })
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let (layer, name) = match role {
        OutputNorm => return "model.final_layernorm.weight".to_owned().into(),
        OutputNormBias => return "model.final_layernorm.bias".to_owned().into(),
        QNorm(l) => (l, "self_attn.q_layernorm.weight"),
        KNorm(l) => (l, "self_attn.k_layernorm.weight"),
        QNormBias(l) => (l, "self_attn.q_layernorm.bias"),
        KNormBias(l) => (l, "self_attn.k_layernorm.bias"),
        O(l) => (l, "self_attn.dense.weight"),
        OBias(l) => (l, "self_attn.dense.bias"),
        Up(l) => (l, "mlp.fc1.weight"),
        UpBias(l) => (l, "mlp.fc1.bias"),
        Down(l) => (l, "mlp.fc2.weight"),
        DownBias(l) => (l, "mlp.fc2.bias"),
        other => return names::hf(spec, other),
    };
    format!("model.layers.{layer}.{name}").into()
}
