//! Recompute or swap: how a preempted request will get its K and V back, and what becomes of transfers that fail.

use super::plan::PreemptMode;
use super::planner::Undo;
use super::{Op, Scheduler, SeqIdx, StepPlan};
use crate::kv::ContentId;

/// How preempted requests get their K and V back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreemptionMode {
    /// The cheaper way by measured costs, as far as host memory has room.
    #[default]
    Auto,
    /// From their tokens, always.
    Recompute,
    /// From host memory, as far as it has room.
    Swap,
}

/// What getting K and V back costs, as measured: an input of each step, recorded with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PreemptCosts {
    /// Computing one token again, in nanoseconds.
    pub recompute_token_ns: u64,
    /// Copying one block to host memory and back, in nanoseconds.
    pub swap_block_ns: u64,
}

impl PreemptCosts {
    /// True when copying so many blocks both ways is cheaper than computing so many tokens.
    pub(super) fn favour_swap(&self, num_blocks: u32, num_tokens: u32) -> bool {
        let swap = self.swap_block_ns.saturating_mul(num_blocks.into());
        swap < self.recompute_token_ns.saturating_mul(num_tokens.into())
    }
}

impl Scheduler {
    /// How this running sequence would best be preempted now. What others hold as well stays in the pool and costs
    /// nothing either way.
    pub(super) fn preempt_mode(&mut self, victim: SeqIdx, costs: PreemptCosts) -> PreemptMode {
        let seq = self.seqs[victim as usize].as_ref().expect("victims are live");
        if self.config.preemption == PreemptionMode::Recompute || !self.kv.has_host_pool() {
            return PreemptMode::Recompute;
        }
        let need = self.kv.swap_need(&seq.table, &seq.chain, &seq.tokens, seq.num_computed);
        if need.is_none_or(|need| need > self.kv.host_room()) {
            return PreemptMode::Recompute;
        }
        let size = self.kv.block_size();
        let own = (0..self.kv.blocks_for(seq.num_computed))
            .filter(|i| self.kv.block(seq.table.ids()[*i as usize]).refs == 1)
            .map(|i| (seq.num_computed - i * size).min(size));
        let (num_blocks, num_tokens) = own.fold((0, 0), |(blocks, tokens), here| (blocks + 1, tokens + here));
        match self.config.preemption {
            PreemptionMode::Swap => PreemptMode::Swap,
            _ if costs.favour_swap(num_blocks, num_tokens) => PreemptMode::Swap,
            _ => PreemptMode::Recompute,
        }
    }

    pub(super) fn count_preemptions(&mut self, plan: &StepPlan) {
        self.totals.preemptions += plan.preempted.len() as u64;
        self.totals.swaps += plan.preempted.iter().filter(|p| p.mode == PreemptMode::Swap).count() as u64;
    }

    /// The step failed on its way: what was going to host memory or coming from it is worth nothing.
    pub(super) fn abandon_transfers(&mut self) {
        for undo in std::mem::take(&mut self.undo) {
            match undo {
                Undo::Preempt { seq, .. } | Undo::Fold { seq, .. } => {
                    let swapped = self.seqs[seq as usize].as_mut().and_then(|seq| seq.swapped.take());
                    if let Some(swapped) = swapped {
                        self.kv.drop_swapped(swapped);
                    }
                }
                Undo::Admit { seq, .. } | Undo::Unfold { seq, .. } => {
                    let seq = self.seqs[seq as usize].as_mut().expect("nothing ends while a step is in flight");
                    if let Some(first) = seq.restored_from.take() {
                        self.kv.unrestore(&seq.table, first);
                        let there = first * self.kv.block_size();
                        seq.num_computed = seq.num_computed.min(there);
                        seq.num_valid = seq.num_valid.min(there);
                        seq.num_public = seq.num_public.min(there);
                    }
                }
                Undo::Grow { .. } | Undo::TakeSpareSlots { .. } | Undo::GiveSpareSlots { .. } => {}
            }
        }
    }

    /// A step that computes nothing and copies published blocks to host memory, so that they can be kept when the pool is
    /// gone; `is_saved` contents are kept already. Empty when there is nothing to copy; to be ended as every step.
    pub fn plan_save(&mut self, step: u64, max_blocks: u32, is_saved: &dyn Fn(&ContentId) -> bool) -> StepPlan {
        assert!(self.in_flight.is_none(), "step {step} is planned while another is in flight");
        self.kv.begin(step);
        self.in_flight = Some(step);
        self.kv.save_published(max_blocks, is_saved);
        let swap_out = self.kv.transfers().0.to_vec();
        self.note(|this| Op::Save { step, contents: this.kv.contents_of(&swap_out) });
        StepPlan { step, swap_out, ..StepPlan::default() }
    }

    /// Identities of a prompt's full blocks that neither pool nor host memory holds.
    pub fn missing(&mut self, key: crate::kv::CacheKey, prompt: &[crate::ids::TokenId]) -> Vec<ContentId> {
        self.kv.missing(key, prompt)
    }

    /// See [`crate::kv::KvCache::adopt`].
    pub fn adopt(&mut self, content: &crate::kv::CachedContent) -> Option<crate::ids::HostSlot> {
        self.note(|_| Op::Adopt(content.clone()));
        self.kv.adopt(content)
    }

    /// The content that [`Scheduler::adopt`] made room for did not come.
    pub fn drop_adopted(&mut self, id: &ContentId) {
        self.note(|_| Op::DropAdopted(*id));
        self.kv.drop_adopted(id);
    }

    /// See [`crate::kv::KvCache::take_spilled`].
    pub fn take_spilled(&mut self) -> Vec<crate::kv::CachedContent> {
        self.kv.take_spilled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_is_taken_and_a_tie_recomputes() {
        let costs = PreemptCosts { recompute_token_ns: 1_000, swap_block_ns: 8_000 };
        assert!(costs.favour_swap(2, 17));
        assert!(!costs.favour_swap(2, 16));
        assert!(!PreemptCosts::default().favour_swap(2, 16), "nothing is known");
    }
}
