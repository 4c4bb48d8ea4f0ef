//! The choices of a step as pure functions: how many tokens a row gets, who gives way, who may join.

use super::sequence::Sequence;
use super::{SchedulerConfig, VictimPolicy, WaitReason};
use crate::ids::RequestId;
use crate::kv::{KvCache, PrefixHit};

/// Blocks that admissions leave free for the growth of those who run, of a pool of `num_blocks`. With conversations of
/// 161 + 338 tokens in 57 % of the blocks that the running set needs at full length, a hundredth of the pool means that
/// 13 % of all tokens are computed twice, a twelfth 2 %; tokens computed once per step peak between a twelfth and a
/// tenth (`kvasir bench paper`).
pub fn default_watermark(num_blocks: u32) -> u32 {
    num_blocks / 12
}

/// A request preempted this often is not taken again: it is admitted only when all it may ever need is free, and what
/// it has not taken yet is kept for it. That bounds the preemptions of one request, and so the work done twice.
pub(super) fn is_protected(seq: &Sequence, config: &SchedulerConfig) -> bool {
    seq.preemptions >= config.max_preemptions
}

/// Blocks that a running sequence is promised beyond those it has: a protected one all it may ever need, any other one
/// what its known tokens need.
pub(super) fn promised_blocks(seq: &Sequence, kv: &KvCache, config: &SchedulerConfig) -> u32 {
    let tokens = if is_protected(seq, config) { seq.max_total } else { seq.num_tokens() };
    kv.needed_blocks(&seq.table, seq.num_valid, tokens)
}

/// Blocks that nobody but this sequence may take.
pub(super) fn claimed_blocks(seq: &Sequence, kv: &KvCache, config: &SchedulerConfig) -> u32 {
    if is_protected(seq, config) { promised_blocks(seq, kv, config) } else { 0 }
}

/// What each running sequence that is not protected is ranked by, in batch order: the last of the highest gives way.
/// Beams give way with their leader.
pub(super) fn victim_scores<'a>(
    running: impl Iterator<Item = &'a Sequence>,
    config: &SchedulerConfig,
) -> Vec<(RequestId, u64)> {
    let score = |(at, seq): (usize, &Sequence)| match config.victim {
        VictimPolicy::LastIn => at as u64,
        VictimPolicy::LeastComputed => u64::MAX - u64::from(seq.num_computed()),
        VictimPolicy::Priority => (i64::from(seq.priority()) - i64::from(i32::MIN)) as u64,
    };
    running
        .enumerate()
        .filter(|(_, seq)| !is_protected(seq, config) && !seq.is_follower())
        .map(|(at, seq)| (seq.id(), score((at, seq))))
        .collect()
}

/// The victim among scored candidates.
pub(super) fn victim(scores: &[(RequestId, u64)]) -> Option<RequestId> {
    scores.iter().max_by_key(|(_, score)| *score).map(|(id, _)| *id)
}

/// The pool as an admission sees it.
pub(super) struct Room {
    /// Free and cached-idle blocks.
    pub available: u32,
    /// Blocks promised to those who run.
    pub promised: u32,
    /// Kept free while anybody runs.
    pub watermark: u32,
}

/// Blocks that a waiting sequence must be able to have: a protected one all it may ever need.
pub(super) fn own_blocks(seq: &Sequence, kv: &KvCache, config: &SchedulerConfig) -> u32 {
    kv.blocks_for(if is_protected(seq, config) { seq.max_total } else { seq.num_tokens() })
}

/// All `blocks` that a request needs must fit, and an idle block of its own prefix counts once: as found, not as available.
pub(super) fn may_join(blocks: u32, hit: PrefixHit, room: &Room) -> Result<(), WaitReason> {
    let needed = blocks.saturating_sub(hit.num_blocks);
    // A hit may need no further block and yet take idle ones that are promised to others.
    let taken = hit.num_idle + room.promised + room.watermark;
    let available = room.available.saturating_sub(taken);
    if needed + taken > room.available { Err(WaitReason::Blocks { needed, available }) } else { Ok(()) }
}
