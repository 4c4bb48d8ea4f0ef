//! Which physical block holds which part of one sequence.

use super::MAX_GROUPS;
use crate::ids::{BlockId, RequestId};

/// The blocks of one sequence in logical order. A row holds `block_size` positions and has a block for each layer group:
/// `ids()[row * num_groups + group]`, so with one group position `p` lives in `ids()[p / block_size]`.
///
/// A linear value: [`super::KvCache`] gives blocks to it and takes them back, nobody else changes it, and it cannot be
/// copied. It only grows while its sequence runs; a block that others see is replaced by a copy before it is written.
/// `slots` positions have a place; the last row may hold more.
/// [`BlockId::NULL`] stands where no later token of a group sees the row: at the start of a windowed group only.
#[derive(Debug)]
pub struct BlockTable {
    owner: RequestId,
    blocks: Vec<BlockId>, // [num_rows, num_groups]
    num_groups: u32,
    slots: u32,
    /// Rows at the start of each group without a block; empty when there are none.
    null_rows: Vec<u32>, // [num_groups]
    num_null: u32,
}

impl Default for BlockTable {
    fn default() -> Self {
        BlockTable::new(RequestId::default())
    }
}

impl BlockTable {
    /// An empty table of this request. It takes the cache's number of groups when it is first given blocks.
    pub fn new(owner: RequestId) -> Self {
        BlockTable { owner, blocks: Vec::new(), num_groups: 1, slots: 0, null_rows: Vec::new(), num_null: 0 }
    }

    /// Physical ids, row by row, in a row group by group.
    pub fn ids(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The blocks that the table holds, each once.
    pub fn held(&self) -> impl DoubleEndedIterator<Item = BlockId> + '_ {
        self.blocks.iter().copied().filter(|block| *block != BlockId::NULL)
    }

    /// Physical ids of one group in logical order.
    pub fn group(&self, group: u32) -> impl ExactSizeIterator<Item = BlockId> + DoubleEndedIterator + '_ {
        self.blocks.iter().copied().skip(group as usize).step_by(self.num_groups as usize)
    }

    /// The block of one row.
    pub fn block(&self, row: u32, group: u32) -> BlockId {
        self.blocks[(row * self.num_groups + group) as usize]
    }

    /// Blocks in a row.
    pub fn num_groups(&self) -> u32 {
        self.num_groups
    }

    /// Number of rows: each group's logical blocks.
    pub fn num_rows(&self) -> u32 {
        self.blocks.len() as u32 / self.num_groups
    }

    /// Number of blocks held, over all groups.
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32 - self.num_null
    }

    /// Rows at the start that have no block in this group.
    pub fn null_rows(&self, group: u32) -> u32 {
        self.null_rows.get(group as usize).copied().unwrap_or(0)
    }

    /// Positions `0..slots` have a place.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The request that events name.
    pub fn owner(&self) -> RequestId {
        self.owner
    }

    /// Sets the width of rows, before the first.
    pub(super) fn shape(&mut self, num_groups: u32) {
        assert!(self.blocks.is_empty() || self.num_groups == num_groups, "a table of another cache");
        self.num_groups = num_groups;
    }

    /// Appends the block of the next group of the last row, or of the first group of a new one.
    pub(super) fn push(&mut self, block: BlockId) {
        if block == BlockId::NULL {
            let (row, group) = (self.num_rows(), self.blocks.len() as u32 % self.num_groups);
            self.count_null(row, group);
        }
        self.blocks.push(block);
    }

    /// Takes the first block that a group still has.
    pub(super) fn take_first(&mut self, group: u32) -> BlockId {
        let row = self.null_rows(group);
        self.count_null(row, group);
        std::mem::replace(&mut self.blocks[(row * self.num_groups + group) as usize], BlockId::NULL)
    }

    fn count_null(&mut self, row: u32, group: u32) {
        assert_eq!(self.null_rows(group), row, "a hole behind a block of group {group}");
        self.null_rows.resize(self.num_groups as usize, 0);
        self.null_rows[group as usize] += 1;
        self.num_null += 1;
    }

    /// Raises `slots`; asking for fewer than there are changes nothing.
    pub(super) fn raise_slots(&mut self, slots: u32) {
        self.slots = self.slots.max(slots);
    }

    /// The last block of a table that follows another may be shared in part.
    pub(super) fn set_slots(&mut self, slots: u32) {
        self.slots = slots;
    }

    /// Puts another block in the place of one.
    pub(super) fn replace(&mut self, logical: u32, block: BlockId) {
        self.blocks[logical as usize] = block;
    }

    /// Back to an earlier length: the undoing of a reservation whose blocks the pool takes back itself.
    pub(super) fn truncate(&mut self, len: u32, slots: u32) {
        self.blocks.truncate(len as usize);
        self.slots = slots;
        if self.num_null > 0 {
            let num_rows = self.num_rows();
            self.null_rows.iter_mut().for_each(|rows| *rows = (*rows).min(num_rows));
            self.num_null = self.null_rows.iter().sum();
        }
    }

    /// The blocks of a row.
    pub(super) fn row(&self, row: u32) -> &[BlockId] {
        let start = ((row * self.num_groups) as usize).min(self.blocks.len());
        &self.blocks[start..(start + self.num_groups as usize).min(self.blocks.len())]
    }

    /// How long the table is, and the row whose blocks may be replaced.
    pub(super) fn mark(&self, row: u32) -> TableMark {
        let mut tail = [BlockId::NULL; MAX_GROUPS];
        let blocks = self.row(row);
        tail[..blocks.len()].copy_from_slice(blocks);
        let tail_row = (!blocks.is_empty()).then_some(row);
        TableMark { len: self.blocks.len() as u32, slots: self.slots, tail_row, tail }
    }

    /// Back to what was marked.
    pub(super) fn rewind(&mut self, mark: &TableMark) {
        self.truncate(mark.len, mark.slots);
        if let Some(row) = mark.tail_row {
            let (start, width) = ((row * self.num_groups) as usize, self.num_groups as usize);
            self.blocks[start..start + width].copy_from_slice(&mark.tail[..width]);
        }
    }
}

/// How long a table was before a reservation, to go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableMark {
    len: u32,
    slots: u32,
    /// The row whose blocks the reservation may replace by copies, and those blocks.
    tail_row: Option<u32>,
    tail: [BlockId; MAX_GROUPS],
}

/// The table of a preempted sequence, kept until its step commits: its blocks are given back already, and only the
/// undoing of that step turns it into a table again.
#[derive(Debug)]
pub struct SuspendedTable(pub(super) BlockTable);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_a_block_for_each_group_and_windowed_groups_lose_their_first() {
        let mut table = BlockTable::new(RequestId(1));
        table.shape(2);
        (5..11).for_each(|id| table.push(BlockId(id)));
        assert_eq!((table.num_rows(), table.num_blocks()), (3, 6));
        assert_eq!(table.group(1).map(|b| b.0).collect::<Vec<_>>(), [6, 8, 10]);
        assert_eq!((table.take_first(1), table.take_first(1)), (BlockId(6), BlockId(8)));
        assert_eq!(table.group(1).map(|b| b.0).collect::<Vec<_>>(), [0, 0, 10]);
        assert_eq!((table.block(2, 1), table.block(0, 0)), (BlockId(10), BlockId(5)));
        assert_eq!((table.num_rows(), table.num_blocks(), table.null_rows(1), table.null_rows(0)), (3, 4, 2, 0));
        assert_eq!(table.held().map(|b| b.0).collect::<Vec<_>>(), [5, 7, 9, 10]);
    }
}
