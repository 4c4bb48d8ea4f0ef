//! The cache as others see it: counts, and block by block.

use super::block_pool::Visibility;
use super::{BlockView, KvCache, KvCounts};
use crate::ids::BlockId;

impl KvCache {
    /// Counts over the pool and host memory.
    pub fn counts(&self) -> KvCounts {
        let header = &self.pool.header;
        let (free, cached_idle) = (self.pool.num_free(), self.pool.num_idle());
        KvCounts {
            total: self.num_usable(),
            used: self.num_usable() - free - cached_idle,
            cached_idle,
            free,
            shared: header.num_shared,
            saved: header.num_saved,
            evicted_this_step: header.evicted_this_step,
            pinned: header.num_pinned,
            query_tokens: header.query_tokens,
            hit_tokens: header.hit_tokens,
            host_hit_tokens: header.host_hit_tokens,
            disk_hit_tokens: header.disk_hit_tokens,
            host: self.host.counts(),
            partial_hit_tokens: header.partial_hit_tokens,
            copied_blocks: header.copied_blocks,
        }
    }

    /// One block, for the block map. Panics when `id` is outside the pool.
    pub fn block(&self, id: BlockId) -> BlockView {
        let block = self.pool.block(id);
        let is_published = block.visibility == Visibility::Published;
        BlockView {
            state: block.state,
            refs: block.refs,
            filled: block.filled,
            hash: is_published.then(|| self.prefix.hash_of(id)),
            is_pinned: block.pins > 0,
            last_step: block.last_step,
        }
    }

    /// Every block in pool order, the null block first.
    pub fn blocks(&self) -> impl Iterator<Item = BlockView> + '_ {
        (0..self.config.num_blocks).map(|id| self.block(BlockId(id)))
    }
}
