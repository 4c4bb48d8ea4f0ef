//! Everything the views read. Plain data: no egui, no disk, no engine thread behind it.
//!
//! Guarantees: a run belongs to its message and lives here, whatever is on screen; views get `&AppState` and answer with
//! commands. Changes go through [`super::logic::AppCore`].

use super::chat::{Chat, ChatId, Message, MessageId};
use super::format;
use super::prompt::DropTurns;
use super::store::StoreHealth;
use super::theme::OwnerPalette;
use crate::engine::handle::{EngineStatus, LoadedModel};
use crate::engine::options::{EngineOptions, KvCacheDtype, PreemptionMode};
use crate::ids::RequestId;
use crate::telemetry::{EngineSnapshot, QueuePolicy, VictimPolicy};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

/// At most this many chats side by side.
pub const MAX_PANES: usize = 4;

/// Time as the app passes it in: views and logic read no clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Seconds since the app started.
    pub seconds: f64,
    /// Milliseconds since 1970 (UTC).
    pub unix_ms: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workspace {
    Chat,
    Models,
    Inspect,
}

impl Workspace {
    pub const ALL: [Workspace; 3] = [Workspace::Chat, Workspace::Models, Workspace::Inspect];

    pub fn name(self) -> &'static str {
        match self {
            Workspace::Chat => "Chat",
            Workspace::Models => "Models",
            Workspace::Inspect => "Inspect",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DockTab {
    RunSettings,
    Live,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThemeChoice {
    Dark,
    Light,
    /// As the system has it.
    Auto,
}

impl ThemeChoice {
    pub const WORDS: [&'static str; 3] = ["dark", "light", "auto"];

    pub fn word(self) -> &'static str {
        match self {
            ThemeChoice::Dark => "dark",
            ThemeChoice::Light => "light",
            ThemeChoice::Auto => "auto",
        }
    }

    pub fn from_word(word: &str) -> Option<Self> {
        [ThemeChoice::Dark, ThemeChoice::Light, ThemeChoice::Auto].into_iter().find(|t| t.word() == word)
    }
}

/// What an answer under way is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Being templated and encoded.
    Preparing,
    /// Waits for a place in the batch.
    Queued,
    Reading {
        computed: u32,
        total: u32,
    },
    Writing,
    /// Paused for memory; it resumes by itself.
    Preempted {
        kept_tokens: u32,
    },
}

/// An answer under way, as the views see it.
#[derive(Clone, Debug)]
pub struct ActiveRun {
    pub chat: ChatId,
    pub phase: Phase,
    /// Set once submitted.
    pub request: Option<RequestId>,
    /// The user asked for the end; the engine has not answered yet.
    pub is_stopping: bool,
    pub rate: RateMeter,
}

/// Tokens per second over the last two seconds.
#[derive(Clone, Debug, Default)]
pub struct RateMeter {
    samples: VecDeque<(f64, u64)>, // (seconds, tokens so far)
}

impl RateMeter {
    const WINDOW_S: f64 = 2.0;
    /// Samples closer than this share one entry, so that the meter is bounded.
    const GRAIN_S: f64 = 0.02;

    pub fn record(&mut self, now_s: f64, total_tokens: u64) {
        let has_several = self.samples.len() > 1;
        match self.samples.back_mut() {
            Some(last) if has_several && now_s - last.0 < Self::GRAIN_S => last.1 = total_tokens,
            _ => self.samples.push_back((now_s, total_tokens)),
        }
        while self.samples.len() > 2 && now_s - self.samples[1].0 >= Self::WINDOW_S {
            self.samples.pop_front();
        }
    }

    /// `None` until two samples are there.
    pub fn per_second(&self, now_s: f64) -> Option<f32> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        // A run that stalls shows its falling speed, not its last one.
        let until = if now_s - last.0 > Self::WINDOW_S { now_s } else { last.0 };
        let span = until - first.0;
        (span > 0.0 && last.1 > first.1).then(|| ((last.1 - first.1) as f64 / span) as f32)
    }
}

/// A turn that was not sent because it does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextFull {
    /// The message that would be answered.
    pub turn: MessageId,
    pub needed: u32,
    pub limit: u32,
    pub drop: Option<DropTurns>,
}

/// Tokens that the next turn of a chat would send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextCount {
    /// What was counted; a count of an older revision is shown until the new one is there.
    pub revision: u64,
    pub tokens: u32,
}

/// A message being edited in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    pub chat: ChatId,
    pub message: MessageId,
    pub text: String,
}

/// A deleted chat that can still come back.
#[derive(Clone, Debug)]
pub struct Deleted {
    pub chat: Box<Chat>,
}

/// The command palette while open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PaletteState {
    pub query: String,
    pub selected: usize,
}

/// Chats side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panes {
    /// One to [`MAX_PANES`], no chat twice.
    pub chats: Vec<ChatId>,
    pub focused: usize,
    /// What is typed goes to all panes.
    pub send_to_all: bool,
}

impl Panes {
    pub fn focused_chat(&self) -> ChatId {
        self.chats[self.focused.min(self.chats.len() - 1)]
    }
}

/// A model on this computer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEntry {
    pub name: String,
    pub path: PathBuf,
    pub arch: String,
    pub quant: String,
    pub params: u64,
    pub bytes: u64,
    pub context: u32,
    /// Where it was found, in words: "Hugging Face cache".
    pub origin: String,
    /// Why it cannot be loaded.
    pub problem: Option<String>,
}

/// What the user chose for the next load; `None` leaves what the app was started with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineChoices {
    pub queue: Option<QueuePolicy>,
    pub victim: Option<VictimPolicy>,
    pub preemption: Option<PreemptionMode>,
    pub kv_cache_dtype: Option<KvCacheDtype>,
}

impl EngineChoices {
    /// The options with the choices put in.
    pub fn apply(self, options: EngineOptions) -> EngineOptions {
        EngineOptions {
            scheduling_policy: self.queue.unwrap_or(options.scheduling_policy),
            victim_policy: self.victim.unwrap_or(options.victim_policy),
            preemption: self.preemption.unwrap_or(options.preemption),
            kv_cache_dtype: self.kv_cache_dtype.unwrap_or(options.kv_cache_dtype),
            ..options
        }
    }
}

/// The list of models on this computer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelList {
    pub is_scanning: bool,
    pub has_scanned: bool,
    pub entries: Vec<ModelEntry>,
    /// Folders that were looked at.
    pub folders: Vec<PathBuf>,
    /// Why the scan failed, or a file could not be opened.
    pub error: Option<String>,
}

/// What has the keyboard after the next frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FocusRequest {
    Composer,
    Palette,
}

/// The state of the app.
pub struct AppState {
    pub chats: BTreeMap<ChatId, Chat>,
    /// All chats, the one used last first.
    pub order: Vec<ChatId>,
    pub runs: BTreeMap<MessageId, ActiveRun>,
    pub panes: Panes,
    pub workspace: Workspace,
    pub is_session_list_open: bool,
    pub is_dock_open: bool,
    /// The list or the dock as overlays of a narrow window; closed by choosing something.
    pub is_session_overlay_open: bool,
    pub is_dock_overlay_open: bool,
    pub dock_tab: DockTab,
    pub session_filter: String,
    pub palette: Option<PaletteState>,
    pub theme: ThemeChoice,
    pub owners: OwnerPalette,
    pub engine: EngineStatus,
    /// The server that the engine is at; `None` where it is in this process.
    pub remote_host: Option<String>,
    pub snapshot: Arc<EngineSnapshot>,
    pub store_health: StoreHealth,
    pub context_full: BTreeMap<ChatId, ContextFull>,
    pub context_counts: BTreeMap<ChatId, ContextCount>,
    pub edit: Option<Edit>,
    pub deleted: Option<Deleted>,
    /// Chats that were copied from another in this session, and from which.
    pub branch_of: BTreeMap<ChatId, ChatId>,
    pub models: ModelList,
    pub choices: EngineChoices,
    /// What the engine was started with, and what the present model was loaded with, choices put in.
    pub started_with: EngineOptions,
    pub loaded_with: EngineOptions,
    /// One line about something that happened elsewhere; closed by the user.
    pub notice: Option<String>,
    pub is_about_open: bool,
    pub focus: Option<FocusRequest>,
    /// The built-in default model, as offered at first run.
    pub default_model: DefaultModel,
    pub window_adapter: WindowAdapter,
    pub clock: Clock,
}

/// What draws the window; the best guess at what the engine will find.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WindowAdapter {
    /// Empty without a window.
    pub name: String,
    /// A software rasteriser.
    pub is_cpu: bool,
}

/// What the first run offers to download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultModel {
    pub name: String,
    pub bytes: u64,
    /// Fetched before: nothing needs to be downloaded.
    pub is_here: bool,
}

impl DefaultModel {
    /// "92.9 MB to download, once", or that it is here.
    pub fn cost_words(&self) -> String {
        match self.is_here {
            true => "already on this computer".into(),
            false => format!("{} to download, once", format::decimal_bytes(self.bytes)),
        }
    }
}

impl AppState {
    pub fn chat(&self, id: ChatId) -> Option<&Chat> {
        self.chats.get(&id)
    }

    pub fn focused_chat(&self) -> Option<&Chat> {
        self.chat(self.panes.focused_chat())
    }

    /// The answer under way in a chat, on whatever branch.
    pub fn run_of(&self, chat: ChatId) -> Option<(MessageId, &ActiveRun)> {
        self.runs.iter().find(|(_, r)| r.chat == chat).map(|(id, r)| (*id, r))
    }

    pub fn model(&self) -> Option<&Arc<LoadedModel>> {
        match &self.engine {
            EngineStatus::Ready(model) => Some(model),
            _ => None,
        }
    }

    pub fn can_send(&self, chat: ChatId) -> bool {
        self.model().is_some() && self.run_of(chat).is_none()
    }

    /// True while nobody has used this chat.
    pub fn is_blank(chat: &Chat) -> bool {
        chat.is_loaded && chat.messages().is_empty() && chat.draft.trim().is_empty()
    }

    /// Tokens per second of all answers under way.
    pub fn total_rate(&self) -> f32 {
        self.runs.values().filter_map(|r| r.rate.per_second(self.clock.seconds)).sum()
    }

    /// Tokens that a chat holds in its context now: exact while it runs, else the latest count.
    pub fn context_tokens(&self, chat: &Chat) -> Option<u32> {
        let live = self.run_of(chat.id).and_then(|(id, _)| chat.message(id)).and_then(|m| m.run.as_ref());
        match live {
            Some(run) if run.prompt_tokens > 0 => Some(run.prompt_tokens + run.output_tokens),
            _ => self.context_counts.get(&chat.id).map(|c| c.tokens),
        }
    }

    /// The last answer on the active path.
    pub fn last_answer(chat: &Chat) -> Option<&Message> {
        chat.path().iter().rev().filter_map(|id| chat.message(*id)).find(|m| m.run.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_over_the_last_two_seconds_and_bounded() {
        let mut meter = RateMeter::default();
        assert_eq!(meter.per_second(0.0), None);
        for i in 0..10_000u64 {
            meter.record(i as f64 * 0.001, i);
        }
        let rate = meter.per_second(9.999).unwrap();
        assert!((rate - 1000.0).abs() < 20.0, "{rate}");
        assert!(meter.samples.len() <= 110, "{}", meter.samples.len());
        let stalled = meter.per_second(29.999).unwrap();
        assert!(stalled < 120.0, "a stalled run does not keep its old speed: {stalled}");
    }
}
