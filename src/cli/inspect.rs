//! `kvasir inspect`: what the header of a checkpoint says. Nothing is loaded; also kinds that cannot be run are shown.

use super::error::{CliError, CliResult, Exit};
use super::out;
use crate::model::gguf::{GgufFile, GgufValue};
use crate::model::{Model, ModelError, TensorFacts, files};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Args)]
pub struct InspectArgs {
    /// A GGUF file or a Hugging Face folder
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

struct Inspection {
    arch: Option<String>,
    metadata: Map<String, Value>,
    tensors: Vec<TensorFacts>,
}

pub fn run(args: &InspectArgs) -> CliResult {
    let found = if args.file.is_dir() { folder(&args.file) } else { gguf(&args.file) };
    let Inspection { arch, metadata, tensors } = found.map_err(|e| CliError::model(e.to_string()))?;
    if args.json {
        out::json(&json!({ "arch": arch, "metadata": metadata, "tensors": tensors }))?;
        return Ok(Exit::Ok);
    }
    let mut text = format!("arch  {}\n\n", arch.as_deref().unwrap_or("unknown"));
    let mut rows: Vec<Vec<String>> = metadata.iter().map(|(k, v)| vec![k.clone(), shorten(&v.to_string())]).collect();
    text.push_str(&out::table(&rows));
    rows = vec![["tensor", "type", "shape", "bytes"].map(String::from).to_vec()];
    rows.extend(
        tensors.iter().map(|t| vec![t.name.clone(), t.dtype.clone(), format!("{:?}", t.shape), out::bytes(t.bytes)]),
    );
    text.push('\n');
    text.push_str(&out::table(&rows));
    out::text(&text)?;
    Ok(Exit::Ok)
}

fn gguf(path: &Path) -> Result<Inspection, ModelError> {
    let file = GgufFile::open(path)?;
    let metadata: Map<String, Value> = file.metadata().map(|(key, value)| (key.into(), json_of(value))).collect();
    let arch = metadata.get("general.architecture").and_then(Value::as_str).map(String::from);
    let tensors = file.tensors().iter().map(|t| TensorFacts {
        name: t.name.clone(),
        dtype: t.ty.name.to_string(),
        shape: t.shape.clone(),
        bytes: t.num_bytes(),
    });
    Ok(Inspection { arch, metadata, tensors: tensors.collect() })
}

/// Arrays are vocabularies and merges: their length says enough.
fn json_of(value: GgufValue<'_>) -> Value {
    match value {
        GgufValue::Unsigned(n) => json!(n),
        GgufValue::Signed(n) => json!(n),
        GgufValue::Float(x) => json!(x),
        GgufValue::Bool(b) => json!(b),
        GgufValue::Text(text) => json!(text),
        GgufValue::Array { count, .. } => json!({ "array_len": count }),
    }
}

fn folder(path: &Path) -> Result<Inspection, ModelError> {
    let model = Model::open(path)?;
    let metadata = match model.gguf() {
        Some(file) => return gguf(file.path()),
        None => files::read_json_object(&path.join("config.json"))?.unwrap_or_default(),
    };
    Ok(Inspection { arch: Some(model.info().arch.clone()), metadata, tensors: model.tensors() })
}

/// One line of at most 100 characters.
fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(100).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
