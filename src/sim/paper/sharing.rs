//! What sharing saves: blocks that are not held twice, as a share of the blocks that would be held without sharing (the
//! paper's definition), summed over all steps.

use super::drive::{Drive, Setup};
use super::lengths::{Lengths, Workload, unit};
use crate::ids::{RequestId, TokenId};
use crate::kv::KvCache;
use crate::protocol::{BeamParams, EarlyStopping, FinishReason};
use crate::sampling::beam::{BeamChild, BeamSearch};
use crate::scheduler::{GangAdvance, GangChild, GangNext, GangRows};
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
pub fn parallel(setup: Setup, workload: Workload, width: u32, num_requests: u32, rng: &mut Rng) -> Saving {
    let mut drive = Drive::new(setup);
    let requests = workload.draw_many(num_requests as usize, rng);
    let mut forks: HashMap<RequestId, Lengths> = HashMap::new();
    for lengths in &requests {
        forks.insert(drive.submit_outputs(*lengths, width), *lengths);
    }
    let mut blocks = Blocks::default();
    while drive.has_work() {
        let taken = drive.step();
        for row in taken.committed.rows.iter().filter(|row| row.token.is_some()) {
            if let Some(lengths) = forks.remove(&row.request) {
                (1..width).for_each(|choice| drive.fork(row.request, choice, lengths));
            }
        }
        if forks.is_empty() {
            break;
        }
        blocks.count(drive.scheduler.kv());
    }
    blocks.saving(width)
}

/// Each prompt has a search of `width` beams, all of which reach the output's length; the memory is always full. The
/// product's own scorer ranks made-up candidates ([`ZIPF_EXPONENT`]).
pub fn beams(setup: Setup, workload: Workload, width: u32, num_requests: u32, rng: &mut Rng) -> Saving {
    let mut drive = Drive::new(setup);
    let params = BeamParams { width, num_return: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
    let mut searches: HashMap<RequestId, BeamSearch> = HashMap::new();
    for lengths in workload.draw_many(num_requests as usize, rng) {
        let search = BeamSearch::new(params.clone(), lengths.output, FinishReason::MaxTokens);
        searches.insert(drive.submit_search(lengths, width), search);
    }
    let mut blocks = Blocks::default();
    while drive.scheduler.num_waiting() > 0 {
        let plan = drive.plan();
        let mut advance = |rows: GangRows| {
            let lists: Vec<_> = rows.logits.iter().map(|_| candidates(width, rng)).collect();
            let search = searches.get_mut(&rows.gang).expect("each gang has a search");
            let next = match search.advance(&lists, |_, _| None) {
                Some(beams) => GangNext::Beams(beams.iter().map(child).collect()),
                None => GangNext::End(FinishReason::MaxTokens),
            };
            GangAdvance { gang: rows.gang, next }
        };
        let advances: Vec<GangAdvance> = drive.scheduler.gang_rows(&plan).into_iter().map(&mut advance).collect();
        drive.finish(plan, &advances);
        blocks.count(drive.scheduler.kv());
    }
    blocks.saving(width)
}

fn child(beam: &BeamChild) -> GangChild {
    GangChild { parent: beam.parent, token: beam.token }
}

/// The most likely next tokens of one beam, as many as can live on.
fn candidates(width: u32, rng: &mut Rng) -> Vec<(TokenId, f32)> {
    let (low, high) = ZIPF_EXPONENT;
    let exponent = low + (high - low) * unit(rng);
    let norm = norm(exponent);
    let ranked = 1..=BeamSearch::num_candidates(width, 0);
    ranked.map(|rank| (rank, (-exponent * f64::from(rank).ln() - norm) as f32)).collect()
}

/// Logarithm of the sum of rank ^ -exponent over a vocabulary of 50,272 tokens (OPT's): the first ranks, and the integral
/// of the rest.
fn norm(exponent: f64) -> f64 {
    let head: f64 = (1..=32).map(|rank| f64::from(rank).powf(-exponent)).sum();
    let tail = match (exponent - 1.0).abs() < 1e-9 {
        true => (50_272.0f64 / 32.5).ln(),
        false => (32.5f64.powf(1.0 - exponent) - 50_272.0f64.powf(1.0 - exponent)) / (exponent - 1.0),
    };
    (head + tail).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::paper::lengths::LogNormal;
    use crate::sim::paper::memory;

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
        // A prompt joins in each step, and the memory is never full.
        let setup = Setup { max_tokens_per_step: 200, max_num_seqs: 200, ..memory::pool(20_000, 16) };
        // 4 blocks of prompt and 1 to 4 of output each: 4 saved of 2 * 6.5.
        let saving = parallel(setup, workload, 2, 400, &mut Rng::new(1)).saving;
        assert!((saving - 4.0 / 13.0).abs() < 0.02, "{saving}");
        assert_eq!(
            parallel(setup, workload, 1, 50, &mut Rng::new(1)).saving,
            0.0,
            "the control: one output shares nothing"
        );
        assert_eq!(
            beams(setup, workload, 1, 200, &mut Rng::new(1)).saving,
            0.0,
            "the control: one beam shares nothing"
        );
        let wide = beams(setup, workload, 4, 100, &mut Rng::new(1)).saving;
        assert!(wide > parallel(setup, workload, 4, 100, &mut Rng::new(1)).saving, "beams share outputs too: {wide}");
    }
}
