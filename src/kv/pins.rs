//! Prefixes as people handle them: pinned, evicted, listed with what they were worth.
//!
//! Guarantees: a pinned prefix is an owner like a table: its blocks count its reference, stay findable and are never
//! evicted; a pin whose content becomes suspect lets go and is handed to whoever asks for [`KvCache::take_lost_pins`].
//! Statistics belong to the block where a hit ended: `hits` counts the admissions whose longest match ended there, so
//! that no hit is counted twice and the list is bounded by the pool; they last as long as the block can be found.

use super::block_pool::{BlockPool, Visibility};
use super::{BlockEvent, BlockState, BlockTable, CacheKey, HeldTable, KvCache, PrefixChain};
use crate::ids::{BlockId, RequestId, TokenId};

/// First tokens that a [`PrefixView`] shows at most.
const MAX_HEAD: usize = 32;

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

/// A prefix that the cache knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixView {
    /// Content hash of its last block.
    pub id: u64,
    pub name: Option<String>,
    pub blocks: u32,
    pub hits: u64,
    pub hit_tokens: u64,
    pub last_hit_step: u64,
    pub is_pinned: bool,
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
        let id = self.prefix.hash_of(blocks[blocks.len() - 1]);
        if let Some(pin) = self.pins.iter_mut().find(|pin| pin.table.ids() == blocks) {
            pin.spec.name = spec.name;
            self.free(table);
            return Some(id);
        }
        let mut pinned = BlockTable::new(spec.request);
        for (logical, &block) in blocks.iter().enumerate() {
            self.pool.hold(block);
            pinned.push(block);
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

    /// The tokens of the prefix of this id, from the first; `None` when some block before its last cannot be found.
    pub fn prefix_tokens(&self, id: u64) -> Option<(Vec<TokenId>, CacheKey)> {
        let last = self.prefix.block_of(id)?;
        let mut chain = vec![last];
        while let Some(parent) = self.prefix.parent_of(chain[chain.len() - 1]) {
            chain.push(parent);
        }
        if chain.len() as u32 != self.prefix.stats_of(last).depth {
            return None;
        }
        let tokens = chain.iter().rev().flat_map(|block| self.prefix.tokens_of(*block)).copied().collect();
        Some((tokens, self.prefix.key_of(last)))
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
        let Some(last) = self.prefix.block_of(id).filter(|block| self.pool.block(*block).pins == 0) else { return 0 };
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
                && self.prefix.stats_of(parent).hits == 0
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
        doomed.iter().for_each(|block| self.forget(*block));
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
        doomed.iter().for_each(|block| self.forget(*block));
        doomed.len() as u32
    }

    /// Pinned prefixes first, then those with the most hits; at most `max`.
    pub fn prefixes(&self, max: usize) -> Vec<PrefixView> {
        let last_of = |pin: &Pin| pin.table.ids()[pin.table.ids().len() - 1];
        let mut pinned: Vec<BlockId> = self.pins.iter().map(last_of).collect();
        let is_hit = |id: &BlockId| {
            self.pool.block(*id).visibility == Visibility::Published && self.prefix.stats_of(*id).hits > 0
        };
        let mut others: Vec<BlockId> = (1..self.config.num_blocks).map(BlockId).filter(is_hit).collect();
        others.retain(|block| !pinned.contains(block));
        others.sort_by_key(|id| {
            let stats = self.prefix.stats_of(*id);
            (std::cmp::Reverse((stats.hits, stats.last_hit_step)), *id)
        });
        let num_pinned = pinned.len();
        pinned.append(&mut others);
        pinned.truncate(max);
        let view = |(i, id): (usize, &BlockId)| self.prefix_view(*id, self.pins.get(i).filter(|_| i < num_pinned));
        pinned.iter().enumerate().map(view).collect()
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
            pin.table.ids().iter().any(|block| pool.block(*block).visibility != Visibility::Published)
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
        self.pins.iter().flat_map(|pin| pin.table.ids()).for_each(|id| pins[id.idx()] += 1);
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
        for &block in pin.table.ids() {
            if self.pool.unpin(block) {
                self.events.push(BlockEvent::Unpin { block });
            }
        }
        self.free(pin.table);
        pin.spec
    }

    /// This block is not found any more: an idle one is free, a held one stays with its tables.
    fn forget(&mut self, block: BlockId) {
        self.prefix.forget(block);
        if self.pool.block(block).state == BlockState::CachedIdle {
            self.pool.drop_idle(block);
            self.events.push(BlockEvent::Evict { block });
            self.events.push(BlockEvent::Free { block });
        } else {
            self.pool.set_visibility(block, Visibility::Tainted);
        }
    }

    fn prefix_view(&self, last: BlockId, pin: Option<&Pin>) -> PrefixView {
        let (stats, mut head) = (self.prefix.stats_of(last), Vec::new());
        match pin {
            Some(pin) => head.extend(pin.spec.tokens.iter().take(MAX_HEAD)),
            None => {
                head.extend(self.prefix.root_of(last).iter().flat_map(|r| self.prefix.tokens_of(*r)).take(MAX_HEAD))
            }
        }
        PrefixView {
            id: self.prefix.hash_of(last),
            name: pin.and_then(|pin| pin.spec.name.clone()),
            blocks: stats.depth,
            hits: stats.hits,
            hit_tokens: stats.hit_tokens,
            last_hit_step: stats.last_hit_step,
            is_pinned: pin.is_some(),
            key: self.prefix.key_of(last),
            head,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvConfig;

    fn cache() -> KvCache {
        KvCache::new(KvConfig { num_blocks: 9, block_size: 2, enable_prefix_cache: true })
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
        let listed = kv.prefixes(10);
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
        let names: Vec<_> = kv.prefixes(10).into_iter().filter_map(|prefix| prefix.name).collect();
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
            kv.prefixes(10).iter().map(|p| (p.blocks, p.hits, p.hit_tokens, p.head.clone())).collect();
        assert_eq!(by_hits, [(2, 1, 4, vec![1, 2]), (1, 1, 2, vec![1, 2])]);
        let id = kv.prefixes(10)[0].id;
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
