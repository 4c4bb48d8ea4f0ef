//! The engine thread: drains commands, steps while there is work, sleeps on the queue when there is none.
//!
//! Guarantees: a panic inside a step takes the device-lost path: scheduler, cache and executor are rebuilt and every live
//! request goes on from its tokens; repeated faults end the requests, never the process; a panic while a model is made
//! ready is a failed load; when the thread ends, every run has its terminal event.

use super::branches::Start;
use super::core::{EngineCore, StepOutcome};
use super::disk::Fetched;
use super::handle::{Command, EngineStatus, Shared};
use super::loader::{LoadFailure, Loaded, Progress};
use super::loras::{self, LoraCommand};
use super::mailbox::EventSink;
use super::options::LoadRequest;
use crate::ids::RequestId;
use crate::protocol::{EngineCommand, EngineEvent, GenerateRequest, OutputRules, PrefixCommand, RunError};
use crate::telemetry::prefixes::PrefixChange;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Loads a model; the callback reports progress and answers false to cancel.
pub(super) type Loader =
    Box<dyn Fn(&LoadRequest, &mut dyn FnMut(Progress<'_>) -> bool) -> Result<Loaded, LoadFailure> + Send + Sync>;

/// Status changes of a load are shown at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(30);
/// Recoveries in a row, without a finished step between, before all requests are ended.
const MAX_RECOVERIES: u32 = 3;

/// Asks for a load, or brings its result.
pub(super) enum LoadCommand {
    Start {
        load: u64,
        request: Box<LoadRequest>,
    },
    Done {
        load: u64,
        result: Box<Result<Loaded, LoadFailure>>,
        max_queue: u32,
    },
    /// Blocks of the prefix cache were read from disk.
    Fetched(Fetched),
    Lora(LoraCommand),
}

impl std::fmt::Debug for LoadCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LoadCommand::Start { load, .. } => write!(f, "Start({load})"),
            LoadCommand::Done { load, .. } => write!(f, "Done({load})"),
            LoadCommand::Fetched(fetched) => write!(f, "Fetched({})", fetched.ticket),
            LoadCommand::Lora(_) => write!(f, "Lora"),
        }
    }
}

pub(super) fn spawn(
    shared: Arc<Shared>,
    commands: SyncSender<Command>,
    queue: Receiver<Command>,
    loader: Loader,
) -> JoinHandle<()> {
    let thread = EngineThread {
        shared,
        commands,
        queue,
        loader: Arc::from(loader),
        loading: None,
        core: None,
        is_idle: false,
        num_recoveries: 0,
        started: Instant::now(),
    };
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || thread.run())
        .expect("the system can start one more thread")
}

/// Loads a model, reporting progress.
type LoadFn = dyn Fn(&LoadRequest, &mut dyn FnMut(Progress<'_>) -> bool) -> Result<Loaded, LoadFailure> + Send + Sync;

struct EngineThread {
    shared: Arc<Shared>,
    commands: SyncSender<Command>,
    queue: Receiver<Command>,
    loader: Arc<LoadFn>,
    loading: Option<JoinHandle<()>>,
    core: Option<EngineCore>,
    /// The idle work was done since the last step.
    is_idle: bool,
    /// Since the last step that ended well.
    num_recoveries: u32,
    started: Instant,
}

impl EngineThread {
    fn run(mut self) {
        while let Some(command) = self.next_command() {
            match command {
                EngineCommand::Shutdown => break,
                command => {
                    // The scheduler asserts its books also when requests come and go between steps.
                    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| self.handle(command))) {
                        self.recover(format!("a command failed: {}", panic_text(&*panic)));
                    }
                }
            }
        }
        self.drop_model(&RunError::ShutDown);
        self.shared.set_status(EngineStatus::NoModel);
        let EngineThread { queue, loading, .. } = self;
        // Runs that still wait in the queue are ended by their sinks, and the loader's last word is not waited for.
        drop(queue);
        if let Some(loading) = loading {
            let _ = loading.join();
        }
    }

    /// Steps until a command arrives; sleeps while there is nothing to do.
    fn next_command(&mut self) -> Option<Command> {
        loop {
            if self.has_work() {
                match self.queue.try_recv() {
                    Ok(command) => return Some(command),
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return None,
                    Err(std::sync::mpsc::TryRecvError::Empty) => self.step(),
                }
            } else {
                self.fall_idle();
                match self.queue.try_recv() {
                    Ok(command) => return Some(command),
                    Err(std::sync::mpsc::TryRecvError::Empty) if self.save_some() => {}
                    Err(_) => return self.queue.recv().ok(),
                }
            }
        }
    }

    fn has_work(&self) -> bool {
        !self.shared.is_paused.load(Ordering::Relaxed) && self.core.as_ref().is_some_and(EngineCore::has_work)
    }

    fn handle(&mut self, command: Command) {
        match command {
            EngineCommand::Submit { id, request, rules, events } => {
                self.start_run(id, (*request, rules), Start::Prompt, events);
            }
            EngineCommand::Fork { id, parent, keep_tokens, request, events } => {
                let request = (*request, OutputRules::default());
                self.start_run(id, request, Start::Fork { parent, keep_tokens }, events);
            }
            EngineCommand::Abort { id } => {
                if let Some(core) = &mut self.core {
                    core.abort(id);
                    // The blocks are free now; a snapshot shows it even when no step follows.
                    self.is_idle = false;
                }
            }
            EngineCommand::Prefix(command) => self.prefix(command),
            EngineCommand::Load(LoadCommand::Start { load, request }) => self.start_load(load, *request),
            EngineCommand::Load(LoadCommand::Done { load, result, max_queue }) => {
                self.finish_load(load, *result, max_queue);
            }
            EngineCommand::Load(LoadCommand::Fetched(fetched)) => {
                if let Some(core) = &mut self.core {
                    core.fetched(fetched);
                    // A snapshot shows what disk has; what it could not take is offered again.
                    self.is_idle = false;
                }
            }
            EngineCommand::Load(LoadCommand::Lora(command)) => loras::run(self.core.as_mut(), command),
            EngineCommand::Unload => {
                self.drop_model(&RunError::NoModel);
                self.shared.set_status(EngineStatus::NoModel);
            }
            EngineCommand::Pause => self.set_paused(true),
            EngineCommand::Resume => self.set_paused(false),
            EngineCommand::CorruptBlock { block } => {
                if let Some(core) = &mut self.core {
                    core.corrupt_block(block);
                }
            }
            EngineCommand::Shutdown => {}
        }
    }

    fn start_run(&mut self, id: RequestId, request: (GenerateRequest, OutputRules), start: Start, events: EventSink) {
        match &mut self.core {
            Some(core) => core.submit(id, request, start, events),
            None => {
                self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
                events.push(EngineEvent::Failed { error: RunError::NoModel });
                self.shared.wake();
            }
        }
    }

    fn prefix(&mut self, command: PrefixCommand<EventSink>) {
        match (&mut self.core, command) {
            (Some(core), command) => {
                core.prefix(command);
                // A snapshot shows it even when no step follows.
                self.is_idle = false;
            }
            (None, PrefixCommand::Pin { events, .. } | PrefixCommand::Keep { events, .. }) => {
                self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
                events.push(EngineEvent::Failed { error: RunError::NoModel });
                self.shared.wake();
            }
            (None, _) => {}
        }
    }

    fn set_paused(&mut self, is_paused: bool) {
        self.shared.is_paused.store(is_paused, Ordering::Relaxed);
        self.is_idle = false;
        self.shared.wake();
    }

    fn drop_model(&mut self, error: &RunError) {
        self.shared.set_model(None, 0);
        if let Some(mut core) = self.core.take() {
            core.fail_all(error);
            core.save_all();
            core.publish_snapshot();
            self.shared.telemetry.prefix_feed().tell(vec![PrefixChange::Cleared]);
        }
    }

    fn start_load(&mut self, load: u64, request: LoadRequest) {
        self.drop_model(&RunError::NoModel);
        let (shared, commands, loader) = (self.shared.clone(), self.commands.clone(), self.loader.clone());
        let work = move || {
            let mut watch = LoadWatch { shared: &shared, load, phase: String::new(), shown: None };
            let result = guarded("loading failed", || loader(&request, &mut |progress| watch.report(progress)));
            let max_queue = request.options.max_queue;
            // The engine is gone only at shutdown; what was loaded is dropped then.
            let _ = commands.send(EngineCommand::Load(LoadCommand::Done { load, result: Box::new(result), max_queue }));
        };
        match std::thread::Builder::new().name("loader".into()).spawn(work) {
            Ok(thread) => self.loading = Some(thread),
            Err(error) => {
                let failure = LoadFailure::engine(format!("no thread for loading: {error}"));
                self.shared.set_status(failure.into_status());
            }
        }
    }

    fn finish_load(&mut self, load: u64, result: Result<Loaded, LoadFailure>, max_queue: u32) {
        if !self.shared.is_latest_load(load) {
            return;
        }
        if self.shared.is_load_cancelled(load) {
            self.shared.set_status(EngineStatus::NoModel);
            return;
        }
        match result.and_then(|loaded| guarded("loading failed", || self.build_core(loaded))) {
            Ok(core) => {
                let model = core.model.clone();
                self.core = Some(core);
                self.num_recoveries = 0;
                self.is_idle = false;
                self.shared.set_model(Some(model.clone()), max_queue);
                self.shared.set_status(EngineStatus::Ready(model));
            }
            Err(failure) => self.shared.set_status(failure.into_status()),
        }
    }

    fn build_core(&self, mut loaded: Loaded) -> Result<EngineCore, LoadFailure> {
        let commands = self.commands.clone();
        let deliver = move |fetched| {
            // The engine is gone only at shutdown; nobody waits for the blocks then.
            let _ = commands.send(EngineCommand::Load(LoadCommand::Fetched(fetched)));
        };
        if let Some(Err(fault)) = loaded.disk.as_mut().map(|disk| disk.start(deliver)) {
            return Err(LoadFailure::engine(fault.to_string()));
        }
        Ok(EngineCore::new(loaded, self.shared.clone(), self.started))
    }

    fn step(&mut self) {
        let Some(core) = &mut self.core else { return };
        self.is_idle = false;
        let fault = match std::panic::catch_unwind(AssertUnwindSafe(|| core.step())) {
            Ok(StepOutcome::Done) => {
                self.num_recoveries = 0;
                return;
            }
            Ok(StepOutcome::Retry) => return,
            Ok(StepOutcome::Lost(reason)) => reason,
            Err(panic) => format!("a step failed: {}", panic_text(&*panic)),
        };
        self.recover(fault);
    }

    /// Rebuilds everything but the requests.
    fn recover(&mut self, reason: String) {
        tracing::error!("the engine recovers: {reason}");
        self.num_recoveries += 1;
        let Some(core) = &mut self.core else {
            // Whoever waits for the load must hear that it comes to nothing.
            self.shared.end_loading(LoadFailure::engine(reason).into_status());
            return;
        };
        if self.num_recoveries > MAX_RECOVERIES {
            core.fail_all(&RunError::Engine(reason.clone()));
        }
        self.shared.set_status(EngineStatus::Loading { phase: "Recovering the GPU".into(), done: 0, total: 0 });
        let shared = self.shared.clone();
        let rebuilt = guarded("recovery failed", || core.rebuild(&|| !shared.is_shutting_down()));
        match rebuilt {
            Ok(()) => {
                if let Some(model) = self.shared.model() {
                    self.shared.set_status(EngineStatus::Ready(model));
                }
            }
            Err(failure) => {
                self.drop_model(&RunError::Engine(reason));
                self.shared.set_status(failure.into_status());
            }
        }
    }

    /// Keeps some of what is cached. False when there is nothing left to keep.
    fn save_some(&mut self) -> bool {
        let Some(core) = &mut self.core else { return false };
        match std::panic::catch_unwind(AssertUnwindSafe(|| core.save_some())) {
            Ok(has_saved) => has_saved,
            Err(panic) => {
                self.recover(format!("saving the prefix cache failed: {}", panic_text(&*panic)));
                false
            }
        }
    }

    /// Once per idle spell: checks the books and shows the final state.
    fn fall_idle(&mut self) {
        if std::mem::replace(&mut self.is_idle, true) {
            return;
        }
        let Some(core) = &mut self.core else { return };
        let checked = std::panic::catch_unwind(AssertUnwindSafe(|| core.on_idle()));
        let fault = match checked {
            Ok(Ok(())) => None,
            Ok(Err(fault)) => Some(fault),
            Err(panic) => Some(panic_text(&*panic)),
        };
        if let Some(fault) = fault {
            self.recover(format!("an invariant of the cache does not hold: {fault}"));
        }
        self.shared.wake();
    }
}

/// Shows the progress of one load as the engine's status.
struct LoadWatch<'a> {
    shared: &'a Shared,
    load: u64,
    phase: String,
    shown: Option<Instant>,
}

impl LoadWatch<'_> {
    fn report(&mut self, progress: Progress<'_>) -> bool {
        if self.shared.is_load_cancelled(self.load) {
            return false;
        }
        let is_new = self.phase != progress.phase || progress.done == progress.total;
        if is_new || self.shown.is_none_or(|t| t.elapsed() >= PROGRESS_INTERVAL) {
            self.phase = progress.phase.to_string();
            self.shown = Some(Instant::now());
            self.shared.set_status(EngineStatus::Loading {
                phase: self.phase.clone(),
                done: progress.done,
                total: progress.total,
            });
        }
        true
    }
}

/// Does the work; a panic in it is a failure with the panic's text.
fn guarded<T>(what: &str, work: impl FnOnce() -> Result<T, LoadFailure>) -> Result<T, LoadFailure> {
    std::panic::catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(LoadFailure::engine(format!("{what}: {}", panic_text(&*panic)))))
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| s.to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
