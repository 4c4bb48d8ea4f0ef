//! Steps over time: tokens per step, a density overview of the whole history, the cursor. Lanes are in [`super::lanes`].
//!
//! Guarantees: work per frame depends on the columns visible; the overview reads running totals, one pair per column.

use super::block_map::hover_line;
use super::lanes::lanes_ui;
use super::paint::{Quads, describe, small_font, text_clipped};
use crate::app::format;
use crate::app::inspect::history::Entry;
use crate::app::inspect::model::{InspectCommand, InspectModel};
use crate::app::inspect::words;
use crate::app::theme::{Theme, mix, radius};
use crate::telemetry::{RowKind, StepRecord};
use egui::{Align2, CornerRadius, CursorIcon, Rect, Sense, Shape, Stroke, StrokeKind, Ui, pos2, vec2};

/// Left of the plot: labels of lanes and of the axis.
pub const GUTTER: f32 = 120.0;
const OVERVIEW: f32 = 22.0;
const GAP: f32 = 6.0;
/// Widths of a step's column that zoom goes through, in points.
const COLUMNS: [f32; 7] = [2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 18.0];

/// What the timeline keeps from frame to frame.
#[derive(Clone, Copy, Debug)]
pub struct TimelineView {
    column_idx: usize,
    /// The newest step shown while the view is held; `None` follows the newest of all.
    end_step: Option<u64>,
}

impl Default for TimelineView {
    fn default() -> Self {
        TimelineView { column_idx: 3, end_step: None }
    }
}

impl TimelineView {
    pub fn zoom(&mut self, by: i32) {
        self.column_idx = self.column_idx.saturating_add_signed(by as isize).min(COLUMNS.len() - 1);
    }

    /// Columns that fit into `width`.
    pub fn num_columns(&self, width: f32) -> usize {
        ((width / COLUMNS[self.column_idx]) as usize).max(1)
    }
}

/// The visible part of the history and where it is drawn.
pub struct Plot<'a> {
    pub model: &'a InspectModel,
    pub theme: &'a Theme,
    /// Indices into the history: `first..end`.
    pub first: usize,
    pub end: usize,
    pub column: f32,
    pub left: f32,
    pub right: f32,
}

impl<'a> Plot<'a> {
    fn new(view: &mut TimelineView, model: &'a InspectModel, theme: &'a Theme, rect: Rect) -> Plot<'a> {
        let (left, right) = (rect.left() + GUTTER, rect.right());
        let column = COLUMNS[view.column_idx];
        let num_columns = view.num_columns(right - left);
        let len = model.history().len();
        let cursor = model.step().and_then(|s| model.history().idx_at(s)).unwrap_or(0);
        let mut end = match view.end_step.filter(|_| !model.is_live()) {
            Some(step) => model.history().idx_at(step).map_or(len, |i| i + 1),
            None => len,
        };
        // The cursor stays in sight.
        if cursor >= end {
            end = cursor + 1;
        } else if cursor + num_columns < end {
            end = cursor + num_columns;
        }
        let end = end.clamp(num_columns.min(len), len);
        view.end_step = end.checked_sub(1).and_then(|i| model.history().get(i)).map(|e| e.record.step);
        Plot { model, theme, first: end.saturating_sub(num_columns), end, column, left, right }
    }

    /// Left edge of the column of entry `idx`.
    pub fn x_of(&self, idx: usize) -> f32 {
        self.right - (self.end as f32 - idx as f32) * self.column
    }

    pub fn idx_at(&self, x: f32) -> Option<usize> {
        let back = ((self.right - x) / self.column).ceil() as i64;
        let idx = self.end as i64 - back.max(1);
        (idx >= self.first as i64).then_some(idx as usize)
    }

    pub fn entries(&self) -> impl Iterator<Item = (usize, &'a Entry)> {
        let first = self.first;
        self.model.history().range(first, self.end).enumerate().map(move |(i, e)| (first + i, e))
    }
}

/// Bars, lanes, overview, filling what is left of `ui`.
pub fn timeline_ui(
    ui: &mut Ui,
    view: &mut TimelineView,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let rect = ui.available_rect_before_wrap();
    let plot = Plot::new(view, model, theme, rect);
    let bars_height = ((rect.height() - OVERVIEW) * 0.42).clamp(40.0, 110.0);
    let bars = Rect::from_min_max(rect.min, pos2(rect.right(), rect.top() + bars_height));
    let overview = Rect::from_min_max(pos2(rect.left(), rect.bottom() - OVERVIEW), rect.max);
    let lanes = Rect::from_min_max(pos2(rect.left(), bars.bottom() + GAP), pos2(rect.right(), overview.top() - GAP));
    bars_ui(ui, &plot, bars, commands);
    if lanes.height() >= 16.0 {
        lanes_ui(ui, &plot, lanes, commands);
    }
    overview_ui(ui, &plot, overview, commands);
    cursor_ui(ui, &plot, bars.top(), lanes.bottom().max(bars.bottom()));
    ui.allocate_rect(rect, Sense::hover());
    wheel(ui, view, rect, commands);
}

/// Sideways wheel moves through time, with Ctrl it zooms.
fn wheel(ui: &Ui, view: &mut TimelineView, rect: Rect, commands: &mut Vec<InspectCommand>) {
    if !ui.rect_contains_pointer(rect) {
        return;
    }
    let (sideways, zoom) = ui.input(|i| (i.smooth_scroll_delta().x, i.zoom_delta()));
    if zoom > 1.02 {
        view.zoom(1);
    } else if zoom < 0.98 {
        view.zoom(-1);
    }
    if sideways.abs() >= 1.0 {
        commands.push(InspectCommand::StepBy((-sideways / COLUMNS[view.column_idx]).round() as i64));
    }
}

fn bars_ui(ui: &mut Ui, plot: &Plot<'_>, rect: Rect, commands: &mut Vec<InspectCommand>) {
    let area = Rect::from_min_max(pos2(plot.left, rect.top() + 4.0), pos2(plot.right, rect.bottom()));
    let tallest = plot.entries().map(|(_, e)| e.record.num_tokens()).max().unwrap_or(0);
    let max = axis_max(tallest);
    axis(ui, plot, area, max);
    let mut quads = Quads::default();
    for (idx, entry) in plot.entries() {
        let x = plot.x_of(idx);
        let column = Rect::from_min_max(pos2(x, area.top()), pos2(x + plot.column, area.bottom()));
        bar(&mut quads, plot, column, &entry.record, max);
        if entry.gap_before > 0 {
            let line = Rect::from_min_size(pos2(x - 1.0, area.top()), vec2(1.5, area.height()));
            quads.rect(line, plot.theme.warn);
        }
    }
    quads.paint(&ui.painter_at(area.expand(1.0)));
    scrub(ui, plot, area, "tokens per step", commands);
}

/// One step: decodes below, chunks of prompts above, each in its owner's hue.
fn bar(quads: &mut Quads, plot: &Plot<'_>, column: Rect, record: &StepRecord, max: u32) {
    let scale = column.height() / max as f32;
    let mut bottom = column.bottom();
    // Decodes run through, chunks stand apart.
    let apart = if plot.column >= 4.0 { 1.0 } else { 0.0 };
    let mut part = |request, num_tokens: u32, min: f32, age: u64| {
        let plain = plot.theme.owner_color(plot.model.hue_of(request));
        let height = (num_tokens as f32 * scale).max(min);
        let top = (bottom - height).max(column.top());
        let gap = if age == 0 { apart } else { 0.0 };
        quads.rect(
            Rect::from_min_max(pos2(column.left(), top), pos2(column.right() - gap, bottom)),
            plot.theme.with_recency(plain, age),
        );
        bottom = top;
    };
    // Small parts stay visible beside a large chunk, all of them together within a few points.
    let num_decode = record.num_decode();
    let num_chunks = record.rows.len() as u32 - num_decode;
    for row in record.rows.iter().filter(|r| r.kind == RowKind::Decode) {
        part(row.request, row.num_tokens, (8.0 / num_decode as f32).min(1.5), u64::MAX);
    }
    for row in record.rows.iter().filter(|r| r.kind != RowKind::Decode) {
        part(row.request, row.num_tokens, (9.0 / num_chunks as f32).min(3.0), 0);
    }
}

/// The axis ends at a power of two, so that it does not jump at every step.
fn axis_max(tallest: u32) -> u32 {
    tallest.max(4).checked_next_power_of_two().unwrap_or(u32::MAX)
}

fn axis(ui: &Ui, plot: &Plot<'_>, area: Rect, max: u32) {
    let painter = ui.painter();
    let theme = plot.theme;
    for (share, value) in [(0.0, 0), (0.5, max / 2), (1.0, max)] {
        let y = (area.bottom() - share * area.height()).round() + 0.5;
        painter.hline(area.x_range(), y, Stroke::new(1.0, theme.border));
        let at = pos2(area.left() - 6.0, y.clamp(area.top() + 2.0, area.bottom() - 5.0));
        painter.text(at, Align2::RIGHT_CENTER, format::count(u64::from(value)), small_font(), theme.text_weak);
    }
    let title = pos2(area.left() - GUTTER, area.center().y - 7.0);
    text_clipped(painter, title, Align2::LEFT_CENTER, "tokens/step", GUTTER - 36.0, theme.text_weak);
    let budget = plot.model.entry().map_or(0, |e| e.record.budget);
    if budget == 0 {
        return;
    }
    let label = format!("budget {}", format::count(u64::from(budget)));
    let at = title + vec2(0.0, 14.0);
    text_clipped(painter, at, Align2::LEFT_CENTER, &label, GUTTER - 36.0, theme.text_weak);
    if budget <= max {
        let y = area.bottom() - budget as f32 / max as f32 * area.height();
        let line = [pos2(area.left(), y), pos2(area.right(), y)];
        painter.extend(Shape::dashed_line(&line, Stroke::new(1.0, theme.text_weak), 4.0, 4.0));
    }
}

/// Dragging over `area` moves the cursor; hovering answers in one line.
fn scrub(ui: &mut Ui, plot: &Plot<'_>, area: Rect, name: &str, commands: &mut Vec<InspectCommand>) {
    let response = ui.interact(area, ui.scope_id().with(name), Sense::click_and_drag());
    let response = response.on_hover_cursor(CursorIcon::ResizeHorizontal);
    describe(&response, &timeline_sentence(plot.model));
    let Some(pos) = response.interact_pointer_pos().or(response.hover_pos()) else { return };
    let x = pos.x.clamp(plot.left, plot.right - 0.5);
    let Some(entry) = plot.idx_at(x).and_then(|i| plot.model.history().get(i)) else { return };
    if response.clicked() || response.dragged() {
        commands.push(InspectCommand::GoToStep(entry.record.step));
    } else if response.hovered() {
        hover_line(ui, &response, &step_hover(plot, &entry.record));
    }
}

pub fn step_hover(plot: &Plot<'_>, record: &StepRecord) -> String {
    let name = |id| plot.model.requests().label(id);
    format!("Step {} · {}", format::count(record.step), words::batch_words(record, name))
}

fn overview_ui(ui: &mut Ui, plot: &Plot<'_>, rect: Rect, commands: &mut Vec<InspectCommand>) {
    let (theme, history) = (plot.theme, plot.model.history());
    let area = Rect::from_min_max(pos2(plot.left, rect.top()), pos2(plot.right, rect.bottom()));
    ui.painter().rect_filled(area, CornerRadius::same(radius::SMALL), theme.bg_sunken);
    let len = history.len().max(1);
    density(ui, plot, area);
    let x_of = |idx: usize| area.left() + idx as f32 / len as f32 * area.width();
    let window = Rect::from_x_y_ranges(x_of(plot.first)..=x_of(plot.end).max(x_of(plot.first) + 4.0), area.y_range());
    let stroke = Stroke::new(1.0, theme.text_weak);
    ui.painter().rect(window, 3.0, theme.text_weak.gamma_multiply(0.12), stroke, StrokeKind::Inside);
    if let Some(idx) = plot.model.step().and_then(|s| history.idx_at(s)) {
        let x = x_of(idx) + 0.5 * area.width() / len as f32;
        ui.painter().vline(x, area.y_range(), Stroke::new(2.0, theme.accent));
    }
    text_clipped(
        ui.painter(),
        pos2(rect.left(), area.center().y),
        Align2::LEFT_CENTER,
        &behind_words(plot.model),
        GUTTER - 6.0,
        theme.text_weak,
    );
    let response = ui.interact(area, ui.scope_id().with("history"), Sense::click_and_drag());
    describe(&response, &format!("History of {}", format::counted(history.len() as u64, "step")));
    if let Some(pos) = response.interact_pointer_pos().filter(|_| response.clicked() || response.dragged()) {
        let share = ((pos.x - area.left()) / area.width()).clamp(0.0, 1.0);
        if let Some(entry) = history.get(((share * len as f32) as usize).min(len - 1)) {
            commands.push(InspectCommand::GoToStep(entry.record.step));
        }
    }
}

/// How far the step shown is behind the newest: "1,240 steps, live" or "8.2 s ago".
fn behind_words(model: &InspectModel) -> String {
    let newest = model.history().len().checked_sub(1).and_then(|i| model.history().get(i));
    match newest {
        Some(newest) if !model.is_live() => {
            format!("{} ago", format::duration_us(newest.end_us().saturating_sub(model.now_us())))
        }
        _ => format::counted(model.history().len() as u64, "step"),
    }
}

/// Tokens per step over the whole history, one bar per two points.
fn density(ui: &Ui, plot: &Plot<'_>, area: Rect) {
    let history = plot.model.history();
    let len = history.len();
    let num = ((area.width() / 2.0) as usize).max(1);
    let at = |i: usize| history.get(i).map_or(0, |e| e.cum_tokens);
    let before_first = history.get(0).map_or(0, |e| e.cum_tokens - u64::from(e.record.num_tokens()));
    let mean = |i: usize| {
        let (from, to) = (i * len / num, (i + 1) * len / num);
        let to = to.max(from + 1).min(len);
        let before = if from == 0 { before_first } else { at(from - 1) };
        (at(to - 1) - before) as f32 / (to - from) as f32
    };
    if len == 0 {
        return;
    }
    let means: Vec<f32> = (0..num).map(mean).collect();
    let max = means.iter().copied().fold(1.0, f32::max);
    let color = mix(plot.theme.bg_sunken, plot.theme.text_weak, 0.75);
    let mut quads = Quads::default();
    for (i, mean) in means.iter().enumerate() {
        // The root keeps decode-only stretches visible beside prompts.
        let height = (mean / max).sqrt() * (area.height() - 4.0);
        let min = pos2(area.left() + i as f32 * area.width() / num as f32, area.bottom() - 2.0 - height);
        quads.rect(Rect::from_min_size(min, vec2(area.width() / num as f32, height)), color);
    }
    quads.paint(ui.painter());
}

fn cursor_ui(ui: &Ui, plot: &Plot<'_>, top: f32, bottom: f32) {
    let Some(step) = plot.model.step() else { return };
    let Some(idx) = plot.model.history().idx_at(step).filter(|i| (plot.first..plot.end).contains(i)) else { return };
    let x = plot.x_of(idx) + plot.column / 2.0;
    let color = plot.theme.accent;
    let width = if plot.model.is_live() { 1.0 } else { 1.5 };
    ui.painter().vline(x, top..=bottom, Stroke::new(width, color));
    if plot.model.is_live() {
        return;
    }
    let text = format::count(step);
    let galley = ui.painter().layout_no_wrap(text, small_font(), plot.theme.on_accent);
    let size = galley.size() + vec2(8.0, 2.0);
    let left = (x - size.x / 2.0).clamp(plot.left, (plot.right - size.x).max(plot.left));
    let chip = Rect::from_min_size(pos2(left, top - 4.0), size);
    ui.painter().rect_filled(chip, CornerRadius::same(radius::SMALL), color);
    ui.painter().galley(chip.min + vec2(4.0, 1.0), galley, plot.theme.on_accent);
}

/// The timeline's accessible name: the step shown, in words.
pub fn timeline_sentence(model: &InspectModel) -> String {
    match model.entry() {
        Some(entry) => words::step_sentence(&entry.record, |id| model.requests().label(id)),
        None => "No step was recorded".to_owned(),
    }
}
