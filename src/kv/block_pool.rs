//! Physical blocks: who is free, who is held by how many tables, who is idle with its content kept.
//!
//! Guarantees: a block is in exactly one of the states of [`BlockState`]; the free list and the eviction list are
//! intrusive, so moving a block allocates nothing. Between [`BlockPool::begin`] and commit every change is journalled
//! as the old value of the block, so [`BlockPool::undo`] restores the pool word for word, list orders included.
//! It knows nothing of tokens or hashes.

use crate::ids::BlockId;

/// What a block is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Block 0: stands for "nothing here".
    Null,
    /// Nobody holds it and nothing is kept.
    Free,
    /// Handed out by the plan of the step in flight.
    Reserved,
    /// Held by at least one table.
    Active,
    /// Nobody holds it; its content can be found by prefix until it is evicted.
    CachedIdle,
}

/// Whether a block's content may be found by prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visibility {
    Private,
    Published,
    /// Its content is suspect (a row that read it gave no finite logits): never published again before it is freed.
    Tainted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub state: BlockState,
    pub visibility: Visibility,
    /// Number of tables that hold it, pins included.
    pub refs: u32,
    /// Number of pins among them.
    pub pins: u32,
    /// Slots written by committed steps, or copied.
    pub filled: u32,
    /// Step of the last change.
    pub last_step: u64,
    prev: BlockId,
    next: BlockId,
}

/// A doubly linked list through the blocks; [`BlockId::NULL`] ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct List {
    head: BlockId,
    tail: BlockId,
    len: u32,
}

#[derive(Clone, Copy)]
enum Which {
    Free,
    Idle,
}

/// Everything that is not in a block, small enough to be saved whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Header {
    free: List,
    idle: List,
    pub num_shared: u32,
    pub num_saved: u32,
    pub num_pinned: u32,
    pub evicted_this_step: u32,
    pub query_tokens: u64,
    pub hit_tokens: u64,
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    pub partial_hit_tokens: u64,
    pub copied_blocks: u64,
    pub step: u64,
}

/// What became of a block that one table let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unheld {
    StillHeld,
    Idle,
    Freed,
}

#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>, // [num_blocks]
    pub header: Header,
    /// `Some` while a step is planned or in flight: the header before it.
    saved_header: Option<Header>,
    journal: Vec<(BlockId, Block)>,
}

impl BlockPool {
    /// All blocks free, to be handed out in ascending order; block 0 is the null block.
    pub fn new(num_blocks: u32) -> Self {
        assert!(num_blocks >= 2, "a pool needs the null block and one more, not {num_blocks}");
        let free = Block {
            state: BlockState::Free,
            visibility: Visibility::Private,
            refs: 0,
            pins: 0,
            filled: 0,
            last_step: 0,
            prev: BlockId::NULL,
            next: BlockId::NULL,
        };
        let mut blocks = vec![free; num_blocks as usize];
        blocks[0].state = BlockState::Null;
        let mut pool = BlockPool { blocks, header: Header::default(), saved_header: None, journal: Vec::new() };
        for id in 1..num_blocks {
            pool.push_back(Which::Free, BlockId(id));
        }
        pool
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.idx()]
    }

    pub fn num_free(&self) -> u32 {
        self.header.free.len
    }

    pub fn num_idle(&self) -> u32 {
        self.header.idle.len
    }

    pub fn is_open(&self) -> bool {
        self.saved_header.is_some()
    }

    /// Opens the transaction of a step.
    pub fn begin(&mut self, step: u64) {
        assert!(self.saved_header.is_none(), "step {step} begins while another is in flight");
        assert!(step >= self.header.step, "step {step} begins after step {}", self.header.step);
        self.saved_header = Some(self.header);
        self.header.step = step;
        self.header.evicted_this_step = 0;
    }

    /// Closes the transaction: what was reserved is active.
    pub fn commit(&mut self) {
        assert!(self.saved_header.take().is_some(), "commit without a step");
        while let Some((id, _)) = self.journal.pop() {
            let block = &mut self.blocks[id.idx()];
            if block.state == BlockState::Reserved {
                block.state = BlockState::Active;
            }
        }
    }

    /// Closes the transaction as if it had never been; `republish` hears of each block that is published again.
    pub fn undo(&mut self, mut republish: impl FnMut(BlockId)) {
        self.header = self.saved_header.take().expect("undo without a step");
        while let Some((id, old)) = self.journal.pop() {
            let now = &mut self.blocks[id.idx()];
            if now.visibility != Visibility::Published && old.visibility == Visibility::Published {
                republish(id);
            }
            *now = old;
        }
    }

    /// The next block to hand out, and whether it was cached-idle until now: the free list first, then the block idle
    /// for longest.
    pub fn next_victim(&self) -> Option<(BlockId, BlockState)> {
        let (list, state) = if self.header.free.len > 0 {
            (self.header.free, BlockState::Free)
        } else {
            (self.header.idle, BlockState::CachedIdle)
        };
        (list.len > 0).then_some((list.head, state))
    }

    /// Takes the block that [`Self::next_victim`] names; its content is gone.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let (id, state) = self.next_victim()?;
        match state {
            BlockState::CachedIdle => {
                self.unlink(Which::Idle, id);
                self.header.evicted_this_step += 1;
            }
            _ => self.unlink(Which::Free, id),
        }
        let state = if self.is_open() { BlockState::Reserved } else { BlockState::Active };
        let step = self.header.step;
        let block = self.edit(id);
        block.state = state;
        block.visibility = Visibility::Private;
        block.refs = 1;
        block.filled = 0;
        block.last_step = step;
        Some(id)
    }

    /// One more table holds this block: a prefix hit.
    pub fn hold(&mut self, id: BlockId) {
        if self.block(id).state == BlockState::CachedIdle {
            self.unlink(Which::Idle, id);
        }
        let step = self.header.step;
        let block = self.edit(id);
        block.refs += 1;
        block.last_step = step;
        block.state = BlockState::Active;
        if block.refs > 1 {
            let newly_shared = block.refs == 2;
            self.header.num_saved += 1;
            self.header.num_shared += u32::from(newly_shared);
        }
    }

    /// One table less holds this block.
    pub fn unhold(&mut self, id: BlockId) -> Unheld {
        let step = self.header.step;
        let block = self.edit(id);
        assert!(block.refs > 0, "block {id} is given back, but nobody holds it");
        block.refs -= 1;
        block.last_step = step;
        if block.refs > 0 {
            let no_longer_shared = block.refs == 1;
            self.header.num_saved -= 1;
            self.header.num_shared -= u32::from(no_longer_shared);
            return Unheld::StillHeld;
        }
        if block.visibility == Visibility::Published {
            block.state = BlockState::CachedIdle;
            self.push_back(Which::Idle, id);
            return Unheld::Idle;
        }
        block.state = BlockState::Free;
        block.visibility = Visibility::Private;
        block.filled = 0;
        self.push_front(Which::Free, id);
        Unheld::Freed
    }

    /// One of the tables that hold this block is a pin. True for the first.
    pub fn pin(&mut self, id: BlockId) -> bool {
        let block = self.edit(id);
        block.pins += 1;
        let is_first = block.pins == 1;
        self.header.num_pinned += u32::from(is_first);
        is_first
    }

    /// Undoes [`BlockPool::pin`]. True for the last.
    pub fn unpin(&mut self, id: BlockId) -> bool {
        let block = self.edit(id);
        assert!(block.pins > 0, "block {id} is unpinned, but no pin holds it");
        block.pins -= 1;
        let is_last = block.pins == 0;
        self.header.num_pinned -= u32::from(is_last);
        is_last
    }

    /// A cached-idle block becomes free.
    pub fn drop_idle(&mut self, id: BlockId) {
        assert_eq!(self.block(id).state, BlockState::CachedIdle, "block {id} is not idle");
        self.unlink(Which::Idle, id);
        let block = self.edit(id);
        block.state = BlockState::Free;
        block.visibility = Visibility::Private;
        block.filled = 0;
        self.push_front(Which::Free, id);
    }

    pub fn set_visibility(&mut self, id: BlockId, visibility: Visibility) {
        self.edit(id).visibility = visibility;
    }

    /// The block holds content up to `filled` slots: less than before, where the step that was to write it failed.
    pub fn set_filled(&mut self, id: BlockId, filled: u32) {
        self.edit(id).filled = filled;
    }

    /// This block holds `filled` slots that are valid: one holder wrote it, or it is a copy.
    pub fn fill(&mut self, id: BlockId, filled: u32) {
        let step = self.header.step;
        let block = self.edit(id);
        block.filled = filled;
        block.last_step = step;
    }

    /// Free blocks, next to be handed out first.
    pub fn free_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(self.header.free)
    }

    /// Cached-idle blocks, next victim first.
    pub fn idle_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.walk(self.header.idle)
    }

    /// Walks a list by its own count, so that a damaged list cannot make it endless.
    fn walk(&self, list: List) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = list.head;
        (0..list.len).map(move |_| {
            let id = at;
            at = self.block(id).next;
            id
        })
    }

    fn edit(&mut self, id: BlockId) -> &mut Block {
        assert_ne!(id, BlockId::NULL, "the null block is nobody's");
        let block = &mut self.blocks[id.idx()];
        if self.saved_header.is_some() {
            self.journal.push((id, *block));
        }
        block
    }

    fn list(&mut self, which: Which) -> &mut List {
        match which {
            Which::Free => &mut self.header.free,
            Which::Idle => &mut self.header.idle,
        }
    }

    fn push_back(&mut self, which: Which, id: BlockId) {
        let tail = self.list(which).tail;
        let block = self.edit(id);
        block.prev = tail;
        block.next = BlockId::NULL;
        match tail {
            BlockId::NULL => self.list(which).head = id,
            tail => self.edit(tail).next = id,
        }
        let list = self.list(which);
        list.tail = id;
        list.len += 1;
    }

    fn push_front(&mut self, which: Which, id: BlockId) {
        let head = self.list(which).head;
        let block = self.edit(id);
        block.prev = BlockId::NULL;
        block.next = head;
        match head {
            BlockId::NULL => self.list(which).tail = id,
            head => self.edit(head).prev = id,
        }
        let list = self.list(which);
        list.head = id;
        list.len += 1;
    }

    fn unlink(&mut self, which: Which, id: BlockId) {
        let Block { prev, next, .. } = *self.edit(id);
        match prev {
            BlockId::NULL => self.list(which).head = next,
            prev => self.edit(prev).next = next,
        }
        match next {
            BlockId::NULL => self.list(which).tail = prev,
            next => self.edit(next).prev = prev,
        }
        let block = &mut self.blocks[id.idx()];
        block.prev = BlockId::NULL;
        block.next = BlockId::NULL;
        self.list(which).len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(pool: &BlockPool) -> (Vec<u32>, Vec<u32>) {
        (pool.free_order().map(|b| b.0).collect(), pool.idle_order().map(|b| b.0).collect())
    }

    #[test]
    fn blocks_are_handed_out_in_ascending_order_and_the_last_freed_first() {
        let mut pool = BlockPool::new(5);
        assert_eq!([(); 4].map(|()| pool.allocate().map(|b| b.0)), [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!(pool.allocate(), None);
        assert_eq!(pool.unhold(BlockId(2)), Unheld::Freed);
        assert_eq!(pool.unhold(BlockId(3)), Unheld::Freed);
        assert_eq!(orders(&pool), (vec![3, 2], vec![]));
    }

    #[test]
    fn published_blocks_stay_idle_until_the_free_list_is_empty() {
        let mut pool = BlockPool::new(4);
        for _ in 0..3 {
            pool.allocate();
        }
        pool.set_visibility(BlockId(1), Visibility::Published);
        pool.set_visibility(BlockId(3), Visibility::Published);
        for id in [3, 2, 1] {
            pool.unhold(BlockId(id));
        }
        assert_eq!(orders(&pool), (vec![2], vec![3, 1]));
        assert_eq!([(); 3].map(|()| pool.allocate().map(|b| b.0)), [Some(2), Some(3), Some(1)]);
    }

    #[test]
    fn undo_restores_states_counts_and_list_orders() {
        let mut pool = BlockPool::new(6);
        for _ in 0..4 {
            pool.allocate();
        }
        for id in [1, 2, 3] {
            pool.set_visibility(BlockId(id), Visibility::Published);
            pool.unhold(BlockId(id));
        }
        let before = (pool.blocks.clone(), pool.header);
        pool.begin(7);
        pool.hold(BlockId(2));
        pool.hold(BlockId(2));
        pool.allocate();
        pool.allocate();
        pool.unhold(BlockId(4));
        pool.allocate();
        pool.unhold(BlockId(2));
        let mut republished = Vec::new();
        pool.undo(|id| republished.push(id.0));
        assert_eq!((pool.blocks.clone(), pool.header), before);
        assert_eq!(republished, [1], "one idle block was evicted and came back");
    }

    #[test]
    #[should_panic(expected = "nobody holds it")]
    fn giving_a_block_back_twice_is_caught() {
        let mut pool = BlockPool::new(3);
        let id = pool.allocate().expect("a fresh pool has blocks");
        pool.unhold(id);
        pool.unhold(id);
    }
}
