//! What is in a checkpoint, also in one that cannot be run: header facts for a person or a script.

use super::checkpoint::TensorFacts;
use super::error::ModelError;
use super::files::read_json_object;
use super::gguf::{GgufFile, GgufValue};
use super::location::{Location, locate, open_parts};
use super::safetensors::SafetensorsSet;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Elements of an array that are shown; the rest is counted.
const SHOWN_ELEMENTS: usize = 8;

/// Header and tensors of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// `general.architecture` or `model_type`.
    pub arch: Option<String>,
    /// GGUF keys, or the object in `config.json`. Long arrays are `{"count": n, "first": [...]}`.
    pub metadata: Map<String, Value>,
    pub tensors: Vec<TensorFacts>,
}

/// Reads the headers of a GGUF file or a Hugging Face folder. The architecture and types need not be supported.
pub fn inspect(path: &Path) -> Result<Inspection, ModelError> {
    match locate(path)? {
        Location::Gguf(file) => {
            let parts = open_parts(&file)?;
            Ok(Inspection {
                arch: parts[0].string("general.architecture")?.map(str::to_owned),
                metadata: gguf_metadata(&parts[0]),
                tensors: parts.iter().flat_map(|part| part.tensors()).map(TensorFacts::of_gguf).collect(),
            })
        }
        Location::Folder(folder) => {
            let metadata = read_json_object(&folder.join("config.json"))?.unwrap_or_default();
            let weights = SafetensorsSet::open(&folder)?;
            let tensors = weights.files().iter().flat_map(|file| file.tensors());
            Ok(Inspection {
                arch: metadata.get("model_type").and_then(Value::as_str).map(str::to_owned),
                tensors: tensors.map(TensorFacts::of_safetensors).collect(),
                metadata,
            })
        }
    }
}

fn gguf_metadata(file: &GgufFile) -> Map<String, Value> {
    file.metadata().map(|(key, value)| (key.to_owned(), json_of(file, key, value))).collect()
}

fn json_of(file: &GgufFile, key: &str, value: GgufValue<'_>) -> Value {
    match value {
        GgufValue::Unsigned(v) => v.into(),
        GgufValue::Signed(v) => v.into(),
        GgufValue::Float(v) => v.into(),
        GgufValue::Bool(v) => v.into(),
        GgufValue::Text(v) => v.into(),
        GgufValue::Array { element, count } => {
            let first = first_elements(file, key);
            if first.len() == count {
                return first.into();
            }
            json!({"type": element.name(), "count": count, "first": first})
        }
    }
}

/// The first elements of a list of strings, f32 or i32; empty for other types.
fn first_elements(file: &GgufFile, key: &str) -> Vec<Value> {
    fn first<T: Into<Value>>(list: Vec<T>) -> Vec<Value> {
        list.into_iter().take(SHOWN_ELEMENTS).map(Into::into).collect()
    }
    if let Ok(Some(list)) = file.strings(key) {
        return first(list);
    }
    if let Ok(Some(list)) = file.f32s(key) {
        return first(list);
    }
    file.i32s(key).ok().flatten().map(first).unwrap_or_default()
}
