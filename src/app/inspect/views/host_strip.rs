//! Host memory as a strip below the map: blocks of preempted requests that wait there, and cached blocks moved out of
//! the pool. Drawn only where the engine has such memory.

use super::block_map::hover_line;
use super::paint::{Quads, describe, small_font, text_clipped};
use crate::app::format;
use crate::app::inspect::host::{HostCell, HostMap};
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::words;
use crate::app::theme::{RECENT_STEPS, Theme, mix, radius};
use egui::{Align2, Color32, CornerRadius, Pos2, Rect, Sense, Ui, pos2, vec2};

pub const HEIGHT: f32 = 26.0;
const LABEL: f32 = 196.0;
/// Narrower places are drawn as one bar, sorted by what they hold.
const MIN_CELL: f32 = 4.0;
const MAX_CELL: f32 = 14.0;

/// Whether the step shown has anything to draw here.
pub fn has_host(model: &InspectModel, map: &BlockMap) -> bool {
    num_places(model, map) > 0
}

fn num_places(model: &InspectModel, map: &BlockMap) -> u32 {
    let told = model.entry().map_or(0, |e| e.record.kv.host_total).max(model.snapshot().kv.host_total);
    told.max(map.host().end())
}

/// One line: what is there in words, then a cell per place.
pub fn host_strip_ui(
    ui: &mut Ui,
    rect: Rect,
    model: &InspectModel,
    map: &BlockMap,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let num = num_places(model, map);
    let response = ui.interact(rect, ui.scope_id().with("host memory"), Sense::click());
    describe(&response, &words::host_sentence(model, map, num));
    let label =
        format!("Host memory: {} of {}", format::count(map.host().len() as u64), format::counted(num.into(), "place"));
    let at = pos2(rect.left(), rect.center().y);
    text_clipped(ui.painter(), at, Align2::LEFT_CENTER, &label, LABEL - 8.0, theme.text_weak);
    let strip =
        Rect::from_min_max(pos2(rect.left() + LABEL, rect.top() + 4.0), pos2(rect.right(), rect.bottom() - 4.0));
    let cell = (strip.width() / num.max(1) as f32).min(MAX_CELL);
    let scene = Scene { model, map, theme, strip, cell };
    if cell >= MIN_CELL {
        scene.cells(ui, num);
    } else {
        scene.bar(ui, num);
    }
    let under = response.hover_pos().and_then(|pos| scene.place_at(pos, num));
    match under {
        Some((host, held)) => {
            hover_line(ui, &response, &words::host_line(model, map, host, held));
            if response.clicked()
                && let Some(owner) = held.and_then(|c| c.request)
            {
                commands.push(InspectCommand::Select(Selection::Request(owner)));
            }
        }
        None if response.hovered() => hover_line(ui, &response, &words::host_sentence(model, map, num)),
        None => {}
    }
}

struct Scene<'a> {
    model: &'a InspectModel,
    map: &'a BlockMap,
    theme: &'a Theme,
    strip: Rect,
    cell: f32,
}

impl Scene<'_> {
    fn host(&self) -> &HostMap {
        self.map.host()
    }

    fn color(&self, cell: &HostCell) -> Color32 {
        let plain = match cell.owner {
            Some(owner) => self.theme.owner_color(self.model.hue_of(owner)),
            None => self.theme.text_weak,
        };
        let age = self.map.step.saturating_sub(u64::from(cell.since_step)).min(RECENT_STEPS);
        let color = self.theme.with_recency(plain, age);
        let is_lit = match self.model.selection() {
            Some(Selection::Request(request)) => cell.request == Some(request),
            Some(Selection::Block(_)) | None => true,
        };
        if is_lit { color } else { mix(self.theme.bg_sunken, color, 0.3) }
    }

    fn rect_of(&self, host: u32) -> Rect {
        let left = (self.strip.left() + host as f32 * self.cell).round();
        let side = self.cell.min(self.strip.height()) - 1.0;
        let top = (self.strip.center().y - side / 2.0).round();
        Rect::from_min_size(pos2(left, top), vec2(self.cell - 1.0, side))
    }

    /// A cell per place: filled for a preempted request, hollow for the cache, a dot where it is free.
    fn cells(&self, ui: &Ui, num: u32) {
        let mut quads = Quads::default();
        for host in 0..num {
            let rect = self.rect_of(host);
            match self.host().get(host) {
                Some(cell) if cell.request.is_some() => quads.rect(rect, self.color(cell)),
                Some(cell) => quads.outline(rect, 1.0, self.color(cell)),
                None => quads.rect(Rect::from_center_size(rect.center(), vec2(2.0, 2.0)), self.theme.text_faint),
            }
        }
        quads.paint(ui.painter());
    }

    /// All places as one bar: waiting requests, then the cache, then what is free.
    fn bar(&self, ui: &Ui, num: u32) {
        ui.painter().rect_filled(self.strip, CornerRadius::same(radius::SMALL), self.theme.bg_sunken);
        let mut quads = Quads::default();
        let mut x = self.strip.left();
        let width = self.strip.width() / num as f32;
        for is_swapped in [true, false] {
            for (_, cell) in self.host().iter().filter(|(_, c)| c.request.is_some() == is_swapped) {
                let color = self.color(cell);
                let color = if is_swapped { color } else { mix(self.theme.bg_sunken, color, 0.4) };
                quads.rect(Rect::from_min_max(pos2(x, self.strip.top()), pos2(x + width, self.strip.bottom())), color);
                x += width;
            }
        }
        quads.paint(ui.painter());
        let font = small_font();
        if self.host().is_empty() {
            let at = self.strip.left_center() + vec2(6.0, 0.0);
            ui.painter().text(at, Align2::LEFT_CENTER, "empty", font, self.theme.text_weak);
        }
    }

    /// The place under the pointer; none where places are drawn as one bar.
    fn place_at(&self, pos: Pos2, num: u32) -> Option<(u32, Option<&HostCell>)> {
        let x = pos.x - self.strip.left();
        if x < 0.0 || self.cell < MIN_CELL {
            return None;
        }
        let host = (x / self.cell) as u32;
        (host < num).then(|| (host, self.host().get(host)))
    }
}
