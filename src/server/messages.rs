//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, for text and tools, over the chat of this server.

use super::app::{App, Caller, new_id};
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat;
use super::error::{ApiError, ApiResult};
use super::parse;
use super::reducer::{Delta, Finish, Tally};
use super::sse::{self, Encode};
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesFields {
    pub model: Option<String>,
    /// Needed, but for counting.
    pub max_tokens: Option<u32>,
    #[schema(value_type = Vec<Object>)]
    pub messages: Vec<Value>,
    /// A text, or a list of text blocks.
    #[schema(value_type = Option<Object>)]
    pub system: Option<Value>,
    pub stop_sequences: Option<Vec<String>>,
    pub stream: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub tools: Option<Vec<MessagesTool>>,
    #[schema(value_type = Option<Object>)]
    pub tool_choice: Option<Value>,
    #[schema(value_type = Option<Object>)]
    pub thinking: Option<Value>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesTool {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub name: String,
    pub description: Option<String>,
    #[schema(value_type = Option<Object>)]
    pub input_schema: Option<Value>,
}

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    match answer(&app, &caller, &headers, body).await {
        Ok(response) => response,
        Err(error) => refusal(&error),
    }
}

pub async fn count_tokens(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let count = async {
        let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
        let fields: MessagesFields = parse::fields(&value)?;
        let prepared = chat::prepare_off_thread(&app, &caller, chat_body(&fields)?).await?;
        Ok(Json(json!({ "input_tokens": prepared.request.prompt.len() })).into_response())
    };
    count.await.unwrap_or_else(|error| refusal(&error))
}

async fn answer(app: &App, caller: &Caller, headers: &HeaderMap, body: Body) -> ApiResult<Response> {
    let value = parse::json_object(headers, body, app.options.max_body_bytes).await?;
    let fields: MessagesFields = parse::fields(&value)?;
    if fields.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens is missing"));
    }
    let prepared = chat::prepare_off_thread(app, caller, chat_body(&fields)?).await?;
    let id = new_id("msg_");
    let (mut generation, mut reducer) = prepared.start(app, caller, &id)?;
    let mut writer = Writer { id, model: prepared.name, blocks: Blocks::default(), finish: None, has_begun: false };
    if fields.stream == Some(true) {
        return Ok(sse::respond(app, generation, reducer, writer));
    }
    while let Some((run, event)) = generation.recv().await {
        for delta in reducer.push(run, event).map_err(|e| ApiError::of_run(&e, "messages"))? {
            writer.take(delta);
        }
    }
    Ok(Json(writer.message(reducer.tally())).into_response())
}

/// The error in Anthropic's shape.
fn refusal(error: &ApiError) -> Response {
    (error.status, Json(error_body(error))).into_response()
}

fn error_body(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => "api_error",
        _ => "invalid_request_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.body.message } })
}

/// The same request as a chat.
fn chat_body(fields: &MessagesFields) -> ApiResult<Value> {
    let mut messages = Vec::new();
    if let Some(system) = &fields.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    for (i, message) in fields.messages.iter().enumerate() {
        push_message(&format!("messages[{i}]"), message, &mut messages)?;
    }
    let mut body = json!({ "messages": messages });
    let fields_of_chat: [(&str, Value); 7] = [
        ("model", json!(fields.model)),
        ("max_tokens", json!(fields.max_tokens)),
        ("temperature", json!(fields.temperature)),
        ("top_p", json!(fields.top_p)),
        ("top_k", json!(fields.top_k)),
        ("stop", json!(fields.stop_sequences)),
        ("chat_template_kwargs", thinking(fields.thinking.as_ref())),
    ];
    fields_of_chat.into_iter().for_each(|(name, value)| body[name] = value);
    if let Some(tools) = &fields.tools {
        body["tools"] = tools.iter().map(tool).collect::<ApiResult<Vec<Value>>>()?.into();
    }
    if let Some(choice) = &fields.tool_choice {
        body["tool_choice"] = tool_choice(choice)?;
        body["parallel_tool_calls"] = (choice["disable_parallel_tool_use"] != true).into();
    }
    Ok(body)
}

fn thinking(field: Option<&Value>) -> Value {
    match field.and_then(|field| field["type"].as_str()) {
        Some("enabled" | "adaptive") => json!({ "enable_thinking": true }),
        Some(_) => json!({ "enable_thinking": false }),
        None => Value::Null,
    }
}

fn tool(tool: &MessagesTool) -> ApiResult<Value> {
    if let Some(kind) = tool.kind.as_deref().filter(|kind| *kind != "custom") {
        return Err(ApiError::unsupported("tools", format!("tools of type `{kind}` are not supported")));
    }
    let function = json!({ "name": tool.name, "description": tool.description, "parameters": tool.input_schema });
    Ok(json!({ "type": "function", "function": function }))
}

fn tool_choice(choice: &Value) -> ApiResult<Value> {
    Ok(match choice["type"].as_str() {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => json!({ "type": "function", "function": { "name": choice["name"] } }),
        _ => return Err(ApiError::invalid("tool_choice", "tool_choice.type must be auto, any, tool or none")),
    })
}

/// One message may hold what chats have as several: results of tools come before the text beside them.
fn push_message(at: &str, message: &Value, messages: &mut Vec<Value>) -> ApiResult<()> {
    let role = message["role"].as_str().unwrap_or_default();
    if !matches!(role, "user" | "assistant" | "system") {
        return Err(ApiError::invalid(format!("{at}.role"), format!("{at}.role must be user or assistant")));
    }
    let Some(blocks) = message["content"].as_array() else {
        messages.push(json!({ "role": role, "content": message["content"] }));
        return Ok(());
    };
    let (mut content, mut calls) = (Vec::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        match block["type"].as_str() {
            Some("tool_result") => messages.push(json!({
                "role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"],
            })),
            Some("tool_use") => calls.push(json!({
                "id": block["id"], "type": "function",
                "function": { "name": block["name"], "arguments": block["input"].to_string() },
            })),
            // Templates leave the thoughts of earlier turns out.
            Some("thinking" | "redacted_thinking") => {}
            Some("text") => content.push(json!({ "type": "text", "text": block["text"] })),
            Some(kind) => {
                let at = format!("{at}.content[{i}]");
                return Err(ApiError::media(&at, format!("{at}: blocks of type `{kind}` are not supported")));
            }
            None => {
                let at = format!("{at}.content[{i}].type");
                return Err(ApiError::invalid(&at, format!("{at} is missing")));
            }
        }
    }
    if !content.is_empty() || !calls.is_empty() {
        let mut message = Map::new();
        message.insert("role".into(), role.into());
        message.insert("content".into(), content.into());
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        messages.push(Value::Object(message));
    }
    Ok(())
}

/// Makes events of deltas, and one message of all.
struct Writer {
    id: String,
    model: String,
    blocks: Blocks,
    finish: Option<Finish>,
    has_begun: bool,
}

impl Writer {
    fn take(&mut self, delta: Delta) -> Vec<BlockEvent> {
        let mut events = Vec::new();
        delta.parts.into_iter().for_each(|part| self.blocks.take(part, &mut events));
        if delta.finish.is_some() {
            self.blocks.close(&mut events);
            self.finish = delta.finish;
        }
        events
    }

    /// The message with all of its blocks.
    fn message(&self, tally: Tally) -> Value {
        let content: Vec<Value> = self.blocks.all.iter().map(whole).collect();
        let (reason, sequence) = self.stop();
        self.shell(content, reason, sequence, tally)
    }

    fn shell(&self, content: Vec<Value>, reason: Value, sequence: Value, tally: Tally) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage(tally),
        })
    }

    fn stop(&self) -> (Value, Value) {
        let Some(finish) = &self.finish else { return (Value::Null, Value::Null) };
        match finish.reason {
            "tool_calls" => ("tool_use".into(), Value::Null),
            "length" => ("max_tokens".into(), Value::Null),
            "stop" if finish.stop.is_string() => ("stop_sequence".into(), finish.stop.clone()),
            _ => ("end_turn".into(), Value::Null),
        }
    }

    fn begin(&mut self, tally: Tally, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let message = self.shell(Vec::new(), Value::Null, Value::Null, tally);
            event(out, "message_start", json!({ "message": message }));
        }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, tally: Tally, out: &mut String) {
        self.begin(tally, out);
        for happened in self.take(delta) {
            match happened {
                BlockEvent::Open(index) => {
                    let block = empty(&self.blocks.all[index]);
                    event(out, "content_block_start", json!({ "index": index, "content_block": block }));
                }
                BlockEvent::Delta(index, text) => {
                    let delta = match self.blocks.all[index] {
                        Block::Reasoning(_) => json!({ "type": "thinking_delta", "thinking": text }),
                        Block::Text(_) => json!({ "type": "text_delta", "text": text }),
                        Block::Call { .. } => json!({ "type": "input_json_delta", "partial_json": text }),
                    };
                    event(out, "content_block_delta", json!({ "index": index, "delta": delta }));
                }
                BlockEvent::Close(index) => event(out, "content_block_stop", json!({ "index": index })),
            }
        }
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        self.begin(tally, out);
        let (reason, sequence) = self.stop();
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        event(out, "message_delta", json!({ "delta": delta, "usage": usage(tally) }));
        event(out, "message_stop", json!({}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        event(out, "error", error_body(error));
    }
}

fn usage(tally: Tally) -> Value {
    json!({
        "input_tokens": tally.prompt_tokens - tally.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tally.cached_tokens,
        "output_tokens": tally.output_tokens,
    })
}

fn whole(block: &Block) -> Value {
    match block {
        Block::Reasoning(text) => json!({ "type": "thinking", "thinking": text, "signature": "" }),
        Block::Text(text) => json!({ "type": "text", "text": text }),
        Block::Call { id, name, arguments } => {
            // Arguments that were cut off are no JSON: they are left out, and the reason to stop says so.
            let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
            json!({ "type": "tool_use", "id": id, "name": name, "input": input })
        }
    }
}

fn empty(block: &Block) -> Value {
    match block {
        Block::Reasoning(_) => json!({ "type": "thinking", "thinking": "", "signature": "" }),
        Block::Text(_) => json!({ "type": "text", "text": "" }),
        Block::Call { id, name, .. } => json!({ "type": "tool_use", "id": id, "name": name, "input": {} }),
    }
}

/// An event whose data begins with its own name.
fn event(out: &mut String, name: &str, mut data: Value) {
    if data.get("type").is_none() {
        let mut fields = Map::new();
        fields.insert("type".into(), name.into());
        fields.extend(data.as_object_mut().map(std::mem::take).unwrap_or_default());
        data = Value::Object(fields);
    }
    out.push_str("event: ");
    out.push_str(name);
    out.push('\n');
    sse::data(out, &data);
}
