//! Flags of LoRA adapters, with vLLM's names.

use super::ConfigError;
use crate::engine::options::{LoraModule, LoraOptions};
use std::path::PathBuf;

/// Rank that there is room for where no adapter says one.
const DEFAULT_RANK: u32 = 16;

#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct LoraArgs {
    /// LoRA adapters (folders as PEFT writes them), each under the name by which requests ask for it as their model
    #[arg(long, value_name = "NAME=PATH", num_args = 1.., value_parser = parse_module)]
    pub lora_modules: Vec<LoraModule>,
    /// Make room for adapters that are loaded later
    #[arg(long)]
    pub enable_lora: bool,
    /// Adapters that there is room for (default: as many as --lora-modules names)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_loras: Option<u32>,
    /// Largest rank that there is room for (default: that of the adapters, 16 without any)
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_lora_rank: Option<u32>,
}

impl LoraArgs {
    pub fn resolve(&self) -> Result<LoraOptions, ConfigError> {
        let invalid = |message: String| ConfigError::Invalid { name: "lora_modules", message };
        for (i, module) in self.lora_modules.iter().enumerate() {
            if self.lora_modules[..i].iter().any(|other| other.name == module.name) {
                return Err(invalid(format!("names `{}` twice", module.name)));
            }
        }
        let num_given = self.lora_modules.len() as u32;
        if let Some(max) = self.max_loras.filter(|max| *max < num_given) {
            return Err(invalid(format!("names {num_given} adapters, --max-loras is {max}")));
        }
        let is_wanted = self.enable_lora || self.max_lora_rank.is_some();
        let max_loras = self.max_loras.unwrap_or(num_given.max(u32::from(is_wanted)));
        let max_rank = self.max_lora_rank.or((max_loras > 0 && num_given == 0).then_some(DEFAULT_RANK));
        Ok(LoraOptions { modules: self.lora_modules.clone(), max_loras, max_rank })
    }
}

/// `NAME=PATH`, or the same as vLLM's JSON object.
fn parse_module(text: &str) -> Result<LoraModule, String> {
    if text.starts_with('{') {
        let fault = |e: &dyn std::fmt::Display| format!("the object is not an adapter: {e}");
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| fault(&e))?;
        let field = |key: &str| value[key].as_str().filter(|v| !v.is_empty()).map(str::to_owned);
        let (Some(name), Some(path)) = (field("name"), field("path")) else {
            return Err(fault(&"name and path are wanted"));
        };
        return Ok(LoraModule { name, path: PathBuf::from(path) });
    }
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(LoraModule { name: name.to_owned(), path: PathBuf::from(path) })
        }
        _ => Err(format!("`{text}` is not NAME=PATH")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_pairs_or_objects() {
        let module = |name: &str, path: &str| LoraModule { name: name.into(), path: path.into() };
        assert_eq!(parse_module("a=b/c=d"), Ok(module("a", "b/c=d")));
        assert_eq!(parse_module(r#"{"name": "a", "path": "b", "base_model_name": "c"}"#), Ok(module("a", "b")));
        for bad in ["a", "=b", "a=", r#"{"name": "a"}"#, "{"] {
            assert!(parse_module(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn room_is_made_for_what_is_given_or_asked_for() {
        let two = vec![parse_module("a=x").unwrap(), parse_module("b=y").unwrap()];
        let resolve = |args: LoraArgs| args.resolve().map(|o| (o.max_loras, o.max_rank)).map_err(|e| e.to_string());
        let given = LoraArgs { lora_modules: two.clone(), ..LoraArgs::default() };
        assert_eq!(resolve(LoraArgs::default()), Ok((0, None)));
        assert_eq!(resolve(given.clone()), Ok((2, None)));
        assert_eq!(
            resolve(LoraArgs { max_loras: Some(5), max_lora_rank: Some(64), ..given.clone() }),
            Ok((5, Some(64)))
        );
        assert_eq!(resolve(LoraArgs { enable_lora: true, ..LoraArgs::default() }), Ok((1, Some(16))));
        let few = resolve(LoraArgs { max_loras: Some(1), ..given });
        assert!(few.is_err_and(|e| e.contains("names 2 adapters, --max-loras is 1")));
        let twice = LoraArgs { lora_modules: [two.clone(), two].concat(), ..LoraArgs::default() };
        assert!(resolve(twice).is_err_and(|e| e.contains("`a` twice")));
    }
}
