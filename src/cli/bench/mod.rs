//! `kvasir bench`: latency of one stream, throughput of a batch, speed of the scheduler alone, the figures of a paper.

mod http;
mod invariance;
mod kernels;
mod latency;
mod paper;
mod serve;
mod sim;
mod soak;
mod throughput;
mod tune_report;

use super::error::CliResult;
use crate::engine::EngineHandle;
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{Decoding, GenerateRequest, OwnerTag, SamplingParams, StopRules};
use crate::telemetry::StepRecord;
use std::sync::Arc;

#[derive(Clone, Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// One stream: time to the first token, tokens per second, work per step
    Latency(latency::LatencyArgs),
    /// Many prompts at once: requests and tokens per second
    Throughput(throughput::ThroughputArgs),
    /// Load on a server with OpenAI's API: throughput and latencies under vLLM's names
    Serve(Box<serve::ServeBenchArgs>),
    /// Single kernels on this adapter, with made-up data
    Kernels(kernels::KernelsArgs),
    /// What it costs that a request's result does not depend on its neighbours: decode steps beside kernels that may choose
    Invariance(invariance::InvarianceArgs),
    /// What the HTTP front end costs: CPU time of requests and of streamed tokens, on a simulated engine
    Http(http::HttpArgs),
    /// Scheduler and cache on a simulated executor, all invariants checked
    Sim(sim::SimArgs),
    /// Random load on the real engine, and what it leaves behind
    Soak(soak::SoakArgs),
    /// The PagedAttention paper's figures on the real scheduler and cache, beside the paper's own
    Paper(paper::PaperArgs),
}

pub fn run(command: &BenchCommand) -> CliResult {
    match command {
        BenchCommand::Latency(args) => latency::run(args),
        BenchCommand::Throughput(args) => throughput::run(args),
        BenchCommand::Serve(args) => serve::run(args),
        BenchCommand::Kernels(args) => kernels::run(args),
        BenchCommand::Invariance(args) => invariance::run(args),
        BenchCommand::Http(args) => http::run(args),
        BenchCommand::Sim(args) => sim::run(args),
        BenchCommand::Soak(args) => soak::run(args),
        BenchCommand::Paper(args) => paper::run(args),
    }
}

/// A prompt of pseudo-random ordinary tokens; equal `index` gives equal tokens.
fn random_prompt(model: &LoadedModel, len: u32, index: u64) -> Vec<TokenId> {
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut tokens = Vec::with_capacity(len as usize);
    // A vocabulary of special tokens only does not exist, but a bound costs nothing.
    for _ in 0..u64::from(len) * 64 {
        if tokens.len() == len as usize {
            break;
        }
        state = splitmix(state);
        let token = (state % u64::from(model.vocab_size.max(1))) as TokenId;
        if !model.tokenizer.is_special(token) {
            tokens.push(token);
        }
    }
    tokens
}

/// Steps the SplitMix64 generator (Steele, Lea, Flood 2014).
fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A greedy request of exactly `output_len` tokens that shares no prefix with others; `lora` is its adapter, 0 is none.
fn fixed_request(prompt: Vec<TokenId>, output_len: u32, index: u64, lora: u64) -> GenerateRequest {
    GenerateRequest {
        owner: OwnerTag { id: index, label: format!("request {index}") },
        prompt,
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(output_len) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: index,
        adapter: lora,
    }
}

/// Gathers the engine's step records, also beyond what its ring holds.
struct Records {
    engine: EngineHandle,
    last: Option<u64>,
    all: Vec<Arc<StepRecord>>,
}

impl Records {
    /// From now on.
    fn start(engine: &EngineHandle) -> Self {
        let last = engine.telemetry().records_after(None).0.last().map(|r| r.step);
        Records { engine: engine.clone(), last, all: Vec::new() }
    }

    fn gather(&mut self) {
        let (new, _) = self.engine.telemetry().records_after(self.last);
        self.last = new.last().map(|r| r.step).or(self.last);
        self.all.extend(new);
    }
}

/// The value below which this share of the sorted values lies (nearest rank); 0 for none.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_takes_the_nearest_rank() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!((percentile(&values, 0.5), percentile(&values, 0.99), percentile(&[], 0.5)), (50.0, 99.0, 0.0));
    }
}
