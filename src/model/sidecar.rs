//! The small files and keys beside the weights: sampling defaults and chat templates.
//!
//! A broken template does not stop a model from loading: it is reported when a chat asks for it.

use super::error::ModelError;
use super::files::{read_json_object, read_text};
use super::gguf::GgufFile;
use serde_json::{Map, Value};
use std::path::Path;

const DEFAULT: &str = "default";

/// Sampling that the model's author recommends (`generation_config.json`). `None` where nothing is said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// False asks for greedy decoding.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Also part of [`super::spec::ModelSpec::eos_token_ids`].
    pub eos_token_ids: Vec<u32>,
}

/// A chat template by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    pub name: String,
    pub text: String,
}

/// The least value that is still above 0 as a normal f32.
const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

/// Reads `generation_config.json`. Values out of range are left out with a warning.
pub fn generation_defaults(folder: &Path, warnings: &mut Vec<String>) -> Result<GenerationDefaults, ModelError> {
    let path = folder.join("generation_config.json");
    let Some(json) = read_json_object(&path)? else { return Ok(GenerationDefaults::default()) };
    let mut number = |key: &str, low: f64, high: f64| -> Option<f32> {
        let value = json.get(key).filter(|v| !v.is_null())?;
        let in_range = value.as_f64().filter(|v| (low..=high).contains(v));
        if in_range.is_none() {
            let range = match low == SMALLEST {
                true => format!("above 0 and at most {high}"),
                false => format!("from {low} to {high}"),
            };
            warnings.push(format!("generation_config.json: {key} must be {range}, not {value}"));
        }
        in_range.map(|v| v as f32)
    };
    let temperature = number("temperature", 0.0, 100.0);
    let top_p = number("top_p", SMALLEST, 1.0);
    let min_p = number("min_p", 0.0, 1.0);
    let repetition_penalty = number("repetition_penalty", 0.01, 100.0);
    let top_k = number("top_k", 0.0, f64::from(1u32 << 24)).map(|k| k as u32);
    let eos_token_ids = match token_ids(json.get("eos_token_id")) {
        Some(ids) => ids,
        None => {
            warnings.push("generation_config.json: eos_token_id must be a token id or a list of them".into());
            Vec::new()
        }
    };
    let do_sample = json.get("do_sample").and_then(Value::as_bool);
    Ok(GenerationDefaults { do_sample, temperature, top_p, top_k, min_p, repetition_penalty, eos_token_ids })
}

/// A token id, a list of them or null; `None` for anything else.
pub fn token_ids(value: Option<&Value>) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(single) => Some(vec![id(single)?]),
    }
}

/// Templates of a Hugging Face folder: `chat_template.jinja` (and `additional_chat_templates/`) before
/// `tokenizer_config.json` and the older `chat_template.json`.
pub fn folder_chat_templates(folder: &Path) -> Result<Vec<NamedTemplate>, ModelError> {
    if let Some(text) = read_text(&folder.join("chat_template.jinja"))? {
        let mut templates = vec![NamedTemplate { name: DEFAULT.into(), text }];
        templates.extend(additional_templates(&folder.join("additional_chat_templates"))?);
        return Ok(templates);
    }
    for file in ["tokenizer_config.json", "chat_template.json"] {
        let path = folder.join(file);
        if let Some(json) = read_json_object(&path)?
            && let Some(templates) = templates_of_json(&json).map_err(|fault| ModelError::malformed(&path, fault))?
        {
            return Ok(templates);
        }
    }
    Ok(Vec::new())
}

fn additional_templates(folder: &Path) -> Result<Vec<NamedTemplate>, ModelError> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    paths.retain(|p| p.extension().is_some_and(|x| x == "jinja"));
    paths.sort();
    let mut templates = Vec::new();
    for path in paths {
        if let (Some(name), Some(text)) = (path.file_stem(), read_text(&path)?) {
            templates.push(NamedTemplate { name: name.to_string_lossy().into_owned(), text });
        }
    }
    Ok(templates)
}

/// `chat_template` as one string or as a list of `{name, template}`; `None` when there is none.
fn templates_of_json(json: &Map<String, Value>) -> Result<Option<Vec<NamedTemplate>>, String> {
    let entries = match json.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => {
            return Ok(Some(vec![NamedTemplate { name: DEFAULT.into(), text: text.clone() }]));
        }
        Some(Value::Array(entries)) => entries,
        Some(_) => return Err("chat_template must be a string or a list of named templates".into()),
    };
    let mut templates = Vec::new();
    for entry in entries {
        let text_of = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
        let (Some(name), Some(text)) = (text_of("name"), text_of("template")) else {
            return Err("chat_template has an entry without name or template".into());
        };
        templates.push(NamedTemplate { name, text });
    }
    templates.sort_by_key(|t| t.name != DEFAULT);
    Ok(Some(templates))
}

/// `tokenizer.chat_template` and its named siblings.
pub fn gguf_chat_templates(file: &GgufFile) -> Result<Vec<NamedTemplate>, ModelError> {
    const KEY: &str = "tokenizer.chat_template";
    let mut templates = Vec::new();
    if let Some(text) = file.string(KEY)? {
        templates.push(NamedTemplate { name: DEFAULT.into(), text: text.to_owned() });
    }
    for (key, _) in file.metadata() {
        if let Some(name) = key.strip_prefix(KEY).and_then(|rest| rest.strip_prefix('.'))
            && let Some(text) = file.string(key)?
        {
            templates.push(NamedTemplate { name: name.to_owned(), text: text.to_owned() });
        }
    }
    Ok(templates)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn templates(json: Value) -> Result<Option<Vec<NamedTemplate>>, String> {
        templates_of_json(json.as_object().expect("an object"))
    }

    #[test]
    fn a_list_of_templates_puts_the_default_first() {
        let list = serde_json::json!({"chat_template": [
            {"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]});
        let names: Vec<String> =
            templates(list).expect("valid").expect("some").into_iter().map(|t| t.name + &t.text).collect();
        assert_eq!(names, ["defaultD", "tool_useT"]);
    }

    #[test]
    fn a_template_that_is_no_text_is_refused() {
        assert!(templates(serde_json::json!({"chat_template": 7})).is_err());
        assert!(templates(serde_json::json!({"chat_template": [{"name": "x"}]})).is_err());
        assert_eq!(templates(serde_json::json!({})), Ok(None));
    }

    #[test]
    fn token_ids_are_one_or_many_or_none() {
        let ids = |v: Value| token_ids(Some(&v));
        assert_eq!(ids(serde_json::json!(3)), Some(vec![3]));
        assert_eq!(ids(serde_json::json!([3, 4])), Some(vec![3, 4]));
        assert_eq!(ids(Value::Null), Some(vec![]));
        assert_eq!(ids(serde_json::json!(-1)), None);
        assert_eq!(ids(serde_json::json!(4294967296u64)), None);
    }

    #[test]
    fn a_range_without_its_end_is_said_in_words() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(dir.path().join("generation_config.json"), r#"{"top_p": 0, "min_p": 2}"#).expect("written");
        let mut warnings = Vec::new();
        generation_defaults(dir.path(), &mut warnings).expect("readable");
        assert_eq!(
            warnings,
            [
                "generation_config.json: top_p must be above 0 and at most 1, not 0",
                "generation_config.json: min_p must be from 0 to 1, not 2",
            ]
        );
    }

    #[test]
    fn out_of_range_defaults_are_dropped_with_a_warning() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let text = r#"{"temperature": -1, "top_p": 0.9, "top_k": 20, "eos_token_id": "x", "do_sample": true}"#;
        std::fs::write(dir.path().join("generation_config.json"), text).expect("written");
        let mut warnings = Vec::new();
        let defaults = generation_defaults(dir.path(), &mut warnings).expect("readable");
        assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (None, Some(0.9), Some(20)));
        assert_eq!(warnings.len(), 2, "{warnings:?}");
    }
}
