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
        assert_eq!(table.num_rows(), 0, "blocks are shared with an empty table");
        assert!(slots <= parent.slots(), "{slots} slots of {} are shared", parent.slots());
        self.share_rows(table, parent, 0, slots);
        table.raise_slots(slots);
    }

    /// Appends the parent's rows from `row` on.
    fn share_rows(&mut self, table: &mut BlockTable, parent: &BlockTable, row: u32, slots: u32) {
        let groups = self.config.groups;
        assert!(slots == 0 || self.sees_all(parent, slots), "a row that is shared slid out of a window");
        table.shape(groups.num());
        for logical in row * groups.num()..self.blocks_for(slots) * groups.num() {
            let block = self.source_of(parent.ids()[logical as usize]);
            table.push(block);
            if block != BlockId::NULL {
                self.pool.hold(block);
                self.events.push(BlockEvent::Share { block, request: table.owner(), logical });
            }
        }
    }

    /// Makes a table hold what positions `0..slots` of `parent` hold, keeping the blocks that it has in common with it.
    pub fn follow(&mut self, table: &mut BlockTable, parent: &BlockTable, slots: u32) {
        assert!(slots <= parent.slots(), "{slots} slots of {} are shared", parent.slots());
        let end = (self.blocks_for(slots) * self.config.groups.num()) as usize;
        let common = table.ids().iter().zip(&parent.ids()[..end]).take_while(|(a, b)| a == b).count() as u32;
        let rows = common / self.config.groups.num();
        self.shorten(table, rows * self.config.block_size);
        self.share_rows(table, parent, rows, slots);
        table.set_slots(slots);
    }

    /// Blocks that [`KvCache::reserve`] takes to make positions `valid..slots` writable.
    pub fn needed_blocks(&self, table: &BlockTable, valid: u32, slots: u32) -> u32 {
        let added = self.blocks_for(slots).saturating_sub(table.num_rows()) * self.config.groups.num();
        added + if slots > valid { self.must_copy(table, valid) } else { 0 }
    }

    /// Copies the block that holds the last of the first `valid` positions, unless it is full of them: what its other
    /// holders write is no longer seen.
    pub fn own_tail(&mut self, table: &mut BlockTable, valid: u32) {
        let (row, filled) = (valid / self.config.block_size, valid % self.config.block_size);
        let first = row * self.config.groups.num();
        let num = if filled == 0 { 0 } else { self.config.groups.num() };
        for logical in first..first + num {
            self.copy_block(table, logical, filled);
        }
    }

    /// True when one table alone sees the block, so that its row may write it; a copy reads it before.
    pub fn is_writable(&self, id: BlockId) -> bool {
        let block = self.pool.block(id);
        block.refs == self.num_copied_from(id) + 1 && block.visibility != Visibility::Published
    }

    /// Copies of the open step that read the block.
    pub(super) fn num_copied_from(&self, id: BlockId) -> u32 {
        self.copies.iter().filter(|pending| pending.copy.from == id).count() as u32
    }

    /// Undoes the copies that the open step has for this table, if any: the table sees the sources again, and the blocks
    /// of the copies are given back. Positions from the returned one on are not writable.
    pub fn cancel_copy(&mut self, table: &mut BlockTable) -> Option<u32> {
        let mut first = None;
        while let Some(at) = self.copies.iter().position(|pending| pending.request == table.owner()) {
            let PendingCopy { copy, request, logical } = self.copies.remove(at);
            table.replace(logical, copy.from);
            self.pool.header.copied_blocks -= 1;
            self.unref(copy.to, request);
            first = Some(logical / self.config.groups.num() * self.config.block_size);
        }
        first
    }

    /// Takes back the blocks of positions `slots..`; `slots` ends a block.
    pub fn shorten(&mut self, table: &mut BlockTable, slots: u32) {
        assert!(slots.is_multiple_of(self.config.block_size), "a table is cut between blocks");
        let len = table.ids().len() as u32;
        let keep = (self.blocks_for(slots) * self.config.groups.num()).min(len);
        for i in (keep..len).rev() {
            let block = table.ids()[i as usize];
            if block != BlockId::NULL {
                self.unref(block, table.owner());
            }
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

    /// How many blocks of the row in which position `valid` lies others see, or can be found: none at its start.
    pub(super) fn must_copy(&self, table: &BlockTable, valid: u32) -> u32 {
        let size = self.config.block_size;
        if valid.is_multiple_of(size) {
            return 0;
        }
        table.row(valid / size).iter().filter(|id| !self.is_writable(**id)).count() as u32
    }

    /// Replaces the blocks of position `valid` that are not the table's own by copies of which the first
    /// `valid % block_size` slots count.
    pub(super) fn copy_tail(&mut self, table: &mut BlockTable, valid: u32) {
        let (row, filled) = (valid / self.config.block_size, valid % self.config.block_size);
        let first = row * self.config.groups.num();
        for logical in first..first + self.config.groups.num() {
            if !self.is_writable(table.ids()[logical as usize]) {
                self.copy_block(table, logical, filled);
            }
        }
    }

    fn copy_block(&mut self, table: &mut BlockTable, logical: u32, filled: u32) {
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
    use crate::kv::{CacheKey, KvConfig, KvGroups};

    fn cache(num_blocks: u32) -> KvCache {
        KvCache::new(KvConfig { num_blocks, block_size: 4, groups: KvGroups::ONE, enable_prefix_cache: true })
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
