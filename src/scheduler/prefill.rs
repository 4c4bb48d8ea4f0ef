//! How the tokens that a step may compute beside decoding rows are shared among prompts.
//!
//! Max-min fair: a prompt that needs less than an even share gets all it needs, the others share the rest evenly. So a
//! short prompt gets its first token a step after it came, however long the prompt before it is, and a long prompt alone
//! has the whole budget. The head of the queue counts as one of them when it could join in this step.

use super::planner::Draft;
use super::policy::{self, Room};
use super::{Scheduler, SeqIdx, SeqStatus, Sequence};
use crate::kv::PrefixHit;

/// What each prompt gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Everybody gets this much, or all they need.
    level: u32,
    /// What is left over by rounding: for the first who need more.
    rest: u32,
}

impl Shares {
    /// Nobody needs to share.
    pub const ALL: Shares = Shares { level: u32::MAX, rest: 0 };

    /// Divides `pool` tokens among those who need so many each; the order of `demands` is lost.
    pub fn new(pool: u32, demands: &mut [u32]) -> Shares {
        demands.sort_unstable();
        let mut left = pool;
        for (i, &demand) in demands.iter().enumerate() {
            let num_left = (demands.len() - i) as u32;
            let level = left / num_left;
            if demand > level {
                return Shares { level, rest: left % num_left };
            }
            left -= demand;
        }
        Shares::ALL
    }

    /// The part of one who needs `demand`.
    pub fn take(&mut self, demand: u32) -> u32 {
        let even = demand.min(self.level);
        let more = (demand - even).min(self.rest);
        self.rest -= more;
        even + more
    }

    /// A part that was taken is not used: it is for the next who need more.
    pub fn give_back(&mut self, tokens: u32) {
        self.rest += tokens;
    }
}

impl Scheduler {
    /// Divides what the one-token rows left among the running prompts and the head of the queue.
    pub(super) fn share_prefill(&mut self, draft: &Draft) -> Shares {
        let cap = self.config.long_prefill_cap;
        let is_prompt = |idx: &&SeqIdx| {
            let seq = self.seq(**idx);
            seq.status == SeqStatus::Running && seq.num_remaining() > 1
        };
        let prompts = self.running.iter().filter(is_prompt);
        let mut demands: Vec<u32> = prompts.map(|idx| self.num_plannable(*idx).min(cap)).collect();
        if demands.is_empty() {
            return Shares::ALL;
        }
        demands.extend(self.newcomer(draft).map(|tokens| tokens.min(cap)));
        Shares::new(draft.prefill_left(), &mut demands)
    }

    /// Tokens that the head of the queue would compute, if it can join in this step.
    fn newcomer(&mut self, draft: &Draft) -> Option<u32> {
        if !draft.plan.preempted.is_empty() || self.free_slots.is_empty() {
            return None;
        }
        let idx = self.waiting.first()?;
        self.num_looked_at += 1;
        let seq = self.seqs[idx as usize].as_ref().expect("waiting sequences are live");
        let query_tokens = seq.num_tokens() - 1;
        let hit = self.kv.lookup(&seq.chain, &seq.tokens, seq.num_tokens());
        let restorable = self.kv.restorable(hit, seq.swapped.as_ref());
        let is_restored = restorable > hit.tokens;
        let hit = if is_restored { self.kv.whole_blocks(hit) } else { self.found(seq, hit).0 };
        let tokens = if is_restored { restorable } else { hit.tokens };
        let ahead = PrefixHit { num_blocks: tokens / self.kv.block_size(), tokens, ..hit };
        if self.will_be_computed(seq, ahead, query_tokens) {
            return None;
        }
        let promised = self.running.iter().map(|idx| self.promised(*idx)).sum();
        let room = Room { available: self.kv.num_available(), promised, watermark: self.config.watermark_blocks };
        if self.gang_waits(idx).is_some() {
            return None;
        }
        policy::may_join(self.needed_to_join(idx), hit, &room).ok()?;
        let seq = self.seq(idx);
        let wanted = seq.num_tokens() - u32::from(self.is_held(seq));
        Some(wanted.saturating_sub(tokens.min(query_tokens)).max(1))
    }

    /// A running prompt is on its way to what `seq` needs next, its parent's or an equal one: `seq` will wait to share it.
    fn will_be_computed(&self, seq: &Sequence, hit: PrefixHit, query_tokens: u32) -> bool {
        let parent = seq.fork_of.and_then(|fork| Some((fork, self.get(fork.parent)?)));
        let is_led = parent.is_some_and(|(fork, parent)| {
            let from = parent.num_computed;
            parent.status == SeqStatus::Running && from < fork.keep_tokens.min(query_tokens) && hit.tokens <= from
        });
        if is_led {
            return true;
        }
        let block_idx = hit.num_blocks;
        let block_end = (block_idx + 1) * self.kv.block_size();
        if !self.kv.shares_prefixes() || block_end > query_tokens {
            return false;
        }
        let is_leader = |other: &Sequence| {
            other.num_computed < block_end
                && block_end <= other.num_tokens()
                && other.chain.names_alike(&seq.chain, block_idx as usize)
        };
        self.running().any(is_leader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(pool: u32, demands: &[u32]) -> Vec<u32> {
        let mut shares = Shares::new(pool, &mut demands.to_vec());
        demands.iter().map(|demand| shares.take(*demand)).collect()
    }

    #[test]
    fn what_is_given_back_goes_to_the_next() {
        let mut shares = Shares::new(1, &mut [90, 90]);
        assert_eq!([shares.take(90), shares.take(90)], [1, 0]);
        shares.give_back(1);
        assert_eq!(shares.take(90), 1);
    }

    #[test]
    fn who_needs_little_gets_it_and_the_others_share_evenly() {
        assert_eq!(shares(100, &[1000]), [100]);
        assert_eq!(shares(100, &[1000, 10]), [90, 10]);
        assert_eq!(shares(100, &[1000, 10, 1000, 60]), [30, 10, 30, 30]);
        assert_eq!(shares(100, &[30, 20]), [30, 20]);
        assert_eq!(shares(10, &[90, 90, 90]), [4, 3, 3], "nothing is lost by rounding");
        assert_eq!(shares(2, &[90, 90, 90]), [2, 0, 0], "the first gets on");
        assert_eq!(shares(0, &[90, 2]), [0, 0]);
    }
}
