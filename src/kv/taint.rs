//! Blocks whose content is suspect: they are never found again.

use super::block_pool::Visibility;
use super::{BlockTable, KvCache};
use crate::ids::BlockId;

impl KvCache {
    /// The content of these blocks is suspect: they cannot be found any more, and never again before they are freed.
    pub fn taint(&mut self, table: &BlockTable) {
        self.taint_from(table, 0);
    }

    /// As [`KvCache::taint`], for the table's blocks from the one on that holds `position`.
    pub fn taint_from(&mut self, table: &BlockTable, position: u32) {
        for &block in table.ids().iter().skip((position / self.config.block_size) as usize) {
            if block != BlockId::NULL {
                self.taint_block(block);
            }
        }
        self.drop_suspect_pins();
    }

    fn taint_block(&mut self, block: BlockId) {
        if self.pool.block(block).visibility == Visibility::Published {
            self.forget_host(block);
            self.prefix.forget(block);
        }
        self.pool.set_visibility(block, Visibility::Tainted);
    }
}
