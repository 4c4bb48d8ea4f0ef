//! Blocks that several tables see, and the copy that one of them takes before it writes.
//!
//! Guarantees: a block is written only by the one table that holds it, and never while it can be found by prefix; the
//! source of a copy stays as it is until the step is over, whoever lets go of it meanwhile; no copy of a step reads or
//! writes what another one writes, so their order does not matter; a copy of suspect content is suspect.

use super::block_pool::{Unheld, Visibility};
use super::{BlockEvent, BlockTable, KvCache};
use crate::ids::{BlockId, RequestId};

/// K and V of all layers of one block become those of another, before the forward pass of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

/// A copy of the open step. It holds its source in place of the table that let go of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingCopy {
    pub copy: BlockCopy,
    request: RequestId,
    logical: u32,
}

impl KvCache {
    /// Copies that the open step does before it computes.
    pub fn copies(&self) -> impl ExactSizeIterator<Item = BlockCopy> + '_ {
        self.copies.iter().map(|pending| pending.copy)
    }

    /// Whose tables the copies of the open step belong to.
    pub fn copying(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.copies.iter().map(|pending| pending.request)
    }

    /// Gives positions `0..slots` of `parent` to an empty table, block by block. A block that `parent` itself is about to
    /// get as a copy is taken from its source.
    pub fn share(&mut self, table: &mut BlockTable, parent: &BlockTable, slots: u32) {
        assert_eq!(table.num_blocks(), 0, "blocks are shared with an empty table");
        assert!(slots <= parent.slots(), "{slots} slots of {} are shared", parent.slots());
        for logical in 0..self.blocks_for(slots) {
            let block = self.source_of(parent.ids()[logical as usize]);
            self.pool.hold(block);
            table.push(block);
            self.events.push(BlockEvent::Share { block, request: table.owner(), logical });
        }
        table.raise_slots(slots);
    }

    /// Makes a table hold what positions `0..slots` of `parent` hold, keeping the blocks that it has in common with it.
    pub fn follow(&mut self, table: &mut BlockTable, parent: &BlockTable, slots: u32) {
        assert!(slots <= parent.slots(), "{slots} slots of {} are shared", parent.slots());
        let end = self.blocks_for(slots) as usize;
        let common = table.ids().iter().zip(&parent.ids()[..end]).take_while(|(a, b)| a == b).count();
        self.shorten(table, common as u32 * self.config.block_size);
        for logical in common..end {
            let block = parent.ids()[logical];
            self.pool.hold(block);
            table.push(block);
            self.events.push(BlockEvent::Share { block, request: table.owner(), logical: logical as u32 });
        }
        table.set_slots(slots);
    }

    /// Blocks that [`KvCache::reserve`] takes to make positions `valid..slots` writable.
    pub fn needed_blocks(&self, table: &BlockTable, valid: u32, slots: u32) -> u32 {
        let added = self.blocks_for(slots).saturating_sub(table.num_blocks());
        added + u32::from(slots > valid && self.must_copy(table, valid))
    }

    /// Copies the block that holds the last of the first `valid` positions, unless it is full of them: what its other
    /// holders write is no longer seen.
    pub fn own_tail(&mut self, table: &mut BlockTable, valid: u32) {
        if !valid.is_multiple_of(self.config.block_size) {
            self.copy_tail(table, valid);
        }
    }

    /// True when one table alone sees the block, so that its row may write it; a copy reads it before.
    pub fn is_writable(&self, id: BlockId) -> bool {
        let block = self.pool.block(id);
        let copied_from = self.copies.iter().filter(|pending| pending.copy.from == id).count() as u32;
        block.refs == copied_from + 1 && block.visibility != Visibility::Published
    }

    /// Undoes the copy that the open step has for this table, if any: the table sees the source again, and the copy's
    /// block is given back. Positions from the returned one on are not writable.
    pub fn cancel_copy(&mut self, table: &mut BlockTable) -> Option<u32> {
        let at = self.copies.iter().position(|pending| pending.request == table.owner())?;
        let PendingCopy { copy, request, logical } = self.copies.remove(at);
        table.replace(logical, copy.from);
        self.pool.header.copied_blocks -= 1;
        self.unref(copy.to, request);
        Some(logical * self.config.block_size)
    }

    /// Takes back the blocks of positions `slots..`; `slots` ends a block.
    pub fn shorten(&mut self, table: &mut BlockTable, slots: u32) {
        assert!(slots.is_multiple_of(self.config.block_size), "a table is cut between blocks");
        let keep = self.blocks_for(slots).min(table.num_blocks());
        for i in (keep..table.num_blocks()).rev() {
            self.unref(table.ids()[i as usize], table.owner());
        }
        table.truncate(keep, slots.min(table.slots()));
    }

    /// The table lets go of a block.
    pub(super) fn unref(&mut self, block: BlockId, request: RequestId) {
        self.events.push(BlockEvent::Unref { block, request });
        match self.pool.unhold(block) {
            Unheld::StillHeld => {}
            Unheld::Idle => self.events.push(BlockEvent::CacheIdle { block }),
            Unheld::Freed => self.events.push(BlockEvent::Free { block }),
        }
    }

    /// The step is over: sources are let go of.
    pub(super) fn end_copies(&mut self) {
        while let Some(pending) = self.copies.pop() {
            self.unref(pending.copy.from, pending.request);
        }
    }

    /// True when position `valid` lies in a block that others see, or that can be found.
    pub(super) fn must_copy(&self, table: &BlockTable, valid: u32) -> bool {
        let size = self.config.block_size;
        let Some(&id) = table.ids().get((valid / size) as usize) else { return false };
        !valid.is_multiple_of(size) && !self.is_writable(id)
    }

    /// Replaces the block of position `valid` by a copy of which the first `valid % block_size` slots count.
    pub(super) fn copy_tail(&mut self, table: &mut BlockTable, valid: u32) {
        let (logical, filled) = (valid / self.config.block_size, valid % self.config.block_size);
        let (request, from) = (table.owner(), table.ids()[logical as usize]);
        let to = self.take_block(request, logical);
        self.pool.fill(to, filled);
        if self.pool.block(from).visibility == Visibility::Tainted {
            self.pool.set_visibility(to, Visibility::Tainted);
        }
        table.replace(logical, to);
        self.pool.header.copied_blocks += 1;
        self.events.push(BlockEvent::Copy { from, to, request });
        self.events.push(BlockEvent::Fill { block: to, filled });
        self.copies.push(PendingCopy { copy: BlockCopy { from, to }, request, logical });
    }

    fn source_of(&self, block: BlockId) -> BlockId {
        self.copies.iter().find(|pending| pending.copy.to == block).map_or(block, |pending| pending.copy.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{CacheKey, KvConfig};

    fn cache(num_blocks: u32) -> KvCache {
        KvCache::new(KvConfig { num_blocks, block_size: 4, enable_prefix_cache: true })
    }

    /// A table of request 1 with `slots` computed positions.
    fn parent(kv: &mut KvCache, slots: u32) -> BlockTable {
        let mut table = BlockTable::new(RequestId(1));
        kv.begin(1);
        kv.reserve(&mut table, 0, slots).expect("the pool is empty");
        kv.commit();
        kv.fill(&table, 0, slots);
        table
    }

    fn ids(table: &BlockTable) -> Vec<u32> {
        table.ids().iter().map(|id| id.0).collect()
    }

    #[test]
    fn the_first_to_write_into_a_shared_block_takes_a_copy_and_the_last_writes_in_place() {
        let mut kv = cache(9);
        let mut first = parent(&mut kv, 6);
        let mut second = BlockTable::new(RequestId(2));
        kv.begin(2);
        kv.share(&mut second, &first, 6);
        assert_eq!((ids(&second), kv.counts().saved), (vec![1, 2], 2));
        assert_eq!(kv.needed_blocks(&first, 6, 7), 1, "a copy");
        assert_eq!(kv.reserve(&mut first, 6, 7), Ok(1));
        assert_eq!(ids(&first), [1, 3]);
        assert_eq!(kv.copies().collect::<Vec<_>>(), [BlockCopy { from: BlockId(2), to: BlockId(3) }]);
        assert!(kv.is_writable(BlockId(3)) && kv.is_writable(BlockId(2)), "the copy holds its source beside request 2");
        kv.commit();
        kv.begin(3);
        assert_eq!(kv.reserve(&mut second, 6, 7), Ok(0));
        assert_eq!((ids(&second), kv.copies().len()), (vec![1, 2], 0));
        kv.commit();
        assert_eq!((kv.counts().copied_blocks, kv.counts().saved), (1, 1));
    }

    #[test]
    fn a_source_outlives_its_holders_until_the_step_is_over() {
        let mut kv = cache(5);
        let mut first = parent(&mut kv, 6);
        let mut second = BlockTable::new(RequestId(2));
        kv.begin(2);
        kv.share(&mut second, &first, 6);
        kv.own_tail(&mut second, 6);
        kv.cancel_copy(&mut first);
        let first = kv.suspend(first);
        let mut third = BlockTable::new(RequestId(3));
        assert_eq!(kv.reserve(&mut third, 0, 4), Ok(1));
        assert_eq!((ids(&second), ids(&third)), (vec![1, 3], vec![4]), "block 2 is not handed out");
        assert!(kv.reserve(&mut third, 4, 8).is_err());
        kv.commit();
        assert_eq!(kv.free_order().collect::<Vec<_>>(), [BlockId(2)]);
        drop(first);
    }

    #[test]
    fn a_fork_of_a_table_that_takes_a_copy_in_this_step_copies_from_the_source() {
        let mut kv = cache(9);
        let first = parent(&mut kv, 6);
        let [mut second, mut third] = [2, 3].map(|id| BlockTable::new(RequestId(id)));
        kv.begin(2);
        kv.share(&mut second, &first, 6);
        kv.own_tail(&mut second, 6);
        kv.share(&mut third, &second, 5);
        kv.own_tail(&mut third, 5);
        let copies: Vec<(u32, u32)> = kv.copies().map(|copy| (copy.from.0, copy.to.0)).collect();
        assert_eq!(copies, [(2, 3), (2, 4)]);
        assert_eq!(kv.block(BlockId(4)).filled, 1);
    }

    #[test]
    fn undoing_a_step_puts_tables_and_counts_back() {
        let mut kv = cache(9);
        let mut first = parent(&mut kv, 6);
        let mut second = BlockTable::new(RequestId(2));
        kv.begin(2);
        kv.share(&mut second, &first, 6);
        kv.commit();
        let before = (kv.blocks().collect::<Vec<_>>(), kv.counts(), ids(&first));
        kv.drain_events();
        kv.begin(3);
        let mark = kv.mark(&first, 6);
        kv.reserve(&mut first, 6, 12).expect("there is room");
        assert_eq!(ids(&first), [1, 3, 4]);
        kv.undo();
        kv.rewind(&mut first, mark);
        assert_eq!((kv.blocks().collect::<Vec<_>>(), kv.counts(), ids(&first)), before);
        assert_eq!(kv.copies().len(), 0);
        assert_eq!(kv.drain_events().len(), 0, "what never happened is not told");
    }

    #[test]
    fn a_cancelled_copy_leaves_the_table_with_the_source_and_can_be_cut_off() {
        let mut kv = cache(9);
        let first = parent(&mut kv, 10);
        let mut second = BlockTable::new(RequestId(2));
        kv.begin(2);
        kv.share(&mut second, &first, 10);
        kv.own_tail(&mut second, 10);
        assert_eq!(kv.cancel_copy(&mut second), Some(8));
        assert_eq!((ids(&second), kv.counts().copied_blocks), (vec![1, 2, 3], 0));
        kv.shorten(&mut second, 8);
        kv.commit();
        assert_eq!((ids(&second), second.slots(), kv.block(BlockId(3)).refs), (vec![1, 2], 8, 1));
    }

    #[test]
    fn a_copy_of_suspect_content_is_suspect() {
        let mut kv = cache(9);
        let first = parent(&mut kv, 6);
        kv.taint(&first);
        let mut second = BlockTable::new(RequestId(2));
        kv.begin(2);
        kv.share(&mut second, &first, 6);
        kv.own_tail(&mut second, 6);
        kv.reserve(&mut second, 6, 8).expect("there is room");
        kv.commit();
        kv.fill(&second, 6, 8);
        let (tokens, mut chain) = ([1; 8], kv.new_chain(CacheKey::default()));
        chain.extend(&tokens);
        kv.publish(&second, &mut chain, &tokens, 4, 8);
        assert_eq!(kv.lookup(&chain, &tokens, 8).num_blocks, 0);
        assert!(kv.blocks().all(|block| block.hash.is_none()));
    }
}
