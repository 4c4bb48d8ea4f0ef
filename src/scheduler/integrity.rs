//! The invariants of queue, batch and plan. Numbers are those of the design's list of invariants.

use super::policy::is_protected;
use super::queue::QueueMark;
use super::{CheckLevel, ClientView, PlanRow, Scheduler, SeqIdx, SeqStatus, StepPlan};
use crate::kv::HeldTable;

impl Scheduler {
    /// Every invariant that holds between steps and while one is in flight; the text names the one that is broken.
    pub fn check_integrity(&self) -> Result<(), String> {
        let held = self.live().map(|seq| HeldTable {
            table: &seq.table,
            tokens: &seq.tokens,
            num_valid: seq.num_valid,
            key: seq.key,
            swapped: seq.swapped.as_ref(),
        });
        self.kv.check_integrity(held)?;
        self.check_partition()?;
        self.check_slots()?;
        self.check_gangs()?;
        self.check_clients()?;
        for seq in self.seqs.iter().flatten() {
            self.check_sequence(seq)?;
        }
        let claimed = self.total_claimed();
        if claimed > self.kv.num_available() {
            let available = self.kv.num_available();
            return Err(format!(
                "invariant 15: {claimed} blocks are kept for protected requests, {available} are there"
            ));
        }
        Ok(())
    }

    /// The rules that a plan keeps, against the state it was made from.
    pub fn check_plan(&self, plan: &StepPlan) -> Result<(), String> {
        if plan.num_tokens() > plan.budget || plan.budget > self.config.max_tokens_per_step {
            return Err(format!("invariant 12: {} tokens are planned within {}", plan.num_tokens(), plan.budget));
        }
        // The beams of a search step together or not at all.
        let is_too_small = |seq: &super::Sequence| self.is_gang_over_budget(seq, plan.budget);
        if plan.rows.is_empty() && plan.budget > 0 && self.has_work() && !self.running().any(is_too_small) {
            return Err(format!("invariant 14: step {} has work and budget, but no row", plan.step));
        }
        if plan.rows.is_empty() && !(plan.swap_out.is_empty() && plan.swap_in.is_empty()) {
            return Err(format!("step {} moves content for nobody", plan.step));
        }
        if !plan.preempted.is_empty() && !plan.admitted.is_empty() {
            return Err(format!("step {} admits beside a preemption", plan.step));
        }
        let mut is_planned = vec![false; self.config.max_num_seqs as usize];
        for row in &plan.rows {
            let Some(seq) = self.get(row.request) else {
                return Err(format!("invariant 13: request {} is planned, but not live", row.request));
            };
            if std::mem::replace(&mut is_planned[row.slot.idx()], true) {
                return Err(format!("invariant 10: the slot of request {} has two rows", row.request));
            }
            let in_order =
                seq.status == SeqStatus::Running && seq.slot == Some(row.slot) && seq.num_computed == row.from;
            if !in_order || row.num_tokens == 0 || row.to() > seq.num_tokens() {
                return Err(format!("request {} is planned out of order: {row:?}", row.request));
            }
            self.check_writes(row, seq)?;
            if row.to() > seq.table.slots() || row.wants_logits != (row.to() == seq.num_tokens()) {
                return Err(format!("invariant 6: request {} is planned beyond its blocks: {row:?}", row.request));
            }
        }
        Ok(())
    }

    /// What a row writes, nobody else sees: so no two rows write the same slot.
    fn check_writes(&self, row: &PlanRow, seq: &super::Sequence) -> Result<(), String> {
        if row.write_from < row.from || row.write_from > row.to() || row.write_from != seq.num_valid {
            return Err(format!("invariant 10: request {} writes out of order: {row:?}", row.request));
        }
        let size = self.kv.block_size();
        let written = row.write_from / size..self.kv.blocks_for(row.to());
        let mut blocks = seq.table.ids().iter().take(written.end as usize).skip(written.start as usize);
        match blocks.find(|&&block| row.write_from < row.to() && !self.kv.is_writable(block)) {
            Some(block) => Err(format!("invariant 9: request {} writes block {block}, which others see", row.request)),
            None => Ok(()),
        }
    }

    /// Asserts as much as the configuration asks for.
    pub(super) fn verify(&self) {
        let checked = match self.config.check {
            CheckLevel::Cheap => self.kv.check_counts(),
            CheckLevel::Full => self.check_integrity(),
        };
        if let Err(broken) = checked {
            panic!("{broken}");
        }
    }

    pub(super) fn verify_plan(&self, plan: &StepPlan) {
        self.verify();
        if let Err(broken) = self.check_plan(plan) {
            panic!("{broken}");
        }
    }

    fn check_partition(&self) -> Result<(), String> {
        let mut times_seen = vec![0u32; self.seqs.len()];
        let running = self.running.iter().map(|idx| (*idx, SeqStatus::Running));
        let waiting = self.waiting.in_any_order().map(|idx| (idx, SeqStatus::Waiting));
        let folded: Vec<(SeqIdx, SeqStatus)> = self.folded_beams().map(|idx| (idx, SeqStatus::Waiting)).collect();
        let num_folded = folded.len();
        for (idx, status) in running.chain(waiting).chain(folded) {
            times_seen[idx as usize] += 1;
            if self.seqs[idx as usize].as_ref().is_none_or(|seq| seq.status != status) {
                return Err(format!("invariant 13: place {idx} is listed as {status:?}, but is not"));
            }
        }
        for (id, idx) in &self.by_id {
            if times_seen[*idx as usize] != 1 || self.seq(*idx).id != *id {
                return Err(format!("invariant 13: request {id} is listed {} times", times_seen[*idx as usize]));
            }
        }
        let num_listed = self.running.len() + self.waiting.len() + num_folded;
        let num_live = self.seqs.iter().flatten().count();
        if num_listed != self.by_id.len() || num_live != num_listed || num_live + self.vacant.len() != self.seqs.len() {
            return Err(format!("invariant 13: {num_live} sequences live, {num_listed} are listed"));
        }
        Ok(())
    }

    /// Running in batch order, then waiting in no order, then beams that wait for their leader.
    fn live(&self) -> impl Iterator<Item = &super::Sequence> {
        let listed = self.running.iter().copied().chain(self.waiting.in_any_order());
        listed.chain(self.folded_beams()).map(|idx| self.seq(idx))
    }

    /// Beams that wait for their leader: they are in no list.
    fn folded_beams(&self) -> impl Iterator<Item = SeqIdx> {
        let is_folded = |seq: &super::Sequence| seq.is_follower() && seq.status == SeqStatus::Waiting;
        let beams = self.gangs.values().flat_map(|gang| gang.members.iter().copied());
        beams.filter(move |idx| is_folded(self.seq(*idx)))
    }

    /// Every live request is counted once with its client.
    fn check_clients(&self) -> Result<(), String> {
        let counted = self.clients().fold((0, 0), |sum, view| (sum.0 + view.running, sum.1 + view.waiting));
        // The beams of a search count as one.
        let num_running = self.running().filter(|seq| !seq.is_follower()).count() as u32;
        let listed = (num_running, self.waiting.len() as u32);
        if counted != listed {
            return Err(format!("invariant 13: clients have (running, waiting) {counted:?}, {listed:?} are listed"));
        }
        let is_known = |seq: &super::Sequence| self.waiting.client(seq.client()).is_some();
        match self.live().find(|seq| !is_known(seq)) {
            Some(seq) => Err(format!("invariant 13: the client of request {} has no account", seq.id)),
            None => Ok(()),
        }
    }

    fn check_slots(&self) -> Result<(), String> {
        let mut is_taken = vec![false; self.config.max_num_seqs as usize];
        let taken = self.running().filter_map(|seq| seq.slot);
        let spare = self.gangs.values().flat_map(|gang| gang.spare_slots.iter().copied());
        for slot in taken.chain(self.free_slots.iter().copied()).chain(spare) {
            if std::mem::replace(&mut is_taken[slot.idx()], true) {
                return Err(format!("slot {slot} is in use twice, or in use and free"));
            }
        }
        if let Some(lost) = is_taken.iter().position(|is_taken| !is_taken) {
            return Err(format!("slot {lost} is lost"));
        }
        Ok(())
    }

    /// The invariants of gangs, between steps and while one is in flight.
    fn check_gangs(&self) -> Result<(), String> {
        for (id, gang) in &self.gangs {
            let leader = self.by_id.get(id).filter(|idx| gang.members.contains(idx));
            let Some(leader) = leader.map(|idx| self.seq(*idx)) else {
                return Err(format!("search {id} has no leader among its beams"));
            };
            let of_gang = |idx: &SeqIdx| self.seqs[*idx as usize].as_ref().is_some_and(|seq| seq.gang == Some(*id));
            if gang.members.len() > gang.width as usize || !gang.members.iter().all(of_gang) {
                return Err(format!("search {id} has beams that are not its own, or too many"));
            }
            let beams = || gang.members.iter().map(|idx| self.seq(*idx));
            let num_running = beams().filter(|seq| seq.status == SeqStatus::Running).count();
            let is_running = leader.status == SeqStatus::Running;
            let slots = num_running + gang.spare_slots.len();
            if slots != if is_running { gang.width as usize } else { 0 } {
                return Err(format!("search {id} of {} beams is {:?} with {slots} slots", gang.width, leader.status));
            }
            if beams().any(|seq| seq.num_tokens() != leader.num_tokens() || seq.preemptions != leader.preemptions) {
                return Err(format!("the beams of search {id} are not at the same token"));
            }
            let held = self.held_blocks(gang);
            if held > gang.max_blocks {
                return Err(format!("search {id} holds {held} blocks, at most {} were foreseen", gang.max_blocks));
            }
        }
        let num_members: usize = self.gangs.values().map(|gang| gang.members.len()).sum();
        let num_tagged = self.seqs.iter().flatten().filter(|seq| seq.gang.is_some()).count();
        if num_members != num_tagged {
            return Err(format!("{num_tagged} sequences say that they are beams, {num_members} are"));
        }
        Ok(())
    }

    fn check_sequence(&self, seq: &super::Sequence) -> Result<(), String> {
        let id = seq.id;
        if seq.num_computed >= seq.num_tokens() || seq.num_tokens() > seq.max_total {
            let (computed, tokens, max) = (seq.num_computed, seq.num_tokens(), seq.max_total);
            return Err(format!("invariant 6: request {id} computed {computed} of {tokens} tokens, at most {max}"));
        }
        let is_last_found = seq.num_valid == seq.num_tokens() && seq.num_computed + 1 == seq.num_valid;
        if seq.num_valid != seq.num_computed && !is_last_found || seq.num_public > seq.num_computed {
            let (computed, valid) = (seq.num_computed, seq.num_valid);
            return Err(format!("invariant 6: request {id} computed {computed} positions, {valid} are there"));
        }
        if seq.num_pending > 0 && self.in_flight.is_none() {
            return Err(format!("request {id} awaits a token, but no step is in flight"));
        }
        let is_idle = seq.slot.is_none() && seq.table.num_blocks() == 0 && seq.num_computed == 0;
        if seq.status == SeqStatus::Waiting && !is_idle || seq.status == SeqStatus::Running && seq.slot.is_none() {
            return Err(format!("request {id} is {:?}, but its slot and blocks say otherwise", seq.status));
        }
        if seq.swapped.is_some() && seq.status == SeqStatus::Running {
            return Err(format!("request {id} runs, and has blocks in host memory to come back to"));
        }
        if seq.preemptions > self.config.max_preemptions {
            let times = seq.preemptions;
            return Err(format!(
                "invariant 15: request {id} was preempted {times} times (protected: {})",
                is_protected(seq, &self.config)
            ));
        }
        Ok(())
    }
}

/// Everything a step may change, to compare the state before and after.
#[derive(Clone, Debug, PartialEq)]
pub struct StateView {
    /// Running in batch order, then waiting in queue order, then beams that wait for their leader.
    pub sequences: Vec<SequenceView>,
    pub free_slots: Vec<u32>,
    pub blocks: Vec<crate::kv::BlockView>,
    pub free_order: Vec<u32>,
    pub eviction_order: Vec<u32>,
    /// Taken places of host memory.
    pub host: Vec<crate::kv::HostView>,
    pub counts: crate::kv::KvCounts,
    pub totals: super::Totals,
    /// Counters by client.
    pub clients: Vec<ClientView>,
    pub(super) queue_mark: QueueMark,
    pub places: Vec<SeqIdx>,
    /// By id: beams in the order of their search, and spare slots.
    pub gangs: Vec<(u64, Vec<SeqIdx>, Vec<u32>)>,
}

/// One sequence in a [`StateView`].
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceView {
    pub id: u64,
    pub status: SeqStatus,
    pub slot: Option<u32>,
    pub num_tokens: u32,
    pub num_computed: u32,
    pub num_valid: u32,
    pub num_pending: u32,
    pub slots: u32,
    pub blocks: Vec<u32>,
    pub preemptions: u32,
    /// Positions that wait in host memory.
    pub swapped: Option<u32>,
    pub cached_tokens: Option<u32>,
}

impl Scheduler {
    /// A copy of all that a step may change. Costs a walk over everything: for tests and reports of faults.
    pub fn state(&self) -> StateView {
        let view = |seq: &super::Sequence| SequenceView {
            id: seq.id.0,
            status: seq.status,
            slot: seq.slot.map(|slot| slot.0),
            num_tokens: seq.num_tokens(),
            num_computed: seq.num_computed,
            num_valid: seq.num_valid,
            num_pending: seq.num_pending,
            slots: seq.table.slots(),
            blocks: seq.table.ids().iter().map(|id| id.0).collect(),
            preemptions: seq.preemptions,
            swapped: seq.swapped.as_ref().map(|swapped| swapped.num_computed()),
            cached_tokens: seq.cached_tokens,
        };
        let gang = |(id, gang): (&crate::ids::RequestId, &super::Gang)| {
            (id.0, gang.members.clone(), gang.spare_slots.iter().map(|slot| slot.0).collect())
        };
        let mut gangs: Vec<_> = self.gangs.iter().map(gang).collect();
        gangs.sort_unstable();
        let mut folded: Vec<SeqIdx> = self.folded_beams().collect();
        folded.sort_unstable();
        let folded = folded.iter().map(|idx| self.seq(*idx));
        let mut clients: Vec<ClientView> = self.clients().copied().collect();
        clients.sort_unstable_by_key(|view| view.client);
        StateView {
            sequences: self.running().chain(self.waiting()).chain(folded).map(view).collect(),
            free_slots: self.free_slots.iter().map(|slot| slot.0).collect(),
            blocks: self.kv.blocks().collect(),
            free_order: self.kv.free_order().map(|id| id.0).collect(),
            eviction_order: self.kv.eviction_order().map(|id| id.0).collect(),
            host: self.kv.host_views().collect(),
            counts: self.kv.counts(),
            totals: self.totals,
            gangs,
            clients,
            queue_mark: self.waiting.mark(),
            places: self.running.iter().copied().chain(self.waiting.iter()).collect(),
        }
    }
}
