//! What a checkpoint's header says of the model: dimensions, heads, rope, norms, windows. Validated on construction;
//! the one forward pass is driven by it, so there is no per-family code beyond `arch/`.

mod rope_spec;

use super::experts::{ExpertPart, ExpertSpec, MixPart};
use super::latent::{LatentPart, LatentSpec};
use crate::ids::MIN_CONTEXT;
pub use rope_spec::{RopePairing, RopeScaling, RopeSpec};
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
    /// Of Q and K, before rope.
    pub qk_norm: QkNorm,
    pub q_bias: bool,
    pub k_bias: bool,
    pub v_bias: bool,
    pub o_bias: bool,
    /// Biases of gate, up and down projections.
    pub mlp_bias: bool,
    /// Keys visible per layer: `None` is all; `Some(w)` the last w including the token itself. One entry per layer.
    pub windows: Vec<Option<u32>>, // [num_layers]
    /// What a block has that a plain llama's has not.
    pub block: BlockSpec,
    /// The head reads the embedding table.
    pub tie_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// Any of these ends the output.
    pub eos_token_ids: Vec<u32>,
}

/// How a family's blocks differ from a plain llama's ([`BlockSpec::LLAMA`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockSpec {
    pub norm: NormKind,
    pub norm_placement: NormPlacement,
    pub residual: Residual,
    pub mlp: MlpKind,
    pub activation: Activation,
    /// A learned vector per position is added to the embedding, and nothing rotates (gpt2).
    pub learned_positions: bool,
    /// Layers that rotate nothing (smollm3); empty means none.
    pub layers_without_rope: Vec<u32>,
    /// Rope of the layers that have a window, where it differs (gemma3).
    pub windowed_rope: Option<RopeSpec>,
    /// Multiplies the embedding (gemma: the root of the hidden size).
    pub embedding_scale: f32,
    /// Multiplies what attention and MLP add to the hidden state (granite).
    pub residual_scale: f32,
    /// Multiplies q·k; `None` is 1 / sqrt(head dim).
    pub attention_scale: Option<f32>,
    /// Scores are bounded by `c * tanh(score / c)` before the softmax (gemma2).
    pub attention_softcap: Option<f32>,
    /// Each head has one more logit, without a key or a value, in its softmax (gpt-oss).
    #[serde(default)]
    pub has_sinks: bool,
    /// Nothing rotates, and each head adds to its scores a multiple of the key's position (falcon; arXiv 2108.12409).
    #[serde(default)]
    pub has_alibi: bool,
    /// Multiplies the logits (cohere; granite's divisor inverted).
    pub logit_scale: f32,
    /// Logits are bounded by `c * tanh(logit / c)` (gemma2).
    pub logit_softcap: Option<f32>,
    /// The head has a bias (phi).
    pub head_bias: bool,
    /// A mixture of experts in place of the MLP.
    #[serde(default)]
    pub experts: Option<ExpertSpec>,
    /// Keys and values come out of one compressed row for each token (deepseek).
    #[serde(default)]
    pub latent: Option<LatentSpec>,
}

impl BlockSpec {
    /// RMSNorm before attention and before a gated SiLU MLP, rope, no multipliers and caps.
    pub const LLAMA: BlockSpec = BlockSpec {
        norm: NormKind::Rms,
        norm_placement: NormPlacement::Before,
        residual: Residual::Sequential,
        mlp: MlpKind::Gated,
        activation: Activation::Silu,
        learned_positions: false,
        layers_without_rope: Vec::new(),
        windowed_rope: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        attention_scale: None,
        attention_softcap: None,
        has_sinks: false,
        has_alibi: false,
        logit_scale: 1.0,
        logit_softcap: None,
        head_bias: false,
        experts: None,
        latent: None,
    };

    fn validate(&self) -> Result<(), String> {
        let caps = [("attention", self.attention_softcap), ("final", self.logit_softcap)];
        for (what, cap) in caps {
            if cap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
                return Err(format!("the {what} soft cap must be above 0, not {}", cap.unwrap_or_default()));
            }
        }
        if let Some(experts) = &self.experts {
            experts.validate()?;
            if self.norm_placement != NormPlacement::Before || self.residual != Residual::Sequential {
                return Err("experts need norms before them and a sequential residual".into());
            }
        }
        let scales = [
            ("embedding multiplier", self.embedding_scale),
            ("residual multiplier", self.residual_scale),
            ("attention multiplier", self.attention_scale.unwrap_or(1.0)),
            ("logit multiplier", self.logit_scale),
        ];
        for (what, scale) in scales {
            if !scale.is_finite() || scale == 0.0 {
                return Err(format!("the {what} must be a number other than 0, not {scale}"));
            }
        }
        Ok(())
    }
}

/// What normalises a hidden state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormKind {
    /// RMSNorm (arXiv 1910.07467).
    Rms,
    /// LayerNorm (arXiv 1607.06450) with a gain.
    Layer { bias: bool },
}

/// Where norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Before,
    /// Also on what each adds to the hidden state (gemma2).
    BeforeAndAfter,
    /// Only on what each adds to the hidden state (olmo2).
    After,
}

/// How Q and K are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QkNorm {
    None,
    /// RMSNorm over each head, all heads with the same gain (qwen3).
    Head,
    /// RMSNorm over all heads together (olmo2).
    Width,
    /// LayerNorm without bias over each head, each with a gain of its own (cohere, stablelm).
    LayerPerHead,
    /// LayerNorm over each head, all heads with the same gain and bias (phi).
    LayerShared,
}

/// What the MLP reads and how a block's parts add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Residual {
    /// The MLP sees attention's sum.
    Sequential,
    /// Both see the block's input, each through its own norm (gpt_neox).
    Parallel,
    /// Both see the block's input through one norm (phi, cohere, falcon 7B).
    ParallelOneNorm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MlpKind {
    /// down(act(gate x) * up x)
    Gated,
    /// down(act(up x))
    Plain,
}

/// The MLP's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    Silu,
    /// With the error function (arXiv 1606.08415).
    Gelu,
    /// With the hyperbolic tangent.
    GeluTanh,
    Relu,
    /// Of a gated MLP alone: g sigmoid(1.702 g) (u + 1) with g at most 7 and u within 7 (gpt_oss).
    ClampedSwiglu,
}

/// A tensor of the model by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightRole {
    TokenEmbedding,
    PositionEmbedding,
    OutputNorm,
    OutputNormBias,
    LmHead,
    HeadBias,
    AttnNorm(u32),
    AttnNormBias(u32),
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
    QNormBias(u32),
    KNormBias(u32),
    /// One logit per head (gpt-oss).
    Sinks(u32),
    PostAttnNorm(u32),
    FfnNorm(u32),
    FfnNormBias(u32),
    PostFfnNorm(u32),
    Gate(u32),
    Up(u32),
    Down(u32),
    GateBias(u32),
    UpBias(u32),
    DownBias(u32),
    /// Layer, expert, tensor.
    Expert(u32, u32, ExpertPart),
    Mix(u32, MixPart),
    Latent(u32, LatentPart),
}

/// Largest values that are believed: beyond every known model, small enough that no product of two overflows and no
/// table sized by one of them is dangerous.
mod limit {
    pub const LAYERS: u32 = 1024;
    pub const WIDTH: u32 = 1 << 20;
    pub const HEADS: u32 = 1 << 14;
    pub const HEAD_DIM: u32 = 1024;
    pub const VOCAB: u32 = 1 << 24;
    pub const POSITIONS: u32 = 1 << 27;
}

impl ModelSpec {
    /// Checks ranges and that the parts agree; the message names the field and the value.
    pub fn validate(&self) -> Result<(), String> {
        let ranges = [
            ("the number of layers", self.num_layers, limit::LAYERS),
            ("the hidden size", self.hidden_size, limit::WIDTH),
            ("the intermediate size", self.intermediate_size, limit::WIDTH),
            ("the number of attention heads", self.num_heads, limit::HEADS),
            ("the number of key-value heads", self.num_kv_heads, limit::HEADS),
            ("the head dimension", self.head_dim, limit::HEAD_DIM),
            ("the vocabulary size", self.vocab_size, limit::VOCAB),
        ];
        for (what, value, max) in ranges {
            if value == 0 || value > max {
                return Err(format!("{what} must be from 1 to {max}, not {value}"));
            }
        }
        if !(MIN_CONTEXT..=limit::POSITIONS).contains(&self.max_position) {
            let (max, len) = (limit::POSITIONS, self.max_position);
            return Err(format!(
                "the context length (max_position_embeddings or context_length) must be from {MIN_CONTEXT} to {max}, \
                 not {len}"
            ));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let (heads, kv) = (self.num_heads, self.num_kv_heads);
            return Err(format!("{heads} attention heads cannot be shared by {kv} key-value heads evenly"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("the head dimension must be even, not {}", self.head_dim));
        }
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0 && self.rms_eps < 1.0) {
            return Err(format!(
                "the epsilon of RMSNorm (rms_norm_eps) must be above 0 and below 1, not {}",
                self.rms_eps
            ));
        }
        if self.windows.len() != self.num_layers as usize || self.windows.contains(&Some(0)) {
            return Err("every layer needs a window of at least 1 key or none".into());
        }
        self.block.validate()?;
        if let Some(latent) = &self.block.latent {
            latent.validate(self.num_heads)?;
            let is_one_row = self.num_kv_heads == 1 && self.head_dim == latent.row_dim();
            if !is_one_row || self.rope.rotary_dim != latent.rope_dim || self.qk_norm != QkNorm::None {
                return Err("latent attention needs one row of keys and its own rotary part".into());
            }
        }
        if let Some(rope) = &self.block.windowed_rope {
            rope.validate(self.head_dim)?;
        }
        self.rope.validate(self.head_dim)
    }

    /// The rope of a layer; `None` where nothing rotates.
    pub fn rope_of(&self, layer: u32) -> Option<&RopeSpec> {
        if self.block.learned_positions || self.block.has_alibi || self.block.layers_without_rope.contains(&layer) {
            return None;
        }
        match &self.block.windowed_rope {
            Some(rope) if self.windows[layer as usize].is_some() => Some(rope),
            _ => Some(&self.rope),
        }
    }

    /// Elements of a token that attention gives to its output projection.
    pub fn attended_dim(&self) -> u32 {
        self.num_heads * self.block.latent.map_or(self.head_dim, |latent| latent.v_dim)
    }

    fn qk_norm_shape(&self, num_heads: u32) -> (bool, Vec<u64>) {
        let (heads, dim) = (u64::from(num_heads), u64::from(self.head_dim));
        match self.qk_norm {
            QkNorm::None => (false, vec![dim]),
            QkNorm::Head | QkNorm::LayerShared => (true, vec![dim]),
            QkNorm::Width => (true, vec![heads * dim]),
            QkNorm::LayerPerHead => (true, vec![heads, dim]),
        }
    }

    /// The experts of a layer; `None` where it has a plain MLP.
    pub fn experts_of(&self, layer: u32) -> Option<&ExpertSpec> {
        self.block.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// What multiplies q·k.
    pub fn attention_scale(&self) -> f64 {
        self.block.attention_scale.map_or_else(|| 1.0 / f64::from(self.head_dim).sqrt(), f64::from)
    }

    /// Checks the number of layers alone: lists with one entry per layer are made only after this.
    pub fn check_num_layers(&self) -> Result<(), String> {
        if self.num_layers == 0 || self.num_layers > limit::LAYERS {
            return Err(format!("the number of layers must be from 1 to {}, not {}", limit::LAYERS, self.num_layers));
        }
        Ok(())
    }

    /// The longest context that can be asked for. Beyond [`Self::max_position`] only where rope is made for it.
    pub fn most_positions(&self) -> u32 {
        match self.rope.scaling {
            RopeScaling::Dynamic { factor, .. } => (f64::from(self.max_position) * factor) as u32,
            _ => self.max_position,
        }
    }

    /// Every tensor that the forward pass reads, embedding first, then layer by layer.
    pub fn roles(&self) -> impl Iterator<Item = WeightRole> + '_ {
        use WeightRole::{HeadBias, LmHead, OutputNorm, OutputNormBias, PositionEmbedding, TokenEmbedding};
        let outer = [TokenEmbedding, PositionEmbedding, OutputNorm, OutputNormBias, LmHead, HeadBias];
        let layers = (0..self.num_layers).flat_map(|l| {
            let num_experts = self.experts_of(l).map_or(0, |experts| experts.num_experts);
            let of_expert = move |e| ExpertPart::ALL.into_iter().map(move |part| WeightRole::Expert(l, e, part));
            let experts = (0..num_experts).flat_map(of_expert);
            let num_heads = if self.block.latent.is_some() { self.num_heads } else { 0 };
            let latent = LatentPart::all(num_heads).map(move |part| WeightRole::Latent(l, part));
            WeightRole::of_layer(l)
                .into_iter()
                .chain(latent)
                .chain(MixPart::ALL.map(|part| WeightRole::Mix(l, part)))
                .chain(experts)
        });
        outer.into_iter().chain(layers).filter(|role| role.shape(self).is_some())
    }
}

impl WeightRole {
    /// The roles of one layer in the order of the forward pass.
    fn of_layer(layer: u32) -> [WeightRole; 25] {
        use WeightRole::*;
        [
            AttnNorm,
            AttnNormBias,
            Q,
            K,
            V,
            O,
            QBias,
            KBias,
            VBias,
            OBias,
            QNorm,
            KNorm,
            QNormBias,
            KNormBias,
            Sinks,
            PostAttnNorm,
            FfnNorm,
            FfnNormBias,
            PostFfnNorm,
            Gate,
            Up,
            Down,
            GateBias,
            UpBias,
            DownBias,
        ]
        .map(|role| role(layer))
    }

    /// `[rows, cols]` of a matrix, `[len]` of a vector; `None` when a model of this spec has no such tensor.
    pub fn shape(self, spec: &ModelSpec) -> Option<Vec<u64>> {
        use WeightRole::*;
        let (hidden, ffn, vocab) =
            (u64::from(spec.hidden_size), u64::from(spec.intermediate_size), u64::from(spec.vocab_size));
        let head_dim = u64::from(spec.head_dim);
        let (q, kv) = (u64::from(spec.num_heads) * head_dim, u64::from(spec.num_kv_heads) * head_dim);
        let placement = spec.block.norm_placement;
        let (norms_before, norms_after) = (placement != NormPlacement::After, placement != NormPlacement::Before);
        let has_ffn_norm = norms_before && spec.block.residual != Residual::ParallelOneNorm;
        let norm_bias = spec.block.norm == NormKind::Layer { bias: true };
        let is_gated = spec.block.mlp == MlpKind::Gated;
        let experts = self.layer().and_then(|layer| spec.experts_of(layer));
        let is_dense = experts.is_none();
        let latent = spec.block.latent.as_ref();
        let (present, shape) = match self {
            TokenEmbedding => (true, vec![vocab, hidden]),
            LmHead => (!spec.tie_embeddings, vec![vocab, hidden]),
            PositionEmbedding => (spec.block.learned_positions, vec![u64::from(spec.max_position), hidden]),
            OutputNorm => (true, vec![hidden]),
            AttnNorm(_) => (norms_before, vec![hidden]),
            FfnNorm(_) => (has_ffn_norm, vec![hidden]),
            PostAttnNorm(_) | PostFfnNorm(_) => (norms_after, vec![hidden]),
            OutputNormBias => (norm_bias, vec![hidden]),
            AttnNormBias(_) => (norm_bias && norms_before, vec![hidden]),
            FfnNormBias(_) => (norm_bias && has_ffn_norm, vec![hidden]),
            HeadBias => (spec.block.head_bias, vec![vocab]),
            Q(_) => match latent {
                Some(latent) => (latent.q_rank == 0, vec![u64::from(spec.num_heads * latent.q_dim()), hidden]),
                None => (true, vec![q, hidden]),
            },
            K(_) | V(_) => (latent.is_none(), vec![kv, hidden]),
            O(_) => (true, vec![hidden, latent.map_or(q, |latent| u64::from(spec.num_heads * latent.v_dim))]),
            Latent(_, part) => part.shape(spec, latent?),
            QBias(_) => (spec.q_bias, vec![q]),
            KBias(_) => (spec.k_bias, vec![kv]),
            VBias(_) => (spec.v_bias, vec![kv]),
            OBias(_) => (spec.o_bias, vec![hidden]),
            Sinks(_) => (spec.block.has_sinks, vec![u64::from(spec.num_heads)]),
            QNormBias(_) | KNormBias(_) => (spec.qk_norm == QkNorm::LayerShared, vec![head_dim]),
            QNorm(_) => spec.qk_norm_shape(spec.num_heads),
            KNorm(_) => spec.qk_norm_shape(spec.num_kv_heads),
            Gate(_) => (is_dense && is_gated, vec![ffn, hidden]),
            Up(_) => (is_dense, vec![ffn, hidden]),
            Down(_) => (is_dense, vec![hidden, ffn]),
            GateBias(_) => (is_dense && spec.mlp_bias && is_gated, vec![ffn]),
            UpBias(_) => (is_dense && spec.mlp_bias, vec![ffn]),
            DownBias(_) => (is_dense && spec.mlp_bias, vec![hidden]),
            Expert(_, e, part) => match experts {
                Some(experts) if e < experts.num_experts => part.shape(spec, experts),
                _ => return None,
            },
            Mix(_, part) => part.shape(spec, experts?),
        };
        (present && self.layer().is_none_or(|layer| layer < spec.num_layers)).then_some(shape)
    }

    /// The layer of a role inside the stack.
    pub fn layer(self) -> Option<u32> {
        use WeightRole::*;
        match self {
            Expert(l, ..) | Mix(l, _) | Latent(l, _) => Some(l),
            TokenEmbedding | PositionEmbedding | OutputNorm | OutputNormBias | LmHead | HeadBias => None,
            QNormBias(l) | KNormBias(l) | AttnNormBias(l) | Sinks(l) | PostAttnNorm(l) | FfnNormBias(l)
            | PostFfnNorm(l) => Some(l),
            AttnNorm(l) | Q(l) | K(l) | V(l) | O(l) | QBias(l) | KBias(l) | VBias(l) | OBias(l) | QNorm(l)
            | KNorm(l) | FfnNorm(l) | Gate(l) | Up(l) | Down(l) | GateBias(l) | UpBias(l) | DownBias(l) => Some(l),
        }
    }

    /// True for norms and biases, which are stored as plain floats.
    pub fn is_vector(self) -> bool {
        use WeightRole::*;
        match self {
            Expert(_, _, part) => return part.is_vector(),
            Mix(_, part) => return part.is_vector(),
            Latent(_, part) => return part.is_vector(),
            _ => {}
        }
        !matches!(
            self,
            TokenEmbedding | PositionEmbedding | LmHead | Q(_) | K(_) | V(_) | O(_) | Gate(_) | Up(_) | Down(_)
        )
    }
}
