//! How a step's attention is cut into workgroups: a pure plan over a batch, read by `attention` from the step's metadata.
//!
//! An item is some tokens and some ranges of 256 keys. Most items own all ranges of their tokens and write the output. Two
//! kinds write partial results instead, which a second kernel merges in ascending order:
//!
//! - *split*: a long row's ranges are spread over workgroups, when the longest workgroup would otherwise be waited for;
//! - *shared*: tokens of several rows read the blocks that their tables begin with together ([`PrefixGroups`]).
//!
//! Guarantees: every token's output comes from exactly one item or one merge; every (token, range) that a merge reads is
//! written by exactly one item; slots of the scratch buffer are never exceeded, what does not fit runs whole. Which way is
//! taken changes no bit of the result, so the choice is free.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::batch::StepBatch;
use crate::batch::prefix_groups::RANGE;

/// Words of one item in the metadata.
pub const ITEM_WORDS: usize = 5;

/// Some tokens of a step over some ranges of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its tokens are `work_tokens[first..first + count]`. They have the same blocks in its ranges.
    pub first: u32,
    pub count: u32,
    /// Ranges `begin..end`.
    pub begin: u32,
    pub end: u32,
    /// Writes a partial result for each range, to slot `base + range` of each token.
    pub is_partial: bool,
}

/// A token and where its partials go: slot = `base + range`, in wrapping arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkToken {
    pub token: u32,
    pub base: u32,
}

/// A token whose partials over ranges `begin..end` are merged: slot = `base + range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    pub token: u32,
    pub base: u32,
    pub begin: u32,
    pub end: u32,
}

/// Whether a way of cutting the work is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    Never,
    WhenItPays,
    /// Wherever it is possible: for tests and measurements.
    Always,
}

/// What the plan depends on besides the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkLimits {
    /// Tokens of one workgroup.
    pub tokens_per_workgroup: u32,
    /// Workgroups that share a token, by its heads.
    pub parts: u32,
    /// Workgroups that the adapter runs at the same time.
    pub parallel: u32,
    /// Partials that the scratch buffer holds.
    pub max_slots: u32,
    /// Keys that a token sees in the layer that sees most; `None` is all.
    pub window: Option<u32>,
    pub split: Take,
    pub share: Take,
}

/// How much is dispatched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Items of one token.
    pub single: u32,
    /// Items of several.
    pub several: u32,
    pub merges: u32,
}

impl WorkCounts {
    /// Some of everything, for warming up.
    pub fn some(tokens: u32) -> WorkCounts {
        WorkCounts { single: tokens, several: tokens, merges: tokens }
    }
}

/// A step's attention.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionWork {
    /// Items of one token come first.
    pub items: Vec<Item>,
    pub tokens: Vec<WorkToken>,
    pub merges: Vec<Merge>,
    pub counts: WorkCounts,
    pub num_slots: u32,
}

/// Cost of one more dispatch and of the merge, in ranges that one workgroup computes: an estimate from a dispatch of
/// about 43 µs and a range of three heads of 64 dims of about 22 µs on lavapipe, as are the next ones; `bench kernels`
/// shows what they come to.
const MERGE_COST: u32 = 3;
/// A row of fewer ranges is never worth splitting.
const MIN_SPLIT: u32 = 3;
/// Workgroups that split work is cut into for each of the adapter's places, at least.
const PIECES_OF_A_PLACE: u64 = 4;
/// What a workgroup of `n` tokens takes is `1 + (n - 1) * MORE_TOKENS / 16` times that of one.
const MORE_TOKENS: u32 = 11;
/// With more workgroups than this at once, memory is what they wait for: reads saved count as if so many ran.
const MEMORY_STREAMS: u32 = 16;

/// Tokens that run together, over all their ranges, before splits.
#[derive(Clone, Copy, Debug)]
struct Tile {
    row: u32,
    first: u32, // of the batch's tokens
    count: u32,
    begin: u32,
    end: u32,
}

impl AttentionWork {
    /// Cuts the batch's work, in place of what `self` held.
    pub fn plan(&mut self, batch: &StepBatch, limits: &WorkLimits) {
        self.clear();
        let shared = self.share(batch, limits);
        let tiles = tiles(batch, limits, &shared);
        let longest = longest_worth(&tiles, limits);
        let step = ranges_of_a_piece(&tiles, longest, limits);
        for tile in &tiles {
            let slots = tile.count * (tile.end - tile.begin);
            if let Some(row) = shared.get(tile.row as usize).filter(|row| row.num_ranges > 0) {
                // The rest of a row that is merged anyhow.
                let first_merge = row.first_merge + tile.first - batch.row_start[tile.row as usize];
                self.push_partials(tile, first_merge, if tile.end - tile.begin > longest { step } else { u32::MAX });
            } else if tile.end - tile.begin > longest && self.num_slots + slots <= limits.max_slots {
                let first_merge = self.merges.len() as u32;
                (tile.first..tile.first + tile.count).for_each(|token| self.push_merge(token, tile.begin, tile.end));
                self.push_partials(tile, first_merge, step);
            } else {
                let first = self.tokens.len() as u32;
                self.tokens.extend((tile.first..tile.first + tile.count).map(|token| WorkToken { token, base: 0 }));
                let item = Item { first, count: tile.count, begin: tile.begin, end: tile.end, is_partial: false };
                self.items.push(item);
            }
        }
        // Stable: rows keep their order, so neighbours read neighbouring blocks.
        self.items.sort_by_key(|item| item.count > 1);
        self.counts.single = self.items.iter().filter(|item| item.count == 1).count() as u32;
        self.counts.several = self.items.len() as u32 - self.counts.single;
        self.counts.merges = self.merges.len() as u32;
    }

    pub fn clear(&mut self) {
        let AttentionWork { items, tokens, merges, counts, num_slots } = self;
        items.clear();
        tokens.clear();
        merges.clear();
        *counts = WorkCounts::default();
        *num_slots = 0;
    }

    /// Words of the three lists in the metadata.
    pub fn num_words(&self) -> usize {
        ITEM_WORDS * self.items.len() + 2 * self.tokens.len() + 4 * self.merges.len()
    }

    /// Words that any plan of this many tokens and slots can take.
    pub fn max_words(tokens: u64, slots: u64) -> u64 {
        ITEM_WORDS as u64 * (2 * tokens + slots) + 2 * 2 * tokens + 4 * tokens
    }

    /// Pushes what groups read together and the merges of their tokens; gives for each row what is shared, or nothing
    /// when no group is.
    fn share(&mut self, batch: &StepBatch, limits: &WorkLimits) -> Vec<SharedRow> {
        let mut shared = Vec::new();
        if limits.share == Take::Never || limits.tokens_per_workgroup == 1 {
            return shared;
        }
        for (rows, num_ranges) in batch.groups.iter() {
            // A row's own keys stay out: what is shared was computed in earlier steps.
            let own = |&row: &u32| batch.positions[tokens_of(batch, row).start as usize];
            let num_ranges = rows.iter().map(|row| own(row) / RANGE).min().map_or(0, |n| n.min(num_ranges));
            let begin = rows.iter().map(|row| first_range(own(row), limits)).min().unwrap_or(0);
            let num_tokens: u32 = rows.iter().map(|&row| tokens_of(batch, row).len() as u32).sum();
            let slots: u32 =
                rows.iter().map(|&row| tokens_of(batch, row).len() as u32 * (last_range(batch, row) + 1 - begin)).sum();
            let pays =
                limits.share == Take::Always || sharing_pays(num_tokens, num_ranges.saturating_sub(begin), limits);
            if num_ranges > begin && pays && self.num_slots + slots <= limits.max_slots {
                shared.resize(batch.num_rows(), SharedRow::default());
                self.push_group(batch, rows, (begin, num_ranges), limits.tokens_per_workgroup, &mut shared);
            }
        }
        shared
    }

    fn push_group(
        &mut self,
        batch: &StepBatch,
        rows: &[u32],
        (begin, num_ranges): (u32, u32),
        per_workgroup: u32,
        shared: &mut [SharedRow],
    ) {
        let (first_merge, first) = (self.merges.len(), self.tokens.len() as u32);
        for &row in rows {
            shared[row as usize] = SharedRow { num_ranges, first_merge: self.merges.len() as u32 };
            // One end for the whole row: tokens of one tile write the same ranges.
            tokens_of(batch, row).for_each(|token| self.push_merge(token, begin, last_range(batch, row) + 1));
        }
        let tokens = self.merges[first_merge..].iter().map(|m| WorkToken { token: m.token, base: m.base });
        self.tokens.extend(tokens);
        for from in (first..self.tokens.len() as u32).step_by(per_workgroup as usize) {
            let count = per_workgroup.min(self.tokens.len() as u32 - from);
            let item = |range| Item { first: from, count, begin: range, end: range + 1, is_partial: true };
            self.items.extend((begin..num_ranges).map(item));
        }
    }

    /// Gives a token slots for its ranges.
    fn push_merge(&mut self, token: u32, begin: u32, end: u32) {
        self.merges.push(Merge { token, base: self.num_slots.wrapping_sub(begin), begin, end });
        self.num_slots += end - begin;
    }

    /// A tile's ranges as partials, `step` of them in an item. Its tokens' merges start at `first_merge`.
    fn push_partials(&mut self, tile: &Tile, first_merge: u32, step: u32) {
        let first = self.tokens.len() as u32;
        let merges = &self.merges[first_merge as usize..(first_merge + tile.count) as usize];
        self.tokens.extend(merges.iter().map(|m| WorkToken { token: m.token, base: m.base }));
        let mut begin = tile.begin;
        while begin < tile.end {
            let end = tile.end.min(begin.saturating_add(step));
            self.items.push(Item { first, count: tile.count, begin, end, is_partial: true });
            begin = end;
        }
    }
}

/// What a row shares with its group.
#[derive(Clone, Copy, Debug, Default)]
struct SharedRow {
    /// 0 when it is in no group.
    num_ranges: u32,
    /// The merge of its first token.
    first_merge: u32,
}

fn tokens_of(batch: &StepBatch, row: u32) -> std::ops::Range<u32> {
    batch.row_start[row as usize]..batch.row_start[row as usize + 1]
}

/// The range of a row's last key.
fn last_range(batch: &StepBatch, row: u32) -> u32 {
    batch.positions[tokens_of(batch, row).end as usize - 1] / RANGE
}

/// First range that a token sees.
fn first_range(position: u32, limits: &WorkLimits) -> u32 {
    limits.window.map_or(0, |window| (position + 1).saturating_sub(window)) / RANGE
}

/// The rows in tiles of neighbouring tokens, from the first range that is not shared on.
fn tiles(batch: &StepBatch, limits: &WorkLimits, shared: &[SharedRow]) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for row in 0..batch.num_rows() as u32 {
        let shared = shared.get(row as usize).map_or(0, |shared| shared.num_ranges);
        let tokens = tokens_of(batch, row);
        for first in tokens.clone().step_by(limits.tokens_per_workgroup as usize) {
            let count = limits.tokens_per_workgroup.min(tokens.end - first);
            let position = batch.positions[first as usize];
            let begin = first_range(position, limits).max(shared);
            tiles.push(Tile { row, first, count, begin, end: (position + count - 1) / RANGE + 1 });
        }
    }
    tiles
}

/// Tiles of more ranges than this are split.
fn longest_worth(tiles: &[Tile], limits: &WorkLimits) -> u32 {
    match limits.split {
        Take::Never => return u32::MAX,
        Take::Always => return 0,
        Take::WhenItPays => {}
    }
    let length = |tile: &Tile| tile.end - tile.begin;
    let longest = tiles.iter().map(length).max().unwrap_or(0);
    if longest < MIN_SPLIT {
        return u32::MAX;
    }
    let all: u64 = tiles.iter().map(|tile| u64::from(length(tile))).sum::<u64>() * u64::from(limits.parts);
    let parallel = u64::from(limits.parallel.max(1));
    let fair = all.div_ceil(parallel);
    // Split evenly, nothing takes longer than the fair share, plus what splitting costs.
    if whole_time(tiles, limits, longest, fair) <= fair + u64::from(MERGE_COST) {
        return u32::MAX;
    }
    // Tiles below half the fair share fill the gaps as they are.
    u32::try_from(fair / 2).unwrap_or(u32::MAX).max(MIN_SPLIT - 1)
}

/// Ranges that a workgroup takes of a tile that is split: as many as leave each of the adapter's places some workgroups
/// to even out, since each has a start of its own to pay for.
fn ranges_of_a_piece(tiles: &[Tile], longest: u32, limits: &WorkLimits) -> u32 {
    let length = |tile: &Tile| tile.end - tile.begin;
    let split: u64 = tiles.iter().map(length).filter(|len| *len > longest).map(u64::from).sum();
    let pieces = u64::from(limits.parallel.max(1)) * PIECES_OF_A_PLACE;
    u32::try_from(split * u64::from(limits.parts) / pieces).unwrap_or(u32::MAX).max(1)
}

/// Ranges that the busiest of the adapter's places computes when tiles run whole, in their order.
fn whole_time(tiles: &[Tile], limits: &WorkLimits, longest: u32, fair: u64) -> u64 {
    let workgroups = tiles.len() as u64 * u64::from(limits.parts);
    if workgroups > 8 * u64::from(limits.parallel) {
        return fair.max(longest.into());
    }
    let mut places: BinaryHeap<Reverse<u64>> = (0..limits.parallel.max(1)).map(|_| Reverse(0)).collect();
    for tile in tiles {
        for _ in 0..limits.parts {
            let Reverse(free) = places.pop().expect("there is at least one place");
            places.push(Reverse(free + u64::from(tile.end - tile.begin)));
        }
    }
    places.into_iter().map(|Reverse(end)| end).max().unwrap_or(0)
}

/// Whether `tokens` that share `ranges` are faster together: what is saved against the two more dispatches.
fn sharing_pays(tokens: u32, ranges: u32, limits: &WorkLimits) -> bool {
    let per_workgroup = limits.tokens_per_workgroup;
    // In sixteenths of a range of one token.
    let apart = u64::from(tokens) * 16;
    let several = u64::from(16 + (per_workgroup - 1) * MORE_TOKENS);
    let rest = match tokens % per_workgroup {
        0 => 0,
        1 => 16,
        _ => several,
    };
    let together = u64::from(tokens / per_workgroup) * several + rest;
    let saved = apart.saturating_sub(together) * u64::from(ranges) * u64::from(limits.parts);
    saved / u64::from(limits.parallel.clamp(1, MEMORY_STREAMS)) > u64::from(2 * MERGE_COST * 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::prefix_groups::Tables;
    use std::collections::BTreeMap;

    const LIMITS: WorkLimits = WorkLimits {
        tokens_per_workgroup: 2,
        parts: 3,
        parallel: 2,
        max_slots: 1000,
        window: None,
        split: Take::WhenItPays,
        share: Take::WhenItPays,
    };

    /// Rows of (first position, tokens, shared prefix in tokens), in blocks of 64.
    fn batch(rows: &[(u32, u32, u32)]) -> StepBatch {
        let mut batch = StepBatch { block_size: 64, ..StepBatch::default() };
        batch.row_start.push(0);
        batch.block_table_start.push(0);
        for (idx, &(first, count, prefix)) in rows.iter().enumerate() {
            batch.positions.extend(first..first + count);
            batch.row_of_token.extend((0..count).map(|_| idx as u32));
            batch.row_start.push(batch.positions.len() as u32);
            let own = 1000 * (idx as u32 + 1);
            batch
                .block_tables
                .extend((0..(first + count).div_ceil(64)).map(|b| if b < prefix / 64 { b + 1 } else { own + b }));
            batch.block_table_start.push(batch.block_tables.len() as u32);
        }
        batch.input_ids.resize(batch.positions.len(), 0);
        let tables = Tables { block_size: 64, blocks: &batch.block_tables, start: &batch.block_table_start };
        batch.groups.find(tables);
        batch
    }

    fn plan(batch: &StepBatch, limits: &WorkLimits) -> AttentionWork {
        let mut work = AttentionWork::default();
        work.plan(batch, limits);
        check(batch, limits, &work);
        work
    }

    /// Every token's keys are covered once; every slot that a merge reads is written once; nothing is out of bounds.
    fn check(batch: &StepBatch, limits: &WorkLimits, work: &AttentionWork) {
        let mut written: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let mut direct: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for (idx, item) in work.items.iter().enumerate() {
            assert!(item.count >= 1 && item.count <= limits.tokens_per_workgroup && item.begin < item.end, "{item:?}");
            assert_eq!(item.count > 1, idx >= work.counts.single as usize);
            let tokens = &work.tokens[item.first as usize..(item.first + item.count) as usize];
            let table = |token: u32| {
                let row = batch.row_of_token[token as usize] as usize;
                &batch.block_tables[batch.block_table_start[row] as usize..]
            };
            for work_token in tokens {
                if !item.is_partial {
                    assert_eq!(direct.insert(work_token.token, (item.begin, item.end)), None);
                    continue;
                }
                for range in item.begin..item.end {
                    let blocks = range as usize * 4..(range as usize + 1) * 4;
                    if item.count > 1
                        && batch.row_of_token[tokens[0].token as usize] != batch.row_of_token[work_token.token as usize]
                    {
                        assert_eq!(table(work_token.token)[blocks.clone()], table(tokens[0].token)[blocks]);
                    }
                    let slot = work_token.base.wrapping_add(range);
                    assert!(slot < work.num_slots && work.num_slots <= limits.max_slots);
                    assert_eq!(written.insert(slot, (work_token.token, range)), None, "slot {slot} is written twice");
                }
            }
        }
        for merge in &work.merges {
            assert_eq!(direct.insert(merge.token, (merge.begin, merge.end)), None, "token {} comes twice", merge.token);
            let from = first_range(batch.positions[merge.token as usize], limits);
            for range in merge.begin.max(from)..merge.end {
                assert_eq!(written.get(&merge.base.wrapping_add(range)), Some(&(merge.token, range)));
            }
        }
        assert_eq!(direct.len(), batch.num_tokens());
        for (token, (begin, end)) in direct {
            let position = batch.positions[token as usize];
            assert!(begin <= first_range(position, limits) && end > position / RANGE, "token {token}: {begin}..{end}");
        }
        assert!(
            work.num_words() as u64 <= AttentionWork::max_words(batch.num_tokens() as u64, limits.max_slots.into())
        );
    }

    #[test]
    fn a_lone_long_row_is_split_and_a_short_one_is_not() {
        let long = plan(&batch(&[(4095, 1, 0)]), &LIMITS);
        assert_eq!((long.counts.single, long.counts.merges, long.num_slots), (3, 1, 16));
        let short = plan(&batch(&[(600, 1, 0)]), &LIMITS);
        assert_eq!((short.counts.single, short.counts.merges), (1, 0));
    }

    #[test]
    fn rows_that_fill_the_adapter_evenly_run_whole() {
        let rows: Vec<_> = (0..8).map(|_| (4095, 1, 0)).collect();
        assert_eq!(plan(&batch(&rows), &LIMITS).counts, WorkCounts { single: 8, several: 0, merges: 0 });
        // On an adapter of a thousand places the same rows leave most of them idle.
        let wide = plan(&batch(&rows), &WorkLimits { parallel: 1024, ..LIMITS });
        assert_eq!(wide.counts, WorkCounts { single: 128, several: 0, merges: 8 });
    }

    #[test]
    fn one_long_row_among_short_ones_is_split_alone() {
        let mut rows: Vec<_> = (0..5).map(|_| (300, 1, 0)).collect();
        rows.push((8191, 1, 0));
        let work = plan(&batch(&rows), &WorkLimits { parallel: 16, ..LIMITS });
        assert_eq!(work.counts, WorkCounts { single: 5 + 32, several: 0, merges: 1 });
    }

    #[test]
    fn chunks_of_prompts_are_split_by_tiles() {
        let work = plan(&batch(&[(2000, 5, 0)]), &WorkLimits { parallel: 64, ..LIMITS });
        assert_eq!(work.counts, WorkCounts { single: 8, several: 16, merges: 5 });
    }

    #[test]
    fn what_does_not_fit_the_scratch_runs_whole() {
        let work = plan(&batch(&[(4095, 1, 0), (4095, 1, 0)]), &WorkLimits { parallel: 64, max_slots: 20, ..LIMITS });
        assert_eq!((work.counts.merges, work.num_slots), (1, 16));
    }

    #[test]
    fn rows_on_one_prefix_read_it_together() {
        let rows: Vec<_> = (0..9).map(|i| (1100 + 40 * i, 1, 1024)).collect();
        let work = plan(&batch(&rows), &LIMITS);
        let shared = work.items.iter().filter(|item| item.end <= 4).count();
        assert_eq!((shared, work.counts.merges), (5 * 4, 9));
        assert_eq!(work.counts.several, 4 * 4, "the ninth row is alone in its workgroups");
    }

    #[test]
    fn few_rows_or_little_in_common_stay_apart() {
        for rows in [vec![(1100, 1, 1024); 2], vec![(400, 1, 256); 8]] {
            assert_eq!(plan(&batch(&rows), &LIMITS).counts.merges, 0, "{rows:?}");
        }
        let one_token = WorkLimits { tokens_per_workgroup: 1, share: Take::Always, ..LIMITS };
        assert_eq!(plan(&batch(&[(1100, 1, 1024); 9]), &one_token).counts.merges, 0);
    }

    #[test]
    fn any_mix_is_covered_exactly_once() {
        let rows =
            [(1100, 1, 1024), (0, 300, 0), (2000, 9, 1024), (1027, 3, 512), (5, 1, 0), (3071, 2, 1024), (800, 1, 0)];
        for window in [None, Some(1), Some(100), Some(700), Some(4000)] {
            for (split, share) in [
                (Take::Never, Take::Never),
                (Take::Never, Take::Always),
                (Take::Always, Take::Never),
                (Take::Always, Take::Always),
                (Take::WhenItPays, Take::WhenItPays),
            ] {
                for (tokens_per_workgroup, max_slots) in [(1, 5000), (2, 5000), (8, 5000), (4, 40)] {
                    let limits =
                        WorkLimits { tokens_per_workgroup, max_slots, window, split, share, parallel: 64, ..LIMITS };
                    plan(&batch(&rows), &limits);
                }
            }
        }
    }
}
