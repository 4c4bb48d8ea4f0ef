//! Groups of layers that see a window only: how many blocks they need, and giving back what slid out.
//!
//! Guarantees: a block is given back only when no token from a position on sees it; what was published stays findable.

use super::{BlockTable, KvCache, lowest_seen};
use crate::ids::BlockId;

impl KvCache {
    /// Blocks that a sequence holds at most until its first `tokens` positions are computed, `chunk` of them in a step.
    pub fn blocks_needed(&self, tokens: u32, chunk: u32) -> u32 {
        self.config.groups.blocks_for(tokens, chunk, self.config.block_size)
    }

    /// The most positions, up to `limit`, that one sequence can have with so many blocks to itself.
    pub fn capacity(&self, blocks: u32, limit: u32, chunk: u32) -> u32 {
        self.config.groups.tokens_in(blocks, limit, chunk, self.config.block_size)
    }

    /// Blocks of windowed groups that tables other than these hold too: when they slide out, nothing becomes available.
    pub fn num_shared_in_windows<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> u32 {
        if !self.config.groups.has_windows() {
            return 0;
        }
        let mut blocks = Vec::new();
        for table in tables {
            let windowed = (0..table.num_groups()).filter(|group| self.config.groups.window(*group).is_some());
            blocks.extend(windowed.flat_map(|group| table.group(group).skip(table.null_rows(group) as usize)));
        }
        blocks.sort_unstable();
        let is_shared =
            |own: &&[BlockId]| self.pool.block(own[0]).refs > own.len() as u32 + self.num_copied_from(own[0]);
        blocks.chunk_by(|a, b| a == b).filter(is_shared).count() as u32
    }

    /// True when the token at `position` finds in the table all that it sees.
    pub fn sees_all(&self, table: &BlockTable, position: u32) -> bool {
        let lowest = |group| lowest_seen(self.config.groups.window(group), position) / self.config.block_size;
        (0..self.config.groups.num()).all(|group| table.null_rows(group) <= lowest(group))
    }

    /// Takes back the blocks that no token from `position` on sees, and says how many. Published ones stay findable.
    pub fn slide(&mut self, table: &mut BlockTable, position: u32) -> u32 {
        if !self.config.groups.has_windows() {
            return 0;
        }
        let num_before = table.num_blocks();
        for group in 0..self.config.groups.num() {
            let lowest = lowest_seen(self.config.groups.window(group), position) / self.config.block_size;
            for _ in table.null_rows(group)..lowest.min(table.num_rows()) {
                let block = table.take_first(group);
                self.unref(block, table.owner());
            }
        }
        num_before - table.num_blocks()
    }
}
