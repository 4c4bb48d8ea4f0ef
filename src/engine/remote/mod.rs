//! An engine elsewhere, as its `kvasir serve` shows it: commands become requests, streams become events and telemetry.
//!
//! Guarantees: whoever holds the handle sees what a handle of this process shows: runs with exactly one terminal event,
//! step records in order, snapshots; a connection that ends is made again, and the status says so meanwhile. Tokens are
//! made on this side, with the tokenizer that the server sends. It does not attempt beam searches, rules for outputs, or
//! loading and pausing, which are the server's own.

mod follow;
mod runs;

use super::handle::{Command, EngineStatus, Shared};
use super::thread::LoadCommand;
use crate::ids::RequestId;
use crate::model::hub::with_causes;
use crate::protocol::{EngineCommand, EngineEvent, OwnerTag, PrefixCommand, RunError};
use crate::telemetry::RequestInfo;
use reqwest::{Client, Method, RequestBuilder, Response};
use runs::Runs;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Runs whose owners are kept: more than a snapshot shows.
const MAX_OWNERS: usize = 512;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Said of a server that cannot be reached; the log has the causes.
const NO_ANSWER: &str = "the server does not answer";

/// Which server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Without the path of an API: `http://127.0.0.1:8000`.
    pub url: String,
    pub api_key: Option<String>,
    /// Where the server has several; `None` takes its first.
    pub model: Option<String>,
}

impl RemoteOptions {
    /// Host and port.
    pub fn host(&self) -> &str {
        let rest = self.url.split_once("://").map_or(self.url.as_str(), |(_, rest)| rest);
        let authority = rest.split('/').next().unwrap_or(rest);
        authority.rsplit_once('@').map_or(authority, |(_, host)| host)
    }
}

/// What all tasks of a connection share.
struct Link {
    shared: Arc<Shared>,
    client: Client,
    options: RemoteOptions,
    /// By which requests call the model, once it is known.
    name: Mutex<Option<String>>,
    /// Whose runs these are, by the names that they were sent under.
    owners: Mutex<VecDeque<(String, OwnerTag)>>,
}

/// Takes the place of the engine thread.
pub(super) fn spawn(shared: Arc<Shared>, queue: Receiver<Command>, options: RemoteOptions) -> JoinHandle<()> {
    std::thread::Builder::new()
        .name("remote engine".into())
        .spawn(move || run(shared, &queue, options))
        .expect("the system can start one more thread")
}

fn run(shared: Arc<Shared>, queue: &Receiver<Command>, options: RemoteOptions) {
    // Another part of the program may have chosen its provider already; either serves.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = Client::builder().connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
    if ["127.0.0.1", "localhost", "[::1]"].iter().any(|host| options.url.contains(host)) {
        builder = builder.no_proxy();
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("remote").enable_all().build();
    let (Ok(runtime), Ok(client)) = (runtime, builder.build()) else {
        let message = "no connection can be made on this machine".into();
        shared.set_status(EngineStatus::Failed { kind: super::handle::FailureKind::Engine, message, fix: None });
        return;
    };
    let link = Arc::new(Link { shared, client, options, name: Mutex::new(None), owners: Mutex::default() });
    runtime.spawn(follow::follow(link.clone()));
    let mut runs = Runs::new(link.clone(), runtime.handle().clone());
    while let Ok(command) = queue.recv() {
        match command {
            EngineCommand::Submit { id, request, rules, events } => {
                link.leaves_queue();
                let is_plain = rules.constraint.is_none() && rules.pooling.is_none() && rules.prompt_logprobs.is_none();
                if is_plain {
                    runs.start(id, *request, events);
                } else {
                    events.push(failed("rules for outputs are not sent to a remote engine"));
                }
            }
            EngineCommand::Fork { id, parent, keep_tokens, request, events } => {
                link.leaves_queue();
                runs.fork(id, (parent, keep_tokens), *request, events);
            }
            EngineCommand::Abort { id } => runs.abort(id),
            EngineCommand::Prefix(command) => drop(runtime.spawn(prefix(link.clone(), command))),
            EngineCommand::Load(LoadCommand::Start { .. }) => link.keep_model(),
            EngineCommand::Shutdown => break,
            EngineCommand::Load(_)
            | EngineCommand::Unload
            | EngineCommand::Pause
            | EngineCommand::Resume
            | EngineCommand::CorruptBlock { .. } => {}
        }
    }
    // What runs is dropped, which tells its clients and the server.
    runtime.shutdown_background();
    link.shared.set_model(None, 0);
    link.shared.set_status(EngineStatus::NoModel);
}

fn failed(message: &str) -> EngineEvent {
    EngineEvent::Failed { error: RunError::Engine(message.to_owned()) }
}

impl Link {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.options.url));
        match &self.options.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// The path with the model that is shown.
    fn path(&self, path: &str) -> String {
        let name = self.model_name();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~/".contains(c);
        let escaped: String =
            name.chars()
                .map(|c| {
                    if is_plain(c) {
                        c.to_string()
                    } else {
                        c.to_string().bytes().map(|b| format!("%{b:02X}")).collect()
                    }
                })
                .collect();
        let mark = if path.contains('?') { '&' } else { '?' };
        if escaped.is_empty() { path.to_owned() } else { format!("{path}{mark}model={escaped}") }
    }

    fn model_name(&self) -> String {
        let known = self.name.lock().unwrap_or_else(|e| e.into_inner()).clone();
        known.or_else(|| self.options.model.clone()).unwrap_or_default()
    }

    /// Gives a run a name that the server's telemetry shows and that fits a header.
    fn name_run(&self, id: RequestId, owner: &OwnerTag) -> String {
        let plain = |c: char| if c.is_ascii_graphic() { c } else { '-' };
        let label: String = owner.label.chars().map(plain).take(64).collect();
        let name = format!("{label}.{}", id.0);
        let mut owners = self.owners.lock().unwrap_or_else(|e| e.into_inner());
        if owners.len() == MAX_OWNERS {
            owners.pop_front();
        }
        owners.push_back((name.clone(), owner.clone()));
        name
    }

    /// Puts the owners of this process's runs in the place of the names that the server knows.
    fn restore_owners(&self, requests: &mut [RequestInfo]) {
        let owners = self.owners.lock().unwrap_or_else(|e| e.into_inner());
        for request in requests {
            if let Some((_, owner)) = owners.iter().find(|(name, _)| *name == request.owner.label) {
                request.owner = owner.clone();
            }
        }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        let request = self.request(Method::POST, path).header("content-type", "application/json");
        json_of(request.body(body.to_string())).await
    }

    fn leaves_queue(&self) {
        self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Somebody asked for a load: the server's model stays, and the status says so again.
    fn keep_model(&self) {
        tracing::warn!("a remote engine keeps the model that its server has");
        match self.shared.model() {
            Some(model) => self.shared.set_status(EngineStatus::Ready(model)),
            None => self.connecting(),
        }
    }

    fn connecting(&self) {
        let phase = format!("Connecting to {}", self.options.host());
        self.shared.set_status(EngineStatus::Loading { phase, done: 0, total: 0 });
    }
}

/// Does what was asked of prefixes.
async fn prefix(link: Arc<Link>, command: PrefixCommand<super::mailbox::EventSink>) {
    match command {
        PrefixCommand::Pin { request, events, .. } => {
            link.leaves_queue();
            let body = json!({ "model": link.model_name(), "prompt": request.tokens, "name": request.name });
            tell_pin(link.post("/kvasir/v1/prefixes", &body).await, request.tokens.len() as u32, &events);
        }
        PrefixCommand::Keep { prefix, name, events, .. } => {
            link.leaves_queue();
            let path = link.path(&format!("/kvasir/v1/prefixes/{prefix}"));
            tell_pin(link.post(&path, &json!({ "pinned": true, "name": name })).await, 0, &events);
        }
        PrefixCommand::Unpin { id, told } => {
            let path = link.path(&format!("/kvasir/v1/prefixes/{id}"));
            tell(link.post(&path, &json!({ "pinned": false })).await.is_ok(), &told);
        }
        PrefixCommand::Evict { id, told } => {
            let path = link.path(&format!("/kvasir/v1/prefixes/{id}"));
            let answer = json_of(link.request(Method::DELETE, &path)).await;
            tell(answer.is_ok_and(|answer| answer["deleted"] == true), &told);
        }
        PrefixCommand::Reset => drop(link.post("/reset_prefix_cache", &json!({})).await),
    }
    link.shared.wake();
}

fn tell(is_done: bool, told: &SyncSender<bool>) {
    // Nobody has to wait for it.
    let _ = told.try_send(is_done);
}

fn tell_pin(answer: Result<Value, String>, prompt_tokens: u32, events: &super::mailbox::EventSink) {
    match answer {
        Ok(answer) => {
            let cached_tokens = answer["cached_tokens"].as_u64().unwrap_or(0) as u32;
            let usage = crate::protocol::Usage { prompt_tokens, cached_tokens, ..Default::default() };
            let reason = crate::protocol::FinishReason::Pinned;
            events.push(EngineEvent::Finished { reason, usage, timings: Default::default() });
        }
        Err(fault) => events.push(failed(&fault)),
    }
}

/// The answer where it is good, else what it says is wrong.
async fn good(request: RequestBuilder) -> Result<Response, String> {
    let response = request.send().await.map_err(|e| {
        tracing::info!("{}", with_causes(&e));
        NO_ANSWER.to_owned()
    })?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or_default();
    Err(body["error"]["message"].as_str().map_or_else(|| status.to_string(), str::to_owned))
}

async fn json_of(request: RequestBuilder) -> Result<Value, String> {
    let text = good(request).await?.text().await.map_err(|e| with_causes(&e))?;
    // Some answers are empty.
    if text.is_empty() { Ok(Value::Null) } else { serde_json::from_str(&text).map_err(|e| e.to_string()) }
}

/// Puts the data of events together from pieces of a stream.
#[derive(Default)]
pub struct EventLines {
    rest: Vec<u8>,
}

impl EventLines {
    /// The data of the events that are complete with these bytes, but for the word that ends a stream.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        let text = String::from_utf8_lossy(&whole);
        let data = |line: &str| line.strip_prefix("data:").map(|data| data.trim().to_owned());
        text.lines().filter_map(data).filter(|data| data != "[DONE]").collect()
    }
}
