//! The live dock: the engine at a glance beside any workspace. Every click leads to Inspect at that step.

use super::legend::owner_counts;
use super::paint::{Quads, describe, small, small_font, text_clipped, title_text};
use crate::app::format;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::requests::{RequestRow, RowState};
use crate::app::inspect::words;
use crate::app::theme::{Theme, mix, radius, space};
use crate::telemetry::RowKind;
use egui::{Align2, CornerRadius, Rect, Response, RichText, Sense, Ui, pos2, vec2};

/// Steps in the small timeline.
const NUM_STEPS: usize = 120;
/// Lanes listed before "and n more".
const MAX_LANES: usize = 8;

/// Draws the dock into `ui`, top down.
pub fn live_dock_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    ui.spacing_mut().item_spacing.y = 6.0;
    let kpis = model.kpis();
    if kpis.kv_total == 0 {
        ui.label(title_text(theme, "Live"));
        ui.label(small("No model is loaded.", theme.text_weak));
        return;
    }
    ui.horizontal(|ui| {
        ui.label(title_text(theme, "KV cache"));
        let used = format::percent(kpis.kv_used.into(), kpis.kv_total.into());
        let cached = format::percent(kpis.kv_cached.into(), kpis.kv_total.into());
        ui.label(small(format!("{used} used, {cached} cached"), theme.text_weak));
    });
    let kv = kv_bar_ui(ui, model, theme);
    open_on_click(&kv, model, commands);
    ui.add_space(space::XS);
    if model.is_empty() {
        let text = match model.snapshot().step {
            0 => "Idle. Nothing has run yet.".into(),
            num_steps => format!("Idle. {} ran before; the next ones show here.", format::counted(num_steps, "step")),
        };
        ui.add(egui::Label::new(small(text, theme.text_weak)).wrap());
        return;
    }
    ui.horizontal(|ui| {
        let title = if model.is_engine_idle() { "Idle" } else { "Batch" };
        ui.label(title_text(theme, title));
        ui.label(small(format!("last {NUM_STEPS} steps"), theme.text_weak));
    });
    steps_ui(ui, model, theme, commands);
    step_words_ui(ui, model, theme, commands);
    lanes_ui(ui, model, theme, commands);
}

fn open_on_click(response: &Response, model: &InspectModel, commands: &mut Vec<InspectCommand>) {
    if response.clicked()
        && let Some(step) = model.step()
    {
        if !model.is_live() {
            commands.push(InspectCommand::GoToStep(step));
        }
        commands.push(InspectCommand::OpenInspect);
    }
}

/// Used by owner, shared, cached, free, as one bar.
fn kv_bar_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme) -> Response {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 14.0), Sense::click());
    ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_active);
    let Some(map) = model.map() else {
        describe(&response, "KV cache: not known at this step");
        return response;
    };
    let counts = map.counts();
    let total = counts.total().max(1) as f32;
    let mut quads = Quads::default();
    let mut x = rect.left();
    let mut part = |n: u32, color, is_hollow: bool| {
        let width = n as f32 / total * rect.width();
        let part = Rect::from_min_max(pos2(x, rect.top()), pos2(x + width, rect.bottom()));
        if is_hollow {
            quads.outline(part, 1.0, color);
        } else {
            quads.rect(part, color);
        }
        x += width;
    };
    for (owner, n) in owner_counts(model, map) {
        part(n, theme.owner_color(owner.hue), false);
    }
    part(counts.shared, theme.text_strong, false);
    if counts.cached_idle > 0 {
        part(counts.cached_idle, theme.text_weak, true);
    }
    quads.paint(ui.painter());
    describe(&response, &words::map_sentence(map));
    response.on_hover_text("By chat, then shared (white), cached (hollow), free. Click to open Inspect")
}

/// The newest steps as stacked bars.
fn steps_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 44.0), Sense::click());
    ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_sunken);
    let history = model.history();
    let end = history.len();
    let first = end.saturating_sub(NUM_STEPS);
    let max = history.range(first, end).map(|e| e.record.num_tokens()).max().unwrap_or(1).max(4) as f32;
    let column = rect.width() / NUM_STEPS as f32;
    let left = rect.right() - (end - first) as f32 * column;
    let mut quads = Quads::default();
    for (i, entry) in history.range(first, end).enumerate() {
        let mut bottom = rect.bottom() - 1.0;
        let x = left + i as f32 * column;
        // Decodes below, chunks above, as in the timeline.
        for is_decode in [true, false] {
            for row in entry.record.rows.iter().filter(|r| (r.kind == RowKind::Decode) == is_decode) {
                let plain = theme.owner_color(model.hue_of(row.request));
                let least = (8.0 / entry.record.rows.len() as f32).min(1.5);
                let height = (row.num_tokens as f32 / max * (rect.height() - 4.0)).max(least);
                let top = (bottom - height).max(rect.top() + 1.0);
                let color = if is_decode { plain } else { theme.with_recency(plain, 0) };
                let part = Rect::from_min_max(pos2(x, top), pos2(x + column, bottom));
                quads.rect(part, color);
                bottom = top;
            }
        }
    }
    quads.paint(ui.painter());
    describe(&response, &super::timeline::timeline_sentence(model));
    if let Some(pos) = response.interact_pointer_pos().filter(|_| response.clicked()) {
        let idx = first + ((pos.x - left).max(0.0) / column) as usize;
        if let Some(entry) = history.get(idx.min(end.saturating_sub(1))) {
            commands.push(InspectCommand::GoToStep(entry.record.step));
            commands.push(InspectCommand::OpenInspect);
        }
    }
    response.on_hover_text("Tokens per step. Click to inspect that step");
}

/// The current step in words, and why someone waits.
fn step_words_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let Some(entry) = model.entry() else { return };
    let name = |id| model.requests().label(id);
    let text = format!("Step {}: {}", format::count(entry.record.step), words::batch_words(&entry.record, name));
    let label = egui::Label::new(RichText::new(text).color(theme.text)).wrap().sense(Sense::click());
    let response = ui.add(label);
    open_on_click(&response, model, commands);
    if let Some(waiting) = words::waiting_words(&entry.record, name) {
        let label = egui::Label::new(RichText::new(waiting).color(theme.warn)).wrap().sense(Sense::click());
        let response = ui.add(label);
        open_on_click(&response, model, commands);
    }
}

fn lanes_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let alive: Vec<&RequestRow> = model.rows().iter().filter(|r| !matches!(r.state, RowState::Finished(_))).collect();
    for row in alive.iter().take(MAX_LANES) {
        lane_ui(ui, model, theme, row, commands);
    }
    if alive.len() > MAX_LANES {
        ui.label(small(format!("and {} more", alive.len() - MAX_LANES), theme.text_weak));
    }
}

/// One running or waiting request: dot, name, what it did lately, rate.
fn lane_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, row: &RequestRow, commands: &mut Vec<InspectCommand>) {
    const STEPS: usize = 40;
    let height = 22.0;
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), height), Sense::click());
    if response.hovered() {
        ui.painter().rect_filled(rect, CornerRadius::same(radius::SMALL), theme.bg_hover);
    }
    let color = theme.owner_color(model.hue_of(row.id));
    let y = rect.center().y;
    ui.painter().circle_filled(pos2(rect.left() + 8.0, y), 4.0, color);
    let strip_width = (rect.width() * 0.3).min(110.0);
    let strip =
        Rect::from_min_max(pos2(rect.right() - 66.0 - strip_width, y - 6.0), pos2(rect.right() - 66.0, y + 6.0));
    let label_width = strip.left() - rect.left() - 26.0;
    text_clipped(ui.painter(), pos2(rect.left() + 18.0, y), Align2::LEFT_CENTER, &row.label, label_width, theme.text);
    let history = model.history();
    let end = model.step().and_then(|s| history.idx_at(s)).map_or(0, |i| i + 1);
    let column = strip.width() / STEPS as f32;
    let mut quads = Quads::default();
    for (i, entry) in history.range(end.saturating_sub(STEPS), end).rev().enumerate() {
        let x = strip.right() - (i + 1) as f32 * column;
        let (half, ink) = match entry.record.rows.iter().find(|r| r.request == row.id).map(|r| r.kind) {
            Some(RowKind::Decode) => (2.0, color),
            Some(_) => (5.0, theme.with_recency(color, 0)),
            None if entry.record.waiting.iter().any(|(id, _)| *id == row.id) => {
                (0.75, mix(theme.text_faint, theme.bg_panel, 0.2))
            }
            None => continue,
        };
        quads.rect(Rect::from_min_max(pos2(x, y - half), pos2(x + column, y + half)), ink);
    }
    quads.paint(ui.painter());
    let text = match row.state {
        RowState::Decoding | RowState::Idle => format!("{} tok/s", format::rate(row.tokens_per_s)),
        _ => words::state_words(&row.state),
    };
    let at = pos2(rect.right() - 4.0, y);
    ui.painter().text(at, Align2::RIGHT_CENTER, &text, small_font(), theme.text_weak);
    let words = format!("{}: {text}", row.label);
    response.widget_info(|| egui::WidgetInfo::labeled(egui::Role::Button, true, &words));
    if response.clicked() {
        commands.push(InspectCommand::Select(Selection::Request(row.id)));
        commands.push(InspectCommand::OpenInspect);
    }
}
