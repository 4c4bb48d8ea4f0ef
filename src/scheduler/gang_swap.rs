//! Searches that wait in host memory: a gang gives way by copying its beams' blocks out, and comes back without computing
//! them again.
//!
//! Guarantees: the leader is saved as any request is; each other beam saves what it does not share with its neighbour, so
//! that no block is copied for two beams. One position of each beam is left to be computed: so a beam has a row in the
//! step that brings it back. Where a beam's blocks find no room when their turn comes, it computes them instead: nobody
//! waits for a restore.

use super::plan::PreemptMode;
use super::planner::Draft;
use super::preemption::{PreemptCosts, PreemptionMode};
use super::{Scheduler, SeqIdx, SeqStatus, Sequence};
use crate::ids::{BlockId, RequestId};
use crate::kv::BlockState;
use rustc_hash::FxHashMap;

impl Scheduler {
    /// Positions that a preemption saves: all that are computed, but for the last of a beam's.
    pub(super) fn num_saved(&self, seq: &Sequence) -> u32 {
        match self.is_held(seq) {
            true => seq.num_computed.min(seq.num_tokens() - 2),
            false => seq.num_computed,
        }
    }

    /// How a running gang would best be preempted now. Rows and copies that it has in this plan are given back first.
    pub(super) fn gang_mode(&mut self, id: RequestId, draft: &mut Draft) -> PreemptMode {
        let is_running = |idx: &SeqIdx| self.seq(*idx).status == SeqStatus::Running;
        let members: Vec<SeqIdx> = self.gangs[&id].members.iter().copied().filter(is_running).collect();
        for &idx in &members {
            self.drop_row(idx, draft);
            let seq = self.seqs[idx as usize].as_mut().expect("members are live");
            self.kv.cancel_copy(&mut seq.table);
        }
        if self.config.preemption == PreemptionMode::Recompute || !self.kv.has_host_pool() {
            return PreemptMode::Recompute;
        }
        match self.gang_swap_need(id, &members).filter(|need| *need <= self.kv.host_room()) {
            Some(need) if self.favours_swap(&members, need, draft.costs) => PreemptMode::Swap,
            _ => PreemptMode::Recompute,
        }
    }

    /// Places in host memory that saving these beams takes; `None` when some block does not hold its content yet.
    fn gang_swap_need(&mut self, id: RequestId, members: &[SeqIdx]) -> Option<u32> {
        let leader = self.by_id[&id];
        let saved = self.num_saved(self.seq(leader));
        let seq = self.seqs[leader as usize].as_ref().expect("the leader is live");
        let mut need = self.kv.swap_need(&seq.table, &seq.chain, &seq.tokens, saved)?;
        for idx in members.iter().filter(|idx| **idx != leader) {
            let seq = self.seq(*idx);
            let first = self.neighbour(&self.gangs[&id], *idx).1 / self.kv.block_size();
            let end = self.kv.blocks_for(self.num_saved(seq));
            let own = seq.table.ids().get(first as usize..end.max(first) as usize)?;
            if own.iter().any(|block| self.kv.block(*block).state != BlockState::Active) {
                return None;
            }
            need += own.len() as u32;
        }
        Some(need)
    }

    /// True when saving is what the configuration asks for, or the cheaper way. What others hold as well stays in the pool.
    fn favours_swap(&self, members: &[SeqIdx], need: u32, costs: PreemptCosts) -> bool {
        let size = self.kv.block_size();
        // By block: how many beams hold it, and how many of its positions are computed.
        let mut held: FxHashMap<BlockId, (u32, u32)> = FxHashMap::default();
        for seq in members.iter().map(|idx| self.seq(*idx)) {
            let saved = self.num_saved(seq);
            for (i, &block) in (0..self.kv.blocks_for(saved)).zip(seq.table.ids()) {
                let (count, filled) = held.entry(block).or_default();
                *count += 1;
                *filled = (*filled).max((saved - i * size).min(size));
            }
        }
        let own = held.iter().filter(|(block, (count, _))| self.kv.block(**block).refs == *count);
        let (num_blocks, num_tokens) = own.fold((0, 0), |(blocks, tokens), (_, (_, here))| (blocks + 1, tokens + here));
        self.config.preemption == PreemptionMode::Swap || costs.favour_swap(need.max(num_blocks), num_tokens)
    }

    /// Brings beams of running gangs back from host memory, each with a row in this step.
    pub(super) fn rejoin_beams(&mut self, draft: &mut Draft) {
        for (id, idx) in self.swapped_beams() {
            if !draft.plan.preempted.is_empty() {
                return;
            }
            let (neighbour, positions) = self.neighbour(&self.gangs[&id], idx);
            if !self.can_lead(neighbour, positions) {
                continue;
            }
            let saved = self.seq(idx).swapped.as_ref().map_or(0, |swapped| swapped.num_computed());
            let num_tokens = self.chunk(self.seq(idx).num_tokens() - 1 - saved, draft);
            if num_tokens == 0 {
                return;
            }
            let needed = self.kv.blocks_for(saved + num_tokens) - positions / self.kv.block_size();
            let others = draft.claimed - self.claimed(self.by_id[&id]);
            if needed + others <= self.kv.num_available() {
                self.unfold(id, idx);
                self.restore_beam(idx, draft);
                self.plan_row(idx, num_tokens, None, draft);
            } else if self.kv.transfers().1.is_empty() {
                self.unfold(id, idx);
                self.compute_beam(idx, draft);
                return;
            }
        }
    }

    /// Beams that wait for running neighbours, with blocks in host memory.
    fn swapped_beams(&self) -> Vec<(RequestId, SeqIdx)> {
        let mut found = Vec::new();
        if self.gangs.is_empty() {
            return found;
        }
        let leaders = self.running.iter().map(|idx| self.seq(*idx)).filter(|seq| seq.gang == Some(seq.id));
        for id in leaders.map(|seq| seq.id) {
            let is_swapped = |idx: &SeqIdx| {
                let seq = self.seq(*idx);
                seq.status == SeqStatus::Waiting && seq.swapped.is_some()
            };
            found.extend(self.gangs[&id].members.iter().copied().filter(is_swapped).map(|idx| (id, idx)));
        }
        found
    }

    /// After it took what it shares: the blocks of its own come back in this step.
    fn restore_beam(&mut self, idx: SeqIdx, draft: &mut Draft) {
        let before = self.claimed(idx);
        let seq = self.seqs[idx as usize].as_mut().expect("members are live");
        let swapped = seq.swapped.take().expect("this beam waited in host memory");
        let (first, valid) = self.kv.restore_rest(&mut seq.table, swapped);
        seq.restored_from = Some(first);
        (seq.num_computed, seq.num_valid) = (valid, valid);
        draft.claimed = draft.claimed + self.claimed(idx) - before;
    }

    /// Nobody waits for room: the beam computes its blocks again, and others give way for it as for any row.
    fn compute_beam(&mut self, idx: SeqIdx, draft: &mut Draft) {
        if let Some(swapped) = self.seq_mut(idx).swapped.take() {
            self.kv.drop_swapped(swapped);
        }
        let num_tokens = self.chunk(self.num_plannable(idx), draft);
        if num_tokens > 0 && self.make_room(idx, num_tokens, draft) {
            self.plan_row(idx, num_tokens, None, draft);
        }
    }
}
