//! `kvasir bench sim`: seeded worlds of arrivals, aborts, preemptions and faults on the fake executor, all invariants on.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::out;
use crate::sim::{SimOptions, run as run_worlds};
use serde_json::json;
use std::time::Instant;

#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub worlds: u64,
    /// The first world's seed; the others follow
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &SimArgs) -> CliResult {
    let started = Instant::now();
    let report = run_worlds(SimOptions { first_seed: args.seed, worlds: args.worlds }, || started.elapsed());
    let failures = report.failures.len();
    if args.json {
        out::json(&json!({
            "worlds": report.worlds,
            "steps": report.steps,
            "steps_s": report.steps_s,
            "failures": failures,
        }))?;
    } else {
        out::line(&format!(
            "{} worlds, {} steps, {:.0} steps/s, {failures} failures",
            report.worlds, report.steps, report.steps_s
        ))?;
    }
    match report.failures.first() {
        None => Ok(Exit::Ok),
        Some(first) => Err(CliError::failure(format!("world {}: {}", first.seed, first.message))
            .with_fix(format!("SEED={} cargo test --release sim replays it", first.seed))),
    }
}
