//! `POST /v1/chat/completions`.

use super::answer::AnswerParser;
use super::app::{App, Caller, unix_seconds};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::generation::Generation;
use super::logprobs;
use super::parse::{self, JsonBody};
use super::prepare::{self, Limits, UNSUPPORTED, is_empty_list};
use super::prompt::{self, Rendered};
use super::reasoning::{self, ReasoningSplitter};
use super::reducer::{Delta, Part, Reducer, Tally};
use super::sse::{self, Encode};
use super::structured;
use super::tools::{self, Format, HarmonyParser, Tools};
use super::wire::chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatFields, ChatLogprobs, ChatResponse, ChunkChoice, ChunkDelta,
    FunctionCall, FunctionDelta, ToolCall, ToolCallDelta,
};
use super::wire::{PromptLogprobs, RenderedPrompt, SamplingFields, StreamOptions, UsageBody};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{GenerateRequest, OutputRules};
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields of chats that the engine cannot honour, with the values that mean nothing.
const UNSUPPORTED_IN_CHAT: [(&str, fn(&Value) -> bool); 11] = [
    ("functions", is_empty_list),
    ("function_call", |value| value == "none"),
    ("modalities", |value| *value == json!(["text"])),
    ("audio", |_| false),
    ("prediction", |_| false),
    ("web_search_options", |_| false),
    ("store", |value| *value == false),
    ("documents", is_empty_list),
    ("verbosity", |value| value == "medium"),
    ("media_io_kwargs", prepare::is_empty),
    ("thinking_token_budget", |_| false),
];

/// Everything about a request but its runs.
pub(super) struct Prepared {
    pub model: Arc<ModelUse>,
    fields: SamplingFields,
    own: ChatFields,
    pub request: GenerateRequest,
    rules: OutputRules,
    parser: Option<AnswerParser>,
    /// What the answer begins with: the message that it continues, where it is echoed.
    prefix: String,
}

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    let id = prepare::answer_id("chatcmpl-", &prepared.fields)?;
    let stream = prepared.fields.stream == Some(true);
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
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
    JsonBody(value): JsonBody,
) -> ApiResult<Json<RenderedPrompt>> {
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    Ok(Json(RenderedPrompt { token_ids: prepared.request.prompt }))
}

impl Prepared {
    /// Queues the request.
    pub fn start(&self, app: &App, caller: &Caller, id: &str) -> ApiResult<(Generation, Reducer)> {
        let n = self.request.decoding.num_choices() as usize;
        let request = (self.request.clone(), structured::fork(&self.rules));
        let generation = Generation::submit(app, &self.model, caller, id, vec![request], "messages")?;
        let shows_stop = self.fields.include_stop_str_in_output == Some(true);
        let reducer = Reducer::new(n, vec![self.prefix.clone()], shows_stop).with_parser(self.parser.clone());
        Ok((generation, reducer))
    }
}

/// Reads the fields of a chat, renders and encodes it on a thread that may take its time.
pub(super) async fn prepare_off_thread(app: &App, caller: &Caller, value: Value) -> ApiResult<Prepared> {
    let model = app.open(value["model"].as_str()).await?;
    let (app, caller) = (app.clone(), caller.clone());
    let work = tokio::task::spawn_blocking(move || prepare(&app, model, &caller, &value));
    work.await.map_err(|_| ApiError::internal())?
}

fn prepare(app: &App, model: Arc<ModelUse>, caller: &Caller, value: &Value) -> ApiResult<Prepared> {
    let fields: SamplingFields = parse::fields(value)?;
    let own: ChatFields = parse::fields(value)?;
    parse::refuse(value, &UNSUPPORTED)?;
    parse::refuse(value, &UNSUPPORTED_IN_CHAT)?;
    let logprobs = match (own.logprobs, own.top_logprobs) {
        (Some(true), top) => Some(top.unwrap_or(0)),
        (_, Some(top)) if top > 0 => {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
        _ => None,
    };
    let tools = Tools::of(value)?;
    let rendered = prompt::render_chat(&own, tools.as_ref(), &model)?;
    let prompt = prompt::encode(&model, &rendered.text, fields.add_special_tokens == Some(true), "messages")?;
    let limits = Limits {
        max_tokens: own.max_completion_tokens.or(own.max_tokens),
        default_max_tokens: None,
        logprobs,
        logprobs_field: "top_logprobs",
    };
    let request = prepare::requests(&fields, &limits, vec![prompt], &model, caller)?.swap_remove(0);
    let prefix = rendered.continued.clone().filter(|_| fields.echo == Some(true)).unwrap_or_default();
    let mut rules = structured::rules(&model, value, tools.as_ref().and_then(Tools::grammar))?;
    rules.prompt_logprobs = prepare::prompt_logprobs(&fields)?;
    let (parser, shows_special) = parser(app, &model, &rendered, tools.as_ref());
    rules.shows_special |= shows_special;
    Ok(Prepared { model, fields, own, request, rules, parser, prefix })
}

/// What reads the answer, and whether it must see special tokens. Plain text needs nothing.
fn parser(app: &App, model: &LoadedModel, rendered: &Rendered, tools: Option<&Tools>) -> (Option<AnswerParser>, bool) {
    let source = rendered.template.source();
    let format = tools::format_of(&app.options.tool_call_parser, source);
    let is_forced = tools.is_some_and(Tools::is_forced);
    if format == Format::Harmony && !is_forced {
        return (Some(AnswerParser::Harmony(HarmonyParser::default())), true);
    }
    let marks = reasoning::marks_of_template(source).filter(|_| app.options.splits_reasoning && !is_forced);
    let splitter = marks.map(|marks| ReasoningSplitter::new(marks, &rendered.text));
    let is_special = |mark: &str| model.tokenizer.token_id(mark).is_some_and(|id| model.tokenizer.is_special(id));
    let needs_special = marks.is_some_and(|(open, close)| is_special(open) || is_special(close))
        || tools.is_some_and(|_| !is_forced && format.tokens().iter().any(|mark| is_special(mark)));
    let tools = tools.map(|tools| Box::new(tools.parser(format)));
    if splitter.is_none() && tools.is_none() {
        return (None, false);
    }
    (Some(AnswerParser::Tags { reasoning: splitter, tools }), needs_special)
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
    /// To go out with the next chunk.
    prompt_logprobs: Option<PromptLogprobs>,
    /// The prompt's ids were sent.
    has_sent_prompt: bool,
}

impl Writer {
    fn new(id: String, prepared: Prepared) -> Self {
        let returns_ids = prepared.fields.return_token_ids == Some(true);
        Writer {
            id,
            created: unix_seconds(),
            name: prepared.model.name.clone(),
            model: prepared.model.loaded.clone(),
            options: prepared.fields.stream_options.unwrap_or_default(),
            has_logprobs: prepared.own.logprobs == Some(true),
            prompt: returns_ids.then_some(prepared.request.prompt),
            prompt_logprobs: None,
            has_sent_prompt: false,
        }
    }

    fn logprobs(&self, delta: &Delta) -> Option<ChatLogprobs> {
        self.has_logprobs.then(|| logprobs::of_chat(&self.model.tokenizer, &delta.logprobs))
    }

    fn scores(&self, delta: &Delta) -> Option<PromptLogprobs> {
        delta.prompt_logprobs.as_ref().map(|rows| logprobs::of_prompt(&self.model.tokenizer, rows))
    }

    fn chunk(&mut self, choices: Vec<ChunkChoice>, usage: Option<Option<UsageBody>>, out: &mut String) {
        let prompt_token_ids = if self.has_sent_prompt { None } else { self.prompt.clone() };
        self.has_sent_prompt = true;
        let prompt_logprobs = self.prompt_logprobs.take();
        let (id, model) = (self.id.as_str(), self.name.as_str());
        let object = "chat.completion.chunk";
        sse::data(
            out,
            &ChatChunk { id, object, created: self.created, model, choices, usage, prompt_logprobs, prompt_token_ids },
        );
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
        if index == 0 {
            self.prompt_logprobs = self.scores(&delta);
        }
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
        Part::Reasoning(text) => ChunkDelta { reasoning_content: Some(text), ..ChunkDelta::default() },
        Part::ToolCall { index, id, name } => {
            let function = FunctionDelta { name: Some(name), arguments: String::new() };
            let call = ToolCallDelta { index, id: Some(id), kind: Some("function"), function };
            ChunkDelta { tool_calls: vec![call], ..ChunkDelta::default() }
        }
        Part::Arguments { index, text } => {
            let function = FunctionDelta { name: None, arguments: text };
            let call = ToolCallDelta { index, id: None, kind: None, function };
            ChunkDelta { tool_calls: vec![call], ..ChunkDelta::default() }
        }
    }
}

async fn collect(generation: Generation, reducer: Reducer, writer: Writer) -> ApiResult<Json<ChatResponse>> {
    let empty = |index| ChatChoice {
        index,
        message: AssistantMessage { role: "assistant", ..AssistantMessage::default() },
        logprobs: writer.has_logprobs.then(ChatLogprobs::default),
        finish_reason: "stop",
        stop_reason: None,
        token_ids: writer.prompt.is_some().then(Vec::new),
    };
    let mut prompt_logprobs = None;
    let mut choices: Vec<ChatChoice> = (0..reducer.num_choices()).map(empty).collect();
    let take = |delta: Delta| {
        let logprobs = writer.logprobs(&delta);
        prompt_logprobs = prompt_logprobs.take().or_else(|| writer.scores(&delta));
        append(&mut choices[delta.choice], delta, logprobs);
    };
    let tally = reducer.drain(generation, "messages", take).await?;
    for choice in &mut choices {
        if choice.message.tool_calls.is_empty() {
            choice.message.content.get_or_insert_default();
        }
    }
    Ok(Json(ChatResponse {
        id: writer.id,
        object: "chat.completion",
        created: writer.created,
        model: writer.name,
        choices,
        usage: tally.usage(),
        prompt_logprobs,
        prompt_token_ids: writer.prompt,
    }))
}

fn append(choice: &mut ChatChoice, delta: Delta, logprobs: Option<ChatLogprobs>) {
    for part in delta.parts {
        match part {
            Part::Content(text) => choice.message.content.get_or_insert_default().push_str(&text),
            Part::Reasoning(text) => choice.message.reasoning_content.get_or_insert_default().push_str(&text),
            Part::ToolCall { id, name, .. } => {
                let function = FunctionCall { name, arguments: String::new() };
                choice.message.tool_calls.push(ToolCall { id, kind: "function", function });
            }
            Part::Arguments { index, text } => {
                if let Some(call) = choice.message.tool_calls.get_mut(index) {
                    call.function.arguments.push_str(&text);
                }
            }
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
