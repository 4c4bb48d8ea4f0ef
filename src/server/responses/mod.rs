//! `POST /v1/responses`, `GET` and `DELETE /v1/responses/{id}`: the text and function-call subset of OpenAI's newer API, over
//! the chat of this server.
//!
//! Guarantees: in a stream `sequence_number` counts every event, and ids and indices are those of the final response.
//! The last responses are kept in memory, to be read again and gone on from.

mod request;
mod store;

pub use request::ResponsesFields;
pub use store::ResponseStore;

use super::app::{App, Caller, new_id, unix_seconds};
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat;
use super::error::{ApiError, ApiResult};
use super::parse;
use super::reducer::{Delta, Finish, Tally};
use super::sse::{self, Encode};
use axum::body::Body;
use axum::extract::{Extension, Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Value, json};

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
    parse::refuse(&value, &request::UNSUPPORTED)?;
    let fields: ResponsesFields = parse::fields(&value)?;
    let before = match &fields.previous_response_id {
        Some(id) => app.responses.conversation(id).ok_or_else(|| unknown(id).with_param("previous_response_id"))?,
        None => Vec::new(),
    };
    let (body, messages) = request::chat_body(&fields, &value, before)?;
    let prepared = chat::prepare_off_thread(&app, &caller, body).await?;
    let id = new_id("resp_");
    let (mut generation, mut reducer) = prepared.start(&app, &caller, &id)?;
    let kept = (fields.store != Some(false)).then(|| (app.clone(), messages));
    let mut writer = Writer {
        head: request::head(&fields, &value, &id, &prepared.name, unix_seconds()),
        id,
        item_ids: Vec::new(),
        blocks: Blocks::default(),
        finish: None,
        has_begun: false,
        sequence: 0,
        kept,
    };
    if fields.stream == Some(true) {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    while let Some((run, event)) = generation.recv().await {
        for delta in reducer.push(run, event).map_err(|e| ApiError::of_run(&e, "input"))? {
            writer.take(delta);
        }
    }
    let response = writer.response(reducer.tally());
    writer.keep(&response);
    Ok(Json(response).into_response())
}

pub async fn show(State(app): State<App>, Path(id): Path<String>) -> ApiResult<Json<Value>> {
    app.responses.get(&id).map(Json).ok_or_else(|| unknown(&id))
}

pub async fn delete(State(app): State<App>, Path(id): Path<String>) -> ApiResult<Json<Value>> {
    match app.responses.remove(&id) {
        true => Ok(Json(json!({ "id": id, "object": "response", "deleted": true }))),
        false => Err(unknown(&id)),
    }
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("there is no response `{id}`"))
}

/// Makes events of deltas, and one response of all.
struct Writer {
    /// The fields that do not depend on the answer.
    head: Value,
    id: String,
    /// Of each block.
    item_ids: Vec<String>,
    blocks: Blocks,
    finish: Option<Finish>,
    has_begun: bool,
    sequence: u64,
    /// Where the response is kept, with the messages that led to it.
    kept: Option<(App, Vec<Value>)>,
}

impl Writer {
    fn take(&mut self, delta: Delta) -> Vec<BlockEvent> {
        let mut events = Vec::new();
        delta.parts.into_iter().for_each(|part| self.blocks.take(part, &mut events));
        if delta.finish.is_some() {
            self.blocks.close(&mut events);
            self.finish = delta.finish;
        }
        for block in &self.blocks.all[self.item_ids.len()..] {
            self.item_ids.push(new_id(match block {
                Block::Reasoning(_) => "rs_",
                Block::Text(_) => "msg_",
                Block::Call { .. } => "fc_",
            }));
        }
        events
    }

    fn is_incomplete(&self) -> bool {
        self.finish.as_ref().is_some_and(|finish| finish.reason == "length")
    }

    fn response(&self, tally: Tally) -> Value {
        let mut response = self.head.clone();
        let status = match &self.finish {
            None => "in_progress",
            Some(finish) if finish.reason == "abort" => "cancelled",
            Some(_) if self.is_incomplete() => "incomplete",
            Some(_) => "completed",
        };
        response["status"] = status.into();
        if self.is_incomplete() {
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        if self.finish.is_some() {
            let last = self.blocks.all.len().saturating_sub(1);
            let status = |i| if i == last && self.is_incomplete() { "incomplete" } else { "completed" };
            response["output"] = (0..self.blocks.all.len()).map(|i| self.item(i, status(i))).collect();
            response["usage"] = json!({
                "input_tokens": tally.prompt_tokens,
                "input_tokens_details": { "cached_tokens": tally.cached_tokens },
                "output_tokens": tally.output_tokens,
                "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": tally.prompt_tokens + tally.output_tokens,
            });
        }
        response
    }

    /// An item of the output; one that is in progress is empty.
    fn item(&self, i: usize, status: &str) -> Value {
        let id = &self.item_ids[i];
        let is_empty = status == "in_progress";
        match &self.blocks.all[i] {
            Block::Text(text) => {
                let content = if is_empty { json!([]) } else { json!([text_part(text)]) };
                json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
            }
            Block::Reasoning(text) => {
                let content = if is_empty { json!([]) } else { json!([reasoning_part(text)]) };
                json!({ "id": id, "type": "reasoning", "status": status, "summary": [], "content": content })
            }
            Block::Call { id: call_id, name, arguments } => {
                let arguments = if is_empty { "" } else { arguments };
                json!({
                    "id": id, "type": "function_call", "status": status,
                    "call_id": call_id, "name": name, "arguments": arguments,
                })
            }
        }
    }

    fn event(&mut self, out: &mut String, name: &str, fields: Value) {
        let mut event = json!({ "type": name, "sequence_number": self.sequence });
        self.sequence += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        out.push_str(&format!("event: {name}\n"));
        sse::data(out, &event);
    }

    fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let mut response = self.head.clone();
            response["status"] = "in_progress".into();
            self.event(out, "response.created", json!({ "response": response }));
            self.event(out, "response.in_progress", json!({ "response": response }));
        }
    }

    fn open(&mut self, i: usize, out: &mut String) {
        let item = self.item(i, "in_progress");
        self.event(out, "response.output_item.added", json!({ "output_index": i, "item": item }));
        let part = match self.blocks.all[i] {
            Block::Text(_) => text_part(""),
            Block::Reasoning(_) => reasoning_part(""),
            Block::Call { .. } => return,
        };
        let fields = json!({ "item_id": self.item_ids[i], "output_index": i, "content_index": 0, "part": part });
        self.event(out, "response.content_part.added", fields);
    }

    fn grow(&mut self, i: usize, text: &str, out: &mut String) {
        let id = self.item_ids[i].clone();
        let in_content = json!({ "item_id": id, "output_index": i, "content_index": 0, "delta": text });
        match self.blocks.all[i] {
            Block::Text(_) => {
                let mut fields = in_content;
                fields["logprobs"] = json!([]);
                self.event(out, "response.output_text.delta", fields);
            }
            Block::Reasoning(_) => self.event(out, "response.reasoning_text.delta", in_content),
            Block::Call { .. } => {
                let fields = json!({ "item_id": id, "output_index": i, "delta": text });
                self.event(out, "response.function_call_arguments.delta", fields);
            }
        }
    }

    fn close(&mut self, i: usize, out: &mut String) {
        let id = self.item_ids[i].clone();
        let place = json!({ "item_id": id, "output_index": i, "content_index": 0 });
        let with = |name: &str, value: Value| {
            let mut fields = place.clone();
            fields[name] = value;
            fields
        };
        match self.blocks.all[i].clone() {
            Block::Text(text) => {
                let mut fields = with("text", text.as_str().into());
                fields["logprobs"] = json!([]);
                self.event(out, "response.output_text.done", fields);
                self.event(out, "response.content_part.done", with("part", text_part(&text)));
            }
            Block::Reasoning(text) => {
                self.event(out, "response.reasoning_text.done", with("text", text.as_str().into()));
                self.event(out, "response.content_part.done", with("part", reasoning_part(&text)));
            }
            Block::Call { name, arguments, .. } => {
                let fields = json!({ "item_id": id, "output_index": i, "name": name, "arguments": arguments });
                self.event(out, "response.function_call_arguments.done", fields);
            }
        }
        let is_last = i + 1 == self.blocks.all.len() && self.is_incomplete();
        let item = self.item(i, if is_last { "incomplete" } else { "completed" });
        self.event(out, "response.output_item.done", json!({ "output_index": i, "item": item }));
    }

    /// Keeps a finished response, unless the client does not want that.
    fn keep(&mut self, response: &Value) {
        if let Some((app, mut messages)) = self.kept.take() {
            messages.extend(request::messages_of_output(&self.blocks.all));
            app.responses.insert(self.id.clone(), response.clone(), messages);
        }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, _: Tally, out: &mut String) {
        self.begin(out);
        for happened in self.take(delta) {
            match happened {
                BlockEvent::Open(i) => self.open(i, out),
                BlockEvent::Delta(i, text) => self.grow(i, &text, out),
                BlockEvent::Close(i) => self.close(i, out),
            }
        }
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        self.begin(out);
        let response = self.response(tally);
        self.keep(&response);
        let name = if self.is_incomplete() { "response.incomplete" } else { "response.completed" };
        self.event(out, name, json!({ "response": response }));
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        self.begin(out);
        let mut response = self.head.clone();
        response["status"] = "failed".into();
        response["error"] = json!({ "code": "server_error", "message": error.body.message });
        self.event(out, "response.failed", json!({ "response": response }));
    }
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn reasoning_part(text: &str) -> Value {
    json!({ "type": "reasoning_text", "text": text })
}
