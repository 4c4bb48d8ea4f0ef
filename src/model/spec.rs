//! What a checkpoint's header says of the model: dimensions, heads, rope, norms, windows. Validated on construction;
//! the one forward pass is driven by it, so there is no per-family code beyond `arch/`.

use serde::{Deserialize, Serialize};

/// Facts that the forward pass needs. All counts are at least 1 unless said otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Family as its files name it: `llama`, `mistral`, `qwen2`, `qwen3`.
    pub arch: String,
    pub num_layers: u32,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub num_heads: u32,
    /// Divides `num_heads`.
    pub num_kv_heads: u32,
    /// Even.
    pub head_dim: u32,
    pub vocab_size: u32,
    /// Longest context the model was made for.
    pub max_position: u32,
    pub rms_eps: f32,
    pub rope: RopeSpec,
    /// RMSNorm over each head of Q and K before rope (qwen3).
    pub qk_norm: bool,
    pub q_bias: bool,
    pub k_bias: bool,
    pub v_bias: bool,
    pub o_bias: bool,
    /// Biases of gate, up and down projections.
    pub mlp_bias: bool,
    /// Keys visible per layer: `None` is all; `Some(w)` the last w including the token itself. One entry per layer.
    pub windows: Vec<Option<u32>>, // [num_layers]
    /// The head reads the embedding table.
    pub tie_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// Any of these ends the output.
    pub eos_token_ids: Vec<u32>,
}

/// Rotary position embedding (RoFormer, arXiv 2104.09864).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    pub theta: f64,
    /// Leading dims of each head that rotate; even, at most `head_dim`.
    pub rotary_dim: u32,
    pub pairing: RopePairing,
    pub scaling: RopeScaling,
}

/// Which two dims form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RopePairing {
    /// (i, i + rotary_dim/2): Hugging Face's order.
    Half,
    /// (2i, 2i + 1): the order of llama GGUFs, whose Q and K rows are permuted.
    Interleaved,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: u32,
    },
    /// YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_position: u32,
        attention_factor: f64,
        truncate: bool,
    },
    /// A divisor per pair, as GGUF's `rope_freqs.weight` holds it. [rotary_dim / 2]
    FreqFactors {
        factors: Vec<f32>,
    },
}

/// A tensor of the model by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightRole {
    TokenEmbedding,
    OutputNorm,
    LmHead,
    AttnNorm(u32),
    Q(u32),
    K(u32),
    V(u32),
    O(u32),
    QBias(u32),
    KBias(u32),
    VBias(u32),
    OBias(u32),
    QNorm(u32),
    KNorm(u32),
    FfnNorm(u32),
    Gate(u32),
    Up(u32),
    Down(u32),
    GateBias(u32),
    UpBias(u32),
    DownBias(u32),
}
