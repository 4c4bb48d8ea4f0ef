//! Which physical block holds which part of one sequence.

use crate::ids::{BlockId, RequestId};

/// The blocks of one sequence in logical order: position `p` lives in `ids()[p / block_size]`.
///
/// A linear value: [`super::KvCache`] gives blocks to it and takes them back, nobody else changes it, and it cannot be
/// copied. It only grows while its sequence runs; a block that others see is replaced by a copy before it is written.
/// `slots` positions have a place; the last block may hold more.
#[derive(Debug, Default)]
pub struct BlockTable {
    owner: RequestId,
    blocks: Vec<BlockId>,
    slots: u32,
}

impl BlockTable {
    /// An empty table of this request.
    pub fn new(owner: RequestId) -> Self {
        BlockTable { owner, blocks: Vec::new(), slots: 0 }
    }

    /// Physical ids in logical order.
    pub fn ids(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Positions `0..slots` have a place.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The request that events name.
    pub fn owner(&self) -> RequestId {
        self.owner
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
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
    pub(super) fn truncate(&mut self, num_blocks: u32, slots: u32) {
        self.blocks.truncate(num_blocks as usize);
        self.slots = slots;
    }
}

/// How long a table was before a reservation, to go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableMark {
    pub(super) num_blocks: u32,
    pub(super) slots: u32,
    /// The block that the reservation may replace by a copy.
    pub(super) tail: Option<(u32, BlockId)>,
}

/// The table of a preempted sequence, kept until its step commits: its blocks are given back already, and only the
/// undoing of that step turns it into a table again.
#[derive(Debug)]
pub struct SuspendedTable(pub(super) BlockTable);
