//! `POST /v1/responses`, `GET` and `DELETE /v1/responses/{id}`: the text and function-call subset of OpenAI's newer API, over
//! the chat of this server.
//!
//! Guarantees: in a stream `sequence_number` counts every event, and ids and indices are those of the final response.
//! The last responses are kept in memory, to be read again and gone on from.

mod request;
mod store;

pub use request::response_format;
pub use store::ResponseStore;

use super::app::{App, Caller, new_id, unix_seconds};
use super::blocks::{Block, BlockEvent, Blocks};
use super::chat;
use super::error::{ApiError, ApiResult};
use super::parse::{self, JsonBody, PathFields};
use super::reducer::{Delta, Finish, Tally};
use super::sse::{self, Encode};
use super::wire::responses::{
    DeletedResponse, IncompleteDetails, InputTokensDetails, NumberedEvent, OutputItem, OutputPart, OutputTokensDetails,
    Place, ResponseObject, ResponsesEvent, ResponsesFault, ResponsesFields, ResponsesUsage,
};
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Json, Response};
use serde_json::Value;

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    parse::refuse(&value, &request::UNSUPPORTED)?;
    request::check_tools(&value)?;
    let fields: ResponsesFields = parse::fields(&value)?;
    let before = match &fields.previous_response_id {
        Some(id) => app
            .responses
            .conversation(id, app.owner(&caller))
            .ok_or_else(|| unknown(id).with_param("previous_response_id"))?,
        None => Vec::new(),
    };
    let (body, messages) = request::chat_body(&fields, &value, before)?;
    let prepared = chat::prepare_off_thread(&app, &caller, body).await?;
    let id = new_id("resp_");
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
    let streams = fields.stream == Some(true);
    let kept = (fields.store != Some(false)).then(|| (app.clone(), app.owner(&caller), messages));
    let mut writer = Writer {
        head: request::head(fields, &id, &prepared.model.name, unix_seconds()),
        id,
        item_ids: Vec::new(),
        blocks: Blocks::default(),
        finish: None,
        has_begun: false,
        sequence: 0,
        kept,
    };
    if streams {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    let tally = reducer.drain(generation, "input", |delta| drop(writer.take(delta))).await?;
    let response = writer.response(tally);
    writer.keep(&response);
    Ok(Json(response).into_response())
}

pub async fn show(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(id): PathFields<String>,
) -> ApiResult<Json<Value>> {
    app.responses.get(&id, app.owner(&caller)).map(Json).ok_or_else(|| unknown(&id))
}

pub async fn delete(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(id): PathFields<String>,
) -> ApiResult<Json<DeletedResponse>> {
    match app.responses.remove(&id, app.owner(&caller)) {
        true => Ok(Json(DeletedResponse { id, object: "response", deleted: true })),
        false => Err(unknown(&id)),
    }
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("there is no response `{id}`"))
}

/// Makes events of deltas, and one response of all.
struct Writer {
    /// The fields that do not depend on the answer.
    head: ResponseObject,
    id: String,
    /// Of each block.
    item_ids: Vec<String>,
    blocks: Blocks,
    finish: Option<Finish>,
    has_begun: bool,
    sequence: u64,
    /// Where the response is kept and for whom, with the messages that led to it.
    kept: Option<(App, u64, Vec<Value>)>,
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

    fn response(&self, tally: Tally) -> ResponseObject {
        let mut response = self.head.clone();
        response.status = match &self.finish {
            None => "in_progress",
            Some(finish) if finish.reason == "abort" => "cancelled",
            Some(_) if self.is_incomplete() => "incomplete",
            Some(_) => "completed",
        };
        if self.is_incomplete() {
            response.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
        }
        if self.finish.is_some() {
            let last = self.blocks.all.len().saturating_sub(1);
            let status = |i| if i == last && self.is_incomplete() { "incomplete" } else { "completed" };
            response.output = (0..self.blocks.all.len()).map(|i| self.item(i, status(i))).collect();
            response.usage = Some(ResponsesUsage {
                input_tokens: tally.prompt_tokens,
                input_tokens_details: InputTokensDetails { cached_tokens: tally.cached_tokens },
                output_tokens: tally.output_tokens,
                output_tokens_details: OutputTokensDetails { reasoning_tokens: tally.reasoning_tokens },
                total_tokens: tally.prompt_tokens + tally.output_tokens,
            });
        }
        response
    }

    /// An item of the output; one that is in progress is empty.
    fn item(&self, i: usize, status: &'static str) -> OutputItem {
        let id = self.item_ids[i].clone();
        let is_empty = status == "in_progress";
        let content = |part: OutputPart| if is_empty { Vec::new() } else { vec![part] };
        match &self.blocks.all[i] {
            Block::Text(text) => {
                OutputItem::Message { id, status, role: "assistant", content: content(text_part(text)) }
            }
            Block::Reasoning(text) => {
                OutputItem::Reasoning { id, status, summary: Vec::new(), content: content(reasoning_part(text)) }
            }
            Block::Call { id: call_id, name, arguments } => {
                let arguments = if is_empty { String::new() } else { arguments.clone() };
                OutputItem::FunctionCall { id, status, call_id: call_id.clone(), name: name.clone(), arguments }
            }
        }
    }

    fn event(&mut self, out: &mut String, event: ResponsesEvent) {
        sse::named(out, &NumberedEvent { event, sequence_number: self.sequence });
        self.sequence += 1;
    }

    fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.event(out, ResponsesEvent::Created { response: self.head.clone() });
            self.event(out, ResponsesEvent::InProgress { response: self.head.clone() });
        }
    }

    fn place(&self, i: usize) -> Place {
        Place { item_id: self.item_ids[i].clone(), output_index: i, content_index: 0 }
    }

    fn open(&mut self, i: usize, out: &mut String) {
        let item = self.item(i, "in_progress");
        self.event(out, ResponsesEvent::ItemAdded { output_index: i, item });
        let part = match self.blocks.all[i] {
            Block::Text(_) => text_part(""),
            Block::Reasoning(_) => reasoning_part(""),
            Block::Call { .. } => return,
        };
        self.event(out, ResponsesEvent::PartAdded { at: self.place(i), part });
    }

    fn grow(&mut self, i: usize, delta: String, out: &mut String) {
        let at = self.place(i);
        let event = match self.blocks.all[i] {
            Block::Text(_) => ResponsesEvent::TextDelta { at, delta, logprobs: Vec::new() },
            Block::Reasoning(_) => ResponsesEvent::ReasoningDelta { at, delta },
            Block::Call { .. } => ResponsesEvent::ArgumentsDelta { item_id: at.item_id, output_index: i, delta },
        };
        self.event(out, event);
    }

    fn close(&mut self, i: usize, out: &mut String) {
        let at = self.place(i);
        match self.blocks.all[i].clone() {
            Block::Text(text) => {
                let part = text_part(&text);
                self.event(out, ResponsesEvent::TextDone { at: at.clone(), text, logprobs: Vec::new() });
                self.event(out, ResponsesEvent::PartDone { at, part });
            }
            Block::Reasoning(text) => {
                let part = reasoning_part(&text);
                self.event(out, ResponsesEvent::ReasoningDone { at: at.clone(), text });
                self.event(out, ResponsesEvent::PartDone { at, part });
            }
            Block::Call { name, arguments, .. } => {
                let (item_id, output_index) = (at.item_id, i);
                self.event(out, ResponsesEvent::ArgumentsDone { item_id, output_index, name, arguments });
            }
        }
        let is_last = i + 1 == self.blocks.all.len() && self.is_incomplete();
        let item = self.item(i, if is_last { "incomplete" } else { "completed" });
        self.event(out, ResponsesEvent::ItemDone { output_index: i, item });
    }

    /// Keeps a finished response, unless the client does not want that.
    fn keep(&mut self, response: &ResponseObject) {
        if let Some((app, owner, mut messages)) = self.kept.take() {
            messages.extend(request::messages_of_output(&self.blocks.all));
            let response = serde_json::to_value(response).expect("a response holds strings, numbers and lists");
            app.responses.insert((self.id.clone(), owner), response, messages);
        }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, _: Tally, out: &mut String) {
        self.begin(out);
        for happened in self.take(delta) {
            match happened {
                BlockEvent::Open(i) => self.open(i, out),
                BlockEvent::Delta(i, text) => self.grow(i, text, out),
                BlockEvent::Close(i) => self.close(i, out),
            }
        }
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        self.begin(out);
        let response = self.response(tally);
        self.keep(&response);
        let event = match self.is_incomplete() {
            true => ResponsesEvent::Incomplete { response },
            false => ResponsesEvent::Completed { response },
        };
        self.event(out, event);
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        self.begin(out);
        let mut response = self.head.clone();
        response.status = "failed";
        response.error = Some(ResponsesFault { code: "server_error", message: error.body.message.clone() });
        self.event(out, ResponsesEvent::Failed { response });
    }
}

fn text_part(text: &str) -> OutputPart {
    OutputPart::OutputText { text: text.to_owned(), annotations: Vec::new(), logprobs: Vec::new() }
}

fn reasoning_part(text: &str) -> OutputPart {
    OutputPart::ReasoningText { text: text.to_owned() }
}
