//! StarCoder 2: LayerNorms and biases everywhere, a plain MLP, a sliding window.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::Source;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{Activation, BlockSpec, MlpKind, ModelSpec, NormKind, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "starcoder2",
    hf_class: "Starcoder2ForCausalLM",
    gguf_name: Some("starcoder2"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

fn block() -> BlockSpec {
    BlockSpec {
        norm: NormKind::Layer { bias: true },
        mlp: MlpKind::Plain,
        activation: Activation::GeluTanh,
        ..BlockSpec::LLAMA
    }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[("rms_norm_eps", "norm_epsilon")]);
    let defaults = Defaults { activation: Activation::GeluTanh, tie_embeddings: true, ..Defaults::llama(4096) };
    let spec = Config::new(&renamed).base_spec("starcoder2", &defaults)?;
    let (bias, window) = (config.flag("use_bias", true)?, config.count("sliding_window")?);
    let block = BlockSpec { activation: spec.block.activation, ..block() };
    let windows = vec![window; spec.windows.len()];
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias: bias, block, windows, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("starcoder2", RopePairing::Half)?;
    let mlp_bias = metadata.has_tensor("blk.0.ffn_up.bias");
    Ok(ModelSpec { mlp_bias, block: block(), ..spec })
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let (layer, name) = match role {
        Up(l) => (l, "c_fc.weight"),
        UpBias(l) => (l, "c_fc.bias"),
        Down(l) => (l, "c_proj.weight"),
        DownBias(l) => (l, "c_proj.bias"),
        other => return names::hf(spec, other),
    };
    format!("model.layers.{layer}.mlp.{name}").into()
}
