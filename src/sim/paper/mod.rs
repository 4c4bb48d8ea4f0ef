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

use super::rng::Rng;
use batching::BatchingSteps;
use latency::{LongPrompt, SharedPrefix};
use lengths::{ALPACA, SHAREGPT, Workload};
use memory::{PagedUse, Tax};
use reservation::{MemoryUse, Reservation};
use serde::Serialize;

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
    PaperReport {
        seed,
        num_requests,
        useful_sharegpt: useful(SHAREGPT),
        useful_alpaca: useful(ALPACA),
        uniform: batching::uniform(&mut Rng::new(seed + 2)),
        exponential: batching::exponential(&mut Rng::new(seed + 3)),
        fixed: batching::fixed(),
        prefix: latency::shared_prefix(),
        tax_sharegpt: tax(SHAREGPT),
        tax_alpaca: tax(ALPACA),
        long_prompt: latency::long_prompt(),
    }
}
