//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, for text and tools, over the chat of this server.

use super::app::{App, Caller, new_id};
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat;
use super::error::{ApiError, ApiResult};
use super::parse::{self, JsonBody};
use super::prepare::is_empty_list;
use super::reducer::{Delta, Finish, Tally};
use super::responses::response_format;
use super::sse::{self, Encode};
use super::wire::StopCause;
use super::wire::messages::{
    Message, MessageCount, MessageEnd, MessagesBlock, MessagesDelta, MessagesError, MessagesEvent, MessagesFault,
    MessagesFields, MessagesLimit, MessagesTool, MessagesToolChoice, MessagesUsage, ThinkingField, ThinkingKind,
};
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Map, Value, json};

/// Fields that are known and not supported, with the values that mean nothing.
const UNSUPPORTED: [(&str, fn(&Value) -> bool); 2] = [("mcp_servers", is_empty_list), ("container", |_| false)];

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    parse::refuse(&value, &UNSUPPORTED)?;
    let fields: MessagesFields = parse::fields(&value)?;
    let limit: MessagesLimit = parse::fields(&value)?;
    let prepared = chat::prepare_off_thread(&app, &caller, chat_body(&fields, Some(limit))?).await?;
    let id = new_id("msg_");
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
    let mut writer =
        Writer { id, model: prepared.model.name.clone(), blocks: Blocks::default(), finish: None, has_begun: false };
    if fields.stream == Some(true) {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    let tally = reducer.drain(generation, "messages", |delta| drop(writer.take(delta))).await?;
    Ok(Json(writer.message(tally)).into_response())
}

pub async fn count_tokens(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<MessageCount>> {
    let fields: MessagesFields = parse::fields(&value)?;
    let prepared = chat::prepare_off_thread(&app, &caller, chat_body(&fields, None)?).await?;
    Ok(Json(MessageCount { input_tokens: prepared.request.prompt.len() }))
}

/// An error in Anthropic's shape.
pub fn error_body(error: &ApiError) -> MessagesError {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => "api_error",
        _ => "invalid_request_error",
    };
    MessagesError { kind: "error", error: MessagesFault { kind, message: error.body.message.clone() } }
}

/// The same request as a chat.
fn chat_body(fields: &MessagesFields, limit: Option<MessagesLimit>) -> ApiResult<Value> {
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
        ("max_tokens", json!(limit.map(|limit| limit.max_tokens))),
        ("temperature", json!(fields.temperature)),
        ("top_p", json!(fields.top_p)),
        ("top_k", json!(fields.top_k)),
        ("stop", json!(fields.stop_sequences)),
        ("chat_template_kwargs", thinking(fields.thinking.as_ref())),
    ];
    fields_of_chat.into_iter().for_each(|(name, value)| body[name] = value);
    if let Some(format) = fields.output_config.as_ref().and_then(|config| config.format.as_ref()) {
        body["response_format"] = response_format(format);
    }
    if let Some(tools) = &fields.tools {
        body["tools"] = tools.iter().map(tool).collect::<ApiResult<Vec<Value>>>()?.into();
    }
    if let Some(choice) = &fields.tool_choice {
        let (choice, is_serial) = tool_choice(choice);
        body["tool_choice"] = choice;
        body["parallel_tool_calls"] = (is_serial != Some(true)).into();
    }
    Ok(body)
}

fn thinking(field: Option<&ThinkingField>) -> Value {
    field.map_or(Value::Null, |field| json!({ "enable_thinking": field.kind != ThinkingKind::Disabled }))
}

fn tool(tool: &MessagesTool) -> ApiResult<Value> {
    if let Some(kind) = tool.kind.as_deref().filter(|kind| *kind != "custom") {
        // Anthropic's own tools have names with dates.
        let is_known = kind.rsplit_once('_').is_some_and(|(_, date)| date.len() == 8 && date.parse::<u32>().is_ok());
        return Err(ApiError::unsupported_kind("tools", "tools", kind, is_known));
    }
    let function = json!({ "name": tool.name, "description": tool.description, "parameters": tool.input_schema });
    Ok(json!({ "type": "function", "function": function }))
}

/// The choice as chats have it, and whether calls must come one at a time.
fn tool_choice(choice: &MessagesToolChoice) -> (Value, Option<bool>) {
    match choice {
        MessagesToolChoice::Auto { disable_parallel_tool_use } => ("auto".into(), *disable_parallel_tool_use),
        MessagesToolChoice::Any { disable_parallel_tool_use } => ("required".into(), *disable_parallel_tool_use),
        MessagesToolChoice::None {} => ("none".into(), None),
        MessagesToolChoice::Tool { name, disable_parallel_tool_use } => {
            (json!({ "type": "function", "function": { "name": name } }), *disable_parallel_tool_use)
        }
    }
}

/// One message may hold what chats have as several: results of tools come before the text beside them.
fn push_message(at: &str, message: &Value, messages: &mut Vec<Value>) -> ApiResult<()> {
    let role = message["role"].as_str().unwrap_or_default();
    if !matches!(role, "user" | "assistant" | "system") {
        return Err(ApiError::invalid(format!("{at}.role"), format!("{at}.role must be user or assistant")));
    }
    if message["content"].is_null() {
        let at = format!("{at}.content");
        return Err(ApiError::invalid(&at, format!("{at} is missing")));
    }
    let Some(blocks) = message["content"].as_array() else {
        messages.push(json!({ "role": role, "content": message["content"] }));
        return Ok(());
    };
    let (mut content, mut calls) = (Vec::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        let text = |field| parse::text_of(block, &at, field);
        match text("type")? {
            "tool_result" => messages.push(json!({
                "role": "tool", "tool_call_id": text("tool_use_id")?, "content": block["content"],
            })),
            "tool_use" if block["input"].is_object() => calls.push(json!({
                "id": text("id")?, "type": "function",
                "function": { "name": text("name")?, "arguments": block["input"].to_string() },
            })),
            "tool_use" => return Err(ApiError::invalid(&at, format!("{at}.input must be an object"))),
            // Templates leave the thoughts of earlier turns out.
            "thinking" => _ = text("thinking")?,
            "redacted_thinking" => _ = text("data")?,
            "text" => content.push(json!({ "type": "text", "text": text("text")? })),
            kind => {
                return Err(ApiError::media(&at, format!("{at}: blocks of type `{kind}` are not supported")));
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
    fn message(&self, tally: Tally) -> Message {
        self.shell(self.blocks.all.iter().map(whole).collect(), self.stop(), tally)
    }

    fn shell(&self, content: Vec<MessagesBlock>, end: MessageEnd, tally: Tally) -> Message {
        let (id, model) = (self.id.clone(), self.model.clone());
        Message { id, kind: "message", role: "assistant", model, content, end, usage: usage(tally) }
    }

    fn stop(&self) -> MessageEnd {
        let Some(finish) = &self.finish else { return MessageEnd::default() };
        let (reason, stop_sequence) = match (finish.reason, &finish.stop) {
            ("tool_calls", _) => ("tool_use", None),
            ("length", _) => ("max_tokens", None),
            ("stop", Some(StopCause::Text(stop))) => ("stop_sequence", Some(stop.clone())),
            _ => ("end_turn", None),
        };
        MessageEnd { stop_reason: Some(reason), stop_sequence }
    }

    fn begin(&mut self, tally: Tally, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let message = self.shell(Vec::new(), MessageEnd::default(), tally);
            sse::named(out, &MessagesEvent::MessageStart { message });
        }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, tally: Tally, out: &mut String) {
        self.begin(tally, out);
        for happened in self.take(delta) {
            let event = match happened {
                BlockEvent::Open(index) => {
                    MessagesEvent::ContentBlockStart { index, content_block: empty(&self.blocks.all[index]) }
                }
                BlockEvent::Delta(index, text) => {
                    let delta = match self.blocks.all[index] {
                        Block::Reasoning(_) => MessagesDelta::Thinking { thinking: text },
                        Block::Text(_) => MessagesDelta::Text { text },
                        Block::Call { .. } => MessagesDelta::Input { partial_json: text },
                    };
                    MessagesEvent::ContentBlockDelta { index, delta }
                }
                BlockEvent::Close(index) => MessagesEvent::ContentBlockStop { index },
            };
            sse::named(out, &event);
        }
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        self.begin(tally, out);
        sse::named(out, &MessagesEvent::MessageDelta { delta: self.stop(), usage: usage(tally) });
        sse::named(out, &MessagesEvent::MessageStop {});
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        sse::named(out, &error_body(error));
    }
}

fn usage(tally: Tally) -> MessagesUsage {
    MessagesUsage {
        input_tokens: tally.prompt_tokens - tally.cached_tokens,
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: tally.cached_tokens,
        output_tokens: tally.output_tokens,
    }
}

fn whole(block: &Block) -> MessagesBlock {
    match block.clone() {
        Block::Reasoning(thinking) => MessagesBlock::Thinking { thinking, signature: "" },
        Block::Text(text) => MessagesBlock::Text { text },
        Block::Call { id, name, arguments } => {
            // Arguments that were cut off are no JSON: they are left out, and the reason to stop says so.
            let input = serde_json::from_str(&arguments).unwrap_or_else(|_| json!({}));
            MessagesBlock::ToolUse { id, name, input }
        }
    }
}

fn empty(block: &Block) -> MessagesBlock {
    match block.clone() {
        Block::Reasoning(_) => MessagesBlock::Thinking { thinking: String::new(), signature: "" },
        Block::Text(_) => MessagesBlock::Text { text: String::new() },
        Block::Call { id, name, .. } => MessagesBlock::ToolUse { id, name, input: json!({}) },
    }
}
