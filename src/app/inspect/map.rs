//! The block map at one step: who holds which block, rebuilt from deltas.
//!
//! Guarantees: applying the deltas of a step to the map of the step before gives the map of that step; counts are kept
//! while applying and each block is counted exactly once; deltas that do not fit (unknown block, a holder that does not
//! hold) are ignored: they come from another pool, or the snapshot that the map began with had them already. Memory:
//! [`Cell`] is at most 56 bytes.

use super::host::{HostCell, HostMap};
use crate::ids::{BlockId, RequestId};
use crate::telemetry::{BlockDelta, BlockState, EngineSnapshot, StepRecord};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// One block. Steps are kept as `u32`: four billion steps are years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    pub state: BlockState,
    /// Tables that hold it.
    pub refs: u32,
    /// Tokens written.
    pub filled: u32,
    /// Place in the holders' tables.
    pub logical: u32,
    /// The holder that colour comes from; of a cached-idle block the last holder. Meaningless while free.
    pub owner: RequestId,
    pub hash: Option<u64>,
    /// A pinned prefix holds it.
    pub is_pinned: bool,
    /// Its content came back from host memory.
    pub is_from_host: bool,
    /// The block that it was copied from before its holder wrote; [`BlockId::NULL`] where it began empty.
    pub copied_from: BlockId,
    pub alloc_step: u32,
    /// Step of the last event.
    pub last_step: u32,
    /// Order of becoming idle: the smallest is evicted first.
    idle_order: u32,
}

/// Every block counted once: exclusively held, shared, cached-idle or free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks held by exactly one table, by request; no zero entries.
    pub exclusive: FxHashMap<RequestId, u32>,
    pub shared: u32,
    /// Sum over shared blocks of (references - 1).
    pub saved: u32,
    pub cached_idle: u32,
    pub free: u32,
    /// Of all the above: held by a pinned prefix, and held as a copy made on write.
    pub pinned: u32,
    pub copied: u32,
}

impl Counts {
    pub fn used(&self) -> u32 {
        self.exclusive.values().sum::<u32>() + self.shared
    }

    /// All blocks but the null block.
    pub fn total(&self) -> u32 {
        self.used() + self.cached_idle + self.free
    }
}

/// The pool at one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockMap {
    /// The step whose end this shows.
    pub step: u64,
    cells: Vec<Cell>, // [num_blocks], indexed by BlockId
    /// Physical ids in logical order, by request. `BlockId::NULL` where a table has a hole.
    tables: BTreeMap<RequestId, Vec<BlockId>>,
    /// Blocks evicted in this very step.
    evicted: Vec<BlockId>,
    host: HostMap,
    counts: Counts,
    next_idle_order: u32,
}

impl BlockMap {
    /// A pool in which nothing has happened. `num_blocks` includes the null block.
    pub fn pristine(num_blocks: usize, step: u64) -> BlockMap {
        let mut cells = vec![Cell::default(); num_blocks];
        if let Some(null) = cells.first_mut() {
            null.state = BlockState::Null;
        }
        let counts = Counts { free: num_blocks.saturating_sub(1) as u32, ..Counts::default() };
        BlockMap { step, cells, counts, ..BlockMap::default() }
    }

    /// The pool as the engine described it.
    pub fn from_snapshot(snapshot: &EngineSnapshot) -> BlockMap {
        let mut map = BlockMap::pristine(snapshot.blocks.len(), snapshot.step);
        for (cell, info) in map.cells.iter_mut().zip(&snapshot.blocks) {
            cell.state = info.state;
            cell.refs = info.refs;
            cell.filled = info.filled;
            cell.hash = info.hash;
            cell.is_pinned = info.pinned;
            cell.last_step = step32(info.last_step);
            cell.alloc_step = cell.last_step;
        }
        for request in &snapshot.requests {
            for (logical, &block) in request.blocks.iter().enumerate() {
                let Some(cell) = map.cells.get_mut(block.idx()) else { continue };
                cell.owner = request.id;
                cell.logical = logical as u32;
            }
            if !request.blocks.is_empty() {
                map.tables.insert(request.id, request.blocks.clone());
            }
        }
        for &block in &snapshot.eviction_order {
            if let Some(cell) = map.cells.get_mut(block.idx()) {
                cell.idle_order = map.next_idle_order;
                map.next_idle_order += 1;
            }
        }
        map.host = HostMap::from_snapshot(&snapshot.host, step32(snapshot.step));
        map.counts = map.recount();
        map
    }

    /// Goes on to the end of `record`'s step.
    pub fn apply(&mut self, record: &StepRecord) {
        self.step = record.step;
        self.evicted.clear();
        for delta in &record.deltas {
            self.apply_delta(delta);
        }
    }

    fn apply_delta(&mut self, delta: &BlockDelta) {
        if let BlockDelta::HostFree { host } = *delta {
            self.host.free(host);
        }
        let block = block_of(delta);
        if block == BlockId::NULL || block.idx() >= self.cells.len() {
            return;
        }
        self.uncount(block);
        let step = step32(self.step);
        self.cells[block.idx()].last_step = step;
        match *delta {
            BlockDelta::Alloc { request, logical, .. } => {
                self.cells[block.idx()] = Cell {
                    state: BlockState::Active,
                    refs: 1,
                    logical,
                    owner: request,
                    alloc_step: step,
                    last_step: step,
                    ..Cell::default()
                };
                self.put_in_table(request, logical, block);
            }
            BlockDelta::Fill { filled, .. } => self.cells[block.idx()].filled = filled,
            BlockDelta::Share { request, logical, .. } => self.share(block, request, logical),
            BlockDelta::Unref { request, .. } => self.unref(block, request),
            BlockDelta::CacheIdle { .. } => {
                let cell = &mut self.cells[block.idx()];
                cell.state = BlockState::CachedIdle;
                cell.idle_order = self.next_idle_order;
                self.next_idle_order = self.next_idle_order.wrapping_add(1);
            }
            BlockDelta::Evict { .. } => {
                self.cells[block.idx()] = Cell { last_step: step, ..Cell::default() };
                self.evicted.push(block);
            }
            BlockDelta::Free { .. } => self.cells[block.idx()] = Cell { last_step: step, ..Cell::default() },
            BlockDelta::Publish { hash, .. } => self.cells[block.idx()].hash = Some(hash),
            BlockDelta::Copy { from, .. } => self.cells[block.idx()].copied_from = from,
            BlockDelta::SwapOut { host, request, .. } => self.swap_out(block, host, request),
            BlockDelta::SwapIn { host, .. } => {
                let filled = self.host.get(host).map_or(0, |h| h.filled);
                let cell = &mut self.cells[block.idx()];
                cell.is_from_host = true;
                cell.filled = cell.filled.max(filled);
            }
            BlockDelta::Pin { .. } => self.cells[block.idx()].is_pinned = true,
            BlockDelta::Unpin { .. } => {
                // It stands at the end of the line again.
                let cell = &mut self.cells[block.idx()];
                cell.is_pinned = false;
                cell.idle_order = self.next_idle_order;
                self.next_idle_order = self.next_idle_order.wrapping_add(1);
            }
            BlockDelta::HostFree { .. } => {}
        }
        self.count(block);
    }

    fn swap_out(&mut self, block: BlockId, host: u32, request: Option<RequestId>) {
        let cell = &self.cells[block.idx()];
        let last_holder = (cell.state != BlockState::Free).then_some(cell.owner);
        let place = HostCell {
            request,
            owner: request.or(last_holder),
            hash: cell.hash,
            filled: cell.filled,
            logical: request.and_then(|r| self.place_of(block, r)).map_or(cell.logical, |l| l as u32),
            since_step: step32(self.step),
        };
        self.host.put(host, place);
    }

    fn share(&mut self, block: BlockId, request: RequestId, logical: u32) {
        if self.place_of(block, request).is_some() {
            return;
        }
        let cell = &mut self.cells[block.idx()];
        cell.refs += 1;
        cell.state = BlockState::Active;
        if cell.refs == 1 {
            (cell.owner, cell.logical) = (request, logical);
        }
        self.put_in_table(request, logical, block);
    }

    fn unref(&mut self, block: BlockId, request: RequestId) {
        let Some(place) = self.place_of(block, request) else { return };
        if let Some(table) = self.tables.get_mut(&request) {
            table[place] = BlockId::NULL;
            while table.last() == Some(&BlockId::NULL) {
                table.pop();
            }
            if table.is_empty() {
                self.tables.remove(&request);
            }
        }
        self.drop_ref(block, request);
    }

    /// One holder less; its place in the table is gone already.
    fn drop_ref(&mut self, block: BlockId, request: RequestId) {
        let cell = &mut self.cells[block.idx()];
        cell.refs = cell.refs.saturating_sub(1);
        if cell.refs > 0 && cell.owner == request {
            // The oldest of those that still hold it gives the colour.
            if let Some(&(owner, logical)) = self.holders(block).first() {
                let cell = &mut self.cells[block.idx()];
                (cell.owner, cell.logical) = (owner, logical);
            }
        }
    }

    /// Where `request`'s table holds `block`.
    fn place_of(&self, block: BlockId, request: RequestId) -> Option<usize> {
        let table = self.tables.get(&request)?;
        let hint = self.cells[block.idx()].logical as usize;
        match table.get(hint) {
            Some(&b) if b == block => Some(hint),
            _ => table.iter().rposition(|&b| b == block),
        }
    }

    fn put_in_table(&mut self, request: RequestId, logical: u32, block: BlockId) {
        // A table is never longer than the pool: a larger index is damage, not a reason to allocate.
        if logical as usize >= self.cells.len() {
            return;
        }
        let table = self.tables.entry(request).or_default();
        if table.len() <= logical as usize {
            table.resize(logical as usize + 1, BlockId::NULL);
        }
        let old = std::mem::replace(&mut table[logical as usize], block);
        // A copy on write takes the place of the block that it was copied from, whose `Unref` then finds nothing to do.
        if old != BlockId::NULL && old != block {
            self.uncount(old);
            self.drop_ref(old, request);
            self.count(old);
        }
    }

    fn uncount(&mut self, block: BlockId) {
        tally(&mut self.counts, &self.cells[block.idx()], -1);
    }

    fn count(&mut self, block: BlockId) {
        tally(&mut self.counts, &self.cells[block.idx()], 1);
    }

    /// The counts, computed from nothing but the cells.
    pub fn recount(&self) -> Counts {
        let mut counts = Counts::default();
        for cell in self.cells.iter().skip(1) {
            tally(&mut counts, cell, 1);
        }
        counts
    }

    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Indexed by [`BlockId`]; the first is the null block.
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    pub fn cell(&self, block: BlockId) -> Option<&Cell> {
        self.cells.get(block.idx())
    }

    pub fn tables(&self) -> &BTreeMap<RequestId, Vec<BlockId>> {
        &self.tables
    }

    /// The block that was published under this content hash.
    pub fn block_of_hash(&self, hash: u64) -> Option<BlockId> {
        self.cells.iter().position(|c| c.hash == Some(hash)).map(|i| BlockId(i as u32))
    }

    /// Blocks in host memory.
    pub fn host(&self) -> &HostMap {
        &self.host
    }

    pub fn evicted(&self) -> &[BlockId] {
        &self.evicted
    }

    /// Who holds `block` and where in its table, oldest request first.
    pub fn holders(&self, block: BlockId) -> Vec<(RequestId, u32)> {
        let Some(cell) = self.cell(block) else { return Vec::new() };
        if cell.refs == 0 && cell.state != BlockState::Active {
            return Vec::new();
        }
        let place = |&id: &RequestId| Some((id, self.place_of(block, id)? as u32));
        self.tables.keys().filter_map(place).collect()
    }

    /// The block before `block` in its first holder's table.
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        let (request, logical) = *self.holders(block).first()?;
        let parent = *self.tables.get(&request)?.get(logical.checked_sub(1)? as usize)?;
        (parent != BlockId::NULL).then_some(parent)
    }

    /// Cached-idle blocks that can be evicted (pinned ones cannot), next victim first.
    pub fn eviction_order(&self) -> Vec<BlockId> {
        let idle = |(_, cell): &(usize, &Cell)| cell.state == BlockState::CachedIdle && !cell.is_pinned;
        let mut order: Vec<(u32, BlockId)> =
            self.cells.iter().enumerate().filter(idle).map(|(i, cell)| (cell.idle_order, BlockId(i as u32))).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, block)| block).collect()
    }

    /// Heap bytes, for the history's cap.
    pub fn num_bytes(&self) -> usize {
        let tables: usize = self.tables.values().map(|t| t.len() * size_of::<BlockId>() + 64).sum();
        let host = self.host.len() * (size_of::<HostCell>() + 16);
        self.cells.len() * size_of::<Cell>() + tables + host + self.counts.exclusive.len() * 16
    }
}

fn tally(counts: &mut Counts, cell: &Cell, by: i32) {
    let add = |n: &mut u32, by: i32| *n = n.wrapping_add_signed(by);
    add(&mut counts.pinned, if cell.is_pinned { by } else { 0 });
    add(&mut counts.copied, if cell.copied_from == BlockId::NULL { 0 } else { by });
    match cell.state {
        BlockState::Null => {}
        BlockState::Free => add(&mut counts.free, by),
        BlockState::CachedIdle => add(&mut counts.cached_idle, by),
        BlockState::Active if cell.refs >= 2 => {
            add(&mut counts.shared, by);
            add(&mut counts.saved, by * (cell.refs as i32 - 1));
        }
        BlockState::Active => {
            let n = counts.exclusive.entry(cell.owner).or_insert(0);
            add(n, by);
            if *n == 0 {
                counts.exclusive.remove(&cell.owner);
            }
        }
    }
}

fn block_of(delta: &BlockDelta) -> BlockId {
    match *delta {
        BlockDelta::Alloc { block, .. }
        | BlockDelta::Fill { block, .. }
        | BlockDelta::Share { block, .. }
        | BlockDelta::Unref { block, .. }
        | BlockDelta::CacheIdle { block }
        | BlockDelta::Evict { block }
        | BlockDelta::Free { block }
        | BlockDelta::Publish { block, .. }
        | BlockDelta::Copy { to: block, .. }
        | BlockDelta::SwapOut { block, .. }
        | BlockDelta::SwapIn { block, .. }
        | BlockDelta::Pin { block }
        | BlockDelta::Unpin { block } => block,
        BlockDelta::HostFree { .. } => BlockId::NULL,
    }
}

fn step32(step: u64) -> u32 {
    u32::try_from(step).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, deltas: Vec<BlockDelta>) -> StepRecord {
        StepRecord { step, deltas, ..StepRecord::default() }
    }

    const A: RequestId = RequestId(1);
    const B: RequestId = RequestId(2);
    const X: BlockId = BlockId(3);
    const Y: BlockId = BlockId(4);

    fn shared_map() -> BlockMap {
        let mut map = BlockMap::pristine(8, 0);
        map.apply(&record(
            1,
            vec![
                BlockDelta::Alloc { block: X, request: A, logical: 0 },
                BlockDelta::Fill { block: X, filled: 16 },
                BlockDelta::Publish { block: X, hash: 7 },
                BlockDelta::Alloc { block: Y, request: A, logical: 1 },
                BlockDelta::Share { block: X, request: B, logical: 0 },
            ],
        ));
        map
    }

    #[test]
    fn a_cell_stays_small() {
        assert!(size_of::<Cell>() <= 56, "{}", size_of::<Cell>());
    }

    #[test]
    fn each_block_is_counted_once() {
        let map = shared_map();
        let counts = map.counts();
        assert_eq!((counts.shared, counts.saved, counts.free), (1, 1, 5));
        assert_eq!(counts.exclusive.get(&A), Some(&1));
        assert_eq!(counts.total(), 7);
        assert_eq!(*counts, map.recount());
    }

    #[test]
    fn the_next_holder_inherits_a_block() {
        let mut map = shared_map();
        map.apply(&record(2, vec![BlockDelta::Unref { block: X, request: A }]));
        let cell = map.cell(X).unwrap();
        assert_eq!((cell.owner, cell.refs, cell.last_step), (B, 1, 2));
        assert_eq!(map.tables()[&A], [BlockId::NULL, Y]);
        assert_eq!(map.counts().exclusive.get(&B), Some(&1));
    }

    #[test]
    fn an_idle_block_keeps_its_owner_and_leaves_by_eviction() {
        let mut map = shared_map();
        map.apply(&record(
            2,
            vec![
                BlockDelta::Unref { block: X, request: A },
                BlockDelta::Unref { block: X, request: B },
                BlockDelta::CacheIdle { block: X },
            ],
        ));
        assert_eq!(map.eviction_order(), [X]);
        assert_eq!(map.cell(X).unwrap().owner, B);
        assert!(map.holders(X).is_empty());
        map.apply(&record(3, vec![BlockDelta::Evict { block: X }]));
        assert_eq!(map.evicted(), [X]);
        assert_eq!(map.counts().free, 6);
        map.apply(&record(4, vec![]));
        assert!(map.evicted().is_empty());
    }

    #[test]
    fn a_copy_names_what_it_was_copied_from() {
        let mut map = shared_map();
        map.apply(&record(
            2,
            vec![
                BlockDelta::Unref { block: X, request: B },
                BlockDelta::Alloc { block: BlockId(5), request: B, logical: 0 },
                BlockDelta::Copy { from: X, to: BlockId(5), request: B },
            ],
        ));
        assert_eq!(map.cell(BlockId(5)).unwrap().copied_from, X);
        assert_eq!((map.counts().copied, map.counts().saved), (1, 0));
        // The other order: the copy takes the place before the shared block is let go.
        let mut other = shared_map();
        other.apply(&record(
            2,
            vec![
                BlockDelta::Alloc { block: BlockId(5), request: B, logical: 0 },
                BlockDelta::Copy { from: X, to: BlockId(5), request: B },
                BlockDelta::Unref { block: X, request: B },
            ],
        ));
        assert_eq!(other, map);
        map.apply(&record(
            3,
            vec![
                BlockDelta::Unref { block: BlockId(5), request: B },
                BlockDelta::Free { block: BlockId(5) },
                BlockDelta::Alloc { block: BlockId(5), request: A, logical: 2 },
            ],
        ));
        assert_eq!((map.cell(BlockId(5)).unwrap().copied_from, map.counts().copied), (BlockId::NULL, 0));
        assert_eq!(*map.counts(), map.recount());
    }

    #[test]
    fn blocks_wait_in_host_memory_until_their_place_is_given_back() {
        let mut map = shared_map();
        map.apply(&record(
            2,
            vec![
                BlockDelta::SwapOut { block: Y, host: 3, request: Some(A) },
                BlockDelta::Unref { block: Y, request: A },
                BlockDelta::Free { block: Y },
                BlockDelta::SwapOut { block: X, host: 1, request: None },
            ],
        ));
        assert_eq!((map.host().num_swapped(), map.host().num_cached(), map.host().num_of(A)), (1, 1, 1));
        let waiting = map.host().get(3).unwrap();
        assert_eq!((waiting.request, waiting.logical, waiting.since_step), (Some(A), 1, 2));
        let cached = map.host().get(1).unwrap();
        assert_eq!((cached.owner, cached.hash, cached.filled), (Some(A), Some(7), 16));
        map.apply(&record(
            3,
            vec![
                BlockDelta::Alloc { block: Y, request: A, logical: 1 },
                BlockDelta::SwapIn { host: 3, block: Y, request: A },
                BlockDelta::HostFree { host: 3 },
                BlockDelta::HostFree { host: 900 },
            ],
        ));
        assert!(map.cell(Y).unwrap().is_from_host);
        assert_eq!((map.host().len(), map.host().end()), (1, 2));
    }

    #[test]
    fn pinned_blocks_are_counted_and_not_in_the_eviction_order() {
        let mut map = shared_map();
        let let_go = [A, B].map(|request| BlockDelta::Unref { block: X, request });
        map.apply(&record(2, [&let_go[..], &[BlockDelta::CacheIdle { block: X }]].concat()));
        map.apply(&record(3, vec![BlockDelta::Pin { block: X }]));
        assert_eq!((map.counts().pinned, map.counts().cached_idle), (1, 1));
        assert!(map.eviction_order().is_empty());
        map.apply(&record(4, vec![BlockDelta::Unpin { block: X }]));
        assert_eq!((map.counts().pinned, map.eviction_order()), (0, vec![X]));
        map.apply(&record(5, vec![BlockDelta::Pin { block: X }, BlockDelta::Evict { block: X }]));
        assert_eq!(*map.counts(), map.recount());
        assert_eq!(map.counts().pinned, 0, "an evicted block is pinned no more");
    }

    #[test]
    fn parents_follow_the_table() {
        let map = shared_map();
        assert_eq!(map.parent(Y), Some(X));
        assert_eq!(map.parent(X), None);
        assert_eq!(map.holders(X), [(A, 0), (B, 0)]);
    }

    #[test]
    fn what_a_snapshot_already_had_is_not_applied_twice() {
        let mut map = shared_map();
        let unref = vec![BlockDelta::Unref { block: X, request: A }];
        map.apply(&record(2, unref.clone()));
        let before = (map.cell(X).copied(), map.counts().clone());
        map.apply(&record(2, unref));
        map.apply(&record(2, vec![BlockDelta::Share { block: X, request: B, logical: 0 }]));
        assert_eq!((map.cell(X).copied(), map.counts().clone()), before);
    }

    #[test]
    fn deltas_of_another_pool_change_nothing() {
        let mut map = BlockMap::pristine(4, 0);
        map.apply(&record(1, vec![BlockDelta::Alloc { block: BlockId(900), request: A, logical: 0 }]));
        map.apply(&record(1, vec![BlockDelta::Free { block: BlockId::NULL }]));
        assert_eq!(map.counts().free, 3);
        map.apply(&record(2, vec![BlockDelta::Alloc { block: BlockId(2), request: A, logical: u32::MAX }]));
        assert!(map.tables().is_empty(), "no table longer than the pool");
    }
}
