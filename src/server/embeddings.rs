//! `POST /v1/embeddings`: the hidden states of prompts, pooled to one vector each and normalised to length 1.
//!
//! Guarantees: prompts run in the engine's batch beside everything else; a vector does not depend on who else runs. Long
//! lists go to the engine in pieces, so that they fit its queue.

use super::app::{App, Caller, new_id};
use super::completions;
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::generation::Generation;
use super::parse::{self, JsonBody};
use super::prepare;
use super::wire::completion::PromptField;
use crate::engine::handle::LoadedModel;
use crate::engine::pooling;
use crate::ids::TokenId;
use crate::protocol::{EngineEvent, GenerateRequest, OutputRules, Pooling};
use axum::extract::{Extension, State};
use axum::response::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// Texts of one request, as OpenAI's API has it.
const MAX_INPUTS: usize = 2048;
/// Texts that are with the engine at a time.
const PIECE: usize = 64;

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct EmbeddingFields {
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
    pub input: PromptField,
    pub encoding_format: Option<EncodingFormat>,
    /// Keep so many values at the head of each vector, which is then normalised anew.
    #[schema(minimum = 1)]
    pub dimensions: Option<u32>,
    /// Keep only so many tokens at the end of each text; -1 keeps what the context holds.
    pub truncate_prompt_tokens: Option<i64>,
    pub add_special_tokens: Option<bool>,
    pub priority: Option<i32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    #[default]
    Float,
    /// Little-endian f32.
    Base64,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct EmbeddingResponse {
    pub id: String,
    pub object: &'static str,
    pub data: Vec<Embedding>,
    pub model: String,
    pub usage: EmbeddingUsage,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Embedding {
    pub object: &'static str,
    pub index: usize,
    pub embedding: Vector,
}

/// As numbers, or as base64 of little-endian f32.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct EmbeddingUsage {
    pub prompt_tokens: u32,
    pub total_tokens: u32,
}

struct Prepared {
    model: Arc<ModelUse>,
    prompts: Vec<Vec<TokenId>>,
    pooling: Pooling,
    dimensions: Option<usize>,
    format: EncodingFormat,
    priority: i32,
}

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<EmbeddingResponse>> {
    let model = app.open(value["model"].as_str()).await?;
    let work = tokio::task::spawn_blocking({
        let app = app.clone();
        move || prepare(&app, model, &value)
    });
    let prepared = work.await.map_err(|_| ApiError::internal())??;
    let id = new_id("embd-");
    let mut usage = EmbeddingUsage::default();
    let mut data = Vec::with_capacity(prepared.prompts.len());
    for piece in prepared.prompts.chunks(PIECE) {
        for values in embed(&app, &caller, &id, &prepared, piece, &mut usage).await? {
            let values = pooling::normalised(values, prepared.dimensions);
            let embedding = match prepared.format {
                EncodingFormat::Float => Vector::Float(values),
                EncodingFormat::Base64 => Vector::Base64(base64(bytemuck::cast_slice(&values))),
            };
            data.push(Embedding { object: "embedding", index: data.len(), embedding });
        }
    }
    Ok(Json(EmbeddingResponse { id, object: "list", data, model: prepared.model.name.clone(), usage }))
}

fn prepare(app: &App, model: Arc<ModelUse>, value: &Value) -> ApiResult<Prepared> {
    let fields: EmbeddingFields = parse::fields(value)?;
    let pooling = pooling_of(app, &model)?;
    if let Some(dimensions) = fields.dimensions.filter(|n| !(1..=model.hidden_size).contains(n)) {
        let message = format!("dimensions must be between 1 and {}, not {dimensions}", model.hidden_size);
        return Err(ApiError::invalid("dimensions", message));
    }
    let add_special = fields.add_special_tokens.unwrap_or(true);
    let (mut prompts, _) = completions::prompts(&fields.input, &model, (add_special, "input"), false)?;
    if prompts.is_empty() || prompts.len() > MAX_INPUTS {
        let message = format!("input must hold 1 to {MAX_INPUTS} texts, not {}", prompts.len());
        return Err(ApiError::invalid("input", message));
    }
    for prompt in &mut prompts {
        prepare::truncate(fields.truncate_prompt_tokens, model.max_model_len.saturating_sub(1), prompt)?;
    }
    Ok(Prepared {
        model,
        prompts,
        pooling,
        dimensions: fields.dimensions.map(|n| n as usize),
        format: fields.encoding_format.unwrap_or_default(),
        priority: fields.priority.unwrap_or(0),
    })
}

fn pooling_of(app: &App, model: &LoadedModel) -> ApiResult<Pooling> {
    match (app.options.pooling, &model.pooling) {
        (Some(pooling), _) => Ok(pooling),
        (None, Ok(pooling)) => Ok(*pooling),
        (None, Err(fault)) => Err(ApiError::unsupported("model", fault.clone())),
    }
}

/// The vectors of some prompts, in their order.
async fn embed(
    app: &App,
    caller: &Caller,
    id: &str,
    prepared: &Prepared,
    prompts: &[Vec<TokenId>],
    usage: &mut EmbeddingUsage,
) -> ApiResult<Vec<Vec<f32>>> {
    let request = |prompt: &Vec<TokenId>| {
        let rules = OutputRules { pooling: Some(prepared.pooling), ..OutputRules::default() };
        let request = GenerateRequest::embedding(caller.tag(), prompt.clone());
        (GenerateRequest { priority: prepared.priority, adapter: prepared.model.lora, ..request }, rules)
    };
    let mut generation =
        Generation::submit(app, &prepared.model, caller, id, prompts.iter().map(request).collect(), "input")?;
    let mut vectors = vec![Vec::new(); prompts.len()];
    while let Some((run, event)) = generation.recv().await {
        match event {
            EngineEvent::Embedding { values } => vectors[run] = values,
            EngineEvent::Finished { usage: used, .. } => {
                usage.prompt_tokens += used.prompt_tokens;
                usage.total_tokens += used.prompt_tokens;
            }
            EngineEvent::Failed { error } => return Err(ApiError::of_run(&error, "input")),
            _ => {}
        }
    }
    // A run that was aborted has none.
    match vectors.iter().all(|values| !values.is_empty()) {
        true => Ok(vectors),
        false => Err(ApiError::unavailable("the request was aborted")),
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().enumerate().fold(0u32, |bits, (i, byte)| bits | u32::from(*byte) << (16 - 8 * i));
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i)) as usize & 63];
            text.push(if i <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_as_the_rfc_has_it() {
        for (plain, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }
}
