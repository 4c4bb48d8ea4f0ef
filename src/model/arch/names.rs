//! Tensor names that the llama-like families share.

use crate::model::spec::WeightRole;

/// Names of Hugging Face checkpoints (`LlamaForCausalLM` and its relatives).
pub fn hf(role: WeightRole) -> String {
    use WeightRole::*;
    let (layer, part) = match role {
        TokenEmbedding => return "model.embed_tokens.weight".into(),
        OutputNorm => return "model.norm.weight".into(),
        LmHead => return "lm_head.weight".into(),
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
        FfnNorm(l) => (l, "post_attention_layernorm.weight"),
        Gate(l) => (l, "mlp.gate_proj.weight"),
        Up(l) => (l, "mlp.up_proj.weight"),
        Down(l) => (l, "mlp.down_proj.weight"),
        GateBias(l) => (l, "mlp.gate_proj.bias"),
        UpBias(l) => (l, "mlp.up_proj.bias"),
        DownBias(l) => (l, "mlp.down_proj.bias"),
    };
    format!("model.layers.{layer}.{part}")
}

/// Names of GGUF files.
pub fn gguf(role: WeightRole) -> String {
    use WeightRole::*;
    let (layer, part) = match role {
        TokenEmbedding => return "token_embd.weight".into(),
        OutputNorm => return "output_norm.weight".into(),
        LmHead => return "output.weight".into(),
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
        FfnNorm(l) => (l, "ffn_norm.weight"),
        Gate(l) => (l, "ffn_gate.weight"),
        Up(l) => (l, "ffn_up.weight"),
        Down(l) => (l, "ffn_down.weight"),
        GateBias(l) => (l, "ffn_gate.bias"),
        UpBias(l) => (l, "ffn_up.bias"),
        DownBias(l) => (l, "ffn_down.bias"),
    };
    format!("blk.{layer}.{part}")
}
