//! Beams of a search: sequences that join the batch, advance, give way and come back together.
//!
//! Guarantees: a gang takes `width` slots or none; all its beams compute their last token in the same step, so that the
//! search can rank them; a step of the search ([`Scheduler::commit_gangs`]) copies no block: a beam that goes on twice
//! shares its blocks, and whoever writes a shared block first takes a copy of it in the next plan. A gang gives way as
//! one request and is one entry of the queue: its leader, the sequence with the gang's own id. When it comes back, the
//! leader computes what is not cached, and the others take from their neighbours what they have in common, so that a gang
//! never needs more than [`gang_bound`] blocks; a gang that can never have them is refused at once. What was saved to host
//! memory is brought back instead ([`super::gang_swap`]).
//!
//! Blocks of a beam that was dropped stay findable by prefix when they were published: they hold what was computed for
//! the tokens that name them, whatever became of the beam.
//!
//! It does not rank anything: the engine does, with the search of `sampling`.

use super::planner::{Draft, Undo};
use super::policy;
use super::sequence::{Progress, Sequence};
use super::{NewSequence, Op, PreemptMode, Scheduler, SeqIdx, SeqStatus, StepPlan, WaitReason};
use crate::ids::{BlockId, RequestId, SeqSlot, TokenId};
use crate::kv::{BlockTable, CacheKey};
use crate::protocol::{FinishReason, InvalidParam, RunError};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The live beams of one search.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gang {
    pub width: u32,
    /// In the order of the search, best first. One of them is the leader.
    pub members: Vec<SeqIdx>,
    /// While it runs: slots that no member holds.
    pub spare_slots: Vec<SeqSlot>,
    /// Blocks that it may come to need.
    pub max_blocks: u32,
}

/// The logit rows of one gang in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangRows {
    pub gang: RequestId,
    /// By beam in the order of the search: index into the step's results.
    pub logits: Vec<usize>,
}

/// A beam that goes on: `token` after those of beam `parent`, in the order of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangChild {
    pub parent: usize,
    pub token: TokenId,
}

/// What the search made of a gang's rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GangAdvance {
    pub gang: RequestId,
    pub next: GangNext,
}

/// How a gang goes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GangNext {
    /// At least one and at most `width` beams, best first.
    Beams(Vec<GangChild>),
    End(FinishReason),
}

/// What sharing saves a gang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GangBlocks {
    /// Blocks that its beams would hold without sharing.
    pub logical: u32,
    /// Blocks that they hold.
    pub held: u32,
}

/// Blocks that `width` beams of `tokens` tokens may come to need: they share the full blocks of their prompt, and may
/// share nothing else.
pub fn gang_bound(block_size: u32, prompt: u32, tokens: u32, width: u32) -> u32 {
    let shared = prompt / block_size;
    let own = tokens.div_ceil(block_size).saturating_sub(shared);
    shared.saturating_add(own.saturating_mul(width))
}

impl Scheduler {
    /// Queues a search of `width` beams, with ids `new.id .. new.id + width`, or refuses it as [`Self::add`] does. It
    /// starts as one sequence.
    pub fn add_gang(&mut self, new: NewSequence, width: u32) -> Result<(), RunError> {
        assert!(width >= 1, "a gang has at least one beam");
        self.note(|_| Op::AddGang { new: Box::new(new.clone()), width });
        let slots = self.config.max_num_seqs;
        if width > slots {
            let message = format!("must be at most {slots}, the number of sequences that run at once, not {width}");
            return Err(InvalidParam { field: "beam_width", message }.into());
        }
        let key = CacheKey { salt: new.cache_salt, adapter: new.adapter };
        let (id, prompt, total) = (new.id, new.prompt.len() as u32, self.room_for(&new.prompt, key));
        let is_bounded = new.stop.max_tokens.is_some();
        let tokens = prompt.saturating_add(new.stop.max_tokens.unwrap_or(1));
        let needed = self.gang_bound(prompt, tokens, width);
        if tokens <= self.config.max_model_len && needed > total {
            return Err(RunError::NeverFits { needed, total });
        }
        self.enqueue(new)?;
        let idx = self.by_id[&id];
        self.seq_mut(idx).gang = Some(id);
        self.gangs.insert(id, Gang { width, members: vec![idx], spare_slots: Vec::new(), max_blocks: needed });
        if !is_bounded {
            self.fit_gang(id, total);
        }
        Ok(())
    }

    fn gang_bound(&self, prompt: u32, tokens: u32, width: u32) -> u32 {
        gang_bound(self.kv.block_size(), prompt, tokens, width)
    }

    /// The gangs whose beams all have logits in this plan.
    pub fn gang_rows(&self, plan: &StepPlan) -> Vec<GangRows> {
        let mut found: Vec<GangRows> = Vec::new();
        if self.gangs.is_empty() {
            return found;
        }
        let logit_rows = plan.rows.iter().filter(|row| row.wants_logits);
        let places: Vec<(SeqIdx, usize)> = logit_rows.enumerate().map(|(logit, row)| (row.seq, logit)).collect();
        for &(idx, _) in &places {
            let seq = self.seq(idx);
            let Some(id) = seq.gang.filter(|id| found.iter().all(|rows| rows.gang != *id) && !seq.is_ending) else {
                continue;
            };
            let place = |member: &SeqIdx| {
                let at = places.iter().find(|(idx, _)| idx == member);
                at.unwrap_or_else(|| panic!("a beam of search {id} has no row beside the others")).1
            };
            found.push(GangRows { gang: id, logits: self.gangs[&id].members.iter().map(place).collect() });
        }
        found
    }

    /// Blocks of a live gang, with and without sharing.
    pub fn gang_blocks(&self, id: RequestId) -> Option<GangBlocks> {
        let gang = self.gangs.get(&id)?;
        let logical = gang.members.iter().map(|idx| self.seq(*idx).table.num_blocks()).sum();
        Some(GangBlocks { logical, held: self.held_blocks(gang) })
    }

    /// The beams of a live gang, in the order of the search.
    pub fn gang_members(&self, id: RequestId) -> impl Iterator<Item = &Sequence> {
        let members = self.gangs.get(&id).map_or(&[][..], |gang| &gang.members);
        members.iter().map(|idx| self.seq(*idx))
    }

    /// How long an unbounded gang may become in so many blocks, and what it then needs.
    fn fit_gang(&mut self, id: RequestId, total: u32) {
        let (idx, size) = (self.by_id[&id], self.kv.block_size());
        let (width, prompt) = (self.gangs[&id].width, self.seq(idx).num_prompt);
        let shared = prompt / size;
        let most = (shared + total.saturating_sub(shared) / width).saturating_mul(size);
        let tokens = self.seq(idx).max_total.min(most);
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
        seq.gang.map_or_else(|| self.kv.blocks_for(seq.max_total), |id| self.gangs[&id].max_blocks)
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
                let is_partial = !seq.num_valid.is_multiple_of(self.kv.block_size());
                tail.filter(|id| is_partial && self.kv.block(*id).hash.is_some())
            };
            let mut sources: Vec<BlockId> = gang.members.iter().filter_map(found_in_part).collect();
            sources.sort_unstable();
            sources.dedup();
            (gang.max_blocks + sources.len() as u32).saturating_sub(self.held_blocks(gang))
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
    /// behind what it shares, and a block for each beam that is yet to come.
    pub(super) fn needed_to_join(&self, idx: SeqIdx) -> u32 {
        let seq = self.seq(idx);
        let Some(gang) = seq.gang.map(|id| &self.gangs[&id]) else {
            return policy::own_blocks(seq, &self.kv, &self.config);
        };
        if policy::is_protected(seq, &self.config) {
            return gang.max_blocks;
        }
        let others = gang.members.iter().filter(|member| **member != idx).map(|&member| {
            self.kv.blocks_for(self.seq(member).num_tokens()) - self.neighbour(gang, member).1 / self.kv.block_size()
        });
        let to_come = gang.width - gang.members.len() as u32;
        self.kv.blocks_for(seq.num_tokens()) + others.sum::<u32>() + to_come
    }

    /// Of a beam that waits for its neighbours: the one with which it has most tokens in common, and the positions of the
    /// full blocks among them. The leader has none; ties go to the leader, then to the best.
    pub(super) fn neighbour(&self, gang: &Gang, idx: SeqIdx) -> (SeqIdx, u32) {
        let (seq, size) = (self.seq(idx), self.kv.block_size());
        let leader = self.by_id[&seq.gang.expect("a member of a gang")];
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

    /// Distinct blocks of a gang. Blocks are shared from the first on, so that two tables are equal up to some place.
    pub(super) fn held_blocks(&self, gang: &Gang) -> u32 {
        let tables: Vec<&[BlockId]> = gang.members.iter().map(|idx| self.seq(*idx).table.ids()).collect();
        let own = |(i, table): (usize, &&[BlockId])| {
            let shared = tables[..i].iter().map(|other| num_common(table, other)).max().unwrap_or(0);
            (table.len() - shared) as u32
        };
        tables.iter().enumerate().map(own).sum()
    }

    /// Gives the waiting beams of running gangs the blocks of their neighbours, once those are computed.
    pub(super) fn unfold_gangs(&mut self) {
        let leaders = self.running.iter().map(|idx| self.seq(*idx)).filter(|seq| seq.gang == Some(seq.id));
        let ids: Vec<RequestId> = leaders.map(|seq| seq.id).collect();
        for id in ids {
            for i in 0..self.gangs[&id].members.len() {
                let idx = self.gangs[&id].members[i];
                let (neighbour, positions) = match &self.seq(idx) {
                    seq if seq.status == SeqStatus::Waiting && seq.swapped.is_none() => {
                        self.neighbour(&self.gangs[&id], idx)
                    }
                    _ => continue,
                };
                if self.can_lead(neighbour, positions) {
                    self.unfold(id, idx);
                }
            }
        }
    }

    /// True when this beam has so many positions to share now. What comes back to it in this very step is not there for
    /// others yet.
    pub(super) fn can_lead(&self, beam: SeqIdx, positions: u32) -> bool {
        let beam = self.seq(beam);
        beam.status == SeqStatus::Running && beam.num_valid >= positions && beam.restored_from.is_none()
    }

    /// Gives a waiting beam the blocks that it shares with its neighbour.
    pub(super) fn unfold(&mut self, id: RequestId, idx: SeqIdx) {
        let (neighbour, positions) = self.neighbour(&self.gangs[&id], idx);
        let mut table = std::mem::take(&mut self.seq_mut(idx).table);
        let other = self.seqs[neighbour as usize].as_ref().expect("neighbours are live");
        self.kv.follow(&mut table, &other.table, positions);
        let gang = self.gangs.get_mut(&id).expect("the gang runs");
        let slot = gang.spare_slots.pop().expect("a running gang has a slot for each beam");
        let seq = self.seq_mut(idx);
        seq.table = table;
        seq.set_progress(Progress { num_computed: positions, num_valid: positions, num_public: positions });
        seq.status = SeqStatus::Running;
        seq.slot = Some(slot);
        let swapped = seq.swapped.clone();
        self.running.push(idx);
        self.undo.push(Undo::Unfold { seq: idx, swapped });
    }

    /// Why a gang at the head of the queue cannot join for want of slots.
    pub(super) fn gang_waits(&self, idx: SeqIdx) -> Option<WaitReason> {
        let needed = self.gangs.get(&self.seq(idx).gang?)?.width;
        let available = self.free_slots.len() as u32;
        (needed > available).then_some(WaitReason::Gang { needed, available })
    }

    /// True when the last token of this sequence is computed only beside those of other beams.
    pub(super) fn is_held(&self, seq: &Sequence) -> bool {
        seq.gang.is_some_and(|id| self.gangs[&id].members.len() > 1)
    }

    /// Tokens that the sequence may compute before its gang's next step: the last one only together with all others.
    pub(super) fn num_plannable(&self, idx: SeqIdx) -> u32 {
        let seq = self.seq(idx);
        seq.num_remaining() - u32::from(self.is_held(seq))
    }

    /// Plans the step of a gang whose beams all need one token, if the budget has room for all.
    pub(super) fn serve_gang(&mut self, id: RequestId, draft: &mut Draft) {
        let members = self.gangs[&id].members.clone();
        let is_ready = |idx: &SeqIdx| {
            let seq = self.seq(*idx);
            seq.status == SeqStatus::Running && seq.num_remaining() == 1
        };
        if !members.iter().all(is_ready) || (draft.budget_left as usize) < members.len() {
            return;
        }
        for idx in members {
            if !self.make_room(idx, 1, draft) {
                return;
            }
            self.plan_row(idx, 1, None, draft);
        }
    }

    /// True when this budget is too small for the step of the gang that the sequence is in.
    pub(super) fn is_gang_over_budget(&self, seq: &Sequence, budget: u32) -> bool {
        seq.gang.is_some_and(|id| self.gangs[&id].members.len() > budget as usize)
    }

    /// Takes the slots of the other beams as the leader joins.
    pub(super) fn take_spare_slots(&mut self, idx: SeqIdx) {
        let Some(id) = self.seq(idx).gang else { return };
        let gang = self.gangs.get_mut(&id).expect("a member's gang is live");
        let left = self.free_slots.len() + 1 - gang.width as usize;
        gang.spare_slots = self.free_slots.split_off(left);
        self.undo.push(Undo::TakeSpareSlots { gang: id });
    }

    /// Takes all beams but the leader out of the batch, and the spare slots back. Says how many computed positions are
    /// lost beyond those that the leader has.
    pub(super) fn fold_gang(&mut self, id: RequestId, mode: PreemptMode, draft: &mut Draft) -> u32 {
        let is_follower = |idx: &SeqIdx| self.seq(*idx).gang == Some(id) && self.seq(*idx).is_follower();
        let followers: Vec<SeqIdx> = self.running.iter().copied().filter(is_follower).collect();
        let gang = self.gangs.get_mut(&id).expect("the gang runs");
        let slots = std::mem::take(&mut gang.spare_slots);
        self.free_slots.extend_from_slice(&slots);
        self.undo.push(Undo::GiveSpareSlots { gang: id, slots });
        // Beams that wait for their leader still are preempted with it.
        self.folded(id).into_iter().for_each(|idx| self.seq_mut(idx).preemptions += 1);
        let mut lost = 0;
        for idx in followers.into_iter().rev() {
            let shared = self.neighbour(&self.gangs[&id], idx).1;
            let seq = self.seq(idx);
            let kept = if mode == PreemptMode::Swap { shared.max(self.num_saved(seq)) } else { shared };
            lost += seq.num_computed.saturating_sub(kept);
            self.fold(idx, (kept > shared).then_some((shared, kept)), draft);
        }
        lost
    }

    /// The beams of a running gang that are not in the batch.
    fn folded(&self, id: RequestId) -> Vec<SeqIdx> {
        let is_folded = |idx: &SeqIdx| self.seq(*idx).is_follower() && self.seq(*idx).status == SeqStatus::Waiting;
        self.gangs[&id].members.iter().copied().filter(is_folded).collect()
    }

    /// `saved`: from which position on, and up to which, its blocks go to host memory.
    fn fold(&mut self, idx: SeqIdx, saved: Option<(u32, u32)>, draft: &mut Draft) {
        self.drop_row(idx, draft);
        let at = self.running.iter().position(|other| *other == idx).expect("a beam that is folded runs");
        self.running.remove(at);
        let seq = self.seqs[idx as usize].as_mut().expect("members are live");
        let progress = seq.progress();
        let slot = seq.slot.expect("a running sequence has a slot");
        let mut table = std::mem::replace(&mut seq.table, BlockTable::new(seq.id));
        self.kv.cancel_copy(&mut table);
        seq.reset_progress();
        seq.preemptions += 1;
        let table = match saved {
            None => self.kv.suspend(table),
            Some((from, to)) => {
                let (table, swapped) = self.kv.suspend_rest_to_host(table, from / self.kv.block_size(), to);
                seq.swapped = Some(swapped);
                table
            }
        };
        self.undo.push(Undo::Fold { seq: idx, at, slot, progress, table });
        self.free_slots.push(slot);
    }

    /// Undoes one change of a gang.
    pub(super) fn apply_gang(&mut self, undo: Undo) {
        match undo {
            Undo::Unfold { seq: idx, swapped } => {
                assert_eq!(self.running.pop(), Some(idx), "beams leave last to first");
                let seq = self.seqs[idx as usize].as_mut().expect("nothing ends while a step is in flight");
                let slot = seq.slot.expect("a running sequence has a slot");
                let id = seq.gang.expect("only beams unfold");
                seq.table = BlockTable::new(seq.id);
                (seq.swapped, seq.restored_from) = (swapped, None);
                seq.reset_progress();
                self.gangs.get_mut(&id).expect("the gang is live").spare_slots.push(slot);
            }
            Undo::Fold { seq: idx, at, slot, progress, table } => {
                assert_eq!(self.free_slots.pop(), Some(slot), "beams come back last to first");
                let table = self.kv.resume(table);
                let seq = self.seq_mut(idx);
                seq.table = table;
                seq.swapped = None;
                seq.set_progress(progress);
                seq.preemptions -= 1;
                seq.slot = Some(slot);
                seq.status = SeqStatus::Running;
                self.running.insert(at, idx);
            }
            Undo::TakeSpareSlots { gang } => {
                let gang = self.gangs.get_mut(&gang).expect("the gang is live");
                self.free_slots.append(&mut gang.spare_slots);
            }
            Undo::GiveSpareSlots { gang, slots } => {
                self.folded(gang).into_iter().for_each(|idx| self.seq_mut(idx).preemptions -= 1);
                self.free_slots.truncate(self.free_slots.len() - slots.len());
                self.gangs.get_mut(&gang).expect("the gang is live").spare_slots = slots;
            }
            other => panic!("{other:?} is not about a gang"),
        }
    }

    /// Lets a gang's beams go on as the search says: the first child of a beam stays in its place, further ones take the
    /// places of beams that have none, or new ones.
    pub(super) fn advance_gang(&mut self, id: RequestId, children: &[GangChild]) {
        let mut gang = self.gangs.remove(&id).expect("a gang that advances is live");
        assert!(!children.is_empty() && children.len() <= gang.width as usize, "{} beams go on", children.len());
        let mut homes: Vec<Option<SeqIdx>> = Vec::with_capacity(children.len());
        let mut has_child = vec![false; gang.members.len()];
        for child in children {
            let is_first = !std::mem::replace(&mut has_child[child.parent], true);
            homes.push(is_first.then(|| gang.members[child.parent]));
        }
        let leader = self.by_id[&id];
        let childless = gang.members.iter().zip(&has_child).filter(|(_, has_child)| !**has_child).map(|(idx, _)| *idx);
        let mut places: VecDeque<SeqIdx> = childless.filter(|idx| *idx != leader).collect();
        if !homes.contains(&Some(leader)) {
            places.push_front(leader);
            // The leader stays: where no child is left for it, the last beam moves.
            if homes.iter().all(Option::is_some) {
                places.extend(homes.last_mut().and_then(Option::take));
            }
        }
        for (home, child) in homes.iter_mut().zip(children).filter(|(home, _)| home.is_none()) {
            let parent = gang.members[child.parent];
            let idx = match places.pop_front() {
                Some(idx) => idx,
                None => self.new_member(id, &mut gang, parent),
            };
            self.follow(idx, parent);
            *home = Some(idx);
        }
        for idx in places {
            self.drop_member(idx, &mut gang);
        }
        gang.members = homes.into_iter().map(|home| home.expect("every child has a place")).collect();
        for (&idx, child) in gang.members.iter().zip(children) {
            self.seq_mut(idx).push(child.token);
        }
        self.waiting.charge(self.seq(leader).ticket.client, children.len() as u32);
        self.gangs.insert(id, gang);
    }

    /// A further beam, with an id and a slot of the gang.
    fn new_member(&mut self, id: RequestId, gang: &mut Gang, parent: SeqIdx) -> SeqIdx {
        let own = (0..u64::from(gang.width)).map(|i| RequestId(id.0 + i)).find(|id| !self.by_id.contains_key(id));
        let own = own.expect("a gang has no more beams than ids");
        let mut seq = self.seq(parent).beam(own);
        seq.slot = Some(gang.spare_slots.pop().expect("a running gang has a slot for each beam"));
        seq.status = SeqStatus::Running;
        let idx = self.place(seq);
        self.running.push(idx);
        idx
    }

    /// Makes `idx` a copy of `parent`: its tokens, and its blocks by sharing.
    fn follow(&mut self, idx: SeqIdx, parent: SeqIdx) {
        if idx == parent {
            return;
        }
        let mut seq = self.seqs[idx as usize].take().expect("a place is live");
        let source = self.seq(parent);
        seq.copy_progress(source);
        self.kv.follow(
            &mut seq.table,
            &self.seqs[parent as usize].as_ref().expect("parents are live").table,
            seq.num_valid,
        );
        self.seqs[idx as usize] = Some(seq);
    }

    fn drop_member(&mut self, idx: SeqIdx, gang: &mut Gang) {
        let seq = self.seqs[idx as usize].take().expect("a beam without children is live");
        assert!(seq.is_follower(), "the leader stays");
        self.running.retain(|other| *other != idx);
        gang.spare_slots.extend(seq.slot);
        seq.swapped.into_iter().for_each(|swapped| self.kv.drop_swapped(swapped));
        self.by_id.remove(&seq.id);
        self.vacant.push(idx);
        self.kv.free(seq.table);
    }

    /// Drops every beam but the leader, and gives their slots back: the gang ends with its leader.
    pub(super) fn disband(&mut self, id: RequestId) {
        let mut gang = self.gangs.remove(&id).expect("the gang is live");
        let leader = self.by_id[&id];
        for idx in std::mem::take(&mut gang.members) {
            if idx != leader {
                self.drop_member(idx, &mut gang);
            }
        }
        self.free_slots.append(&mut gang.spare_slots);
        self.seq_mut(leader).gang = None;
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
