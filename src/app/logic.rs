//! The app without a window: applies commands, drains the engine, keeps the store up to date.
//!
//! Guarantees: nothing here waits for the engine, the disk or the network; every run ends in exactly one status that is
//! written to the store; a run goes on whatever is on screen. It does not attempt to draw.

use super::actions::{chats, forks, messages, models, panes, prefixes};
use super::chat::{Chat, ChatId, Message, MessageId, RunSettings, RunStatus};
use super::command::{Effect, UiCommand};
use super::models::{FilePicker, ModelScanner};
use super::prompt::{Done, Job, Outcome, PromptWorker, Purpose, Turn, context_limit};
use super::state::*;
use super::store::{ChatRow, Library, Store, Write};
use super::words;
use crate::engine::handle::EngineStatus;
use crate::engine::options::ModelSource;
use crate::engine::{EngineHandle, Run};
use crate::model::catalog::CatalogRoot;
use crate::protocol::{
    Decoding, EngineEvent, FinishReason, GenerateRequest, OwnerTag, RunTimings, SamplingParams, StopRules, Usage,
};
use crate::tokenizer::chat_template::Now;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

/// Called from other threads when something changed; must return at once.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// What [`AppCore::new`] needs.
pub struct CoreOptions<'a> {
    pub engine: EngineHandle,
    /// Where chats are kept.
    pub data_dir: &'a Path,
    /// Where models are looked for.
    pub model_roots: Vec<CatalogRoot>,
    pub default_model: DefaultModel,
    pub waker: Waker,
    pub clock: Clock,
}

/// The state and everything that acts on it.
pub struct AppCore {
    pub state: AppState,
    pub(super) engine: EngineHandle,
    pub(super) store: Store,
    pub(super) prompts: PromptWorker,
    pub(super) scanner: ModelScanner,
    pub(super) picker: FilePicker,
    pub(super) settings: BTreeMap<String, String>,
    /// Owners in order of their last opening, for handing hues on.
    pub(super) hue_order: VecDeque<ChatId>,
    /// What is being loaded, as the settings will name it once it is there.
    pub(super) pending_model: Option<String>,
    pub(super) pins: Vec<prefixes::Pinning>,
    pub(super) pins_seen: Option<u64>,
    pub(super) asked: forks::Asked,
    pub(super) live: BTreeMap<MessageId, LiveRun>,
    counts_under_way: BTreeMap<ChatId, u64>,
    last_id: u64,
    effects: Vec<Effect>,
}

/// The engine's side of an answer under way.
#[derive(Default)]
pub(super) struct LiveRun {
    pub(super) run: Option<Run>,
    max_tokens: u32,
    is_clamped: bool,
}

impl AppCore {
    pub fn new(options: CoreOptions<'_>) -> std::io::Result<AppCore> {
        let (store, library) = Store::open(options.data_dir);
        let waker = options.waker.clone();
        let prompts = PromptWorker::start(Box::new(move || waker()))?;
        let Library { chats, settings, last_id } = library;
        let order: Vec<ChatId> = chats.iter().map(|c| c.id).collect();
        let mut core = AppCore {
            state: AppState {
                chats: chats.into_iter().map(|c| (c.id, c)).collect(),
                order,
                runs: BTreeMap::new(),
                panes: Panes { chats: Vec::new(), focused: 0, send_to_all: false },
                workspace: Workspace::Chat,
                is_session_list_open: true,
                is_dock_open: true,
                is_session_overlay_open: false,
                is_dock_overlay_open: false,
                dock_tab: DockTab::Live,
                session_filter: String::new(),
                palette: None,
                theme: ThemeChoice::Auto,
                owners: Default::default(),
                engine: options.engine.status(),
                remote_host: options.engine.remote_host().map(str::to_owned),
                snapshot: options.engine.telemetry().snapshot(),
                store_health: store.health(),
                context_full: BTreeMap::new(),
                context_counts: BTreeMap::new(),
                edit: None,
                deleted: None,
                branch_of: BTreeMap::new(),
                models: ModelList::default(),
                choices: EngineChoices::default(),
                started_with: options.engine.options(),
                loaded_with: options.engine.options(),
                notice: None,
                is_about_open: false,
                focus: Some(FocusRequest::Composer),
                default_model: options.default_model,
                window_adapter: WindowAdapter::default(),
                clock: options.clock,
            },
            engine: options.engine,
            store,
            prompts,
            scanner: ModelScanner::new(options.model_roots, options.waker.clone()),
            picker: FilePicker::new(options.waker),
            settings,
            hue_order: VecDeque::new(),
            pending_model: None,
            pins: Vec::new(),
            pins_seen: None,
            asked: forks::Asked::default(),
            live: BTreeMap::new(),
            counts_under_way: BTreeMap::new(),
            last_id,
            effects: Vec::new(),
        };
        panes::restore(&mut core);
        models::restore_choices(&mut core);
        Ok(core)
    }

    /// Carries out one command.
    pub fn apply(&mut self, command: UiCommand) {
        use UiCommand as C;
        match command {
            C::NewChat => chats::new_chat(self),
            C::OpenChat(chat) => chats::open(self, chat),
            C::OpenNeighbour { offset } => chats::open_neighbour(self, offset),
            C::RenameChat { chat, title } => chats::rename(self, chat, &title),
            C::DeleteChat(chat) => chats::delete(self, chat),
            C::UndoDelete => chats::undo_delete(self),
            C::SetSessionFilter(text) => self.state.session_filter = text,
            C::SetDraft { chat, text } => messages::set_draft(self, chat, text),
            C::Send(chat) => messages::send_draft(self, chat),
            C::SendText { chat, text } => messages::send_text(self, chat, &text),
            C::Stop(chat) => messages::stop(self, chat),
            C::StopAll => messages::stop_all(self),
            C::Regenerate { chat, message } => messages::regenerate(self, chat, message),
            C::StartEdit { chat, message } => messages::start_edit(self, chat, message),
            C::EditLast(chat) => messages::edit_last(self, chat),
            C::SetEditText(text) => messages::set_edit_text(self, text),
            C::CancelEdit => self.state.edit = None,
            C::SubmitEdit => messages::submit_edit(self),
            C::SelectSibling { chat, message, offset } => messages::select_sibling(self, chat, message, offset),
            C::BranchAsChat { chat, message } => chats::branch(self, chat, message),
            C::Copy(text) => self.effects.push(Effect::Copy(text)),
            C::CopyLastAnswer => messages::copy_last_answer(self),
            C::RegenerateLast => messages::regenerate_last(self),
            C::SetSettings { chat, settings } => messages::set_settings(self, chat, *settings),
            C::DropOldest(chat) => messages::drop_oldest(self, chat),
            C::CancelTurn(chat) => messages::cancel_turn(self, chat),
            C::Split => panes::split(self),
            C::OpenInSplit(chat) => panes::open_in_split(self, chat),
            C::ClosePane(idx) => panes::close(self, idx),
            C::CloseFocusedPane => panes::close(self, self.state.panes.focused),
            C::FocusPane(idx) => panes::focus(self, idx),
            C::SetSendToAll(on) => self.state.panes.send_to_all = on,
            C::ShowWorkspace(workspace) => panes::show_workspace(self, workspace),
            C::ToggleSessionList => panes::toggle_session_list(self),
            C::ToggleDock => panes::toggle_dock(self),
            C::SetDockTab(tab) => self.state.dock_tab = tab,
            C::CloseOverlays => panes::close_overlays(self),
            C::OpenPalette => panes::open_palette(self),
            C::SetPalette { query, selected } => self.state.palette = Some(PaletteState { query, selected }),
            C::ClosePalette => panes::close_palette(self),
            C::SetTheme(theme) => panes::set_theme(self, theme),
            C::DismissNotice => self.state.notice = None,
            C::SetAbout(is_open) => self.state.is_about_open = is_open,
            C::LoadDefaultModel => models::load(self, ModelSource::Default),
            C::LoadModel(path) => models::load(self, ModelSource::Path(path)),
            C::CancelLoad => self.engine.cancel_load(),
            C::Unload => models::unload(self),
            C::SetEngineChoices(choices) => models::set_choices(self, choices),
            C::Reload => models::reload(self),
            C::ScanModels => models::scan(self),
            C::PickModelFile => self.picker.open(),
            C::InspectStep(step) => {
                self.state.workspace = Workspace::Inspect;
                self.effects.push(Effect::InspectStep(step));
            }
            C::PinSystemPrompt(chat) => prefixes::pin_system_prompt(self, chat),
            C::Prefix(command) => prefixes::carry_out(self, command),
            C::RunDemo => super::demo::start_chats(self, super::demo::MAX_TOKENS_SHOWN),
        }
    }

    /// What the window has to do since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(super) fn push_effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Takes in everything that happened elsewhere since the last call.
    pub fn poll(&mut self, clock: Clock) {
        self.state.clock = clock;
        self.poll_status();
        while let Some(done) = self.prompts.try_recv() {
            self.take_prompt(done);
        }
        self.poll_runs();
        self.state.snapshot = self.engine.telemetry().snapshot();
        self.state.store_health = self.store.health();
        models::poll(self);
        prefixes::poll(self);
        self.count_contexts();
    }

    fn poll_status(&mut self) {
        let status = self.engine.status();
        let was_ready = self.state.model().map(|m| m.name.clone());
        self.state.engine = status;
        let is_ready = self.state.model().map(|m| m.name.clone());
        if is_ready != was_ready {
            self.state.context_counts.clear();
            models::remember_loaded(self);
        }
    }

    /// What was kept under this key, also from earlier starts.
    pub fn setting(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(String::as_str)
    }

    pub(super) fn put_setting(&mut self, key: &str, value: String) {
        if self.settings.get(key) != Some(&value) {
            self.store.write(Write::Setting { key: key.into(), value: value.clone() });
            self.settings.insert(key.into(), value);
        }
    }

    /// A new id: ascending, and by its time part different from those of another process on the same file.
    pub(super) fn next_id(&mut self) -> u64 {
        let from_time = (self.state.clock.unix_ms.max(0) as u64) << 20 | (u64::from(std::process::id()) & 0x3ff) << 10;
        self.last_id = from_time.max(self.last_id + 1);
        self.last_id
    }

    pub(super) fn new_chat(&mut self, settings: RunSettings) -> ChatId {
        let id = ChatId(self.next_id());
        self.state.chats.insert(id, Chat::new(id, self.state.clock.unix_ms, settings));
        self.state.order.insert(0, id);
        id
    }

    pub(super) fn save_chat(&self, chat: ChatId) {
        if let Some(chat) = self.state.chat(chat)
            && !(chat.is_loaded && chat.messages().is_empty() && chat.draft.is_empty())
        {
            self.store.write(Write::Chat(ChatRow::of(chat)));
        }
    }

    /// Moves a chat to the head of the list.
    pub(super) fn touch_chat(&mut self, chat: ChatId) {
        self.state.order.retain(|c| *c != chat);
        self.state.order.insert(0, chat);
        let now_ms = self.state.clock.unix_ms;
        if let Some(chat) = self.state.chats.get_mut(&chat) {
            chat.updated_ms = now_ms;
        }
    }

    /// Adds a message to a chat and to the store; the cursor moves to it.
    pub(super) fn add_message(&mut self, chat: ChatId, message: Message) {
        self.touch_chat(chat);
        if let Some(chat) = self.state.chats.get_mut(&chat) {
            chat.add(message.clone());
        }
        self.save_chat(chat);
        self.store.write(Write::Message { chat, message: Box::new(message) });
    }

    pub(super) fn remove_message(&mut self, chat: ChatId, message: MessageId) -> Option<Message> {
        let removed = self.state.chats.get_mut(&chat)?.remove_leaf(message)?;
        self.store.write(Write::RemoveMessage(message));
        self.save_chat(chat);
        Some(removed)
    }

    // Runs.

    /// Begins an answer to the message at the end of the active path.
    pub(super) fn start_answer(&mut self, chat_id: ChatId) {
        let Some(model) = self.state.model().cloned() else { return };
        let id = MessageId(self.next_id());
        let Some(chat) = self.state.chats.get(&chat_id) else { return };
        let answer = Message {
            id,
            parent: chat.cursor(),
            role: super::chat::Role::Assistant,
            content: String::new(),
            created_ms: self.state.clock.unix_ms,
            run: Some(super::chat::RunRecord::started(words::model_name(&model))),
        };
        let job = Job {
            chat: chat_id,
            purpose: Purpose::Send { answer: id },
            system_prompt: chat.settings.system_prompt.clone(),
            turns: turns_of(chat, None),
            max_tokens: chat.settings.max_tokens,
            model,
            now: civil_now(),
        };
        self.add_message(chat_id, answer);
        self.state.context_full.remove(&chat_id);
        self.state.runs.insert(
            id,
            ActiveRun {
                chat: chat_id,
                phase: Phase::Preparing,
                request: None,
                is_stopping: false,
                rate: RateMeter::default(),
            },
        );
        self.live.insert(id, LiveRun::default());
        chats::give_hue(self, chat_id);
        self.prompts.submit(job);
    }

    /// Asks for the end of an answer. One that the engine does not know yet ends at once.
    pub(super) fn stop_run(&mut self, message: MessageId) {
        let Some(active) = self.state.runs.get_mut(&message) else { return };
        active.is_stopping = true;
        match active.request {
            Some(request) => self.engine.abort(request),
            None => self.end_run(message, RunStatus::Stopped, "stopped".into(), None),
        }
    }

    fn take_prompt(&mut self, done: Done) {
        match done.purpose {
            Purpose::Count { revision } => {
                if self.counts_under_way.get(&done.chat) == Some(&revision) {
                    self.counts_under_way.remove(&done.chat);
                }
                if let Outcome::Tokens(tokens) = done.outcome {
                    let count = ContextCount { revision, tokens: tokens.len() as u32 };
                    self.state.context_counts.insert(done.chat, count);
                }
            }
            // An answer that was stopped meanwhile is no longer in the list.
            Purpose::Send { answer } if self.state.runs.contains_key(&answer) => match done.outcome {
                Outcome::Tokens(prompt) => self.submit(answer, done.chat, prompt),
                Outcome::Failed(error) => self.end_run(answer, RunStatus::Failed, String::new(), Some(error)),
                Outcome::TooLong { needed, limit, drop } => {
                    self.state.runs.remove(&answer);
                    self.live.remove(&answer);
                    let turn = self.remove_message(done.chat, answer).and_then(|m| m.parent);
                    if let Some(turn) = turn {
                        self.state.context_full.insert(done.chat, ContextFull { turn, needed, limit, drop });
                    }
                }
            },
            Purpose::Send { .. } => {}
            Purpose::Pin => prefixes::take_tokens(self, done.chat, done.outcome),
        }
    }

    fn submit(&mut self, answer: MessageId, chat_id: ChatId, prompt: Vec<u32>) {
        let (Some(chat), Some(model)) = (self.state.chat(chat_id), self.state.model().cloned()) else {
            let error = words::run_error(&crate::protocol::RunError::NoModel);
            return self.end_run(answer, RunStatus::Failed, String::new(), Some(error));
        };
        let room = context_limit(&model).saturating_sub(prompt.len() as u32).max(1);
        let (max_tokens, settings) = (chat.settings.max_tokens.max(1), &chat.settings);
        let request = GenerateRequest {
            owner: OwnerTag { id: chat_id.0, label: chat.title.clone() },
            prompt,
            sampling: sampling_of(settings),
            stop: StopRules::max_tokens(max_tokens.min(room)),
            decoding: Decoding::ONE,
            priority: 0,
            cache_salt: 0,
            adapter: 0,
        };
        let prompt_tokens = request.prompt.len() as u32;
        match forks::submit(self, answer, request) {
            Ok(run) => {
                if let Some(active) = self.state.runs.get_mut(&answer) {
                    active.request = Some(run.id());
                    active.phase = Phase::Queued;
                }
                self.live.insert(answer, LiveRun { run: Some(run), max_tokens, is_clamped: max_tokens > room });
                self.change_run(chat_id, answer, |record| record.prompt_tokens = prompt_tokens);
            }
            Err(error) => {
                self.end_run(answer, RunStatus::Failed, String::new(), Some(words::run_error(&error)));
            }
        }
    }

    fn poll_runs(&mut self) {
        let ids: Vec<MessageId> = self.live.keys().copied().collect();
        for id in ids {
            while let Some(event) = self.live.get(&id).and_then(|l| l.run.as_ref()).and_then(Run::try_recv) {
                self.take_event(id, event);
            }
        }
    }

    /// Takes in one event of one answer.
    fn take_event(&mut self, id: MessageId, event: EngineEvent) {
        let Some(chat) = self.state.runs.get(&id).map(|r| r.chat) else { return };
        match event {
            EngineEvent::Started { prompt_tokens, cached_tokens } => {
                self.set_phase(id, Phase::Reading { computed: cached_tokens, total: prompt_tokens });
                forks::learn_request(self, id);
                self.change_run(chat, id, |record| {
                    record.prompt_tokens = prompt_tokens;
                    record.cached_tokens = cached_tokens;
                });
            }
            EngineEvent::Reading { computed, total } => self.set_phase(id, Phase::Reading { computed, total }),
            EngineEvent::Preempted { kept_tokens } => {
                self.set_phase(id, Phase::Preempted { kept_tokens });
                self.change_run(chat, id, |record| record.preemptions += 1);
            }
            EngineEvent::Text { delta, tokens, .. } => self.take_text(chat, id, &delta, tokens.len() as u32),
            // A chat asks for one choice.
            EngineEvent::Choice { .. } | EngineEvent::PromptLogprobs { .. } | EngineEvent::Embedding { .. } => {}
            EngineEvent::Finished { reason, usage, timings } => self.finish_run(chat, id, &reason, usage, timings),
            EngineEvent::Failed { error } => {
                self.end_run(id, RunStatus::Failed, String::new(), Some(words::run_error(&error)));
            }
        }
    }

    fn take_text(&mut self, chat: ChatId, id: MessageId, delta: &str, num_tokens: u32) {
        let now_s = self.state.clock.seconds;
        let Some(message) = self.state.chats.get_mut(&chat).and_then(|c| c.message_mut(id)) else { return };
        message.content.push_str(delta);
        let mut total = 0;
        if let Some(run) = &mut message.run {
            run.output_tokens += num_tokens;
            total = run.output_tokens;
        }
        if let Some(active) = self.state.runs.get_mut(&id) {
            active.phase = Phase::Writing;
            active.rate.record(now_s, total.into());
        }
        if !delta.is_empty() {
            self.store.write(Write::AppendText { message: id, delta: delta.into() });
        }
    }

    fn finish_run(&mut self, chat: ChatId, id: MessageId, reason: &FinishReason, usage: Usage, timings: RunTimings) {
        self.change_run(chat, id, |record| {
            record.prompt_tokens = usage.prompt_tokens;
            record.cached_tokens = usage.cached_tokens;
            record.output_tokens = usage.output_tokens;
            record.preemptions = usage.preemptions;
            record.ttft_us = timings.ttft_us;
            record.decode_us = timings.decode_us;
            record.first_step = timings.first_step;
            record.last_step = timings.last_step;
        });
        let status = if *reason == FinishReason::Aborted { RunStatus::Stopped } else { RunStatus::Done };
        let (max_tokens, is_clamped) = self.live.get(&id).map_or((0, false), |l| (l.max_tokens, l.is_clamped));
        self.end_run(id, status, words::stop_reason(reason, max_tokens, is_clamped), None);
    }

    /// The one place where an answer ends: its record is settled, written, and the run is gone.
    fn end_run(&mut self, id: MessageId, status: RunStatus, stop_reason: String, error: Option<String>) {
        self.live.remove(&id);
        let Some(active) = self.state.runs.remove(&id) else { return };
        self.change_run(active.chat, id, |record| {
            record.status = status;
            record.stop_reason = stop_reason;
            record.error = error;
        });
    }

    fn set_phase(&mut self, id: MessageId, phase: Phase) {
        if let Some(active) = self.state.runs.get_mut(&id) {
            active.phase = phase;
        }
    }

    /// Changes what is known of an answer, here and on disk.
    fn change_run(&mut self, chat: ChatId, id: MessageId, change: impl FnOnce(&mut super::chat::RunRecord)) {
        let message = self.state.chats.get_mut(&chat).and_then(|c| c.message_mut(id));
        if let Some(run) = message.and_then(|m| m.run.as_mut()) {
            change(run);
            self.store.write(Write::Run { message: id, run: Box::new(run.clone()) });
        }
    }

    /// Keeps the context meters of the visible chats current; at most one count per chat is under way.
    fn count_contexts(&mut self) {
        let Some(model) = self.state.model().cloned() else { return };
        for chat_id in self.state.panes.chats.clone() {
            let Some(chat) = self.state.chat(chat_id) else { continue };
            if !chat.is_loaded || self.state.run_of(chat_id).is_some() {
                continue;
            }
            let revision = context_revision(chat);
            let is_current = self.state.context_counts.get(&chat_id).is_some_and(|c| c.revision == revision);
            if is_current || self.counts_under_way.contains_key(&chat_id) {
                continue;
            }
            let job = Job {
                chat: chat_id,
                purpose: Purpose::Count { revision },
                system_prompt: chat.settings.system_prompt.clone(),
                turns: turns_of(chat, Some(chat.draft.as_str()).filter(|d| !d.trim().is_empty())),
                max_tokens: chat.settings.max_tokens,
                model: model.clone(),
                now: civil_now(),
            };
            self.counts_under_way.insert(chat_id, revision);
            self.prompts.submit(job);
        }
    }

    /// Writes everything that is left. Answers under way are marked as interrupted.
    pub fn shut_down(&mut self) {
        let ids: Vec<MessageId> = self.live.keys().copied().collect();
        for id in ids {
            self.end_run(id, RunStatus::Interrupted, String::new(), None);
        }
        self.store.flush();
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    pub fn is_loading(&self) -> bool {
        matches!(self.state.engine, EngineStatus::Loading { .. })
    }
}

fn sampling_of(settings: &RunSettings) -> SamplingParams {
    SamplingParams {
        temperature: settings.temperature,
        top_k: settings.top_k,
        top_p: settings.top_p,
        min_p: settings.min_p,
        seed: settings.seed,
        ..SamplingParams::greedy()
    }
}

fn turns_of(chat: &Chat, draft: Option<&str>) -> Vec<Turn> {
    let sent = chat.turns_before(None).into_iter();
    let mut turns: Vec<Turn> = sent.map(|m| Turn { id: m.id, role: m.role, content: m.content.clone() }).collect();
    if let Some(draft) = draft {
        turns.push(Turn { id: MessageId(u64::MAX), role: super::chat::Role::User, content: draft.into() });
    }
    turns
}

/// Changes whenever the tokens of the next turn may change.
fn context_revision(chat: &Chat) -> u64 {
    let mut hasher = rustc_hash::FxHasher::default();
    chat.cursor().hash(&mut hasher);
    chat.context_start.hash(&mut hasher);
    chat.draft.hash(&mut hasher);
    chat.settings.system_prompt.hash(&mut hasher);
    chat.cursor().and_then(|id| chat.message(id)).map(|m| m.content.len()).hash(&mut hasher);
    hasher.finish()
}

/// The local date and time, for templates that print it.
pub(super) fn civil_now() -> Now {
    let now = jiff::tz::TimeZone::system().to_datetime(jiff::Timestamp::now());
    Now {
        year: now.year(),
        month: now.month(),
        day: now.day(),
        hour: now.hour(),
        minute: now.minute(),
        second: now.second(),
    }
}
