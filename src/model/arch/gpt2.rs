//! GPT-2: LayerNorms with biases, learned positions, a plain MLP; checkpoints hold `Conv1D` weights, `[in, out]`.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{Activation, BlockSpec, MlpKind, ModelSpec, NormKind, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "gpt2",
    hf_class: "GPT2LMHeadModel",
    gguf_name: Some("gpt2"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf_fused_qkv,
};

fn block() -> BlockSpec {
    BlockSpec {
        norm: NormKind::Layer { bias: true },
        mlp: MlpKind::Plain,
        activation: Activation::GeluTanh,
        learned_positions: true,
        ..BlockSpec::LLAMA
    }
}

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    for key in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
        if config.flag(key, false)? {
            return Err(Fault::Unsupported(format!("{key} is not supported")));
        }
    }
    if !config.flag("scale_attn_weights", true)? {
        return Err(Fault::Unsupported("scale_attn_weights = false is not supported".into()));
    }
    let spec = config.renamed(&[
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
        ("intermediate_size", "n_inner"),
        ("hidden_act", "activation_function"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ]);
    let defaults = Defaults {
        activation: Activation::GeluTanh,
        intermediate_factor: Some(4),
        tie_embeddings: true,
        ..Defaults::llama(1024)
    };
    let spec = Config::new(&spec).base_spec("gpt2", &defaults)?;
    let block = BlockSpec { activation: spec.block.activation, ..block() };
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, o_bias: true, mlp_bias: true, block, ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("gpt2", RopePairing::Half)?;
    Ok(ModelSpec { q_bias: true, k_bias: true, v_bias: true, block: block(), ..spec })
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let q = u64::from(spec.hidden_size);
    let (layer, name, part) = match role {
        TokenEmbedding => return "transformer.wte.weight".to_owned().into(),
        PositionEmbedding => return "transformer.wpe.weight".to_owned().into(),
        OutputNorm => return "transformer.ln_f.weight".to_owned().into(),
        OutputNormBias => return "transformer.ln_f.bias".to_owned().into(),
        AttnNorm(l) => (l, "ln_1.weight", Part::Whole),
        AttnNormBias(l) => (l, "ln_1.bias", Part::Whole),
        FfnNorm(l) => (l, "ln_2.weight", Part::Whole),
        FfnNormBias(l) => (l, "ln_2.bias", Part::Whole),
        Q(l) => (l, "attn.c_attn.weight", Part::Columns { from: 0, of: 3 * q }),
        K(l) => (l, "attn.c_attn.weight", Part::Columns { from: q, of: 3 * q }),
        V(l) => (l, "attn.c_attn.weight", Part::Columns { from: 2 * q, of: 3 * q }),
        QBias(l) => (l, "attn.c_attn.bias", Part::Columns { from: 0, of: 3 * q }),
        KBias(l) => (l, "attn.c_attn.bias", Part::Columns { from: q, of: 3 * q }),
        VBias(l) => (l, "attn.c_attn.bias", Part::Columns { from: 2 * q, of: 3 * q }),
        O(l) => (l, "attn.c_proj.weight", Part::Columns { from: 0, of: q }),
        OBias(l) => (l, "attn.c_proj.bias", Part::Whole),
        Up(l) => (l, "mlp.c_fc.weight", Part::Columns { from: 0, of: spec.intermediate_size.into() }),
        UpBias(l) => (l, "mlp.c_fc.bias", Part::Whole),
        Down(l) => (l, "mlp.c_proj.weight", Part::Columns { from: 0, of: q }),
        DownBias(l) => (l, "mlp.c_proj.bias", Part::Whole),
        other => return names::hf(spec, other),
    };
    Source::part(format!("transformer.h.{layer}.{name}"), part)
}
