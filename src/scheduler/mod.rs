//! Decides, step by step, who computes what: one loop without phases, in which a sequence's computed positions catch
//! up with its tokens. Chunked prefill, prefix hits and resumption after a preemption are the same arithmetic; decode
//! is a chunk of one.
//!
//! Guarantees: a step is a transaction ([`Scheduler::plan_step`], then one of [`Scheduler::commit`],
//! [`Scheduler::release`], [`Scheduler::abandon`]); a request that can never fit is refused at once; while there is work
//! and budget, each step advances some request; no request is preempted more often than the configuration says; each
//! request ends exactly once. The cost of a step does not grow with the queue beyond those admitted.
//! It reads no clock: budgets and step numbers come in with [`PlanInputs`].
//! It does not look at text: the engine decides stop strings and calls [`Scheduler::finish`].

mod clients;
mod commit;
mod fork;
mod gang;
mod gang_blocks;
mod gang_swap;
mod integrity;
mod journal;
mod plan;
mod planner;
mod policy;
mod preemption;
mod prefill;
mod prefixes;
mod queue;
mod sequence;

pub use clients::ClientView;
#[cfg(test)]
#[path = "tests/gangs.rs"]
mod gang_tests;

pub use commit::{Committed, RowResult};
pub use fork::{NewFork, QueuePlace};
pub use gang::{GangAdvance, GangBlocks, GangChild, GangNext, GangRows, gang_bound};
pub use integrity::{SequenceView, StateView};
pub use journal::Op;
pub use plan::{Admission, PlanRow, PreemptMode, Preemption, RowKind, StepPlan, VictimPolicy, WaitReason};
pub use planner::PlanInputs;
pub use policy::default_watermark;
pub use preemption::{PreemptCosts, PreemptionMode};
pub use prefixes::{MAX_PINNED_PERCENT, NewPin, YieldedPin};
pub use queue::QueuePolicy;
pub use sequence::{NewSequence, SeqStatus, Sequence, TokenCount};

pub use crate::kv::HostTransfer;

use crate::ids::{MIN_CONTEXT, RequestId, SeqSlot, TokenId};
use crate::kv::{BlockTable, CacheKey, KvCache};
use crate::protocol::{FinishReason, InvalidParam, RunError, Usage};
use gang::Gang;
use planner::Undo;
use queue::{QueueConfig, WaitingQueue};
use rustc_hash::FxHashMap;

/// At most so many waiting requests are given a reason per step.
pub const MAX_REASONS: usize = 64;

/// Every limit of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SchedulerConfig {
    /// Slots of the batch; at least 1.
    pub max_num_seqs: u32,
    /// Tokens per step at most; at least `max_num_seqs`, so that every row can decode.
    pub max_tokens_per_step: u32,
    /// Tokens of one sequence at most, prompt included.
    pub max_model_len: u32,
    /// Requests in the queue at most.
    pub max_waiting: u32,
    /// Tokens of one prompt per step at most; at least 1.
    pub long_prefill_cap: u32,
    /// Blocks kept free by admissions for the growth of what runs, at most a few for each that runs.
    pub watermark_blocks: u32,
    /// A request preempted this often is not preempted again; 0 admits only what fits to its end.
    pub max_preemptions: u32,
    /// Who is admitted first.
    pub queue_policy: QueuePolicy,
    /// Steps of waiting that make up for one level of priority, or for the longest cached prefix; at least 1.
    pub aging_steps: u32,
    pub victim: VictimPolicy,
    pub preemption: PreemptionMode,
    pub check: CheckLevel,
}

/// How much is asserted after each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum CheckLevel {
    /// What costs no walk over blocks or tables.
    Cheap,
    /// Every invariant: for tests.
    Full,
}

/// The end of a request. Each request that was added ends exactly once.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub request: RequestId,
    pub outcome: Result<FinishReason, RunError>,
    pub usage: Usage,
    /// Prompt and output.
    pub tokens: Vec<TokenId>,
    pub key: CacheKey,
    /// What it was forked from.
    pub parent: Option<RequestId>,
}

/// Sums since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub preemptions: u64,
    pub computed_tokens: u64,
    /// Computed tokens that had been computed before.
    pub recomputed_tokens: u64,
    /// Of the preemptions: those that saved their blocks to host memory.
    pub swaps: u64,
    /// Positions that came back from host memory instead of being computed.
    pub restored_tokens: u64,
    /// Blocks copied because a sharer was about to write.
    pub copied_blocks: u64,
    /// Blocks of windowed layers given back because no later token sees them.
    pub slid_blocks: u64,
    /// Output tokens that were not sampled.
    pub forced_tokens: u64,
}

/// Place of a sequence in the scheduler's storage.
pub(crate) type SeqIdx = u32;

/// Queue, batch and cache.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    kv: KvCache,
    seqs: Vec<Option<Sequence>>, // by SeqIdx
    vacant: Vec<SeqIdx>,
    by_id: FxHashMap<RequestId, SeqIdx>,
    /// By the leader's id.
    gangs: FxHashMap<RequestId, Gang>,
    running: Vec<SeqIdx>,
    waiting: WaitingQueue,
    free_slots: Vec<SeqSlot>,
    /// The step that is planned and neither committed nor released.
    in_flight: Option<u64>,
    undo: Vec<Undo>,
    /// Ends that wait for the step in flight.
    deferred: Vec<(RequestId, FinishReason)>,
    /// Damage that the step in flight found: in whose blocks, and from which position on.
    suspect: Vec<(RequestId, u32)>,
    /// Pins that gave way since the last step that was committed.
    yielded: Vec<YieldedPin>,
    ended: Vec<Ended>,
    totals: Totals,
    journal: Option<Vec<Op>>,
    /// The last step planned: the clock of aging.
    last_step: u64,
    /// Where the next look at cached prefixes of waiting requests begins, and how many places are left to look at.
    rescore_at: usize,
    rescore_left: usize,
    kv_changes: u64,
    num_looked_at: u64,
    /// Blocks that pins under way will take.
    pinning_blocks: u32,
    order: Vec<SeqIdx>, // scratch: the running list at the start of a pass
}

impl Scheduler {
    /// Panics when a limit contradicts another: the configuration is checked before it comes here.
    pub fn new(config: SchedulerConfig, kv: KvCache) -> Self {
        assert!(config.max_num_seqs >= 1, "max_num_seqs must be at least 1");
        assert!(config.max_tokens_per_step >= config.max_num_seqs, "max_tokens_per_step must allow a token per slot");
        assert!(config.long_prefill_cap >= 1, "long_prefill_cap must be at least 1");
        assert!(config.max_model_len >= MIN_CONTEXT, "max_model_len must hold a prompt and an output token");
        Scheduler {
            config,
            kv,
            seqs: Vec::new(),
            vacant: Vec::new(),
            by_id: FxHashMap::default(),
            gangs: FxHashMap::default(),
            running: Vec::new(),
            waiting: WaitingQueue::new(QueueConfig {
                policy: config.queue_policy,
                aging_steps: config.aging_steps,
                max_model_len: config.max_model_len,
            }),
            free_slots: all_slots(config.max_num_seqs),
            in_flight: None,
            undo: Vec::new(),
            deferred: Vec::new(),
            suspect: Vec::new(),
            yielded: Vec::new(),
            ended: Vec::new(),
            totals: Totals::default(),
            journal: None,
            last_step: 0,
            rescore_at: 0,
            rescore_left: 0,
            kv_changes: 0,
            num_looked_at: 0,
            pinning_blocks: 0,
            order: Vec::new(),
        }
    }

    /// Puts a request in the queue, or refuses it: what can never fit does not wait. Allowed while a step is
    /// in flight. The caller has checked sampling parameters and that every token is in the vocabulary.
    pub fn add(&mut self, new: NewSequence) -> Result<(), RunError> {
        assert!(!self.by_id.contains_key(&new.id), "request {} is added twice", new.id);
        self.note(|_| Op::Add(new.clone()));
        self.enqueue(new)
    }

    /// Adds what is noted otherwise.
    fn enqueue(&mut self, new: NewSequence) -> Result<(), RunError> {
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(RunError::QueueFull { limit: self.config.max_waiting });
        }
        let seq = self.sequence(new)?;
        self.arrive(seq);
        Ok(())
    }

    /// Puts a request also into a full queue: for what belongs to a request that was admitted already.
    pub fn add_beside(&mut self, new: NewSequence) -> Result<(), RunError> {
        assert!(!self.by_id.contains_key(&new.id), "request {} is added twice", new.id);
        self.note(|_| Op::AddBeside(new.clone()));
        let seq = self.sequence(new)?;
        self.arrive(seq);
        Ok(())
    }

    /// A sequence that is not in the queue yet; refuses what can never fit.
    fn sequence(&self, new: NewSequence) -> Result<Sequence, RunError> {
        let max_total = self.max_total(&new)?;
        let chain = self.kv.new_chain(CacheKey { salt: new.cache_salt, adapter: new.adapter });
        Ok(Sequence::new(new, chain, max_total, self.last_step))
    }

    fn arrive(&mut self, mut seq: Sequence) {
        seq.ticket.cached_tokens = self.score(&seq);
        let ticket = seq.ticket;
        let idx = self.place(seq);
        self.waiting.arrive(idx, &ticket);
    }

    /// Stores a sequence.
    fn place(&mut self, seq: Sequence) -> SeqIdx {
        let idx = match self.vacant.pop() {
            Some(idx) => idx,
            None => {
                self.seqs.push(None);
                self.seqs.len() as SeqIdx - 1
            }
        };
        self.by_id.insert(seq.id, idx);
        self.seqs[idx as usize] = Some(seq);
        idx
    }

    /// Ends a request at its client's wish; its blocks are free at once, or after the step in flight. False when the
    /// request is not live.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.finish(id, FinishReason::Aborted)
    }

    /// Ends a request for a reason that the scheduler cannot see, such as a stop string. A token that the step in flight
    /// samples for it is dropped, and what that step computes for it is not published. False when it is not live.
    /// Any beam of a search stands for all of it.
    pub fn finish(&mut self, id: RequestId, reason: FinishReason) -> bool {
        let Some(id) = self.by_id.get(&id).map(|idx| self.party(*idx)) else { return false };
        let idx = self.by_id[&id];
        self.note(|_| Op::Finish { request: id, reason: reason.clone() });
        if self.in_flight.is_none() {
            self.end(idx, Ok(reason));
            return true;
        }
        let seq = self.seq_mut(idx);
        if seq.is_ending {
            return false;
        }
        seq.is_ending = true;
        for member in self.gangs.get(&id).map_or(Vec::new(), |gang| gang.members.clone()) {
            self.seq_mut(member).is_ending = true;
        }
        self.deferred.push((id, reason));
        true
    }

    /// The step in flight found the content of a request's blocks damaged from `position` on: from its commit on, those
    /// blocks are never found again.
    pub fn taint_from(&mut self, request: RequestId, position: u32) {
        self.note(|_| Op::Taint { request, position });
        self.suspect.push((request, position));
    }

    /// The requests that ended since the last call, in order.
    pub fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// True while some request runs or waits.
    pub fn has_work(&self) -> bool {
        !self.by_id.is_empty()
    }

    /// The cache and its memory are lost: takes a new cache and puts every live request back in the queue in order of
    /// arrival, tokens kept. Requests that can never fit in the new cache end. A step in flight is dropped.
    pub fn restart(&mut self, kv: KvCache) {
        self.note(|_| Op::Restart(kv.config()));
        self.in_flight = None;
        self.undo.clear();
        self.suspect.clear();
        self.totals.copied_blocks += self.kv.counts().copied_blocks;
        let mut pins = self.kv.take_lost_pins();
        pins.extend(self.kv.pin_specs().cloned());
        self.kv = kv;
        self.pinning_blocks = 0;
        self.free_slots = all_slots(self.config.max_num_seqs);
        let mut live: Vec<(RequestId, SeqIdx)> = self.by_id.iter().map(|(id, idx)| (*id, *idx)).collect();
        live.sort_unstable();
        self.running.clear();
        self.gangs.values_mut().for_each(|gang| gang.spare_slots.clear());
        let total = self.kv.num_usable();
        let chunk = policy::chunk(u32::MAX, &self.config);
        for (id, idx) in live {
            let seq = self.seqs[idx as usize].as_mut().expect("ids in the index are live");
            if seq.status == SeqStatus::Running && !seq.is_follower() {
                self.waiting.put_back(idx, &seq.ticket);
            }
            seq.reset_progress();
            (seq.swapped, seq.restored_from) = (None, None);
            seq.table = BlockTable::new(id);
            seq.chain = self.kv.new_chain(seq.key);
            seq.chain.extend(&seq.tokens);
            if let Some(pinning) = &mut seq.pin {
                pinning.needed = pinning.spec.tokens.len() as u32 / self.kv.block_size();
                self.pinning_blocks += pinning.needed;
            }
            if seq.stop.max_tokens.is_none() {
                seq.max_total = self.kv.capacity(total, seq.max_total, chunk);
            }
            let (gang, is_bounded) = (seq.gang, seq.stop.max_tokens.is_some());
            let mut needed = self.kv.blocks_needed(seq.max_total.max(seq.num_tokens() + 1), chunk);
            match gang {
                Some(gang) if gang == id => needed = self.refit_gang(id, is_bounded),
                Some(_) => continue,
                None => {}
            }
            if needed > total {
                self.end(idx, Err(RunError::NeverFits { needed, total }));
            }
        }
        self.end_deferred();
        self.renew_pins(pins);
        self.verify();
    }

    pub fn config(&self) -> SchedulerConfig {
        self.config
    }

    /// The cache, to be read.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// What happened to blocks since the last call. Call it after each step, and after aborts.
    pub fn drain_block_events(&mut self) -> std::vec::Drain<'_, crate::kv::BlockEvent> {
        self.note(|scheduler| Op::Blocks(scheduler.kv.events().to_vec()));
        self.kv.drain_events()
    }

    /// Whether changes of what can be found are kept, see [`KvCache::keep_changes`]. Nothing is decided by it.
    pub fn keep_prefix_changes(&mut self, is_wanted: bool) {
        self.kv.keep_changes(is_wanted);
    }

    /// Changes of what can be found since the last call, see [`KvCache::take_changes`].
    pub fn take_prefix_changes(&mut self) -> Vec<crate::kv::PrefixChange> {
        self.kv.take_changes()
    }

    pub fn totals(&self) -> Totals {
        let copied_blocks = self.totals.copied_blocks + self.kv.counts().copied_blocks;
        Totals { copied_blocks, ..self.totals }
    }

    /// A live request.
    pub fn get(&self, id: RequestId) -> Option<&Sequence> {
        self.by_id.get(&id).map(|idx| self.seq(*idx))
    }

    /// In batch order.
    pub fn running(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.running.iter().map(|idx| self.seq(*idx))
    }

    /// In queue order.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Sequence> {
        self.waiting.iter().map(|idx| self.seq(idx))
    }

    /// Requests that wait.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that run or wait.
    pub fn num_live(&self) -> usize {
        self.by_id.len()
    }

    /// The accounts of all clients that are remembered, in no order.
    pub fn clients(&self) -> impl Iterator<Item = &ClientView> {
        self.waiting.clients()
    }

    /// Sequences that planning has looked at since start, once for each time: what a step costs, without a clock.
    pub fn num_looked_at(&self) -> u64 {
        self.num_looked_at
    }

    /// Running sequences that need one token only.
    pub fn num_decoding(&self) -> usize {
        self.running().filter(|seq| seq.num_remaining() == 1 && seq.num_output() > 0).count()
    }

    /// The most tokens that this request may come to, or why it cannot run.
    fn max_total(&self, new: &NewSequence) -> Result<u32, RunError> {
        let limit = self.config.max_model_len;
        let prompt = u32::try_from(new.prompt.len()).unwrap_or(u32::MAX);
        if prompt == 0 {
            return Err(RunError::EmptyPrompt);
        }
        if new.stop.max_tokens == Some(0) {
            let message = "must be at least 1, not 0".into();
            return Err(InvalidParam { field: "max_tokens", message }.into());
        }
        if prompt > limit {
            return Err(RunError::PromptTooLong { prompt, max_model_len: limit });
        }
        let needed = prompt.saturating_add(new.stop.max_tokens.unwrap_or(1));
        if needed > limit {
            return Err(RunError::ContextExceeded { needed, max_model_len: limit });
        }
        let key = CacheKey { salt: new.cache_salt, adapter: new.adapter };
        let chunk = policy::chunk(u32::MAX, &self.config);
        let (blocks, total) = (self.kv.blocks_needed(needed, chunk), self.room_for(&new.prompt, key));
        if blocks > total {
            return Err(RunError::NeverFits { needed: blocks, total });
        }
        Ok(match new.stop.max_tokens {
            Some(_) => needed,
            None => self.kv.capacity(total, limit, chunk),
        })
    }

    fn seq(&self, idx: SeqIdx) -> &Sequence {
        self.seqs[idx as usize].as_ref().expect("an index in use names a live sequence")
    }

    fn seq_mut(&mut self, idx: SeqIdx) -> &mut Sequence {
        self.seqs[idx as usize].as_mut().expect("an index in use names a live sequence")
    }

    /// Takes a sequence out of queue or batch and gives its blocks back.
    fn end(&mut self, idx: SeqIdx, outcome: Result<FinishReason, RunError>) {
        assert!(self.in_flight.is_none(), "a sequence ends between steps");
        if let Some(gang) = self.seq(idx).gang {
            self.disband(gang);
        }
        let mut seq = self.seqs[idx as usize].take().expect("only a live sequence ends");
        match seq.status {
            SeqStatus::Running => self.running.retain(|other| *other != idx),
            SeqStatus::Waiting => {}
        }
        // What was charged and never computed is given back.
        let paid = if seq.ticket.cost > 0 { 0 } else { seq.num_prompt - seq.cached_tokens.unwrap_or(0) };
        let used = seq.computed_peak.min(seq.num_prompt).saturating_sub(seq.cached_tokens.unwrap_or(0));
        self.waiting.leave(&seq.ticket, seq.status == SeqStatus::Running, paid.saturating_sub(used));
        if let Some(slot) = seq.slot {
            self.free_slots.push(slot);
        }
        self.by_id.remove(&seq.id);
        self.vacant.push(idx);
        if let Some(swapped) = seq.swapped.take() {
            self.kv.drop_swapped(swapped);
        }
        if outcome.is_ok() && seq.pin.is_none() {
            self.kv.publish_tail(&seq.table, &mut seq.chain, &seq.tokens[..seq.num_public as usize]);
        }
        self.settle_pin(seq, outcome);
    }

    /// Ends what was to end after the step that was in flight.
    fn end_deferred(&mut self) {
        let mut deferred = std::mem::take(&mut self.deferred);
        for (id, reason) in deferred.drain(..) {
            if let Some(&idx) = self.by_id.get(&id) {
                self.end(idx, Ok(reason));
            }
        }
        self.deferred = deferred;
    }
}

/// The first slot is on top.
fn all_slots(max_num_seqs: u32) -> Vec<SeqSlot> {
    (0..max_num_seqs).rev().map(SeqSlot).collect()
}
