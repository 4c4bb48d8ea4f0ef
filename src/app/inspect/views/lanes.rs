//! One lane per request: waiting, prefill, decode, preemption, cache hit, end.

use super::block_map::hover_line;
use super::paint::{Mark, Quads, describe, paint_mark, text_clipped};
use super::timeline::{GUTTER, Plot, step_hover};
use crate::app::format;
use crate::app::inspect::history::{LaneCell, LanePhase, lane_cells};
use crate::app::inspect::model::{InspectCommand, Selection};
use crate::app::theme::{mix, space};
use crate::ids::RequestId;
use egui::{Align, Align2, Layout, Rect, Response, ScrollArea, Sense, Ui, UiBuilder, pos2, vec2};
use rustc_hash::FxHashMap;

const LANE: f32 = 18.0;

/// The requests that live in the visible steps: those still alive first, then the last that ended.
fn visible_requests(plot: &Plot<'_>) -> Vec<RequestId> {
    let history = plot.model.history();
    let step = |idx: usize| history.get(idx).map_or(0, |e| e.record.step);
    let (first, last) = (step(plot.first), step(plot.end.saturating_sub(1)));
    let mut found: Vec<(bool, u64, RequestId)> = plot
        .model
        .requests()
        .iter()
        .filter(|(_, log)| log.first_step <= last && log.last_step >= first)
        .map(|(id, log)| {
            let ended = log.is_finished_at(last);
            (ended, if ended { u64::MAX - log.last_step } else { 0 }, id)
        })
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, _, id)| id).collect()
}

/// All lanes, scrolling, in `rect`.
pub fn lanes_ui(ui: &mut Ui, plot: &Plot<'_>, rect: Rect, commands: &mut Vec<InspectCommand>) {
    let requests = visible_requests(plot);
    let builder = UiBuilder::new().max_rect(rect).id_salt("lanes").layout(Layout::top_down(Align::Min));
    ui.scope_builder(builder, |ui| {
        ui.shrink_clip_rect(rect);
        ScrollArea::vertical().id_salt("lanes").auto_shrink(false).show_viewport(ui, |ui, visible| {
            let size = vec2(rect.width(), requests.len() as f32 * LANE);
            let (area, response) = ui.allocate_exact_size(size, Sense::click_and_drag());
            describe(&response, &format!("Lanes of {}", format::counted(requests.len() as u64, "request")));
            let first = (visible.top().max(0.0) / LANE) as usize;
            let end = ((visible.bottom().max(0.0) / LANE).ceil() as usize).min(requests.len());
            let shown = &requests[first.min(end)..end];
            paint_lanes(ui, plot, area.top() + first as f32 * LANE, shown);
            interact(ui, plot, area, &response, &requests, commands);
        });
    });
}

fn paint_lanes(ui: &Ui, plot: &Plot<'_>, top: f32, shown: &[RequestId]) {
    let theme = plot.theme;
    let mut lane_of: FxHashMap<RequestId, usize> = FxHashMap::default();
    for (lane, &request) in shown.iter().enumerate() {
        lane_of.insert(request, lane);
        let owner = plot.model.owner_of(request);
        let y = top + (lane as f32 + 0.5) * LANE;
        let left = plot.left - GUTTER;
        if plot.model.selection() == Some(Selection::Request(request)) {
            let row = Rect::from_min_max(pos2(left, y - LANE / 2.0), pos2(plot.right, y + LANE / 2.0));
            ui.painter().rect_filled(row, 3.0, theme.accent_bg);
        }
        ui.painter().circle_filled(pos2(left + 5.0, y), 4.0, theme.owner_color(owner.hue));
        let at = pos2(left + 14.0, y);
        let label = plot.model.requests().label(request);
        text_clipped(ui.painter(), at, Align2::LEFT_CENTER, &label, GUTTER - 14.0 - space::S, theme.text);
    }
    let colors: Vec<_> = shown.iter().map(|r| theme.owner_color(plot.model.hue_of(*r))).collect();
    let mut quads = Quads::default();
    let mut marks = Vec::new();
    for (idx, entry) in plot.entries() {
        let x = plot.x_of(idx);
        lane_cells(&entry.record, |request, cell| {
            let Some(&lane) = lane_of.get(&request) else { return };
            let y = top + (lane as f32 + 0.5) * LANE;
            phase(&mut quads, plot, x, y, cell.phase, colors[lane]);
            push_marks(&mut marks, pos2(x, y), plot.column, cell);
        });
    }
    quads.paint(ui.painter());
    for (mark, at) in marks {
        paint_mark(ui.painter(), mark, at, theme);
    }
}

/// Height says what happened: waiting a hairline, decode half, prefill whole.
fn phase(quads: &mut Quads, plot: &Plot<'_>, x: f32, y: f32, phase: Option<LanePhase>, color: egui::Color32) {
    let (half, color) = match phase {
        Some(LanePhase::Waiting) => (1.0, plot.theme.text_faint),
        Some(LanePhase::Decode) => (2.5, color),
        Some(LanePhase::Prefill) => (6.0, plot.theme.with_recency(color, 0)),
        None => return,
    };
    // Waiting and decode run through; chunks stand apart.
    let width = if phase == Some(LanePhase::Prefill) && plot.column >= 4.0 { plot.column - 1.0 } else { plot.column };
    let color = if phase == Some(LanePhase::Waiting) { mix(color, plot.theme.bg_panel, 0.2) } else { color };
    quads.rect(Rect::from_min_max(pos2(x, y - half), pos2(x + width, y + half)), color);
}

/// A hit stands before its chunk, the others in their column.
fn push_marks(marks: &mut Vec<(Mark, egui::Pos2)>, at: egui::Pos2, column: f32, cell: LaneCell) {
    let middle = at + vec2(column / 2.0, 0.0);
    for (on, mark, at) in [
        (cell.is_hit, Mark::Hit, at - vec2(6.0, 0.0)),
        (cell.is_preempted, Mark::Preempt, middle),
        (cell.is_finished, Mark::Finish, middle),
    ] {
        if on {
            marks.push((mark, at));
        }
    }
}

/// A click on a lane pins its request, a drag moves the cursor, hovering answers.
fn interact(
    ui: &Ui,
    plot: &Plot<'_>,
    area: Rect,
    response: &Response,
    requests: &[RequestId],
    commands: &mut Vec<InspectCommand>,
) {
    let Some(pos) = response.interact_pointer_pos().or(response.hover_pos()) else { return };
    let lane = ((pos.y - area.top()) / LANE).max(0.0) as usize;
    let entry = plot.idx_at(pos.x.min(plot.right - 0.5)).and_then(|i| plot.model.history().get(i));
    if response.dragged() {
        if let Some(entry) = entry.filter(|_| pos.x >= plot.left) {
            commands.push(InspectCommand::GoToStep(entry.record.step));
        }
        return;
    }
    let Some(&request) = requests.get(lane) else { return };
    if response.clicked() {
        let selection = Selection::Request(request);
        commands.push(if plot.model.selection() == Some(selection) {
            InspectCommand::ClearSelection
        } else {
            InspectCommand::Select(selection)
        });
    } else if response.hovered() {
        let label = plot.model.requests().label(request);
        let line = match entry.filter(|_| pos.x >= plot.left) {
            Some(entry) => format!("{label} · {}", step_hover(plot, &entry.record)),
            None => format!("{label} · request {request}"),
        };
        hover_line(ui, response, &line);
    }
}
