//! What all handlers share: the models, the options, who is served now, whether the server drains.
//!
//! Guarantees: a request counts as under way until its guard is dropped, however it ends; nothing here waits for the
//! engine.

use super::error::{ApiError, ApiResult};
use super::fleet::{self, Fleet, Model, ModelUse};
use super::options::ServerOptions;
use super::responses::ResponseStore;
use super::traces::{TraceContext, Tracer};
use crate::engine::handle::EngineStatus;
use crate::ids::RequestId;
use crate::protocol::OwnerTag;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::watch;

/// Shared by all requests.
pub type App = Arc<AppState>;

/// State of the server.
pub struct AppState {
    pub fleet: Fleet,
    pub options: ServerOptions,
    pub responses: ResponseStore,
    /// Where spans go, if they are wanted.
    pub tracer: Option<Tracer>,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    is_draining: AtomicBool,
    /// True when what still runs has to end.
    is_out_of_time: watch::Sender<bool>,
    under_way: Mutex<UnderWay>,
}

#[derive(Default)]
struct UnderWay {
    total: usize,
    by_owner: HashMap<u64, usize>,
    /// By the number of the request.
    runs: HashMap<u64, NamedRuns>,
    num_admitted: u64,
}

/// The runs of one request, and the names by which it may be aborted.
#[derive(Clone)]
struct NamedRuns {
    names: Vec<String>,
    owner: u64,
    model: Arc<Model>,
    ids: Vec<RequestId>,
}

/// Who sent a request, and what it is called in logs.
#[derive(Clone, Debug)]
pub struct Caller {
    pub request_id: String,
    /// The same for all requests of one key.
    pub owner: u64,
    /// The client's trace that the request is part of.
    pub trace: Option<TraceContext>,
}

impl AppState {
    pub fn new(fleet: Fleet, options: ServerOptions) -> App {
        Arc::new(AppState {
            fleet,
            tracer: options.otlp_traces_endpoint.as_deref().map(Tracer::new),
            options,
            responses: ResponseStore::default(),
            created: unix_seconds(),
            is_draining: AtomicBool::new(false),
            is_out_of_time: watch::Sender::new(false),
            under_way: Mutex::new(UnderWay::default()),
        })
    }

    /// The model that a request names, loaded: 404 where there is none of this name, 503 where it is not ready.
    pub async fn open(self: &Arc<Self>, asked: Option<&str>) -> ApiResult<Arc<ModelUse>> {
        fleet::open(self, asked).await
    }

    /// Admits one request of a caller: 503 while the server drains, 429 beyond the limit of its key.
    pub fn admit(self: &Arc<Self>, caller: &Caller, model: &Arc<Model>) -> ApiResult<UnderWayGuard> {
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        let mut under_way = lock(&self.under_way);
        let count = under_way.by_owner.entry(caller.owner).or_default();
        let limit = self.options.max_requests_per_key;
        if *count >= limit {
            return Err(ApiError::too_many(format!("{limit} requests of this key are under way")));
        }
        *count += 1;
        under_way.total += 1;
        under_way.num_admitted += 1;
        let number = under_way.num_admitted;
        model.num_under_way().fetch_add(1, Ordering::Relaxed);
        Ok(UnderWayGuard { app: self.clone(), model: model.clone(), owner: caller.owner, number })
    }

    /// Requests under way.
    pub fn num_under_way(&self) -> usize {
        lock(&self.under_way).total
    }

    /// Aborts those of a caller's requests that go by these names, or all of them; how many there were.
    pub fn abort(&self, caller: &Caller, names: Option<&[String]>) -> usize {
        let owner = self.owner(caller);
        let under_way = lock(&self.under_way);
        let is_named = |runs: &NamedRuns| names.is_none_or(|names| runs.names.iter().any(|name| names.contains(name)));
        let is_meant = |runs: &&NamedRuns| runs.owner == owner && is_named(runs);
        let meant: Vec<NamedRuns> = under_way.runs.values().filter(is_meant).cloned().collect();
        drop(under_way);
        for runs in &meant {
            runs.ids.iter().for_each(|id| runs.model.engine.abort(*id));
        }
        meant.len()
    }

    /// From now on new work is refused.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Whose things a caller may see and end: where keys are checked those of its own key, else everybody's.
    pub fn owner(&self, caller: &Caller) -> u64 {
        if self.options.api_keys.is_empty() { 0 } else { caller.owner }
    }

    /// Ends what still runs with an error.
    pub fn end_all(&self) {
        self.is_out_of_time.send_replace(true);
    }

    /// Turns true when what still runs has to end.
    pub fn out_of_time(&self) -> watch::Receiver<bool> {
        self.is_out_of_time.subscribe()
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Notes whether the engines move, and what their steps did; called about once a second.
    pub fn watch_progress(&self) {
        let (timeout, folder) = (self.options.stall_timeout, self.options.stall_dir.as_deref());
        self.fleet.models().iter().for_each(|model| model.watch(timeout, folder));
    }

    /// True while an engine has work and makes no step for too long.
    pub fn is_stalled(&self) -> bool {
        self.fleet.models().iter().any(|model| model.is_stalled())
    }

    /// Why requests cannot be served now, if so.
    pub fn unready(&self) -> Option<&'static str> {
        if self.is_draining() {
            return Some("the server is shutting down");
        }
        if self.is_stalled() {
            return Some("the engine makes no progress");
        }
        let first = self.fleet.first();
        match first.engine.status() {
            EngineStatus::Ready(_) => None,
            // Models that came and went are loaded again for whoever asks.
            _ if first.has_been_unloaded() => None,
            EngineStatus::Loading { .. } => Some("the model is loading"),
            EngineStatus::NoModel | EngineStatus::Failed { .. } => Some("no model is loaded"),
        }
    }
}

/// One request under way.
pub struct UnderWayGuard {
    app: App,
    model: Arc<Model>,
    owner: u64,
    number: u64,
}

impl UnderWayGuard {
    /// Says by which names its runs can be aborted.
    pub fn name(&mut self, caller: &Caller, response_id: &str, runs: Vec<RequestId>) {
        let names = vec![caller.request_id.clone(), response_id.to_owned()];
        let runs = NamedRuns { names, owner: self.app.owner(caller), model: self.model.clone(), ids: runs };
        lock(&self.app.under_way).runs.insert(self.number, runs);
    }
}

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
        self.model.num_under_way().fetch_sub(1, Ordering::Relaxed);
        let mut under_way = lock(&self.app.under_way);
        under_way.total -= 1;
        under_way.runs.remove(&self.number);
        if let Some(count) = under_way.by_owner.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                under_way.by_owner.remove(&self.owner);
            }
        }
    }
}

impl Caller {
    /// The tag that the engine's queue is fair by.
    pub fn tag(&self) -> OwnerTag {
        OwnerTag { id: self.owner, label: self.request_id.clone() }
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Nanoseconds since 1970.
pub fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// An id such as `chatcmpl-…`.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::now_v7().simple())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
