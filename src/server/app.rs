//! What all handlers share: the engine's handle, the options, who is served now, whether the server drains.
//!
//! Guarantees: a request counts as under way until its guard is dropped, however it ends; nothing here waits for the
//! engine.

use super::error::{ApiError, ApiResult};
use super::metrics::Metrics;
use super::options::ServerOptions;
use super::responses::ResponseStore;
use crate::constrain::GrammarCompiler;
use crate::engine::EngineHandle;
use crate::engine::handle::{EngineStatus, LoadedModel};
use crate::ids::RequestId;
use crate::protocol::OwnerTag;
use crate::tokenizer::Tokenizer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Shared by all requests.
pub type App = Arc<AppState>;

/// State of the server.
pub struct AppState {
    pub engine: EngineHandle,
    pub options: ServerOptions,
    pub metrics: Arc<Metrics>,
    pub responses: ResponseStore,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    started: Instant,
    is_draining: AtomicBool,
    under_way: Mutex<UnderWay>,
    /// Steps that the engine had made when it last moved, and when that was, in milliseconds since the start.
    progress: (AtomicU64, AtomicU64),
    /// Of the model whose tokenizer stands beside it; made when it is first wanted.
    compiler: Mutex<Option<(Arc<Tokenizer>, Arc<GrammarCompiler>)>>,
}

#[derive(Default)]
struct UnderWay {
    total: usize,
    by_owner: HashMap<u64, usize>,
    /// By the number of the request: names, and the runs of that request.
    runs: HashMap<u64, (Vec<String>, Vec<RequestId>)>,
    num_admitted: u64,
}

/// Who sent a request, and what it is called in logs.
#[derive(Clone, Debug)]
pub struct Caller {
    pub request_id: String,
    /// The same for all requests of one key.
    pub owner: u64,
}

impl AppState {
    pub fn new(engine: EngineHandle, options: ServerOptions) -> App {
        Arc::new(AppState {
            engine,
            options,
            metrics: Arc::new(Metrics::new()),
            responses: ResponseStore::default(),
            created: unix_seconds(),
            started: Instant::now(),
            is_draining: AtomicBool::new(false),
            under_way: Mutex::new(UnderWay::default()),
            progress: (AtomicU64::new(0), AtomicU64::new(0)),
            compiler: Mutex::new(None),
        })
    }

    /// The loaded model, or 503.
    pub fn model(&self) -> ApiResult<Arc<LoadedModel>> {
        self.engine.model().ok_or_else(|| ApiError::unavailable("the model is not ready"))
    }

    /// The names by which requests may call the model, the first one in answers.
    pub fn served_names(&self, model: &LoadedModel) -> Vec<String> {
        match self.options.served_names.as_slice() {
            [] => vec![model.name.clone()],
            names => names.to_vec(),
        }
    }

    /// The name to answer with, where the request's name is one of ours or missing; 404 otherwise.
    pub fn check_name(&self, model: &LoadedModel, asked: Option<&str>) -> ApiResult<String> {
        let names = self.served_names(model);
        match asked.filter(|name| !name.is_empty()) {
            None => Ok(names[0].clone()),
            Some(name) if names.iter().any(|served| served == name) => Ok(name.to_owned()),
            Some(name) => Err(ApiError::not_found(format!("the model `{name}` is not served here"))
                .with_param("model")
                .with_code("model_not_found")),
        }
    }

    /// What compiles grammars for the model. It may take a while: not on a thread that serves others.
    pub fn compiler(&self, model: &LoadedModel) -> ApiResult<Arc<GrammarCompiler>> {
        let mut known = lock(&self.compiler);
        if let Some((tokenizer, compiler)) = &*known
            && Arc::ptr_eq(tokenizer, &model.tokenizer)
        {
            return Ok(compiler.clone());
        }
        let compiler = GrammarCompiler::new(&model.tokenizer, model.vocab_size, &model.eos_token_ids)
            .map_err(|e| ApiError::bad_request(format!("outputs of this model cannot follow a grammar: {e}")))?;
        let compiler = Arc::new(compiler);
        *known = Some((model.tokenizer.clone(), compiler.clone()));
        Ok(compiler)
    }

    /// Admits one request of a caller: 503 while the server drains, 429 beyond the limit of its key.
    pub fn admit(self: &Arc<Self>, caller: &Caller) -> ApiResult<UnderWayGuard> {
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
        Ok(UnderWayGuard { app: self.clone(), owner: caller.owner, number })
    }

    /// Requests under way.
    pub fn num_under_way(&self) -> usize {
        lock(&self.under_way).total
    }

    /// Aborts the requests that go by these names, or all; how many there were.
    pub fn abort(&self, names: Option<&[String]>) -> usize {
        let under_way = lock(&self.under_way);
        let is_meant = |known: &[String]| names.is_none_or(|names| known.iter().any(|name| names.contains(name)));
        let meant: Vec<Vec<RequestId>> =
            under_way.runs.values().filter(|(known, _)| is_meant(known)).map(|(_, ids)| ids.clone()).collect();
        drop(under_way);
        meant.iter().flatten().for_each(|id| self.engine.abort(*id));
        meant.len()
    }

    /// From now on new work is refused.
    pub fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Notes whether the engine moves, and what its steps did; called about once a second.
    pub fn watch_progress(&self) {
        self.metrics.read_steps(&self.engine.telemetry());
        let steps = self.engine.step_totals().steps;
        let is_free = self.num_under_way() == 0 || self.engine.is_paused();
        if is_free || self.progress.0.swap(steps, Ordering::Relaxed) != steps {
            self.progress.1.store(self.now_ms(), Ordering::Relaxed);
        }
    }

    /// True while the engine has work and makes no step for too long.
    pub fn is_stalled(&self) -> bool {
        let since = self.now_ms().saturating_sub(self.progress.1.load(Ordering::Relaxed));
        self.num_under_way() > 0 && Duration::from_millis(since) > self.options.stall_timeout
    }

    /// Why requests cannot be served now, if so.
    pub fn unready(&self) -> Option<&'static str> {
        if self.is_draining() {
            return Some("the server is shutting down");
        }
        if self.is_stalled() {
            return Some("the engine makes no progress");
        }
        match self.engine.status() {
            EngineStatus::Ready(_) => None,
            EngineStatus::Loading { .. } => Some("the model is loading"),
            EngineStatus::NoModel | EngineStatus::Failed { .. } => Some("no model is loaded"),
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

/// One request under way.
pub struct UnderWayGuard {
    app: App,
    owner: u64,
    number: u64,
}

impl UnderWayGuard {
    /// Says by which names its runs can be aborted.
    pub fn name(&mut self, names: [String; 2], runs: Vec<RequestId>) {
        lock(&self.app.under_way).runs.insert(self.number, (names.to_vec(), runs));
    }
}

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
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

/// An id such as `chatcmpl-…`.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::now_v7().simple())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
