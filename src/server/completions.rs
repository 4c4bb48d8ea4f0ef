//! `POST /v1/completions`.

use super::app::{App, Caller, unix_seconds};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::generation::Generation;
use super::logprobs;
use super::parse::{self, JsonBody};
use super::prepare::{self, Limits, UNSUPPORTED};
use super::prompt;
use super::reducer::{Delta, Part, Reducer, Tally};
use super::sse::{self, Encode};
use super::structured;
use super::wire::completion::{
    CompletionChoice, CompletionFields, CompletionLogprobs, CompletionResponse, PromptField,
};
use super::wire::{RenderedPrompt, SamplingFields, StreamOptions};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{GenerateRequest, OutputRules, TokenLogprobs};
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Json, Response};
use serde_json::Value;
use std::sync::Arc;

/// As OpenAI's API has it.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Everything about a request but its runs.
pub(super) struct Prepared {
    model: Arc<ModelUse>,
    fields: SamplingFields,
    own: CompletionFields,
    requests: Vec<GenerateRequest>,
    rules: OutputRules,
    /// The prompts' texts, where they are echoed.
    prefixes: Vec<String>,
}

pub async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    let id = prepare::answer_id("cmpl-", &prepared.fields)?;
    let stream = prepared.fields.stream == Some(true);
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
    let n = prepared.num_choices();
    let writer = Writer::new(id, prepared, n);
    if stream {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    collect(generation, reducer, writer).await.map(IntoResponse::into_response)
}

/// `POST /v1/completions/render`: the tokens that a request would run on.
pub async fn render(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<Vec<RenderedPrompt>>> {
    let prepared = prepare_off_thread(&app, &caller, value).await?;
    Ok(Json(prepared.requests.into_iter().map(|request| RenderedPrompt { token_ids: request.prompt }).collect()))
}

impl Prepared {
    /// Queues the request.
    pub fn start(&self, app: &App, caller: &Caller, id: &str) -> ApiResult<(Generation, Reducer)> {
        let requests = self.requests.iter().map(|request| (request.clone(), structured::fork(&self.rules)));
        let generation = Generation::submit(app, &self.model, caller, id, requests.collect(), "prompt")?;
        let shows_stop = self.fields.include_stop_str_in_output == Some(true);
        Ok((generation, Reducer::new(self.num_choices(), self.prefixes.clone(), shows_stop)))
    }

    fn num_choices(&self) -> usize {
        self.requests.first().map_or(1, |request| request.decoding.num_choices() as usize)
    }
}

/// The text among the parts; plain completions are not parsed for others.
pub(super) fn text_of(parts: Vec<Part>) -> String {
    let text = |part| match part {
        Part::Content(text) => Some(text),
        Part::Reasoning(_) | Part::ToolCall { .. } | Part::Arguments { .. } => None,
    };
    parts.into_iter().filter_map(text).collect()
}

/// Reads the fields of a completion and encodes it on a thread that may take its time.
pub(super) async fn prepare_off_thread(app: &App, caller: &Caller, value: Value) -> ApiResult<Prepared> {
    let model = app.open(value["model"].as_str()).await?;
    let (app, caller) = (app.clone(), caller.clone());
    let work = tokio::task::spawn_blocking(move || prepare(&app, model, &caller, &value));
    work.await.map_err(|_| ApiError::internal())?
}

fn prepare(app: &App, model: Arc<ModelUse>, caller: &Caller, value: &Value) -> ApiResult<Prepared> {
    let fields: SamplingFields = parse::fields(value)?;
    let own: CompletionFields = parse::fields(value)?;
    parse::refuse(value, &UNSUPPORTED)?;
    parse::refuse(value, &[("suffix", |suffix| suffix == "")])?;
    let echo = fields.echo == Some(true);
    let add_special = fields.add_special_tokens.unwrap_or(true);
    let (prompts, prefixes) = prompts(&own.prompt, &model, (add_special, "prompt"), echo)?;
    if prompts.is_empty() || prompts.len() > app.options.max_prompts {
        let message = format!("prompt must hold 1 to {} prompts, not {}", app.options.max_prompts, prompts.len());
        return Err(ApiError::invalid("prompt", message));
    }
    let limits = Limits {
        max_tokens: own.max_tokens,
        default_max_tokens: Some(DEFAULT_MAX_TOKENS),
        logprobs: own.logprobs,
        logprobs_field: "logprobs",
    };
    let requests = prepare::requests(&fields, &limits, prompts, &model, caller)?;
    let mut rules = structured::rules(&model, value, None)?;
    rules.prompt_logprobs = prepare::prompt_logprobs(&fields)?;
    if let Some(asked) = own.logprobs.filter(|_| echo) {
        if fields.use_beam_search == Some(true) {
            return Err(ApiError::invalid("echo", "echo with logprobs and use_beam_search exclude each other"));
        }
        rules.prompt_logprobs = rules.prompt_logprobs.max(Some(asked as u8));
    }
    Ok(Prepared { model, fields, own, requests, rules, prefixes })
}

/// The tokens of each prompt, and its text where it is echoed; `name` is that of the field.
pub(super) fn prompts(
    field: &PromptField,
    model: &LoadedModel,
    (add_special, name): (bool, &'static str),
    echo: bool,
) -> ApiResult<(Vec<Vec<TokenId>>, Vec<String>)> {
    let texts: &[String] = match field {
        PromptField::Text(text) => std::slice::from_ref(text),
        PromptField::Texts(texts) => texts,
        PromptField::Tokens(tokens) => return Ok(of_tokens(std::slice::from_ref(tokens), model, echo)),
        PromptField::TokenLists(lists) => return Ok(of_tokens(lists, model, echo)),
    };
    let prompts: ApiResult<Vec<Vec<TokenId>>> =
        texts.iter().map(|text| prompt::encode(model, text, add_special, name)).collect();
    let prefix = |text: &String| if echo { text.clone() } else { String::new() };
    Ok((prompts?, texts.iter().map(prefix).collect()))
}

fn of_tokens(lists: &[Vec<TokenId>], model: &LoadedModel, echo: bool) -> (Vec<Vec<TokenId>>, Vec<String>) {
    let prefix = |tokens: &Vec<TokenId>| if echo { model.tokenizer.decode(tokens, true) } else { String::new() };
    (lists.to_vec(), lists.iter().map(prefix).collect())
}

/// Makes chunks of deltas, and one body of all chunks.
struct Writer {
    id: String,
    created: u64,
    model: Arc<LoadedModel>,
    name: String,
    options: StreamOptions,
    has_logprobs: bool,
    returns_ids: bool,
    prompts: Vec<Vec<TokenId>>,
    n: usize,
    /// Alternatives that an echoed prompt shows.
    echoes: Option<u32>,
    shows_prompt_logprobs: bool,
    /// Where the next token of each choice begins in its text, in characters.
    offsets: Vec<usize>,
}

impl Writer {
    fn new(id: String, prepared: Prepared, n: usize) -> Self {
        let echoes = prepared.own.logprobs.filter(|_| prepared.fields.echo == Some(true));
        // Tokens of an echoed prompt count themselves.
        let start = |prefix: &String| if echoes.is_some() { 0 } else { prefix.chars().count() };
        let starts = prepared.prefixes.iter().map(start);
        Writer {
            id,
            created: unix_seconds(),
            name: prepared.model.name.clone(),
            model: prepared.model.loaded.clone(),
            options: prepared.fields.stream_options.unwrap_or_default(),
            has_logprobs: prepared.own.logprobs.is_some(),
            returns_ids: prepared.fields.return_token_ids == Some(true),
            offsets: starts.flat_map(|start| std::iter::repeat_n(start, n)).collect(),
            prompts: prepared.requests.into_iter().map(|request| request.prompt).collect(),
            n,
            echoes,
            shows_prompt_logprobs: prepared.fields.prompt_logprobs.is_some(),
        }
    }

    fn choice(&mut self, delta: Delta) -> CompletionChoice {
        let text = text_of(delta.parts);
        let offset = &mut self.offsets[delta.choice];
        let (tokenizer, prompt) = (&self.model.tokenizer, &self.prompts[delta.choice / self.n]);
        let scores = delta.prompt_logprobs.as_deref();
        let mut shown = CompletionLogprobs::default();
        if let (Some(num_top), Some(rows)) = (self.echoes, scores) {
            let cut = |row: &TokenLogprobs| TokenLogprobs {
                top: row.top.iter().take(num_top as usize).copied().collect(),
                ..row.clone()
            };
            let rows: Vec<TokenLogprobs> = rows.iter().map(cut).collect();
            shown = logprobs::of_echo(tokenizer, prompt[0], &rows, offset);
        }
        shown.extend(logprobs::of_completion(tokenizer, &delta.logprobs, offset));
        let logprobs = self.has_logprobs.then_some(shown);
        let prompt_logprobs =
            scores.filter(|_| self.shows_prompt_logprobs).map(|rows| logprobs::of_prompt(tokenizer, rows));
        let shows_prompt = self.returns_ids && delta.is_first;
        CompletionChoice {
            index: delta.choice,
            text,
            logprobs,
            prompt_logprobs,
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.and_then(|finish| finish.stop),
            prompt_token_ids: shows_prompt.then(|| self.prompts[delta.choice / self.n].clone()),
            token_ids: self.returns_ids.then_some(delta.tokens),
        }
    }

    fn body(
        &self,
        choices: Vec<CompletionChoice>,
        usage: Option<Option<super::wire::UsageBody>>,
    ) -> CompletionResponse {
        let (id, model) = (self.id.clone(), self.name.clone());
        CompletionResponse { id, object: "text_completion", created: self.created, model, choices, usage }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, tally: Tally, out: &mut String) {
        let choice = self.choice(delta);
        let continuous = self.options.continuous_usage_stats == Some(true);
        let usage = (self.options.include_usage == Some(true)).then(|| continuous.then(|| tally.usage()));
        sse::data(out, &self.body(vec![choice], usage));
    }

    fn end(&mut self, tally: Tally, out: &mut String) {
        if self.options.include_usage == Some(true) {
            sse::data(out, &self.body(Vec::new(), Some(Some(tally.usage()))));
        }
        out.push_str("data: [DONE]\n\n");
    }
}

async fn collect(generation: Generation, reducer: Reducer, mut writer: Writer) -> ApiResult<Json<CompletionResponse>> {
    let mut choices: Vec<Option<CompletionChoice>> = vec![None; reducer.num_choices()];
    let take = |delta| {
        let piece = writer.choice(delta);
        match &mut choices[piece.index] {
            Some(choice) => append(choice, piece),
            none => *none = Some(piece),
        }
    };
    let tally = reducer.drain(generation, "prompt", take).await?;
    let choices = choices.into_iter().flatten().collect();
    Ok(Json(writer.body(choices, Some(Some(tally.usage())))))
}

fn append(choice: &mut CompletionChoice, piece: CompletionChoice) {
    choice.text.push_str(&piece.text);
    if let (Some(all), Some(more)) = (&mut choice.logprobs, piece.logprobs) {
        CompletionLogprobs::extend(all, more);
    }
    if let (Some(all), Some(more)) = (&mut choice.token_ids, piece.token_ids) {
        all.extend(more);
    }
    if piece.finish_reason.is_some() {
        (choice.finish_reason, choice.stop_reason) = (piece.finish_reason, piece.stop_reason);
    }
}
