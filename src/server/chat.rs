//! `POST /v1/chat/completions`.

use super::app::{App, Caller, new_id, unix_seconds};
use super::error::{ApiError, ApiResult};
use super::generation::Generation;
use super::logprobs;
use super::parse;
use super::prepare::{self, Limits, UNSUPPORTED, is_empty_list};
use super::prompt;
use super::reducer::{Delta, Part, Reducer, Tally};
use super::sse::{self, Encode};
use super::structured;
use super::wire::chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatFields, ChatLogprobs, ChatResponse, ChunkChoice, ChunkDelta,
};
use super::wire::{SamplingFields, StreamOptions, UsageBody};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{GenerateRequest, OutputRules};
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields of chats that the engine cannot honour, with the values that mean nothing.
const UNSUPPORTED_IN_CHAT: [(&str, fn(&Value) -> bool); 10] = [
    ("tools", is_empty_list),
    ("tool_choice", |value| value == "none" || value == "auto"),
    ("functions", is_empty_list),
    ("function_call", |value| value == "none"),
    ("modalities", |value| *value == json!(["text"])),
    ("audio", |_| false),
    ("prediction", |_| false),
    ("web_search_options", |_| false),
    ("store", |value| *value == false),
    ("documents", is_empty_list),
];

/// Everything about a request but its runs.
struct Prepared {
    model: Arc<LoadedModel>,
    name: String,
    fields: SamplingFields,
    own: ChatFields,
    request: GenerateRequest,
    rules: OutputRules,
    /// What the answer begins with: the message that it continues, where it is echoed.
    prefix: String,
}

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    let id = new_id("chatcmpl-");
    let stream = prepared.fields.stream == Some(true);
    let n = prepared.request.decoding.num_choices() as usize;
    let generation = Generation::submit(
        &app,
        &caller,
        &id,
        vec![(prepared.request.clone(), structured::fork(&prepared.rules))],
        "messages",
    )?;
    let shows_stop = prepared.fields.include_stop_str_in_output == Some(true);
    let reducer = Reducer::new(n, vec![prepared.prefix.clone()], shows_stop);
    let writer = Writer::new(id, prepared);
    if stream {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    collect(generation, reducer, writer).await.map(IntoResponse::into_response)
}

/// `POST /v1/chat/completions/render`: the tokens that a request would run on.
pub async fn render(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Json<Value>> {
    let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    Ok(Json(json!({ "token_ids": prepared.request.prompt })))
}

async fn prepare_off_thread(app: &App, caller: &Caller, value: Value) -> ApiResult<Prepared> {
    let (app, caller) = (app.clone(), caller.clone());
    let work = tokio::task::spawn_blocking(move || prepare(&app, &caller, &value));
    work.await.map_err(|_| ApiError::internal())?
}

fn prepare(app: &App, caller: &Caller, value: &Value) -> ApiResult<Prepared> {
    let fields: SamplingFields = parse::fields(value)?;
    let own: ChatFields = parse::fields(value)?;
    parse::refuse(value, &UNSUPPORTED)?;
    parse::refuse(value, &UNSUPPORTED_IN_CHAT)?;
    let model = app.model()?;
    let name = app.check_name(&model, fields.model.as_deref())?;
    let logprobs = match (own.logprobs, own.top_logprobs) {
        (Some(true), top) => Some(top.unwrap_or(0)),
        (_, Some(top)) if top > 0 => {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
        _ => None,
    };
    let rendered = prompt::render_chat(&own, None, &model)?;
    let prompt = prompt::encode(&model, &rendered.text, fields.add_special_tokens == Some(true), "messages")?;
    let limits = Limits {
        max_tokens: own.max_completion_tokens.or(own.max_tokens),
        default_max_tokens: None,
        logprobs,
        logprobs_field: "top_logprobs",
    };
    let request = prepare::requests(&fields, &limits, vec![prompt], &model, caller)?.swap_remove(0);
    let prefix = rendered.continued.filter(|_| fields.echo == Some(true)).unwrap_or_default();
    let rules = structured::rules(app, &model, value, None)?;
    Ok(Prepared { model, name, fields, own, request, rules, prefix })
}

/// Makes chunks of deltas, and one body of all deltas.
struct Writer {
    id: String,
    created: u64,
    model: Arc<LoadedModel>,
    name: String,
    options: StreamOptions,
    has_logprobs: bool,
    /// Given where ids are wanted.
    prompt: Option<Vec<TokenId>>,
    /// The prompt's ids were sent.
    has_sent_prompt: bool,
}

impl Writer {
    fn new(id: String, prepared: Prepared) -> Self {
        let returns_ids = prepared.fields.return_token_ids == Some(true);
        Writer {
            id,
            created: unix_seconds(),
            model: prepared.model,
            name: prepared.name,
            options: prepared.fields.stream_options.unwrap_or_default(),
            has_logprobs: prepared.own.logprobs == Some(true),
            prompt: returns_ids.then_some(prepared.request.prompt),
            has_sent_prompt: false,
        }
    }

    fn logprobs(&self, delta: &Delta) -> Option<ChatLogprobs> {
        self.has_logprobs.then(|| logprobs::of_chat(&self.model.tokenizer, &delta.logprobs))
    }

    fn chunk(&mut self, choices: Vec<ChunkChoice>, usage: Option<Option<UsageBody>>, out: &mut String) {
        let prompt_token_ids = if self.has_sent_prompt { None } else { self.prompt.clone() };
        self.has_sent_prompt = true;
        let (id, model) = (self.id.as_str(), self.name.as_str());
        let object = "chat.completion.chunk";
        sse::data(out, &ChatChunk { id, object, created: self.created, model, choices, usage, prompt_token_ids });
    }

    /// The usage that a chunk with choices carries.
    fn running_usage(&self, tally: Tally) -> Option<Option<UsageBody>> {
        let continuous = self.options.continuous_usage_stats == Some(true);
        (self.options.include_usage == Some(true)).then(|| continuous.then(|| tally.usage()))
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, tally: Tally, out: &mut String) {
        let usage = self.running_usage(tally);
        let index = delta.choice;
        let choice = |delta: ChunkDelta| ChunkChoice {
            index,
            delta,
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        if delta.is_first {
            let role = ChunkDelta { role: Some("assistant"), content: Some(String::new()), ..ChunkDelta::default() };
            self.chunk(vec![choice(role)], usage, out);
        }
        let mut logprobs = self.logprobs(&delta).filter(|logprobs| !logprobs.content.is_empty());
        let mut token_ids = self.prompt.is_some().then_some(delta.tokens).filter(|tokens| !tokens.is_empty());
        let mut parts: Vec<ChunkDelta> = delta.parts.into_iter().map(chunk_of).collect();
        if parts.is_empty() && (logprobs.is_some() || token_ids.is_some()) {
            parts.push(ChunkDelta { content: Some(String::new()), ..ChunkDelta::default() });
        }
        for part in parts {
            let (logprobs, token_ids) = (logprobs.take(), token_ids.take());
            self.chunk(vec![ChunkChoice { logprobs, token_ids, ..choice(part) }], usage, out);
        }
        if let Some(finish) = delta.finish {
            let (finish_reason, stop_reason) = (Some(finish.reason), Some(finish.stop));
            let last = ChunkChoice { finish_reason, stop_reason, ..choice(ChunkDelta::default()) };
            self.chunk(vec![last], usage, out);
        }
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        if self.options.include_usage == Some(true) {
            self.chunk(Vec::new(), Some(Some(tally.usage())), out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}

fn chunk_of(part: Part) -> ChunkDelta {
    match part {
        Part::Content(text) => ChunkDelta { content: Some(text), ..ChunkDelta::default() },
    }
}

async fn collect(mut generation: Generation, mut reducer: Reducer, writer: Writer) -> ApiResult<Json<ChatResponse>> {
    let empty = |index| ChatChoice {
        index,
        message: AssistantMessage { role: "assistant", ..AssistantMessage::default() },
        logprobs: writer.has_logprobs.then(ChatLogprobs::default),
        finish_reason: "stop",
        stop_reason: Value::Null,
        token_ids: writer.prompt.is_some().then(Vec::new),
    };
    let mut choices: Vec<ChatChoice> = (0..reducer.num_choices()).map(empty).collect();
    while let Some((run, event)) = generation.recv().await {
        for delta in reducer.push(run, event).map_err(|e| ApiError::of_run(&e, "messages"))? {
            let logprobs = writer.logprobs(&delta);
            append(&mut choices[delta.choice], delta, logprobs);
        }
    }
    for choice in &mut choices {
        choice.message.content.get_or_insert_default();
    }
    Ok(Json(ChatResponse {
        id: writer.id,
        object: "chat.completion",
        created: writer.created,
        model: writer.name,
        choices,
        usage: reducer.tally().usage(),
        prompt_token_ids: writer.prompt,
    }))
}

fn append(choice: &mut ChatChoice, delta: Delta, logprobs: Option<ChatLogprobs>) {
    for part in delta.parts {
        match part {
            Part::Content(text) => choice.message.content.get_or_insert_default().push_str(&text),
        }
    }
    if let (Some(all), Some(more)) = (&mut choice.logprobs, logprobs) {
        all.content.extend(more.content);
    }
    if let Some(ids) = &mut choice.token_ids {
        ids.extend(delta.tokens);
    }
    if let Some(finish) = delta.finish {
        (choice.finish_reason, choice.stop_reason) = (finish.reason, finish.stop);
    }
}
