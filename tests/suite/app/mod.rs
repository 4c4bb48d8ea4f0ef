//! The app without a window: egui_kittest drives it on the real engine with simulated execution.

mod chat;
mod demo;
mod inspect;
mod remote;
mod shell;
mod states;

use egui_kittest::Harness;
use egui_kittest::kittest::NodeT;
use kvasir::app::chat::{Chat, ChatId, Message};
use kvasir::app::command::UiCommand;
use kvasir::app::state::{AppState, DefaultModel, ThemeChoice};
use kvasir::app::window::KvasirApp;
use kvasir::app::{AppOptions, DemoOutcome};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use std::path::Path;
use std::time::{Duration, Instant};

pub type App = Harness<'static, KvasirApp>;

/// Nothing in these tests takes longer, also on shared cores.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the app starts in a test: nothing is loaded, nothing is asked of the network.
pub fn options(engine: EngineHandle, dir: &Path) -> AppOptions {
    AppOptions {
        engine,
        model_to_load: None,
        default_model: DefaultModel { name: "SmolLM2-135M-Instruct".into(), bytes: 92 << 20, is_here: false },
        data_dir: dir.to_path_buf(),
        model_roots: Vec::new(),
        demo: false,
        exit_after_demo: false,
        theme: Some(ThemeChoice::Dark),
        workspace: None,
        size: None,
        frame_stats: false,
    }
}

pub fn harness(options: AppOptions, size: [f32; 2], outcome: DemoOutcome) -> App {
    let mut app = Harness::builder()
        .with_size(size)
        .with_step_dt(1.0 / 60.0)
        .with_os(egui::os::OperatingSystem::Nix)
        .wgpu()
        .build_eframe(|cc| KvasirApp::new(cc, options, outcome).expect("the app starts"));
    app.run_steps(3);
    app
}

/// The app at its usual size, on an engine of its own that answers at once.
pub fn app_in(dir: &Path) -> App {
    app_with(dir, FakeOptions::small())
}

pub fn app_with(dir: &Path, fake: FakeOptions) -> App {
    harness(options(EngineHandle::start_fake(fake), dir), [1440.0, 900.0], DemoOutcome::default())
}

/// Steps that take time, so that there is something to look at while they run.
pub fn slow(ms: u64) -> FakeOptions {
    FakeOptions { step_delay: Duration::from_millis(ms), ..FakeOptions::small() }
}

/// An engine without a model.
pub fn idle_engine() -> EngineHandle {
    EngineHandle::start(EngineHandle::start_fake(FakeOptions::small()).options())
}

pub fn send(app: &mut App, command: UiCommand) {
    app.state_mut().core.apply(command);
    app.step();
}

pub fn state(app: &App) -> &AppState {
    &app.state().core.state
}

pub fn focused(app: &App) -> ChatId {
    state(app).panes.focused_chat()
}

pub fn chat(app: &App, id: ChatId) -> &Chat {
    state(app).chat(id).expect("the chat is there")
}

/// Messages of the active path as (role, text).
pub fn texts(chat: &Chat) -> Vec<(&'static str, &str)> {
    path(chat).map(|m| (m.role.word(), m.content.as_str())).collect()
}

pub fn path(chat: &Chat) -> impl Iterator<Item = &Message> {
    chat.path().iter().filter_map(|id| chat.message(*id))
}

/// Draws frames until `done` holds; panics with what is on screen when it takes too long.
pub fn wait_for(app: &mut App, what: &str, mut done: impl FnMut(&AppState) -> bool) {
    let start = Instant::now();
    while !done(state(app)) {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}:\n{}", screen(app));
        std::thread::sleep(Duration::from_millis(2));
        app.step();
    }
}

pub fn wait_idle(app: &mut App) {
    wait_for(app, "all answers", |s| s.runs.is_empty());
    app.run_steps(2);
}

/// What a screen reader would find, one line per control or text; times and speeds are replaced by `#`.
pub fn screen(app: &App) -> String {
    let mut lines = Vec::new();
    collect(&app.root(), &mut lines);
    lines.join("\n")
}

fn collect<'t>(node: &(impl NodeT<'t> + 't), lines: &mut Vec<String>) {
    let this = node.accesskit_node();
    let role = format!("{:?}", this.role());
    let is_structure = matches!(role.as_str(), "Window" | "GenericContainer" | "Pane" | "TextRun" | "Splitter");
    let text = [this.label(), this.value(), this.placeholder().map(str::to_owned)];
    let text: Vec<String> = text.into_iter().flatten().filter(|t| !t.is_empty()).map(|t| masked(&t)).collect();
    if !is_structure && !text.is_empty() {
        let mark = match this.toggled() {
            Some(egui::accesskit::Toggled::True) => " (on)",
            _ => "",
        };
        let disabled = if this.is_disabled() { " (disabled)" } else { "" };
        lines.push(format!("{role}: {}{mark}{disabled}", text.join(" = ")));
    }
    for child in node.children() {
        collect(&child, lines);
    }
}

/// Figures that differ from run to run become `#`.
fn masked(text: &str) -> String {
    let part = |part: &str| match part {
        p if p.ends_with(" tok/s") => "# tok/s".to_owned(),
        p if p.starts_with("first after ") => "first after #".to_owned(),
        p if p.starts_with("steps ") => "steps #".to_owned(),
        p => p.to_owned(),
    };
    text.split(" · ").map(part).collect::<Vec<_>>().join(" · ")
}
