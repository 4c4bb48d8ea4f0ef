//! How many blocks the beams of a search hold, may come to need, and are promised.
//!
//! Guarantees: a gang never holds more than its bound. With windows its beams count as if they shared nothing, and each
//! computes what was lost by itself.

use super::gang::{Gang, gang_bound};
use super::{Scheduler, SeqIdx, SeqStatus, Sequence, policy};
use crate::ids::{BlockId, RequestId};
use crate::kv::{BlockTable, KvGroups, PrefixHit};

impl Scheduler {
    pub(super) fn gang_bound(&self, prompt: u32, tokens: u32, width: u32) -> u32 {
        if self.has_one_group() {
            return gang_bound(self.kv.block_size(), prompt, tokens, width);
        }
        self.kv.blocks_needed(tokens, self.largest_chunk()).saturating_mul(width)
    }

    pub(super) fn has_one_group(&self) -> bool {
        self.kv.config().groups == KvGroups::ONE
    }

    fn largest_chunk(&self) -> u32 {
        policy::chunk(u32::MAX, &self.config)
    }

    /// How long an unbounded gang may become in so many blocks, and what it then needs.
    pub(super) fn fit_gang(&mut self, id: RequestId, total: u32) {
        let (idx, size) = (self.by_id[&id], self.kv.block_size());
        let (width, prompt) = (self.gangs[&id].width, self.seq(idx).num_prompt);
        let (shared, max_total) = (prompt / size, self.seq(idx).max_total);
        let tokens = if self.has_one_group() {
            max_total.min((shared + total.saturating_sub(shared) / width).saturating_mul(size))
        } else {
            self.kv.capacity(total / width, max_total, self.largest_chunk())
        };
        let max_blocks = self.gang_bound(prompt, tokens, width);
        let gang = self.gangs.get_mut(&id).expect("the gang was looked up above");
        gang.max_blocks = max_blocks;
        for idx in gang.members.clone() {
            self.seq_mut(idx).max_total = tokens;
        }
    }

    /// The cache was replaced: what the gang may come to need in the new one.
    pub(super) fn refit_gang(&mut self, id: RequestId, is_bounded: bool) -> u32 {
        if !is_bounded {
            self.fit_gang(id, self.kv.num_usable());
        }
        let leader = self.seq(self.by_id[&id]);
        let (prompt, tokens) = (leader.num_prompt, leader.max_total.max(leader.num_tokens() + 1));
        let needed = self.gang_bound(prompt, tokens, self.gangs[&id].width);
        self.gangs.get_mut(&id).expect("the gang is live").max_blocks = needed;
        needed
    }

    /// Blocks that a live request may come to need.
    pub(super) fn most_blocks(&self, seq: &Sequence) -> u32 {
        let alone = || self.kv.blocks_needed(seq.max_total, self.largest_chunk());
        seq.gang.map_or_else(alone, |id| self.gangs[&id].max_blocks)
    }

    /// The request that stands for this one: its gang's leader, or itself.
    pub(super) fn party(&self, idx: SeqIdx) -> RequestId {
        let seq = self.seq(idx);
        seq.gang.unwrap_or(seq.id)
    }

    /// Blocks promised to a running request beyond those it has; a gang's count with its leader.
    pub(super) fn promised(&self, idx: SeqIdx) -> u32 {
        let seq = self.seq(idx);
        let Some(id) = seq.gang else { return policy::promised_blocks(seq, &self.kv, &self.config) };
        let gang = &self.gangs[&id];
        if id != seq.id {
            0
        } else if policy::is_protected(seq, &self.config) {
            // A block found in part is there until each beam that sees it has a copy, and then until the step is over.
            let found_in_part = |idx: &SeqIdx| {
                let seq = self.seq(*idx);
                let tail = seq.table.ids().get((seq.num_valid / self.kv.block_size()) as usize).copied();
                // With windows nothing is found in part.
                let is_partial = self.has_one_group() && !seq.num_valid.is_multiple_of(self.kv.block_size());
                tail.filter(|id| is_partial && self.kv.block(*id).hash.is_some())
            };
            let mut sources: Vec<BlockId> = gang.members.iter().filter_map(found_in_part).collect();
            sources.sort_unstable();
            sources.dedup();
            let extra = sources.len() as u32 + self.kv.num_shared_in_windows(self.gang_tables(gang));
            (gang.max_blocks + extra).saturating_sub(self.held_blocks(gang))
        } else {
            let of_known = |&idx: &SeqIdx| {
                let seq = self.seq(idx);
                let shared = if seq.status == SeqStatus::Waiting { self.neighbour(gang, idx).1 } else { 0 };
                let needed = self.kv.needed_blocks(&seq.table, seq.num_valid, seq.num_tokens());
                needed.saturating_sub(shared / self.kv.block_size())
            };
            gang.members.iter().map(of_known).sum()
        }
    }

    /// Blocks that nobody but this request, or the gang that it belongs to, may take.
    pub(super) fn claimed(&self, idx: SeqIdx) -> u32 {
        let seq = self.seq(idx);
        match seq.gang {
            None => policy::claimed_blocks(seq, &self.kv, &self.config),
            Some(_) if !policy::is_protected(seq, &self.config) => 0,
            Some(id) => self.promised(self.by_id[&id]),
        }
    }

    /// What all running requests claim.
    pub(super) fn total_claimed(&self) -> u32 {
        let parties = self.running.iter().filter(|idx| !self.seq(**idx).is_follower());
        parties.map(|idx| self.claimed(*idx)).sum()
    }

    /// Blocks that a waiting request needs to join, before prefix hits. A gang: all that its beams know, each on its own
    /// behind what it shares, and a row for each beam that is yet to come.
    pub(super) fn needed_to_join(&self, idx: SeqIdx, hit: PrefixHit) -> u32 {
        let seq = self.seq(idx);
        let own = policy::own_blocks(seq, hit, &self.kv, &self.config);
        let Some(gang) = seq.gang.map(|id| &self.gangs[&id]) else { return own };
        if policy::is_protected(seq, &self.config) {
            return gang.max_blocks;
        }
        let others = gang.members.iter().filter(|member| **member != idx).map(|&member| {
            let needed = self.kv.blocks_needed(self.seq(member).num_tokens(), self.largest_chunk());
            needed - self.neighbour(gang, member).1 / self.kv.block_size()
        });
        let to_come = gang.width - gang.members.len() as u32;
        own + others.sum::<u32>() + to_come * self.kv.config().groups.num()
    }

    /// Of a beam that waits for its neighbours: the one with which it has most tokens in common, and the positions of the
    /// full blocks among them. The leader has none; ties go to the leader, then to the best. With windows nothing is taken:
    /// what a beam needs of them has slid out of its neighbour's.
    pub(super) fn neighbour(&self, gang: &Gang, idx: SeqIdx) -> (SeqIdx, u32) {
        let (seq, size) = (self.seq(idx), self.kv.block_size());
        let leader = self.by_id[&seq.gang.expect("a member of a gang")];
        if !self.has_one_group() {
            return (leader, 0);
        }
        let before = gang.members.iter().copied().take_while(|member| *member != idx);
        let mut best = (leader, 0);
        for other in std::iter::once(leader).chain(before) {
            let common = self.seq(other).tokens.iter().zip(&seq.tokens).take_while(|(a, b)| a == b).count() as u32;
            let positions = common.min(seq.num_tokens() - 1) / size * size;
            if positions > best.1 {
                best = (other, positions);
            }
        }
        best
    }

    pub(super) fn gang_tables<'a>(&'a self, gang: &'a Gang) -> impl Iterator<Item = &'a BlockTable> {
        gang.members.iter().map(|idx| &self.seq(*idx).table)
    }

    /// Distinct blocks of a gang. Blocks are shared from the first on, so that two tables are equal up to some place.
    pub(super) fn held_blocks(&self, gang: &Gang) -> u32 {
        if !self.has_one_group() {
            let mut held: Vec<BlockId> = self.gang_tables(gang).flat_map(BlockTable::held).collect();
            held.sort_unstable();
            held.dedup();
            return held.len() as u32;
        }
        let tables: Vec<&[BlockId]> = gang.members.iter().map(|idx| self.seq(*idx).table.ids()).collect();
        let own = |(i, table): (usize, &&[BlockId])| {
            let shared = tables[..i].iter().map(|other| num_common(table, other)).max().unwrap_or(0);
            (table.len() - shared) as u32
        };
        tables.iter().enumerate().map(own).sum()
    }
}

/// How many blocks two tables have in common, from the first on.
fn num_common(a: &[BlockId], b: &[BlockId]) -> usize {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = (low + high) / 2;
        if a[middle] == b[middle] {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}
