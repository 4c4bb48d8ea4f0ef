//! `kvasir bench soak`: random load on the real engine for a while, and what it leaves behind.
//!
//! Guarantees: the load comes in rounds, after each of which the engine is idle and holds no block but cached and pinned
//! ones; equal greedy requests must give equal tokens, whatever runs beside them. Memory is compared between the end of
//! the first quarter of the time, when caches and buffers have their sizes, and the end.

use super::{percentile, random_prompt, splitmix};
use crate::cli::args::ModelArgs;
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{interrupt, out, session};
use crate::engine::EngineHandle;
use crate::engine::handle::{LoadedModel, Run};
use crate::ids::TokenId;
use crate::protocol::{
    BeamParams, Decoding, EarlyStopping, EngineEvent, GenerateRequest, OwnerTag, RunError, SamplingParams, StopRules,
};
use serde_json::json;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Different prompts, and how many of their tokens groups of them share.
const NUM_PROMPTS: u64 = 24;
const NUM_GROUPS: u64 = 3;
/// Longest output.
const MAX_OUTPUT: u64 = 32;
/// Load between two times of rest.
const ROUND: Duration = Duration::from_secs(5);
/// Host memory for swapped blocks, where none was asked for: it is taken as it fills, which is no leak.
const SWAP_BYTES: u64 = 16 << 20;

#[derive(Clone, Debug, clap::Args)]
pub struct SoakArgs {
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,
    /// Longest prompt, in tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    pub max_input_len: u32,
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// What was seen.
#[derive(Default)]
struct Tally {
    requests: u64,
    aborted: u64,
    /// In words, the first few.
    faults: Vec<String>,
    failures: u64,
    leaked_blocks: u32,
    rounds: u32,
    /// Of finished runs, in milliseconds.
    ttft_ms: Vec<f64>,
}

impl Tally {
    fn fail(&mut self, what: String) {
        self.failures += 1;
        if self.faults.len() < 8 {
            self.faults.push(what);
        }
    }
}

/// A request in flight.
struct InFlight {
    run: Run,
    /// Which prompt, of a greedy request: its tokens are compared.
    greedy: Option<u64>,
    tokens: Vec<TokenId>,
    wanted: usize,
    /// After so many events it is given up.
    patience: Option<u32>,
    events: u32,
}

struct Soak<'a> {
    engine: &'a EngineHandle,
    model: &'a LoadedModel,
    max_input_len: u64,
    random: u64,
    /// The longest output that was seen for each prompt.
    known: HashMap<u64, Vec<TokenId>>,
    tally: Tally,
}

/// Resident memory of this process in bytes; `None` where the system does not say.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

impl Soak<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random = splitmix(self.random);
        self.random % n.max(1)
    }

    /// Equal indices give equal prompts; those of a group begin alike.
    fn prompt(&self, index: u64) -> Vec<TokenId> {
        let shared = self.max_input_len / 3 * (index % NUM_GROUPS) / NUM_GROUPS;
        let own = 1 + splitmix(index) % (self.max_input_len - shared).max(1);
        let mut tokens = random_prompt(self.model, shared as u32, index % NUM_GROUPS);
        tokens.extend(random_prompt(self.model, own as u32, 1000 + index));
        tokens
    }

    fn submit(&mut self) -> Result<Option<InFlight>, CliError> {
        let (index, wanted) = (self.below(NUM_PROMPTS), 1 + self.below(MAX_OUTPUT));
        let mut request = GenerateRequest {
            owner: OwnerTag { id: index, label: format!("prompt {index}") },
            prompt: self.prompt(index),
            sampling: SamplingParams::greedy(),
            stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(wanted as u32) },
            decoding: Decoding::ONE,
            priority: 0,
            cache_salt: 0,
            adapter: 0,
        };
        let kind = self.below(20);
        let patience = (kind < 3).then(|| self.below(6) as u32);
        let mut greedy = Some(index);
        if (14..17).contains(&kind) {
            greedy = None;
            let seed = self.below(u64::MAX);
            let warm =
                SamplingParams { temperature: 0.9, top_p: 0.95, top_k: 50, seed: Some(seed), ..request.sampling };
            request.sampling = SamplingParams { repetition_penalty: 1.1, ..warm };
            let best_of = 1 + self.below(3) as u32;
            request.decoding = Decoding::Sample { n: best_of, best_of };
        } else if kind >= 17 {
            greedy = None;
            let width = 2 + self.below(3) as u32;
            let early_stopping = EarlyStopping::Heuristic;
            request.decoding = Decoding::Beam(BeamParams { width, num_return: 1, length_penalty: 1.0, early_stopping });
        }
        self.tally.requests += 1;
        match self.engine.submit(request) {
            Ok(run) => {
                let tokens = Vec::new();
                Ok(Some(InFlight { run, greedy, tokens, wanted: wanted as usize, patience, events: 0 }))
            }
            Err(error @ (RunError::NoModel | RunError::ShutDown | RunError::Engine(_))) => Err(error.into()),
            Err(error) => {
                self.tally.fail(format!("refused: {error}"));
                Ok(None)
            }
        }
    }

    /// Takes what has come. True when the run is over.
    fn advance(&mut self, flight: &mut InFlight) -> bool {
        if flight.patience.is_some_and(|patience| flight.events >= patience) {
            self.engine.abort(flight.run.id());
            self.tally.aborted += 1;
            flight.patience = None;
            flight.greedy = None;
        }
        while let Some(event) = flight.run.try_recv() {
            flight.events += 1;
            match event {
                EngineEvent::Text { choice: 0, tokens, .. } => flight.tokens.extend(tokens),
                EngineEvent::Failed { error } => {
                    self.tally.fail(format!("failed: {error}"));
                    return true;
                }
                EngineEvent::Finished { timings, .. } => {
                    self.tally.ttft_ms.push(timings.ttft_us as f64 / 1e3);
                    self.compare(flight);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// The output of a greedy request against what the same prompt gave before.
    fn compare(&mut self, flight: &InFlight) {
        let Some(index) = flight.greedy else { return };
        if flight.tokens.len() != flight.wanted {
            self.tally.fail(format!("prompt {index} gave {} of {} tokens", flight.tokens.len(), flight.wanted));
            return;
        }
        let known = self.known.entry(index).or_default();
        let common = known.len().min(flight.tokens.len());
        if known[..common] != flight.tokens[..common] {
            self.tally.fail(format!("prompt {index} gave other tokens than before"));
        } else if flight.tokens.len() > known.len() {
            known.clone_from(&flight.tokens);
        }
    }

    /// Load until `end`, then rest: nothing may be held.
    fn round(&mut self, concurrency: usize, end: Instant) -> Result<(), CliError> {
        let mut flights: Vec<InFlight> = Vec::new();
        while Instant::now() < end || !flights.is_empty() {
            interrupt::check()?;
            while flights.len() < concurrency && Instant::now() < end {
                flights.extend(self.submit()?);
            }
            flights.retain_mut(|flight| !self.advance(flight));
            std::thread::sleep(Duration::from_millis(2));
        }
        if !self.engine.wait_idle(Duration::from_secs(30)) {
            self.tally.fail("the engine does not come to rest".into());
        }
        let kv = self.engine.telemetry().snapshot().kv;
        self.tally.leaked_blocks += kv.used.saturating_sub(kv.pinned);
        self.tally.rounds += 1;
        Ok(())
    }
}

pub fn run(args: &SoakArgs) -> CliResult {
    let session = session::open(&args.model, Some(args.seed), |options| {
        options.max_queue = options.max_queue.max(args.concurrency);
        if args.model.engine.swap_space.is_none() {
            options.swap_space_bytes = SWAP_BYTES;
        }
    })?;
    let room = u64::from(session.model.max_model_len).saturating_sub(MAX_OUTPUT + 1);
    if room < 2 {
        return Err(CliError::usage(format!("the context of {} tokens is too short", session.model.max_model_len)));
    }
    let mut soak = Soak {
        engine: &session.engine,
        model: &session.model,
        max_input_len: u64::from(args.max_input_len).min(room),
        random: args.seed,
        known: HashMap::new(),
        tally: Tally::default(),
    };
    let gpu_bytes = || session.engine.telemetry().snapshot().gpu_bytes;
    let (started, length) = (Instant::now(), Duration::from_secs(args.seconds.into()));
    let mut baseline = None;
    while started.elapsed() < length {
        let end = started + (started.elapsed() + ROUND).min(length);
        soak.round(args.concurrency as usize, end)?;
        if baseline.is_none() && started.elapsed() * 4 >= length {
            baseline = Some((resident_bytes(), gpu_bytes()));
        }
    }
    let (rss, gpu) = baseline.unwrap_or((resident_bytes(), gpu_bytes()));
    let growth = |now: u64, then: u64| now as i64 - then as i64;
    let rss_growth = resident_bytes().zip(rss).map(|(now, then)| growth(now, then));
    let gpu_growth = growth(gpu_bytes(), gpu);
    let mut tally = soak.tally;
    tally.ttft_ms.sort_unstable_by(f64::total_cmp);
    let p99 = percentile(&tally.ttft_ms, 0.99);
    if args.json {
        out::json(&json!({
            "requests": tally.requests,
            "failures": tally.failures,
            "rss_growth_bytes": rss_growth,
            "gpu_bytes_growth": gpu_growth,
            "leaked_blocks": tally.leaked_blocks,
            "aborted": tally.aborted,
            "rounds": tally.rounds,
            "seconds": started.elapsed().as_secs_f64(),
            "preemptions": session.engine.telemetry().snapshot().preemptions_total,
            "ttft_ms_p99": p99,
            "faults": tally.faults,
        }))?;
    } else {
        let mib = |bytes: i64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        out::text(&format!(
            "{} requests in {} rounds, {} of them given up: {} failures, {} blocks leaked\nmemory grew by {} (GPU: {})\n",
            tally.requests,
            tally.rounds,
            tally.aborted,
            tally.failures,
            tally.leaked_blocks,
            rss_growth.map_or("an unknown amount".into(), mib),
            mib(gpu_growth),
        ))?;
        tally.faults.iter().for_each(|fault| out::note(fault));
    }
    session.engine.shutdown();
    Ok(if tally.failures > 0 || tally.leaked_blocks > 0 { Exit::Failure } else { Exit::Ok })
}
