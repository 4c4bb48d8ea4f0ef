//! Falcon 7B to 180B: attention and a plain MLP side by side, Q, K and V of each key-value head together in one tensor.
//! Falcon-RW has position biases instead of rope, a head of keys for each of queries, and the MLP behind attention.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{Activation, BlockSpec, MlpKind, ModelSpec, NormKind, Residual, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "falcon",
    hf_class: "FalconForCausalLM",
    gguf_name: Some("falcon"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor,
};

fn block(residual: Residual) -> BlockSpec {
    BlockSpec {
        norm: NormKind::Layer { bias: true },
        residual,
        mlp: MlpKind::Plain,
        activation: Activation::Gelu,
        ..BlockSpec::LLAMA
    }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("intermediate_size", "ffn_hidden_size"),
        ("hidden_act", "activation"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
    ]);
    let defaults = Defaults {
        activation: Activation::Gelu,
        intermediate_factor: Some(4),
        tie_embeddings: true,
        ..Defaults::llama(2048)
    };
    let spec = Config::new(&renamed).base_spec("falcon", &defaults)?;
    let is_new = config.flag("new_decoder_architecture", false)?;
    let num_kv_heads = match (is_new, config.flag("multi_query", true)?) {
        (true, _) => config.count("num_kv_heads")?.unwrap_or(spec.num_heads),
        (false, true) => 1,
        (false, false) => spec.num_heads,
    };
    let num_norms = config.count("num_ln_in_parallel_attn")?;
    let residual = match (config.flag("parallel_attn", true)?, is_new) {
        (_, true) if num_norms != Some(1) => Residual::Parallel,
        (true, _) | (_, true) => Residual::ParallelOneNorm,
        (false, false) => Residual::Sequential,
    };
    let bias = config.flag("bias", false)?;
    let has_alibi = config.flag("alibi", false)?;
    let block = BlockSpec { activation: spec.block.activation, has_alibi, ..block(residual) };
    let spec = ModelSpec { num_kv_heads, block, ..spec };
    Ok(ModelSpec { q_bias: bias, k_bias: bias, v_bias: bias, o_bias: bias, mlp_bias: bias, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let has_two_norms = metadata.has_tensor("blk.0.attn_norm_2.weight");
    let residual = if has_two_norms { Residual::Parallel } else { Residual::ParallelOneNorm };
    Ok(ModelSpec { block: block(residual), ..metadata.base_spec("falcon", RopePairing::Half)? })
}

/// The norm that attention reads is `attn_norm_2` where there are two.
fn gguf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let has_two = spec.block.residual == Residual::Parallel;
    match role {
        AttnNorm(l) if has_two => format!("blk.{l}.attn_norm_2.weight").into(),
        AttnNormBias(l) if has_two => format!("blk.{l}.attn_norm_2.bias").into(),
        FfnNorm(l) => names::gguf(spec, AttnNorm(l)),
        FfnNormBias(l) => names::gguf(spec, AttnNormBias(l)),
        other => names::gguf_fused_qkv(spec, other),
    }
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let dim = u64::from(spec.head_dim);
    let group = u64::from(spec.num_heads / spec.num_kv_heads);
    // Each key-value head: its query heads, then K, then V.
    let of_group = |from: u64, take: u64| Part::Every { period: (group + 2) * dim, from: from * dim, take: take * dim };
    let (two, sequential) = (spec.block.residual == Residual::Parallel, spec.block.residual == Residual::Sequential);
    let (layer, name, part) = match role {
        TokenEmbedding => return "transformer.word_embeddings.weight".to_owned().into(),
        OutputNorm => return "transformer.ln_f.weight".to_owned().into(),
        OutputNormBias => return "transformer.ln_f.bias".to_owned().into(),
        AttnNorm(l) => (l, if two { "ln_attn.weight" } else { "input_layernorm.weight" }, Part::Whole),
        AttnNormBias(l) => (l, if two { "ln_attn.bias" } else { "input_layernorm.bias" }, Part::Whole),
        FfnNorm(l) => (l, if sequential { "post_attention_layernorm.weight" } else { "ln_mlp.weight" }, Part::Whole),
        FfnNormBias(l) => (l, if sequential { "post_attention_layernorm.bias" } else { "ln_mlp.bias" }, Part::Whole),
        Q(l) => (l, "self_attention.query_key_value.weight", of_group(0, group)),
        K(l) => (l, "self_attention.query_key_value.weight", of_group(group, 1)),
        V(l) => (l, "self_attention.query_key_value.weight", of_group(group + 1, 1)),
        QBias(l) => (l, "self_attention.query_key_value.bias", of_group(0, group)),
        KBias(l) => (l, "self_attention.query_key_value.bias", of_group(group, 1)),
        VBias(l) => (l, "self_attention.query_key_value.bias", of_group(group + 1, 1)),
        O(l) => (l, "self_attention.dense.weight", Part::Whole),
        OBias(l) => (l, "self_attention.dense.bias", Part::Whole),
        Up(l) => (l, "mlp.dense_h_to_4h.weight", Part::Whole),
        UpBias(l) => (l, "mlp.dense_h_to_4h.bias", Part::Whole),
        Down(l) => (l, "mlp.dense_4h_to_h.weight", Part::Whole),
        DownBias(l) => (l, "mlp.dense_4h_to_h.bias", Part::Whole),
        other => return names::hf(spec, other),
    };
    Source::part(format!("transformer.h.{layer}.{name}"), part)
}
