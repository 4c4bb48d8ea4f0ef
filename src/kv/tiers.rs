//! Content between the pool and host memory: swapping preempted requests out and in, and the second tier of the prefix
//! cache.
//!
//! Guarantees: content that is published needs no place of its own when its request is preempted: it is kept where it is
//! and goes to host memory when its block is evicted, once. What is found in host memory is compared token by token, and
//! comes back into fresh blocks before the step computes.

use super::block_pool::Visibility;
use super::host_pool::{ContentKey, HostPool, Slot};
use super::{BlockEvent, BlockState, BlockTable, CacheKey, ContentId, KvCache, KvGroups, PrefixChain, SuspendedTable};
use super::{HostState, HostTransfer, PrefixHit, SwappedTable};
use crate::ids::{BlockId, HostSlot, TokenId};
use rustc_hash::FxHashSet;

/// The content of a full block, named so that it can be kept outside this process.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CachedContent {
    /// Where its bytes are.
    pub host: HostSlot,
    pub id: ContentId,
    pub parent: ContentId,
    pub key: CacheKey,
    /// The chained hash that names it in the pool.
    pub hash: u64,
    pub tokens: Vec<TokenId>,
}

/// A place of host memory, for the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostView {
    pub host: HostSlot,
    pub state: HostState,
    /// Chained content hash of a cached block.
    pub hash: Option<u64>,
}

impl KvCache {
    /// With so many places for blocks in host memory. `keep_spilled` gathers what leaves them for
    /// [`KvCache::take_spilled`]. Content of models with layer groups does not leave the pool: there are no places then.
    pub fn with_host_pool(mut self, num_host_blocks: u32, keep_spilled: bool) -> Self {
        let num_host_blocks = if self.config.groups == KvGroups::ONE { num_host_blocks } else { 0 };
        self.host = HostPool::new(num_host_blocks, self.config.block_size);
        self.spilled = (keep_spilled && self.host.is_on()).then(Vec::new);
        self
    }

    /// True when there is host memory for blocks.
    pub fn has_host_pool(&self) -> bool {
        self.host.is_on()
    }

    /// What the open step copies before it computes: blocks to host memory, then host memory to blocks.
    pub fn transfers(&self) -> (&[HostTransfer], &[HostTransfer]) {
        (&self.swap_out, &self.swap_in)
    }

    /// Places that are not free.
    pub fn host_views(&self) -> impl Iterator<Item = HostView> + '_ {
        let taken = self.host.slots().filter(|(_, slot)| slot.state != HostState::Free);
        taken.map(|(host, slot)| {
            let is_cached = matches!(slot.state, HostState::Cached | HostState::Writing(None));
            HostView { host, state: slot.state, hash: is_cached.then_some(slot.key.hash) }
        })
    }

    /// Cached contents in host memory.
    pub fn host_contents(&self) -> impl Iterator<Item = CachedContent> + '_ {
        let cached = self.host.slots().filter(|(_, slot)| slot.state == HostState::Cached);
        cached.map(|(host, slot)| content(host, slot, self.host.tokens_of(host)))
    }

    /// Contents that are leaving host memory: their bytes are there until the open step is launched, or until the place
    /// that [`KvCache::adopt`] gave is written.
    pub fn take_spilled(&mut self) -> Vec<CachedContent> {
        self.spilled.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Blocks that a preemption must find room for in host memory; `None` when some of them do not hold their content
    /// yet, or there is no host memory.
    pub fn swap_need(
        &mut self,
        table: &BlockTable,
        chain: &PrefixChain,
        tokens: &[TokenId],
        num_computed: u32,
    ) -> Option<u32> {
        if !self.host.is_on() || num_computed == 0 {
            return None;
        }
        let kept = self.num_kept(chain, tokens, num_computed);
        let end = self.blocks_for(num_computed);
        let own = table.ids().get(kept as usize..end as usize)?;
        if own.iter().any(|id| self.pool.block(*id).state != BlockState::Active) {
            return None;
        }
        let is_new = |i: &usize| chain.id(*i).is_some_and(|(id, _)| !self.host.is_wanted(&id));
        let promised = (0..kept as usize).filter(is_new).count() as u32;
        Some(own.len() as u32 + promised)
    }

    /// Places in host memory that nobody relies on.
    pub fn host_room(&self) -> u32 {
        self.host.room()
    }

    /// Takes all blocks back as [`KvCache::suspend`] does; what cannot be found by content is copied to host memory. The
    /// room for [`KvCache::swap_need`] is there.
    pub fn suspend_to_host(
        &mut self,
        table: BlockTable,
        chain: &PrefixChain,
        tokens: &[TokenId],
        num_computed: u32,
    ) -> (SuspendedTable, SwappedTable) {
        let num_kept = self.num_kept(chain, tokens, num_computed) as usize;
        let owner = table.owner();
        let mut swapped = SwappedTable { owner, num_computed, kept: Vec::with_capacity(num_kept), slots: Vec::new() };
        for i in 0..num_kept {
            let (id, _) = chain.id(i).expect("identities are kept where there is host memory");
            self.host.want(id, true);
            swapped.kept.push(id);
        }
        self.hold_blocks_in_host(&table.ids()[num_kept..self.blocks_for(num_computed) as usize], &mut swapped);
        (self.suspend(table), swapped)
    }

    /// As [`KvCache::suspend_to_host`], for a table whose blocks before `first` others have: those come back by sharing.
    pub fn suspend_rest_to_host(
        &mut self,
        table: BlockTable,
        first: u32,
        num_computed: u32,
    ) -> (SuspendedTable, SwappedTable) {
        let owner = table.owner();
        let mut swapped = SwappedTable { owner, num_computed, kept: Vec::new(), slots: Vec::new() };
        self.hold_blocks_in_host(&table.ids()[first as usize..self.blocks_for(num_computed) as usize], &mut swapped);
        (self.suspend(table), swapped)
    }

    fn hold_blocks_in_host(&mut self, blocks: &[BlockId], swapped: &mut SwappedTable) {
        let owner = swapped.owner;
        for &block in blocks {
            let (events, spilled) = (&mut self.events, &mut self.spilled);
            let mut dropped = Vec::new();
            let note = &mut |host, slot: &Slot, tokens: &[TokenId]| dropped.push(content(host, slot, tokens));
            let host = self.host.take_held(owner, note);
            note_dropped(dropped, events, spilled);
            let host = host.expect("there is room for what is swapped");
            self.swap_out.push(HostTransfer { block, host });
            self.events.push(BlockEvent::SwapOut { block, host, request: Some(owner) });
            swapped.slots.push(host);
        }
    }

    /// Positions that a sequence need not compute after [`KvCache::lookup`] found so much.
    pub fn restorable(&self, hit: PrefixHit, swapped: Option<&SwappedTable>) -> u32 {
        let found = if hit.num_host > 0 { hit.num_found() * self.config.block_size } else { hit.tokens };
        match swapped {
            Some(swapped) if hit.num_found() >= swapped.num_kept() => found.max(swapped.num_computed),
            _ => found,
        }
    }

    /// After [`KvCache::attach`]: brings back what the same lookup found in host memory and what a preemption left there.
    /// Gives the first block that is written, and the positions that are there once the step has run.
    pub fn restore(&mut self, table: &mut BlockTable, swapped: Option<SwappedTable>) -> (u32, u32) {
        let first = table.num_blocks();
        let hosts = std::mem::take(&mut self.host_hit);
        let size = self.config.block_size;
        let num_found = first + hosts.len() as u32;
        let hit = PrefixHit {
            num_blocks: first,
            num_whole: first,
            tokens: first * size,
            num_host: hosts.len() as u32,
            ..PrefixHit::default()
        };
        let computed = self.restorable(hit, swapped.as_ref());
        let num_from_disk = hosts.iter().filter(|host| self.host.touch(**host)).count() as u32;
        self.note_host_hit(table, &hosts, num_from_disk);
        let hit_tokens = u64::from(size) * hosts.len() as u64;
        self.pool.header.disk_hit_tokens += u64::from(num_from_disk * size);
        self.pool.header.hit_tokens += hit_tokens;
        self.pool.header.host_hit_tokens += hit_tokens;
        let held: Vec<HostSlot> = match &swapped {
            Some(swapped) if computed > num_found * size => {
                swapped.slots[(num_found - swapped.num_kept()) as usize..].to_vec()
            }
            _ => Vec::new(),
        };
        self.bring_back(table, hosts.iter().chain(&held), computed);
        self.host_hit = hosts;
        self.host_hit.clear();
        if let Some(swapped) = swapped {
            self.drop_swapped(swapped);
        }
        (first, computed)
    }

    /// Brings back what [`KvCache::suspend_rest_to_host`] left, behind the blocks that the table shares again. Gives the
    /// first block that is written, and the positions that are there once the step has run.
    pub fn restore_rest(&mut self, table: &mut BlockTable, swapped: SwappedTable) -> (u32, u32) {
        let (first, computed) = (table.num_rows(), swapped.num_computed);
        assert_eq!(first + swapped.num_held(), self.blocks_for(computed), "what was shared is shared again");
        self.bring_back(table, swapped.slots.iter(), computed);
        self.drop_swapped(swapped);
        (first, computed)
    }

    /// Content from these places becomes the table's next blocks, `computed` positions in all.
    fn bring_back<'a>(&mut self, table: &mut BlockTable, hosts: impl Iterator<Item = &'a HostSlot>, computed: u32) {
        let (first, size) = (table.num_rows(), self.config.block_size);
        self.reserve(table, first * size, computed).expect("room was made for what comes back");
        for (logical, &host) in (first..).zip(hosts) {
            let (block, request) = (table.ids()[logical as usize], table.owner());
            self.swap_in.push(HostTransfer { block, host });
            self.events.push(BlockEvent::SwapIn { host, block, request });
            let filled = (computed - logical * size).min(size);
            self.pool.fill(block, filled);
            self.events.push(BlockEvent::Fill { block, filled });
        }
    }

    /// The step that was to bring back blocks from `first` on has failed: they hold nothing.
    pub fn unrestore(&mut self, table: &BlockTable, first: u32) {
        for &block in table.ids().get(first as usize..).unwrap_or_default() {
            self.pool.set_filled(block, 0);
            self.events.push(BlockEvent::Fill { block, filled: 0 });
        }
    }

    /// Lets go of what a preemption left.
    pub fn drop_swapped(&mut self, swapped: SwappedTable) {
        for id in swapped.kept {
            self.host.want(id, false);
        }
        for slot in swapped.slots {
            self.host.leave(slot);
            self.events.push(BlockEvent::HostFree { host: slot });
        }
    }

    /// Blocks of a preempted sequence that are in host memory now.
    pub fn num_in_host(&self, swapped: &SwappedTable) -> u32 {
        swapped.num_held() + swapped.kept.iter().filter(|id| self.host.holds(id)).count() as u32
    }

    /// Identities of the full blocks of a prompt that neither pool nor host memory holds, after those that they do.
    pub fn missing(&mut self, key: CacheKey, prompt: &[TokenId]) -> Vec<ContentId> {
        if !self.host.is_on() || !self.config.enable_prefix_cache || prompt.is_empty() {
            return Vec::new();
        }
        let mut chain = self.new_chain(key);
        chain.extend(&prompt[..prompt.len() - 1]);
        let found = self.lookup(&chain, prompt, prompt.len() as u32).num_found() as usize;
        let rest = (found..chain.len()).filter_map(|i| chain.id(i));
        rest.map(|(id, _)| id).filter(|id| !self.host.holds(id)).collect()
    }

    /// A place for content that was kept outside, between steps; its bytes go there next. `None` when it is there already,
    /// when there is no room, or when its identity does not follow from its tokens.
    pub fn adopt(&mut self, content: &CachedContent) -> Option<HostSlot> {
        let CachedContent { id, parent, key, hash, .. } = *content;
        let is_whole = content.tokens.len() == self.config.block_size as usize;
        if !self.host.is_on() || !is_whole || parent.child(&content.tokens) != id {
            return None;
        }
        let mut dropped = Vec::new();
        let key = ContentKey { id, parent, key, hash };
        let note = &mut |host, slot: &Slot, tokens: &[TokenId]| dropped.push(self::content(host, slot, tokens));
        let slot = self.host.adopt(key, &content.tokens, note);
        note_dropped(dropped, &mut self.events, &mut self.spilled);
        slot
    }

    /// The bytes of adopted content did not come: its place is free.
    pub fn drop_adopted(&mut self, id: &ContentId) {
        if let Some(host) = self.host.forget(id) {
            self.events.push(BlockEvent::HostFree { host });
        }
    }

    /// Copies published blocks that have no place in host memory into places, at most `max_blocks`, within an open step:
    /// so that they outlive this process. `is_saved` contents need none.
    pub fn save_published(&mut self, max_blocks: u32, is_saved: &dyn Fn(&ContentId) -> bool) {
        for id in 1..self.config.num_blocks {
            let block = BlockId(id);
            if self.swap_out.len() >= max_blocks as usize {
                return;
            }
            if self.pool.block(block).visibility != Visibility::Published {
                continue;
            }
            if self.prefix.content_key_of(block).is_some_and(|key| !is_saved(&key.id)) {
                self.demote(block);
            }
        }
    }

    /// What the blocks of these transfers hold.
    pub fn contents_of(&self, transfers: &[HostTransfer]) -> Vec<ContentId> {
        transfers.iter().filter_map(|t| self.prefix.content_key_of(t.block)).map(|key| key.id).collect()
    }

    /// The content of a published block gets a place in host memory, unless it has one or there is no room.
    pub(super) fn demote(&mut self, block: BlockId) {
        if !self.host.is_on() {
            return;
        }
        let Some(key) = self.prefix.content_key_of(block) else { return };
        let size = self.config.block_size as usize;
        if let Some(host) = self.host.find(&key.id, key.key, self.prefix.tokens_of(block)) {
            self.host.touch(host);
            return;
        }
        // Its content may be reserved only since this step began: then the host has it, or it is worth nothing.
        let is_whole = self.pool.block(block).filled as usize == size;
        if self.host.holds(&key.id) || !is_whole {
            return;
        }
        let mut dropped = Vec::new();
        let note = &mut |host, slot: &Slot, tokens: &[TokenId]| dropped.push(content(host, slot, tokens));
        let host = self.host.take_cached(key, note);
        note_dropped(dropped, &mut self.events, &mut self.spilled);
        let Some(host) = host else { return };
        self.swap_out.push(HostTransfer { block, host });
        self.events.push(BlockEvent::SwapOut { block, host, request: None });
    }

    /// Suspect content is not found in host memory either.
    pub(super) fn forget_host(&mut self, block: BlockId) {
        let Some(key) = self.prefix.content_key_of(block) else { return };
        if let Some(host) = self.host.forget(&key.id) {
            self.events.push(BlockEvent::HostFree { host });
        }
    }

    /// Contents that were evicted on purpose since the last call, and whether what follows them goes too: whoever keeps
    /// contents outside is to forget them. Gathered where `keep_spilled` is.
    pub fn take_forgotten(&mut self) -> Vec<(ContentId, bool)> {
        std::mem::take(&mut self.forgotten)
    }

    /// What pinned prefixes hold.
    pub fn pinned_contents(&self) -> impl Iterator<Item = ContentId> + '_ {
        let pinned = (1..self.config.num_blocks).map(BlockId).filter(|block| self.pool.block(*block).pins > 0);
        pinned.filter_map(|block| self.prefix.content_key_of(block)).map(|key| key.id)
    }

    /// A prefix is evicted on purpose: the block in which it ends, with what follows it, and blocks that led to it alone.
    pub(super) fn forget_prefix(&mut self, last: BlockId, before: &[BlockId]) {
        let ids = |blocks: &[BlockId]| -> Vec<ContentId> {
            blocks.iter().filter_map(|block| self.prefix.content_key_of(*block)).map(|key| key.id).collect()
        };
        let (last, before) = (ids(&[last]), ids(before));
        if self.spilled.is_some() {
            self.forgotten.extend(last.iter().map(|id| (*id, true)));
            self.forgotten.extend(before.iter().map(|id| (*id, false)));
        }
        for (host, hash) in self.host.drop_cached(last.into_iter().collect()) {
            self.worth.forget(hash);
            self.events.push(BlockEvent::HostFree { host });
        }
        for host in before.iter().filter_map(|id| self.host.forget(id)).collect::<Vec<_>>() {
            self.events.push(BlockEvent::HostFree { host });
        }
    }

    /// Nothing but what pinned prefixes hold is found in host memory any more.
    pub(super) fn reset_host(&mut self) {
        if !self.host.is_on() {
            return;
        }
        let kept: FxHashSet<ContentId> = self.pinned_contents().collect();
        let cached = self.host.slots().filter(|(_, slot)| slot.state == HostState::Cached);
        let doomed: Vec<ContentId> = cached.map(|(_, slot)| slot.key.id).filter(|id| !kept.contains(id)).collect();
        for host in doomed.iter().filter_map(|id| self.host.forget(id)).collect::<Vec<_>>() {
            self.events.push(BlockEvent::HostFree { host });
        }
    }

    /// What the step wrote to host memory is there.
    pub(super) fn commit_host(&mut self) {
        let (host, prefix) = (&self.host, &self.prefix);
        let is_cached = |t: &&HostTransfer| host.slot(t.host).state == HostState::Writing(None);
        let cached: Vec<HostTransfer> = self.swap_out.iter().filter(is_cached).copied().collect();
        self.host.commit(cached.iter().map(|t| (t.host, prefix.tokens_of(t.block))));
    }

    /// After a lookup in the pool: the blocks that follow and are in host memory.
    pub(super) fn lookup_host(&mut self, chain: &PrefixChain, tokens: &[TokenId], (first, max_tokens): (u32, u32)) {
        self.host_hit.clear();
        if !self.host.is_on() || !self.config.enable_prefix_cache {
            return;
        }
        let size = self.config.block_size as usize;
        // At least one token is computed, to get logits.
        let end = max_tokens.saturating_sub(1) as usize / size;
        for i in first as usize..chain.len().min(end) {
            let Some((id, _)) = chain.id(i) else { return };
            let Some(slot) = self.host.find(&id, chain.key(), &tokens[i * size..(i + 1) * size]) else { return };
            self.host_hit.push(slot);
        }
    }

    /// Full computed blocks that are found in the pool by content.
    fn num_kept(&mut self, chain: &PrefixChain, tokens: &[TokenId], num_computed: u32) -> u32 {
        self.lookup(chain, tokens, num_computed).num_blocks
    }
}

fn content(host: HostSlot, slot: &Slot, tokens: &[TokenId]) -> CachedContent {
    let ContentKey { id, parent, key, hash } = slot.key;
    CachedContent { host, id, parent, key, hash, tokens: tokens.to_vec() }
}

fn note_dropped(dropped: Vec<CachedContent>, events: &mut Vec<BlockEvent>, spilled: &mut Option<Vec<CachedContent>>) {
    events.extend(dropped.iter().map(|content| BlockEvent::HostFree { host: content.host }));
    if let Some(spilled) = spilled {
        spilled.extend(dropped);
    }
}
