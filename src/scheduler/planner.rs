//! Planning a step: serve those who run, then admit.

use super::plan::PreemptMode;
use super::policy::{self, Room};
use super::preemption::PreemptCosts;
use super::prefill::Shares;
use super::queue::{QueueMark, QueuePolicy};
use super::sequence::Progress;
use super::{
    Admission, MAX_REASONS, Op, PlanRow, Preemption, RowKind, Scheduler, SeqIdx, SeqStatus, Sequence, StepPlan,
    WaitReason,
};
use crate::ids::{RequestId, SeqSlot};
use crate::kv::{BlockTable, PrefixHit, SuspendedTable, SwappedTable, TableMark};

/// What a step depends on besides the scheduler's own state. Whoever records it can plan the same step again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlanInputs {
    /// Ascending.
    pub step: u64,
    /// Tokens that the step may compute; what exceeds `max_tokens_per_step` is cut.
    pub max_tokens: u32,
    /// While some row needs just one token: tokens that all other rows may compute together. Keeps a long prompt from
    /// delaying those who decode.
    pub max_prefill_tokens: u32,
    /// What decides between recomputing and swapping.
    pub costs: PreemptCosts,
}

/// How to take back one change of the scheduler's state; applied last to first.
#[derive(Debug)]
pub(super) enum Undo {
    Grow {
        seq: SeqIdx,
        mark: TableMark,
    },
    Admit {
        seq: SeqIdx,
        cached_tokens: Option<u32>,
        swapped: Option<SwappedTable>,
        cost: u32,
        paid: u32,
        mark: QueueMark,
    },
    Preempt {
        seq: SeqIdx,
        at: usize,
        slot: SeqSlot,
        progress: Progress,
        table: SuspendedTable,
        mark: QueueMark,
    },
    Unfold {
        seq: SeqIdx,
        swapped: Option<SwappedTable>,
    },
    Fold {
        seq: SeqIdx,
        at: usize,
        slot: SeqSlot,
        progress: Progress,
        table: SuspendedTable,
    },
    TakeSpareSlots {
        gang: RequestId,
    },
    GiveSpareSlots {
        gang: RequestId,
        slots: Vec<SeqSlot>,
    },
}

/// A plan being made.
pub(super) struct Draft {
    pub(super) plan: StepPlan,
    pub(super) budget_left: u32,
    max_prefill_tokens: u32,
    prefill_used: u32,
    pub(super) costs: PreemptCosts,
    /// How the running prompts share what is left for them.
    shares: Shares,
    /// Blocks kept for protected sequences.
    pub(super) claimed: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Rows that need one token.
    One,
    /// All other rows.
    More,
}

impl Scheduler {
    /// Decides the next step. Blocks are reserved for it; it must be followed by `commit`, `release` or `abandon`.
    pub fn plan_step(&mut self, inputs: PlanInputs) -> StepPlan {
        assert!(self.in_flight.is_none(), "step {} is planned while another is in flight", inputs.step);
        self.yield_pins();
        self.kv.begin(inputs.step);
        self.in_flight = Some(inputs.step);
        self.last_step = inputs.step;
        self.num_looked_at += self.running.len() as u64;
        let budget = inputs.max_tokens.min(self.config.max_tokens_per_step);
        let mut draft = Draft {
            plan: StepPlan { step: inputs.step, budget, yielded: self.yielded.clone(), ..StepPlan::default() },
            budget_left: budget,
            max_prefill_tokens: inputs.max_prefill_tokens,
            prefill_used: 0,
            costs: inputs.costs,
            shares: Shares::ALL,
            claimed: self.total_claimed(),
        };
        self.unfold_gangs();
        self.serve_running(&mut draft, Pass::One);
        draft.shares = self.share_prefill(&draft);
        self.serve_running(&mut draft, Pass::More);
        self.rejoin_beams(&mut draft);
        let binding =
            if draft.plan.preempted.is_empty() { self.admit(&mut draft) } else { Some(WaitReason::Preemption) };
        self.explain_waiting(&mut draft.plan, binding);
        draft.plan.copies.extend(self.kv.copies());
        for row in &draft.plan.rows {
            let seq = self.seqs[row.seq as usize].as_mut().expect("planned rows are live");
            seq.num_pending = u32::from(row.wants_logits);
        }
        assert_eq!(
            draft.plan.num_tokens() + draft.budget_left,
            budget,
            "invariant 16: the budget of an unscheduled row is given back"
        );
        let (swap_out, swap_in) = self.kv.transfers();
        (draft.plan.swap_out, draft.plan.swap_in) = (swap_out.to_vec(), swap_in.to_vec());
        self.verify_plan(&draft.plan);
        self.note(|_| Op::Plan { inputs, plan: draft.plan.clone() });
        draft.plan
    }

    /// Gives each running sequence of this pass its chunk, in batch order, preempting where blocks are short.
    fn serve_running(&mut self, draft: &mut Draft, pass: Pass) {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend_from_slice(&self.running);
        for &idx in &order {
            let seq = self.seq(idx);
            let is_one = seq.num_remaining() == 1;
            if seq.status != SeqStatus::Running || is_one != (pass == Pass::One) {
                continue;
            }
            if let (Pass::One, Some(gang)) = (pass, seq.gang) {
                if !seq.is_follower() {
                    self.serve_gang(gang, draft);
                }
                continue;
            }
            let num_tokens = self.chunk(self.num_plannable(idx), draft);
            let num_tokens = if is_one { num_tokens } else { draft.shares.take(num_tokens) };
            if num_tokens == 0 {
                continue;
            }
            if self.make_room(idx, num_tokens, draft) {
                self.plan_row(idx, num_tokens, None, draft);
            } else if !is_one {
                draft.shares.give_back(num_tokens);
            }
        }
        self.order = order;
    }

    /// How many of the remaining tokens the step can compute for one row.
    pub(super) fn chunk(&self, remaining: u32, draft: &Draft) -> u32 {
        let chunk = remaining.min(self.config.long_prefill_cap).min(draft.budget_left);
        if remaining == 1 { chunk } else { chunk.min(draft.prefill_left()) }
    }

    /// Preempts until `num_tokens` more positions fit. False when the sequence itself (or its gang) had to give way.
    pub(super) fn make_room(&mut self, idx: SeqIdx, num_tokens: u32, draft: &mut Draft) -> bool {
        loop {
            let seq = self.seq(idx);
            let needed = self.kv.needed_blocks(&seq.table, seq.num_valid, seq.num_computed + num_tokens);
            let others = draft.claimed - self.claimed(idx);
            if needed == 0 || needed + others <= self.kv.num_available() {
                return true;
            }
            let running = self.running.iter().map(|idx| self.seq(*idx));
            let scores = policy::victim_scores(running, &self.config);
            let victim = self.by_id[&policy::victim(&scores).expect("a protected sequence finds what it claims")];
            let is_own = self.party(victim) == self.party(idx);
            self.give_way(victim, idx, scores, draft);
            if is_own {
                return false;
            }
        }
    }

    /// Reserves the blocks of a row and writes it down. The room was made before.
    pub(super) fn plan_row(&mut self, idx: SeqIdx, num_tokens: u32, joined: Option<Admission>, draft: &mut Draft) {
        let claimed_before = self.claimed(idx);
        let seq = self.seqs[idx as usize].as_mut().expect("planned rows are live");
        let mark = self.kv.mark(&seq.table, seq.num_valid);
        let to = seq.num_computed + num_tokens;
        let num_new_blocks = self.kv.reserve(&mut seq.table, seq.num_valid, to).expect("room was made for the row");
        self.undo.push(Undo::Grow { seq: idx, mark });
        draft.claimed = draft.claimed + self.claimed(idx) - claimed_before;
        let seq = self.seq(idx);
        draft.budget_left -= num_tokens;
        if seq.num_remaining() > 1 {
            draft.prefill_used += num_tokens;
        }
        let cached = joined.map_or(0, |joined| joined.cached_tokens);
        let is_read_again = |joined: Admission| joined.is_resumed && joined.restored_tokens == 0;
        let is_again = seq.num_computed < seq.computed_peak || joined.is_some_and(is_read_again);
        let kind = match (is_again, seq.num_computed >= seq.num_prompt) {
            (true, _) => RowKind::Recompute { cached },
            (false, true) => RowKind::Decode,
            (false, false) => RowKind::Prefill { cached },
        };
        draft.plan.rows.push(PlanRow {
            request: seq.id,
            seq: idx,
            slot: seq.slot.expect("a running sequence has a slot"),
            kind,
            from: seq.num_computed,
            num_tokens,
            write_from: seq.num_valid,
            num_new_blocks,
            wants_logits: to == seq.num_tokens(),
        });
    }

    /// Preempts a victim, with its whole gang if it is a beam.
    fn give_way(&mut self, victim: SeqIdx, beneficiary: SeqIdx, scores: Vec<(RequestId, u64)>, draft: &mut Draft) {
        let Some(gang) = self.seq(victim).gang else {
            let mode = self.preempt_mode(victim, draft.costs);
            return self.preempt(victim, beneficiary, (mode, scores), draft);
        };
        let available = self.kv.num_available();
        let mode = self.gang_mode(gang, draft);
        let lost = self.fold_gang(gang, mode, draft);
        self.preempt(self.by_id[&gang], beneficiary, (mode, scores), draft);
        let preemption = draft.plan.preempted.last_mut().expect("the leader was just preempted");
        preemption.freed_blocks = self.kv.num_available() - available;
        preemption.lost_tokens += lost;
    }

    /// Takes back the row that a sequence has in this plan, if any.
    pub(super) fn drop_row(&mut self, idx: SeqIdx, draft: &mut Draft) {
        if let Some(at) = draft.plan.rows.iter().position(|row| row.seq == idx) {
            let row = draft.plan.rows.remove(at);
            draft.budget_left += row.num_tokens;
            if self.seq(idx).num_remaining() > 1 {
                draft.prefill_used -= row.num_tokens;
            }
        }
    }

    /// Puts a running sequence back at the head of the queue. What it had in this plan is given back.
    fn preempt(
        &mut self,
        victim: SeqIdx,
        beneficiary: SeqIdx,
        (mode, scores): (PreemptMode, Vec<(RequestId, u64)>),
        draft: &mut Draft,
    ) {
        self.drop_row(victim, draft);
        let at = self.running.iter().position(|idx| *idx == victim).expect("victims run");
        self.running.remove(at);
        let available = self.kv.num_available();
        let beneficiary = self.seq(beneficiary).id;
        let saved = self.num_saved(self.seq(victim));
        let mark = self.waiting.mark();
        let seq = self.seqs[victim as usize].as_mut().expect("victims are live");
        let progress = seq.progress();
        let slot = seq.slot.expect("a running sequence has a slot");
        let mut table = std::mem::replace(&mut seq.table, BlockTable::new(seq.id));
        // What it was to copy in this step is not copied.
        self.kv.cancel_copy(&mut table);
        seq.reset_progress();
        seq.preemptions += 1;
        seq.ticket.is_resumed = true;
        self.waiting.put_back(victim, &seq.ticket);
        let table = match mode {
            PreemptMode::Recompute => self.kv.suspend(table),
            PreemptMode::Swap => {
                let (table, swapped) = self.kv.suspend_to_host(table, &seq.chain, &seq.tokens, saved);
                seq.swapped = Some(swapped);
                table
            }
        };
        self.undo.push(Undo::Preempt { seq: victim, at, slot, progress, table, mark });
        self.free_slots.push(slot);
        draft.plan.preempted.push(Preemption {
            victim: self.seq(victim).id,
            beneficiary,
            freed_blocks: self.kv.num_available() - available,
            lost_tokens: progress.num_computed - if mode == PreemptMode::Swap { saved } else { 0 },
            mode,
            policy: self.config.victim,
            scores,
        });
    }

    /// Admits from the head of the queue while the whole of each fits; says what stopped it.
    fn admit(&mut self, draft: &mut Draft) -> Option<WaitReason> {
        let mut promised: u32 = self.running.iter().map(|idx| self.promised(*idx)).sum();
        while let Some(idx) = self.waiting.first() {
            self.num_looked_at += 1;
            let Some(&slot) = self.free_slots.last() else {
                return Some(WaitReason::Slots { max_num_seqs: self.config.max_num_seqs });
            };
            if let Some(reason) = self.gang_waits(idx) {
                return Some(reason);
            }
            let seq = self.seqs[idx as usize].as_ref().expect("waiting sequences are live");
            // At least one token is computed, to get logits; and the last of a gang's leader only beside the other beams.
            let is_held = self.is_held(seq);
            let query_tokens = seq.num_tokens() - 1;
            let most = if is_held { query_tokens - 1 } else { seq.num_tokens() };
            let hit = self.kv.lookup(&seq.chain, &seq.tokens, most);
            let restorable = self.kv.restorable(hit, seq.swapped.as_ref());
            let is_restored = restorable > hit.tokens;
            let (mut hit, parent) = match is_restored {
                true => (self.kv.whole_blocks(hit), None),
                false => self.found(seq, hit),
            };
            let cached_tokens = if is_restored { restorable } else { hit.tokens };
            let ahead = PrefixHit { num_blocks: cached_tokens / self.kv.block_size(), tokens: cached_tokens, ..hit };
            if let Some(leader) = self.computes_now(seq, ahead, query_tokens, draft) {
                return Some(WaitReason::Prefix { leader });
            }
            let watermark = if self.running.is_empty() { 0 } else { self.config.watermark_blocks };
            let room = Room { available: self.kv.num_available(), promised, watermark };
            let blocks = self.needed_to_join(idx);
            let mut may_join = policy::may_join(blocks, hit, &room);
            if may_join.is_err() && parent.is_none() {
                // A block found in part needs room beside its copy: in a full pool it is computed instead.
                hit = self.kv.whole_blocks(hit);
                may_join = policy::may_join(blocks, hit, &room);
            }
            let cached_tokens = if is_restored { restorable } else { hit.tokens };
            let wanted = seq.num_tokens() - u32::from(is_held) - cached_tokens.min(query_tokens);
            let num_tokens = self.chunk(wanted, draft);
            if num_tokens == 0 {
                return Some(WaitReason::Budget);
            }
            if let Err(reason) = may_join {
                return Some(reason);
            }
            self.attach(idx, hit, parent);
            self.join(idx, slot, num_tokens, is_restored, draft);
            promised += self.promised(idx);
        }
        None
    }

    /// The request whose row computes, in this very step, the next block that `seq` needs: a step later it can be
    /// shared instead of computed twice. Such a row ends with the step, so that nobody waits for long.
    fn computes_now(&self, seq: &Sequence, hit: PrefixHit, query_tokens: u32, draft: &Draft) -> Option<RequestId> {
        if let Some(parent) = self.parent_computes_now(seq, hit, draft) {
            return Some(parent);
        }
        let block_idx = hit.num_blocks;
        let block_end = (block_idx + 1) * self.kv.block_size();
        if !self.kv.shares_prefixes() || block_end > query_tokens {
            return None;
        }
        let computes = |row: &&PlanRow| {
            let is_in_row = row.from < block_end && block_end <= row.to();
            is_in_row && self.seq(row.seq).chain.names_alike(&seq.chain, block_idx as usize)
        };
        draft.plan.rows.iter().find(computes).map(|row| row.request)
    }

    /// Moves a waiting sequence into the batch with the blocks that it was given.
    fn join(&mut self, idx: SeqIdx, slot: SeqSlot, num_tokens: u32, is_restored: bool, draft: &mut Draft) {
        self.free_slots.pop();
        let seq = self.seqs[idx as usize].as_mut().expect("waiting sequences are live");
        let mark = self.waiting.take(&seq.ticket);
        let found_tokens = seq.num_valid;
        let swapped = seq.swapped.take();
        let kept = swapped.clone();
        if is_restored {
            let (first, valid) = self.kv.restore(&mut seq.table, swapped);
            seq.restored_from = Some(first);
            seq.num_valid = valid;
            seq.num_computed = valid.min(seq.num_tokens() - 1);
        } else if let Some(swapped) = swapped {
            self.kv.drop_swapped(swapped);
        }
        let restored_tokens = seq.num_valid - found_tokens;
        let cached_tokens = seq.num_computed;
        // Paid once, for what is computed of the prompt.
        let cost = std::mem::take(&mut seq.ticket.cost);
        let paid = cost.saturating_sub(cached_tokens);
        self.waiting.charge(seq.ticket.client, paid);
        self.undo.push(Undo::Admit { seq: idx, cached_tokens: seq.cached_tokens, swapped: kept, cost, paid, mark });
        let is_resumed = seq.cached_tokens.is_some();
        seq.cached_tokens.get_or_insert(cached_tokens);
        seq.status = SeqStatus::Running;
        seq.slot = Some(slot);
        let joined =
            Admission { request: seq.id, num_tokens: seq.num_tokens(), cached_tokens, restored_tokens, is_resumed };
        self.running.push(idx);
        self.take_spare_slots(idx);
        draft.claimed += self.claimed(idx);
        draft.plan.admitted.push(joined);
        self.plan_row(idx, num_tokens, Some(joined), draft);
    }

    fn explain_waiting(&mut self, plan: &mut StepPlan, binding: Option<WaitReason>) {
        plan.num_running = self.running.len() as u32;
        plan.num_waiting = self.waiting.len() as u32;
        plan.binding = binding;
        let is_fair = self.waiting.policy() == QueuePolicy::Fair;
        let Some(first) = self.waiting.first().map(|idx| self.seq(idx).ticket) else { return };
        for (position, idx) in self.waiting.iter().take(MAX_REASONS).enumerate() {
            let ticket = self.seq(idx).ticket;
            let reason = match (position, binding) {
                (_, Some(WaitReason::Preemption)) => WaitReason::Preemption,
                (0, Some(reason)) => reason,
                _ if is_fair && ticket.client != first.client && ticket.id < first.id => {
                    WaitReason::Share { ahead: first.id }
                }
                (position, _) => WaitReason::Behind { position: position as u32 },
            };
            plan.waiting.push((ticket.id, reason));
        }
        self.num_looked_at += plan.waiting.len() as u64;
    }
}

impl Draft {
    /// Tokens that rows which need several may still compute.
    pub(super) fn prefill_left(&self) -> u32 {
        match self.has_one_token_rows() {
            true => self.budget_left.min(self.max_prefill_tokens.max(1).saturating_sub(self.prefill_used)),
            false => self.budget_left,
        }
    }

    fn has_one_token_rows(&self) -> bool {
        self.plan.budget - self.budget_left > self.prefill_used
    }
}
