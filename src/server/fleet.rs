//! The models that are served, by name: which of them is in memory, who uses it, and which gives way to which.
//!
//! Guarantees: a model that a request uses stays loaded; loads come one at a time, and together the models take no more
//! than the budget; the one that was used longest ago gives way first; a request whose model cannot be loaded is told
//! why. Where one model is served for good its caller loads it, and nothing here waits or unloads. It does not attempt
//! to keep weights of unloaded models in host memory; pinned prefixes go with their model.

use super::app::App;
use super::error::{ApiError, ApiResult};
use super::metrics::Metrics;
use super::stall;
use crate::constrain::GrammarCompiler;
use crate::engine::EngineHandle;
use crate::engine::handle::{EngineStatus, FailureKind, LoadedModel};
use crate::engine::options::LoadRequest;
use crate::tokenizer::Tokenizer;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Between looks at an engine that loads or unloads.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Requests that may wait for one model to be loaded.
const MAX_WAITING: usize = 256;

/// How a model is loaded when it is asked for, and what is known of it before.
#[derive(Clone, Debug)]
pub struct OnDemand {
    pub request: LoadRequest,
    /// What weights, workspace and KV pool take.
    pub bytes: u64,
    /// Longest prompt and output together, in tokens.
    pub max_model_len: u32,
}

/// A LoRA adapter as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraName {
    pub name: String,
    pub path: PathBuf,
}

/// What bounds the models together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetLimits {
    /// Memory that the loaded models may take; `None` leaves it to the device.
    pub memory_bytes: Option<u64>,
    /// A model that nobody has used for so long is unloaded; `None` keeps it.
    pub idle_timeout: Option<Duration>,
    /// How long a request waits for models in use to become idle, where its own needs their memory.
    pub room_timeout: Duration,
}

/// All models of a server; the first answers requests that name none.
pub struct Fleet {
    models: Vec<Arc<Model>>,
    limits: FleetLimits,
    /// Held while a model comes or goes.
    placing: tokio::sync::Mutex<()>,
}

/// One model, with an engine of its own.
pub struct Model {
    pub engine: EngineHandle,
    pub metrics: Arc<Metrics>,
    /// By which requests may call it, the first one in answers; none takes the model's own.
    names: Vec<String>,
    on_demand: Option<OnDemand>,
    /// Of the tokenizer that stands beside it; made when it is first wanted.
    compiler: Mutex<Option<(Arc<Tokenizer>, Arc<GrammarCompiler>)>>,
    usage: Mutex<Usage>,
    /// Requests with the engine.
    num_under_way: AtomicUsize,
    num_loads: AtomicU64,
    num_unloads: AtomicU64,
    progress: Mutex<Progress>,
    is_stalled: AtomicBool,
}

struct Usage {
    num_users: usize,
    last_used: Instant,
    /// Its memory is taken. Whoever clears it has seen that there are no users.
    is_in: bool,
}

/// Steps that the engine had made when it last moved, and when that was.
struct Progress {
    steps: u64,
    moved: Instant,
}

/// A request's hold on a model, which stays loaded until this is dropped.
pub struct ModelUse {
    pub model: Arc<Model>,
    pub loaded: Arc<LoadedModel>,
    /// The name to answer with.
    pub name: String,
    /// The LoRA adapter that the name means; 0 is none.
    pub lora: u64,
    _user: User,
}

struct User(Arc<Model>);

impl Fleet {
    /// One model that someone else loads and that stays.
    pub fn of_one(engine: EngineHandle, names: Vec<String>) -> Fleet {
        let limits = FleetLimits { memory_bytes: None, idle_timeout: None, room_timeout: Duration::ZERO };
        Self::of(vec![Model::new(engine, names, None, true)], limits)
    }

    /// Models that are loaded when they are asked for. The caller loads the first one. Each has a name at least.
    pub fn on_demand(models: Vec<(EngineHandle, Vec<String>, OnDemand)>, limits: FleetLimits) -> Fleet {
        let model = |(i, (engine, names, on_demand))| Model::new(engine, names, Some(on_demand), i == 0);
        Self::of(models.into_iter().enumerate().map(model).collect(), limits)
    }

    fn of(models: Vec<Model>, limits: FleetLimits) -> Fleet {
        assert!(!models.is_empty(), "a server has a model");
        Fleet { models: models.into_iter().map(Arc::new).collect(), limits, placing: tokio::sync::Mutex::new(()) }
    }

    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// The model that answers requests that name none.
    pub fn first(&self) -> &Arc<Model> {
        &self.models[0]
    }

    /// The model of a name, and the name to answer with; 404 where there is none.
    pub fn find(&self, asked: Option<&str>) -> ApiResult<(&Arc<Model>, String)> {
        let Some(asked) = asked.filter(|name| !name.is_empty()) else {
            return Ok((self.first(), self.first().names()?.swap_remove(0)));
        };
        for model in &self.models {
            if model.names()?.iter().any(|name| name == asked) {
                return Ok((model, asked.to_owned()));
            }
        }
        if let Some(model) = self.models.iter().find(|model| model.loras().iter().any(|lora| lora.name == asked)) {
            return Ok((model, asked.to_owned()));
        }
        Err(not_served(asked))
    }

    /// Loads a model that a request waits for, making room for it.
    async fn bring_in(&self, model: &Model) -> ApiResult<()> {
        let _placing = self.placing.lock().await;
        if model.is_in() {
            return Ok(());
        }
        if model.num_users() == 0 {
            return Err(ApiError::unavailable("nobody waits for the model any more"));
        }
        self.make_room(model).await?;
        loop {
            match model.load().await {
                Ok(()) => return Ok(()),
                // Devices do not tell what is free: another model may have to give way.
                Err((FailureKind::DoesNotFit, _)) if self.put_out_oldest(model).await => {}
                Err((kind, detail)) => {
                    tracing::error!("the model {} could not be loaded: {detail}", model.label());
                    let reason = match kind {
                        FailureKind::Model => "its files cannot be used",
                        FailureKind::DoesNotFit => "it does not fit in the memory that is free",
                        FailureKind::NoAdapter => "there is no adapter to run it on",
                        FailureKind::Download => "its download failed",
                        FailureKind::Engine => "the engine failed",
                    };
                    let message = format!("the model `{}` could not be loaded: {reason}", model.label());
                    return Err(ApiError::unavailable(message).with_code("model_not_loaded"));
                }
            }
        }
    }

    /// Unloads idle models until this one fits; waits a while for those in use.
    async fn make_room(&self, model: &Model) -> ApiResult<()> {
        let Some(budget) = self.limits.memory_bytes else { return Ok(()) };
        let deadline = Instant::now() + self.limits.room_timeout;
        loop {
            let others = self.models.iter().filter(|other| !std::ptr::eq(&***other, model));
            let taken: u64 = others.filter(|other| lock(&other.usage).is_in).map(|other| other.bytes()).sum();
            if taken.saturating_add(model.bytes()) <= budget {
                return Ok(());
            }
            if self.put_out_oldest(model).await {
                continue;
            }
            if Instant::now() >= deadline {
                let mib = |bytes: u64| bytes.div_ceil(1 << 20);
                let message = format!(
                    "the model `{}` needs {} MiB; the models in use take {} of {}",
                    model.label(),
                    mib(model.bytes()),
                    mib(taken),
                    mib(budget)
                );
                return Err(ApiError::unavailable(message).with_code("model_memory_in_use"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Unloads the idle model that was used longest ago. False where all are in use.
    async fn put_out_oldest(&self, except: &Model) -> bool {
        let idle = self.models.iter().filter(|model| !std::ptr::eq(&***model, except) && model.is_idle());
        match idle.min_by_key(|model| lock(&model.usage).last_used) {
            Some(oldest) => oldest.put_out().await,
            None => false,
        }
    }

    /// Unloads models that nobody has used for long; called about once a second.
    pub async fn unload_idle(&self) {
        let Some(timeout) = self.limits.idle_timeout else { return };
        for model in &self.models {
            let is_due = model.is_idle() && lock(&model.usage).last_used.elapsed() >= timeout;
            if is_due && let Ok(_placing) = self.placing.try_lock() {
                model.put_out().await;
            }
        }
    }
}

fn not_served(name: &str) -> ApiError {
    let message = format!("the model `{name}` is not served here");
    ApiError::not_found(message).with_param("model").with_code("model_not_found")
}

/// The model of a name for one request; where it is not in memory it is loaded first.
pub async fn open(app: &App, asked: Option<&str>) -> ApiResult<Arc<ModelUse>> {
    let (model, name) = app.fleet.find(asked)?;
    let user = User::new(model.clone());
    if model.on_demand.is_some() && !model.is_in() {
        if app.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        if model.num_users() > MAX_WAITING {
            return Err(ApiError::too_many(format!("{MAX_WAITING} requests wait for the model `{name}`")));
        }
        // A load that has begun goes on when the client leaves.
        let (app, model) = (app.clone(), model.clone());
        let load = tokio::spawn(async move { app.fleet.bring_in(&model).await });
        load.await.map_err(|_| ApiError::internal())??;
    }
    let loaded = model.loaded()?;
    let lora = match model.names()?.contains(&name) {
        true => 0,
        // It may have been unloaded since.
        false => loaded.loras.find(&name).ok_or_else(|| not_served(&name))?.id,
    };
    Ok(Arc::new(ModelUse { loaded, model: model.clone(), name, lora, _user: user }))
}

impl Model {
    fn new(engine: EngineHandle, names: Vec<String>, on_demand: Option<OnDemand>, is_in: bool) -> Model {
        let now = Instant::now();
        Model {
            engine,
            metrics: Arc::new(Metrics::new()),
            names,
            on_demand,
            compiler: Mutex::new(None),
            usage: Mutex::new(Usage { num_users: 0, last_used: now, is_in }),
            num_under_way: AtomicUsize::new(0),
            num_loads: AtomicU64::new(u64::from(is_in)),
            num_unloads: AtomicU64::new(0),
            progress: Mutex::new(Progress { steps: 0, moved: now }),
            is_stalled: AtomicBool::new(false),
        }
    }

    /// The loaded model, or 503.
    pub fn loaded(&self) -> ApiResult<Arc<LoadedModel>> {
        self.engine.model().ok_or_else(|| ApiError::unavailable("the model is not ready"))
    }

    /// The names by which requests may call it; 503 where it has none but its own and is not loaded.
    pub fn names(&self) -> ApiResult<Vec<String>> {
        match self.names.as_slice() {
            [] => Ok(vec![self.loaded()?.name.clone()]),
            names => Ok(names.to_vec()),
        }
    }

    /// Its LoRA adapters, by whose names requests may call it too; those that a load would bring while it is out of memory.
    pub fn loras(&self) -> Vec<LoraName> {
        if let Some(model) = self.engine.model() {
            return model.loras.list().into_iter().map(|lora| LoraName { name: lora.name, path: lora.path }).collect();
        }
        let modules = self.on_demand.iter().flat_map(|on_demand| &on_demand.request.options.lora.modules);
        modules.map(|lora| LoraName { name: lora.name.clone(), path: lora.path.clone() }).collect()
    }

    /// What it is called in metrics and logs.
    pub fn label(&self) -> String {
        self.names().map(|mut names| names.swap_remove(0)).unwrap_or_default()
    }

    /// The model's own name and its context; 503 where neither is known yet.
    pub fn facts(&self) -> ApiResult<(String, u32)> {
        match (self.engine.model(), &self.on_demand) {
            (Some(model), _) => Ok((model.name.clone(), model.max_model_len)),
            (None, Some(on_demand)) => Ok((self.label(), on_demand.max_model_len)),
            (None, None) => Err(ApiError::unavailable("the model is not ready")),
        }
    }

    /// Whether a request for it would be served: it is there, or is loaded for the request.
    pub fn is_available(&self) -> bool {
        matches!(self.engine.status(), EngineStatus::Ready(_)) || self.on_demand.is_some()
    }

    /// Whether it is out of memory until someone asks for it.
    pub fn is_unloaded(&self) -> bool {
        self.on_demand.is_some() && matches!(self.engine.status(), EngineStatus::NoModel | EngineStatus::Failed { .. })
    }

    /// Whether it came and went since the server started.
    pub fn has_been_unloaded(&self) -> bool {
        self.num_unloads.load(Ordering::Relaxed) > 0
    }

    /// How often it was loaded and unloaded.
    pub fn moves(&self) -> (u64, u64) {
        (self.num_loads.load(Ordering::Relaxed), self.num_unloads.load(Ordering::Relaxed))
    }

    /// Requests with its engine.
    pub fn num_under_way(&self) -> &AtomicUsize {
        &self.num_under_way
    }

    /// Notes whether the engine moves, and what its steps did. What an engine was doing that is found to be stuck goes to a
    /// file in `stall_dir`.
    pub fn watch(&self, stall_timeout: Duration, stall_dir: Option<&Path>) {
        self.metrics.read_steps(&self.engine.telemetry());
        let steps = self.engine.step_totals().steps;
        let is_free = self.num_under_way.load(Ordering::Relaxed) == 0 || self.engine.is_paused();
        let mut progress = lock(&self.progress);
        if is_free || progress.steps != steps {
            *progress = Progress { steps, moved: Instant::now() };
        }
        let stalled = progress.moved.elapsed();
        drop(progress);
        let is_stalled = stalled > stall_timeout;
        let was_stalled = self.is_stalled.swap(is_stalled, Ordering::Relaxed);
        if is_stalled && !was_stalled {
            self.tell_stall(stalled, stall_dir);
        }
    }

    fn tell_stall(&self, stalled: Duration, stall_dir: Option<&Path>) {
        let (label, seconds) = (self.label(), stalled.as_secs());
        tracing::error!("the engine of {label} has made no step for {seconds} s");
        match stall_dir.map(|folder| stall::dump(folder, self, stalled.as_millis() as u64)) {
            Some(Ok(path)) => tracing::error!("what it was doing is in {}", path.display()),
            Some(Err(fault)) => tracing::error!("what it was doing could not be written: {fault}"),
            None => {}
        }
    }

    /// True while the engine has work and makes no step for too long.
    pub fn is_stalled(&self) -> bool {
        self.num_under_way.load(Ordering::Relaxed) > 0 && self.is_stalled.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> u64 {
        self.on_demand.as_ref().map_or(0, |on_demand| on_demand.bytes)
    }

    fn num_users(&self) -> usize {
        lock(&self.usage).num_users
    }

    /// Whether requests can be handed to the engine.
    fn is_in(&self) -> bool {
        lock(&self.usage).is_in && self.engine.model().is_some()
    }

    fn is_idle(&self) -> bool {
        let usage = lock(&self.usage);
        let is_settled = !matches!(self.engine.status(), EngineStatus::Loading { .. });
        self.on_demand.is_some() && usage.is_in && usage.num_users == 0 && is_settled
    }

    /// Loads it, or waits for the load under way.
    async fn load(&self) -> Result<(), (FailureKind, String)> {
        let Some(on_demand) = &self.on_demand else { return Ok(()) };
        lock(&self.usage).is_in = true;
        let begins = !matches!(self.engine.status(), EngineStatus::Loading { .. });
        if begins {
            tracing::info!("loading {}", self.label());
            self.engine.load(on_demand.request.clone());
        }
        let failure = loop {
            match self.engine.status() {
                EngineStatus::Ready(_) => {
                    self.num_loads.fetch_add(u64::from(begins), Ordering::Relaxed);
                    return Ok(());
                }
                EngineStatus::Loading { .. } => tokio::time::sleep(POLL_INTERVAL).await,
                EngineStatus::Failed { kind, message, .. } => break (kind, message),
                EngineStatus::NoModel => break (FailureKind::Engine, "the load was cancelled".into()),
            }
        };
        lock(&self.usage).is_in = false;
        Err(failure)
    }

    /// Unloads it, unless someone uses it.
    async fn put_out(&self) -> bool {
        {
            let mut usage = lock(&self.usage);
            if !usage.is_in || usage.num_users > 0 {
                return false;
            }
            usage.is_in = false;
        }
        tracing::info!("unloading {}", self.label());
        self.num_unloads.fetch_add(1, Ordering::Relaxed);
        self.engine.unload();
        while !matches!(self.engine.status(), EngineStatus::NoModel) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        *lock(&self.compiler) = None;
        true
    }
}

impl ModelUse {
    /// What compiles grammars for the model. It may take a while: not on a thread that serves others.
    pub fn compiler(&self) -> ApiResult<Arc<GrammarCompiler>> {
        let tokenizer = &self.loaded.tokenizer;
        let mut known = lock(&self.model.compiler);
        if let Some((of, compiler)) = &*known
            && Arc::ptr_eq(of, tokenizer)
        {
            return Ok(compiler.clone());
        }
        let compiler = GrammarCompiler::new(tokenizer, self.loaded.vocab_size, &self.loaded.eos_token_ids)
            .map_err(|e| ApiError::bad_request(format!("outputs of this model cannot follow a grammar: {e}")))?;
        let compiler = Arc::new(compiler);
        *known = Some((tokenizer.clone(), compiler.clone()));
        Ok(compiler)
    }
}

impl Deref for ModelUse {
    type Target = LoadedModel;

    fn deref(&self) -> &LoadedModel {
        &self.loaded
    }
}

impl User {
    fn new(model: Arc<Model>) -> User {
        lock(&model.usage).num_users += 1;
        User(model)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut usage = lock(&self.0.usage);
        usage.num_users -= 1;
        usage.last_used = Instant::now();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
