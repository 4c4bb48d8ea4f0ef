//! What the app, the command line and the server hold: submit, abort, load, watch.
//!
//! Guarantees: no call but [`EngineHandle::shutdown`] and [`EngineHandle::wait_for_model`] waits for the engine; a request
//! is checked in full before it is queued; the engine thread ends when the last handle is dropped. It does not attempt
//! templates or encoding: text becomes tokens on the caller's thread, with the loaded model's tokenizer.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use kvasir::engine::{EngineHandle, options::FakeOptions};
//! use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, SamplingParams, StopRules};
//! use kvasir::tokenizer::AddSpecial;
//!
//! let engine = EngineHandle::start_fake(FakeOptions::small());
//! let model = engine.model().ok_or("no model")?;
//! let run = engine.submit(GenerateRequest {
//!     owner: OwnerTag { id: 1, label: "example".into() },
//!     prompt: model.tokenizer.encode("Hello", AddSpecial::Yes)?,
//!     sampling: SamplingParams::greedy(),
//!     stop: StopRules::max_tokens(16),
//!     decoding: Decoding::ONE,
//!     priority: 0,
//!     cache_salt: 0,
//!     adapter: 0,
//! })?;
//! while let Some(event) = run.recv() {
//!     if let EngineEvent::Text { delta, .. } = event {
//!         print!("{delta}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod prefixes;
mod remote;
mod run;
mod totals;

pub use super::loras::{LoraError, LoraInfo, LoraTable};
pub use run::Run;
pub use totals::StepTotals;

use super::admission::{PinnedRoom, check_request};
use super::mailbox::{self, EventSink};
use super::options::{EngineOptions, FakeOptions, LoadRequest, ModelSource};
use super::thread::{self, LoadCommand, Loader};
use crate::ids::{RequestId, TokenId};
use crate::protocol::{Decoding, EngineCommand, GenerateRequest, InvalidParam, OutputRules, Pooling, RunError};
use crate::telemetry::{Limits, Telemetry};
use crate::tokenizer::{ChatTemplate, Tokenizer};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait for the engine thread.
const COMMAND_QUEUE: usize = 4096;
/// Bounds of the telemetry ring: about 40 MB at most.
const TELEMETRY_LIMITS: Limits = Limits { max_steps: 20_000, max_deltas: 400_000 };

pub(super) type Command = EngineCommand<LoadCommand, EventSink>;
type Waker = Arc<dyn Fn() + Send + Sync>;

/// The adapter a model runs on, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AdapterSummary {
    pub name: String,
    pub driver: String,
    pub backend: String,
    /// A software rasteriser: the engine shares the cores with the window.
    pub is_cpu: bool,
}

/// Sampling defaults that the model's files suggest; `None` where they say nothing.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// The loaded model: facts for display and what a caller needs to make tokens of text.
pub struct LoadedModel {
    pub name: String,
    /// File or folder; `None` for the simulation.
    pub path: Option<PathBuf>,
    /// Family as its files name it.
    pub arch: String,
    /// Storage type of most weights.
    pub quant: String,
    pub num_params: u64,
    pub file_bytes: u64,
    /// Longest prompt and output together, in tokens.
    pub max_model_len: u32,
    pub vocab_size: u32,
    /// Values of an embedding.
    pub hidden_size: u32,
    /// How the model's files want embeddings pooled; the error says what of it is not supported.
    pub pooling: Result<Pooling, String>,
    /// Any of these ends the output.
    pub eos_token_ids: Vec<u32>,
    pub tokenizer: Arc<Tokenizer>,
    /// `None` when the model has none, or one that cannot be used (see `template_fault`).
    pub template: Option<Arc<ChatTemplate>>,
    pub template_fault: Option<String>,
    pub adapter: AdapterSummary,
    pub block_size: u32,
    /// The null block included.
    pub num_blocks: u32,
    pub kv_bytes_per_block: u64,
    /// Some layers see a sliding window only, and give back what slid out of it.
    pub has_windows: bool,
    /// False for a checkpoint that gives hidden states only.
    pub has_head: bool,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub defaults: GenerationDefaults,
    pub loras: LoraTable,
}

impl LoadedModel {
    /// Refuses what draws tokens where there is no output head.
    pub fn check_head(&self) -> Result<(), RunError> {
        if self.has_head { Ok(()) } else { Err(RunError::NoHead) }
    }
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoadedModel({})", self.name)
    }
}

/// What kind of failure ended a load: it decides the exit code of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The model is not there, broken or of a kind that is not supported.
    Model,
    DoesNotFit,
    NoAdapter,
    /// The download failed.
    Download,
    /// Anything else.
    Engine,
}

/// Where the engine stands.
#[derive(Clone, Debug)]
pub enum EngineStatus {
    NoModel,
    /// `total` is 0 while it is not known.
    Loading {
        phase: String,
        done: u64,
        total: u64,
    },
    Ready(Arc<LoadedModel>),
    /// No model is loaded; `fix` says how to mend it.
    Failed {
        kind: FailureKind,
        message: String,
        fix: Option<String>,
    },
}

/// What the handles, the engine thread and the loader share. Locks are held for a copy, never for work.
pub(super) struct Shared {
    status: Mutex<EngineStatus>,
    status_changed: Condvar,
    /// The model that requests are checked against; also there while a lost device is rebuilt.
    model: Mutex<Option<Arc<LoadedModel>>>,
    pub telemetry: Arc<Telemetry>,
    pinned: Mutex<Arc<PinnedRoom>>,
    waker: Mutex<Option<Waker>>,
    latest_load: AtomicU64,
    /// Loads before this one are to end.
    cancelled_before: AtomicU64,
    /// Requests queued or waiting; kept by the engine thread and by `submit`.
    pub num_waiting: AtomicU32,
    max_queue: AtomicU32,
    pub is_paused: AtomicBool,
    totals: Mutex<StepTotals>,
}

impl Shared {
    fn new(max_queue: u32) -> Self {
        Shared {
            status: Mutex::new(EngineStatus::NoModel),
            status_changed: Condvar::new(),
            model: Mutex::new(None),
            telemetry: Telemetry::new(TELEMETRY_LIMITS),
            pinned: Mutex::default(),
            waker: Mutex::new(None),
            latest_load: AtomicU64::new(0),
            cancelled_before: AtomicU64::new(0),
            num_waiting: AtomicU32::new(0),
            max_queue: AtomicU32::new(max_queue),
            is_paused: AtomicBool::new(false),
            totals: Mutex::new(StepTotals::default()),
        }
    }

    pub fn add_totals(&self, add: impl FnOnce(&mut StepTotals)) {
        add(&mut lock(&self.totals));
    }

    pub fn set_status(&self, status: EngineStatus) {
        *lock(&self.status) = status;
        self.status_changed.notify_all();
        self.wake();
    }

    /// Sets the status where a load is under way.
    pub fn end_loading(&self, ended: EngineStatus) {
        let mut status = lock(&self.status);
        if matches!(*status, EngineStatus::Loading { .. }) {
            *status = ended;
            drop(status);
            self.status_changed.notify_all();
            self.wake();
        }
    }

    pub fn set_model(&self, model: Option<Arc<LoadedModel>>, max_queue: u32) {
        *lock(&self.model) = model;
        self.set_pinned(PinnedRoom::default());
        self.max_queue.store(max_queue, Ordering::Relaxed);
    }

    pub fn model(&self) -> Option<Arc<LoadedModel>> {
        lock(&self.model).clone()
    }

    pub fn set_pinned(&self, pinned: PinnedRoom) {
        *lock(&self.pinned) = Arc::new(pinned);
    }

    pub fn pinned(&self) -> Arc<PinnedRoom> {
        lock(&self.pinned).clone()
    }

    /// Tells whoever watches that something changed.
    pub fn wake(&self) {
        let waker = lock(&self.waker).clone();
        if let Some(waker) = waker {
            waker();
        }
    }

    /// True when the load of this number is to end.
    pub fn is_load_cancelled(&self, load: u64) -> bool {
        load < self.cancelled_before.load(Ordering::Acquire)
    }

    /// True when no load was asked for after the one of this number.
    pub fn is_latest_load(&self, load: u64) -> bool {
        load == self.latest_load.load(Ordering::Acquire)
    }

    pub fn is_shutting_down(&self) -> bool {
        self.cancelled_before.load(Ordering::Acquire) == u64::MAX
    }

    fn cancel_loads_before(&self, load: u64) {
        self.cancelled_before.fetch_max(load, Ordering::AcqRel);
    }
}

/// The engine as everyone else sees it. Clones share one engine.
#[derive(Clone)]
pub struct EngineHandle {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    commands: SyncSender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    options: EngineOptions,
    next_id: AtomicU64,
    /// The server that runs are sent to.
    remote_host: Option<String>,
}

impl EngineHandle {
    /// Starts the engine thread, with no model yet. `options` are kept for callers to load with.
    pub fn start(options: EngineOptions) -> EngineHandle {
        Self::start_with(options, Box::new(super::loader::load))
    }

    /// Starts the real engine on the simulation, ready for requests. No GPU and no file is touched.
    pub fn start_fake(fake: FakeOptions) -> EngineHandle {
        let options = super::fake::engine_options(&fake);
        let engine = Self::start_with(options.clone(), super::fake::loader(fake));
        engine.load(LoadRequest { source: ModelSource::Default, options });
        engine.wait_for_model(|_| {}).expect("the simulation loads without files or devices");
        engine
    }

    pub(super) fn start_with(options: EngineOptions, loader: Loader) -> EngineHandle {
        let shared = Arc::new(Shared::new(options.max_queue));
        let (commands, queue) = sync_channel(COMMAND_QUEUE);
        let thread = thread::spawn(shared.clone(), commands.clone(), queue, loader);
        let (thread, next_id) = (Mutex::new(Some(thread)), AtomicU64::new(1));
        EngineHandle { inner: Arc::new(Inner { shared, commands, thread, options, next_id, remote_host: None }) }
    }

    /// Checks a request in full and queues it. A request without a seed draws one here. Choice c of the run is request
    /// `id + c` in telemetry.
    pub fn submit(&self, request: GenerateRequest) -> Result<Run, RunError> {
        self.submit_with(request, OutputRules::default())
    }

    /// As [`Self::submit`], with rules for the output. A beam search takes no constraint.
    pub fn submit_with(&self, request: GenerateRequest, rules: OutputRules) -> Result<Run, RunError> {
        if rules.constraint.is_some() && matches!(request.decoding, Decoding::Beam(_)) {
            let message = "cannot be constrained by a grammar".into();
            return Err(InvalidParam { field: "use_beam_search", message }.into());
        }
        if let Some(model) = self.model().filter(|_| rules.pooling.is_none()) {
            model.check_head()?;
        }
        self.generate(request, 0, |id, mut request, events| {
            if rules.pooling == Some(Pooling::Mean) || rules.prompt_logprobs.is_some() {
                // Every position is to be computed: nobody else has this salt.
                request.cache_salt = u64::MAX - id.0;
            }
            EngineCommand::Submit { id, request, rules, events }
        })
    }

    /// Queues a run whose prompt is the first `keep_tokens` tokens (prompt and output) of `parent`, followed by the
    /// request's own, which may be empty. It gets what [`Self::submit`] of the same tokens would get, sooner: while the
    /// parent runs the fork shares its blocks, and copies the one in which they go on differently. The parent may also
    /// wait, or have ended a short while ago (the engine keeps the tokens of the last 256): then the fork starts from what
    /// the prefix cache has of the same tokens, and computes the rest. Salt is the parent's.
    ///
    /// A parent that is not known, or has fewer tokens, is the run's terminal event.
    pub fn fork(&self, parent: RequestId, keep_tokens: u32, request: GenerateRequest) -> Result<Run, RunError> {
        if let Some(model) = self.model() {
            model.check_head()?;
        }
        self.generate(request, keep_tokens, |id, request, events| EngineCommand::Fork {
            id,
            parent,
            keep_tokens,
            request,
            events,
        })
    }

    fn generate(
        &self,
        mut request: GenerateRequest,
        keep_tokens: u32,
        command: impl FnOnce(RequestId, Box<GenerateRequest>, EventSink) -> Command,
    ) -> Result<Run, RunError> {
        let model = self.model().ok_or(RunError::NoModel)?;
        check_request(&request, keep_tokens, &model, &self.inner.shared.pinned())?;
        let num_sequences = u64::from(request.decoding.num_sequences().max(1));
        let id = RequestId(self.inner.next_id.fetch_add(num_sequences, Ordering::Relaxed));
        if request.sampling.seed.is_none() {
            request.sampling.seed = Some(self.draw_seed(id));
        }
        self.start_run(id, |events| command(id, Box::new(request), events))
    }

    /// Queues what has a run of its own.
    fn start_run(&self, id: RequestId, command: impl FnOnce(EventSink) -> Command) -> Result<Run, RunError> {
        self.reserve_queue_place()?;
        let (sink, stream) = mailbox::channel();
        let limit = self.inner.shared.max_queue.load(Ordering::Relaxed);
        match self.inner.commands.try_send(command(sink)) {
            Ok(()) => Ok(Run::new(id, stream, self.inner.commands.clone())),
            Err(error) => {
                self.inner.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
                Err(match error {
                    TrySendError::Full(_) => RunError::QueueFull { limit },
                    TrySendError::Disconnected(_) => RunError::ShutDown,
                })
            }
        }
    }

    fn reserve_queue_place(&self) -> Result<(), RunError> {
        let shared = &self.inner.shared;
        let limit = shared.max_queue.load(Ordering::Relaxed);
        shared
            .num_waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1))
            .map(|_| ())
            .map_err(|_| RunError::QueueFull { limit })
    }

    /// The seed of a request that brings none: from `options.seed` where given, so that a session can be repeated.
    fn draw_seed(&self, id: RequestId) -> u64 {
        use std::hash::{BuildHasher, Hasher};
        match self.inner.options.seed {
            Some(seed) => seed.wrapping_add(id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            None => {
                // std's hasher is keyed from the system's randomness.
                let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
                hasher.write_u64(id.0);
                hasher.finish()
            }
        }
    }

    /// Ends a run: it finishes with `Aborted` and its blocks are free within one step.
    pub fn abort(&self, id: RequestId) {
        self.send(EngineCommand::Abort { id });
    }

    pub fn status(&self) -> EngineStatus {
        lock(&self.inner.shared.status).clone()
    }

    /// The model that a request submitted now would run on.
    pub fn model(&self) -> Option<Arc<LoadedModel>> {
        self.inner.shared.model()
    }

    /// The options the engine was started with.
    pub fn options(&self) -> EngineOptions {
        self.inner.options.clone()
    }

    /// Loads a model, ending the load under way and the runs on the model before. Watch [`Self::status`].
    pub fn load(&self, request: LoadRequest) {
        let shared = &self.inner.shared;
        let load = shared.latest_load.fetch_add(1, Ordering::AcqRel) + 1;
        shared.cancel_loads_before(load);
        shared.set_status(EngineStatus::Loading { phase: "Preparing".into(), done: 0, total: 0 });
        self.send(EngineCommand::Load(LoadCommand::Start { load, request: Box::new(request) }));
    }

    /// Ends the load under way; the status is [`EngineStatus::NoModel`] at once, the loader ends at its next report.
    pub fn cancel_load(&self) {
        let shared = &self.inner.shared;
        shared.cancel_loads_before(shared.latest_load.load(Ordering::Acquire) + 1);
        shared.end_loading(EngineStatus::NoModel);
    }

    /// Frees the model and the GPU memory. Runs on it end with an error.
    pub fn unload(&self) {
        self.cancel_load();
        self.send(EngineCommand::Unload);
    }

    /// Stops stepping; requests and their blocks stay.
    pub fn pause(&self) {
        self.send(EngineCommand::Pause);
    }

    pub fn resume(&self) {
        self.send(EngineCommand::Resume);
    }

    pub fn is_paused(&self) -> bool {
        self.inner.shared.is_paused.load(Ordering::Relaxed)
    }

    pub fn telemetry(&self) -> Arc<Telemetry> {
        self.inner.shared.telemetry.clone()
    }

    /// Counters over all steps since the engine started.
    pub fn step_totals(&self) -> StepTotals {
        *lock(&self.inner.shared.totals)
    }

    /// Called at most once per step when events, telemetry or status changed, on the engine's or loader's thread: it must
    /// return at once and must not hold a handle, which would keep the engine alive.
    pub fn set_waker(&self, waker: Box<dyn Fn() + Send + Sync>) {
        *lock(&self.inner.shared.waker) = Some(Arc::from(waker));
    }

    /// Waits for the load under way, reporting each change of status.
    pub fn wait_for_model(&self, mut on_change: impl FnMut(&EngineStatus)) -> Result<Arc<LoadedModel>, EngineStatus> {
        let shared = &self.inner.shared;
        let mut status = lock(&shared.status);
        loop {
            let now = status.clone();
            drop(status);
            on_change(&now);
            match now {
                EngineStatus::Ready(model) => return Ok(model),
                EngineStatus::Loading { .. } => {}
                ended => return Err(ended),
            }
            status = lock(&shared.status);
            if matches!(*status, EngineStatus::Loading { .. }) {
                let wait = shared.status_changed.wait_timeout(status, Duration::from_millis(200));
                status = wait.unwrap_or_else(|e| e.into_inner()).0;
            }
        }
    }

    /// Waits until nothing runs or waits, at most this long; true when idle.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let snapshot = self.telemetry().snapshot();
            let is_idle = self.inner.shared.num_waiting.load(Ordering::Relaxed) == 0
                && snapshot.requests.iter().all(|r| r.finish.is_some());
            if is_idle || Instant::now() >= deadline {
                return is_idle;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends all runs and the engine thread, and waits for it. Other clones get [`RunError::ShutDown`] from then on.
    pub fn shutdown(self) {
        self.inner.stop();
    }

    pub(super) fn send(&self, command: Command) {
        // The thread drains the queue at every step; it is gone only after `shutdown`.
        let _ = self.inner.commands.send(command);
    }
}

impl Inner {
    fn stop(&self) {
        self.shared.cancel_loads_before(u64::MAX);
        let _ = self.commands.send(EngineCommand::Shutdown);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of the thread was reported by the panic hook; its runs were ended by their sinks.
            let _ = thread.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(super) fn check_tokens(tokens: &[TokenId], vocab: u32) -> Result<(), RunError> {
    match tokens.iter().find(|&&t| t >= vocab) {
        Some(&token) => Err(RunError::TokenOutOfRange { token, vocab }),
        None => Ok(()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
