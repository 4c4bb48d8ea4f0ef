//! The few figures that say how the engine does, as of the step shown.
//!
//! Guarantees: each costs at most the last few hundred steps, whatever the history's length.

use super::model::InspectModel;
use super::queue_words::HitSplit;
use crate::app::format;

/// Rates are taken over this time.
const WINDOW_US: u64 = 3_000_000;
/// Times between tokens: the median over this many steps.
const ITL_STEPS: usize = 128;
/// Times to first token: over this many requests.
const TTFT_REQUESTS: usize = 64;

/// Figures of the strip and of the status bar.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kpis {
    pub num_running: u32,
    pub num_waiting: u32,
    pub tokens_per_s: f64,
    pub ttft_p50_us: Option<u64>,
    pub ttft_p95_us: Option<u64>,
    pub itl_p50_us: Option<u64>,
    pub kv_used: u32,
    pub kv_cached: u32,
    pub kv_peak: u32,
    pub kv_total: u32,
    pub hit_tokens: u64,
    pub query_tokens: u64,
    pub preemptions: u64,
    /// Of the preemptions: those whose blocks went to host memory.
    pub swaps: u64,
    /// Tokens computed again after preemptions, and all tokens computed.
    pub recomputed_tokens: u64,
    pub computed_tokens: u64,
    /// Blocks copied because a sharer was about to write.
    pub copies: u64,
    pub hits: HitSplit,
    /// Steps that happened and were not recorded here.
    pub num_not_shown: u64,
}

/// The status bar's items, ready to be shown; each is a button that opens Inspect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusLine {
    /// "KV 62 % (cached 11 %)"
    pub kv: String,
    /// "run 3 · wait 1"
    pub batch: String,
    /// "61 tok/s"
    pub rate: String,
    /// "hit 74 %"
    pub hit: String,
}

impl InspectModel {
    pub fn kpis(&self) -> Kpis {
        let Some(entry) = self.entry() else {
            let kv = self.snapshot().kv;
            return Kpis { kv_total: kv.total, kv_used: kv.used, kv_cached: kv.cached_idle, ..Kpis::default() };
        };
        let record = &entry.record;
        let (ttft_p50_us, ttft_p95_us) = self.ttft(record.step);
        // A snapshot taken after the newest record also knows what happened between steps.
        let is_snapshot_newer = self.is_live() && self.snapshot().step >= record.step;
        let kv = self.kv_now();
        let all = self.snapshot();
        let (recomputed_tokens, computed_tokens, preemptions, swaps, copies) = match self.is_live() {
            true => (
                all.recomputed_tokens_total,
                all.computed_tokens_total,
                all.preemptions_total,
                all.swaps_total,
                all.copied_blocks_total,
            ),
            false => (entry.cum_recomputed, entry.cum_tokens, entry.cum_preempted, entry.cum_swaps, entry.cum_copies),
        };
        let idle_now = is_snapshot_newer && self.is_engine_idle();
        Kpis {
            num_running: if idle_now { 0 } else { record.num_running },
            num_waiting: if idle_now { 0 } else { record.num_waiting },
            tokens_per_s: if idle_now { 0.0 } else { self.tokens_per_s() },
            ttft_p50_us,
            ttft_p95_us,
            itl_p50_us: self.itl_p50_us(),
            kv_used: kv.used,
            kv_cached: kv.cached_idle,
            kv_peak: entry.peak_used,
            kv_total: kv.total,
            hit_tokens: kv.hit_tokens,
            query_tokens: kv.query_tokens,
            preemptions,
            swaps,
            recomputed_tokens,
            computed_tokens,
            copies,
            hits: HitSplit::of(&kv),
            num_not_shown: self.history().num_not_shown(),
        }
    }

    /// No request is waiting or in the batch at the step shown.
    pub fn is_engine_idle(&self) -> bool {
        use super::requests::RowState;
        self.rows().iter().all(|r| matches!(r.state, RowState::Finished(_)))
    }

    /// Sampled tokens per second over the last seconds before the step shown.
    pub fn tokens_per_s(&self) -> f64 {
        let Some(end) = self.step().and_then(|s| self.history().idx_at(s)) else { return 0.0 };
        let Some(last) = self.history().get(end) else { return 0.0 };
        let from_us = last.end_us().saturating_sub(WINDOW_US);
        let (mut lo, mut hi) = (0, end);
        while lo < hi {
            let mid = lo + (hi - lo) / 2;
            if self.history().get(mid).is_some_and(|e| e.end_us() < from_us) { lo = mid + 1 } else { hi = mid }
        }
        let Some(first) = self.history().get(lo) else { return 0.0 };
        let before = lo.checked_sub(1).and_then(|i| self.history().get(i)).map_or(0, |e| e.cum_sampled);
        let us = last.end_us().saturating_sub(first.record.t0_us);
        if us == 0 { 0.0 } else { (last.cum_sampled - before) as f64 * 1e6 / us as f64 }
    }

    fn itl_p50_us(&self) -> Option<u64> {
        let end = self.step().and_then(|s| self.history().idx_at(s))? + 1;
        let mut gaps: Vec<u32> =
            self.history().range(end.saturating_sub(ITL_STEPS), end).map(|e| e.itl_us).filter(|&us| us > 0).collect();
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).map(|&us| u64::from(us))
    }

    fn ttft(&self, step: u64) -> (Option<u64>, Option<u64>) {
        let mut times: Vec<u64> =
            self.requests().iter().rev().filter_map(|(_, log)| log.ttft_us(step)).take(TTFT_REQUESTS).collect();
        times.sort_unstable();
        let at = |q: f64| times.get(((times.len() as f64 * q) as usize).min(times.len().saturating_sub(1))).copied();
        (at(0.5), at(0.95))
    }

    /// What the status bar shows; `None` before a pool exists.
    pub fn status_line(&self) -> Option<StatusLine> {
        let k = self.kpis();
        if k.kv_total == 0 {
            return None;
        }
        let total = u64::from(k.kv_total);
        Some(StatusLine {
            kv: format!(
                "KV {} (cached {})",
                format::percent(u64::from(k.kv_used), total),
                format::percent(u64::from(k.kv_cached), total)
            ),
            batch: format!("run {} · wait {}", k.num_running, k.num_waiting),
            rate: format!("{} tok/s", format::rate(k.tokens_per_s)),
            hit: format!("hit {}", format::percent(k.hit_tokens, k.query_tokens)),
        })
    }
}
