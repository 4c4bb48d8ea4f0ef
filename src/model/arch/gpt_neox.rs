//! GPT-NeoX and Pythia: LayerNorms, attention and MLP side by side, Q, K and V of each head together in one tensor.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{Activation, BlockSpec, MlpKind, ModelSpec, NormKind, Residual, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "gpt_neox",
    hf_class: "GPTNeoXForCausalLM",
    gguf_name: Some("gptneox"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf_fused_qkv,
};

fn block() -> BlockSpec {
    BlockSpec {
        norm: NormKind::Layer { bias: true },
        residual: Residual::Parallel,
        mlp: MlpKind::Plain,
        activation: Activation::Gelu,
        ..BlockSpec::LLAMA
    }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[
        ("rms_norm_eps", "layer_norm_eps"),
        ("partial_rotary_factor", "rotary_pct"),
        ("rope_theta", "rotary_emb_base"),
    ]);
    let defaults = Defaults { partial_rotary: Some(0.25), activation: Activation::Gelu, ..Defaults::llama(2048) };
    let spec = Config::new(&renamed).base_spec("gpt_neox", &defaults)?;
    let residual = residual(config.flag("use_parallel_residual", true)?);
    let bias = config.flag("attention_bias", true)?;
    let block = BlockSpec { activation: spec.block.activation, residual, ..block() };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias: true, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("gpt_neox", RopePairing::Half)?;
    let residual = residual(metadata.flag("use_parallel_residual")?.unwrap_or(true));
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, block: BlockSpec { residual, ..block() }, ..spec })
}

fn residual(is_parallel: bool) -> Residual {
    if is_parallel { Residual::Parallel } else { Residual::Sequential }
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let dim = u64::from(spec.head_dim);
    let third = |i: u64| Part::Every { period: 3 * dim, from: i * dim, take: dim };
    let (layer, name, part) = match role {
        TokenEmbedding => return "gpt_neox.embed_in.weight".to_owned().into(),
        OutputNorm => return "gpt_neox.final_layer_norm.weight".to_owned().into(),
        OutputNormBias => return "gpt_neox.final_layer_norm.bias".to_owned().into(),
        LmHead => return "embed_out.weight".to_owned().into(),
        Q(l) => (l, "attention.query_key_value.weight", third(0)),
        K(l) => (l, "attention.query_key_value.weight", third(1)),
        V(l) => (l, "attention.query_key_value.weight", third(2)),
        QBias(l) => (l, "attention.query_key_value.bias", third(0)),
        KBias(l) => (l, "attention.query_key_value.bias", third(1)),
        VBias(l) => (l, "attention.query_key_value.bias", third(2)),
        O(l) => (l, "attention.dense.weight", Part::Whole),
        OBias(l) => (l, "attention.dense.bias", Part::Whole),
        Up(l) => (l, "mlp.dense_h_to_4h.weight", Part::Whole),
        UpBias(l) => (l, "mlp.dense_h_to_4h.bias", Part::Whole),
        Down(l) => (l, "mlp.dense_4h_to_h.weight", Part::Whole),
        DownBias(l) => (l, "mlp.dense_4h_to_h.bias", Part::Whole),
        AttnNorm(l) => (l, "input_layernorm.weight", Part::Whole),
        AttnNormBias(l) => (l, "input_layernorm.bias", Part::Whole),
        FfnNorm(l) => (l, "post_attention_layernorm.weight", Part::Whole),
        FfnNormBias(l) => (l, "post_attention_layernorm.bias", Part::Whole),
        other => return names::hf(spec, other),
    };
    Source::part(format!("gpt_neox.layers.{layer}.{name}"), part)
}
