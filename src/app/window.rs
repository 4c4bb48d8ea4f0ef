//! The eframe side: one window, its frames, its keys, and the hand-over between views and logic.
//!
//! Guarantees: a frame is drawn only when something changed (input, engine, store, a timer that a view asked for); news
//! of the engine are gathered and paced; nothing here blocks.

use super::chat::ChatId;
use super::command::{Effect, UiCommand};
use super::demo::Demo;
use super::frame_stats::{FrameStats, MIN_INTERVAL, Pacer, WorkTimer, interval};
use super::inspect::{InspectCommand, InspectModel, InspectView, inspect_ui, live_dock_ui};
use super::logic::{AppCore, CoreOptions, Waker};
use super::shortcuts;
use super::state::{Clock, ThemeChoice, WindowAdapter, Workspace};
use super::tessellate_timer::{FrameLog, TessellateTimer};
use super::theme::{Theme, size, space};
use super::views::chat::{ChatView, chat_workspace_ui};
use super::views::sessions::{SessionsView, sessions_ui};
use super::views::{ViewCtx, about, dock, models, palette, shell};
use super::{AppError, AppOptions, DemoOutcome, actions};
use egui::{Align2, Area, CentralPanel, Context, Frame, Id, Key, Margin, Order, Panel, Ui, ViewportCommand, vec2};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Caret and other blinking stop after this long without input.
const BLINK_FOR_S: f64 = 5.0;
/// Zoom by the keyboard stays within these.
const ZOOM: std::ops::RangeInclusive<f32> = 0.8..=2.0;

/// The app as eframe runs it. Tests run it without a window.
pub struct KvasirApp {
    pub core: AppCore,
    pub inspect: InspectModel,
    inspect_view: InspectView,
    pub chat_view: ChatView,
    sessions: SessionsView,
    markdown: egui_commonmark::CommonMarkCache,
    demo: Option<Demo>,
    demo_outcome: DemoOutcome,
    closes_after_demo: bool,
    demo_was_announced: bool,
    pub frames: FrameStats,
    frame_log: Option<FrameLog>,
    pacer: Arc<Pacer>,
    started: Instant,
    last_input_s: f64,
    blinks: bool,
    theme: Option<Theme>,
    repaint_for_inspect: bool,
}

impl KvasirApp {
    pub fn new(cc: &eframe::CreationContext<'_>, options: AppOptions, outcome: DemoOutcome) -> Result<Self, AppError> {
        let pacer = Arc::new(Pacer::new());
        let waker = repaint_waker(&cc.egui_ctx, pacer.clone());
        let engine_waker = waker.clone();
        options.engine.set_waker(Box::new(move || engine_waker()));
        let core = AppCore::new(CoreOptions {
            engine: options.engine,
            data_dir: &options.data_dir,
            model_roots: options.model_roots,
            default_model: options.default_model,
            waker,
            clock: Clock { seconds: 0.0, unix_ms: unix_ms() },
        })
        .map_err(AppError::Thread)?;
        let mut app = KvasirApp {
            core,
            inspect: InspectModel::default(),
            inspect_view: InspectView::default(),
            chat_view: ChatView::default(),
            sessions: SessionsView::default(),
            markdown: Default::default(),
            demo: options.demo.then(|| Demo::new(options.exit_after_demo, options.workspace)),
            demo_outcome: outcome,
            closes_after_demo: options.exit_after_demo,
            demo_was_announced: false,
            frames: FrameStats::default(),
            frame_log: options.frame_stats.then(FrameLog::default),
            pacer,
            started: Instant::now(),
            last_input_s: 0.0,
            blinks: true,
            theme: None,
            repaint_for_inspect: false,
        };
        app.core.state.window_adapter = window_adapter(cc);
        if let Some(theme) = options.theme {
            app.core.state.theme = theme;
        }
        if let Some(workspace) = options.workspace {
            app.core.apply(UiCommand::ShowWorkspace(workspace));
        }
        let source = options.model_to_load.or_else(|| actions::models::at_start(&app.core, options.demo));
        if let Some(source) =
            source.filter(|_| app.core.state.model().is_none() && app.core.state.remote_host.is_none())
        {
            actions::models::load(&mut app.core, source);
        }
        if let Some(log) = &app.frame_log {
            cc.egui_ctx.add_plugin(TessellateTimer { log: log.clone() });
        }
        Ok(app)
    }

    fn clock(&self) -> Clock {
        Clock { seconds: self.started.elapsed().as_secs_f64(), unix_ms: unix_ms() }
    }

    /// Everything but drawing; also called while the window is hidden.
    fn advance(&mut self, ctx: &Context) {
        self.core.poll(self.clock());
        self.inspect.ingest(&self.core.engine().telemetry(), &self.core.state.owners);
        self.inspect.read_previews(self.core.state.model().map(|m| &*m.tokenizer));
        if !self.demo_was_announced && self.demo.as_ref().is_some_and(|d| d.is_in_full_swing(&self.core.state)) {
            self.demo_was_announced = true;
            eprintln!("demo: all four chats show text");
        }
        if let Some(demo) = &mut self.demo
            && let Some(outcome) = demo.poll(&mut self.core)
        {
            self.demo = None;
            self.demo_outcome.set(outcome);
            if self.closes_after_demo {
                ctx.send_viewport_cmd(ViewportCommand::Close);
            }
        }
        if self.demo.is_some() {
            // The time limit must be noticed even when nothing else happens.
            ctx.request_repaint_after(Duration::from_secs(1));
        }
    }

    fn apply_theme(&mut self, ctx: &Context) {
        let is_dark = match self.core.state.theme {
            ThemeChoice::Dark => true,
            ThemeChoice::Light => false,
            ThemeChoice::Auto => ctx.system_theme() != Some(egui::Theme::Light),
        };
        let theme = Theme::new(is_dark);
        if self.theme != Some(theme) {
            theme.apply(ctx);
            self.theme = Some(theme);
            self.blinks = true;
            if self.is_slow() {
                ctx.all_styles_mut(|s| s.animation_time = 0.0);
            }
        }
    }

    /// True where the window or the engine is drawn or computed on the CPU.
    fn is_slow(&self) -> bool {
        self.core.state.window_adapter.is_cpu || self.core.state.model().is_some_and(|m| m.adapter.is_cpu)
    }

    fn rest_caret(&mut self, ctx: &Context) {
        let now = self.started.elapsed().as_secs_f64();
        if ctx.input(|i| !i.events.is_empty()) {
            self.last_input_s = now;
        }
        let blinks = now - self.last_input_s < BLINK_FOR_S;
        if blinks != self.blinks {
            self.blinks = blinks;
            ctx.all_styles_mut(|s| s.visuals.text_cursor.blink = blinks);
        }
    }

    fn take_input(&mut self, ctx: &Context, commands: &mut Vec<UiCommand>) {
        let zoom = ctx.zoom_factor();
        if !ZOOM.contains(&zoom) {
            ctx.set_zoom_factor(zoom.clamp(*ZOOM.start(), *ZOOM.end()));
        }
        let is_palette_open = self.core.state.palette.is_some();
        shortcuts::take_keys(ctx, is_palette_open, commands);
        if !is_palette_open && ctx.input(|i| i.key_pressed(Key::Escape)) {
            commands.extend(self.escape());
        }
        let dropped = ctx.input(|i| i.raw.dropped_files.first().map(|f| f.path().to_path_buf()));
        commands.extend(dropped.map(UiCommand::LoadModel));
    }

    /// Escape ends the nearest thing: an overlay, an edit, the answer under way.
    fn escape(&self) -> Option<UiCommand> {
        let state = &self.core.state;
        if state.is_about_open {
            return Some(UiCommand::SetAbout(false));
        }
        if state.is_session_overlay_open || state.is_dock_overlay_open {
            return Some(UiCommand::CloseOverlays);
        }
        if state.edit.is_some() {
            return Some(UiCommand::CancelEdit);
        }
        let chat = state.panes.focused_chat();
        (state.workspace == Workspace::Chat && state.run_of(chat).is_some()).then_some(UiCommand::Stop(chat))
    }

    fn shell_ui(&mut self, ui: &mut Ui, commands: &mut Vec<UiCommand>, asked: &mut Vec<InspectCommand>) {
        let Some(theme) = self.theme else { return };
        let width = ui.available_width();
        let KvasirApp { core, sessions, chat_view, inspect, inspect_view, markdown, frames, .. } = self;
        let mut cx = ViewCtx { state: &core.state, theme, commands, markdown };
        let cx = &mut cx;
        shell::top_bar_ui(cx, ui);
        shell::status_bar_ui(cx, inspect.status_line(), ui);
        shell::rail_ui(cx, ui);
        let has_list = cx.state.workspace == Workspace::Chat;
        let has_dock = cx.state.workspace != Workspace::Inspect;
        let list_frame = theme.panel_frame().inner_margin(Margin::same(space::S as i8));
        if has_list && width >= shell::LIST_BESIDE_WIDTH && cx.state.is_session_list_open {
            Panel::left("sessions")
                .default_size(size::SESSION_LIST)
                .size_range(180.0..=400.0)
                .frame(list_frame)
                .show(ui, |ui| sessions_ui(cx, sessions, ui));
        }
        if has_dock && width >= shell::DOCK_BESIDE_WIDTH && cx.state.is_dock_open {
            Panel::right("dock")
                .default_size(size::DOCK)
                .size_range(300.0..=560.0)
                .frame(theme.panel_frame())
                .show(ui, |ui| dock_ui(cx, inspect, ui, asked));
        }
        CentralPanel::no_frame().frame(Frame::new().fill(theme.bg_panel)).show(ui, |ui| {
            shell::notice_ui(cx, ui);
            match cx.state.workspace {
                Workspace::Chat => chat_workspace_ui(cx, chat_view, ui),
                Workspace::Models => models::models_workspace_ui(cx, ui),
                Workspace::Inspect => inspect_ui(ui, inspect_view, inspect, &theme, asked),
            }
        });
        let area = ui.ctx().content_rect();
        if has_list && width < shell::LIST_BESIDE_WIDTH && cx.state.is_session_overlay_open {
            let height = area.height() - size::TOP_BAR - size::STATUS_BAR;
            overlay_ui(ui, "sessions_overlay", Align2::LEFT_TOP, vec2(size::RAIL, size::TOP_BAR), |ui| {
                list_frame.stroke(ui.visuals().window_stroke()).show(ui, |ui| {
                    ui.set_width(size::SESSION_LIST);
                    ui.set_height(height - 2.0 * space::S);
                    sessions_ui(cx, sessions, ui);
                });
            });
        }
        if has_dock && width < shell::DOCK_BESIDE_WIDTH && cx.state.is_dock_overlay_open {
            let height = area.height() - size::TOP_BAR - size::STATUS_BAR;
            overlay_ui(ui, "dock_overlay", Align2::RIGHT_TOP, vec2(0.0, size::TOP_BAR), |ui| {
                theme.panel_frame().stroke(ui.visuals().window_stroke()).show(ui, |ui| {
                    ui.set_width(size::DOCK - 2.0 * space::M);
                    ui.set_height(height - 2.0 * space::M);
                    dock_ui(cx, inspect, ui, asked);
                });
            });
        }
        palette::palette_ui(cx, ui);
        about::about_ui(cx, ui, frames);
        drop_hint_ui(ui, &theme);
    }

    /// Lets Inspect do what its views asked for; the rest becomes commands of the shell.
    fn ask_inspect(&mut self, asked: Vec<InspectCommand>, commands: &mut Vec<UiCommand>) {
        // Timing costs the engine a little: it ends with the frame that does not show it.
        let is_timing = asked.contains(&InspectCommand::TimeKernels);
        self.core.engine().telemetry().set_profiling(is_timing);
        for command in asked {
            match self.inspect.apply(command) {
                Some(InspectCommand::TimeKernels) => {}
                Some(InspectCommand::OpenInspect) => commands.push(UiCommand::ShowWorkspace(Workspace::Inspect)),
                Some(InspectCommand::OpenModels) => commands.push(UiCommand::ShowWorkspace(Workspace::Models)),
                Some(InspectCommand::RunDemo) => commands.push(UiCommand::RunDemo),
                Some(InspectCommand::OpenOwner(id)) => commands.push(UiCommand::OpenChat(ChatId(id))),
                Some(InspectCommand::Prefix(command)) => commands.push(UiCommand::Prefix(command)),
                // Done by the model: the views read it again.
                _ => self.repaint_for_inspect = true,
            }
        }
    }

    fn carry_out(&mut self, ctx: &Context, commands: Vec<UiCommand>) {
        // A focus request has been seen by every view of this frame.
        self.core.state.focus = None;
        let has_commands = !commands.is_empty() || std::mem::take(&mut self.repaint_for_inspect);
        for command in commands {
            self.core.apply(command);
        }
        for effect in self.core.take_effects() {
            match effect {
                Effect::Copy(text) => ctx.copy_text(text),
                Effect::InspectStep(step) => {
                    self.inspect.apply(InspectCommand::GoToStep(step));
                }
                Effect::Close => ctx.send_viewport_cmd(ViewportCommand::Close),
            }
        }
        if has_commands {
            ctx.request_repaint();
        }
    }
}

impl eframe::App for KvasirApp {
    fn logic(&mut self, ctx: &Context, frame: &mut eframe::Frame) {
        let last = Duration::from_secs_f32(frame.info().cpu_usage.unwrap_or(0.0).clamp(0.0, 10.0));
        self.pacer.frame_drawn(interval(self.is_slow(), last).max(MIN_INTERVAL));
        // Steps share the card with the window: they come in small pieces while it is seen.
        let is_visible = ctx.input(|i| i.viewport().visible()).unwrap_or(true);
        self.core.engine().telemetry().set_window_visible(is_visible);
        self.advance(ctx);
    }

    fn ui(&mut self, ui: &mut Ui, _frame: &mut eframe::Frame) {
        let timer = WorkTimer::start();
        let ctx = ui.ctx().clone();
        self.apply_theme(&ctx);
        self.rest_caret(&ctx);
        let mut commands = Vec::new();
        self.take_input(&ctx, &mut commands);
        let mut asked = Vec::new();
        self.shell_ui(ui, &mut commands, &mut asked);
        self.ask_inspect(asked, &mut commands);
        self.carry_out(&ctx, commands);
        let build_us = timer.elapsed_us();
        self.frames.record(build_us);
        if let Some(log) = &self.frame_log {
            log.frame_built(build_us);
        }
    }

    fn on_exit(&mut self) {
        if let Some(log) = &self.frame_log {
            eprintln!("{}", log.summary());
        }
        self.core.shut_down();
    }
}

fn dock_ui(cx: &mut ViewCtx<'_>, inspect: &InspectModel, ui: &mut Ui, asked: &mut Vec<InspectCommand>) {
    shell::dock_tabs_ui(cx, ui);
    match cx.state.dock_tab {
        super::state::DockTab::RunSettings => dock::run_settings_ui(cx, ui),
        super::state::DockTab::Live => live_dock_ui(ui, inspect, &cx.theme, asked),
    }
}

fn overlay_ui(ui: &Ui, name: &str, align: Align2, offset: egui::Vec2, add: impl FnOnce(&mut Ui)) {
    Area::new(Id::unique(name)).order(Order::Middle).anchor(align, offset).show(ui.ctx(), add);
}

/// While a file is dragged over the window.
fn drop_hint_ui(ui: &Ui, theme: &Theme) {
    let ctx = ui.ctx();
    if ctx.input(|i| i.raw.hovered_files.is_empty()) {
        return;
    }
    let painter = ctx.layer_painter(egui::LayerId::new(Order::Foreground, Id::unique("drop_hint")));
    let rect = ctx.content_rect();
    painter.rect_filled(rect, 0.0, theme.bg_app.gamma_multiply(0.85));
    let font = egui::TextStyle::Heading.resolve(ui.style());
    painter.text(rect.center(), Align2::CENTER_CENTER, "Drop to load the model", font, theme.text_strong);
}

fn window_adapter(cc: &eframe::CreationContext<'_>) -> WindowAdapter {
    let info = cc.wgpu_render_state.as_ref().map(|state| state.adapter.get_info());
    info.map_or_else(WindowAdapter::default, |info| WindowAdapter {
        is_cpu: info.device_type == wgpu::DeviceType::Cpu,
        name: info.name,
    })
}

/// Wakes the window from other threads, no sooner than its pace allows.
fn repaint_waker(ctx: &Context, pacer: Arc<Pacer>) -> Waker {
    let ctx = ctx.clone();
    Arc::new(move || ctx.request_repaint_after(pacer.delay()))
}

fn unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}
