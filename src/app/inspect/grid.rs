//! Where the cells of the block map stand, and how much each can show at its size.
//!
//! Guarantees: a cell is a whole number of points wide and never under 3; what does not fit at 3 points is gathered
//! into bins of consecutive blocks. Pure arithmetic.

use egui::{Pos2, Rect, Vec2, pos2, vec2};

/// How much a cell shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lod {
    /// Several blocks: dominant owner, occupancy as lightness.
    Bins,
    /// One colour per block.
    Flat,
    /// Shapes of states.
    Marks,
    /// Shapes, block id and reference count.
    Labels,
}

/// A zoom level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    pub blocks_per_cell: u32,
    /// Side of a cell in points.
    pub cell: u32,
}

const fn bins(blocks_per_cell: u32) -> Level {
    Level { blocks_per_cell, cell: 3 }
}

const fn single(cell: u32) -> Level {
    Level { blocks_per_cell: 1, cell }
}

/// From far to near.
pub const LEVELS: [Level; 23] = [
    bins(256),
    bins(128),
    bins(64),
    bins(32),
    bins(16),
    bins(8),
    bins(4),
    bins(2),
    single(3),
    single(4),
    single(5),
    single(6),
    single(7),
    single(8),
    single(10),
    single(12),
    single(14),
    single(17),
    single(20),
    single(26),
    single(32),
    single(36),
    single(40),
];

/// The nearest level that "fit" chooses: cells larger than this look like buttons.
const MAX_FIT_CELL: u32 = 40;

impl Level {
    pub fn lod(self) -> Lod {
        match (self.blocks_per_cell, self.cell) {
            (2.., _) => Lod::Bins,
            (_, 18..) => Lod::Labels,
            (_, 8..) => Lod::Marks,
            _ => Lod::Flat,
        }
    }
}

/// Cells in reading order, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub level: Level,
    pub cols: u32,
    pub num_blocks: u32,
}

impl Grid {
    pub fn new(level: Level, num_blocks: u32, width: f32) -> Grid {
        let fit = ((width / level.cell as f32) as u32).max(1);
        // Round numbers of columns make ids easy to find by eye.
        let cols = if fit >= 32 { fit / 8 * 8 } else { fit };
        Grid { level, cols, num_blocks }
    }

    /// The nearest level at which all blocks fit into `size`.
    pub fn fit_level(num_blocks: u32, size: Vec2) -> usize {
        let fits =
            |level: &Level| level.cell <= MAX_FIT_CELL && Grid::new(*level, num_blocks, size.x).height() <= size.y;
        LEVELS.iter().rposition(fits).unwrap_or(0)
    }

    pub fn num_cells(&self) -> u32 {
        self.num_blocks.div_ceil(self.level.blocks_per_cell)
    }

    pub fn rows(&self) -> u32 {
        self.num_cells().div_ceil(self.cols)
    }

    pub fn height(&self) -> f32 {
        (self.rows() * self.level.cell) as f32
    }

    pub fn width(&self) -> f32 {
        (self.cols * self.level.cell) as f32
    }

    /// The rows that `visible` (relative to the grid's origin) touches: `first..end`.
    pub fn visible_rows(&self, visible: Rect) -> (u32, u32) {
        let cell = self.level.cell as f32;
        let first = (visible.top().max(0.0) / cell) as u32;
        let end = (visible.bottom().max(0.0) / cell).ceil() as u32;
        (first.min(self.rows()), end.min(self.rows()))
    }

    /// The indices of the blocks in cell `cell_idx`: `first..end`.
    pub fn blocks_of_cell(&self, cell_idx: u32) -> (u32, u32) {
        let first = cell_idx * self.level.blocks_per_cell;
        (first.min(self.num_blocks), (first + self.level.blocks_per_cell).min(self.num_blocks))
    }

    /// The cell at `pos`, relative to the grid's origin.
    pub fn cell_at(&self, pos: Pos2) -> Option<u32> {
        if pos.x < 0.0 || pos.y < 0.0 || pos.x >= self.width() {
            return None;
        }
        let cell = self.level.cell as f32;
        let idx = (pos.y / cell) as u32 * self.cols + (pos.x / cell) as u32;
        (idx < self.num_cells()).then_some(idx)
    }

    /// Where cell `cell_idx` is, relative to the grid's origin.
    pub fn cell_rect(&self, cell_idx: u32) -> Rect {
        let cell = self.level.cell as f32;
        let (row, col) = (cell_idx / self.cols, cell_idx % self.cols);
        Rect::from_min_size(pos2(col as f32 * cell, row as f32 * cell), vec2(cell, cell))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Vec2 = vec2(900.0, 320.0);

    #[test]
    fn every_pool_fits_and_no_cell_is_smaller_than_three_points() {
        for num_blocks in [1, 63, 511, 8_191, 131_071, 524_287] {
            let level = LEVELS[Grid::fit_level(num_blocks, SIZE)];
            let grid = Grid::new(level, num_blocks, SIZE.x);
            assert!(grid.height() <= SIZE.y && grid.width() <= SIZE.x, "{num_blocks}: {grid:?}");
            assert!(level.cell >= 3);
        }
    }

    #[test]
    fn larger_pools_show_less_per_block() {
        let lod = |n| LEVELS[Grid::fit_level(n, SIZE)].lod();
        assert_eq!(lod(256), Lod::Labels);
        assert_eq!(lod(2_000), Lod::Marks);
        assert_eq!(lod(8_191), Lod::Flat);
        assert_eq!(lod(131_071), Lod::Bins);
    }

    #[test]
    fn levels_go_from_far_to_near() {
        for pair in LEVELS.windows(2) {
            let area = |l: Level| l.cell * l.cell * 1024 / l.blocks_per_cell;
            assert!(area(pair[0]) < area(pair[1]), "{pair:?}");
            assert!(pair[0].lod() <= pair[1].lod());
        }
    }

    #[test]
    fn a_cell_is_found_where_it_is_drawn() {
        for level in LEVELS {
            let grid = Grid::new(level, 1_000, SIZE.x);
            for cell in [0, 1, grid.num_cells() / 2, grid.num_cells() - 1] {
                assert_eq!(grid.cell_at(grid.cell_rect(cell).center()), Some(cell));
            }
            assert_eq!(grid.cell_at(pos2(grid.width() + 0.5, 1.0)), None);
        }
    }

    #[test]
    fn the_last_bin_may_be_short() {
        let grid = Grid::new(bins(8), 100, 900.0);
        assert_eq!(grid.num_cells(), 13);
        assert_eq!(grid.blocks_of_cell(12), (96, 100));
    }
}
