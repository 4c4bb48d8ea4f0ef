//! The block map in block-table order: one row per request, a shared prefix as one bracket over its rows.

use super::block_look::{Emphasis, Inks};
use super::block_map::hover_line;
use super::paint::{Quads, describe, text_clipped};
use crate::app::format;
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::words;
use crate::app::theme::{Theme, radius};
use crate::ids::{BlockId, RequestId};
use egui::{Align2, CornerRadius, FontId, Pos2, Rect, Response, ScrollArea, Sense, Stroke, StrokeKind, Ui, pos2, vec2};
use rustc_hash::FxHashMap;

const GUTTER: f32 = 148.0;
const ROW: f32 = 31.0;
const GROUP_HEAD: f32 = 20.0;
const MAX_CELL: f32 = 24.0;
const MIN_CELL: f32 = 3.0;

/// Requests that share the beginning of their tables, or one request alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Oldest first.
    pub requests: Vec<RequestId>,
    /// Blocks that all of them share from the start.
    pub num_shared: usize,
}

/// Requests by their first block, groups and members oldest first.
pub fn groups(map: &BlockMap) -> Vec<Group> {
    let mut group_of_first: FxHashMap<BlockId, usize> = FxHashMap::default();
    let mut groups: Vec<Group> = Vec::new();
    for (&request, table) in map.tables() {
        let first = table.first().copied().unwrap_or(BlockId::NULL);
        match group_of_first.get(&first).filter(|_| first != BlockId::NULL) {
            Some(&idx) => {
                let shared = &map.tables()[&groups[idx].requests[0]][..groups[idx].num_shared];
                groups[idx].num_shared = shared.iter().zip(table).take_while(|(a, b)| a == b).count();
                groups[idx].requests.push(request);
            }
            None => {
                group_of_first.insert(first, groups.len());
                groups.push(Group { requests: vec![request], num_shared: table.len() });
            }
        }
    }
    for group in &mut groups {
        if group.requests.len() == 1 {
            group.num_shared = 0;
        }
    }
    groups
}

struct Scene<'a> {
    model: &'a InspectModel,
    map: &'a BlockMap,
    theme: &'a Theme,
    emphasis: &'a Emphasis,
    cell: f32,
    /// Where cells begin.
    left: f32,
    visible: Rect,
}

/// All tables, scrolling both ways, filling what is left of `ui`.
pub fn block_tables_ui(
    ui: &mut Ui,
    emphasis: &Emphasis,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let Some(map) = model.map() else { return };
    if map.tables().is_empty() {
        ui.weak("No request holds blocks at this step.");
        return;
    }
    let groups = groups(map);
    let longest = map.tables().values().map(Vec::len).max().unwrap_or(1) as f32;
    let room = (ui.available_width() - GUTTER - 16.0).max(40.0);
    let cell = (room / longest).floor().clamp(MIN_CELL, MAX_CELL);
    let heads = groups.iter().filter(|g| g.num_shared > 0).count() as f32;
    let size = vec2(GUTTER + longest * cell + 8.0, map.tables().len() as f32 * ROW + heads * GROUP_HEAD);
    ScrollArea::both().id_salt("block tables").auto_shrink(false).show_viewport(ui, |ui, visible| {
        let (rect, response) = ui.allocate_exact_size(size, Sense::click());
        describe(&response, &tables_sentence(model, map, &groups));
        let visible = visible.translate(rect.min.to_vec2());
        let scene = Scene { model, map, theme, emphasis, cell, left: rect.left() + GUTTER, visible };
        let mut inks = Inks::new(model, map, theme);
        let mut y = rect.top();
        let mut under_pointer = None;
        for group in &groups {
            y = group_ui(ui, &scene, &mut inks, group, y, &response, &mut under_pointer);
        }
        answer(ui, &scene, &response, under_pointer, commands);
    });
}

/// Draws a group from `y` down; returns where the next one begins.
fn group_ui(
    ui: &Ui,
    scene: &Scene<'_>,
    inks: &mut Inks<'_>,
    group: &Group,
    y: f32,
    response: &Response,
    under_pointer: &mut Option<(RequestId, Option<BlockId>)>,
) -> f32 {
    let mut top = y;
    if group.num_shared > 0 {
        let text = format!(
            "Shared prefix: {} × {} requests",
            format::counted(group.num_shared as u64, "block"),
            group.requests.len()
        );
        let at = pos2(scene.left, top + GROUP_HEAD / 2.0 + 1.0);
        text_clipped(ui.painter(), at, Align2::LEFT_CENTER, &text, 400.0, scene.theme.text_weak);
        top += GROUP_HEAD;
    }
    let first_row = top;
    for &request in &group.requests {
        let row = Rect::from_min_size(pos2(scene.left - GUTTER, top), vec2(scene.visible.width().max(1.0), ROW));
        if row.intersects(scene.visible) {
            row_ui(ui, scene, inks, request, row);
            if let Some(pos) = response.hover_pos().filter(|p| (row.top()..row.bottom()).contains(&p.y)) {
                *under_pointer = Some((request, block_under(scene, request, pos)));
            }
        }
        top += ROW;
    }
    if group.num_shared > 0 {
        let right = scene.left + group.num_shared as f32 * scene.cell;
        let rect = Rect::from_min_max(pos2(scene.left, first_row), pos2(right, top)).shrink2(vec2(0.0, 1.0));
        let bracket = rect.expand2(vec2(3.0, 0.0));
        let corner = CornerRadius::same(radius::SMALL);
        let stroke = Stroke::new(1.5, scene.theme.text_weak);
        ui.painter().rect_stroke(bracket, corner, stroke, StrokeKind::Inside);
    }
    top
}

fn row_ui(ui: &Ui, scene: &Scene<'_>, inks: &mut Inks<'_>, request: RequestId, row: Rect) {
    let Some(table) = scene.map.tables().get(&request) else { return };
    let owner = scene.model.owner_of(request);
    let color = scene.theme.owner_color(owner.hue);
    let painter = ui.painter();
    let line = pos2(row.left() + 14.0, row.center().y - 7.0);
    painter.circle_filled(pos2(row.left() + 5.0, line.y), 4.0, color);
    let label = scene.model.requests().label(request);
    text_clipped(painter, line, Align2::LEFT_CENTER, &label, GUTTER - 26.0, scene.theme.text);
    let at = pos2(line.x, row.center().y + 7.0);
    text_clipped(painter, at, Align2::LEFT_CENTER, &row_words(scene, table), GUTTER - 26.0, scene.theme.text_weak);

    let first = ((scene.visible.left() - scene.left) / scene.cell).max(0.0) as usize;
    let end = ((scene.visible.right() - scene.left) / scene.cell).max(0.0).ceil() as usize;
    cells_ui(ui, scene, inks, table, first..end.min(table.len()), row);
}

/// The cells of a table that are in sight. Too narrow for shapes, they become a band as tall as a word.
fn cells_ui(
    ui: &Ui,
    scene: &Scene<'_>,
    inks: &mut Inks<'_>,
    table: &[BlockId],
    shown: std::ops::Range<usize>,
    row: Rect,
) {
    let is_band = scene.cell < 8.0;
    let gap = if scene.cell >= 14.0 { 2.0 } else { 1.0 };
    let size = if is_band { vec2(scene.cell, 14.0) } else { vec2(scene.cell - gap, scene.cell - gap) };
    let rect_of = |logical: usize| {
        let left = scene.left + logical as f32 * scene.cell;
        Rect::from_min_size(pos2(left.round(), (row.center().y - size.y / 2.0).round()), size)
    };
    let cells = || {
        let blocks = table.get(shown.clone()).unwrap_or(&[]).iter().zip(shown.clone());
        blocks.filter_map(|(&block, logical)| {
            let cell = scene.map.cell(block).filter(|_| block != BlockId::NULL)?;
            Some((block, cell, rect_of(logical)))
        })
    };
    let mut quads = Quads::default();
    // What slid out of an attention window leaves a hole: a line where the block was.
    for logical in shown.clone().filter(|&l| table.get(l) == Some(&BlockId::NULL)) {
        let rect = rect_of(logical);
        let line = Rect::from_center_size(rect.center(), vec2(rect.width(), 1.0));
        quads.rect(line, scene.theme.text_faint);
    }
    for (block, cell, rect) in cells() {
        let is_lit = scene.emphasis.is_lit(block);
        if is_band {
            quads.rect(rect, inks.flat(cell, is_lit));
        } else {
            inks.shape(&mut quads, rect, cell, is_lit);
        }
    }
    for (_, _, rect) in cells().filter(|(b, _, _)| scene.model.selection() == Some(Selection::Block(*b))) {
        quads.outline(rect.expand(2.0), 2.0, scene.theme.text_strong);
    }
    quads.paint(ui.painter());
    if scene.cell >= 18.0 {
        for (block, cell, rect) in cells().filter(|(b, _, _)| scene.emphasis.is_lit(*b)) {
            let (at, ink) = inks.label_of_used(rect, cell);
            ui.painter().text(at, Align2::CENTER_CENTER, block.0, FontId::proportional(9.0), ink);
        }
    }
}

/// "10 blocks · 3 shared · tail 6/16"
fn row_words(scene: &Scene<'_>, table: &[BlockId]) -> String {
    let held = table.iter().filter(|b| **b != BlockId::NULL).count();
    let mut out = format::counted(held as u64, "block");
    let shared = table.iter().filter(|&&b| scene.map.cell(b).is_some_and(|c| c.refs >= 2)).count();
    if shared > 0 {
        out += &format!(" · {shared} shared");
    }
    if held < table.len() {
        out += &format!(" · {} slid out", table.len() - held);
    }
    out
}

/// The block of `request` under the pointer; [`BlockId::NULL`] for one that slid out.
fn block_under(scene: &Scene<'_>, request: RequestId, pos: Pos2) -> Option<BlockId> {
    let logical = ((pos.x - scene.left) / scene.cell).floor();
    if logical < 0.0 {
        return None;
    }
    scene.map.tables().get(&request)?.get(logical as usize).copied()
}

fn answer(
    ui: &Ui,
    scene: &Scene<'_>,
    response: &Response,
    under_pointer: Option<(RequestId, Option<BlockId>)>,
    commands: &mut Vec<InspectCommand>,
) {
    let Some((request, block)) = under_pointer else { return };
    let selection = match block {
        Some(block) if block != BlockId::NULL => Selection::Block(block),
        _ => Selection::Request(request),
    };
    match block {
        Some(BlockId::NULL) => {
            hover_line(ui, response, "Slid out: these tokens are outside every window, their block was given back");
        }
        Some(block) => hover_line(ui, response, &words::block_line(scene.model, scene.map, block)),
        None => {
            if let Some(row) = scene.model.rows().iter().find(|r| r.id == request) {
                hover_line(ui, response, &format!("{} · {}", row.label, words::state_words(&row.state)));
            }
        }
    }
    if response.clicked() {
        commands.push(if scene.model.selection() == Some(selection) {
            InspectCommand::ClearSelection
        } else {
            InspectCommand::Select(selection)
        });
    }
}

/// The tables in words: the text twin.
fn tables_sentence(model: &InspectModel, map: &BlockMap, groups: &[Group]) -> String {
    let mut out = format!("Block tables of {}", format::counted(map.tables().len() as u64, "request"));
    for group in groups {
        let names: Vec<String> =
            group.requests.iter().map(|r| format!("{} {}", model.owner_of(*r).label, map.tables()[r].len())).collect();
        out += &format!("; {}", names.join(", "));
        if group.num_shared > 0 {
            out += &format!(" share the first {}", format::counted(group.num_shared as u64, "block"));
        }
    }
    out
}
