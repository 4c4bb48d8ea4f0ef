//! What Inspect and the live dock show, without a pixel: fed from telemetry once per frame, read by the views.
//!
//! Guarantees: [`InspectModel::ingest`] costs what is new since the last call; pausing the view never touches the
//! engine; the map of a step scrubbed to equals the map replayed to it, or is absent where records are missing; a map
//! that disagrees with the engine's totals is replaced by the engine's own snapshot. It does not attempt to know text.

use super::history::{Entry, History, KEYFRAME_STEPS, end_us};
use super::map::BlockMap;
use super::requests::{RequestBook, RequestRow};
use crate::app::theme::{OwnerHue, OwnerPalette};
use crate::ids::{BlockId, RequestId};
use crate::telemetry::kernels::KernelProfile;
use crate::telemetry::{EngineSnapshot, KvTotals, PrefixInfo, StepRecord, Telemetry};
use crate::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The history's default cap on memory.
pub const HISTORY_BYTES: usize = 64 << 20;
/// Finished requests that the table shows.
const MAX_FINISHED_ROWS: usize = 24;

/// The step that all views show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cursor {
    /// The newest step.
    Live,
    /// This step, while the engine goes on.
    Paused(u64),
}

/// What the reader pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    Block(BlockId),
    Request(RequestId),
}

/// What can be done with cached prefixes. `id` is [`PrefixInfo::id`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefixCommand {
    /// Keeps it from being evicted, under a name; an empty name is none. Pins again under another name.
    Pin {
        id: u64,
        name: String,
    },
    Unpin {
        id: u64,
    },
    Evict {
        id: u64,
    },
    /// Drops every prefix that is not pinned.
    Reset,
}

/// What a view asks for. The model serves most of them ([`InspectModel::apply`]), the shell the rest.
#[derive(Clone, Debug, PartialEq)]
pub enum InspectCommand {
    /// Follow the newest step.
    GoLive,
    /// Hold the step that is shown now.
    Pause,
    TogglePause,
    GoToStep(u64),
    /// Forward (positive) or back by steps of the history.
    StepBy(i64),
    GoToFirst,
    Select(Selection),
    ClearSelection,
    /// For the shell: show Inspect; the model has already gone to the step that came with it.
    OpenInspect,
    /// For the shell: start four chats that share a system prompt.
    RunDemo,
    /// For the shell: show the models.
    OpenModels,
    /// For the shell: show the chat that owns this.
    OpenOwner(u64),
    /// For the shell: the engine's to do.
    Prefix(PrefixCommand),
    /// For the shell, in each frame in which kernel times are on screen.
    TimeKernels,
}

/// Someone whom blocks and requests belong to.
#[derive(Clone, Debug, PartialEq)]
pub struct Owner {
    pub id: u64,
    pub label: String,
    pub hue: OwnerHue,
}

/// The state behind Inspect. One per window.
pub struct InspectModel {
    source: Option<Arc<Telemetry>>,
    version: Option<u64>,
    history: History,
    requests: RequestBook,
    owners: BTreeMap<u64, Owner>,
    snapshot: Arc<EngineSnapshot>,
    /// The pool after the newest record, if it is known.
    live_map: Option<BlockMap>,
    /// The pool at a paused cursor, if it is known.
    paused_map: Option<BlockMap>,
    cursor: Cursor,
    selection: Option<Selection>,
    rows: Vec<RequestRow>,
    /// What prefixes begin with, by their id.
    previews: BTreeMap<u64, String>,
    num_resyncs: u64,
    /// Records up to this step belong to a pool that is gone.
    read_after: Option<u64>,
    /// Grows whenever something shown may have changed.
    revision: u64,
}

impl Default for InspectModel {
    fn default() -> Self {
        InspectModel::new(HISTORY_BYTES)
    }
}

impl InspectModel {
    pub fn new(max_bytes: usize) -> InspectModel {
        InspectModel {
            source: None,
            version: None,
            history: History::new(max_bytes),
            requests: RequestBook::default(),
            owners: BTreeMap::new(),
            snapshot: Arc::new(EngineSnapshot::default()),
            live_map: None,
            paused_map: None,
            cursor: Cursor::Live,
            selection: None,
            rows: Vec::new(),
            previews: BTreeMap::new(),
            num_resyncs: 0,
            read_after: None,
            revision: 0,
        }
    }

    /// The kernels of the last step that was timed.
    pub fn profile(&self) -> Option<Arc<KernelProfile>> {
        self.source.as_ref()?.profile()
    }

    /// Takes in what is new. Call it once per frame; it returns at once when nothing changed. Another `telemetry` than
    /// last time (a model was loaded) starts over.
    pub fn ingest(&mut self, telemetry: &Arc<Telemetry>, palette: &OwnerPalette) {
        if !self.source.as_ref().is_some_and(|s| Arc::ptr_eq(s, telemetry)) {
            self.start_over();
            self.source = Some(Arc::clone(telemetry));
        }
        self.refresh_hues(palette);
        let version = telemetry.version();
        if self.version == Some(version) {
            return;
        }
        // The snapshot first: records read after it reach at least as far, so that it can serve as their keyframe.
        let snapshot = telemetry.snapshot();
        if self.is_another_engine(&snapshot) {
            let read_after = self.history.last_step().filter(|step| *step <= snapshot.step);
            self.start_over();
            self.read_after = read_after;
        }
        let (records, dropped) = telemetry.records_after(self.history.last_step().or(self.read_after));
        self.version = Some(version);
        self.requests.note_snapshot(&snapshot);
        self.note_owners(&snapshot, palette);
        self.snapshot = snapshot;
        if self.history.is_empty() {
            self.start_map(&records, dropped);
        }
        for record in records {
            self.take_record(record);
        }
        self.heal();
        if let Some(first) = self.history.first_step() {
            self.requests.prune(first);
        }
        self.after_change();
    }

    /// Reads the beginnings of prefixes that are new. Call it after [`InspectModel::ingest`]; without a tokenizer the
    /// tokens' numbers stand for them.
    pub fn read_previews(&mut self, tokenizer: Option<&Tokenizer>) {
        let prefixes = &self.snapshot.prefixes;
        if self.previews.len() > 4 * prefixes.len() + 64 {
            self.previews.retain(|id, _| prefixes.iter().any(|p| p.id == *id));
        }
        for prefix in prefixes {
            self.previews.entry(prefix.id).or_insert_with(|| preview_of(prefix, tokenizer));
        }
    }

    /// What a prefix begins with.
    pub fn preview(&self, prefix: &PrefixInfo) -> &str {
        self.previews.get(&prefix.id).map_or("", String::as_str)
    }

    fn start_over(&mut self) {
        *self = InspectModel {
            source: self.source.take(),
            revision: self.revision + 1,
            ..InspectModel::new(self.history.max_bytes())
        };
    }

    fn is_another_engine(&self, snapshot: &EngineSnapshot) -> bool {
        let resized = self.live_map.as_ref().is_some_and(|m| m.cells().len() != snapshot.blocks.len());
        let reset = snapshot.step < self.snapshot.step;
        !self.history.is_empty() && !snapshot.blocks.is_empty() && (resized || reset)
    }

    /// From an untouched pool where all records are there, else from the snapshot.
    fn start_map(&mut self, records: &[Arc<StepRecord>], dropped: u64) {
        let num_blocks = self.snapshot.blocks.len();
        let Some(first) = records.first() else {
            if num_blocks > 0 {
                self.set_live_map(BlockMap::from_snapshot(&self.snapshot));
            }
            return;
        };
        let is_whole = dropped == 0 && self.read_after.is_none();
        if dropped > 0 && self.read_after.is_none() {
            self.history.note_not_shown(dropped);
        }
        if num_blocks > 0 && is_whole && first.step <= 1 {
            self.set_live_map(BlockMap::pristine(num_blocks, first.step.saturating_sub(1)));
        }
    }

    fn take_record(&mut self, record: Arc<StepRecord>) {
        let itl_us = self.requests.note_record(&record);
        if let Some(map) = &mut self.live_map {
            if record.step == map.step + 1 {
                map.apply(&record);
            } else if record.step > map.step {
                self.live_map = None;
            }
        }
        self.history.push(record, itl_us);
        if let Some(map) = &self.live_map
            && self.history.last_keyframe_step().is_none_or(|step| map.step >= step + KEYFRAME_STEPS)
        {
            self.history.push_keyframe(map);
        }
    }

    /// Gets the map from the snapshot where records do not give it or contradict the engine.
    fn heal(&mut self) {
        let snapshot = Arc::clone(&self.snapshot);
        if snapshot.blocks.is_empty() {
            return;
        }
        let is_right = match &self.live_map {
            Some(map) if map.step == snapshot.step => {
                let counts = map.counts();
                (counts.used(), counts.cached_idle, counts.free)
                    == (snapshot.kv.used, snapshot.kv.cached_idle, snapshot.kv.free)
                    && map.host().iter().map(|(host, c)| (host, c.request)).eq(host_of(&snapshot))
            }
            Some(map) => map.step > snapshot.step || self.history.is_empty(),
            None => false,
        };
        if is_right {
            return;
        }
        let map = BlockMap::from_snapshot(&snapshot);
        let last = self.history.last_step().unwrap_or(map.step);
        let newest = if map.step >= last { Some(map.clone()) } else { self.history.replay(map.clone(), last) };
        if let Some(newest) = newest {
            self.num_resyncs += 1;
            self.history.push_keyframe(&map);
            self.live_map = Some(newest);
        }
    }

    fn set_live_map(&mut self, map: BlockMap) {
        self.history.push_keyframe(&map);
        self.live_map = Some(map);
    }

    fn note_owners(&mut self, snapshot: &EngineSnapshot, palette: &OwnerPalette) {
        for request in &snapshot.requests {
            let (id, label) = (request.owner.id, &request.owner.label);
            match self.owners.get_mut(&id) {
                Some(owner) if owner.label == *label => {}
                Some(owner) => owner.label.clone_from(label),
                None => {
                    self.owners.insert(id, Owner { id, label: label.clone(), hue: palette.hue(id) });
                }
            }
        }
    }

    fn refresh_hues(&mut self, palette: &OwnerPalette) {
        for owner in self.owners.values_mut() {
            let hue = palette.hue(owner.id);
            if hue != owner.hue {
                owner.hue = hue;
                self.revision += 1;
            }
        }
    }

    fn after_change(&mut self) {
        if let (Cursor::Paused(step), Some(first)) = (self.cursor, self.history.first_step())
            && step < first
        {
            self.go_to(first);
        }
        self.rebuild_rows();
        self.revision += 1;
    }

    fn rebuild_rows(&mut self) {
        let entry = self.entry();
        let tables = self.map().map(BlockMap::tables);
        let num_blocks = |id: RequestId| tables.and_then(|t| t.get(&id)).map_or(0, |t| t.len() as u32);
        self.rows = entry.map_or_else(Vec::new, |e| {
            // Live, the newest record may still name what the engine has dropped since.
            let gone_before = if self.is_live() { u64::MAX } else { e.record.step };
            self.requests.rows(e, gone_before, num_blocks, MAX_FINISHED_ROWS)
        });
    }

    /// Does what a view asked for. Gives back what only the shell can do.
    pub fn apply(&mut self, command: InspectCommand) -> Option<InspectCommand> {
        match command {
            InspectCommand::GoLive => self.set_cursor(Cursor::Live),
            InspectCommand::Pause => self.pause(),
            InspectCommand::TogglePause => match self.cursor {
                Cursor::Live => self.pause(),
                Cursor::Paused(_) => self.set_cursor(Cursor::Live),
            },
            InspectCommand::GoToStep(step) => self.go_to(step),
            InspectCommand::StepBy(by) => self.step_by(by),
            InspectCommand::GoToFirst => self.go_to(0),
            InspectCommand::Select(selection) => self.selection = Some(selection),
            InspectCommand::ClearSelection => self.selection = None,
            InspectCommand::OpenInspect
            | InspectCommand::RunDemo
            | InspectCommand::OpenModels
            | InspectCommand::OpenOwner(_)
            | InspectCommand::Prefix(_)
            | InspectCommand::TimeKernels => return Some(command),
        }
        None
    }

    fn pause(&mut self) {
        if let Some(step) = self.step() {
            self.go_to(step);
        }
    }

    /// Pauses at the nearest step at or before `step`.
    fn go_to(&mut self, step: u64) {
        if let Some(entry) = self.history.at(step) {
            self.set_cursor(Cursor::Paused(entry.record.step));
        }
    }

    fn step_by(&mut self, by: i64) {
        let Some(idx) = self.step().and_then(|s| self.history.idx_at(s)) else { return };
        let to = idx.saturating_add_signed(by as isize).min(self.history.len().saturating_sub(1));
        if let Some(entry) = self.history.get(to) {
            self.set_cursor(Cursor::Paused(entry.record.step));
        }
    }

    fn set_cursor(&mut self, cursor: Cursor) {
        if self.cursor == cursor {
            return;
        }
        self.cursor = cursor;
        self.paused_map = match cursor {
            Cursor::Live => None,
            Cursor::Paused(step) => self.map_near(step),
        };
        self.rebuild_rows();
        self.revision += 1;
    }

    /// The map at `step`, going on from the map shown where that is nearer than a keyframe.
    fn map_near(&mut self, step: u64) -> Option<BlockMap> {
        if self.live_map.as_ref().is_some_and(|m| m.step == step) {
            return self.live_map.clone();
        }
        match self.paused_map.take() {
            Some(map) if map.step <= step && step - map.step < KEYFRAME_STEPS => {
                self.history.replay(map, step).or_else(|| self.history.map_at(step))
            }
            _ => self.history.map_at(step),
        }
    }

    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    pub fn is_live(&self) -> bool {
        self.cursor == Cursor::Live
    }

    /// The step shown.
    pub fn step(&self) -> Option<u64> {
        match self.cursor {
            Cursor::Live => self.history.last_step(),
            Cursor::Paused(step) => Some(step),
        }
    }

    /// The record shown, with running totals.
    pub fn entry(&self) -> Option<&Entry> {
        self.history.at(self.step()?)
    }

    /// The pool at the step shown; `None` where it is not known.
    pub fn map(&self) -> Option<&BlockMap> {
        match self.cursor {
            Cursor::Live => self.live_map.as_ref(),
            Cursor::Paused(_) => self.paused_map.as_ref(),
        }
    }

    pub fn selection(&self) -> Option<Selection> {
        self.selection
    }

    pub fn history(&self) -> &History {
        &self.history
    }

    pub fn requests(&self) -> &RequestBook {
        &self.requests
    }

    /// The request table at the step shown.
    pub fn rows(&self) -> &[RequestRow] {
        &self.rows
    }

    pub fn snapshot(&self) -> &EngineSnapshot {
        &self.snapshot
    }

    /// The owner of a request; one without a name of its own is neutral.
    pub fn owner_of(&self, request: RequestId) -> Owner {
        let id = self.requests.owner_of(request);
        self.owners.get(&id).cloned().unwrap_or_else(|| Owner {
            id,
            label: self.requests.label(request),
            hue: OwnerHue::Neutral((request.0 % 3) as u8),
        })
    }

    /// The hue of a request's owner.
    pub fn hue_of(&self, request: RequestId) -> OwnerHue {
        let id = self.requests.owner_of(request);
        self.owners.get(&id).map_or(OwnerHue::Neutral((request.0 % 3) as u8), |o| o.hue)
    }

    /// The hue of an owner; neutral where it has none of its own.
    pub fn hue_of_owner(&self, owner: u64) -> OwnerHue {
        self.owners.get(&owner).map_or(OwnerHue::Neutral((owner % 3) as u8), |o| o.hue)
    }

    /// The pool's totals at the step shown; live they include what happened since the last step.
    pub fn kv_now(&self) -> KvTotals {
        match self.entry() {
            Some(entry) if !self.is_live() || self.snapshot.step < entry.record.step => entry.record.kv,
            _ => self.snapshot.kv,
        }
    }

    /// Times the map had to be taken from a snapshot after the start.
    pub fn num_resyncs(&self) -> u64 {
        self.num_resyncs
    }

    /// Grows whenever something shown may have changed: a key for caches.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// True when nothing was ever recorded.
    pub fn is_empty(&self) -> bool {
        self.history.is_empty()
    }

    /// True when the engine has loaded a pool at all.
    pub fn has_pool(&self) -> bool {
        self.snapshot.blocks.len() > 1
    }

    /// When the step shown was over, in microseconds since the engine started.
    pub fn now_us(&self) -> u64 {
        self.entry().map_or(self.snapshot.t_us, |e| end_us(&e.record))
    }
}

/// Who has which place of host memory.
fn host_of(snapshot: &EngineSnapshot) -> impl Iterator<Item = (u32, Option<RequestId>)> {
    snapshot.host.iter().map(|b| (b.host, b.request))
}

/// Longest preview, in characters.
const PREVIEW_CHARS: usize = 80;

/// The first words on one line.
fn preview_of(prefix: &PrefixInfo, tokenizer: Option<&Tokenizer>) -> String {
    let text = match tokenizer {
        Some(tokenizer) => tokenizer.decode(&prefix.head, true),
        None => prefix.head.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
    };
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().take(PREVIEW_CHARS).collect()
}
