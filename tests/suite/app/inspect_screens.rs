//! Inspect's screens: states as text and pictures, what clicks and keys do, what a frame costs.

use super::*;
use egui::accesskit::Role;
use egui_kittest::Harness;
use egui_kittest::kittest::{NodeT, Queryable};
use kvasir::app::inspect::requests::RowState;
use kvasir::app::inspect::views::block_look::BlockFilter;
use kvasir::app::inspect::views::block_map::BlockOrder;
use kvasir::app::inspect::views::block_tables;
use kvasir::app::inspect::views::panel::Panel;
use kvasir::app::inspect::words;
use kvasir::app::inspect::{InspectView, PrefixCommand, inspect_ui, live_dock_ui};
use kvasir::app::theme::Theme;
use kvasir::telemetry::kernels::{KernelProfile, KernelTime};

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
    let mut queue = harness(model_of(&crowded_world(CROWDED_STEP)), WIDE, false);
    queue.state_mut().view.panel = Panel::Queue;
    queue.run_steps(3);
    results.add(queue.try_snapshot("inspect_queue_light"));
    let mut forks = harness(model_of(&crowded_world(FORKED_STEP)), SMALL, true);
    forks.key_press(egui::Key::Num3);
    forks.event(egui::Event::Text("3".into()));
    forks.run_steps(3);
    results.add(forks.try_snapshot("inspect_forks_dark"));
    // The faces of the panel, in a pool that is too small.
    let mut crowded = harness(model_of(&crowded_world(CROWDED_STEP)), WIDE, true);
    for (panel, name) in [(Panel::Queue, "queue"), (Panel::Prefixes, "prefixes"), (Panel::Details, "details")] {
        crowded.state_mut().view.panel = panel;
        crowded.run_steps(3);
        insta::assert_snapshot!(format!("inspect_panel_{name}"), region(&tree(&crowded), "Panel"));
    }
    let mut forked = harness(model_of(&crowded_world(FORKED_STEP)), WIDE, true);
    forked.state_mut().view.panel = Panel::Forks;
    forked.run_steps(3);
    insta::assert_snapshot!("inspect_panel_forks", region(&tree(&forked), "Panel"));

    let timed = demo_world(330);
    let kernel = |kernel: &str, purpose: &str, dispatches, us| KernelTime {
        kernel: kernel.into(),
        purpose: purpose.into(),
        dispatches,
        us,
    };
    timed.telemetry.publish_profile(KernelProfile {
        step: 330,
        num_tokens: 4,
        num_rows: 4,
        gpu_us: 31_700,
        kernels: vec![
            kernel("matmul_i8", "gate+up", 30, 11_520.0),
            kernel("attention", "attention", 30, 9_280.0),
            kernel("matmul_i8", "head", 1, 6_400.0),
            kernel("sample", "sample", 2, 612.4),
        ],
    });
    let mut kernels = harness(model_of(&timed), WIDE, true);
    kernels.state_mut().view.panel = Panel::Kernels;
    kernels.run_steps(3);
    insta::assert_snapshot!("inspect_panel_kernels", region(&tree(&kernels), "Panel"));
    results.add(kernels.try_snapshot("inspect_kernels_dark"));

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

/// The lines of one region.
fn region(tree: &str, name: &str) -> String {
    let mut lines = tree.lines().skip_while(|l| *l != format!("Region: {name}"));
    let head = lines.next().expect("the region is there");
    let inside = lines.take_while(|l| l.starts_with("  "));
    [head].into_iter().chain(inside).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_node_of_the_tree_lights_its_blocks_and_prefixes_answer() {
    let mut h = harness(model_of(&crowded_world(FORKED_STEP)), WIDE, true);
    h.state_mut().view.panel = Panel::Forks;
    h.run_steps(2);
    h.get_by_label_contains("choice 2 · request 3").click();
    h.run_steps(2);
    assert_eq!(h.state().model.selection(), Some(Selection::Request(RequestId(3))));
    assert_eq!(h.state().view.panel, Panel::Forks, "the tree stays");
    h.state_mut().view.panel = Panel::Prefixes;
    h.state_mut().commands.clear();
    h.run_steps(2);
    let id = h.state().model.snapshot().prefixes[0].id;
    h.get_by_label("Actions of System prompt").click();
    h.run_steps(3);
    h.get_by_label("Unpin").click();
    h.run_steps(3);
    assert_eq!(h.state().commands, [InspectCommand::Prefix(PrefixCommand::Unpin { id })]);
    h.get_by_label("Reset cache").click();
    h.run_steps(2);
    h.get_by_label("Really reset").click();
    h.run_steps(2);
    assert_eq!(h.state().commands.last(), Some(&InspectCommand::Prefix(PrefixCommand::Reset)));
}

/// A search of `width` beams on the real engine, as far as the step after `steps` of its tokens.
fn searching(width: u32, steps: u64) -> InspectModel {
    use kvasir::engine::EngineHandle;
    use kvasir::protocol::{BeamParams, Decoding, EarlyStopping, GenerateRequest, OwnerTag, SamplingParams, StopRules};
    let engine = EngineHandle::start_fake(super::super::slow(8));
    let params = BeamParams { width, num_return: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    let run = engine.submit(GenerateRequest {
        owner: OwnerTag { id: 1, label: "Search".into() },
        prompt: (0..70).map(|i| 65 + i % 26).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(60) },
        decoding: Decoding::Beam(params),
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    });
    let _run = run.expect("it fits");
    let mut model = InspectModel::default();
    let start = std::time::Instant::now();
    let is_over = |model: &InspectModel| model.rows().iter().any(|row| matches!(row.state, RowState::Finished(_)));
    while !(is_over(&model) && model.is_engine_idle()) {
        model.ingest(&engine.telemetry(), &palette());
        assert!(start.elapsed().as_secs() < 60, "{:?}", model.rows());
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
    model.apply(InspectCommand::GoToStep(steps));
    model
}

#[test]
fn a_beam_search_is_a_tree_with_what_its_blocks_save() {
    let mut h = harness(searching(4, 40), WIDE, true);
    h.state_mut().view.panel = Panel::Forks;
    h.run_steps(2);
    let text = region(&tree(&h), "Panel");
    let map = h.state().model.map().expect("every step was recorded");
    let saved = map.counts().saved;
    let bytes = u64::from(saved) * h.state().model.snapshot().kv_bytes_per_block;
    assert!(saved >= 12, "the prompt fills blocks that all beams share: {text}");
    let said = format!("sharing saves {saved} blocks = {}", kvasir::app::format::bytes(bytes));
    assert!(text.contains(&said), "{said}: {text}");
    for beam in ["Search · request 1", "Search, beam 2 · request 2", "Search, beam 4 · request 4"] {
        assert!(text.contains(beam), "{beam}: {text}");
    }
    let table = tree(&h);
    assert!(table.contains("Beam 3: Search"), "{table}");
    // Once the search is over its beams are gone, with their blocks.
    h.state_mut().model.apply(InspectCommand::GoLive);
    h.run_steps(2);
    let text = tree(&h);
    assert!(!text.contains("Beam 3") && !text.contains("beam 2"), "{text}");
}

#[test]
fn slash_finds_a_request_and_the_question_mark_lists_the_keys() {
    let mut h = harness(model_of(&demo_world(330)), WIDE, true);
    let text = |h: &mut Harness<'_, Screen>, text: &str| {
        h.event(egui::Event::Text(text.into()));
        h.run_steps(3);
    };
    text(&mut h, "/");
    text(&mut h, "oslo");
    assert_eq!(h.state().model.selection(), Some(Selection::Request(RequestId(4))));
    h.key_press(egui::Key::Enter);
    h.run_steps(3);
    text(&mut h, "/");
    text(&mut h, "12");
    assert_eq!(h.state().model.selection(), Some(Selection::Block(BlockId(12))));
    h.key_press(egui::Key::Escape);
    h.run_steps(3);
    assert_eq!(h.state().model.selection(), None);
    text(&mut h, "?");
    assert!(h.query_by_label("Keys of Inspect").is_some());
    text(&mut h, "?");
    assert!(h.query_by_label("Keys of Inspect").is_none());
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
