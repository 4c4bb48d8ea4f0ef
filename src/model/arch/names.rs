//! Tensor names that the llama-like families share.

use super::source::{ExpertLayout, Part, Source};
use crate::model::experts::{ExpertPart, MixPart};
use crate::model::latent::LatentPart;
use crate::model::spec::{ModelSpec, WeightRole};

/// Names of Hugging Face checkpoints (`LlamaForCausalLM` and its relatives).
pub fn hf(_: &ModelSpec, role: WeightRole) -> Source {
    hf_name(role).into()
}

/// The name alone, for families that change some of them.
pub fn hf_name(role: WeightRole) -> String {
    use WeightRole::*;
    let (layer, part) = match role {
        TokenEmbedding => return "model.embed_tokens.weight".into(),
        PositionEmbedding => return "model.embed_positions.weight".into(),
        OutputNorm => return "model.norm.weight".into(),
        OutputNormBias => return "model.norm.bias".into(),
        LmHead => return "lm_head.weight".into(),
        HeadBias => return "lm_head.bias".into(),
        AttnNormBias(l) => (l, "input_layernorm.bias"),
        Sinks(l) => (l, "self_attn.sinks"),
        PostAttnNorm(l) => (l, "post_attention_layernorm.weight"),
        FfnNormBias(l) => (l, "post_attention_layernorm.bias"),
        PostFfnNorm(l) => (l, "post_feedforward_layernorm.weight"),
        AttnNorm(l) => (l, "input_layernorm.weight"),
        Q(l) => (l, "self_attn.q_proj.weight"),
        K(l) => (l, "self_attn.k_proj.weight"),
        V(l) => (l, "self_attn.v_proj.weight"),
        O(l) => (l, "self_attn.o_proj.weight"),
        QBias(l) => (l, "self_attn.q_proj.bias"),
        KBias(l) => (l, "self_attn.k_proj.bias"),
        VBias(l) => (l, "self_attn.v_proj.bias"),
        OBias(l) => (l, "self_attn.o_proj.bias"),
        QNorm(l) => (l, "self_attn.q_norm.weight"),
        KNorm(l) => (l, "self_attn.k_norm.weight"),
        QNormBias(l) => (l, "self_attn.q_norm.bias"),
        KNormBias(l) => (l, "self_attn.k_norm.bias"),
        FfnNorm(l) => (l, "post_attention_layernorm.weight"),
        Gate(l) => (l, "mlp.gate_proj.weight"),
        Up(l) => (l, "mlp.up_proj.weight"),
        Down(l) => (l, "mlp.down_proj.weight"),
        GateBias(l) => (l, "mlp.gate_proj.bias"),
        UpBias(l) => (l, "mlp.up_proj.bias"),
        DownBias(l) => (l, "mlp.down_proj.bias"),
        Mix(l, part) => (l, hf_mix(part)),
        // Named by their families.
        Latent(l, _) => (l, "self_attn.latent"),
        Expert(l, e, part) => return format!("model.layers.{l}.mlp.experts.{e}.{}", hf_expert(part)),
    };
    format!("model.layers.{layer}.{part}")
}

/// Names of GGUF files.
pub fn gguf(spec: &ModelSpec, role: WeightRole) -> Source {
    match role {
        // All heads of a layer are one tensor.
        WeightRole::Latent(_, LatentPart::KUp(h) | LatentPart::VUp(h)) => {
            let part = Part::Expert { expert: h.into(), of: spec.num_heads.into(), layout: ExpertLayout::Rows };
            Source::part(gguf_name(role), part)
        }
        // All experts of a layer are one tensor.
        WeightRole::Expert(_, e, _) => Source::part(gguf_name(role), expert(spec, e)),
        _ => gguf_name(role).into(),
    }
}

/// Where files of before 2024 (experts) and 2025 (latent attention) hold the role, if they held it elsewhere.
pub fn older_gguf(spec: &ModelSpec, role: WeightRole) -> Option<Source> {
    match role {
        // A tensor of its own for each expert.
        WeightRole::Expert(_, e, _) => Some(gguf_name(role).replace("_exps.", &format!(".{e}.")).into()),
        // One up-projection for the keys and values of all heads.
        WeightRole::Latent(l, LatentPart::KUp(h) | LatentPart::VUp(h)) => {
            let latent = spec.block.latent?;
            let [nope, v, heads, h] = [latent.nope_dim, latent.v_dim, spec.num_heads, h].map(u64::from);
            let (of, from) = (heads * (nope + v), h * (nope + v));
            let part = match role {
                WeightRole::Latent(_, LatentPart::KUp(_)) => Part::TransposedRows { from, of },
                _ => Part::Rows { from: from + nope, of },
            };
            Some(Source::part(format!("blk.{l}.attn_kv_b.weight"), part))
        }
        _ => None,
    }
}

/// Expert `e` of a tensor that holds them one after the other.
pub fn expert(spec: &ModelSpec, e: u32) -> Part {
    let of = spec.block.experts.as_ref().map_or(1, |experts| experts.num_experts);
    Part::Expert { expert: e.into(), of: of.into(), layout: ExpertLayout::Rows }
}

fn gguf_expert(part: ExpertPart) -> &'static str {
    match part {
        ExpertPart::Gate => "ffn_gate_exps.weight",
        ExpertPart::Up => "ffn_up_exps.weight",
        ExpertPart::Down => "ffn_down_exps.weight",
        ExpertPart::GateBias => "ffn_gate_exps.bias",
        ExpertPart::UpBias => "ffn_up_exps.bias",
        ExpertPart::DownBias => "ffn_down_exps.bias",
    }
}

fn gguf_latent(part: LatentPart) -> &'static str {
    match part {
        LatentPart::QDown => "attn_q_a.weight",
        LatentPart::QNorm => "attn_q_a_norm.weight",
        LatentPart::QUp => "attn_q_b.weight",
        LatentPart::KvDown => "attn_kv_a_mqa.weight",
        LatentPart::KvNorm => "attn_kv_a_norm.weight",
        LatentPart::KUp(_) => "attn_k_b.weight",
        LatentPart::VUp(_) => "attn_v_b.weight",
    }
}

fn gguf_mix(part: MixPart) -> &'static str {
    match part {
        MixPart::Router => "ffn_gate_inp.weight",
        MixPart::RouterBias => "ffn_gate_inp.bias",
        MixPart::SelectionBias => "exp_probs_b.bias",
        MixPart::SharedGate => "ffn_gate_shexp.weight",
        MixPart::SharedUp => "ffn_up_shexp.weight",
        MixPart::SharedDown => "ffn_down_shexp.weight",
        MixPart::SharedMix => "ffn_gate_inp_shexp.weight",
    }
}

fn hf_expert(part: ExpertPart) -> &'static str {
    match part {
        ExpertPart::Gate => "gate_proj.weight",
        ExpertPart::Up => "up_proj.weight",
        ExpertPart::Down => "down_proj.weight",
        ExpertPart::GateBias => "gate_proj.bias",
        ExpertPart::UpBias => "up_proj.bias",
        ExpertPart::DownBias => "down_proj.bias",
    }
}

fn hf_mix(part: MixPart) -> &'static str {
    match part {
        MixPart::Router => "mlp.gate.weight",
        MixPart::RouterBias => "mlp.gate.bias",
        MixPart::SelectionBias => "mlp.gate.e_score_correction_bias",
        MixPart::SharedGate => "mlp.shared_expert.gate_proj.weight",
        MixPart::SharedUp => "mlp.shared_expert.up_proj.weight",
        MixPart::SharedDown => "mlp.shared_expert.down_proj.weight",
        MixPart::SharedMix => "mlp.shared_expert_gate.weight",
    }
}

/// The name alone.
pub fn gguf_name(role: WeightRole) -> String {
    use WeightRole::*;
    let (layer, part) = match role {
        TokenEmbedding => return "token_embd.weight".into(),
        PositionEmbedding => return "position_embd.weight".into(),
        OutputNorm => return "output_norm.weight".into(),
        OutputNormBias => return "output_norm.bias".into(),
        LmHead => return "output.weight".into(),
        HeadBias => return "output.bias".into(),
        AttnNormBias(l) => (l, "attn_norm.bias"),
        Sinks(l) => (l, "attn_sinks.weight"),
        PostAttnNorm(l) => (l, "post_attention_norm.weight"),
        FfnNormBias(l) => (l, "ffn_norm.bias"),
        PostFfnNorm(l) => (l, "post_ffw_norm.weight"),
        AttnNorm(l) => (l, "attn_norm.weight"),
        Q(l) => (l, "attn_q.weight"),
        K(l) => (l, "attn_k.weight"),
        V(l) => (l, "attn_v.weight"),
        O(l) => (l, "attn_output.weight"),
        QBias(l) => (l, "attn_q.bias"),
        KBias(l) => (l, "attn_k.bias"),
        VBias(l) => (l, "attn_v.bias"),
        OBias(l) => (l, "attn_output.bias"),
        QNorm(l) => (l, "attn_q_norm.weight"),
        KNorm(l) => (l, "attn_k_norm.weight"),
        QNormBias(l) => (l, "attn_q_norm.bias"),
        KNormBias(l) => (l, "attn_k_norm.bias"),
        FfnNorm(l) => (l, "ffn_norm.weight"),
        Gate(l) => (l, "ffn_gate.weight"),
        Up(l) => (l, "ffn_up.weight"),
        Down(l) => (l, "ffn_down.weight"),
        GateBias(l) => (l, "ffn_gate.bias"),
        UpBias(l) => (l, "ffn_up.bias"),
        DownBias(l) => (l, "ffn_down.bias"),
        Mix(l, part) => (l, gguf_mix(part)),
        Latent(l, part) => (l, gguf_latent(part)),
        Expert(l, _, part) => (l, gguf_expert(part)),
    };
    format!("blk.{layer}.{part}")
}

/// GGUF files whose Q, K and V are one tensor, `attn_qkv`.
pub fn gguf_fused_qkv(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let dim = u64::from(spec.head_dim);
    let (q, kv) = (u64::from(spec.num_heads) * dim, u64::from(spec.num_kv_heads) * dim);
    let (layer, kind, from) = match role {
        Q(l) => (l, "weight", 0),
        K(l) => (l, "weight", q),
        V(l) => (l, "weight", q + kv),
        QBias(l) => (l, "bias", 0),
        KBias(l) => (l, "bias", q),
        VBias(l) => (l, "bias", q + kv),
        other => return gguf(spec, other),
    };
    Source::part(format!("blk.{layer}.attn_qkv.{kind}"), Part::Rows { from, of: q + 2 * kv })
}

/// Those in which `ffn_up` holds gate and, behind it, up as well.
pub fn gguf_fused_qkv_and_up(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let ffn = u64::from(spec.intermediate_size);
    let (layer, from) = match role {
        Gate(l) => (l, 0),
        Up(l) => (l, ffn),
        other => return gguf_fused_qkv(spec, other),
    };
    Source::part(format!("blk.{layer}.ffn_up.weight"), Part::Rows { from, of: 2 * ffn })
}
