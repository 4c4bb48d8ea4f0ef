//! Decode steps of continuous against static batching: a static batch takes as long as its longest output.

use super::drive::{Drive, Setup};
use super::lengths::unit;
use crate::sim::rng::Rng;
use serde::Serialize;

/// Tokens of each prompt: a whole batch of prompts fits into one step.
const PROMPT: u32 = 16;
/// Mean of the exponential lengths.
const EXPONENTIAL_MEAN: f64 = 128.0;

/// The same outputs in batches that are filled up at once, and in batches that wait for their last member.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BatchingSteps {
    pub batch: u32,
    pub requests: u32,
    pub static_steps: u64,
    pub continuous_steps: u64,
    /// Static over continuous.
    pub ratio: f64,
}

/// Output lengths evenly from 1 to 256.
pub fn uniform(rng: &mut Rng) -> BatchingSteps {
    compare(16, (0..1024).map(|_| rng.range(1, 256)).collect())
}

/// Output lengths from an exponential distribution with a mean of 128, rounded up.
pub fn exponential(rng: &mut Rng) -> BatchingSteps {
    let draw = |rng: &mut Rng| (-EXPONENTIAL_MEAN * unit(rng).ln()).ceil().max(1.0) as u32;
    compare(8, (0..1024).map(|_| draw(rng)).collect())
}

/// The control: all outputs are equally long.
pub fn fixed() -> BatchingSteps {
    compare(16, vec![128; 1024])
}

fn compare(batch: u32, outputs: Vec<u32>) -> BatchingSteps {
    let static_steps = outputs.chunks(batch as usize).map(|outputs| steps(batch, outputs)).sum();
    let continuous_steps = steps(batch, &outputs);
    BatchingSteps {
        batch,
        requests: outputs.len() as u32,
        static_steps,
        continuous_steps,
        ratio: static_steps as f64 / continuous_steps as f64,
    }
}

/// Steps that the scheduler takes for these outputs, all of them in the queue from the start.
fn steps(batch: u32, outputs: &[u32]) -> u64 {
    let longest = PROMPT + outputs.iter().max().copied().unwrap_or(0);
    let mut drive = Drive::new(Setup {
        usable_blocks: batch * longest.div_ceil(16) + 1,
        block_size: 16,
        max_num_seqs: batch,
        max_tokens_per_step: batch * (PROMPT + 1),
        watermark_blocks: 0,
        prefix_cache: false,
    });
    outputs.iter().for_each(|output| _ = drive.submit_alone(PROMPT, *output));
    let mut steps = 0;
    while drive.has_work() {
        drive.step();
        steps += 1;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_batch_takes_as_long_as_its_longest_output() {
        let compared = compare(2, vec![4, 1, 1, 4]);
        assert_eq!((compared.static_steps, compared.continuous_steps), (8, 6), "{compared:?}");
    }
}
