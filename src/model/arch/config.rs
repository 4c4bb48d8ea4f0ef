//! Typed access to `config.json`, and the part of the spec that all llama-like families read alike.
//! Every fault names the field and the value.

use super::rope_config;
use crate::model::error::Fault;
use crate::model::sidecar::token_ids;
use crate::model::spec::{Activation, BlockSpec, ModelSpec, QkNorm};
use serde_json::{Map, Value};

/// The object in `config.json`.
pub struct Config<'a>(&'a Map<String, Value>);

const DEFAULT_WINDOW: u32 = 4096;

/// What differs between families when a key is missing.
pub struct Defaults {
    pub max_position: u32,
    /// `None` is hidden size / heads.
    pub head_dim: Option<u32>,
    /// Share of each head that rotates; `None` for families that rotate all and refuse another share.
    pub partial_rotary: Option<f64>,
    pub activation: Activation,
    /// Of hidden size; `None` where the key is required.
    pub intermediate_factor: Option<u32>,
    pub tie_embeddings: bool,
}

impl Defaults {
    /// Of the llama family, but for the context.
    pub const fn llama(max_position: u32) -> Defaults {
        Defaults {
            max_position,
            head_dim: None,
            partial_rotary: None,
            activation: Activation::Silu,
            intermediate_factor: None,
            tie_embeddings: false,
        }
    }
}

fn malformed<T>(fault: String) -> Result<T, Fault> {
    Err(Fault::Malformed(fault))
}

impl<'a> Config<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Config(map)
    }

    /// A copy in which the values of some keys (the second of each pair) are found under others (the first), where the
    /// family has them.
    pub fn renamed(&self, names: &[(&str, &str)]) -> Map<String, Value> {
        let mut map = self.0.clone();
        for (to, from) in names {
            if let Some(value) = self.0.get(*from) {
                map.insert((*to).to_owned(), value.clone());
            }
        }
        map
    }

    /// True when the key is there, null included.
    pub fn contains(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// The value of a key; `None` when it is missing or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Fault> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => malformed(format!("{key} must be a string, not {}", brief(other))),
        }
    }

    pub fn object(&self, key: &str) -> Result<Option<Config<'a>>, Fault> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Config(map))),
            Some(other) => malformed(format!("{key} must be an object, not {}", brief(other))),
        }
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, Fault> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => malformed(format!("{key} must be true or false, not {}", brief(other))),
        }
    }

    /// A list with a flag (or 0 or 1) for each layer.
    pub fn flags(&self, key: &str, num_layers: u32) -> Result<Option<Vec<bool>>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let flag = |v: &Value| v.as_bool().or(v.as_u64().filter(|v| *v < 2).map(|v| v == 1));
        match value.as_array().filter(|list| list.len() == num_layers as usize) {
            Some(list) if list.iter().all(|v| flag(v).is_some()) => Ok(Some(list.iter().filter_map(flag).collect())),
            _ => malformed(format!("{key} must be a list of {num_layers} flags")),
        }
    }

    /// A list of whole numbers.
    pub fn whole_numbers(&self, key: &str) -> Result<Option<Vec<u32>>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = |v: &Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
        match value.as_array().map(|list| list.iter().map(number).collect::<Option<Vec<u32>>>()) {
            Some(Some(list)) => Ok(Some(list)),
            _ => malformed(format!("{key} must be a list of whole numbers")),
        }
    }

    /// A whole number of at least 1.
    pub fn count(&self, key: &str) -> Result<Option<u32>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|v| u32::try_from(v).ok()).filter(|&v| v > 0) {
            Some(count) => Ok(Some(count)),
            None => malformed(format!("{key} must be a whole number from 1 to {}, not {}", u32::MAX, brief(value))),
        }
    }

    /// A whole number, 0 as well.
    pub fn whole_number(&self, key: &str) -> Result<Option<u32>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|v| u32::try_from(v).ok()) {
            Some(number) => Ok(Some(number)),
            None => malformed(format!("{key} must be a whole number, not {}", brief(value))),
        }
    }

    pub fn required_count(&self, key: &str) -> Result<u32, Fault> {
        match self.count(key)? {
            Some(count) => Ok(count),
            None => malformed(format!("{key} is missing")),
        }
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|v| v.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => malformed(format!("{key} must be a number, not {}", brief(value))),
        }
    }

    pub fn required_number(&self, key: &str) -> Result<f64, Fault> {
        match self.number(key)? {
            Some(number) => Ok(number),
            None => malformed(format!("{key} is missing")),
        }
    }

    /// A list of numbers.
    pub fn required_numbers(&self, key: &str) -> Result<Vec<f32>, Fault> {
        let list = match self.get(key) {
            Some(Value::Array(list)) => list,
            Some(other) => return malformed(format!("{key} must be a list of numbers, not {}", brief(other))),
            None => return malformed(format!("{key} is missing")),
        };
        let number = |value: &Value| match value.as_f64() {
            Some(number) => Ok(number as f32),
            None => malformed(format!("{key} must be a list of numbers; it holds {}", brief(value))),
        };
        list.iter().map(number).collect()
    }

    pub fn first_architecture(&self) -> Result<Option<&'a str>, Fault> {
        match self.get("architectures") {
            None => Ok(None),
            Some(Value::Array(classes)) => Ok(classes.first().and_then(Value::as_str)),
            Some(other) => malformed(format!("architectures must be a list, not {}", brief(other))),
        }
    }

    /// The spec of a plain llama: no biases, no windows. Families change what is different.
    pub fn base_spec(&self, family: &str, defaults: &Defaults) -> Result<ModelSpec, Fault> {
        let hidden_size = self.required_count("hidden_size")?;
        let num_heads = self.required_count("num_attention_heads")?;
        let num_layers = self.required_count("num_hidden_layers")?;
        let head_dim = match self.count("head_dim")?.or(defaults.head_dim) {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => {
                return malformed(format!("hidden_size {hidden_size} is no multiple of {num_heads} attention heads"));
            }
        };
        let max_position = self.count("max_position_embeddings")?.unwrap_or(defaults.max_position);
        let intermediate_size = match (self.count("intermediate_size")?, defaults.intermediate_factor) {
            (Some(size), _) => size,
            (None, Some(factor)) => hidden_size.saturating_mul(factor),
            (None, None) => self.required_count("intermediate_size")?,
        };
        let activation = self.activation()?.unwrap_or(defaults.activation);
        let rope = rope_config::from_config(self, head_dim, max_position, defaults.partial_rotary)?;
        let spec = ModelSpec {
            arch: family.to_owned(),
            num_layers,
            hidden_size,
            intermediate_size,
            num_heads,
            num_kv_heads: self.count("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.required_count("vocab_size")?,
            max_position,
            rms_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope,
            qk_norm: QkNorm::None,
            block: BlockSpec { activation, ..BlockSpec::LLAMA },
            q_bias: false,
            k_bias: false,
            v_bias: false,
            o_bias: false,
            mlp_bias: false,
            windows: Vec::new(),
            tie_embeddings: self.flag("tie_word_embeddings", defaults.tie_embeddings)?,
            bos_token_id: self.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: self.token_ids("eos_token_id")?,
        };
        Ok(ModelSpec { windows: vec![None; checked_layers(&spec)?], ..spec })
    }

    fn token_ids(&self, key: &str) -> Result<Vec<u32>, Fault> {
        match token_ids(self.0.get(key)) {
            Some(ids) => Ok(ids),
            None => malformed(format!("{key} must be a token id or a list of them")),
        }
    }

    fn activation(&self) -> Result<Option<Activation>, Fault> {
        let Some(name) = self.text("hidden_act")? else { return Ok(None) };
        Ok(Some(match name {
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            other => {
                let known = "silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu";
                return Err(Fault::Unsupported(format!("hidden_act `{other}` is not supported; supported: {known}")));
            }
        }))
    }

    /// Windows by `layer_types`, else in all layers but every `pattern`-th.
    pub fn pattern_windows(&self, num_layers: u32, pattern: u32) -> Result<Vec<Option<u32>>, Fault> {
        let window = self.window()?;
        if let Some(types) = self.get("layer_types") {
            return windows_of_types(types, num_layers, window);
        }
        Ok((0..num_layers).map(|l| window.filter(|_| !(l + 1).is_multiple_of(pattern))).collect())
    }

    /// `sliding_window`: null means none, a missing key transformers' default.
    pub fn window(&self) -> Result<Option<u32>, Fault> {
        if self.0.contains_key("sliding_window") { self.count("sliding_window") } else { Ok(Some(DEFAULT_WINDOW)) }
    }

    /// Windows of qwen: by `layer_types`, else sliding from layer `max_window_layers` on, if switched on at all.
    pub fn qwen_windows(&self, num_layers: u32) -> Result<Vec<Option<u32>>, Fault> {
        let window = match self.flag("use_sliding_window", false)? {
            true => self.window()?,
            false => None,
        };
        if let Some(types) = self.get("layer_types") {
            return windows_of_types(types, num_layers, window);
        }
        let first_windowed = match self.get("max_window_layers") {
            None => 28,
            Some(value) => match value.as_u64() {
                Some(first) => first,
                None => return malformed(format!("max_window_layers must be a whole number, not {}", brief(value))),
            },
        };
        Ok((0..num_layers).map(|layer| window.filter(|_| u64::from(layer) >= first_windowed)).collect())
    }
}

fn windows_of_types(types: &Value, num_layers: u32, window: Option<u32>) -> Result<Vec<Option<u32>>, Fault> {
    let Some(types) = types.as_array().filter(|t| t.len() == num_layers as usize) else {
        return malformed(format!("layer_types must be a list of {num_layers} names"));
    };
    let window_of = |ty: &Value| match ty.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => malformed("layer_types has sliding_attention, but there is no window".into()),
        _ => Err(Fault::Unsupported(format!("layer type {} is not supported", brief(ty)))),
    };
    types.iter().map(window_of).collect()
}

/// The number of layers, validated before a list of that length is made.
fn checked_layers(spec: &ModelSpec) -> Result<usize, Fault> {
    match spec.check_num_layers() {
        Ok(()) => Ok(spec.num_layers as usize),
        Err(fault) => malformed(fault),
    }
}

/// A value for a message: long ones are cut.
fn brief(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        Value::String(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        other => other.to_string(),
    }
}
