//! The paged KV cache: who holds which block, and which blocks can be found again by what they hold.
//!
//! Guarantees: a block is handed out only when no table holds it; a prefix is shared only when salt, adapter and all
//! tokens are equal (compared, not only hashed); a block is published only after the step that wrote it has committed; the changes
//! of a step are a transaction ([`KvCache::begin`], then [`KvCache::commit`] or [`KvCache::undo`]), and undoing restores
//! blocks, list orders and counts exactly. Eviction order follows step numbers: no clock is read.
//! It does not hold keys or values: it decides where they go. It does not choose victims among requests.
//!
//! ```
//! use kvasir::{ids::RequestId, kv::{BlockTable, CacheKey, KvCache, KvConfig, KvGroups}};
//! let groups = KvGroups::ONE;
//! let mut kv = KvCache::new(KvConfig { num_blocks: 8, block_size: 4, groups, enable_prefix_cache: true });
//! let (prompt, mut table) = ([1, 2, 3, 4, 5], BlockTable::new(RequestId(1)));
//! let mut chain = kv.new_chain(CacheKey::default());
//! chain.extend(&prompt);
//! kv.begin(1);
//! kv.reserve(&mut table, 0, 5).expect("the pool is empty");
//! kv.commit();
//! kv.fill(&table, 0, 5);
//! kv.publish(&table, &mut chain, &prompt, 0, 5);
//! kv.free(table);
//! assert_eq!(kv.lookup(&chain, &prompt, 5).num_blocks, 1);
//! ```

mod block_pool;
mod block_table;
mod copy_on_write;
mod events;
mod evict;
mod groups;
mod host_pool;
mod integrity;
mod pins;
mod prefix_cache;
mod publish;
mod taint;
mod tiers;
mod views;
mod windows;
mod worth;

pub use block_pool::BlockState;
pub use block_table::{BlockTable, SuspendedTable, TableMark};
pub use copy_on_write::BlockCopy;
pub use events::BlockEvent;
pub use groups::{KvGroups, MAX_GROUPS, lowest_seen};
pub use host_pool::{HostCounts, HostState, HostTransfer, SwappedTable};
pub use integrity::HeldTable;
pub use pins::{PinSpec, PrefixPlace, PrefixView};
pub use prefix_cache::{CacheKey, ContentId, PrefixChain, PrefixChange, prefix_id, prefix_ids};
pub use tiers::{CachedContent, HostView};

use crate::ids::{BlockId, HostSlot, RequestId, TokenId};
use block_pool::BlockPool;
use copy_on_write::PendingCopy;
use host_pool::HostPool;
use pins::Pin;
use prefix_cache::PrefixCache;
use worth::{Hit, Worth};

/// The shape of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KvConfig {
    /// Blocks in the pool, the null block included; at least 2.
    pub num_blocks: u32,
    /// Tokens per block; at least 1.
    pub block_size: u32,
    /// How far the model's layers see.
    #[serde(default)]
    pub groups: KvGroups,
    /// Keep the content of blocks that nobody holds, and share equal prefixes.
    pub enable_prefix_cache: bool,
}

/// Counts over the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounts {
    /// All blocks but the null block.
    pub total: u32,
    /// Held by at least one table.
    pub used: u32,
    /// Held by nobody, content kept.
    pub cached_idle: u32,
    pub free: u32,
    /// Held by two tables or more.
    pub shared: u32,
    /// The sum over shared blocks of (references - 1).
    pub saved: u32,
    pub evicted_this_step: u32,
    /// Held by a pinned prefix.
    pub pinned: u32,
    /// Tokens looked up and found at admissions, since start.
    pub query_tokens: u64,
    pub hit_tokens: u64,
    /// Of the tokens found: in host memory, and there because they were read from disk.
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    pub host: HostCounts,
    /// Of the tokens found: in blocks that hold more, or other tokens after them.
    pub partial_hit_tokens: u64,
    /// Blocks copied because a sharer was about to write, since start.
    pub copied_blocks: u64,
}

/// One block as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    pub state: BlockState,
    pub refs: u32,
    pub filled: u32,
    /// Chained content hash of a published block.
    pub hash: Option<u64>,
    /// A pinned prefix holds it.
    pub is_pinned: bool,
    /// Step of the last change.
    pub last_step: u64,
}

/// What a lookup found, to be attached before anything else changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHit {
    /// Blocks found whole.
    pub num_blocks: u32,
    /// Tokens found, those in a block found in part included.
    pub tokens: u32,
    /// Physical blocks found whole, over all groups: a windowed group has those that the next token sees.
    pub num_whole: u32,
    /// How many of all that were found are cached-idle: they stop being available once attached.
    pub num_idle: u32,
    /// How many of these are in windowed groups and held by other tables: letting one go gives nothing back.
    pub num_shared: u32,
    /// Blocks found after those in host memory: each takes a block of the pool.
    pub num_host: u32,
}

impl PrefixHit {
    /// Blocks found in all.
    pub fn num_found(&self) -> u32 {
        self.num_blocks + self.num_host
    }
}

/// The pool has too few blocks; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV blocks are needed, {available} are available")]
pub struct OutOfBlocks {
    pub needed: u32,
    pub available: u32,
}

/// The facade over pool and prefix cache.
#[derive(Debug)]
pub struct KvCache {
    config: KvConfig,
    hash_mask: u64,
    pool: BlockPool,
    prefix: PrefixCache,
    events: Vec<BlockEvent>,
    /// Length of `events` when the open step began.
    events_before_step: usize,
    /// Of the step: counted when it is over.
    hits: Vec<Hit>,
    worth: Worth,
    pins: Vec<Pin>,
    lost_pins: Vec<PinSpec>,
    /// Contents that were evicted on purpose, see [`KvCache::take_forgotten`].
    forgotten: Vec<(ContentId, bool)>,
    hit: Vec<BlockId>, // scratch of `lookup`, used by `attach`
    host: HostPool,
    host_hit: Vec<HostSlot>,     // scratch of `lookup`, used by `restore`
    swap_out: Vec<HostTransfer>, // of the open step
    swap_in: Vec<HostTransfer>,  // of the open step
    /// Contents that left host memory since they were asked for last, where the caller wants to know.
    spilled: Option<Vec<CachedContent>>,
    /// Of the open step.
    copies: Vec<PendingCopy>,
}

impl KvCache {
    /// All blocks free. Events gather until [`KvCache::drain_events`] is called: call it after each step.
    pub fn new(config: KvConfig) -> Self {
        Self::with_hash_mask(config, u64::MAX)
    }

    /// For tests: keeps only the masked bits of content hashes, so that different contents collide.
    pub fn with_hash_mask(config: KvConfig, hash_mask: u64) -> Self {
        assert!(config.block_size >= 1, "a block holds at least one token");
        KvCache {
            config,
            hash_mask,
            pool: BlockPool::new(config.num_blocks),
            prefix: PrefixCache::new(config, hash_mask),
            events: Vec::new(),
            events_before_step: 0,
            hits: Vec::new(),
            worth: Worth::new(config.num_blocks),
            pins: Vec::new(),
            lost_pins: Vec::new(),
            forgotten: Vec::new(),
            hit: Vec::new(),
            host: HostPool::default(),
            host_hit: Vec::new(),
            swap_out: Vec::new(),
            swap_in: Vec::new(),
            spilled: None,
            copies: Vec::new(),
        }
    }

    pub fn config(&self) -> KvConfig {
        self.config
    }

    pub fn block_size(&self) -> u32 {
        self.config.block_size
    }

    /// Blocks that tables can hold: all but the null block.
    pub fn num_usable(&self) -> u32 {
        self.config.num_blocks - 1
    }

    /// Blocks that can be handed out now: free ones, and cached-idle ones by eviction.
    pub fn num_available(&self) -> u32 {
        self.pool.num_free() + self.pool.num_idle()
    }

    /// Rows that `tokens` positions need: blocks of one group that keeps everything.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.config.block_size)
    }

    /// The chain of a new sequence: prefixes are shared only between equal keys.
    pub fn new_chain(&self, key: CacheKey) -> PrefixChain {
        let chain = PrefixChain::new(key, self.config.block_size, self.hash_mask);
        if self.host.is_on() { chain.with_ids() } else { chain }
    }

    /// Opens the transaction of a step. Steps ascend.
    pub fn begin(&mut self, step: u64) {
        self.pool.begin(step);
        self.host.begin();
        self.prefix.begin();
        self.swap_out.clear();
        self.swap_in.clear();
        self.events_before_step = self.events.len();
    }

    /// The step ran: what was reserved is active, and sources of copies are let go of.
    pub fn commit(&mut self) {
        self.pool.commit();
        self.commit_host();
        self.end_copies();
        self.prefix.commit();
        self.count_hits();
    }

    /// The step failed on its way: what was reserved is active, what was to come from or go to host memory is not there.
    pub fn abandon(&mut self) {
        self.pool.commit();
        let events = &mut self.events;
        self.host.abandon(|host| events.push(BlockEvent::HostFree { host }));
        self.end_copies();
        self.count_hits();
    }

    /// The step never ran: everything since [`KvCache::begin`] is undone. Tables are put back by their owner, with
    /// [`KvCache::rewind`] and [`KvCache::resume`].
    pub fn undo(&mut self) {
        let prefix = &mut self.prefix;
        self.pool.undo(|block| prefix.restore(block));
        prefix.undo();
        self.host.undo();
        self.events.truncate(self.events_before_step);
        self.copies.clear();
        self.hits.clear();
    }

    /// True when blocks can be found again by what they hold.
    pub fn shares_prefixes(&self) -> bool {
        self.config.enable_prefix_cache
    }

    /// Finds the blocks that hold the first of `tokens`, at most `max_tokens` of them. Changes nothing but the memory of
    /// the hit.
    pub fn lookup(&mut self, chain: &PrefixChain, tokens: &[TokenId], max_tokens: u32) -> PrefixHit {
        self.hit.clear();
        let mut in_part = 0;
        if self.config.enable_prefix_cache {
            in_part = self.prefix.lookup(chain, &tokens[..max_tokens as usize], &mut self.hit);
        }
        let num_rows = self.hit.len() as u32 / self.config.groups.num();
        let num_blocks = num_rows - u32::from(in_part > 0);
        self.lookup_host(chain, tokens, (num_blocks, max_tokens));
        let num_host = self.host_hit.len() as u32;
        PrefixHit { num_host, ..self.describe_hit(num_blocks, in_part) }
    }

    /// How many blocks a lookup would find: for ranking, without the memory of a hit.
    pub fn num_cached_blocks(&self, chain: &PrefixChain, tokens: &[TokenId], max_blocks: u32) -> u32 {
        match self.config.enable_prefix_cache {
            true => self.prefix.count(chain, tokens, max_blocks as usize),
            false => 0,
        }
    }

    /// Grows whenever a block becomes findable, or stops being so.
    pub fn num_changes(&self) -> u64 {
        self.prefix.num_changes()
    }

    /// The latest [`KvCache::lookup`] without the block that it found in part.
    pub fn whole_blocks(&mut self, hit: PrefixHit) -> PrefixHit {
        self.hit.truncate((hit.num_blocks * self.config.groups.num()) as usize);
        PrefixHit { num_host: hit.num_host, ..self.describe_hit(hit.num_blocks, 0) }
    }

    /// Gives the blocks of `hit`, the latest [`KvCache::lookup`], to an empty table; `query_tokens` would have had to be
    /// computed.
    pub fn attach(&mut self, table: &mut BlockTable, hit: PrefixHit, query_tokens: u32) {
        assert_eq!(table.num_rows(), 0, "a prefix is attached to an empty table");
        table.shape(self.config.groups.num());
        for (logical, &block) in self.hit.iter().enumerate() {
            table.push(block);
            if block == BlockId::NULL {
                continue;
            }
            self.pool.hold(block);
            self.events.push(BlockEvent::Share { block, request: table.owner(), logical: logical as u32 });
        }
        table.raise_slots(hit.tokens);
        let hit_tokens = hit.tokens.min(query_tokens);
        let num_groups = self.config.groups.num() as usize;
        let anchor = self.config.groups.anchor() as usize;
        let last = hit.num_blocks.checked_sub(1).map(|row| self.hit[row as usize * num_groups + anchor]);
        if let Some(last) = last.filter(|block| *block != BlockId::NULL) {
            self.note_hit(table.owner(), last, hit_tokens);
        }
        self.pool.header.query_tokens += u64::from(query_tokens);
        self.pool.header.hit_tokens += u64::from(hit_tokens);
        let whole_tokens = hit.num_blocks * self.config.block_size;
        self.pool.header.partial_hit_tokens += u64::from(hit_tokens.saturating_sub(whole_tokens));
        self.hit.clear();
    }

    /// Makes room to write positions `valid..slots`; those before are only read. Evicts idle blocks where needed, and
    /// copies the block of position `valid` when others see it. Returns how many blocks were taken.
    pub fn reserve(&mut self, table: &mut BlockTable, valid: u32, slots: u32) -> Result<u32, OutOfBlocks> {
        let needed = self.needed_blocks(table, valid, slots);
        let available = self.num_available();
        if needed > available {
            return Err(OutOfBlocks { needed, available });
        }
        if slots > valid && self.must_copy(table, valid) > 0 {
            self.copy_tail(table, valid);
        }
        table.shape(self.config.groups.num());
        while (table.ids().len() as u32) < self.blocks_for(slots) * self.config.groups.num() {
            let block = self.take_block(table.owner(), table.ids().len() as u32);
            table.push(block);
        }
        table.raise_slots(slots);
        Ok(needed)
    }

    /// How long the table is before a reservation from `valid` on, for [`KvCache::rewind`].
    pub fn mark(&self, table: &BlockTable, valid: u32) -> TableMark {
        table.mark(valid / self.config.block_size)
    }

    /// Puts a table back to its length before the step, beside [`KvCache::undo`] which takes the blocks back.
    pub fn rewind(&self, table: &mut BlockTable, mark: TableMark) {
        table.rewind(&mark);
    }

    /// Takes all blocks back. Published ones stay findable, the last one being the next to be evicted.
    pub fn free(&mut self, table: BlockTable) {
        self.unhold_all(&table);
    }

    /// Takes all blocks back as [`KvCache::free`] does, within a step that may yet be undone.
    pub fn suspend(&mut self, table: BlockTable) -> SuspendedTable {
        self.unhold_all(&table);
        SuspendedTable(table)
    }

    /// The table as it was, beside [`KvCache::undo`] which gives the blocks back to it.
    pub fn resume(&self, table: SuspendedTable) -> BlockTable {
        table.0
    }

    /// A committed step wrote positions `from..to`.
    pub fn fill(&mut self, table: &BlockTable, from: u32, to: u32) {
        assert!(to <= table.slots(), "position {to} was written beyond the {} slots of the table", table.slots());
        let size = self.config.block_size;
        let num_groups = table.num_groups() as usize;
        let end = if from < to { self.blocks_for(to) } else { 0 };
        for row in from / size..end {
            let filled = (to - row * size).min(size);
            let at = row as usize * num_groups;
            for &block in &table.ids()[at..at + num_groups] {
                self.pool.fill(block, filled);
                self.events.push(BlockEvent::Fill { block, filled });
            }
        }
    }

    /// Cached-idle blocks, next victim first.
    pub fn eviction_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pool.idle_order()
    }

    /// Free blocks, next to be handed out first.
    pub fn free_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pool.free_order()
    }

    /// What [`KvCache::drain_events`] would give now.
    pub fn events(&self) -> &[BlockEvent] {
        &self.events
    }

    /// What happened to blocks since the last call, in order; the changes of an undone step are not among it.
    pub fn drain_events(&mut self) -> std::vec::Drain<'_, BlockEvent> {
        assert!(!self.pool.is_open(), "events are read between steps");
        self.events.drain(..)
    }

    /// The latest lookup: so many whole rows, and so many tokens of one more.
    fn describe_hit(&self, num_blocks: u32, in_part: u32) -> PrefixHit {
        let tokens = num_blocks * self.config.block_size + in_part;
        let mut hit = PrefixHit { num_blocks, tokens, ..PrefixHit::default() };
        for (i, &block) in self.hit.iter().enumerate().filter(|(_, block)| **block != BlockId::NULL) {
            let is_idle = self.pool.block(block).state == BlockState::CachedIdle;
            let is_windowed = self.config.groups.window(i as u32 % self.config.groups.num()).is_some();
            hit.num_whole += u32::from((i as u32) < num_blocks * self.config.groups.num());
            hit.num_idle += u32::from(is_idle);
            hit.num_shared += u32::from(!is_idle && is_windowed);
        }
        hit
    }

    /// From the last block to the first, so that a prefix outlives what follows it.
    fn unhold_all(&mut self, table: &BlockTable) {
        let request = table.owner();
        for block in table.held().rev() {
            self.unref(block, request);
        }
    }

    /// Takes a free block, or evicts the one idle for longest. The caller has counted what is available.
    fn take_block(&mut self, request: RequestId, logical: u32) -> BlockId {
        let (block, state) = self.pool.next_victim().expect("the caller counted the blocks it takes");
        if state == BlockState::CachedIdle {
            self.demote(block);
            self.prefix.evict(block);
            self.events.push(BlockEvent::Evict { block });
        }
        self.pool.allocate().expect("there is a next victim");
        self.events.push(BlockEvent::Alloc { block, request, logical });
        block
    }
}
