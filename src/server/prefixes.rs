//! `/kvasir/v1/prefixes`: what the prefix cache knows, computed ahead and kept, named, let go and evicted.
//!
//! Guarantees: an answer says what was done, not what will be; a client that leaves before its prefix is computed pins
//! nothing.

use super::app::{App, Caller};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::parse::{self, JsonBody, ModelQuery, PathFields, QueryFields};
use super::prepare;
use super::prompt;
use super::tools::Tools;
use super::wire::chat::{ChatFields, ChatMessage};
use super::wire::completion::PromptField;
use crate::engine::Run;
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{EngineEvent, PinRequest, RunError, Usage};
use crate::telemetry::{PrefixInfo, Tier};
use axum::extract::{Extension, State};
use axum::response::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::mpsc::Receiver;
use utoipa::ToSchema;

/// Either `prompt` (a text, or token ids), or `messages` as in a chat. Whole blocks of it are kept.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct PinFields {
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
    /// What a person calls it.
    pub name: Option<String>,
    pub prompt: Option<PromptField>,
    /// By default true for a prompt and false for messages.
    pub add_special_tokens: Option<bool>,
    #[schema(value_type = Option<Vec<ChatMessage>>, min_items = 1)]
    pub messages: Option<Value>,
    /// Only requests with the same salt find it.
    pub cache_salt: Option<String>,
}

/// A prefix that is kept now.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct PinnedPrefix {
    /// A number as text, as in the engine's snapshot.
    pub id: String,
    pub name: Option<String>,
    /// Tokens of its whole blocks.
    pub tokens: u32,
    /// Of the request's tokens, those that needed no computing.
    pub cached_tokens: u32,
    pub pinned: bool,
}

/// What is to become of a prefix that is known.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct KeepFields {
    /// False lets it go: it stays in the cache until it is evicted.
    pub pinned: Option<bool>,
    /// What a pinned one is called from now on; none where it is left out.
    pub name: Option<String>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChangedPrefix {
    pub id: String,
    pub name: Option<String>,
    pub pinned: bool,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct EvictedPrefix {
    pub id: String,
    pub deleted: bool,
}

/// Pinned ones first, then those with the most hits.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct PrefixList {
    pub prefixes: Vec<PrefixEntry>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct PrefixEntry {
    pub id: String,
    pub name: Option<String>,
    pub pinned: bool,
    /// Where its last block is: gpu, host or disk.
    #[schema(value_type = String)]
    pub tier: Tier,
    pub tokens: u32,
    pub blocks: u32,
    /// Requests that found it, and the tokens that they were spared.
    pub hits: u64,
    pub hit_tokens: u64,
    /// Of these tokens, those that were in host memory, and on disk.
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    pub last_hit_step: u64,
    /// How it begins.
    pub text: String,
}

impl PrefixEntry {
    fn of(prefix: &PrefixInfo, model: &LoadedModel) -> Self {
        PrefixEntry {
            id: prefix.id.to_string(),
            name: prefix.name.clone(),
            pinned: prefix.pinned,
            tier: prefix.tier,
            tokens: prefix.tokens,
            blocks: prefix.blocks,
            hits: prefix.hits,
            hit_tokens: prefix.hit_tokens,
            host_hit_tokens: prefix.host_hit_tokens,
            disk_hit_tokens: prefix.disk_hit_tokens,
            last_hit_step: prefix.last_hit_step,
            text: model.tokenizer.decode(&prefix.head, false),
        }
    }
}

pub async fn list(State(app): State<App>, QueryFields(query): QueryFields<ModelQuery>) -> ApiResult<Json<PrefixList>> {
    let (served, _) = app.fleet.find(query.model.as_deref())?;
    let model = served.loaded()?;
    let snapshot = served.engine.telemetry().snapshot();
    let prefixes = snapshot.prefixes.iter().map(|prefix| PrefixEntry::of(prefix, &model)).collect();
    Ok(Json(PrefixList { prefixes }))
}

pub async fn pin(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<PinnedPrefix>> {
    let model = app.open(value["model"].as_str()).await?;
    let (of_model, of_caller) = (model.clone(), caller.clone());
    let work = tokio::task::spawn_blocking(move || prepare(&of_model, &of_caller, &value));
    let (request, field) = work.await.map_err(|_| ApiError::internal())??;
    let engine = &model.model.engine;
    let _guard = app.admit(&caller, &model.model)?;
    let block_size = model.block_size;
    let fault = |error: RunError| match error {
        RunError::InvalidParam(invalid) => {
            let field = if invalid.field == "name" { "name" } else { field };
            ApiError::invalid(field, format!("{field} {}", invalid.message))
        }
        error => ApiError::of_run(&error, field),
    };
    let (id, name) = (engine.prefix_id(&request), request.name.clone());
    let tokens = request.tokens.len() as u32 / block_size * block_size;
    let usage = end(engine.pin_prefix(request).map_err(fault)?).await.map_err(fault)?;
    let id = id.map(|id| id.to_string()).ok_or_else(ApiError::internal)?;
    Ok(Json(PinnedPrefix { id, name, tokens, cached_tokens: usage.cached_tokens, pinned: true }))
}

/// The prefix to be computed, and the field that it came in.
fn prepare(model: &ModelUse, caller: &Caller, value: &Value) -> ApiResult<(PinRequest, &'static str)> {
    let fields: PinFields = parse::fields(value)?;
    let (tokens, field) = match &fields.prompt {
        Some(prompt) => (tokens_of(prompt, &fields, model)?, "prompt"),
        None if fields.messages.is_some() => {
            let mut chat: ChatFields = parse::fields(value)?;
            // What comes next is another message.
            chat.add_generation_prompt = chat.add_generation_prompt.or(Some(false));
            let rendered = prompt::render_chat(&chat, Tools::of(value)?.as_ref(), model)?;
            let add_special = fields.add_special_tokens.unwrap_or(false);
            (prompt::encode(model, &rendered.text, add_special, "messages")?, "messages")
        }
        None => return Err(ApiError::invalid("prompt", "prompt or messages is wanted")),
    };
    let cache_salt = fields.cache_salt.as_deref().map_or(0, prepare::salt);
    Ok((PinRequest { owner: caller.tag(), name: fields.name, tokens, cache_salt, adapter: model.lora }, field))
}

fn tokens_of(prompt: &PromptField, fields: &PinFields, model: &LoadedModel) -> ApiResult<Vec<TokenId>> {
    match prompt {
        PromptField::Text(text) => prompt::encode(model, text, fields.add_special_tokens.unwrap_or(true), "prompt"),
        PromptField::Tokens(tokens) => Ok(tokens.clone()),
        PromptField::Texts(_) | PromptField::TokenLists(_) => {
            Err(ApiError::invalid("prompt", "prompt must be one text, or one list of token ids"))
        }
    }
}

pub async fn change(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(id): PathFields<String>,
    QueryFields(query): QueryFields<ModelQuery>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<ChangedPrefix>> {
    let KeepFields { pinned, name } = parse::fields(&value)?;
    let (model, _) = app.fleet.find(query.model.as_deref())?;
    model.loaded()?;
    let prefix = number(&id)?;
    if pinned == Some(false) {
        if !told(model.engine.unpin_prefix(prefix)).await? {
            return Err(unknown("no pinned prefix", &id));
        }
        return Ok(Json(ChangedPrefix { id, name: None, pinned: false }));
    }
    let _guard = app.admit(&caller, model)?;
    let fault = |error: RunError| match error {
        RunError::PrefixLost => unknown("no prefix", &id),
        error => ApiError::of_run(&error, "id"),
    };
    end(model.engine.keep_prefix(prefix, name.clone(), caller.tag()).map_err(fault)?).await.map_err(fault)?;
    Ok(Json(ChangedPrefix { id, name, pinned: true }))
}

pub async fn evict(
    State(app): State<App>,
    PathFields(id): PathFields<String>,
    QueryFields(query): QueryFields<ModelQuery>,
) -> ApiResult<Json<EvictedPrefix>> {
    let (model, _) = app.fleet.find(query.model.as_deref())?;
    model.loaded()?;
    let prefix = number(&id)?;
    // In this order: what is pinned cannot be evicted.
    let unpinned = model.engine.unpin_prefix(prefix);
    let is_evicted = told(model.engine.evict_prefix(prefix)).await?;
    match told(unpinned).await? || is_evicted {
        true => Ok(Json(EvictedPrefix { id, deleted: is_evicted })),
        false => Err(unknown("no prefix", &id)),
    }
}

fn number(id: &str) -> ApiResult<u64> {
    id.parse().map_err(|_| unknown("no prefix", id))
}

fn unknown(what: &str, id: &str) -> ApiError {
    ApiError::not_found(format!("there is {what} `{id}`")).with_param("id")
}

/// Waits for the end of a prefix's run; dropped before, it is aborted.
async fn end(run: Run) -> Result<Usage, RunError> {
    loop {
        match std::future::poll_fn(|cx| run.poll_recv(cx)).await {
            Some(EngineEvent::Finished { usage, .. }) => return Ok(usage),
            Some(EngineEvent::Failed { error }) => return Err(error),
            Some(_) => {}
            None => return Err(RunError::ShutDown),
        }
    }
}

/// What the engine says once it has carried a command out.
async fn told(answer: Receiver<bool>) -> ApiResult<bool> {
    let answer = tokio::task::spawn_blocking(move || answer.recv()).await.map_err(|_| ApiError::internal())?;
    answer.map_err(|_| ApiError::unavailable("the model is not ready"))
}
