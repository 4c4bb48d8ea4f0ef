//! Inspect without a window: the model against a small engine, the workspace's states as accessibility-tree text, and
//! the cost of a frame.

#[path = "inspect_world.rs"]
mod world;

use egui::accesskit::Role;
use egui_kittest::Harness;
use egui_kittest::kittest::{NodeT, Queryable};
use kvasir::app::inspect::map::BlockMap;
use kvasir::app::inspect::views::block_look::BlockFilter;
use kvasir::app::inspect::views::block_map::BlockOrder;
use kvasir::app::inspect::views::block_tables;
use kvasir::app::inspect::words;
use kvasir::app::inspect::{Cursor, InspectCommand, InspectModel, InspectView, Selection, inspect_ui, live_dock_ui};
use kvasir::app::theme::{OwnerPalette, Theme};
use kvasir::ids::{BlockId, RequestId};
use kvasir::telemetry::BlockState;
use proptest::prelude::*;
use world::{Job, World, crowd, demo_jobs};

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

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    let job = (1..80u64, 0..4u64, 0..3u64, 0..4u32, 17..200u32, 1..60u32).prop_map(
        |(arrive, owner, prefix, prefix_blocks, prompt, output)| Job {
            arrive,
            owner,
            label: format!("owner {owner}"),
            prefix,
            prefix_blocks: prefix_blocks.min(prompt / 16),
            prompt,
            output,
        },
    );
    proptest::collection::vec(job, 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn scrubbing_back_equals_keyframe_and_replay(jobs in jobs(), stops in proptest::collection::vec(1..400u64, 1..12)) {
        let mut world = World::new(40, 64, jobs);
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
            prop_assert_eq!(map.counts(), maps[step as usize - 1].counts());
            prop_assert_eq!(map.tables(), maps[step as usize - 1].tables());
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

// ---- the workspace -------------------------------------------------------------------------------------------------

const WIDE: [f32; 2] = [1396.0, 840.0];
const SMALL: [f32; 2] = [916.0, 540.0];

struct Screen {
    model: InspectModel,
    view: InspectView,
    theme: Theme,
    commands: Vec<InspectCommand>,
    is_dock: bool,
}

fn harness(model: InspectModel, size: [f32; 2], is_dark: bool) -> Harness<'static, Screen> {
    let theme = Theme::new(is_dark);
    let screen = Screen { model, view: InspectView::default(), theme, commands: Vec::new(), is_dock: false };
    let mut harness = Harness::builder().with_size(size).with_step_dt(1.0 / 30.0).wgpu().build_ui_state(
        |ui, screen: &mut Screen| {
            let mut commands = Vec::new();
            if screen.is_dock {
                screen.theme.panel_frame().show(ui, |ui| {
                    live_dock_ui(ui, &screen.model, &screen.theme, &mut commands);
                });
            } else {
                inspect_ui(ui, &mut screen.view, &screen.model, &screen.theme, &mut commands);
            }
            for command in commands {
                screen.commands.push(command.clone());
                screen.model.apply(command);
            }
        },
        screen,
    );
    theme.apply(&harness.ctx);
    harness.run_steps(4);
    harness
}

/// What a screen reader finds, one line per node that has words.
fn tree(harness: &Harness<'_, Screen>) -> String {
    fn walk(node: &egui_kittest::Node<'_>, depth: usize, out: &mut String) {
        let access = node.accesskit_node();
        // The runs of a label repeat it.
        if access.role() == Role::TextRun {
            return;
        }
        let label = access.label().filter(|l| !l.is_empty()).or_else(|| access.value());
        let mut inner = depth;
        if let Some(label) = label {
            let role = format!("{:?}", access.role());
            out.push_str(&format!("{}{role}: {label}\n", "  ".repeat(depth)));
            inner += 1;
        }
        for child in node.children() {
            walk(&child, inner, out);
        }
    }
    let mut out = String::new();
    for child in harness.root().children() {
        walk(&child, 0, &mut out);
    }
    out
}

#[test]
fn pictures() {
    let mut results = egui_kittest::SnapshotResults::new();
    let mut dark = harness(model_of(&demo_world(330)), SMALL, true);
    results.add(dark.try_snapshot("inspect_pool_dark"));
    let mut light = harness(model_of(&demo_world(330)), SMALL, false);
    light.state_mut().view.order = BlockOrder::Tables;
    light.state_mut().model.apply(InspectCommand::GoToStep(215));
    light.run_steps(3);
    results.add(light.try_snapshot("inspect_tables_light"));
    let mut dock = harness(model_of(&demo_world(330)), [360.0, 340.0], true);
    dock.state_mut().is_dock = true;
    dock.run_steps(3);
    results.add(dock.try_snapshot("live_dock_dark"));
}

#[test]
fn states_as_text() {
    let empty = harness(model_of(&World::new(129, 64, Vec::new())), SMALL, true);
    insta::assert_snapshot!("inspect_empty", tree(&empty));

    let no_model = harness(InspectModel::default(), SMALL, true);
    insta::assert_snapshot!("inspect_no_model", tree(&no_model));

    let mut running = harness(model_of(&demo_world(330)), WIDE, true);
    insta::assert_snapshot!("inspect_running", tree(&running));

    running.state_mut().view.order = BlockOrder::Tables;
    running.state_mut().model.apply(InspectCommand::GoToStep(200));
    running.run_steps(3);
    insta::assert_snapshot!("inspect_paused_block_tables", tree(&running));

    running.state_mut().view.order = BlockOrder::Pool;
    running.state_mut().model.apply(InspectCommand::Select(Selection::Block(BlockId(2))));
    running.run_steps(3);
    let text = tree(&running);
    assert!(text.contains("used, shared by 4"), "{text}");
    insta::assert_snapshot!("inspect_block_selected", text);

    let mut dock = harness(model_of(&demo_world(330)), [360.0, 420.0], true);
    dock.state_mut().is_dock = true;
    dock.run_steps(3);
    insta::assert_snapshot!("live_dock", tree(&dock));
}

#[test]
fn a_click_on_a_block_pins_it_and_escape_lets_go() {
    let mut h = harness(model_of(&demo_world(330)), WIDE, true);
    let rect =
        h.get_by_role_and_label(Role::GraphicsObject, &words::map_sentence(h.state().model.map().unwrap())).rect();
    let at = rect.min + egui::vec2(5.0, 5.0);
    h.hover_at(at);
    h.run_steps(2);
    assert!(h.query_by_label_contains("Block 1 · used, shared by 4").is_some(), "hover answers in one line");
    h.drag_at(at);
    h.drop_at(at);
    h.run_steps(2);
    assert_eq!(h.state().model.selection(), Some(Selection::Block(BlockId(1))));
    h.key_press(egui::Key::ArrowRight);
    h.run_steps(2);
    assert_eq!(h.state().model.selection(), Some(Selection::Block(BlockId(2))));
    h.key_press(egui::Key::Escape);
    h.run_steps(2);
    assert_eq!(h.state().model.selection(), None);
}

#[test]
fn keys_move_through_time() {
    let mut h = harness(model_of(&demo_world(330)), WIDE, true);
    let presses = [
        (egui::Key::Space, Cursor::Paused(330)),
        (egui::Key::Comma, Cursor::Paused(329)),
        (egui::Key::Comma, Cursor::Paused(328)),
        (egui::Key::Period, Cursor::Paused(329)),
        (egui::Key::Home, Cursor::Paused(1)),
        (egui::Key::End, Cursor::Live),
    ];
    for (key, cursor) in presses {
        h.key_press(key);
        h.run_steps(2);
        assert_eq!(h.state().model.cursor(), cursor, "after {key:?}");
    }
}

#[test]
fn the_legend_filters_and_the_demo_button_asks_for_the_demo() {
    let mut h = harness(model_of(&demo_world(330)), WIDE, true);
    h.get_by_label_contains("Show only shared").click();
    h.run_steps(2);
    assert_eq!(h.state().view.filter, Some(BlockFilter::Shared));
    h.get_by_label_contains("Show only shared").click();
    h.run_steps(2);
    assert_eq!(h.state().view.filter, None);

    let mut h = harness(model_of(&World::new(129, 64, Vec::new())), SMALL, false);
    h.get_by_label("Run the demo").click();
    h.run_steps(2);
    assert_eq!(h.state().commands, [InspectCommand::RunDemo]);
}

#[test]
fn a_dock_lane_leads_to_inspect() {
    let mut h = harness(model_of(&demo_world(330)), [360.0, 420.0], true);
    h.state_mut().is_dock = true;
    h.run_steps(3);
    h.get_by_label_contains("Plan a trip to Oslo: ").click();
    h.run_steps(2);
    assert_eq!(
        h.state().commands,
        [InspectCommand::Select(Selection::Request(RequestId(4))), InspectCommand::OpenInspect]
    );
}

#[test]
fn nothing_repaints_by_itself() {
    for is_dock in [false, true] {
        let mut h = harness(model_of(&demo_world(330)), WIDE, true);
        h.state_mut().is_dock = is_dock;
        h.run_steps(60);
        let delay = h.output().viewport_output[&egui::ViewportId::ROOT].repaint_delay;
        assert!(delay > std::time::Duration::from_secs(3_600), "asked for a repaint in {delay:?}");
    }
}

#[test]
fn a_shared_prefix_is_one_group() {
    let model = model_of(&demo_world(200));
    let groups = block_tables::groups(model.map().unwrap());
    let shared: Vec<_> = groups.iter().filter(|g| g.num_shared > 0).collect();
    assert_eq!(shared.len(), 1);
    assert_eq!((shared[0].requests.len(), shared[0].num_shared), (4, 6));
}

/// What a frame costs: build and tessellate in microseconds (least and 95th percentile), and vertices to draw.
struct FrameCost {
    least_us: u64,
    p95_us: u64,
    num_vertices: usize,
}

fn frame_cost(num_blocks: u32, num_requests: u32) -> FrameCost {
    let mut world = World::new(num_blocks, 4_096, crowd(num_blocks, 0.7, num_requests));
    world.run(80);
    let ctx = egui::Context::default();
    Theme::DARK.apply(&ctx);
    let (mut view, mut model, palette) = (InspectView::default(), InspectModel::default(), palette());
    let (mut times, mut num_vertices) = (Vec::new(), 0);
    for frame in 0..110 {
        world.step();
        let input = egui::RawInput {
            screen_rect: Some(egui::Rect::from_min_size(egui::Pos2::ZERO, egui::vec2(1440.0, 900.0))),
            time: Some(f64::from(frame) / 30.0),
            ..Default::default()
        };
        let start = std::time::Instant::now();
        model.ingest(&world.telemetry, &palette);
        let output = ctx.run_ui(input, |ui| inspect_ui(ui, &mut view, &model, &Theme::DARK, &mut Vec::new()));
        let primitives = ctx.tessellate(output.shapes, output.pixels_per_point);
        times.push(start.elapsed().as_micros() as u64);
        num_vertices = primitives.iter().map(num_vertices_of).sum();
        assert!(model.map().is_some());
    }
    let mut warm = times.split_off(10);
    warm.sort_unstable();
    FrameCost { least_us: warm[0], p95_us: warm[warm.len() * 95 / 100], num_vertices }
}

fn num_vertices_of(primitive: &egui::ClippedPrimitive) -> usize {
    match &primitive.primitive {
        egui::epaint::Primitive::Mesh(mesh) => mesh.vertices.len(),
        egui::epaint::Primitive::Callback(_) => 0,
    }
}

#[test]
fn a_frame_costs_little_whatever_the_pool() {
    for (num_blocks, num_requests) in [(512, 8), (8_192, 32), (131_072, 64)] {
        let FrameCost { least_us, p95_us, num_vertices } = frame_cost(num_blocks, num_requests);
        println!("{num_blocks} blocks: frame {least_us} us at least, p95 {p95_us} us, {num_vertices} vertices");
        assert!(num_vertices > 1_000 && num_vertices < 60_000, "{num_blocks} blocks: {num_vertices} vertices");
        // What a frame draws does not grow with the pool; how long it takes is printed and not asserted.
    }
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
