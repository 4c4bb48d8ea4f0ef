//! What a request gets when it is alone: computed without scheduler, cache or pages, by counting everything afresh.

use super::world::World;
use crate::batch::{RowSampling, TokenPenalty};
use crate::executor::paged_fake::UnpagedRun;
use crate::ids::TokenId;
use crate::protocol::FinishReason;
use crate::scheduler::NewSequence;

/// The whole output of a request that nothing disturbs.
pub(super) struct Expected {
    pub output: Vec<TokenId>,
    pub reason: FinishReason,
}

/// True when the request must be refused, whatever the load (a full queue is another matter). `capacity` is in blocks.
pub(super) fn is_impossible(world: &World, new: &NewSequence, capacity: u32) -> bool {
    let prompt = new.prompt.len() as u32;
    let total = prompt + new.stop.max_tokens.unwrap_or(1);
    prompt == 0
        || new.stop.max_tokens == Some(0)
        || total > world.scheduler.max_model_len
        || !fits(world, total, capacity)
}

/// True when a pool of so many blocks holds a sequence of so many tokens.
fn fits(world: &World, total: u32, capacity: u32) -> bool {
    blocks(world, total) <= capacity
}

/// Blocks that a sequence of so many tokens may come to hold.
pub(super) fn blocks(world: &World, total: u32) -> u32 {
    let (size, rows) = (world.kv.block_size, total.div_ceil(world.kv.block_size));
    let chunk = world.scheduler.long_prefill_cap.min(world.scheduler.max_tokens_per_step);
    let of_group = |window: Option<u32>| {
        // Wherever the first position that a step sees lies in its block.
        let rows_of = |window: u32| (0..size).map(|at| (at + window - 1 + chunk).div_ceil(size)).max().unwrap_or(0);
        window.map_or(rows, |window| rows.min(rows_of(window)))
    };
    world.kv.groups.windows().map(of_group).sum()
}

/// Runs the request alone, on a pool of so many blocks.
pub(super) fn alone(world: &World, new: &NewSequence, capacity: u32) -> Expected {
    let context =
        (1..=world.scheduler.max_model_len).rev().find(|total| fits(world, *total, capacity)).unwrap_or(0) as usize;
    let sampling = RowSampling::new(&new.sampling, new.seed);
    let mut run = UnpagedRun::with_windows(&world.kv.groups.windows().collect::<Vec<_>>()).with_adapter(new.adapter);
    new.prompt.iter().for_each(|token| run.push(*token));
    let mut output: Vec<TokenId> = Vec::new();
    loop {
        let penalties = if new.sampling.has_penalties() { penalties(&new.prompt, &output) } else { Vec::new() };
        let token = run.draw(sampling, &penalties, &new.sampling.logit_bias, world.vocab_size);
        run.push(token);
        output.push(token);
        let is_stop = new.stop.stop_token_ids.contains(&token) || !new.stop.ignore_eos && new.eos_ids.contains(&token);
        if is_stop && output.len() > new.stop.min_tokens as usize {
            return Expected { output, reason: FinishReason::StopToken(token) };
        }
        if new.stop.max_tokens.is_some_and(|max| output.len() == max as usize) {
            return Expected { output, reason: FinishReason::MaxTokens };
        }
        if new.prompt.len() + output.len() == context {
            return Expected { output, reason: FinishReason::ContextFull };
        }
    }
}

pub(super) fn penalties(prompt: &[TokenId], output: &[TokenId]) -> Vec<TokenPenalty> {
    let mut tokens: Vec<TokenId> = prompt.iter().chain(output).copied().collect();
    tokens.sort_unstable();
    tokens.dedup();
    let count = |token| output.iter().filter(|t| **t == token).count() as u32;
    tokens.into_iter().map(|token| TokenPenalty { token, output_count: count(token) }).collect()
}
