//! Prefixes as people handle them: pinned, evicted, listed with what they were worth.
//!
//! Guarantees: a pinned prefix is an owner like a table: its blocks count its reference, stay findable and are never
//! evicted; a pin whose content becomes suspect lets go and is handed to whoever asks for [`KvCache::take_lost_pins`].
//! Statistics belong to the block where a hit ended: `hits` counts the admissions whose longest match ended there, so
//! that no hit is counted twice. They outlive the block's eviction, and are shown while some tier holds its content.

use super::block_pool::{BlockPool, Visibility};
use super::worth::{MAX_HEAD, PrefixEnd, Remembered};
use super::{BlockEvent, BlockState, BlockTable, CacheKey, ContentId, HeldTable, KvCache, PrefixChain};
use crate::ids::{BlockId, RequestId, TokenId};
use std::cmp::Reverse;

/// A prefix to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinSpec {
    /// The request that computed it.
    pub request: RequestId,
    pub name: Option<String>,
    /// Whole blocks of tokens.
    pub tokens: Vec<TokenId>,
    pub key: CacheKey,
    /// Whose pin it is.
    pub client: u64,
}

#[derive(Debug)]
pub(super) struct Pin {
    spec: PinSpec,
    /// Content hash of the last block.
    id: u64,
    table: BlockTable,
}

/// Where the last block of a prefix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixPlace {
    Pool,
    Host,
    /// Whoever keeps contents outside has it.
    Outside,
}

/// A prefix that the cache knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixView {
    /// Content hash of its last block.
    pub id: u64,
    pub name: Option<String>,
    pub blocks: u32,
    pub hits: u64,
    pub hit_tokens: u64,
    /// Of the tokens found: in host memory, and of those, there because they were read from disk.
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    pub last_hit_step: u64,
    pub is_pinned: bool,
    pub place: PrefixPlace,
    pub key: CacheKey,
    /// The first tokens, at most 32.
    pub head: Vec<TokenId>,
}

impl KvCache {
    /// Keeps a prefix: its published blocks get the pin as one more owner, then `table`, which computed them, is freed.
    /// Pinning it again renames it. `None` when some block of it cannot be found: nothing is pinned then.
    pub fn pin(&mut self, spec: PinSpec, chain: &PrefixChain, table: BlockTable) -> Option<u64> {
        let num_blocks = spec.tokens.len() as u32 / self.config.block_size;
        let found = self.lookup(chain, &spec.tokens, spec.tokens.len() as u32).num_blocks;
        if found < num_blocks || num_blocks == 0 {
            self.free(table);
            return None;
        }
        let blocks = std::mem::take(&mut self.hit);
        let id = chain.hash_of(num_blocks as usize - 1);
        if let Some(pin) = self.pins.iter_mut().find(|pin| pin.table.ids() == blocks) {
            pin.spec.name = spec.name;
            self.free(table);
            return Some(id);
        }
        let mut pinned = BlockTable::new(spec.request);
        pinned.shape(self.config.groups.num());
        for (logical, &block) in blocks.iter().enumerate() {
            pinned.push(block);
            if block == BlockId::NULL {
                continue;
            }
            self.pool.hold(block);
            self.events.push(BlockEvent::Share { block, request: spec.request, logical: logical as u32 });
            if self.pool.pin(block) {
                self.events.push(BlockEvent::Pin { block });
            }
        }
        pinned.raise_slots(num_blocks * self.config.block_size);
        self.free(table);
        self.pins.push(Pin { spec, id, table: pinned });
        Some(id)
    }

    /// The tokens of the prefix of this id, from the first; `None` when neither pool nor host memory has all of it.
    pub fn prefix_tokens(&self, id: u64) -> Option<(Vec<TokenId>, CacheKey)> {
        let of_content = || {
            let (content, _) = self.content_of(id)?;
            self.tokens_of_content(content)
        };
        self.prefix_tokens_in_pool(id).or_else(of_content)
    }

    fn prefix_tokens_in_pool(&self, id: u64) -> Option<(Vec<TokenId>, CacheKey)> {
        let last = self.prefix.block_of(id)?;
        let mut chain = vec![last];
        while let Some(parent) = self.prefix.parent_of(chain[chain.len() - 1]) {
            chain.push(parent);
        }
        if chain.len() as u32 != self.prefix.depth_of(last) {
            return None;
        }
        let tokens = chain.iter().rev().flat_map(|block| self.prefix.tokens_of(*block)).copied().collect();
        Some((tokens, self.prefix.key_of(last)))
    }

    /// The content, and its parent's, in which the prefix of this id ends.
    fn content_of(&self, id: u64) -> Option<(ContentId, ContentId)> {
        let in_pool = self.prefix.block_of(id).and_then(|last| self.prefix.content_key_of(last));
        in_pool.map(|key| (key.id, key.parent)).or_else(|| self.worth.get(id)?.end.id)
    }

    /// Lets the pin that came last go, and gives it.
    pub fn unpin_newest(&mut self) -> Option<PinSpec> {
        let last = self.pins.len().checked_sub(1)?;
        Some(self.let_go(last))
    }

    /// Lets the pinned prefix of this id go; its blocks stay in the cache until they are evicted. False when there is none.
    pub fn unpin(&mut self, id: u64) -> bool {
        let Some(at) = self.pins.iter().position(|pin| pin.id == id) else { return false };
        self.let_go(at);
        true
    }

    /// Forgets the prefix that ends in the block of this id: that block, what follows it, and what led to it alone.
    /// Blocks that tables hold stay with them and are not found again; copies in host memory go too. Returns how many blocks were forgotten: 0 when
    /// there is no such prefix, or when it is pinned or leads to a pinned one.
    pub fn evict_prefix(&mut self, id: u64) -> u32 {
        let Some(last) = self.prefix.block_of(id) else {
            return self.content_of(id).map_or(0, |content| self.evict_content(id, content));
        };
        if self.pool.block(last).pins > 0 {
            return 0;
        }
        let children = self.prefix.children();
        let children_of = |block: BlockId| children.get(&self.prefix.number_of(block)).map_or(&[][..], Vec::as_slice);
        let mut doomed = vec![last];
        let mut at = 0;
        while at < doomed.len() {
            doomed.extend(children_of(doomed[at]));
            at += 1;
        }
        let (mut child, mut before) = (last, Vec::new());
        while let Some(parent) = self.prefix.parent_of(child) {
            let ids = self.prefix.content_key_of(parent).zip(self.prefix.content_key_of(child));
            let is_own = self.pool.block(parent).pins == 0
                && self.worth_of(parent).hits == 0
                && children_of(parent).len() == 1
                && ids.is_none_or(|(parent, child)| !self.host.has_other_child(&parent.id, &child.id));
            if !is_own {
                break;
            }
            before.push(parent);
            child = parent;
        }
        self.forget_prefix(last, &before);
        doomed.append(&mut before);
        for block in &doomed {
            self.worth.forget(self.prefix.hash_of(*block));
            self.forget(*block);
        }
        doomed.len() as u32
    }

    /// Forgets everything but pinned prefixes, in host memory too. Returns how many blocks of the pool were forgotten.
    pub fn reset_prefixes(&mut self) -> u32 {
        let is_doomed = |id: &BlockId| {
            let block = self.pool.block(*id);
            block.visibility == Visibility::Published && block.pins == 0
        };
        let doomed: Vec<BlockId> = (1..self.config.num_blocks).map(BlockId).filter(is_doomed).collect();
        self.reset_host();
        let pins = &self.pins;
        self.worth.retain(|end| pins.iter().any(|pin| pin.id == end.hash));
        doomed.iter().for_each(|block| self.forget(*block));
        doomed.len() as u32
    }

    /// Pinned prefixes first, then those with the most hits, as far as some tier has their last block (`is_outside`: kept
    /// beyond host memory); at most `max`.
    pub fn prefixes(&self, max: usize, is_outside: &dyn Fn(&ContentId) -> bool) -> Vec<PrefixView> {
        let anchor = self.config.groups.anchor();
        let last_of = |pin: &Pin| pin.table.block(pin.table.num_rows() - 1, anchor);
        let mut views: Vec<PrefixView> =
            self.pins.iter().take(max).map(|pin| self.pin_view(pin, last_of(pin))).collect();
        let is_pinned = |end: &PrefixEnd| self.pins.iter().any(|pin| self.prefix.is_end(last_of(pin), end));
        let mut others: Vec<&Remembered> = self.worth.all().collect();
        others.sort_unstable_by_key(|known| (Reverse((known.stats.hits, known.stats.last_step)), known.end.hash));
        let others = others.into_iter().filter(|known| !is_pinned(&known.end));
        let placed = others.filter_map(|known| Some((known, self.place_of(&known.end, is_outside)?)));
        views.extend(placed.take(max - views.len()).map(|(known, place)| view_of(known, place)));
        views
    }

    fn place_of(&self, end: &PrefixEnd, is_outside: &dyn Fn(&ContentId) -> bool) -> Option<PrefixPlace> {
        if self.prefix.block_of(end.hash).is_some_and(|block| self.prefix.is_end(block, end)) {
            return Some(PrefixPlace::Pool);
        }
        let (id, _) = end.id?;
        match self.host.holds(&id) {
            true => Some(PrefixPlace::Host),
            false => is_outside(&id).then_some(PrefixPlace::Outside),
        }
    }

    /// Pinned prefixes as they would be pinned again.
    pub fn pin_specs(&self) -> impl Iterator<Item = &PinSpec> {
        self.pins.iter().map(|pin| &pin.spec)
    }

    /// Blocks that pins hold.
    pub fn num_pinned(&self) -> u32 {
        self.pool.header.num_pinned
    }

    /// Of the first `max_blocks` blocks of these tokens: how many are found and pinned.
    pub fn num_pinned_of(&self, chain: &PrefixChain, tokens: &[TokenId], max_blocks: u32) -> u32 {
        let mut count = 0;
        if self.num_pinned() > 0 {
            let count_pinned = |block| count += u32::from(self.pool.block(block).pins > 0);
            self.prefix.walk(chain, tokens, max_blocks as usize, count_pinned);
        }
        count
    }

    /// The pins that let go since the last call because their content became suspect.
    pub fn take_lost_pins(&mut self) -> Vec<PinSpec> {
        std::mem::take(&mut self.lost_pins)
    }

    /// Lets go of pins whose blocks cannot be found any more.
    pub(super) fn drop_suspect_pins(&mut self) {
        if self.pins.is_empty() {
            return;
        }
        let is_suspect = |pool: &BlockPool, pin: &Pin| {
            pin.table.held().any(|block| pool.block(block).visibility != Visibility::Published)
        };
        while let Some(at) = self.pins.iter().position(|pin| is_suspect(&self.pool, pin)) {
            let spec = self.let_go(at);
            self.lost_pins.push(spec);
        }
    }

    /// The tables of pins, for the check of all tables.
    pub(super) fn pinned_tables(&self) -> impl Iterator<Item = HeldTable<'_>> {
        self.pins.iter().map(|pin| HeldTable {
            table: &pin.table,
            tokens: &pin.spec.tokens,
            num_valid: pin.spec.tokens.len() as u32,
            key: pin.spec.key,
            swapped: None,
        })
    }

    /// Each pinned block counts its pins and can be found.
    pub(super) fn check_pins(&self) -> Result<(), String> {
        if self.pins.is_empty() && self.num_pinned() == 0 {
            return Ok(());
        }
        let mut pins = vec![0; self.pool.len()];
        self.pins.iter().flat_map(|pin| pin.table.held()).for_each(|id| pins[id.idx()] += 1);
        for (i, &held) in pins.iter().enumerate() {
            let block = self.pool.block(BlockId(i as u32));
            if block.pins != held || held > 0 && block.visibility != Visibility::Published {
                let (pins, visibility) = (block.pins, block.visibility);
                return Err(format!("invariant 3: block {i} counts {pins} pins, {held} hold it, it is {visibility:?}"));
            }
        }
        let (num_pinned, counted) = (pins.iter().filter(|held| **held > 0).count() as u32, self.num_pinned());
        if num_pinned != counted {
            return Err(format!("invariant 3: {num_pinned} blocks are pinned, {counted} are counted"));
        }
        Ok(())
    }

    fn let_go(&mut self, at: usize) -> PinSpec {
        let pin = self.pins.remove(at);
        for block in pin.table.held() {
            if self.pool.unpin(block) {
                self.events.push(BlockEvent::Unpin { block });
            }
        }
        self.free(pin.table);
        pin.spec
    }

    /// This block is not found any more: an idle one is free, a held one stays with its tables.
    pub(super) fn forget(&mut self, block: BlockId) {
        self.prefix.forget(block);
        if self.pool.block(block).state == BlockState::CachedIdle {
            self.pool.drop_idle(block);
            self.events.push(BlockEvent::Evict { block });
            self.events.push(BlockEvent::Free { block });
        } else {
            self.pool.set_visibility(block, Visibility::Tainted);
        }
    }

    fn pin_view(&self, pin: &Pin, last: BlockId) -> PrefixView {
        let head = pin.spec.tokens.iter().take(MAX_HEAD).copied().collect();
        let known = Remembered { end: self.prefix.end_of(last), head, stats: self.worth_of(last) };
        let name = pin.spec.name.clone();
        PrefixView { name, is_pinned: true, ..view_of(&known, PrefixPlace::Pool) }
    }
}

fn view_of(known: &Remembered, place: PrefixPlace) -> PrefixView {
    let (end, stats) = (&known.end, known.stats);
    PrefixView {
        id: end.hash,
        name: None,
        blocks: end.depth,
        hits: stats.hits,
        hit_tokens: stats.hit_tokens,
        host_hit_tokens: stats.host_tokens,
        disk_hit_tokens: stats.disk_tokens,
        last_hit_step: stats.last_step,
        is_pinned: false,
        place,
        key: end.key,
        head: known.head.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvConfig, KvGroups};

    fn cache() -> KvCache {
        KvCache::new(KvConfig { num_blocks: 9, block_size: 2, groups: KvGroups::ONE, enable_prefix_cache: true })
    }

    /// Computes these tokens in one step, as a request does.
    fn compute(kv: &mut KvCache, step: u64, tokens: &[TokenId]) -> (PrefixChain, BlockTable) {
        let mut chain = kv.new_chain(CacheKey::default());
        chain.extend(tokens);
        let mut table = BlockTable::new(RequestId(step));
        let len = tokens.len() as u32;
        kv.begin(step);
        let hit = kv.lookup(&chain, tokens, (len - 1) / 2 * 2);
        let hit = kv.whole_blocks(hit);
        kv.attach(&mut table, hit, len - 1);
        let from = table.slots();
        kv.reserve(&mut table, from, len).expect("the pool is large enough");
        kv.commit();
        kv.fill(&table, from, len);
        kv.publish(&table, &mut chain, tokens, from, len);
        (chain, table)
    }

    fn prefixes(kv: &KvCache, max: usize) -> Vec<PrefixView> {
        kv.prefixes(max, &|_| false)
    }

    fn check(kv: &KvCache) {
        assert_eq!(kv.check_integrity(std::iter::empty()), Ok(()));
    }

    fn spec(tokens: &[TokenId], name: &str) -> PinSpec {
        let key = CacheKey::default();
        PinSpec { request: RequestId(1), name: Some(name.into()), tokens: tokens.to_vec(), key, client: 0 }
    }

    #[test]
    fn a_pinned_prefix_outlives_pressure_and_is_evictable_once_let_go() {
        let mut kv = cache();
        let (chain, table) = compute(&mut kv, 1, &[1, 2, 3, 4, 5]);
        let id = kv.pin(spec(&[1, 2, 3, 4], "system"), &chain, table).expect("it was computed");
        check(&kv);
        assert_eq!((kv.num_pinned(), kv.counts().pinned, kv.num_available()), (2, 2, 6));
        let (_, table) = compute(&mut kv, 2, &(10..22).collect::<Vec<_>>());
        assert_eq!(kv.num_available(), 0, "the pressure is all there can be");
        kv.free(table);
        assert_eq!(kv.lookup(&chain, &[1, 2, 3, 4, 5], 4).num_blocks, 2);
        let listed = prefixes(&kv, 10);
        assert_eq!((listed[0].name.as_deref(), listed[0].blocks, listed[0].is_pinned), (Some("system"), 2, true));
        assert_eq!(listed[0].head, [1, 2, 3, 4]);
        assert_eq!(kv.evict_prefix(id), 0, "a pinned prefix is unpinned first");
        assert!(kv.unpin(id) && !kv.unpin(id));
        check(&kv);
        let (_, table) = compute(&mut kv, 3, &(30..46).collect::<Vec<_>>());
        kv.free(table);
        assert_eq!(kv.lookup(&chain, &[1, 2, 3, 4, 5], 4).num_blocks, 0);
        check(&kv);
    }

    #[test]
    fn pinning_twice_renames() {
        let mut kv = cache();
        let (chain, table) = compute(&mut kv, 1, &[1, 2, 3, 4, 5]);
        kv.pin(spec(&[1, 2, 3, 4], "first"), &chain, table);
        let (chain, table) = compute(&mut kv, 2, &[1, 2, 3, 4, 5]);
        kv.pin(spec(&[1, 2, 3, 4], "second"), &chain, table);
        check(&kv);
        let names: Vec<_> = prefixes(&kv, 10).into_iter().filter_map(|prefix| prefix.name).collect();
        assert_eq!((names, kv.num_pinned()), (vec!["second".to_string()], 2));
    }

    #[test]
    fn eviction_takes_a_prefix_with_what_hangs_on_it_and_leaves_the_common_part() {
        let mut kv = cache();
        for (step, tokens) in [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 6, 7, 8])] {
            let (_, table) = compute(&mut kv, step, &tokens);
            kv.free(table);
        }
        let (chain, table) = compute(&mut kv, 3, &[1, 2, 3, 4, 5, 6, 7]);
        kv.free(table);
        let by_hits: Vec<_> =
            prefixes(&kv, 10).iter().map(|p| (p.blocks, p.hits, p.hit_tokens, p.head.clone())).collect();
        assert_eq!(by_hits, [(2, 1, 4, vec![1, 2]), (1, 1, 2, vec![1, 2])]);
        let id = prefixes(&kv, 10)[0].id;
        assert_eq!(kv.evict_prefix(id), 2, "the second block and the third, which follows it");
        check(&kv);
        assert_eq!(kv.lookup(&chain, &[1, 2, 3, 4, 5, 6, 7], 6).num_blocks, 1);
        assert_eq!(kv.evict_prefix(id), 0);
    }

    #[test]
    fn after_a_reset_only_pins_are_found_and_held_blocks_do_not_come_back() {
        let mut kv = cache();
        let (chain, table) = compute(&mut kv, 1, &[1, 2, 3, 4, 5]);
        kv.pin(spec(&[1, 2], "system"), &chain, table);
        let (other, table) = compute(&mut kv, 2, &[7, 8, 9, 10, 11]);
        assert_eq!(kv.reset_prefixes(), 3);
        kv.free(table);
        check(&kv);
        assert_eq!(kv.lookup(&chain, &[1, 2, 3, 4, 5], 4).num_blocks, 1);
        assert_eq!(kv.lookup(&other, &[7, 8, 9, 10, 11], 4).num_blocks, 0);
        assert_eq!(kv.counts().free, 7);
    }

    #[test]
    fn a_suspect_block_ends_its_pin() {
        let mut kv = cache();
        let (chain, table) = compute(&mut kv, 1, &[1, 2, 3, 4, 5]);
        kv.pin(spec(&[1, 2, 3, 4], "system"), &chain, table);
        let (_, table) = compute(&mut kv, 2, &[1, 2, 3, 4, 5]);
        kv.taint(&table);
        kv.free(table);
        check(&kv);
        assert_eq!((kv.num_pinned(), kv.take_lost_pins().len(), kv.counts().free), (0, 1, 8));
    }
}
