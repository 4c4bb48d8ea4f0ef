//! Runs on a remote engine: each a streamed completion of tokens.

use super::{EventLines, Link, failed, good, with_causes};
use crate::engine::mailbox::EventSink;
use crate::ids::{RequestId, TokenId};
use crate::protocol::{Decoding, EngineEvent, FinishReason, GenerateRequest, RunError, RunTimings, Usage};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Notify;

/// Runs whose tokens are known, to be forked from.
const MAX_KNOWN: usize = 256;

/// Starts runs and ends them.
pub struct Runs {
    link: Arc<Link>,
    runtime: Handle,
    /// Told when a run is to end.
    live: HashMap<RequestId, Arc<Notify>>,
    known: Arc<Mutex<Known>>,
}

/// Prompt and output of the last runs, by the id that they were submitted as.
#[derive(Default)]
struct Known {
    tokens: VecDeque<(RequestId, Vec<TokenId>)>,
    /// By the id that the server gave.
    local: HashMap<RequestId, RequestId>,
}

impl Known {
    fn note(&mut self, id: RequestId, tokens: Vec<TokenId>) {
        if self.tokens.len() == MAX_KNOWN
            && let Some((oldest, _)) = self.tokens.pop_front()
        {
            self.local.retain(|_, local| *local != oldest);
        }
        self.tokens.push_back((id, tokens));
    }

    fn get(&mut self, id: RequestId) -> Option<&mut Vec<TokenId>> {
        let id = self.local.get(&id).copied().unwrap_or(id);
        self.tokens.iter_mut().find(|(known, _)| *known == id).map(|(_, tokens)| tokens)
    }
}

impl Runs {
    pub fn new(link: Arc<Link>, runtime: Handle) -> Self {
        Runs { link, runtime, live: HashMap::new(), known: Arc::default() }
    }

    pub fn start(&mut self, id: RequestId, request: GenerateRequest, events: EventSink) {
        if matches!(request.decoding, Decoding::Beam(_)) {
            events.push(failed("beam searches are not sent to a remote engine"));
            return;
        }
        lock(&self.known).note(id, request.prompt.clone());
        let sent = self.link.request(Method::POST, "/v1/completions").header("content-type", "application/json");
        let sent = sent
            .header("x-request-id", self.link.name_run(id, &request.owner))
            .body(body(&self.link, &request).to_string());
        let (link, known) = (self.link.clone(), self.known.clone());
        let (end, choices) = (Arc::new(Notify::new()), vec![None; request.decoding.num_choices() as usize]);
        // Whoever has ended holds its bell no more.
        self.live.retain(|_, end| Arc::strong_count(end) > 1);
        self.live.insert(id, end.clone());
        let run = Run { id, known, events, choices, end, link };
        self.runtime.spawn(run.drive(sent));
    }

    /// The server finds in its cache what both have in common.
    pub fn fork(
        &mut self,
        id: RequestId,
        (parent, keep_tokens): (RequestId, u32),
        mut request: GenerateRequest,
        events: EventSink,
    ) {
        let kept = lock(&self.known).get(parent).and_then(|tokens| Some(tokens.get(..keep_tokens as usize)?.to_vec()));
        let Some(mut prompt) = kept else {
            events.push(failed("the request to go on from is not known any more"));
            return;
        };
        prompt.append(&mut request.prompt);
        request.prompt = prompt;
        self.start(id, request, events);
    }

    /// Ends a run by either of its ids; the server sees its connection go.
    pub fn abort(&mut self, id: RequestId) {
        let id = lock(&self.known).local.get(&id).copied().unwrap_or(id);
        if let Some(end) = self.live.remove(&id) {
            end.notify_one();
        }
    }
}

fn body(link: &Link, request: &GenerateRequest) -> Value {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let bias: serde_json::Map<String, Value> =
        sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), json!(bias))).collect();
    let (n, best_of) = match request.decoding {
        Decoding::Sample { n, best_of } => (n, best_of),
        Decoding::Beam(_) => (1, 1),
    };
    let mut body = json!({
        "model": link.model_name(), "prompt": request.prompt, "stream": true, "return_token_ids": true,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
        "n": n, "best_of": best_of, "priority": request.priority,
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty, "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty, "logit_bias": bias,
        "min_tokens": stop.min_tokens, "stop": stop.stop_strings, "stop_token_ids": stop.stop_token_ids,
        "ignore_eos": stop.ignore_eos,
    });
    // Numbers of the wire have a sign.
    body["seed"] = json!(sampling.seed.map(|seed| seed as i64));
    // Without a bound the answer may fill the context.
    let room = link.shared.model().map_or(u32::MAX, |model| model.max_model_len - request.prompt.len() as u32);
    body["max_tokens"] = json!(stop.max_tokens.unwrap_or(room));
    body
}

struct Run {
    id: RequestId,
    known: Arc<Mutex<Known>>,
    events: EventSink,
    /// How each choice ended.
    choices: Vec<Option<FinishReason>>,
    end: Arc<Notify>,
    link: Arc<Link>,
}

impl Run {
    /// Reads the stream to its end, or until somebody wants it to end.
    async fn drive(mut self, request: RequestBuilder) {
        let ended = match self.stream(request).await {
            Ok(event) => event,
            Err(fault) => EngineEvent::Failed { error: RunError::Engine(fault) },
        };
        self.events.push(ended);
        self.link.shared.wake();
    }

    async fn stream(&mut self, request: RequestBuilder) -> Result<EngineEvent, String> {
        let submitted = self.events.created();
        let end = self.end.clone();
        let mut response = tokio::select! {
            response = good(request) => response?,
            () = end.notified() => return Ok(self.finished(Usage::default(), RunTimings::default())),
        };
        let given = response.headers().get("x-kvasir-request").and_then(|id| id.to_str().ok()?.parse().ok());
        if let Some(given) = given.map(RequestId) {
            lock(&self.known).local.insert(given, self.id);
            self.events.rename(given);
        }
        let mut lines = EventLines::default();
        let (mut usage, mut timings, mut first_token) = (Usage::default(), RunTimings::default(), None);
        let mut has_started = false;
        loop {
            let bytes = tokio::select! {
                bytes = response.chunk() => bytes.map_err(|e| with_causes(&e))?,
                () = end.notified() => return Ok(self.finished(usage, timings)),
            };
            let Some(bytes) = bytes else { break };
            for data in lines.push(&bytes) {
                let chunk: Value = serde_json::from_str(&data).map_err(|e| format!("an event of the stream: {e}"))?;
                if let Some(message) = chunk["error"]["message"].as_str() {
                    return Err(message.to_owned());
                }
                read_usage(&chunk["usage"], &mut usage);
                if !std::mem::replace(&mut has_started, true) {
                    timings.queue_us = micros(submitted.elapsed());
                    let (prompt_tokens, cached_tokens) = (usage.prompt_tokens, usage.cached_tokens);
                    self.events.push(EngineEvent::Started { prompt_tokens, cached_tokens });
                }
                for choice in chunk["choices"].as_array().into_iter().flatten() {
                    let first = *first_token.get_or_insert_with(Instant::now);
                    timings.ttft_us = micros(first.duration_since(submitted));
                    timings.decode_us = micros(first.elapsed());
                    self.take(choice);
                }
            }
            self.link.shared.wake();
        }
        Ok(self.finished(usage, timings))
    }

    fn take(&mut self, choice: &Value) {
        let index = choice["index"].as_u64().unwrap_or(0) as usize;
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        let tokens: Vec<TokenId> = ids.filter_map(|id| Some(id.as_u64()? as TokenId)).collect();
        let delta = choice["text"].as_str().unwrap_or_default().to_owned();
        let last = tokens.last().copied();
        if index == 0
            && let Some(known) = lock(&self.known).get(self.id)
        {
            known.extend(&tokens);
        }
        if !delta.is_empty() || !tokens.is_empty() {
            self.events.push(EngineEvent::Text { choice: index as u32, delta, tokens, logprobs: Vec::new() });
        }
        let reason = match (choice["finish_reason"].as_str(), &choice["stop_reason"]) {
            (None, _) => return,
            (Some("length"), _) => FinishReason::MaxTokens,
            (Some("abort"), _) => FinishReason::Aborted,
            (Some(_), Value::String(stop)) => FinishReason::StopString(stop.clone()),
            (Some(_), stop) => FinishReason::StopToken(stop.as_u64().map_or(last.unwrap_or(0), |id| id as TokenId)),
        };
        if self.choices.len() > 1 {
            let ended = reason.clone();
            let (cumulative_logprob, score) = (None, None);
            self.events.push(EngineEvent::Choice { choice: index as u32, reason: ended, cumulative_logprob, score });
        }
        if let Some(place) = self.choices.get_mut(index) {
            *place = Some(reason);
        }
    }

    /// The terminal event; a stream that ended before its choices did was cut off.
    fn finished(&mut self, usage: Usage, timings: RunTimings) -> EngineEvent {
        let reason = self.choices.iter().find(|reason| !matches!(reason, Some(FinishReason::StopToken(_))));
        let reason = match reason.or(self.choices.first()) {
            Some(Some(reason)) => reason.clone(),
            _ => FinishReason::Aborted,
        };
        EngineEvent::Finished { reason, usage, timings }
    }
}

fn read_usage(body: &Value, usage: &mut Usage) {
    let number = |value: &Value| value.as_u64().map(|n| n as u32);
    usage.prompt_tokens = number(&body["prompt_tokens"]).unwrap_or(usage.prompt_tokens);
    usage.output_tokens = number(&body["completion_tokens"]).unwrap_or(usage.output_tokens);
    let cached = number(&body["prompt_tokens_details"]["cached_tokens"]);
    usage.cached_tokens = cached.unwrap_or(usage.cached_tokens);
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
