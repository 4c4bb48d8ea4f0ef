//! `POST /tokenize` and `POST /detokenize`.

use super::app::App;
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::parse::{self, JsonBody};
use super::prompt;
use super::tools::Tools;
use super::wire::chat::{ChatFields, ChatMessage};
use crate::ids::TokenId;
use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Either `prompt`, or `messages` as in a chat.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct TokenizeFields {
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
    pub prompt: Option<String>,
    /// By default true for a prompt and false for messages.
    pub add_special_tokens: Option<bool>,
    pub return_token_strs: Option<bool>,
    #[schema(value_type = Option<Vec<ChatMessage>>, min_items = 1)]
    pub messages: Option<Value>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    pub count: usize,
    pub max_model_len: u32,
    pub tokens: Vec<TokenId>,
    pub token_strs: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    pub model: Option<String>,
    pub tokens: Vec<TokenId>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    pub prompt: String,
}

pub async fn tokenize(State(app): State<App>, JsonBody(value): JsonBody) -> ApiResult<Json<TokenizeResponse>> {
    let model = app.open(value["model"].as_str()).await?;
    let work = tokio::task::spawn_blocking(move || tokenize_value(&model, &value));
    work.await.map_err(|_| ApiError::internal())?.map(Json)
}

fn tokenize_value(model: &ModelUse, value: &Value) -> ApiResult<TokenizeResponse> {
    let fields: TokenizeFields = parse::fields(value)?;
    let tokens = match &fields.prompt {
        Some(text) => prompt::encode(model, text, fields.add_special_tokens.unwrap_or(true), "prompt")?,
        None if fields.messages.is_some() => {
            let chat: ChatFields = parse::fields(value)?;
            let tools = Tools::of(value)?;
            let rendered = prompt::render_chat(&chat, tools.as_ref(), model)?;
            prompt::encode(model, &rendered.text, fields.add_special_tokens.unwrap_or(false), "messages")?
        }
        None => return Err(ApiError::invalid("prompt", "prompt or messages is wanted")),
    };
    let strings = || tokens.iter().map(|&token| model.tokenizer.token_text(token)).collect();
    let token_strs = (fields.return_token_strs == Some(true)).then(strings);
    Ok(TokenizeResponse { count: tokens.len(), max_model_len: model.max_model_len, tokens, token_strs })
}

pub async fn detokenize(State(app): State<App>, JsonBody(value): JsonBody) -> ApiResult<Json<DetokenizeResponse>> {
    let fields: DetokenizeRequest = parse::fields(&value)?;
    let model = app.open(fields.model.as_deref()).await?;
    if let Some(id) = fields.tokens.iter().find(|&&id| id >= model.vocab_size) {
        let message = format!("token {id} is outside the vocabulary of {} tokens", model.vocab_size);
        return Err(ApiError::invalid("tokens", message));
    }
    Ok(Json(DetokenizeResponse { prompt: model.tokenizer.decode(&fields.tokens, false) }))
}
