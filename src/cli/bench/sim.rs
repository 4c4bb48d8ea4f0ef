//! `kvasir bench sim`: seeded worlds of arrivals, aborts, preemptions and faults on the fake executor, all invariants on;
//! then a large world with the release checks, and the cost of planning beside a long queue.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::out;
use crate::sim::{SimOptions, SimReport, run as run_worlds, run_load, run_planning};
use serde_json::json;
use std::time::Instant;

const PLANNED_WAITING: u32 = 10_000;
const PLANNED_STEPS: u32 = 500;

#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub worlds: u64,
    /// Go on with further worlds until so many steps were run
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub min_steps: u64,
    /// The first world's seed; the others follow
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Steps of the large world: 64 sequences on 4,096 blocks
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub load_steps: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// So many worlds, and further ones until there are enough steps.
fn run_all_worlds(args: &SimArgs, started: Instant) -> SimReport {
    let mut options = SimOptions { first_seed: args.seed, worlds: args.worlds };
    let mut report = run_worlds(options, || started.elapsed());
    while report.steps < args.min_steps {
        options.first_seed += options.worlds;
        report += run_worlds(options, || started.elapsed());
    }
    let seconds = started.elapsed().as_secs_f64();
    SimReport { steps_s: report.steps as f64 / seconds.max(1e-9), ..report }
}

pub fn run(args: &SimArgs) -> CliResult {
    let started = Instant::now();
    let report = run_all_worlds(args, started);
    let failures = report.failures.len();
    let load = run_load(args.load_steps, || started.elapsed());
    let planning = run_planning(PLANNED_WAITING, PLANNED_STEPS, || started.elapsed());
    if args.json {
        out::json(&json!({
            "worlds": report.worlds,
            "steps": report.steps,
            "steps_s": report.steps_s,
            "failures": failures,
            "load": {
                "sequences": load.sequences,
                "blocks": load.blocks,
                "steps": load.steps,
                "steps_s": load.steps_s,
                "tokens": load.tokens,
                "requests": load.requests,
                "preemptions": load.preemptions,
                "mean_running": load.mean_running,
            },
            "planning": {
                "running": planning.running,
                "waiting": planning.waiting,
                "us_p50": planning.us_p50,
                "us_max": planning.us_max,
                "us_p50_empty_queue": planning.us_p50_empty_queue,
                "looked_at": planning.looked_at,
            },
        }))?;
    } else {
        out::line(&format!(
            "{} worlds, {} steps, {:.0} steps/s, {failures} failures",
            report.worlds, report.steps, report.steps_s
        ))?;
        out::line(&format!(
            "{} sequences on {} blocks: {:.0} steps/s over {} steps ({:.1} running, {} preemptions), release checks",
            load.sequences, load.blocks, load.steps_s, load.steps, load.mean_running, load.preemptions
        ))?;
        out::line(&format!(
            "planning {} running and {} waiting: {:.0} µs (at most {:.0}); {:.0} µs with an empty queue; {} looked at",
            planning.running,
            planning.waiting,
            planning.us_p50,
            planning.us_max,
            planning.us_p50_empty_queue,
            planning.looked_at
        ))?;
    }
    match report.failures.first() {
        None => Ok(Exit::Ok),
        Some(first) => Err(CliError::failure(format!("world {}: {}", first.seed, first.message))
            .with_fix(format!("SEED={} cargo test --release sim replays it", first.seed))),
    }
}
