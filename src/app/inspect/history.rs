//! Steps that were, with keyframes, so that the block map of any of them can be shown again.
//!
//! Guarantees: memory stays under the cap given (the newest keyframe and what follows it always stay); reading costs
//! O(log steps) except [`History::map_at`], which replays at most [`KEYFRAME_STEPS`] records; a gap between records is
//! remembered and never bridged: the map of a step is exact or absent.

use super::map::BlockMap;
use crate::telemetry::{BlockDelta, PreemptMode, Preemption, RowKind, SeqStep, StepRecord};
use std::collections::VecDeque;
use std::sync::Arc;

/// A keyframe is taken this often.
pub const KEYFRAME_STEPS: u64 = 256;

/// A record with running totals, so that any range is a difference of two entries.
#[derive(Clone, Debug)]
pub struct Entry {
    pub record: Arc<StepRecord>,
    /// Sampled tokens up to and with this step, since the history began.
    pub cum_sampled: u64,
    /// Computed tokens up to and with this step.
    pub cum_tokens: u64,
    pub cum_preempted: u64,
    /// Of those: the tokens to compute again, and the preemptions whose blocks went to host memory.
    pub cum_recomputed: u64,
    pub cum_swaps: u64,
    /// Blocks copied on write up to and with this step.
    pub cum_copies: u64,
    /// Largest number of used blocks up to and with this step.
    pub peak_used: u32,
    /// Median time between tokens over the rows that decoded in this step; 0 if none did.
    pub itl_us: u32,
    /// Steps missing before this one.
    pub gap_before: u64,
}

impl Entry {
    pub fn end_us(&self) -> u64 {
        end_us(&self.record)
    }
}

/// When a step was over, in microseconds since the engine started.
pub fn end_us(record: &StepRecord) -> u64 {
    record.t0_us + u64::from(record.total_us)
}

/// The records and keyframes kept.
#[derive(Debug)]
pub struct History {
    entries: VecDeque<Entry>,
    keyframes: VecDeque<Arc<BlockMap>>,
    num_bytes: usize,
    max_bytes: usize,
    /// Steps that are known to be missing inside or before the history.
    num_not_shown: u64,
}

impl History {
    pub fn new(max_bytes: usize) -> History {
        History { entries: VecDeque::new(), keyframes: VecDeque::new(), num_bytes: 0, max_bytes, num_not_shown: 0 }
    }

    /// Appends the next record; `itl_us` is the median time between tokens in it. Older or equal steps are ignored.
    pub fn push(&mut self, record: Arc<StepRecord>, itl_us: u32) {
        let last = self.entries.back();
        if last.is_some_and(|e| e.record.step >= record.step) {
            return;
        }
        let sampled = record.rows.iter().filter(|r| r.sampled.is_some()).count() as u64;
        let lost: u64 = record.preempted.iter().map(|p| u64::from(p.lost_tokens)).sum();
        let swaps = record.preempted.iter().filter(|p| p.mode == PreemptMode::Swap).count() as u64;
        let copies = record.deltas.iter().filter(|d| matches!(d, BlockDelta::Copy { .. })).count() as u64;
        let gap_before = last.map_or(0, |e| record.step - e.record.step - 1);
        let entry = Entry {
            cum_sampled: last.map_or(0, |e| e.cum_sampled) + sampled,
            cum_tokens: last.map_or(0, |e| e.cum_tokens) + u64::from(record.num_tokens()),
            cum_preempted: last.map_or(0, |e| e.cum_preempted) + record.preempted.len() as u64,
            cum_recomputed: last.map_or(0, |e| e.cum_recomputed) + lost,
            cum_swaps: last.map_or(0, |e| e.cum_swaps) + swaps,
            cum_copies: last.map_or(0, |e| e.cum_copies) + copies,
            peak_used: last.map_or(0, |e| e.peak_used).max(record.kv.used),
            itl_us,
            gap_before,
            record,
        };
        self.num_not_shown += gap_before;
        self.num_bytes += record_bytes(&entry.record);
        self.entries.push_back(entry);
        self.prune();
    }

    /// Adds the map at the end of a step already pushed (or of the step before the first).
    pub fn push_keyframe(&mut self, map: &BlockMap) {
        if self.keyframes.back().is_some_and(|k| k.step >= map.step) {
            return;
        }
        self.num_bytes += map.num_bytes();
        self.keyframes.push_back(Arc::new(map.clone()));
        self.prune();
    }

    /// Counts steps that were lost before the first record.
    pub fn note_not_shown(&mut self, num_steps: u64) {
        self.num_not_shown += num_steps;
    }

    fn prune(&mut self) {
        while self.num_bytes > self.max_bytes && self.keyframes.len() > 1 {
            if let Some(old) = self.keyframes.pop_front() {
                self.num_bytes -= old.num_bytes();
            }
            let first = self.keyframes.front().map_or(0, |k| k.step);
            while self.entries.len() > 1 && self.entries[0].record.step < first {
                if let Some(old) = self.entries.pop_front() {
                    self.num_bytes -= record_bytes(&old.record);
                }
            }
        }
        // Without keyframes to cut at (no snapshot yet, or one that fills the cap alone), keep the newest steps.
        while self.num_bytes > self.max_bytes && self.entries.len() as u64 > 2 * KEYFRAME_STEPS {
            if let Some(old) = self.entries.pop_front() {
                self.num_bytes -= record_bytes(&old.record);
            }
        }
    }

    /// The map at the end of `step`; `None` where the history does not know it.
    pub fn map_at(&self, step: u64) -> Option<BlockMap> {
        let after = self.keyframes.partition_point(|k| k.step <= step);
        let keyframe = self.keyframes.get(after.checked_sub(1)?)?;
        self.replay(BlockMap::clone(keyframe), step)
    }

    /// `map` brought forward to `step`; `None` if a step between is missing or `step` lies before it.
    pub fn replay(&self, mut map: BlockMap, step: u64) -> Option<BlockMap> {
        let start = self.entries.partition_point(|e| e.record.step <= map.step);
        for entry in self.entries.range(start..) {
            if entry.record.step > step {
                break;
            }
            if entry.record.step != map.step + 1 {
                return None;
            }
            map.apply(&entry.record);
        }
        (map.step == step).then_some(map)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn get(&self, idx: usize) -> Option<&Entry> {
        self.entries.get(idx)
    }

    pub fn first_step(&self) -> Option<u64> {
        self.entries.front().map(|e| e.record.step)
    }

    pub fn last_step(&self) -> Option<u64> {
        self.entries.back().map(|e| e.record.step)
    }

    /// The index of the newest entry whose step is at most `step`; the first if all are later.
    pub fn idx_at(&self, step: u64) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        Some(self.entries.partition_point(|e| e.record.step <= step).saturating_sub(1))
    }

    pub fn at(&self, step: u64) -> Option<&Entry> {
        self.get(self.idx_at(step)?)
    }

    /// The last `max` preemptions up to and with `step`, newest first: step, number within it, preemption.
    pub fn preemptions_before(&self, step: u64, max: usize) -> Vec<(u64, usize, &Preemption)> {
        let mut found = Vec::new();
        let mut end = self.entries.partition_point(|e| e.record.step <= step);
        while let Some(total) = end.checked_sub(1).and_then(|i| self.entries.get(i)).map(|e| e.cum_preempted) {
            // The first entry with this total is the one that preempted; before it lie only smaller totals.
            let at = self.entries.partition_point(|e| e.cum_preempted < total);
            let Some(entry) = self.entries.get(at).filter(|e| !e.record.preempted.is_empty()) else { break };
            let preempted = entry.record.preempted.iter().enumerate().rev();
            found.extend(preempted.map(|(nth, p)| (entry.record.step, nth, p)));
            if found.len() >= max {
                break;
            }
            end = at;
        }
        found.truncate(max);
        found
    }

    /// Entries `from..to`, clamped.
    pub fn range(&self, from: usize, to: usize) -> impl DoubleEndedIterator<Item = &Entry> {
        let to = to.min(self.entries.len());
        self.entries.range(from.min(to)..to)
    }

    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    pub fn num_keyframes(&self) -> usize {
        self.keyframes.len()
    }

    pub fn last_keyframe_step(&self) -> Option<u64> {
        self.keyframes.back().map(|k| k.step)
    }

    pub fn num_not_shown(&self) -> u64 {
        self.num_not_shown
    }
}

fn record_bytes(record: &StepRecord) -> usize {
    size_of::<StepRecord>()
        + size_of::<Entry>()
        + record.rows.len() * size_of::<SeqStep>()
        + record.deltas.len() * size_of::<BlockDelta>()
        + (record.admitted.len() + record.waiting.len() * 3 + record.preempted.len() * 4 + record.finished.len() * 4)
            * 8
}

/// What a step did with one request, as a lane shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LanePhase {
    Waiting,
    /// A chunk of the prompt, or tokens computed again.
    Prefill,
    Decode,
}

/// A lane's cell: phase and marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneCell {
    pub phase: Option<LanePhase>,
    pub is_hit: bool,
    pub is_preempted: bool,
    pub is_finished: bool,
}

impl LaneCell {
    pub const EMPTY: LaneCell = LaneCell { phase: None, is_hit: false, is_preempted: false, is_finished: false };
}

/// What happened to each request named in `record`, in no order.
pub fn lane_cells(record: &StepRecord, mut each: impl FnMut(crate::ids::RequestId, LaneCell)) {
    for (request, _) in &record.waiting {
        each(*request, LaneCell { phase: Some(LanePhase::Waiting), ..LaneCell::EMPTY });
    }
    for row in &record.rows {
        let (phase, cached) = match row.kind {
            RowKind::Decode => (LanePhase::Decode, 0),
            RowKind::Prefill { cached } | RowKind::Recompute { cached } => (LanePhase::Prefill, cached),
        };
        each(row.request, LaneCell { phase: Some(phase), is_hit: cached > 0, ..LaneCell::EMPTY });
    }
    for p in &record.preempted {
        each(p.victim, LaneCell { is_preempted: true, ..LaneCell::EMPTY });
    }
    for (request, _) in &record.finished {
        each(*request, LaneCell { is_finished: true, ..LaneCell::EMPTY });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{BlockId, RequestId};

    fn record(step: u64) -> Arc<StepRecord> {
        let block = BlockId(1 + (step % 7) as u32);
        let request = RequestId(step);
        let deltas = vec![
            BlockDelta::Alloc { block, request, logical: 0 },
            BlockDelta::Unref { block, request },
            BlockDelta::Free { block },
        ];
        Arc::new(StepRecord { step, deltas, ..StepRecord::default() })
    }

    #[test]
    fn a_gap_is_counted_and_not_bridged() {
        let mut history = History::new(1 << 20);
        history.push_keyframe(&BlockMap::pristine(8, 0));
        for step in [1, 2, 3, 10, 11] {
            history.push(record(step), 0);
        }
        assert_eq!(history.num_not_shown(), 6);
        assert!(history.map_at(3).is_some());
        assert!(history.map_at(10).is_none());
        assert_eq!(history.at(11).map(|e| e.gap_before), Some(0));
        assert_eq!(history.at(10).map(|e| e.gap_before), Some(6));
    }

    #[test]
    fn preemptions_are_found_without_reading_every_step() {
        let mut history = History::new(1 << 20);
        for step in 1..200u64 {
            let victims = match step {
                50 | 170 => 2,
                90 => 1,
                _ => 0,
            };
            let preempted = (0..victims)
                .map(|v| Preemption {
                    victim: RequestId(v),
                    beneficiary: RequestId(9),
                    freed_blocks: 1,
                    lost_tokens: 3,
                    mode: PreemptMode::Recompute,
                    policy: crate::telemetry::VictimPolicy::LastIn,
                    scores: Vec::new(),
                })
                .collect();
            history.push(Arc::new(StepRecord { step, preempted, ..StepRecord::default() }), 0);
        }
        let at = |step, max| -> Vec<(u64, u64)> {
            history.preemptions_before(step, max).into_iter().map(|(s, _, p)| (s, p.victim.0)).collect()
        };
        assert_eq!(at(199, 9), [(170, 1), (170, 0), (90, 0), (50, 1), (50, 0)]);
        assert_eq!(at(169, 2), [(90, 0), (50, 1)]);
        assert!(at(49, 9).is_empty());
        assert_eq!(history.at(199).map(|e| e.cum_recomputed), Some(15));
    }

    #[test]
    fn memory_stays_under_the_cap() {
        let max_bytes = 64 << 10;
        let mut history = History::new(max_bytes);
        let mut map = BlockMap::pristine(64, 0);
        history.push_keyframe(&map);
        for step in 1..5_000 {
            let r = record(step);
            map.apply(&r);
            history.push(r, 0);
            if step % 32 == 0 {
                history.push_keyframe(&map);
            }
            assert!(history.num_bytes() <= max_bytes, "step {step}: {} bytes", history.num_bytes());
        }
        assert_eq!(history.last_step(), Some(4_999));
        let first = history.first_step().unwrap();
        assert!(first > 1, "old steps are gone");
        assert!(history.map_at(first).is_some(), "what is kept can be shown");
        assert_eq!(history.map_at(4_999), Some(map));
    }
}
