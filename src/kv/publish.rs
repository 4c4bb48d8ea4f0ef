//! What becomes findable by its content.
//!
//! Guarantees: only what a committed step wrote is published; what follows suspect content is not.

use super::block_pool::Visibility;
use super::prefix_cache::Published;
use super::{BlockEvent, BlockState, BlockTable, KvCache, KvGroups, PrefixChain};
use crate::ids::{BlockId, TokenId};

impl KvCache {
    /// Makes the blocks findable that became full when positions `from..to` were computed. `tokens` are the sequence's,
    /// from the first; the chain must name its full blocks.
    pub fn publish(&mut self, table: &BlockTable, chain: &mut PrefixChain, tokens: &[TokenId], from: u32, to: u32) {
        if !self.config.enable_prefix_cache {
            return;
        }
        let first = (from / self.config.block_size) as usize;
        let end = (to / self.config.block_size) as usize;
        if first == end {
            return;
        }
        // A parent that this sequence found, or whose equal was evicted, is looked for and published first.
        let mut start = first;
        while start > 0 && !self.prefix.is_findable(chain, start - 1) {
            start -= 1;
        }
        let anchor = self.config.groups.anchor();
        for row in start..end {
            if !self.publish_one(table.block(row as u32, anchor), anchor, chain, tokens, row) {
                return;
            }
            for group in (0..self.config.groups.num()).filter(|group| *group != anchor) {
                let block = table.block(row as u32, group);
                self.publish_one(block, group, chain, tokens, row);
            }
        }
    }

    /// Makes the block findable that the last of `tokens` fill in part, as the table is about to be freed. `tokens` are
    /// computed, by committed steps, and are the output as it was told: none after a stop.
    pub fn publish_tail(&mut self, table: &BlockTable, chain: &mut PrefixChain, tokens: &[TokenId]) {
        let size = self.config.block_size as usize;
        let (i, len) = (tokens.len() / size, tokens.len() % size);
        if !self.config.enable_prefix_cache || len == 0 || self.config.groups != KvGroups::ONE {
            return;
        }
        let id = table.ids()[i];
        let block = self.pool.block(id);
        if block.refs != 1 || block.visibility != Visibility::Private {
            return;
        }
        assert!(block.filled as usize >= len, "block {id} is published before it is written");
        if i > 0 {
            let end = (i * size) as u32;
            self.publish(table, chain, tokens, end - self.config.block_size, end);
            if !self.prefix.is_findable(chain, i - 1) {
                return;
            }
        }
        let pool = &self.pool;
        let published = self.prefix.publish_tail(chain, tokens, id, |old| pool.block(old).pins > 0);
        if let Published::Now { hash, replaced } = published {
            self.show(id, hash, replaced);
        }
    }

    /// False when there is no block or it is tainted, or its hash is that of a pinned one: what follows it cannot be
    /// published either.
    fn publish_one(
        &mut self,
        block: BlockId,
        group: u32,
        chain: &mut PrefixChain,
        tokens: &[TokenId],
        row: usize,
    ) -> bool {
        if block == BlockId::NULL || self.pool.block(block).visibility == Visibility::Tainted {
            return false;
        }
        assert_eq!(self.pool.block(block).state, BlockState::Active, "block {block} is published before its commit");
        assert_eq!(
            self.pool.block(block).filled,
            self.config.block_size,
            "block {block} is published before it is full"
        );
        let pool = &self.pool;
        let (hash, replaced) =
            match self.prefix.publish(chain, tokens, (row, group), block, |old| pool.block(old).pins > 0) {
                Published::Now { hash, replaced } => (hash, replaced),
                Published::Duplicate => return true,
                Published::Refused => return false,
            };
        self.show(block, hash, replaced);
        true
    }

    fn show(&mut self, block: BlockId, hash: u64, replaced: Option<BlockId>) {
        self.pool.set_visibility(block, Visibility::Published);
        if let Some(old) = replaced {
            self.unpublish(old);
        }
        self.events.push(BlockEvent::Publish { block, hash });
    }

    fn unpublish(&mut self, block: BlockId) {
        if self.pool.block(block).state == BlockState::CachedIdle {
            self.pool.drop_idle(block);
            self.events.push(BlockEvent::Evict { block });
            self.events.push(BlockEvent::Free { block });
        } else {
            self.pool.set_visibility(block, Visibility::Private);
        }
    }
}
