//! The invariants of the cache, as pure checks. Numbers are those of the design's list of invariants.

use super::block_pool::Visibility;
use super::{BlockState, BlockTable, CacheKey, KvCache, SwappedTable};
use crate::ids::{BlockId, TokenId};

/// A live table and what its sequence knows of it.
#[derive(Clone, Copy, Debug)]
pub struct HeldTable<'a> {
    pub table: &'a BlockTable,
    /// All tokens of the sequence, from the first.
    pub tokens: &'a [TokenId],
    /// Positions whose K and V are in the blocks.
    pub num_valid: u32,
    pub key: CacheKey,
    /// What a preempted sequence left to come back to.
    pub swapped: Option<&'a SwappedTable>,
}

impl KvCache {
    /// Every invariant over the pool, the prefix cache and all live tables; the text names the one that is broken.
    pub fn check_integrity<'a>(&self, tables: impl Iterator<Item = HeldTable<'a>>) -> Result<(), String> {
        let mut refs = vec![0u32; self.pool.len()];
        let mut swapped = Vec::new();
        for copy in self.copies() {
            refs[copy.from.idx()] += 1;
        }
        for held in tables {
            self.check_table(&held, &mut refs)?;
            swapped.extend(held.swapped);
        }
        if self.host.is_on() {
            self.host.check(swapped.into_iter())?;
        }
        for pinned in self.pinned_tables() {
            self.check_table(&pinned, &mut refs)?;
        }
        self.check_blocks(&refs)?;
        self.check_lists()?;
        self.check_pins()?;
        self.check_counts()
    }

    /// What can be checked without walking anything: the counts add up.
    pub fn check_counts(&self) -> Result<(), String> {
        let counts = self.counts();
        if counts.free + counts.cached_idle > counts.total {
            return Err(format!("invariant 1: free + cached-idle exceed the pool: {counts:?}"));
        }
        if counts.shared > counts.used || counts.saved < counts.shared {
            return Err(format!("invariant 3: the counts of shared blocks cannot be: {counts:?}"));
        }
        Ok(())
    }

    fn check_table(&self, held: &HeldTable, refs: &mut [u32]) -> Result<(), String> {
        let (table, size) = (held.table, self.config.block_size);
        let owner = table.owner();
        if table.num_blocks() != self.blocks_for(table.slots()) {
            let (blocks, slots) = (table.num_blocks(), table.slots());
            return Err(format!("invariant 5: request {owner} has {blocks} blocks for {slots} slots"));
        }
        if held.num_valid > table.slots() {
            return Err(format!("invariant 6: request {owner} computed beyond its slots"));
        }
        for (logical, &id) in table.ids().iter().enumerate() {
            if id == BlockId::NULL || id.idx() >= self.pool.len() {
                return Err(format!("invariant 3: request {owner} holds block {id}, which is nobody's"));
            }
            if table.ids()[..logical].contains(&id) {
                return Err(format!("invariant 4: request {owner} holds block {id} twice"));
            }
            refs[id.idx()] += 1;
            let start = logical as u32 * size;
            self.check_held_block(held, id, start)?;
        }
        Ok(())
    }

    /// Block `id` holds positions `start..start + block_size` of this sequence.
    fn check_held_block(&self, held: &HeldTable, id: BlockId, start: u32) -> Result<(), String> {
        let (block, size, owner) = (self.pool.block(id), self.config.block_size, held.table.owner());
        let valid_here = held.num_valid.saturating_sub(start).min(size);
        if block.filled < valid_here {
            let filled = block.filled;
            return Err(format!(
                "invariant 6: request {owner} needs {valid_here} slots of block {id}, {filled} are written"
            ));
        }
        let is_published = block.visibility == Visibility::Published;
        if valid_here == 0 && (block.refs != 1 || is_published) {
            return Err(format!("invariant 9: request {owner} will write block {id}, which is shared or published"));
        }
        if is_published {
            // What the request does not see of the block may be another's: it takes a copy before it writes.
            let range = start as usize..(start + valid_here) as usize;
            let seen = self.prefix.tokens_of(id).get(..valid_here as usize);
            if seen.is_none() || held.tokens.get(range) != seen || held.key != self.prefix.key_of(id) {
                return Err(format!(
                    "invariant 8: block {id} is published with other tokens or another key than request {owner} has"
                ));
            }
        }
        Ok(())
    }

    fn check_blocks(&self, refs: &[u32]) -> Result<(), String> {
        let (mut num_published, mut shared, mut saved) = (0, 0, 0);
        for (i, &held) in refs.iter().enumerate().skip(1) {
            let id = BlockId(i as u32);
            let block = self.pool.block(id);
            if block.refs != held {
                return Err(format!("invariant 3: block {id} counts {} tables, {held} hold it", block.refs));
            }
            let is_held = matches!(block.state, BlockState::Active | BlockState::Reserved);
            if is_held != (block.refs > 0) {
                return Err(format!("invariant 2: block {id} is {:?} with {} tables", block.state, block.refs));
            }
            if block.state == BlockState::Reserved && !self.pool.is_open() {
                return Err(format!("invariant 1: block {id} is reserved, but no step is in flight"));
            }
            shared += u32::from(held > 1);
            saved += held.saturating_sub(1);
            let is_published = block.visibility == Visibility::Published;
            if block.state == BlockState::CachedIdle && !is_published {
                return Err(format!("invariant 8: block {id} is idle, but cannot be found"));
            }
            if is_published {
                num_published += 1;
                if block.filled < self.prefix.tokens_of(id).len() as u32
                    || matches!(block.state, BlockState::Free | BlockState::Reserved)
                {
                    return Err(format!(
                        "invariant 8: published block {id} is {:?} with {} slots",
                        block.state, block.filled
                    ));
                }
                self.prefix.check(id)?;
            }
        }
        if (num_published, num_published) != self.prefix.num_findable() {
            let findable = self.prefix.num_findable();
            return Err(format!("invariant 7: {num_published} blocks are published, {findable:?} can be found"));
        }
        if !self.pool.is_open() && self.copies().len() > 0 {
            return Err("invariant 3: a copy holds its source, but no step is in flight".into());
        }
        let counts = self.counts();
        if (shared, saved) != (counts.shared, counts.saved) {
            return Err(format!("invariant 3: {shared} blocks are shared and {saved} saved, counted as {counts:?}"));
        }
        Ok(())
    }

    fn check_lists(&self) -> Result<(), String> {
        let mut seen = vec![false; self.pool.len()];
        let mut last_step = 0;
        let free = self.pool.free_order().map(|id| (id, BlockState::Free));
        let idle = self.pool.idle_order().map(|id| (id, BlockState::CachedIdle));
        for (id, state) in free.chain(idle) {
            let block = self.pool.block(id);
            if block.state != state || std::mem::replace(&mut seen[id.idx()], true) {
                return Err(format!(
                    "invariant 2: block {id} is {:?} in the list of {state:?} blocks, or twice in it",
                    block.state
                ));
            }
            if state == BlockState::CachedIdle {
                if block.last_step < last_step {
                    return Err(format!("the eviction order does not follow the steps at block {id}"));
                }
                last_step = block.last_step;
            }
        }
        let states = (1..self.pool.len()).map(|i| self.pool.block(BlockId(i as u32)).state);
        let num_listed = states.filter(|s| matches!(s, BlockState::Free | BlockState::CachedIdle)).count();
        if num_listed as u32 != self.num_available() {
            return Err(format!(
                "invariant 1: {num_listed} blocks are free or idle, {} are listed",
                self.num_available()
            ));
        }
        Ok(())
    }
}
