//! The figures of the PagedAttention paper (Kwon et al., SOSP 2023, arXiv 2309.06180), measured on the real scheduler
//! and cache.
//!
//! Guarantees: a report depends on its seed only; every decision is the product's own scheduler's and cache's, no
//! executor runs; lengths and definitions are fixed in [`lengths`] and below, and printed beside the figures.
//! It does not measure time: where a figure is in milliseconds, steps are priced by the cost model in [`latency`].
//!
//! The pool has 15,700 slots, the paper's for OPT-13B on an A100 of 40 GB (its Table 1).

pub mod batching;
pub mod buddy;
pub mod drive;
pub mod latency;
pub mod lengths;
pub mod memory;
pub mod reservation;
pub mod sharing;

use super::rng::Rng;
use batching::BatchingSteps;
use latency::{LongPrompt, SharedPrefix};
use lengths::{ALPACA, SHAREGPT, Workload};
use memory::{PagedUse, Tax};
use reservation::{MemoryUse, Reservation};
use serde::Serialize;
use sharing::{Saving, WIDTHS};

/// Slots of the KV memory.
pub const NUM_SLOTS: u32 = 15_700;
/// Block sizes of the first figure.
pub const BLOCK_SIZES: [u32; 6] = [8, 16, 32, 64, 128, 256];
/// The block size of all other figures.
pub const BLOCK_SIZE: u32 = 16;

/// The shares of one workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UsefulKv {
    /// (block size, use)
    pub paged: Vec<(u32, PagedUse)>,
    pub reserve_max: MemoryUse,
    pub reserve_pow2: MemoryUse,
    pub reserve_oracle: MemoryUse,
}

impl UsefulKv {
    /// The paged figures at [`BLOCK_SIZE`].
    pub fn headline(&self) -> PagedUse {
        self.paged.iter().find(|(size, _)| *size == BLOCK_SIZE).map_or(PagedUse::default(), |(_, used)| *used)
    }

    /// Requests in the batch, paged over max-length reservation.
    pub fn concurrency(&self) -> f64 {
        self.headline().mean_running / self.reserve_max.mean_running
    }
}

/// Everything that `kvasir bench paper` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PaperReport {
    pub seed: u64,
    pub num_requests: u32,
    pub useful_sharegpt: UsefulKv,
    pub useful_alpaca: UsefulKv,
    pub parallel_sharegpt: Vec<Saving>,
    pub parallel_alpaca: Vec<Saving>,
    pub beam_sharegpt: Vec<Saving>,
    pub beam_alpaca: Vec<Saving>,
    pub uniform: BatchingSteps,
    pub exponential: BatchingSteps,
    pub fixed: BatchingSteps,
    pub prefix: SharedPrefix,
    pub tax_sharegpt: Tax,
    pub tax_alpaca: Tax,
    pub long_prompt: LongPrompt,
}

/// Measures everything. A request list of each workload has `num_requests` entries.
pub fn run(seed: u64, num_requests: u32) -> PaperReport {
    let useful = |workload: Workload| {
        let requests = workload.draw_many(num_requests as usize, &mut Rng::new(seed));
        let reserve = |reservation| reservation::serve(reservation, NUM_SLOTS, &requests);
        UsefulKv {
            paged: BLOCK_SIZES.map(|size| (size, memory::serve(memory::pool(NUM_SLOTS, size), &requests))).to_vec(),
            reserve_max: reserve(Reservation::Max),
            reserve_pow2: reserve(Reservation::Pow2),
            reserve_oracle: reserve(Reservation::Oracle),
        }
    };
    let tax = |workload: Workload| {
        memory::tax(BLOCK_SIZE, &workload.draw_many(num_requests as usize, &mut Rng::new(seed + 1)))
    };
    // As many outputs or beams as there are requests above; three times as many short ones, since more are there at once.
    let prompts = |workload: Workload, width| num_requests * if workload == ALPACA { 3 } else { 1 } / width;
    let pool = memory::pool(NUM_SLOTS, BLOCK_SIZE);
    // Few prompts of the long tail decide what outputs share: many are drawn, so that the seed hardly shows.
    let parallel = |workload: Workload| {
        let saving =
            |width| sharing::parallel(pool, workload, width, 8 * prompts(workload, width), &mut Rng::new(seed + 4));
        WIDTHS.map(saving).to_vec()
    };
    let beams = |workload: Workload| {
        let saving = |width| sharing::beams(pool, workload, width, prompts(workload, width), &mut Rng::new(seed + 5));
        WIDTHS.map(saving).to_vec()
    };
    PaperReport {
        seed,
        num_requests,
        useful_sharegpt: useful(SHAREGPT),
        useful_alpaca: useful(ALPACA),
        parallel_sharegpt: parallel(SHAREGPT),
        parallel_alpaca: parallel(ALPACA),
        beam_sharegpt: beams(SHAREGPT),
        beam_alpaca: beams(ALPACA),
        uniform: batching::uniform(&mut Rng::new(seed + 2)),
        exponential: batching::exponential(&mut Rng::new(seed + 3)),
        fixed: batching::fixed(),
        prefix: latency::shared_prefix(),
        tax_sharegpt: tax(SHAREGPT),
        tax_alpaca: tax(ALPACA),
        long_prompt: latency::long_prompt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_the_papers_or_better() {
        let report = run(7, 1000);
        let useful = &report.useful_sharegpt;
        assert!(useful.headline().of_held >= 0.96, "{:?}", useful.headline());
        for (used, paper) in [(useful.reserve_max, 0.204), (useful.reserve_pow2, 0.268), (useful.reserve_oracle, 0.382)]
        {
            assert!((used.useful - paper).abs() < 0.03, "{used:?}, the paper has {paper}");
        }
        let shares: Vec<f64> = useful.paged.iter().map(|(_, used)| used.of_held).collect();
        assert!(shares.is_sorted_by(|a, b| a > b), "smaller blocks waste less: {shares:?}");
        assert!(useful.concurrency() >= 3.5, "{}", useful.concurrency());
        assert!(report.uniform.ratio >= 1.7 && report.exponential.ratio >= 2.5, "{report:?}");
        assert_eq!(report.fixed.static_steps, report.fixed.continuous_steps, "the control");
        for (savings, paper) in [(&report.parallel_sharegpt, [0.162, 0.305]), (&report.parallel_alpaca, [0.061, 0.098])]
        {
            let is_near = |saving: &Saving| saving.saving >= paper[0] - 0.03 && saving.saving <= paper[1] + 0.03;
            assert!(savings.iter().all(is_near), "{savings:?}, the paper has {paper:?}");
            assert!(savings.is_sorted_by(|a, b| a.saving < b.saving), "{savings:?}");
        }
        for savings in [&report.beam_sharegpt, &report.beam_alpaca] {
            assert!(savings[0].saving >= 0.37 && savings.is_sorted_by(|a, b| a.saving < b.saving), "{savings:?}");
        }
        for tax in [report.tax_sharegpt, report.tax_alpaca] {
            assert!(tax.with_watermark.recompute_tax <= 0.05, "{tax:?}");
            assert!(tax.without_watermark.recompute_tax > tax.with_watermark.recompute_tax, "{tax:?}");
            assert!(tax.without_watermark.preemptions > 0, "memory is short: {tax:?}");
        }
    }
}
