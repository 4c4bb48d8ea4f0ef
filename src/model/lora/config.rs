//! `adapter_config.json` of PEFT: what scales an adapter, and what of the format is refused by name.

use crate::model::error::Fault;
use serde_json::{Map, Value};

/// Largest rank that is read.
pub const MAX_RANK: u32 = 1024;

/// Largest scale that is read: trained adapters have one of about 1, and far beyond this the sums of a step overflow.
const MAX_SCALE: f64 = 1e4;

/// What an adapter's config says of its scale. Which modules it changes, its tensors say.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    pub rank: u32,
    pub alpha: f64,
    /// The scale is alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank.
    pub uses_rslora: bool,
    /// Modules by name with another rank, or another alpha.
    rank_pattern: Vec<(String, f64)>,
    alpha_pattern: Vec<(String, f64)>,
    /// Names of `target_modules`, where they are a list.
    pub target_modules: Vec<String>,
}

/// Settings that change what an adapter computes, and which are not read: (key, what it is).
const REFUSED: [(&str, &str); 12] = [
    ("use_dora", "DoRA"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "block-diagonal LoRA"),
    ("lora_bias", "a bias of the adapter's own matrices"),
    ("modules_to_save", "modules saved beside the adapter"),
    ("trainable_token_indices", "trained tokens of the embedding"),
    ("target_parameters", "adapted parameters that are no modules"),
    ("layer_replication", "replicated layers"),
    ("megatron_config", "a Megatron adapter"),
    ("alora_invocation_tokens", "an adapter that tokens switch on"),
    ("arrow_config", "Arrow routing"),
    ("ensure_weight_tying", "a tied embedding that is adapted"),
];

/// Ways of starting a training that also change the base model's weights.
const CHANGES_THE_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl LoraConfig {
    pub fn read(config: &Map<String, Value>) -> Result<LoraConfig, Fault> {
        match config.get("peft_type").and_then(Value::as_str) {
            Some(kind) if kind.eq_ignore_ascii_case("lora") => {}
            Some(kind) => return Err(Fault::Unsupported(format!("peft_type {kind} is not supported; LORA is"))),
            None => return Err(Fault::Malformed("peft_type is missing".into())),
        }
        for (key, what) in REFUSED {
            if config.get(key).is_some_and(says_something) {
                return Err(Fault::Unsupported(format!("{key}: {what} is not supported")));
            }
        }
        match config.get("bias") {
            None | Some(Value::Null) => {}
            Some(Value::String(bias)) if bias == "none" => {}
            Some(bias) => return Err(Fault::Unsupported(format!("bias = {bias} is not supported; \"none\" is"))),
        }
        let start = config.get("init_lora_weights").and_then(Value::as_str).unwrap_or("");
        if CHANGES_THE_BASE.iter().any(|kind| start.to_ascii_lowercase().starts_with(kind)) {
            let fault = format!(
                "init_lora_weights = {start} changes the base model's weights too, which is not supported; save the \
                 adapter as a plain LoRA"
            );
            return Err(Fault::Unsupported(fault));
        }
        let rank = number(config, "r")?.ok_or_else(|| Fault::Malformed("r is missing".into()))?;
        Ok(LoraConfig {
            rank: checked_rank("r", rank)?,
            alpha: number(config, "lora_alpha")?.unwrap_or(8.0),
            uses_rslora: config.get("use_rslora").is_some_and(says_something),
            rank_pattern: pattern(config, "rank_pattern")?,
            alpha_pattern: pattern(config, "alpha_pattern")?,
            target_modules: names(config.get("target_modules")),
        })
    }

    /// The rank that a module's matrices must have.
    pub fn rank_of(&self, module: &str) -> Result<u32, Fault> {
        match of_module(&self.rank_pattern, module) {
            Some(rank) => checked_rank("rank_pattern", rank),
            None => Ok(self.rank),
        }
    }

    /// What multiplies B A x.
    pub fn scale_of(&self, module: &str, rank: u32) -> Result<f32, Fault> {
        let (key, alpha) = match of_module(&self.alpha_pattern, module) {
            Some(alpha) => ("alpha_pattern", alpha),
            None => ("lora_alpha", self.alpha),
        };
        let divisor = if self.uses_rslora { f64::from(rank).sqrt() } else { f64::from(rank) };
        let scale = alpha / divisor;
        if scale.abs() > MAX_SCALE {
            let fault = format!(
                "{key} = {alpha:?} of adapter_config.json scales {module} by {scale:?}; the scale may be {MAX_SCALE} at most"
            );
            return Err(Fault::Malformed(fault));
        }
        Ok(scale as f32)
    }
}

/// Neither null, false, nor empty.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

fn number(config: &Map<String, Value>, key: &str) -> Result<Option<f64>, Fault> {
    match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64().filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(Fault::Malformed(format!("{key} is {value}, which is not a number"))),
        },
    }
}

fn checked_rank(key: &str, rank: f64) -> Result<u32, Fault> {
    if rank.fract() != 0.0 || !(1.0..=f64::from(MAX_RANK)).contains(&rank) {
        return Err(Fault::Malformed(format!("{key} must be a whole number from 1 to {MAX_RANK}, not {rank}")));
    }
    Ok(rank as u32)
}

/// A map of module names to numbers. Names that are regular expressions are refused: the tensors' ranks can be checked
/// against them, their scale cannot.
fn pattern(config: &Map<String, Value>, key: &str) -> Result<Vec<(String, f64)>, Fault> {
    let map = match config.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(Fault::Malformed(format!("{key} is not an object"))),
    };
    let entry = |(name, value): (&String, &Value)| {
        let is_plain = name.strip_prefix('^').unwrap_or(name).chars();
        if !is_plain.into_iter().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
            return Err(Fault::Unsupported(format!("{key}: `{name}` is a regular expression, which is not supported")));
        }
        match value.as_f64().filter(|n| n.is_finite()) {
            Some(n) => Ok((name.clone(), n)),
            None => Err(Fault::Malformed(format!("{key}: `{name}` is {value}, which is not a number"))),
        }
    };
    map.iter().map(entry).collect()
}

/// The number of the first pattern that is the module's name, or the end of it after a dot; `^` means the whole name.
fn of_module(pattern: &[(String, f64)], module: &str) -> Option<f64> {
    let fits = |name: &str| match name.strip_prefix('^') {
        Some(whole) => whole == module,
        None => module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')),
    };
    pattern.iter().find(|(name, _)| fits(name)).map(|(_, n)| *n)
}

fn names(value: Option<&Value>) -> Vec<String> {
    let list = value.and_then(Value::as_array).into_iter().flatten();
    list.filter_map(Value::as_str).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<LoraConfig, Fault> {
        LoraConfig::read(serde_json::from_str::<Value>(text).expect("JSON").as_object().expect("an object"))
    }

    #[test]
    fn scales_follow_rank_alpha_and_patterns() {
        let config = read(
            r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_dora": false, "modules_to_save": null,
                "rank_pattern": {"layers.0.self_attn.q_proj": 4}, "alpha_pattern": {"down_proj": 4}}"#,
        )
        .expect("it is plain");
        let (q0, q1) = ("model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj");
        assert_eq!((config.rank_of(q0), config.rank_of(q1)), (Ok(4), Ok(8)));
        assert_eq!((config.scale_of(q0, 4), config.scale_of(q1, 8)), (Ok(4.0), Ok(2.0)));
        assert_eq!(config.scale_of("model.layers.0.mlp.down_proj", 8), Ok(0.5));
        let config = LoraConfig { uses_rslora: true, ..config };
        assert_eq!(config.scale_of(q0, 4), Ok(8.0));
    }

    #[test]
    fn absurd_scales_are_refused_by_their_field() {
        let scale = |more: &str| {
            let config = read(&format!(r#"{{"peft_type": "LORA", "r": 8, {more}}}"#)).expect("it is plain");
            config.scale_of("model.layers.0.mlp.down_proj", 8)
        };
        assert_eq!(scale(r#""lora_alpha": 80000"#), Ok(1e4));
        for (more, key) in [
            (r#""lora_alpha": 1e30"#, "lora_alpha"),
            (r#""lora_alpha": -1e300"#, "lora_alpha"),
            (r#""lora_alpha": 80001"#, "lora_alpha"),
            (r#""lora_alpha": 30000, "use_rslora": true"#, "lora_alpha"),
            (r#""lora_alpha": 8, "alpha_pattern": {"down_proj": 1e9}"#, "alpha_pattern"),
        ] {
            let refused = scale(more);
            assert!(matches!(&refused, Err(Fault::Malformed(text)) if text.starts_with(key)), "{more}: {refused:?}");
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let refused = |more: &str| match read(&format!(r#"{{"peft_type": "LORA", "r": 8, {more}}}"#)) {
            Err(Fault::Unsupported(text) | Fault::Malformed(text)) => text,
            Ok(config) => panic!("{config:?}"),
        };
        assert!(refused(r#""use_dora": true"#).contains("DoRA"));
        assert!(refused(r#""modules_to_save": ["lm_head"]"#).contains("modules_to_save"));
        assert!(refused(r#""bias": "all""#).contains("bias"));
        assert!(refused(r#""init_lora_weights": "pissa_niter_4""#).contains("pissa"));
        assert!(refused(r#""r": 0"#).contains("r must be"));
        assert!(refused(r#""alpha_pattern": {"q_proj|k_proj": 3}"#).contains("regular expression"));
        assert!(
            matches!(read(r#"{"peft_type": "IA3", "r": 8}"#), Err(Fault::Unsupported(text)) if text.contains("IA3"))
        );
    }
}
