//! Inspect without a window: the model against a small engine, the workspace's states as accessibility-tree text, and
//! the cost of a frame.

#[path = "inspect_screens.rs"]
mod screens;
#[path = "inspect_world.rs"]
mod world;

use kvasir::app::inspect::map::{BlockMap, Counts};
use kvasir::app::inspect::{Cursor, InspectCommand, InspectModel, Selection};
use kvasir::app::theme::OwnerPalette;
use kvasir::ids::{BlockId, RequestId};
use kvasir::telemetry::BlockState;
use proptest::prelude::*;
use world::{Job, World, crowd, crowded_jobs, demo_jobs};

fn palette() -> OwnerPalette {
    let mut palette = OwnerPalette::default();
    for owner in 11..=15 {
        palette.open(owner);
    }
    for owner in 20..32 {
        palette.open(owner);
    }
    palette
}

fn model_of(world: &World) -> InspectModel {
    let mut model = InspectModel::default();
    model.ingest(&world.telemetry, &palette());
    model.read_previews(None);
    model
}

fn demo_world(steps: u64) -> World {
    let mut world = World::new(129, 256, demo_jobs());
    world.run(steps);
    world
}

/// The map agrees with the engine's own description, block by block.
fn check_map(map: &BlockMap, world: &World) {
    let snapshot = world.snapshot();
    assert_eq!(map.cells().len(), snapshot.blocks.len());
    for (i, (cell, info)) in map.cells().iter().zip(&snapshot.blocks).enumerate() {
        assert_eq!((cell.state, cell.refs), (info.state, info.refs), "block {i} at step {}", map.step);
        if info.state != BlockState::Free {
            assert_eq!((cell.filled, cell.hash), (info.filled, info.hash), "block {i} at step {}", map.step);
        }
    }
    assert_eq!(map.eviction_order(), snapshot.eviction_order);
    for (cell, info) in map.cells().iter().zip(&snapshot.blocks) {
        assert_eq!(cell.is_pinned, info.pinned);
    }
    let host: Vec<_> = map.host().iter().map(|(host, c)| (host, c.request)).collect();
    assert_eq!(host, snapshot.host.iter().map(|b| (b.host, b.request)).collect::<Vec<_>>());
    assert_eq!(
        (map.host().num_swapped(), map.host().num_cached()),
        (snapshot.kv.host_swapped, snapshot.kv.host_cached)
    );
    assert_eq!(map.counts().pinned, snapshot.kv.pinned);
    for request in &snapshot.requests {
        let table = map.tables().get(&request.id).cloned().unwrap_or_default();
        assert_eq!(table, request.blocks, "table of request {}", request.id);
    }
    let counts = map.counts();
    assert_eq!(*counts, map.recount());
    assert_eq!(counts.total(), snapshot.kv.total);
    assert_eq!((counts.used(), counts.shared, counts.saved), (snapshot.kv.used, snapshot.kv.shared, snapshot.kv.saved));
}

#[test]
fn the_map_follows_the_engine_step_by_step() {
    let mut world = World::new(97, 128, demo_jobs());
    let mut model = InspectModel::default();
    for _ in 0..700 {
        world.step();
        model.ingest(&world.telemetry, &palette());
        check_map(model.map().unwrap(), &world);
    }
    assert_eq!(model.num_resyncs(), 0, "deltas alone were enough");
    let record = |f: fn(&kvasir::telemetry::StepRecord) -> bool| {
        model.history().range(0, usize::MAX).filter(|e| f(&e.record)).count()
    };
    assert!(record(|r| !r.preempted.is_empty()) > 0, "the world is small enough to preempt");
    assert!(record(|r| r.kv.evicted_this_step > 0) > 0, "and to evict");
}

/// Steps of [`crowded_world`] at which requests wait in host memory, and at which choices run beside each other.
const CROWDED_STEP: u64 = 260;
const FORKED_STEP: u64 = 60;

/// A pool that is too small: forks, copies, swaps, recomputes, pins and a host tier all happen.
fn crowded_world(steps: u64) -> World {
    let mut world = World::with_host(97, 40, 128, crowded_jobs());
    world.pin_at(20, 1, true);
    world.pin_at(420, 1, false);
    world.run(steps);
    world
}

#[test]
fn the_map_follows_forks_copies_swaps_and_pins() {
    let mut world = crowded_world(0);
    let mut model = InspectModel::default();
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..900 {
        world.step();
        model.ingest(&world.telemetry, &palette());
        check_map(model.map().unwrap(), &world);
        let record = &model.entry().unwrap().record;
        for delta in &record.deltas {
            let word = serde_json::to_value(delta).unwrap().as_object().unwrap().keys().next().unwrap().clone();
            *seen.entry(word).or_insert(0) += 1;
        }
        for p in &record.preempted {
            *seen.entry(format!("{:?}", p.mode)).or_insert(0) += 1;
        }
    }
    assert_eq!(model.num_resyncs(), 0, "deltas alone were enough");
    for word in ["copy", "swap_out", "swap_in", "host_free", "pin", "unpin", "Swap", "Recompute"] {
        assert!(seen.get(word).is_some_and(|n| *n > 0), "the world has no {word}: {seen:?}");
    }
    let late = BlockMap::from_snapshot(&world.snapshot());
    assert_eq!(late.counts().pinned, world.snapshot().kv.pinned);
}

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    let job = (1..80u64, 0..4u64, 0..3u64, 0..4u32, 17..200u32, 1..60u32, 1..4u32).prop_map(
        |(arrive, owner, prefix, prefix_blocks, prompt, output, choices)| Job {
            arrive,
            owner,
            label: format!("owner {owner}"),
            prefix,
            prefix_blocks: prefix_blocks.min(prompt / 16),
            prompt,
            output,
            choices,
        },
    );
    proptest::collection::vec(job, 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn scrubbing_back_equals_keyframe_and_replay(
        jobs in jobs(),
        num_host in 0..24u32,
        pins in proptest::collection::vec((1..400u64, 0..3u64, any::<bool>()), 0..6),
        stops in proptest::collection::vec(1..400u64, 1..12),
    ) {
        let mut world = World::with_host(40, num_host, 64, jobs);
        pins.into_iter().for_each(|(step, prefix, is_pinned)| world.pin_at(step, prefix, is_pinned));
        let mut model = InspectModel::default();
        let mut maps = Vec::new();
        for step in 1..=400u64 {
            world.step();
            if step % 7 == 0 || step == 400 {
                model.ingest(&world.telemetry, &palette());
            }
            maps.push(BlockMap::from_snapshot(&world.snapshot()));
        }
        for step in stops {
            model.apply(InspectCommand::GoToStep(step));
            let map = model.map().expect("every step was recorded");
            prop_assert_eq!(map, &model.history().map_at(step).unwrap());
            // A snapshot does not say what was copied from what.
            let counts = Counts { copied: 0, ..map.counts().clone() };
            prop_assert_eq!(&counts, maps[step as usize - 1].counts());
            prop_assert_eq!(map.tables(), maps[step as usize - 1].tables());
            let host = |map: &BlockMap| map.host().iter().map(|(host, c)| (host, c.request)).collect::<Vec<_>>();
            prop_assert_eq!(host(map), host(&maps[step as usize - 1]));
            prop_assert_eq!(map.eviction_order(), maps[step as usize - 1].eviction_order());
        }
    }

    #[test]
    fn owner_counts_sum_to_the_pool(jobs in jobs(), steps in 1..300u64) {
        let mut world = World::new(40, 64, jobs);
        world.run(steps);
        let model = model_of(&world);
        let map = model.map().unwrap();
        let owners = kvasir::app::inspect::views::legend::owner_counts(&model, map);
        let exclusive: u32 = owners.iter().map(|(_, n)| n).sum();
        let c = map.counts();
        prop_assert_eq!(exclusive + c.shared + c.cached_idle + c.free, 39);
    }
}

#[test]
fn a_late_reader_starts_from_the_snapshot_and_says_what_is_missing() {
    let mut world = World::new(65, 64, vec![Job { output: 6_000, ..demo_jobs()[0].clone() }]);
    world.run(5_000);
    let model = model_of(&world);
    assert_eq!(model.history().num_not_shown(), 5_000 - 4_096);
    check_map(model.map().unwrap(), &world);
    assert!(model.history().map_at(2_000).is_none(), "what was never read is not invented");
}

#[test]
fn a_gap_is_bridged_by_the_snapshot_only() {
    let mut world = demo_world(100);
    let mut model = model_of(&world);
    world.telemetry.set_recording(false);
    world.run(12);
    world.telemetry.set_recording(true);
    world.run(3);
    model.ingest(&world.telemetry, &palette());
    assert_eq!(model.history().num_not_shown(), 12);
    check_map(model.map().unwrap(), &world);
    model.apply(InspectCommand::GoToStep(100));
    assert!(model.map().is_some());
}

#[test]
fn another_engine_starts_a_new_history() {
    let mut model = model_of(&demo_world(50));
    model.apply(InspectCommand::Select(Selection::Request(RequestId(1))));
    let other = World::new(33, 64, Vec::new());
    model.ingest(&other.telemetry, &palette());
    assert!(model.is_empty() && model.has_pool());
    assert_eq!(model.selection(), None);
}

#[test]
fn a_model_loaded_again_does_not_inherit_blocks_or_requests() {
    for num_blocks in [129, 97] {
        let world = demo_world(60);
        let mut model = model_of(&world);
        assert!(!model.is_engine_idle());
        // The same recording goes on with a fresh pool of the same or another size.
        let fresh = World::new(num_blocks, 256, Vec::new());
        world.telemetry.publish(kvasir::telemetry::EngineSnapshot { step: 60, ..fresh.snapshot() });
        model.ingest(&world.telemetry, &palette());
        let counts = model.map().unwrap().counts();
        assert_eq!((counts.used(), counts.free), (0, num_blocks - 1));
        assert!(model.is_engine_idle());
        let kpis = model.kpis();
        assert_eq!((kpis.num_running, kpis.kv_used, kpis.kv_total), (0, 0, num_blocks - 1));
    }
}

#[test]
fn pausing_holds_the_step_while_the_engine_goes_on() {
    let mut world = demo_world(120);
    let mut model = model_of(&world);
    model.apply(InspectCommand::Pause);
    world.run(50);
    model.ingest(&world.telemetry, &palette());
    assert_eq!((model.cursor(), model.step()), (Cursor::Paused(120), Some(120)));
    model.apply(InspectCommand::StepBy(-20));
    assert_eq!(model.step(), Some(100));
    model.apply(InspectCommand::StepBy(i64::MAX));
    assert_eq!(model.step(), Some(170));
    model.apply(InspectCommand::GoToFirst);
    assert_eq!(model.step(), Some(1));
    model.apply(InspectCommand::GoLive);
    assert_eq!(model.step(), Some(170));
    assert_eq!(model.apply(InspectCommand::RunDemo), Some(InspectCommand::RunDemo), "the window's to do");
}

// ---- on the real engine --------------------------------------------------------------------------------------------

/// The map equals the engine's own description of the same moment.
fn check_against(map: &BlockMap, snapshot: &kvasir::telemetry::EngineSnapshot) {
    for (i, (cell, info)) in map.cells().iter().zip(&snapshot.blocks).enumerate() {
        assert_eq!((cell.state, cell.refs), (info.state, info.refs), "block {i} at step {}", map.step);
    }
    for request in &snapshot.requests {
        let table = map.tables().get(&request.id).cloned().unwrap_or_default();
        assert_eq!(table, request.blocks, "table of request {} at step {}", request.id, map.step);
    }
    assert_eq!(*map.counts(), map.recount());
}

#[test]
fn the_map_follows_the_real_engine_over_preemption_and_abort() {
    use kvasir::protocol::{Decoding, GenerateRequest, OwnerTag, SamplingParams, StopRules};
    let fake = kvasir::engine::options::FakeOptions { num_blocks: 33, ..super::slow(4) };
    let engine = kvasir::engine::EngineHandle::start_fake(fake);
    let request = |owner: u64| GenerateRequest {
        owner: OwnerTag { id: owner, label: format!("owner {owner}") },
        prompt: (0..70).map(|i| if i < 40 { i + 1 } else { 1 + (i * owner as u32) % 60 }).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(90) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    let mut runs: Vec<_> = (1..=6).map(|owner| engine.submit(request(owner)).expect("it is accepted")).collect();
    let mut model = InspectModel::default();
    let (start, mut num_compared) = (std::time::Instant::now(), 0);
    loop {
        model.ingest(&engine.telemetry(), &OwnerPalette::default());
        let snapshot = model.snapshot();
        if let Some(map) = model.map().filter(|m| m.step == snapshot.step && !snapshot.blocks.is_empty()) {
            check_against(map, snapshot);
            num_compared += 1;
        }
        if runs.len() == 6 && model.step() > Some(30) {
            runs.remove(2);
        }
        let is_over = runs.len() == 5 && model.rows().iter().filter(|r| r.output_tokens == 90).count() == 5;
        if is_over && model.is_engine_idle() {
            break;
        }
        assert!(start.elapsed().as_secs() < 60, "{:?}", model.rows());
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
    // How often the two meet while steps run depends on the machine; at rest they always do.
    assert!(num_compared >= 1, "never compared");
    let preempted: u64 = model.history().range(0, usize::MAX).map(|e| e.record.preempted.len() as u64).sum();
    assert!(preempted > 0, "the pool is small enough to preempt");
    assert_eq!(model.history().num_not_shown(), 0);
    for step in [10, 40, 80] {
        model.apply(InspectCommand::GoToStep(step));
        let map = model.map().expect("every step was recorded");
        assert_eq!(*map.counts(), map.recount());
        assert_eq!(map.counts().used(), model.entry().unwrap().record.kv.used, "step {step}");
    }
}
