//! The whole workspace: where each picture stands, at any size of window.
//!
//! Wide: figures on top; blocks, steps and requests on the left, details on the right.
//! Narrow or low: figures, blocks, and one of steps, requests, details below.

use super::block_look::BlockFilter;
use super::block_map::{BlockOrder, MapCache, MapChoice, block_map_ui, level_words, zoomed};
use super::block_tables::block_tables_ui;
use super::host_strip::{self, host_strip_ui};
use super::keys::{Find, find_ui, help_ui, keys};
use super::kpi_strip::kpi_strip_ui;
use super::legend::{legend_ui, totals_words};
use super::paint::{Mark, card_ui, header_ui, paint_mark, quiet_button, quiet_toggle, segmented, small};
use super::panel::{Panel, PanelView, panel_ui};
use super::request_table::{blocks_table_ui, listed_blocks, request_table_ui, steps_table_ui};
use super::timeline::{TimelineView, timeline_ui};
use crate::app::format;
use crate::app::inspect::grid::LEVELS;
use crate::app::inspect::model::{InspectCommand, InspectModel};
use crate::app::inspect::words;
use crate::app::theme::{Theme, font_size, space};
use crate::ids::BlockId;
use egui::{Align, Layout, Rect, RichText, Sense, Ui, UiBuilder, Vec2, pos2, vec2};

const WIDE: f32 = 1_000.0;
const TALL: f32 = 620.0;
const SIDE: f32 = 320.0;
const STRIP: f32 = 56.0;

/// What is shown below the map when the window is small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Steps,
    Requests,
    Panel(Panel),
}

/// What the reader chose, kept from frame to frame.
pub struct InspectView {
    pub order: BlockOrder,
    pub filter: Option<BlockFilter>,
    /// Index into the zoom levels; `None` fits the pool into the space.
    pub zoom: Option<usize>,
    /// Show tables instead of pictures.
    pub blocks_as_table: bool,
    pub steps_as_table: bool,
    /// The face of the side panel.
    pub panel: Panel,
    tab: Tab,
    panels: PanelView,
    /// The search field, while it is open.
    pub(super) find: Option<Find>,
    pub(super) is_help_open: bool,
    timeline: TimelineView,
    pub(super) map: MapCache,
    pub(super) map_size: Vec2,
    listed: Vec<BlockId>,
    listed_revision: Option<u64>,
}

impl Default for InspectView {
    fn default() -> Self {
        InspectView {
            order: BlockOrder::Pool,
            filter: None,
            zoom: None,
            blocks_as_table: false,
            steps_as_table: false,
            panel: Panel::Details,
            tab: Tab::Steps,
            panels: PanelView::default(),
            find: None,
            is_help_open: false,
            timeline: TimelineView::default(),
            map: MapCache::default(),
            map_size: Vec2::ZERO,
            listed: Vec::new(),
            listed_revision: None,
        }
    }
}

impl InspectView {
    /// Shows a face of the panel, wherever the panel is.
    pub(super) fn show_panel(&mut self, panel: Panel) {
        self.panel = panel;
        self.tab = Tab::Panel(panel);
    }
}

/// Draws the workspace into what is left of `ui`.
pub fn inspect_ui(
    ui: &mut Ui,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let rect = ui.available_rect_before_wrap();
    ui.painter().rect_filled(rect, 0.0, theme.bg_app);
    let rect = rect.shrink(space::S);
    if model.is_empty() {
        empty_ui(ui, rect, model, theme, commands);
    } else {
        keys(ui, view, model, commands);
        let mut top = rect.top();
        top = strip(ui, rect, top, STRIP, theme, "Figures", |ui| kpi_strip_ui(ui, model, theme, commands));
        if model.history().num_not_shown() > 0 {
            top = strip(ui, rect, top, 30.0, theme, "Notice", |ui| not_shown_ui(ui, model, theme));
        }
        let body = Rect::from_min_max(pos2(rect.left(), top), rect.max);
        if rect.width() >= WIDE && rect.height() >= TALL {
            wide_ui(ui, body, view, model, theme, commands);
        } else {
            small_ui(ui, body, view, model, theme, commands);
        }
        help_ui(ui, &mut view.is_help_open, theme);
    }
    ui.allocate_rect(rect, Sense::hover());
}

fn strip(ui: &mut Ui, rect: Rect, top: f32, height: f32, theme: &Theme, name: &str, add: impl FnOnce(&mut Ui)) -> f32 {
    let strip = Rect::from_min_size(pos2(rect.left(), top), vec2(rect.width(), height));
    card_ui(ui, strip, theme, name, add);
    strip.bottom() + space::S
}

fn not_shown_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme) {
    let n = format::counted(model.history().num_not_shown(), "step");
    let text = format!("{n} not shown: the window read the engine's recording too late, or recording was off");
    ui.label(small(text, theme.warn));
}

fn wide_ui(
    ui: &mut Ui,
    body: Rect,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let side = Rect::from_min_max(pos2(body.right() - SIDE, body.top()), body.max);
    let left = Rect::from_min_max(body.min, pos2(side.left() - space::S, body.bottom()));
    let requests_height = (left.height() * 0.23).clamp(120.0, 210.0);
    let steps_height = (left.height() * 0.33).clamp(170.0, 320.0);
    let requests_top = left.bottom() - requests_height;
    let steps_top = requests_top - space::S - steps_height;
    let rows = |top: f32, bottom: f32| Rect::from_min_max(pos2(left.left(), top), pos2(left.right(), bottom));
    let num_before = commands.len();
    blocks_card(ui, rows(left.top(), steps_top - space::S), view, model, theme, commands);
    card_ui(ui, rows(steps_top, requests_top - space::S), theme, "Steps", |ui| {
        steps_ui(ui, view, model, theme, commands, true);
    });
    card_ui(ui, rows(requests_top, left.bottom()), theme, "Requests", |ui| {
        header_ui(ui, theme, "Requests", |_| {}, |ui| requests_controls(ui, model));
        request_table_ui(ui, model, theme, commands);
    });
    // What was picked in a picture is explained beside it.
    if commands[num_before..].iter().any(|c| matches!(c, InspectCommand::Select(_))) {
        view.panel = Panel::Details;
    }
    card_ui(ui, side, theme, "Panel", |ui| {
        header_row(ui, |ui| segmented(ui, theme, &mut view.panel, &Panel::CHOICES), |_| {});
        ui.add_space(space::XS);
        panel_ui(ui, view.panel, &mut view.panels, model, theme, commands);
    });
}

fn small_ui(
    ui: &mut Ui,
    body: Rect,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let split = body.top() + (body.height() * 0.5).round();
    blocks_card(ui, Rect::from_min_max(body.min, pos2(body.right(), split)), view, model, theme, commands);
    let below = Rect::from_min_max(pos2(body.left(), split + space::S), body.max);
    card_ui(ui, below, theme, "Below", |ui| {
        let mut tab = view.tab;
        let mut tabs = vec![
            (Tab::Steps, "Steps", "Tokens per step and a lane per request"),
            (Tab::Requests, "Requests", "Each request and why it waits"),
        ];
        tabs.extend(Panel::CHOICES.map(|(panel, name, hint)| (Tab::Panel(panel), name, hint)));
        match tab {
            Tab::Steps => {
                header_row(
                    ui,
                    |ui| {
                        segmented(ui, theme, &mut tab, &tabs);
                        if ui.available_width() >= 620.0 {
                            steps_legend(ui, theme);
                        }
                    },
                    |ui| steps_controls(ui, view, model),
                );
                steps_ui(ui, view, model, theme, commands, false);
            }
            Tab::Requests => {
                header_row(ui, |ui| segmented(ui, theme, &mut tab, &tabs), |ui| requests_controls(ui, model));
                request_table_ui(ui, model, theme, commands);
            }
            Tab::Panel(panel) => {
                header_row(ui, |ui| segmented(ui, theme, &mut tab, &tabs), |_| {});
                panel_ui(ui, panel, &mut view.panels, model, theme, commands);
            }
        }
        view.tab = tab;
    });
}

fn header_row(ui: &mut Ui, left: impl FnOnce(&mut Ui), right: impl FnOnce(&mut Ui)) {
    ui.horizontal(|ui| {
        ui.set_min_height(24.0);
        left(ui);
        ui.with_layout(Layout::right_to_left(Align::Center), right);
    });
}

fn blocks_card(
    ui: &mut Ui,
    rect: Rect,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    card_ui(ui, rect, theme, "Blocks", |ui| {
        let Some(map) = model.map() else {
            header_ui(ui, theme, "Blocks", |_| {}, |_| {});
            ui.label(small(
                "The blocks of this step are not known: steps before it were not recorded.",
                theme.text_weak,
            ));
            return;
        };
        let choice = MapChoice { order: view.order, filter: view.filter, zoom: view.zoom };
        view.map.refresh(ui, model, map, choice);
        let mut order = view.order;
        header_row(
            ui,
            |ui| {
                ui.label(super::paint::title_text(theme, "Blocks"));
                let orders = [
                    (BlockOrder::Pool, "Pool", "By physical id"),
                    (BlockOrder::Tables, "Block tables", "One row per request"),
                    (BlockOrder::Eviction, "Eviction", "Idle cached blocks, next victim first"),
                ];
                segmented(ui, theme, &mut order, &orders);
            },
            |ui| {
                blocks_controls(ui, view, model, theme);
                ui.add_space(space::M);
                if view.find.is_some() {
                    find_ui(ui, view, model, theme, commands);
                } else {
                    ui.add(egui::Label::new(small(totals_words(model, map), theme.text_weak)).truncate());
                }
            },
        );
        view.order = order;
        let body = ui.available_rect_before_wrap();
        let host_height = if host_strip::has_host(model, map) { host_strip::HEIGHT } else { 0.0 };
        let whole = Rect::from_min_max(body.min, pos2(body.right(), body.bottom() - 28.0));
        let body = Rect::from_min_max(whole.min, pos2(whole.right(), whole.bottom() - host_height));
        view.map_size = body.size();
        ui.scope_builder(UiBuilder::new().max_rect(body).id_salt("map body"), |ui| {
            if view.blocks_as_table {
                if view.listed_revision != Some(model.revision()) {
                    view.listed_revision = Some(model.revision());
                    view.listed = listed_blocks(map);
                }
                blocks_table_ui(ui, &view.listed, model, map, theme, commands);
            } else if view.order == BlockOrder::Tables {
                block_tables_ui(ui, &view.map.emphasis, model, theme, commands);
            } else {
                block_map_ui(ui, &mut view.map, choice, model, theme, commands);
            }
        });
        if host_height > 0.0 {
            let host = Rect::from_min_max(pos2(whole.left(), body.bottom()), whole.max);
            host_strip_ui(ui, host, model, map, theme, commands);
        }
        let legend = Rect::from_min_max(
            pos2(whole.left(), whole.bottom() + space::XS),
            pos2(whole.right(), whole.bottom() + 28.0),
        );
        ui.scope_builder(UiBuilder::new().max_rect(legend).id_salt("legend row"), |ui| {
            legend_ui(ui, &mut view.filter, model, map, theme);
        });
    });
}

/// Right to left: the last drawn stands leftmost.
fn blocks_controls(ui: &mut Ui, view: &mut InspectView, model: &InspectModel, theme: &Theme) {
    ui.spacing_mut().item_spacing.x = space::XS;
    let Some(map) = model.map() else { return };
    if quiet_button(ui, "CSV", "Copy all blocks that are not free as CSV").clicked() {
        ui.copy_text(words::blocks_csv(model, map));
    }
    quiet_toggle(ui, &mut view.blocks_as_table, "Table", "Show the blocks as a table");
    if view.blocks_as_table || view.order == BlockOrder::Tables {
        return;
    }
    let choice = MapChoice { order: view.order, filter: view.filter, zoom: view.zoom };
    let level = view.map.level_idx(choice, map, view.map_size);
    if quiet_button(ui, "Fit", "Show the whole pool (F)").clicked() {
        view.zoom = None;
    }
    if quiet_button(ui, "+", "Zoom in (W)").clicked() {
        view.zoom = Some(zoomed(level, 1));
    }
    if quiet_button(ui, "−", "Zoom out (S)").clicked() {
        view.zoom = Some(zoomed(level, -1));
    }
    if view.map_size.x >= 760.0 {
        ui.label(small(level_words(LEVELS[level]), theme.text_weak));
    }
}

fn steps_ui(
    ui: &mut Ui,
    view: &mut InspectView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
    with_header: bool,
) {
    if with_header {
        header_ui(ui, theme, "Steps", |ui| steps_legend(ui, theme), |ui| steps_controls(ui, view, model));
    }
    if view.steps_as_table {
        steps_table_ui(ui, model, theme, commands);
    } else {
        timeline_ui(ui, &mut view.timeline, model, theme, commands);
    }
}

fn steps_legend(ui: &mut Ui, theme: &Theme) {
    ui.spacing_mut().item_spacing.x = space::XS;
    ui.add_space(space::S);
    for (height, name) in [(11.0, "prefill"), (5.0, "decode"), (2.0, "waiting")] {
        let (rect, _) = ui.allocate_exact_size(vec2(12.0, 14.0), Sense::hover());
        let bar = Rect::from_center_size(rect.center(), vec2(10.0, height));
        ui.painter().rect_filled(bar, 0.0, theme.text_weak);
        ui.label(small(name, theme.text_weak));
        ui.add_space(space::XS);
    }
    for (mark, name) in [(Mark::Hit, "cache hit"), (Mark::Preempt, "preempted"), (Mark::Finish, "end")] {
        let (rect, _) = ui.allocate_exact_size(vec2(12.0, 14.0), Sense::hover());
        paint_mark(ui.painter(), mark, rect.center(), theme);
        ui.label(small(name, theme.text_weak));
        ui.add_space(space::XS);
    }
}

fn steps_controls(ui: &mut Ui, view: &mut InspectView, model: &InspectModel) {
    ui.spacing_mut().item_spacing.x = space::XS;
    if quiet_button(ui, "CSV", "Copy all steps of the history as CSV").clicked() {
        ui.copy_text(words::steps_csv(model.history().range(0, usize::MAX)));
    }
    quiet_toggle(ui, &mut view.steps_as_table, "Table", "Show the steps as a table");
    if !view.steps_as_table {
        if quiet_button(ui, "+", "Wider steps").clicked() {
            view.timeline.zoom(1);
        }
        if quiet_button(ui, "−", "Narrower steps").clicked() {
            view.timeline.zoom(-1);
        }
    }
}

fn requests_controls(ui: &mut Ui, model: &InspectModel) {
    if quiet_button(ui, "CSV", "Copy the requests as CSV").clicked() {
        ui.copy_text(words::requests_csv(model.rows()));
    }
}

/// Nothing was ever run: say so, and offer what can be done about it.
fn empty_ui(ui: &mut Ui, rect: Rect, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    card_ui(ui, rect, theme, "Inspect", |ui| {
        let height = 150.0;
        ui.vertical_centered(|ui| {
            ui.add_space(((ui.available_height() - height) * 0.42).max(0.0));
            let title = match model.snapshot().step {
                0 => "No step has run yet",
                _ => "No step has run since the window was opened",
            };
            ui.label(RichText::new(title).size(font_size::TITLE).color(theme.text_strong));
            ui.add_space(space::XS);
            let (text, button, command) = if model.has_pool() {
                (
                    "Start a chat, or run a demo: 4 chats that share one system prompt. \
                     Every step and every KV block then shows here.",
                    "Run the demo",
                    InspectCommand::RunDemo,
                )
            } else {
                ("Load a model to see its KV blocks and steps here.", "Open models", InspectCommand::OpenModels)
            };
            ui.scope(|ui| {
                ui.set_max_width(460.0);
                ui.label(RichText::new(text).color(theme.text_weak));
            });
            ui.add_space(space::M);
            let label = RichText::new(button).color(theme.on_accent);
            if ui.add(egui::Button::new(label).fill(theme.accent).min_size(vec2(140.0, 32.0))).clicked() {
                commands.push(command);
            }
            if model.has_pool() {
                ui.add_space(space::M);
                let blocks = format::counted(u64::from(model.snapshot().kv.total), "KV block");
                let tokens = u64::from(model.snapshot().kv.total) * u64::from(model.snapshot().block_size);
                ui.label(small(format!("{blocks} ready for {} tokens", format::count(tokens)), theme.text_weak));
            }
        });
    });
}
