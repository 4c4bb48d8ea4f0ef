//! GGUF metadata of the llama-like families as a spec. Keys: ggml's `docs/gguf.md`; every fault names the key.

use crate::model::dtype::DType;
use crate::model::error::ModelError;
use crate::model::gguf::{GgufFile, GgufTensor, GgufValue};
use crate::model::quant::dequantize;
use crate::model::rope::yarn_mscale;
use crate::model::spec::{BlockSpec, ModelSpec, QkNorm, RopePairing, RopeScaling, RopeSpec, WeightRole};

/// The metadata of a model and the records of its tensors.
pub struct Metadata<'a> {
    parts: &'a [GgufFile],
    arch: &'a str,
}

impl<'a> Metadata<'a> {
    pub fn new(parts: &'a [GgufFile], arch: &'a str) -> Self {
        Metadata { parts, arch }
    }

    fn file(&self) -> &'a GgufFile {
        &self.parts[0]
    }

    fn malformed<T>(&self, fault: String) -> Result<T, ModelError> {
        Err(ModelError::malformed(self.file().path(), fault))
    }

    /// Refuses the file.
    pub fn unsupported<T>(&self, fault: String) -> Result<T, ModelError> {
        Err(ModelError::unsupported(self.file().path(), fault))
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    /// A number that may be 0.
    pub fn whole_number(&self, name: &str) -> Result<Option<u32>, ModelError> {
        self.file().u32(&self.key(name))
    }

    /// A count of at least 1. An array (one entry per layer) is accepted when all entries are equal.
    pub fn count(&self, name: &str) -> Result<Option<u32>, ModelError> {
        let key = self.key(name);
        let count = match self.file().value(&key) {
            Some(GgufValue::Array { .. }) => {
                let counts = self.file().i32s(&key)?.unwrap_or_default();
                if counts.windows(2).any(|w| w[0] != w[1]) {
                    return self.unsupported(format!("{key} differs from layer to layer, which is not supported"));
                }
                counts.first().and_then(|&c| u32::try_from(c).ok())
            }
            _ => self.file().u32(&key)?,
        };
        if count == Some(0) {
            return self.malformed(format!("{key} must be at least 1, not 0"));
        }
        Ok(count)
    }

    pub fn required_count(&self, name: &str) -> Result<u32, ModelError> {
        match self.count(name)? {
            Some(count) => Ok(count),
            None => self.malformed(format!("{} is missing", self.key(name))),
        }
    }

    /// A key of the architecture that is true or false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        self.file().bool(&self.key(name))
    }

    /// True when the file has a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensor(name).is_some()
    }

    /// A key of the architecture that is a finite number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let key = self.key(name);
        match self.file().f64(&key)? {
            Some(number) if !number.is_finite() => self.malformed(format!("{key} must be a number, not {number}")),
            number => Ok(number),
        }
    }

    fn tensor(&self, name: &str) -> Option<(&'a GgufFile, &'a GgufTensor)> {
        self.parts.iter().find_map(|part| part.tensor(name).map(|tensor| (part, tensor)))
    }

    fn has(&self, role: WeightRole) -> bool {
        self.tensor(&super::names::gguf_name(role)).is_some()
    }

    /// Lists of the vocabulary must have one entry per token.
    pub fn check_vocabulary(&self) -> Result<(), ModelError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let Some(num_tokens) = self.file().array_len(TOKENS)? else { return Ok(()) };
        for key in ["tokenizer.ggml.token_type", "tokenizer.ggml.scores"] {
            if let Some(len) = self.file().array_len(key)?.filter(|&len| len != num_tokens) {
                return self.malformed(format!("{key} has {len} entries, but {TOKENS} has {num_tokens}"));
            }
        }
        Ok(())
    }

    fn vocab_size(&self) -> Result<u32, ModelError> {
        let num_tokens = self.file().array_len("tokenizer.ggml.tokens")?.map(|n| n as u64);
        match (self.count("vocab_size")?, num_tokens) {
            (Some(vocab), Some(tokens)) if tokens > u64::from(vocab) => {
                self.malformed(format!("the tokenizer has {tokens} tokens, but {} is {vocab}", self.key("vocab_size")))
            }
            (Some(vocab), _) => Ok(vocab),
            (None, Some(tokens)) => match u32::try_from(tokens) {
                Ok(tokens) => Ok(tokens),
                Err(_) => self.malformed(format!("the tokenizer has {tokens} tokens")),
            },
            (None, None) => self.malformed(format!("{} and tokenizer.ggml.tokens are missing", self.key("vocab_size"))),
        }
    }

    /// True for a mixture of experts.
    pub fn has_experts(&self) -> Result<bool, ModelError> {
        Ok(self.file().u32(&self.key("expert_count"))?.is_some_and(|n| n > 0))
    }

    /// Keys and values are read out of a compressed row.
    pub fn is_latent(&self) -> Result<bool, ModelError> {
        Ok(self.count("attention.kv_lora_rank")?.is_some())
    }

    /// (number of experts, experts of a token)
    pub fn experts(&self) -> Result<(u32, u32), ModelError> {
        Ok((self.required_count("expert_count")?, self.required_count("expert_used_count")?))
    }

    /// The spec of a llama-like model without experts.
    pub fn base_spec(&self, family: &str, pairing: RopePairing) -> Result<ModelSpec, ModelError> {
        if self.has_experts()? {
            return self.unsupported(format!("architecture `{}` with experts is not supported", self.arch));
        }
        self.base_spec_with_experts(family, pairing)
    }

    /// The spec of a llama-like model. Biases and tied embeddings are known from the tensors that are there.
    pub fn base_spec_with_experts(&self, family: &str, pairing: RopePairing) -> Result<ModelSpec, ModelError> {
        let hidden_size = self.required_count("embedding_length")?;
        let num_heads = self.required_count("attention.head_count")?;
        let head_dim = match self.count("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => return self.malformed(format!("{hidden_size} is no multiple of {num_heads} attention heads")),
        };
        let value_dim = self.count("attention.value_length")?.filter(|&v| v != head_dim);
        if let (Some(value_dim), false) = (value_dim, self.is_latent()?) {
            return self
                .unsupported(format!("values of {value_dim} and keys of {head_dim} per head are not supported"));
        }
        let max_position = self.required_count("context_length")?;
        let rms_eps = self.number("attention.layer_norm_rms_epsilon")?;
        let Some(rms_eps) = rms_eps.or(self.number("attention.layer_norm_epsilon")?) else {
            return self.malformed(format!("{} is missing", self.key("attention.layer_norm_rms_epsilon")));
        };
        let spec = ModelSpec {
            arch: family.to_owned(),
            num_layers: self.required_count("block_count")?,
            hidden_size,
            intermediate_size: match self.count("feed_forward_length")? {
                Some(size) => size,
                None if self.has_experts()? => self.required_count("expert_feed_forward_length")?,
                None => self.required_count("feed_forward_length")?,
            },
            num_heads,
            num_kv_heads: self.count("attention.head_count_kv")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.vocab_size()?,
            max_position,
            rms_eps: rms_eps as f32,
            rope: self.rope(head_dim, max_position, pairing)?,
            qk_norm: QkNorm::None,
            block: BlockSpec::LLAMA,
            q_bias: self.has(WeightRole::QBias(0)),
            k_bias: self.has(WeightRole::KBias(0)),
            v_bias: self.has(WeightRole::VBias(0)),
            o_bias: self.has(WeightRole::OBias(0)),
            mlp_bias: self.has(WeightRole::UpBias(0)),
            windows: Vec::new(),
            tie_embeddings: !self.has(WeightRole::LmHead),
            bos_token_id: self.file().u32("tokenizer.ggml.bos_token_id")?,
            eos_token_ids: self.eos_token_ids()?,
        };
        if let Err(fault) = spec.check_num_layers() {
            return self.malformed(fault);
        }
        let window = self.count("attention.sliding_window")?;
        Ok(ModelSpec { windows: vec![window; spec.num_layers as usize], ..spec })
    }

    /// The end of a text, of a turn and of a message all end the output.
    fn eos_token_ids(&self) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        for name in ["eos", "eot", "eom"] {
            if let Some(id) = self.file().u32(&format!("tokenizer.ggml.{name}_token_id"))?
                && !ids.contains(&id)
            {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    fn rope(&self, head_dim: u32, max_position: u32, pairing: RopePairing) -> Result<RopeSpec, ModelError> {
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let rotary_dim = self.count("rope.dimension_count")?.unwrap_or(head_dim);
        let by_length =
            (self.rope_factors("rope_factors_short.weight")?, self.rope_factors("rope_factors_long.weight")?);
        if let (Some(short), Some(long)) = by_length {
            let original_max_position = self.count("rope.scaling.original_context_length")?.unwrap_or(max_position);
            // The file's own factor is the whole of it.
            let attention_factor = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
            let scaling = RopeScaling::LongRope { short, long, original_max_position, attention_factor };
            return Ok(RopeSpec { theta, rotary_dim, pairing, scaling });
        }
        let factors = self.rope_factors("rope_freqs.weight")?.filter(|factors| factors.iter().any(|&f| f != 1.0));
        let scaling = match (self.rope_scaling(max_position)?, factors) {
            (RopeScaling::None, Some(factors)) => RopeScaling::FreqFactors { factors },
            (scaling, None) => scaling,
            (_, Some(_)) => {
                return self.unsupported("rope_freqs.weight together with rope scaling is not supported".into());
            }
        };
        Ok(RopeSpec { theta, rotary_dim, pairing, scaling })
    }

    fn rope_scaling(&self, max_position: u32) -> Result<RopeScaling, ModelError> {
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        let kind_key = self.key("rope.scaling.type");
        let kind = self.file().string(&kind_key)?;
        match (kind.unwrap_or("linear"), factor) {
            ("none", _) => Ok(RopeScaling::None),
            ("linear", None | Some(1.0)) => Ok(RopeScaling::None),
            ("linear", Some(factor)) => Ok(RopeScaling::Linear { factor }),
            ("yarn", None) => self.malformed(format!("{} is missing", self.key("rope.scaling.factor"))),
            ("yarn", Some(factor)) => {
                let is_latent = self.is_latent()?;
                if !is_latent && self.number("rope.scaling.yarn_log_multiplier")?.is_some_and(|m| m != 0.0) {
                    return self
                        .unsupported(format!("{}.rope.scaling.yarn_log_multiplier is not supported", self.arch));
                }
                let original = self.count("rope.scaling.original_context_length")?;
                Ok(RopeScaling::Yarn {
                    factor,
                    beta_fast: self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    original_max_position: original.unwrap_or(max_position),
                    // The key multiplies the paper's factor, which the file leaves to the reader.
                    // Latent attention takes it into the scale of its scores.
                    attention_factor: self.number("rope.scaling.attn_factor")?.unwrap_or(1.0)
                        * if is_latent { 1.0 } else { yarn_mscale(factor, 1.0) },
                    truncate: true,
                })
            }
            (other, _) => self.unsupported(format!("{kind_key} `{other}` is not supported")),
        }
    }

    /// A tensor with a number for each rotated pair.
    fn rope_factors(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some((file, tensor)) = self.tensor(name) else { return Ok(None) };
        if tensor.ty.dtype != Some(DType::F32) || tensor.num_elements() > 4096 {
            return self.malformed(format!("tensor {name} must hold at most 4096 elements of type F32"));
        }
        let mut factors = vec![0.0; tensor.num_elements() as usize];
        if let Err(e) = dequantize(DType::F32, file.bytes(tensor), &mut factors) {
            return self.malformed(format!("tensor {name}: {e}"));
        }
        Ok(Some(factors))
    }
}
