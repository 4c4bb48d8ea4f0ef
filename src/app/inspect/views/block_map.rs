//! The block map in pool order and in eviction order.
//!
//! Guarantees: what is drawn per frame depends on the cells visible, not on the pool; below 8 points per cell the map is
//! one texture, made anew only when something shown changed.

use super::block_look::{BlockFilter, Emphasis, Inks, pin_width};
use super::paint::{Quads, describe, snap};
use crate::app::inspect::grid::{Grid, LEVELS, Level, Lod};
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::words;
use crate::app::theme::Theme;
use crate::ids::BlockId;
use crate::telemetry::BlockState;
use egui::{
    Align2, Color32, ColorImage, FontId, Painter, Rect, Response, ScrollArea, Sense, TextureHandle, TextureOptions, Ui,
    Vec2, pos2, vec2,
};
use std::time::Duration;

/// How long an eviction stays visible.
const FADE_S: f64 = 1.0;
/// Evictions that fade at the same time; more are not drawn.
const MAX_FADING: usize = 4_096;

/// In which order blocks are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockOrder {
    /// By physical id.
    Pool,
    /// One row per request, by place in its block table.
    Tables,
    /// Cached-idle blocks, next victim first.
    Eviction,
}

/// What the map keeps from frame to frame.
#[derive(Default)]
pub struct MapCache {
    emphasis_key: Option<EmphasisKey>,
    pub emphasis: Emphasis,
    eviction: Vec<BlockId>,
    eviction_revision: Option<u64>,
    texture: Option<(TextureKey, TextureHandle)>,
    fading: Vec<(BlockId, f64)>,
    fading_seen: Option<u64>,
    /// Columns drawn last, for moving the selection by a row.
    pub cols: u32,
}

type EmphasisKey = (u64, Option<BlockFilter>, Option<SelectionKey>);
type SelectionKey = (bool, u64);

#[derive(Clone, Copy, PartialEq)]
struct TextureKey {
    emphasis: EmphasisKey,
    grid: Grid,
    rows: (u32, u32),
    order: BlockOrder,
    is_dark: bool,
}

/// Choices of the reader that the map needs.
#[derive(Clone, Copy)]
pub struct MapChoice {
    pub order: BlockOrder,
    pub filter: Option<BlockFilter>,
    /// Index into [`LEVELS`]; `None` fits the pool into the space.
    pub zoom: Option<usize>,
}

impl MapCache {
    /// Brings emphasis, eviction order and fading evictions up to date.
    pub fn refresh(&mut self, ui: &Ui, model: &InspectModel, map: &BlockMap, choice: MapChoice) {
        let selection = model.selection().map(|s| match s {
            Selection::Block(b) => (true, u64::from(b.0)),
            Selection::Request(r) => (false, r.0),
        });
        let key = (model.revision(), choice.filter, selection);
        if self.emphasis_key != Some(key) {
            self.emphasis_key = Some(key);
            self.emphasis = Emphasis::new(model, map, choice.filter);
        }
        if choice.order == BlockOrder::Eviction && self.eviction_revision != Some(model.revision()) {
            self.eviction_revision = Some(model.revision());
            self.eviction = map.eviction_order();
        }
        self.note_evictions(ui, model, map);
    }

    fn note_evictions(&mut self, ui: &Ui, model: &InspectModel, map: &BlockMap) {
        let now = ui.input(|i| i.time);
        if !model.is_live() {
            // A held step shows its own evictions and nothing fades.
            self.fading = map.evicted().iter().take(MAX_FADING).map(|&b| (b, now)).collect();
            self.fading_seen = Some(map.step);
            return;
        }
        self.fading.retain(|(_, since)| now - since < FADE_S);
        if self.fading_seen != Some(map.step) {
            self.fading_seen = Some(map.step);
            let room = MAX_FADING.saturating_sub(self.fading.len());
            self.fading.extend(map.evicted().iter().take(room).map(|&b| (b, now)));
        }
        if !self.fading.is_empty() {
            ui.ctx().request_repaint_after(Duration::from_millis(66));
        }
    }

    fn block_at(&self, order: BlockOrder, idx: u32) -> BlockId {
        match order {
            BlockOrder::Eviction => self.eviction.get(idx as usize).copied().unwrap_or(BlockId::NULL),
            BlockOrder::Pool | BlockOrder::Tables => BlockId(idx + 1),
        }
    }

    fn num_blocks(&self, order: BlockOrder, map: &BlockMap) -> u32 {
        match order {
            BlockOrder::Eviction => self.eviction.len() as u32,
            BlockOrder::Pool | BlockOrder::Tables => map.cells().len().saturating_sub(1) as u32,
        }
    }

    /// The level that the map uses in `size`.
    pub fn level_idx(&self, choice: MapChoice, map: &BlockMap, size: Vec2) -> usize {
        choice.zoom.unwrap_or_else(|| Grid::fit_level(self.num_blocks(choice.order, map), size)).min(LEVELS.len() - 1)
    }
}

/// Everything a drawing function needs; nothing of it changes while drawing.
struct Scene<'a> {
    model: &'a InspectModel,
    map: &'a BlockMap,
    theme: &'a Theme,
    grid: Grid,
    choice: MapChoice,
    origin: egui::Pos2,
}

/// The map in pool or eviction order, filling what is left of `ui`.
pub fn block_map_ui(
    ui: &mut Ui,
    cache: &mut MapCache,
    choice: MapChoice,
    model: &InspectModel,
    theme: &Theme,
    commands: &mut Vec<InspectCommand>,
) {
    let Some(map) = model.map() else { return };
    let size = ui.available_size();
    let level = LEVELS[cache.level_idx(choice, map, size)];
    let num_blocks = cache.num_blocks(choice.order, map);
    if num_blocks == 0 {
        ui.weak("No cached block is idle, so nothing can be evicted.");
        return;
    }
    let grid = Grid::new(level, num_blocks, size.x);
    cache.cols = grid.cols;
    ScrollArea::vertical().id_salt("block map").auto_shrink(false).show_viewport(ui, |ui, visible| {
        let size = vec2(grid.width(), grid.height().max(1.0));
        let (rect, response) = ui.allocate_exact_size(size, Sense::click());
        let rows = grid.visible_rows(visible);
        let scene = Scene { model, map, theme, grid, choice, origin: snap(ui, rect).min };
        match level.lod() {
            Lod::Bins | Lod::Flat => paint_flat(ui, cache, &scene, rows),
            Lod::Marks | Lod::Labels => paint_marks(ui, cache, &scene, rows),
        }
        paint_over(ui, cache, &scene);
        describe(&response, &words::map_sentence(map));
        interact(ui, cache, &scene, &response, commands);
    });
}

/// The texture of the visible rows: one texel per cell.
fn paint_flat(ui: &Ui, cache: &mut MapCache, scene: &Scene<'_>, rows: (u32, u32)) {
    let num_rows = rows.1.saturating_sub(rows.0);
    let Some(emphasis) = cache.emphasis_key.filter(|_| num_rows > 0) else { return };
    let key = TextureKey { emphasis, grid: scene.grid, rows, order: scene.choice.order, is_dark: scene.theme.is_dark };
    if cache.texture.as_ref().is_none_or(|(k, _)| *k != key) {
        let image = flat_image(cache, scene, rows);
        match &mut cache.texture {
            Some((k, texture)) => {
                *k = key;
                texture.set(image, TextureOptions::NEAREST);
            }
            None => {
                let texture = ui.ctx().load_texture("block map", image, TextureOptions::NEAREST);
                cache.texture = Some((key, texture));
            }
        }
    }
    if let Some((_, texture)) = &cache.texture {
        let cell = scene.grid.level.cell as f32;
        let min = scene.origin + vec2(0.0, rows.0 as f32 * cell);
        let rect = Rect::from_min_size(min, vec2(scene.grid.width(), num_rows as f32 * cell));
        let uv = Rect::from_min_max(pos2(0.0, 0.0), pos2(1.0, 1.0));
        ui.painter().image(texture.id(), rect, uv, Color32::WHITE);
    }
}

fn flat_image(cache: &MapCache, scene: &Scene<'_>, rows: (u32, u32)) -> ColorImage {
    let grid = scene.grid;
    let mut inks = Inks::new(scene.model, scene.map, scene.theme);
    let cells = scene.map.cells();
    let is_active = cache.emphasis.is_active();
    let (first, end) = (rows.0 * grid.cols, rows.1 * grid.cols);
    let mut pixels = Vec::with_capacity((end - first) as usize);
    for cell_idx in first..end {
        if cell_idx >= grid.num_cells() {
            pixels.push(Color32::TRANSPARENT);
            continue;
        }
        let (from, to) = grid.blocks_of_cell(cell_idx);
        let look = |idx: u32| {
            let block = cache.block_at(scene.choice.order, idx);
            (&cells[block.idx()], !is_active || cache.emphasis.is_lit(block))
        };
        pixels.push(if to - from == 1 {
            let (cell, is_lit) = look(from);
            inks.flat(cell, is_lit)
        } else {
            inks.bin((from..to).map(look))
        });
    }
    ColorImage::new([grid.cols as usize, (rows.1 - rows.0) as usize], pixels)
}

/// Shapes, and at the nearest levels ids, of the visible cells.
fn paint_marks(ui: &Ui, cache: &MapCache, scene: &Scene<'_>, rows: (u32, u32)) {
    let grid = scene.grid;
    let mut inks = Inks::new(scene.model, scene.map, scene.theme);
    let mut quads = Quads::default();
    let cells = rows.0 * grid.cols..(rows.1 * grid.cols).min(grid.num_cells());
    for cell_idx in cells.clone() {
        let block = cache.block_at(scene.choice.order, cell_idx);
        let Some(cell) = scene.map.cell(block) else { continue };
        inks.shape(&mut quads, inner_rect(scene, cell_idx), cell, cache.emphasis.is_lit(block));
    }
    quads.paint(ui.painter());
    if grid.level.lod() == Lod::Labels {
        for cell_idx in cells {
            let block = cache.block_at(scene.choice.order, cell_idx);
            if cache.emphasis.is_lit(block) {
                paint_label(ui.painter(), scene, &mut inks, cell_idx, block);
            }
        }
    }
}

fn inner_rect(scene: &Scene<'_>, cell_idx: u32) -> Rect {
    let gap = if scene.grid.level.cell >= 14 { 2.0 } else { 1.0 };
    let rect = scene.grid.cell_rect(cell_idx).translate(scene.origin.to_vec2());
    Rect::from_min_max(rect.min, rect.max - vec2(gap, gap))
}

/// The id of a block that holds something; at the nearest levels its reference count too.
fn paint_label(painter: &Painter, scene: &Scene<'_>, inks: &mut Inks<'_>, cell_idx: u32, block: BlockId) {
    let Some(cell) = scene.map.cell(block) else { return };
    let rect = inner_rect(scene, cell_idx);
    let (at, color) = match cell.state {
        BlockState::Active => inks.label_of_used(rect, cell),
        BlockState::CachedIdle => (rect.center(), scene.theme.text_weak),
        BlockState::Free | BlockState::Null => return,
    };
    let level = scene.grid.level.cell as f32;
    let digits = if block.0 >= 1_000 { 0.36 } else { 0.42 };
    let font = FontId::proportional((level * digits).clamp(7.5, 12.0));
    if level >= 32.0 && cell.refs >= 2 {
        let shift = if cell.is_pinned { pin_width(rect) } else { 0.0 };
        painter.text(rect.left_top() + vec2(2.0 + shift, 1.0), Align2::LEFT_TOP, block.0, font.clone(), color);
        let refs = format!("×{}", cell.refs);
        painter.text(rect.right_bottom() - vec2(2.0, 1.0), Align2::RIGHT_BOTTOM, refs, font, color);
    } else {
        painter.text(at, Align2::CENTER_CENTER, block.0, font, color);
    }
}

/// Fading evictions and the selected block, above everything else.
fn paint_over(ui: &Ui, cache: &MapCache, scene: &Scene<'_>) {
    let now = ui.input(|i| i.time);
    let level = scene.grid.level;
    let idx_of = |block: BlockId| match scene.choice.order {
        BlockOrder::Eviction => cache.eviction.iter().position(|&b| b == block).map(|i| i as u32),
        BlockOrder::Pool | BlockOrder::Tables => block.0.checked_sub(1),
    };
    let mut quads = Quads::default();
    if level.blocks_per_cell == 1 && scene.choice.order == BlockOrder::Pool {
        for (block, since) in &cache.fading {
            let Some(idx) = idx_of(*block) else { continue };
            let strength = 1.0 - ((now - since) / FADE_S).clamp(0.0, 1.0) as f32;
            let color = scene.theme.error.gamma_multiply(strength);
            let rect = inner_rect(scene, idx);
            if level.lod() >= Lod::Marks { quads.hatch(rect, color) } else { quads.rect(rect, color) }
        }
    }
    if let Some(Selection::Block(block)) = scene.model.selection()
        && let Some(idx) = idx_of(block)
    {
        let rect = scene.grid.cell_rect(idx / level.blocks_per_cell).translate(scene.origin.to_vec2());
        quads.outline(rect.expand(1.0), 2.0, scene.theme.text_strong);
    }
    quads.paint(ui.painter());
}

fn interact(ui: &Ui, cache: &MapCache, scene: &Scene<'_>, response: &Response, commands: &mut Vec<InspectCommand>) {
    let Some(pos) = response.hover_pos() else { return };
    let Some(cell_idx) = scene.grid.cell_at(pos - scene.origin.to_vec2()) else { return };
    let (from, to) = scene.grid.blocks_of_cell(cell_idx);
    let block = cache.block_at(scene.choice.order, from);
    let mut quads = Quads::default();
    let rect = scene.grid.cell_rect(cell_idx).translate(scene.origin.to_vec2());
    quads.outline(rect.expand(1.0), 1.0, scene.theme.text_weak);
    quads.paint(ui.painter());
    let line = if to - from > 1 {
        format!("Blocks {block} to {} · zoom in to see each", cache.block_at(scene.choice.order, to - 1))
    } else {
        words::block_line(scene.model, scene.map, block)
    };
    hover_line(ui, response, &line);
    if response.clicked() {
        commands.push(match scene.model.selection() {
            Some(Selection::Block(b)) if b == block => InspectCommand::ClearSelection,
            _ => InspectCommand::Select(Selection::Block(block)),
        });
    }
}

/// A one-line answer beside the pointer, at once.
pub fn hover_line(ui: &Ui, response: &Response, line: &str) {
    egui::Tooltip::always_open(ui.ctx().clone(), ui.layer_id(), response.id, egui::PopupAnchor::Pointer)
        .gap(12.0)
        .width(420.0)
        .show(|ui| ui.label(line));
}

/// The level one step nearer (`by` = 1) or farther (`by` = -1).
pub fn zoomed(level_idx: usize, by: i32) -> usize {
    level_idx.saturating_add_signed(by as isize).min(LEVELS.len() - 1)
}

/// What a level shows, for the zoom control.
pub fn level_words(level: Level) -> String {
    match level.blocks_per_cell {
        1 => format!("{} pt", level.cell),
        n => format!("{n} per cell"),
    }
}
