//! What sharing saves: blocks that are not held twice, as a share of the blocks that would be held without sharing (the
//! paper's definition), summed over all steps.

use super::drive::Drive;
use super::lengths::{Lengths, Workload, unit};
use super::{BLOCK_SIZE, NUM_SLOTS, memory};
use crate::ids::RequestId;
use crate::kv::{BlockTable, KvCache, KvConfig};
use crate::sim::rng::Rng;
use serde::Serialize;
use std::collections::HashMap;

/// Outputs of one prompt, and beams.
pub const WIDTHS: [u32; 3] = [2, 4, 6];
/// A candidate's log-probability falls by `a * ln(rank)` with its rank, and `a` is drawn for each beam and step evenly
/// from this range: from nearly undecided to nearly certain.
pub const ZIPF_EXPONENT: (f64, f64) = (1.0, 4.0);

/// A saving by number of outputs or beams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Saving {
    pub width: u32,
    pub saving: f64,
}

#[derive(Default)]
struct Blocks {
    saved: u64,
    held: u64,
}

impl Blocks {
    fn count(&mut self, kv: &KvCache) {
        let counts = kv.counts();
        self.saved += u64::from(counts.saved);
        self.held += u64::from(counts.used);
    }

    fn saving(&self, width: u32) -> Saving {
        Saving { width, saving: self.saved as f64 / (self.saved + self.held).max(1) as f64 }
    }
}

/// Each prompt has `width` outputs of equal length, forked from its first as the engine does; the memory is always full.
pub fn parallel(workload: Workload, width: u32, num_requests: u32, rng: &mut Rng) -> Saving {
    let mut drive = Drive::new(memory::pool(NUM_SLOTS, BLOCK_SIZE));
    let requests = workload.draw_many(num_requests as usize, rng);
    let mut forks: HashMap<RequestId, Lengths> = HashMap::new();
    for lengths in &requests {
        forks.insert(drive.submit_alone(lengths.prompt, lengths.output), *lengths);
    }
    let mut blocks = Blocks::default();
    while drive.has_work() {
        let taken = drive.step();
        for row in taken.committed.rows.iter().filter(|row| row.token.is_some()) {
            if let Some(lengths) = forks.remove(&row.request) {
                (1..width).for_each(|_| drive.fork(row.request, lengths));
            }
        }
        if forks.is_empty() {
            break;
        }
        blocks.count(drive.scheduler.kv());
    }
    blocks.saving(width)
}

/// Beam search, one prompt after the other, on the cache's own fork and copy-on-write. The beams are ranked by summed
/// log-probability over made-up candidates ([`ZIPF_EXPONENT`]); all reach the output's length.
pub fn beams(workload: Workload, width: u32, num_requests: u32, rng: &mut Rng) -> Saving {
    let usable = width * (super::lengths::MAX_LEN.div_ceil(BLOCK_SIZE) + 1);
    let mut kv = KvCache::new(KvConfig { num_blocks: usable + 1, block_size: BLOCK_SIZE, enable_prefix_cache: false });
    let (mut blocks, mut step) = (Blocks::default(), 0);
    for lengths in workload.draw_many(num_requests as usize, rng) {
        let mut beams = vec![Beam { table: BlockTable::new(RequestId(0)), score: 0.0 }];
        for len in lengths.prompt..lengths.total() {
            step += 1;
            kv.begin(step);
            if len > lengths.prompt {
                beams = advance(&mut kv, beams, len - 1, width, rng);
            }
            let valid = if len == lengths.prompt { 0 } else { len - 1 };
            for beam in &mut beams {
                kv.reserve(&mut beam.table, valid, len).expect("the pool holds all beams at full length");
            }
            kv.commit();
            beams.iter().for_each(|beam| kv.fill(&beam.table, valid, len));
            kv.drain_events();
            blocks.count(&kv);
        }
        beams.into_iter().for_each(|beam| kv.free(beam.table));
    }
    blocks.saving(width)
}

struct Beam {
    table: BlockTable,
    score: f64,
}

/// The best `width` continuations of all beams; `valid` positions of each are shared with those that go on from it.
fn advance(kv: &mut KvCache, beams: Vec<Beam>, valid: u32, width: u32, rng: &mut Rng) -> Vec<Beam> {
    let mut candidates: Vec<(f64, usize)> = Vec::new();
    for (parent, beam) in beams.iter().enumerate() {
        let (low, high) = ZIPF_EXPONENT;
        let exponent = low + (high - low) * unit(rng);
        candidates.extend(
            (1..=2 * width).map(|rank| (beam.score - exponent * f64::from(rank).ln() - norm(exponent), parent)),
        );
    }
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    candidates.truncate(width as usize);
    // Forks first, while every parent's table is there.
    let mut next: Vec<Beam> = Vec::with_capacity(width as usize);
    let mut goes_on = vec![None; beams.len()];
    for (score, parent) in candidates {
        if goes_on[parent].is_none() {
            goes_on[parent] = Some(score);
            continue;
        }
        let mut table = BlockTable::new(RequestId(0));
        kv.share(&mut table, &beams[parent].table, valid);
        next.push(Beam { table, score });
    }
    for (beam, score) in beams.into_iter().zip(goes_on) {
        match score {
            Some(score) => next.push(Beam { score, ..beam }),
            None => kv.free(beam.table),
        }
    }
    next
}

/// Logarithm of the sum of rank ^ -exponent over a vocabulary of 50,272 tokens (OPT's): the first thousand, and the
/// integral of the rest.
fn norm(exponent: f64) -> f64 {
    let head: f64 = (1..=1000).map(|rank| f64::from(rank).powf(-exponent)).sum();
    let tail = match (exponent - 1.0).abs() < 1e-9 {
        true => (50_272.0f64 / 1000.5).ln(),
        false => (1000.5f64.powf(1.0 - exponent) - 50_272.0f64.powf(1.0 - exponent)) / (exponent - 1.0),
    };
    (head + tail).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::paper::lengths::LogNormal;

    #[test]
    fn outputs_share_the_whole_blocks_of_their_prompt() {
        let always = |median| LogNormal { median, sigma: 0.0 };
        let workload = Workload {
            name: "fixed",
            prompt: always(64.0),
            output: always(65.0),
            mean_prompt: 64.0,
            mean_output: 65.0,
        };
        // 4 blocks of prompt and 1 to 4 of output each: 4 saved of 2 * 6.5.
        let saving = parallel(workload, 2, 400, &mut Rng::new(1)).saving;
        assert!((saving - 4.0 / 13.0).abs() < 0.02, "{saving}");
        assert_eq!(parallel(workload, 1, 50, &mut Rng::new(1)).saving, 0.0, "the control: one output shares nothing");
        assert_eq!(beams(workload, 1, 5, &mut Rng::new(1)).saving, 0.0, "the control: one beam shares nothing");
        let wide = beams(workload, 4, 5, &mut Rng::new(1)).saving;
        assert!(wide > parallel(workload, 4, 100, &mut Rng::new(1)).saving, "beams share outputs too: {wide}");
    }
}
