//! Worlds of the simulation, and scenarios that once went wrong in engines of this kind.
//!
//! `SEED=n cargo test --release sim` replays one world, `SIM_WORLDS=n` runs so many.

use kvasir::sim::{SimOptions, run, run_world};
use std::time::Instant;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[test]
fn every_request_gets_the_tokens_it_gets_alone() {
    if let Some(seed) = variable("SEED") {
        println!("seed {seed}: {:?}", run_world(seed));
        assert_eq!(run_world(seed).map(|_| ()), Ok(()), "seed {seed}");
        return;
    }
    let worlds = variable("SIM_WORLDS").unwrap_or(3_000);
    let started = Instant::now();
    let report = run(SimOptions { first_seed: 1, worlds }, || started.elapsed());
    println!("{worlds} worlds, {:.0} steps/s, {:?}", report.steps_s, report.stats);
    let first: Vec<_> = report.failures.iter().take(5).collect();
    assert!(first.is_empty(), "{} worlds failed, SEED=… replays one: {first:#?}", report.failures.len());
}
