//! Random worlds: every request must get what it gets alone, and every rule must have been met.

use kvasir::sim::{SimOptions, WorldStats, run, run_world};
use std::time::Instant;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[test]
fn every_request_gets_the_tokens_it_gets_alone() {
    if let Some(seed) = variable("SEED") {
        let outcome = run_world(seed);
        println!("seed {seed}: {outcome:?}");
        assert!(outcome.is_ok(), "seed {seed}: {outcome:?}");
        return;
    }
    let worlds = variable("SIM_WORLDS").unwrap_or(10_000);
    let started = Instant::now();
    let report = run(SimOptions { first_seed: 1, worlds }, || started.elapsed());
    println!("{worlds} worlds, {:.0} steps/s, {:?}", report.steps_s, report.stats);
    let first: Vec<_> = report.failures.iter().take(5).collect();
    assert!(first.is_empty(), "{} worlds failed, SEED=… replays one: {first:#?}", report.failures.len());
    assert_nothing_is_untried(&report.stats, worlds);
}

/// Worlds that never meet a rule prove nothing about it.
fn assert_nothing_is_untried(stats: &WorldStats, worlds: u64) {
    let counted = [
        ("mixed steps", stats.mixed_steps),
        ("preemptions", stats.preemptions),
        ("recomputed tokens", stats.recomputed_tokens),
        ("prefix hits", stats.hit_tokens),
        ("evictions", stats.evictions),
        ("shared blocks", stats.shared_blocks),
        ("aborts", stats.aborted),
        ("ends while in flight", stats.finished_in_flight),
        ("stop tokens", stats.stopped_by_token),
        ("full contexts", stats.context_full),
        ("rows that are not finite", stats.not_finite),
        ("released steps", stats.released_steps),
        ("abandoned steps", stats.abandoned_steps),
        ("restarts", stats.restarts),
        ("protected requests", stats.protected),
        ("beam searches", stats.searches),
        ("steps of several beams", stats.beam_steps),
        ("preemptions of a gang", stats.gang_preemptions),
        ("gangs in host memory", stats.gang_swaps),
        ("beams that come back from host memory", stats.restored_beams),
        ("gangs that wait for slots", stats.gang_waits),
        ("blocks saved along a beam tree", stats.beam_blocks_saved),
        ("swaps", stats.swaps),
        ("restored tokens", stats.restored_tokens),
        ("demoted blocks", stats.demoted),
        ("hits in host memory", stats.host_hit_tokens),
        ("hits on disk", stats.disk_hit_tokens),
        ("failed transfers", stats.failed_transfers),
        ("forks", stats.forks),
        ("forks while in flight", stats.forks_in_flight),
        ("forks of waiting requests", stats.forks_of_waiting),
        ("choices", stats.choices),
        ("copied blocks", stats.copied_blocks),
        ("failed steps that copy", stats.failed_copies),
        ("tokens found in part of a block", stats.partial_hit_tokens),
        ("tokens computed for their logits alone", stats.logits_only),
        ("blocks that slid out of a window", stats.slid_blocks),
        ("prefix hits without the blocks that slid out", stats.windowed_hits),
        ("requests that another client's went before", stats.waits_for_share),
        ("pinned prefixes", stats.pinned),
        ("hits on pinned prefixes", stats.pinned_hits),
        ("unpinned prefixes", stats.unpinned),
        ("pins computed again", stats.repinned),
        ("refused pins", stats.refused_pins),
        ("evicted prefixes", stats.evicted_prefixes),
        ("resets", stats.resets),
        ("forced tokens", stats.forced_tokens),
    ];
    for (what, count) in counted {
        assert!(count > 0 || worlds < 1_000, "{worlds} worlds had no {what}");
    }
}
