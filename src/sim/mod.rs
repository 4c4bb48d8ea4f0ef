//! The simulation: small seeded worlds in which the real scheduler and cache drive the fake executor, and every request
//! must get the tokens that it gets alone.
//!
//! Guarantees: a world depends on its seed only; every invariant is checked after every plan, commit and failure; at the
//! end of a world no block is lost. It reads no clock and no environment: whoever asks for speed passes a clock in.
//! It does not test kernels or text.
//!
//! ```
//! let report = kvasir::sim::run(kvasir::sim::SimOptions { first_seed: 1, worlds: 20 }, || std::time::Duration::ZERO);
//! assert!(report.failures.is_empty(), "{:?}", report.failures);
//! ```

mod beams;
mod disk;
mod forks;
mod load;
mod mirror;
mod oracle;
pub mod paper;
mod prefixes;
mod rng;
mod runner;
mod world;

pub use load::{LoadReport, PlanningReport, run_load, run_planning};
pub use runner::run_world;

use std::ops::AddAssign;
use std::time::Duration;

/// Which worlds to run: seeds `first_seed..first_seed + worlds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimOptions {
    pub first_seed: u64,
    pub worlds: u64,
}

/// What happened in one world, or in many. Tests ask for each figure to be above 0: a world that never preempts proves
/// nothing about preemption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorldStats {
    pub steps: u64,
    pub tokens: u64,
    pub requests: u64,
    pub refused: u64,
    pub mixed_steps: u64,
    pub preemptions: u64,
    pub recomputed_tokens: u64,
    pub hit_tokens: u64,
    pub evictions: u64,
    pub shared_blocks: u64,
    pub aborted: u64,
    pub finished_in_flight: u64,
    pub stopped_by_token: u64,
    pub context_full: u64,
    pub not_finite: u64,
    pub released_steps: u64,
    pub abandoned_steps: u64,
    pub restarts: u64,
    pub protected: u64,
    pub searches: u64,
    pub beam_steps: u64,
    pub gang_preemptions: u64,
    /// Of these: to host memory; and beams that came back from there.
    pub gang_swaps: u64,
    pub restored_beams: u64,
    pub gang_waits: u64,
    pub beam_blocks_saved: u64,
    /// Preemptions that saved blocks to host memory, and positions that came back from there.
    pub swaps: u64,
    pub restored_tokens: u64,
    /// Cached blocks that went to host memory.
    pub demoted: u64,
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    /// Failed steps that were moving content.
    pub failed_transfers: u64,
    /// Branches and choices that started from a request that was live.
    pub forks: u64,
    pub forks_in_flight: u64,
    pub forks_of_waiting: u64,
    pub choices: u64,
    pub copied_blocks: u64,
    /// Of the released and abandoned steps: those that were to copy.
    pub failed_copies: u64,
    /// Rows that computed a token for its logits alone: all of its sequence was shared.
    pub logits_only: u64,
    pub partial_hit_tokens: u64,
    /// Blocks that slid out of a window.
    pub slid_blocks: u64,
    /// Admissions whose prefix hit left out blocks that slid out.
    pub windowed_hits: u64,
    pub waits_for_share: u64,
    pub pinned: u64,
    pub pinned_hits: u64,
    pub unpinned: u64,
    pub repinned: u64,
    pub refused_pins: u64,
    pub evicted_prefixes: u64,
    pub resets: u64,
    pub forced_tokens: u64,
}

/// A world that broke a rule; its seed replays it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldFailure {
    pub seed: u64,
    pub message: String,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct SimReport {
    pub worlds: u64,
    pub steps: u64,
    /// Steps per second by the caller's clock, worlds' making and checking included; 0 when the clock stood still.
    pub steps_s: f64,
    pub failures: Vec<WorldFailure>,
    pub stats: WorldStats,
}

/// Runs worlds one after the other. `now` tells the time since any fixed moment.
pub fn run(options: SimOptions, mut now: impl FnMut() -> Duration) -> SimReport {
    let started = now();
    let (mut stats, mut failures) = (WorldStats::default(), Vec::new());
    for seed in options.first_seed..options.first_seed.saturating_add(options.worlds) {
        match std::panic::catch_unwind(|| run_world(seed)) {
            Ok(Ok(world)) => stats += world,
            Ok(Err(message)) => failures.push(WorldFailure { seed, message }),
            Err(panic) => failures.push(WorldFailure { seed, message: panic_text(panic.as_ref()) }),
        }
    }
    let seconds = now().saturating_sub(started).as_secs_f64();
    let steps_s = if seconds > 0.0 { stats.steps as f64 / seconds } else { 0.0 };
    SimReport { worlds: options.worlds, steps: stats.steps, steps_s, failures, stats }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("an assertion failed: {}", text.unwrap_or("no text"))
}

impl AddAssign for SimReport {
    /// Worlds that ran after these.
    fn add_assign(&mut self, other: SimReport) {
        self.worlds += other.worlds;
        self.steps += other.steps;
        self.failures.extend(other.failures);
        self.stats += other.stats;
    }
}

impl AddAssign for WorldStats {
    fn add_assign(&mut self, other: WorldStats) {
        // Every field is named, so that one that is forgotten does not compile.
        macro_rules! add {
            ($($field:ident),*) => {
                let WorldStats { $($field),* } = other;
                $(self.$field += $field;)*
            };
        }
        add!(
            steps,
            tokens,
            requests,
            refused,
            mixed_steps,
            preemptions,
            recomputed_tokens,
            hit_tokens,
            evictions,
            shared_blocks,
            aborted,
            finished_in_flight,
            stopped_by_token,
            context_full,
            not_finite,
            released_steps,
            abandoned_steps,
            restarts,
            protected,
            searches,
            beam_steps,
            gang_preemptions,
            gang_swaps,
            restored_beams,
            gang_waits,
            beam_blocks_saved,
            swaps,
            restored_tokens,
            demoted,
            host_hit_tokens,
            disk_hit_tokens,
            failed_transfers,
            forks,
            forks_in_flight,
            forks_of_waiting,
            choices,
            copied_blocks,
            failed_copies,
            logits_only,
            partial_hit_tokens,
            slid_blocks,
            windowed_hits,
            waits_for_share,
            pinned,
            pinned_hits,
            unpinned,
            repinned,
            refused_pins,
            evicted_prefixes,
            resets,
            forced_tokens
        );
    }
}
