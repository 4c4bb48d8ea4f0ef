//! Phi 1 and 2: attention and a plain MLP side by side through one LayerNorm, half of each head rotates, biases
//! everywhere, the head included.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::Source;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{Activation, BlockSpec, MlpKind, ModelSpec, NormKind, Residual, RopePairing, WeightRole};

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
    if config.flag("qk_layernorm", false)? {
        return Err(Fault::Unsupported("qk_layernorm is not supported".into()));
    }
    let renamed = config.renamed(&[("rms_norm_eps", "layer_norm_eps")]);
    let defaults = Defaults { partial_rotary: Some(0.5), activation: Activation::GeluTanh, ..Defaults::llama(2048) };
    let spec = Config::new(&renamed).base_spec("phi", &defaults)?;
    if spec.tie_embeddings {
        return Err(Fault::Unsupported("tie_word_embeddings = true is not supported".into()));
    }
    let block = BlockSpec { activation: spec.block.activation, ..block() };
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, o_bias: true, mlp_bias: true, block, ..spec })
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
