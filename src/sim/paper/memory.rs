//! Useful share of the KV memory, concurrency, and the recompute tax, with the memory always full.

use super::drive::{Drive, Setup};
use super::lengths::Lengths;
use crate::scheduler::default_watermark;
use serde::Serialize;

/// Rows of the batch at most, as in the paper's experiments (vLLM's default).
const MAX_NUM_SEQS: u32 = 256;
/// Token budget of a step (vLLM's default then).
const MAX_TOKENS_PER_STEP: u32 = 2560;

/// How a paged memory is used, over the steps in which requests wait for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PagedUse {
    /// Slots that hold the K and V of a running request's token, as a share of the whole pool.
    pub of_pool: f64,
    /// The same as a share of the slots of blocks that requests hold.
    pub of_held: f64,
    pub mean_running: f64,
    pub preemptions: u64,
    /// Tokens computed again, as a share of all computed tokens.
    pub recompute_tax: f64,
}

/// A pool of `num_slots` slots in blocks of `block_size`, with the engine's watermark.
pub fn pool(num_slots: u32, block_size: u32) -> Setup {
    let usable_blocks = num_slots / block_size;
    Setup {
        usable_blocks,
        block_size,
        max_num_seqs: MAX_NUM_SEQS,
        max_tokens_per_step: MAX_TOKENS_PER_STEP,
        watermark_blocks: default_watermark(usable_blocks),
        prefix_cache: true,
    }
}

/// Serves the requests, all there from the start; measures from the first that must wait for memory to the last.
pub fn serve(setup: Setup, requests: &[Lengths]) -> PagedUse {
    let mut drive = Drive::new(setup);
    requests.iter().for_each(|l| _ = drive.submit_alone(l.prompt, l.output));
    let mut used = PagedUse::default();
    let mut steps = 0.0;
    while drive.has_work() {
        let taken = drive.step();
        if taken.plan.num_waiting == 0 {
            break;
        }
        let kv = drive.scheduler.kv();
        let held: u32 = kv.counts().used;
        // A request that ended in this step has given its blocks back already: it counts as not there.
        let tokens: u64 = drive.scheduler.running().map(|seq| u64::from(seq.num_computed())).sum();
        let size = f64::from(setup.block_size);
        used.of_pool += tokens as f64 / (f64::from(setup.usable_blocks) * size);
        used.of_held += tokens as f64 / (f64::from(held.max(1)) * size);
        used.mean_running += drive.scheduler.running().len() as f64;
        steps += 1.0;
    }
    let totals = drive.scheduler.totals();
    PagedUse {
        of_pool: used.of_pool / steps,
        of_held: used.of_held / steps,
        mean_running: used.mean_running / steps,
        preemptions: totals.preemptions,
        recompute_tax: totals.recomputed_tokens as f64 / totals.computed_tokens.max(1) as f64,
    }
}

/// The recompute tax where memory is short.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tax {
    /// Blocks that the mean running set would need at full length, without any limit on memory.
    pub full_length_blocks: u32,
    /// 57 % of them.
    pub pool_blocks: u32,
    pub with_watermark: PagedUse,
    pub without_watermark: PagedUse,
}

/// Share of the blocks needed at full length that the pool has.
pub const POOL_SHARE: f64 = 0.57;
/// Rows of the batch when the tax is measured.
pub const TAX_NUM_SEQS: u32 = 32;

/// Measures the mean running set in a pool without limit, then serves the same requests in 57 % of that.
pub fn tax(block_size: u32, requests: &[Lengths]) -> Tax {
    let full_length_blocks = full_length_blocks(block_size, requests);
    let pool_blocks = (POOL_SHARE * f64::from(full_length_blocks)).round() as u32;
    let setup = Setup { max_num_seqs: TAX_NUM_SEQS, ..pool(pool_blocks * block_size, block_size) };
    Tax {
        full_length_blocks,
        pool_blocks,
        with_watermark: serve(setup, requests),
        without_watermark: serve(Setup { watermark_blocks: 0, ..setup }, requests),
    }
}

fn full_length_blocks(block_size: u32, requests: &[Lengths]) -> u32 {
    let unlimited = TAX_NUM_SEQS * super::lengths::MAX_LEN.div_ceil(block_size) + 1;
    let setup = Setup { max_num_seqs: TAX_NUM_SEQS, ..pool(unlimited * block_size, block_size) };
    let mut drive = Drive::new(setup);
    requests.iter().for_each(|l| _ = drive.submit_alone(l.prompt, l.output));
    let (mut blocks, mut steps) = (0u64, 0u64);
    while drive.has_work() {
        let taken = drive.step();
        if taken.plan.num_waiting == 0 {
            break;
        }
        blocks += drive.scheduler.running().map(|seq| u64::from(seq.max_total().div_ceil(block_size))).sum::<u64>();
        steps += 1;
    }
    (blocks / steps.max(1)) as u32
}
