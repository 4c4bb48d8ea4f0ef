//! What is known of each request, as of any step.
//!
//! Guarantees: a request's facts are gathered from records and snapshots, whichever comes first; everything "as of a
//! step" counts only what happened up to that step. Requests that ended before the history begins are forgotten.

use super::history::{Entry, end_us};
use crate::ids::RequestId;
use crate::protocol::FinishReason;
use crate::telemetry::{EngineSnapshot, RequestInfo, RequestState, RowKind, StepRecord, WaitReason};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// One request's life so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestLog {
    pub owner: Option<u64>,
    pub label: String,
    /// What it was forked from, and which choice of its request it is.
    pub parent: Option<RequestId>,
    pub choice: u32,
    /// A beam of a search, see [`RequestInfo::is_beam`].
    pub is_beam: bool,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub submitted_us: Option<u64>,
    pub first_token_us: Option<u64>,
    /// First and last step that named it.
    pub first_step: u64,
    pub last_step: u64,
    pub finish: Option<(u64, FinishReason)>,
    /// The engine knows it no longer, and no record said how it ended (its model was unloaded).
    is_gone: bool,
    preempt_steps: Vec<u64>,
    /// (step, end of the step) of each sampled token, ascending.
    tokens: Vec<(u64, u64)>,
}

impl RequestLog {
    /// Output tokens up to and with `step`.
    pub fn num_output(&self, step: u64) -> usize {
        self.tokens.partition_point(|&(s, _)| s <= step)
    }

    pub fn num_preempted(&self, step: u64) -> usize {
        self.preempt_steps.partition_point(|&s| s <= step)
    }

    /// Submit to first token, if that was by `step`.
    pub fn ttft_us(&self, step: u64) -> Option<u64> {
        let &(first_step, first_us) = self.tokens.first()?;
        if first_step > step {
            return None;
        }
        Some(self.first_token_us.unwrap_or(first_us).saturating_sub(self.submitted_us?))
    }

    /// Tokens per second over the last tokens before `step`, at most `window` of them; 0 with fewer than two.
    pub fn rate(&self, step: u64, window: usize) -> f64 {
        let end = self.num_output(step);
        let recent = &self.tokens[end.saturating_sub(window)..end];
        let (Some(first), Some(last)) = (recent.first(), recent.last()) else { return 0.0 };
        let us = last.1.saturating_sub(first.1);
        if us == 0 { 0.0 } else { (recent.len() - 1) as f64 * 1e6 / us as f64 }
    }

    /// End of the step that gave the newest token.
    fn last_token_us(&self) -> Option<u64> {
        self.tokens.last().map(|t| t.1)
    }

    /// A beam that goes when its tokens are no longer among the best.
    pub fn is_passing_beam(&self) -> bool {
        self.is_beam && self.parent.is_some()
    }

    pub fn is_finished_at(&self, step: u64) -> bool {
        self.finish.as_ref().is_some_and(|(s, _)| *s <= step)
    }
}

/// What a request does at a step.
#[derive(Clone, Debug, PartialEq)]
pub enum RowState {
    Waiting {
        reason: Option<WaitReason>,
        was_preempted: bool,
    },
    Reading {
        from: u32,
        to: u32,
        total: u32,
        cached: u32,
    },
    Decoding,
    /// In the batch, but not served by this step.
    Idle,
    Finished(FinishReason),
}

/// One line of the request table.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRow {
    pub id: RequestId,
    pub owner: u64,
    pub label: String,
    pub state: RowState,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub num_blocks: u32,
    pub ttft_us: Option<u64>,
    pub tokens_per_s: f64,
    pub preemptions: u32,
    /// Since submit, or submit to finish.
    pub age_us: Option<u64>,
}

/// All requests that the history names.
#[derive(Clone, Debug, Default)]
pub struct RequestBook {
    logs: BTreeMap<RequestId, RequestLog>,
}

impl RequestBook {
    /// Takes in a new record; returns the median time between tokens of its decode rows, 0 if there is none.
    pub fn note_record(&mut self, record: &StepRecord) -> u32 {
        let end = end_us(record);
        let mut gaps = Vec::new();
        for (request, _) in &record.waiting {
            self.touch(*request, record.step);
        }
        for row in &record.rows {
            let log = self.touch(row.request, record.step);
            if let RowKind::Prefill { cached } = row.kind {
                log.cached_tokens = log.cached_tokens.max(cached);
                log.prompt_tokens = log.prompt_tokens.max(row.from + row.num_tokens);
            }
            if row.sampled.is_some() {
                if let (RowKind::Decode, Some(before)) = (row.kind, log.last_token_us()) {
                    gaps.push(end.saturating_sub(before));
                }
                log.tokens.extend((0..=row.forced.len()).map(|_| (record.step, end)));
            }
        }
        for p in &record.preempted {
            self.touch(p.victim, record.step).preempt_steps.push(record.step);
        }
        for (request, reason) in &record.finished {
            self.touch(*request, record.step).finish = Some((record.step, reason.clone()));
        }
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).map_or(0, |&us| u32::try_from(us).unwrap_or(u32::MAX))
    }

    fn touch(&mut self, request: RequestId, step: u64) -> &mut RequestLog {
        let log = self.logs.entry(request).or_insert_with(|| RequestLog { first_step: step, ..RequestLog::default() });
        // A snapshot may have named it before the records of its first steps were read.
        log.first_step = log.first_step.min(step);
        log.last_step = log.last_step.max(step);
        log
    }

    /// Takes in names and facts that records do not carry.
    pub fn note_snapshot(&mut self, snapshot: &EngineSnapshot) {
        for info in &snapshot.requests {
            // Not `touch`: a request that ended is named by snapshots for long, which is not part of its life.
            let first = || RequestLog { first_step: snapshot.step, last_step: snapshot.step, ..RequestLog::default() };
            fill_in(self.logs.entry(info.id).or_insert_with(first), info);
        }
        let known: FxHashSet<RequestId> = snapshot.requests.iter().map(|r| r.id).collect();
        for (id, log) in &mut self.logs {
            log.is_gone = log.finish.is_none() && log.last_step <= snapshot.step && !known.contains(id);
        }
    }

    /// Forgets requests that ended before `first_step`.
    pub fn prune(&mut self, first_step: u64) {
        self.logs.retain(|_, log| log.last_step >= first_step);
    }

    pub fn get(&self, request: RequestId) -> Option<&RequestLog> {
        self.logs.get(&request)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (RequestId, &RequestLog)> {
        self.logs.iter().map(|(id, log)| (*id, log))
    }

    /// The owner's id; of a request that no snapshot named yet, an id of its own.
    pub fn owner_of(&self, request: RequestId) -> u64 {
        self.logs.get(&request).and_then(|log| log.owner).unwrap_or(u64::MAX - request.0)
    }

    /// What a person calls the request.
    pub fn label(&self, request: RequestId) -> String {
        match self.logs.get(&request) {
            Some(log) if !log.label.is_empty() && log.choice > 0 => {
                let what = if log.is_beam { "Beam" } else { "Choice" };
                format!("{what} {}: {}", log.choice + 1, log.label)
            }
            Some(log) if !log.label.is_empty() => log.label.clone(),
            _ => format!("request {request}"),
        }
    }

    /// The table at `entry`: in the batch first, then waiting, then the last `max_finished` that ended. Requests that
    /// vanished before step `gone_before` are left out, and beams that are not among those of their search.
    pub fn rows(
        &self,
        entry: &Entry,
        gone_before: u64,
        num_blocks: impl Fn(RequestId) -> u32,
        max_finished: usize,
    ) -> Vec<RequestRow> {
        let step = entry.record.step;
        let states = states_of(&entry.record);
        let (mut finished, alive): (Vec<_>, Vec<_>) = self
            .iter()
            .filter(|(_, log)| log.first_step <= step && !(log.is_gone && log.last_step < gone_before))
            .filter(|(id, log)| !(log.is_passing_beam() && num_blocks(*id) == 0))
            .partition(|(_, log)| log.is_finished_at(step));
        finished.sort_by_key(|(id, log)| (std::cmp::Reverse(log.finish.as_ref().map(|f| f.0)), *id));
        finished.truncate(max_finished);
        let row = |(id, log): (RequestId, &RequestLog)| {
            self.row(id, log, entry, state_at(log, states.get(&id), step), num_blocks(id))
        };
        let mut rows: Vec<RequestRow> = alive.into_iter().map(row).collect();
        rows.sort_by_key(|r| (matches!(r.state, RowState::Waiting { .. }), r.id));
        rows.extend(finished.into_iter().map(row));
        rows
    }

    fn row(&self, id: RequestId, log: &RequestLog, entry: &Entry, state: RowState, num_blocks: u32) -> RequestRow {
        let step = entry.record.step;
        let end = match &log.finish {
            Some((s, _)) if *s <= step => log.last_token_us().unwrap_or_else(|| entry.end_us()),
            _ => entry.end_us(),
        };
        RequestRow {
            id,
            owner: self.owner_of(id),
            label: self.label(id),
            state,
            prompt_tokens: log.prompt_tokens,
            cached_tokens: log.cached_tokens,
            output_tokens: log.num_output(step) as u32,
            num_blocks,
            ttft_us: log.ttft_us(step),
            tokens_per_s: log.rate(step, 24),
            preemptions: log.num_preempted(step) as u32,
            age_us: log.submitted_us.map(|s| end.saturating_sub(s)),
        }
    }
}

/// What a record says of the requests that it names.
fn states_of(record: &StepRecord) -> FxHashMap<RequestId, RowState> {
    let mut states = FxHashMap::default();
    for row in &record.rows {
        let state = match row.kind {
            RowKind::Decode => RowState::Decoding,
            RowKind::Prefill { cached } | RowKind::Recompute { cached } => {
                let to = row.from + row.num_tokens;
                RowState::Reading { from: row.from, to, total: to, cached }
            }
        };
        states.insert(row.request, state);
    }
    for p in &record.preempted {
        states.insert(p.victim, RowState::Waiting { reason: None, was_preempted: true });
    }
    for (request, reason) in &record.waiting {
        states.insert(*request, RowState::Waiting { reason: Some(*reason), was_preempted: false });
    }
    states
}

fn state_at(log: &RequestLog, named: Option<&RowState>, step: u64) -> RowState {
    if let Some((finish_step, reason)) = &log.finish
        && *finish_step <= step
    {
        return RowState::Finished(reason.clone());
    }
    let was_preempted = log.num_preempted(step) > 0;
    match named {
        Some(RowState::Waiting { reason, .. }) => RowState::Waiting { reason: *reason, was_preempted },
        Some(RowState::Reading { from, to, total, cached }) => {
            RowState::Reading { from: *from, to: *to, total: (*total).max(log.prompt_tokens), cached: *cached }
        }
        Some(state) => state.clone(),
        None if log.tokens.is_empty() => RowState::Waiting { reason: None, was_preempted },
        None => RowState::Idle,
    }
}

fn fill_in(log: &mut RequestLog, info: &RequestInfo) {
    log.owner = Some(info.owner.id);
    log.label.clone_from(&info.owner.label);
    (log.parent, log.choice, log.is_beam) = (info.parent, info.choice, info.is_beam);
    log.prompt_tokens = info.prompt_tokens;
    log.cached_tokens = log.cached_tokens.max(info.cached_tokens);
    log.submitted_us = Some(info.submitted_us);
    log.first_token_us = info.first_token_us.or(log.first_token_us);
    if let (None, RequestState::Finished, Some(reason)) = (&log.finish, info.state, &info.finish) {
        log.finish = Some((log.last_step, reason.clone()));
    }
}
