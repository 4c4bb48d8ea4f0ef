//! After a step: apply what it gave, or take it back.

use super::gang::{GangAdvance, GangNext, GangRows};
use super::planner::Undo;
use super::queue::{MAX_SCORED_BLOCKS, QueuePolicy, RESCORED_PER_STEP};
use super::{Op, PlanRow, RowKind, Scheduler, SeqIdx, SeqStatus, Sequence, StepPlan};
use crate::ids::{RequestId, SeqSlot, TokenId};
use crate::kv::BlockTable;
use crate::protocol::{FinishReason, RunError};

/// What a committed step did for one row.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RowResult {
    pub request: RequestId,
    pub slot: SeqSlot,
    pub kind: RowKind,
    pub from: u32,
    pub num_tokens: u32,
    /// Index into the step's results, when the row asked for logits.
    pub logit_idx: Option<u32>,
    /// The token appended; `None` when none was sampled, or it was dropped because the request is ending.
    pub token: Option<TokenId>,
    /// The token was the last. A stop token is counted, but is not part of the text.
    pub finish: Option<FinishReason>,
}

/// The rows of a committed step, in plan order. Ends are read with [`Scheduler::take_ended`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Committed {
    pub step: u64,
    pub rows: Vec<RowResult>,
}

impl Scheduler {
    /// The step ran: computed positions become valid, full blocks findable, sampled tokens part of their sequences.
    /// `sampled` and `not_finite` have one entry per row that wants logits, in plan order; a row that is not finite ends
    /// with an error, and the blocks that it read are never shared again.
    pub fn commit(&mut self, plan: &StepPlan, sampled: &[TokenId], not_finite: &[bool]) -> Committed {
        self.commit_gangs(plan, sampled, not_finite, &[])
    }

    /// [`Self::commit`] where the plan has [`Self::gang_rows`]: what is sampled in them is not used; the search says with
    /// `advances` how each gang goes on. A gang with a row that is not finite ends with an error.
    pub fn commit_gangs(
        &mut self,
        plan: &StepPlan,
        sampled: &[TokenId],
        not_finite: &[bool],
        advances: &[GangAdvance],
    ) -> Committed {
        self.close(plan);
        assert_eq!(sampled.len(), plan.num_logits(), "one sampled token per row that wants logits");
        assert_eq!(not_finite.len(), sampled.len(), "one flag per sampled token");
        self.kv.commit();
        self.taint_suspects();
        self.undo.clear();
        self.count_preemptions(plan);
        let gangs = self.gang_rows(plan);
        let mut committed = Committed { step: plan.step, rows: Vec::with_capacity(plan.rows.len()) };
        let mut num_logits = 0;
        for row in &plan.rows {
            let logit_idx = row.wants_logits.then_some(num_logits);
            num_logits += usize::from(row.wants_logits);
            let sampled = logit_idx.map(|l| (sampled[l], not_finite[l]));
            let mut result = self.commit_row(row, sampled);
            result.logit_idx = logit_idx.map(|l| l as u32);
            committed.rows.push(result);
        }
        self.advance_gangs(gangs, not_finite, advances);
        self.end_deferred();
        self.yielded.clear();
        let lost = self.kv.take_lost_pins();
        self.renew_pins(lost);
        self.rescore();
        self.verify();
        self.note(|_| Op::Commit {
            sampled: sampled.to_vec(),
            not_finite: not_finite.to_vec(),
            advances: advances.to_vec(),
            rows: committed.rows.clone(),
        });
        committed
    }

    /// Appends a token to a running request without running the model, as if it had been sampled: the next step computes it
    /// beside the one before. For tokens that would be sampled whatever the logits are, where [`Self::can_force`] says so.
    /// The reason says that it was the last.
    pub fn force(&mut self, request: RequestId, token: TokenId) -> Option<FinishReason> {
        assert!(
            self.can_force(request),
            "a token of request {request} is forced that asks for a block, or has no place"
        );
        let idx = self.by_id[&request];
        let seq = self.seqs[idx as usize].as_mut().expect("ids in the index are live");
        let client = seq.ticket.client;
        let finish = seq.append(token);
        self.waiting.charge(client, 1);
        self.waiting.serve(client, 1);
        self.totals.forced_tokens += 1;
        self.note(|_| Op::Force { request, token, finish: finish.clone() });
        if let Some(reason) = finish.clone() {
            self.end(idx, Ok(reason));
        }
        self.verify();
        finish
    }

    /// Whether a token may be forced behind the last one of a request: between steps, for one that has sampled a token of
    /// its own and is no beam, and only where it finds its place in blocks that the request has. So nobody gives way for
    /// it, and what running requests were promised is as it was. What windowed groups hold grows with the tokens that a
    /// step computes: there none is forced.
    pub fn can_force(&self, request: RequestId) -> bool {
        let Some(seq) = self.get(request).filter(|_| self.in_flight.is_none() && self.has_one_group()) else {
            return false;
        };
        let is_decoding = seq.status == SeqStatus::Running && seq.gang.is_none() && seq.num_output() > 0;
        is_decoding && self.kv.needed_blocks(&seq.table, seq.num_valid, seq.num_tokens() + 1) == 0
    }

    fn advance_gangs(&mut self, gangs: Vec<GangRows>, not_finite: &[bool], advances: &[GangAdvance]) {
        for rows in gangs {
            let leader = self.by_id[&rows.gang];
            if rows.logits.iter().any(|&l| not_finite[l]) {
                let position = self.seq(leader).num_tokens();
                self.end(leader, Err(RunError::NotFinite { position }));
                continue;
            }
            let advance = advances.iter().find(|advance| advance.gang == rows.gang);
            match &advance.unwrap_or_else(|| panic!("nobody says how search {} goes on", rows.gang)).next {
                GangNext::Beams(children) => self.advance_gang(rows.gang, children),
                GangNext::End(reason) => self.end(leader, Ok(reason.clone())),
            }
        }
    }

    /// The step did not run and nothing was written: the state is again as before [`Scheduler::plan_step`].
    pub fn release(&mut self, plan: &StepPlan) {
        self.note(|_| Op::Release);
        self.close(plan);
        self.suspect.clear();
        self.kv.undo();
        while let Some(undo) = self.undo.pop() {
            self.apply(undo);
        }
        self.end_deferred();
        self.verify();
    }

    /// The step failed and may have written some of its slots: nothing is computed, but nothing that may have been
    /// overwritten comes back either. Rows keep their blocks, preempted requests stay in the queue, and the same
    /// positions are planned again. A copy may be missing: its positions are computed again.
    pub fn abandon(&mut self, plan: &StepPlan) {
        self.note(|_| Op::Abandon);
        self.close(plan);
        self.suspect.clear();
        self.abandon_copies();
        self.kv.abandon();
        self.abandon_transfers();
        self.count_preemptions(plan);
        self.end_deferred();
        self.verify();
    }

    fn abandon_copies(&mut self) {
        let mut copying: Vec<RequestId> = self.kv.copying().collect();
        copying.dedup();
        for request in copying {
            let idx = self.by_id[&request];
            let seq = self.seqs[idx as usize].as_mut().expect("who copies is live until the step is over");
            let slots = self.kv.cancel_copy(&mut seq.table).expect("this request copies");
            // What the first of these positions sees may have slid out of a window: then all is computed anew.
            let slots = if self.kv.sees_all(&seq.table, slots) { slots } else { 0 };
            self.kv.shorten(&mut seq.table, slots);
            seq.num_computed = slots;
            seq.num_valid = slots;
            seq.num_public = seq.num_public.min(slots);
        }
    }

    /// What waits may find more or fewer of its tokens in the cache now: looks at some of them in turn.
    fn rescore(&mut self) {
        if self.waiting.policy() != QueuePolicy::LongestPrefix {
            return;
        }
        if self.kv.num_changes() != std::mem::replace(&mut self.kv_changes, self.kv.num_changes()) {
            self.rescore_left = self.seqs.len();
        }
        for _ in 0..RESCORED_PER_STEP.min(self.rescore_left) {
            self.rescore_left -= 1;
            self.rescore_at = (self.rescore_at + 1) % self.seqs.len();
            self.num_looked_at += 1;
            let Some(seq) = &self.seqs[self.rescore_at] else { continue };
            if seq.status == SeqStatus::Waiting && !seq.is_follower() {
                let (idx, mut ticket, cached_tokens) = (self.rescore_at as SeqIdx, seq.ticket, self.score(seq));
                self.waiting.rescore(idx, &mut ticket, cached_tokens);
                self.seq_mut(idx).ticket = ticket;
            }
        }
    }

    /// Cached tokens as the longest-prefix policy counts them.
    pub(super) fn score(&self, seq: &Sequence) -> u32 {
        if self.waiting.policy() != QueuePolicy::LongestPrefix {
            return 0;
        }
        let max_blocks = ((seq.num_tokens() - 1) / self.kv.block_size()).min(MAX_SCORED_BLOCKS);
        self.kv.num_cached_blocks(&seq.chain, &seq.tokens, max_blocks) * self.kv.block_size()
    }

    /// Before full blocks become findable.
    fn taint_suspects(&mut self) {
        for (request, position) in std::mem::take(&mut self.suspect) {
            if let Some(seq) = self.by_id.get(&request).and_then(|&idx| self.seqs[idx as usize].as_ref()) {
                self.kv.taint_from(seq.table(), position);
            }
        }
    }

    fn close(&mut self, plan: &StepPlan) {
        assert_eq!(self.in_flight, Some(plan.step), "step {} is not the one in flight", plan.step);
        self.in_flight = None;
        for row in &plan.rows {
            self.seq_mut(row.seq).num_pending = 0;
        }
    }

    fn commit_row(&mut self, row: &PlanRow, sampled: Option<(TokenId, bool)>) -> RowResult {
        let mut result = RowResult {
            request: row.request,
            slot: row.slot,
            kind: row.kind,
            from: row.from,
            num_tokens: row.num_tokens,
            logit_idx: None,
            token: None,
            finish: None,
        };
        let to = row.to();
        let seq = self.seqs[row.seq as usize].as_mut().expect("a planned row is live until its step is over");
        self.totals.computed_tokens += u64::from(row.num_tokens);
        self.totals.recomputed_tokens += u64::from(to.min(seq.computed_peak).saturating_sub(row.from));
        // What was found in the cache, or is computed again, serves nobody anew; output is served as it is sampled.
        let found = seq.computed_peak.max(row.from);
        self.waiting.serve(seq.ticket.client, to.min(seq.num_prompt).saturating_sub(found));
        seq.num_computed = to;
        seq.num_valid = to;
        seq.computed_peak = seq.computed_peak.max(to);
        self.kv.fill(&seq.table, row.write_from, to);
        let restored_from = seq.restored_from.take();
        if let Some((_, true)) = sampled {
            self.kv.taint(&seq.table);
            if seq.gang.is_some() {
                return result;
            }
            self.end(row.seq, Err(RunError::NotFinite { position: to }));
            return result;
        }
        if seq.is_ending {
            return result;
        }
        // What came back from host memory is published with what was computed.
        let first_new = restored_from.map_or(row.from, |first| first * self.kv.block_size());
        self.totals.restored_tokens += u64::from(row.from - first_new);
        self.kv.publish(&seq.table, &mut seq.chain, &seq.tokens, first_new, to);
        seq.num_public = to;
        self.totals.slid_blocks += u64::from(self.kv.slide(&mut seq.table, to));
        if let (Some((token, _)), None) = (sampled, seq.gang) {
            result.token = Some(token);
            self.waiting.charge(seq.ticket.client, 1);
            self.waiting.serve(seq.ticket.client, 1);
            result.finish = seq.append(token);
            if let Some(reason) = result.finish.clone() {
                self.end(row.seq, Ok(reason));
            }
        }
        result
    }

    fn apply(&mut self, undo: Undo) {
        match undo {
            gang @ (Undo::Unfold { .. }
            | Undo::Fold { .. }
            | Undo::TakeSpareSlots { .. }
            | Undo::GiveSpareSlots { .. }) => {
                self.apply_gang(gang);
            }
            Undo::Grow { seq: idx, mark } => {
                let seq = self.seqs[idx as usize].as_mut().expect("nothing ends while a step is in flight");
                self.kv.rewind(&mut seq.table, mark);
            }
            Undo::Admit { seq: idx, cached_tokens, swapped, cost, paid, mark } => {
                assert_eq!(self.running.pop(), Some(idx), "admissions are undone last to first");
                let seq = self.seqs[idx as usize].as_mut().expect("nothing ends while a step is in flight");
                self.free_slots.push(seq.slot.expect("an admitted sequence has a slot"));
                seq.table = BlockTable::new(seq.id);
                seq.cached_tokens = cached_tokens;
                (seq.swapped, seq.restored_from) = (swapped, None);
                seq.reset_progress();
                seq.ticket.cost = cost;
                self.waiting.discharge(seq.ticket.client, paid);
                self.waiting.undo_take(idx, &seq.ticket, mark);
            }
            Undo::Preempt { seq: idx, at, slot, progress, table, mark } => {
                assert_eq!(self.free_slots.pop(), Some(slot), "preemptions are undone last to first");
                let table = self.kv.resume(table);
                let seq = self.seqs[idx as usize].as_mut().expect("nothing ends while a step is in flight");
                self.waiting.undo_put_back(&seq.ticket, mark);
                seq.table = table;
                seq.swapped = None;
                seq.set_progress(progress);
                seq.preemptions -= 1;
                seq.ticket.is_resumed = seq.preemptions > 0;
                seq.slot = Some(slot);
                seq.status = super::SeqStatus::Running;
                self.running.insert(at, idx);
            }
        }
    }
}
