//! How one block looks: colour from owner and recency, shape from state, emphasis from filter and selection.

use super::paint::Quads;
use crate::app::inspect::map::{BlockMap, Cell};
use crate::app::inspect::model::{InspectModel, Selection};
use crate::app::theme::{RECENT_STEPS, Theme, mix};
use crate::ids::{BlockId, RequestId};
use crate::telemetry::BlockState;
use egui::{Color32, Pos2, Rect, pos2, vec2};
use rustc_hash::FxHashMap;

/// How much of the owner's colour the empty part of a tail has.
const PALE: f32 = 0.28;

/// What the legend can single out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFilter {
    Owner(u64),
    Shared,
    CachedIdle,
    Free,
    Pinned,
    /// Copied because a sharer was about to write.
    Copied,
}

/// Blocks drawn in full; all others are dimmed. Absent when nothing is singled out.
#[derive(Clone, Debug, Default)]
pub struct Emphasis {
    is_lit: Option<Vec<bool>>, // [num_blocks]
}

impl Emphasis {
    /// The relatives of the selection, within the filter.
    pub fn new(model: &InspectModel, map: &BlockMap, filter: Option<BlockFilter>) -> Emphasis {
        let selection = model.selection().filter(|s| is_known(map, *s));
        if selection.is_none() && filter.is_none() {
            return Emphasis::default();
        }
        let mut is_lit = vec![selection.is_none(); map.cells().len()];
        match selection {
            Some(Selection::Request(request)) => light_table(&mut is_lit, map, request),
            Some(Selection::Block(block)) => {
                for (request, _) in map.holders(block) {
                    light_table(&mut is_lit, map, request);
                }
                if let Some(lit) = is_lit.get_mut(block.idx()) {
                    *lit = true;
                }
            }
            None => {}
        }
        if let Some(filter) = filter {
            let mut owners: FxHashMap<RequestId, u64> = FxHashMap::default();
            for (lit, cell) in is_lit.iter_mut().zip(map.cells()) {
                *lit = *lit && matches(filter, cell, |r| *owners.entry(r).or_insert_with(|| model.owner_of(r).id));
            }
        }
        Emphasis { is_lit: Some(is_lit) }
    }

    pub fn is_lit(&self, block: BlockId) -> bool {
        self.is_lit.as_ref().is_none_or(|v| v.get(block.idx()).copied().unwrap_or(false))
    }

    pub fn is_active(&self) -> bool {
        self.is_lit.is_some()
    }
}

fn is_known(map: &BlockMap, selection: Selection) -> bool {
    match selection {
        Selection::Block(block) => map.cell(block).is_some(),
        Selection::Request(request) => map.tables().contains_key(&request),
    }
}

fn light_table(is_lit: &mut [bool], map: &BlockMap, request: RequestId) {
    for block in map.tables().get(&request).into_iter().flatten() {
        if let Some(lit) = is_lit.get_mut(block.idx()) {
            *lit = true;
        }
    }
}

fn matches(filter: BlockFilter, cell: &Cell, owner: impl FnOnce(RequestId) -> u64) -> bool {
    match filter {
        BlockFilter::Owner(id) => cell.state == BlockState::Active && cell.refs == 1 && owner(cell.owner) == id,
        BlockFilter::Shared => cell.state == BlockState::Active && cell.refs >= 2,
        BlockFilter::CachedIdle => cell.state == BlockState::CachedIdle,
        BlockFilter::Free => cell.state == BlockState::Free,
        BlockFilter::Pinned => cell.is_pinned,
        BlockFilter::Copied => cell.copied_from != BlockId::NULL,
    }
}

/// Colours of blocks at one step, with the last owner looked up kept at hand.
pub struct Inks<'a> {
    theme: &'a Theme,
    model: &'a InspectModel,
    step: u64,
    block_size: f32,
    inks: Vec<Ink>,
    ink_of_request: FxHashMap<RequestId, usize>,
    last: Option<(RequestId, usize)>,
}

/// An owner's colours by age.
struct Ink {
    by_age: [Color32; RECENT_STEPS as usize + 1],
    plain: Color32,
}

impl<'a> Inks<'a> {
    pub fn new(model: &'a InspectModel, map: &BlockMap, theme: &'a Theme) -> Inks<'a> {
        let block_size = model.snapshot().block_size.max(1) as f32;
        Inks {
            theme,
            model,
            step: map.step,
            block_size,
            inks: Vec::new(),
            ink_of_request: FxHashMap::default(),
            last: None,
        }
    }

    fn ink(&mut self, request: RequestId) -> &Ink {
        let idx = match self.last {
            Some((id, idx)) if id == request => idx,
            _ => {
                let (theme, model, inks) = (self.theme, self.model, &mut self.inks);
                let idx = *self.ink_of_request.entry(request).or_insert_with(|| {
                    let plain = theme.owner_color(model.hue_of(request));
                    let by_age = std::array::from_fn(|age| theme.with_recency(plain, age as u64));
                    inks.push(Ink { plain, by_age });
                    inks.len() - 1
                });
                self.last = Some((request, idx));
                idx
            }
        };
        &self.inks[idx]
    }

    fn used(&mut self, cell: &Cell) -> Color32 {
        let age = self.step.saturating_sub(u64::from(cell.last_step)).min(RECENT_STEPS);
        self.ink(cell.owner).by_age[age as usize]
    }

    /// The one colour of a block without shape.
    pub fn flat(&mut self, cell: &Cell, is_lit: bool) -> Color32 {
        let color = match cell.state {
            BlockState::Active => self.used(cell),
            BlockState::CachedIdle => mix(self.theme.bg_sunken, self.ink(cell.owner).plain, 0.38),
            BlockState::Free | BlockState::Null => self.free(),
        };
        if is_lit { color } else { self.dimmed(color) }
    }

    /// The ground of a free block: just visible on the well.
    pub fn free(&self) -> Color32 {
        mix(self.theme.bg_sunken, self.theme.text_faint, 0.14)
    }

    fn dimmed(&self, color: Color32) -> Color32 {
        mix(self.theme.bg_sunken, color, 0.3)
    }

    /// The colour of a bin: the owner of most of its blocks, as strong as it is full.
    pub fn bin<'c>(&mut self, cells: impl Iterator<Item = (&'c Cell, bool)>) -> Color32 {
        let (mut total, mut occupied, mut lit) = (0u32, 0.0f32, 0u32);
        let mut votes: Option<(RequestId, u32)> = None;
        let mut newest = 0;
        for (cell, is_lit) in cells {
            total += 1;
            lit += u32::from(is_lit);
            occupied += match cell.state {
                BlockState::Active => 1.0,
                BlockState::CachedIdle => 0.35,
                BlockState::Free | BlockState::Null => continue,
            };
            newest = newest.max(cell.last_step);
            // Majority by pairing off: exact when one owner has more than half.
            votes = match votes {
                Some((id, n)) if id == cell.owner => Some((id, n + 1)),
                Some((id, n)) if n > 1 => Some((id, n - 1)),
                _ => Some((cell.owner, 1)),
            };
        }
        let Some((owner, _)) = votes else { return self.free() };
        let age = self.step.saturating_sub(u64::from(newest)).min(RECENT_STEPS);
        let color = self.ink(owner).by_age[age as usize];
        let color = mix(self.free(), color, 0.25 + 0.75 * occupied / total.max(1) as f32);
        if lit * 2 >= total { color } else { self.dimmed(color) }
    }

    /// Draws a block with its shape into `rect` (the cell without its gap).
    pub fn shape(&mut self, quads: &mut Quads, rect: Rect, cell: &Cell, is_lit: bool) {
        let dim = |inks: &Self, c: Color32| if is_lit { c } else { inks.dimmed(c) };
        match cell.state {
            BlockState::Null => {}
            BlockState::Free => {
                let side = if rect.width() >= 12.0 { 3.0 } else { 2.0 };
                let min = (rect.center() - vec2(side, side) / 2.0).floor();
                let color = dim(self, self.theme.text_faint);
                quads.rect(Rect::from_min_size(min, vec2(side, side)), color);
            }
            BlockState::CachedIdle => {
                let color = self.ink(cell.owner).plain;
                quads.outline(rect, 1.0, dim(self, color));
            }
            BlockState::Active => {
                let color = self.used(cell);
                let color = dim(self, color);
                self.used_shape(quads, rect, cell, color);
                let mark = dim(self, self.theme.text_strong);
                if cell.refs >= 2 {
                    notch(quads, rect, Corner::RightTop, mark, self.theme.bg_sunken);
                }
                if cell.copied_from != BlockId::NULL {
                    notch(quads, rect, Corner::LeftBottom, mark, self.theme.bg_sunken);
                }
            }
        }
        if cell.is_pinned {
            pin(quads, rect, dim(self, self.theme.accent), self.theme.bg_sunken);
        }
    }

    /// Where the id of a used block stands and in which colour: in the middle, or above what fills a tail.
    pub fn label_of_used(&mut self, rect: Rect, cell: &Cell) -> (Pos2, Color32) {
        let color = self.used(cell);
        if self.fill(cell) >= 0.65 {
            return (rect.center(), self.theme.text_on(color));
        }
        let pale = mix(self.theme.bg_sunken, color, PALE);
        (pos2(rect.center().x, rect.top() + rect.height() * 0.3), self.theme.text_on(pale))
    }

    /// How full a block is, 0 to 1.
    fn fill(&self, cell: &Cell) -> f32 {
        if cell.hash.is_some() { 1.0 } else { (cell.filled as f32 / self.block_size).clamp(0.0, 1.0) }
    }

    fn used_shape(&self, quads: &mut Quads, rect: Rect, cell: &Cell, color: Color32) {
        let fill = self.fill(cell);
        if fill >= 1.0 {
            quads.rect(rect, color);
        } else {
            // A tail: filled from below to its fraction, the rest a pale ground.
            quads.rect(rect, mix(self.theme.bg_sunken, color, PALE));
            let top = (rect.bottom() - rect.height() * fill.max(0.08)).round();
            quads.rect(Rect::from_min_max(pos2(rect.left(), top), rect.max), color);
        }
    }
}

/// Corners that marks stand in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corner {
    /// Shared by several tables.
    RightTop,
    /// Copied on write.
    LeftBottom,
}

/// A corner mark, with a gap to what it stands on.
pub fn notch(quads: &mut Quads, rect: Rect, corner: Corner, mark: Color32, gap: Color32) {
    let (at, sign) = match corner {
        Corner::RightTop => (rect.right_top(), 1.0),
        Corner::LeftBottom => (rect.left_bottom(), -1.0),
    };
    let side = (rect.width() * 0.42).max(4.0);
    for (side, color) in [(side, gap), (side - 2.0, mark)] {
        quads.triangle([at, at - vec2(sign * side, 0.0), at + vec2(0.0, sign * side)], color);
    }
}

/// How wide that bar is in a block.
pub fn pin_width(rect: Rect) -> f32 {
    (rect.width() * 0.16).round().clamp(2.0, 4.0)
}

/// The bar along the left edge that says "pinned".
pub fn pin(quads: &mut Quads, rect: Rect, mark: Color32, gap: Color32) {
    let width = pin_width(rect);
    quads.rect(Rect::from_min_size(rect.min, vec2(width + 1.0, rect.height())), gap);
    quads.rect(Rect::from_min_size(rect.min, vec2(width, rect.height())), mark);
}
