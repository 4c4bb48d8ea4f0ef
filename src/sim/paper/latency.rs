//! What a long prompt does to those who decode, and what a shared prefix saves: steps priced with a plain cost model.

use super::drive::{Drive, Setup};
use crate::ids::TokenId;
use serde::Serialize;

/// Milliseconds of a step before its first token, and per token: a mid-range GPU. Only the ratio matters.
pub const STEP_MS: f64 = 10.0;
pub const TOKEN_MS: f64 = 0.1;
/// Tokens of the prompt that joins.
const LONG_PROMPT: u32 = 2048;
/// Requests that decode when it comes.
const NUM_DECODING: u32 = 8;
/// A step beside decoding rows may take as long as the larger of this and two decode-only steps (the engine's rule).
const LIMIT_MS: f64 = 50.0;

/// Time between two tokens of those who decode.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct InterTokenMs {
    /// While nobody reads a prompt.
    pub alone: f64,
    /// The longest while the prompt of 2,048 tokens is read.
    pub worst: f64,
    /// Mean while it is read.
    pub mean: f64,
    /// Steps in which it is read.
    pub steps: u32,
    /// From its arrival to its first token.
    pub ttft: f64,
}

/// With the engine's chunks, and with the whole prompt in one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LongPrompt {
    pub chunked: InterTokenMs,
    pub whole: InterTokenMs,
}

pub fn long_prompt() -> LongPrompt {
    let decode_ms = step_ms(NUM_DECODING);
    let limit_ms = f64::max(LIMIT_MS, 2.0 * decode_ms);
    let chunk = ((limit_ms - decode_ms) / TOKEN_MS) as u32;
    LongPrompt { chunked: join(chunk), whole: join(LONG_PROMPT) }
}

fn step_ms(num_tokens: u32) -> f64 {
    STEP_MS + TOKEN_MS * f64::from(num_tokens)
}

fn join(max_prefill_tokens: u32) -> InterTokenMs {
    let mut drive = Drive::new(Setup {
        usable_blocks: 1024,
        block_size: 16,
        max_num_seqs: NUM_DECODING + 1,
        max_tokens_per_step: LONG_PROMPT + NUM_DECODING,
        watermark_blocks: 10,
        prefix_cache: true,
    });
    (0..NUM_DECODING).for_each(|_| _ = drive.submit_alone(32, 512));
    // All prompts are read in the first step; from then on all decode.
    (0..8).for_each(|_| _ = drive.step());
    let alone = step_ms(drive.step().plan.num_tokens());
    let long = drive.submit_alone(LONG_PROMPT, 8);
    let mut reading = Vec::new();
    loop {
        let taken = drive.step_with(max_prefill_tokens);
        reading.push(step_ms(taken.plan.num_tokens()));
        let is_read = |row: &crate::scheduler::RowResult| row.request == long && row.token.is_some();
        if taken.committed.rows.iter().any(is_read) {
            break;
        }
    }
    let ttft: f64 = reading.iter().sum();
    InterTokenMs {
        alone,
        worst: reading.iter().copied().fold(0.0, f64::max),
        mean: ttft / reading.len() as f64,
        steps: reading.len() as u32,
        ttft,
    }
}

/// Tokens of the shared prefix and of each request's own part (the paper's few-shot prompt: 341 tokens).
pub const SHARED: u32 = 341;
pub const OWN: u32 = 30;

/// Prompt tokens computed until the first output token, with and without the shared prefix in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SharedPrefix {
    pub requests: u32,
    pub cold_tokens: f64,
    pub warm_tokens: f64,
    /// Cold over warm: time to the first token, as far as it is prefill.
    pub ratio: f64,
}

pub fn shared_prefix() -> SharedPrefix {
    let requests = 64;
    let computed = |prefix_cache| {
        let mut drive = Drive::new(Setup {
            usable_blocks: 4096,
            block_size: 16,
            max_num_seqs: 16,
            max_tokens_per_step: 2560,
            watermark_blocks: 40,
            prefix_cache,
        });
        // The first request brings the prefix into the cache; it is not counted.
        drive.submit(prompt(0), 1);
        drive.step();
        let before = drive.scheduler.totals().computed_tokens;
        (1..=requests).for_each(|i| _ = drive.submit(prompt(i), 1));
        while drive.has_work() {
            drive.step();
        }
        (drive.scheduler.totals().computed_tokens - before) as f64 / f64::from(requests)
    };
    let (cold_tokens, warm_tokens) = (computed(false), computed(true));
    SharedPrefix { requests, cold_tokens, warm_tokens, ratio: cold_tokens / warm_tokens }
}

fn prompt(request: u32) -> Vec<TokenId> {
    let own = (0..OWN).map(|position| 1_000_000 + request * OWN + position);
    (0..SHARED).chain(own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_keep_the_steps_of_those_who_decode_short() {
        let joined = long_prompt();
        assert_eq!(joined.whole.steps, 1);
        assert!(joined.chunked.worst <= LIMIT_MS + TOKEN_MS && joined.chunked.steps > 4, "{joined:?}");
        assert!(joined.whole.worst > 200.0 && joined.whole.alone == joined.chunked.alone, "{joined:?}");
    }

    #[test]
    fn a_cached_prefix_is_not_computed_again() {
        let shared = shared_prefix();
        assert_eq!(shared.cold_tokens, f64::from(SHARED + OWN));
        assert!(shared.warm_tokens <= f64::from(SHARED % 16 + OWN), "{shared:?}");
    }
}
