//! Finds blocks by what they hold: a hash chain over the tokens names a block, the tokens themselves decide.
//!
//! Guarantees: a hit means that salt, adapter, every token of the block and every token before it are equal. Hashes only find
//! candidates: each publication has a number, names the number of its parent, and stores its tokens, so two prefixes
//! whose hashes collide can never be taken for each other. One block is published per hash, the latest.
//! After the whole blocks, the block that goes on like the sequence for longest is found in part: a full one, or the
//! tail that a request left behind, which is published with as many tokens as it has. Its tokens are compared as well.

use super::host_pool::ContentKey;
use crate::ids::{BlockId, TokenId};
use rustc_hash::FxHashMap;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What else must be equal, besides the tokens, for two sequences to share a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct CacheKey {
    /// Chosen by the client: who does not know it shares nothing.
    pub salt: u64,
    /// The weights' adapter, which K and V depend on; 0 is none.
    pub adapter: u64,
}

/// The number that stands for "no parent": the block holds the first tokens.
const ROOT: u64 = 0;
/// Blocks that are compared for a hit in part, the latest first: a bound on the cost of a lookup.
const MAX_COMPARED: usize = 32;

/// What a full block holds, told apart from everything else that a block may ever hold: SHA-256 over the parent's
/// identity and the tokens; the first block's parent is the hash of salt and adapter. The name under which content leaves the
/// pool, where no publication numbers exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ContentId(pub [u8; 32]);

impl ContentId {
    /// The parent of the blocks that hold first tokens under this key.
    pub fn root(key: CacheKey) -> ContentId {
        ContentId(Sha256::digest([key.salt.to_le_bytes(), key.adapter.to_le_bytes()].concat()).into())
    }

    /// The block of these tokens after `self`.
    pub fn child(&self, tokens: &[TokenId]) -> ContentId {
        let mut hash = Sha256::new_with_prefix(self.0);
        tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        ContentId(hash.finalize().into())
    }
}

/// The names of a sequence's full blocks: `hash[i] = xxh3(tokens of block i, seeded with hash[i - 1])`, and the first
/// is seeded with the hash of salt and adapter. Grows with the sequence's tokens and survives preemption.
#[derive(Clone, Debug)]
pub struct PrefixChain {
    key: CacheKey,
    hash_mask: u64,
    block_size: u32,
    links: Vec<Link>, // [number of full blocks named so far]
    /// Identities of the same blocks, where content can leave the pool.
    ids: Option<Vec<ContentId>>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    hash: u64,
    /// The publication known to hold this block's content; 0 when none was met. May be gone: ask before use.
    publication: u64,
}

impl PrefixChain {
    pub(super) fn new(key: CacheKey, block_size: u32, hash_mask: u64) -> Self {
        PrefixChain { key, hash_mask, block_size, links: Vec::new(), ids: None }
    }

    pub(super) fn with_ids(self) -> Self {
        PrefixChain { ids: Some(Vec::new()), ..self }
    }

    /// Identity of block `i` and of its parent, where identities are kept.
    pub(super) fn id(&self, i: usize) -> Option<(ContentId, ContentId)> {
        let ids = self.ids.as_ref()?;
        Some((*ids.get(i)?, if i == 0 { ContentId::root(self.key) } else { ids[i - 1] }))
    }

    pub(super) fn key(&self) -> CacheKey {
        self.key
    }

    /// Names the blocks that `tokens` (all of the sequence's, from the first) fill.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        let size = self.block_size as usize;
        while (self.links.len() + 1) * size <= tokens.len() {
            let i = self.links.len();
            let hash = hash_block(self.parent_hash(i), &tokens[i * size..(i + 1) * size], self.hash_mask);
            self.links.push(Link { hash, publication: ROOT });
            if let Some(ids) = &mut self.ids {
                let parent = ids.last().copied().unwrap_or_else(|| ContentId::root(self.key));
                ids.push(parent.child(&tokens[i * size..(i + 1) * size]));
            }
        }
    }

    /// True when block `i` of both sequences has the same name: most likely the same tokens after the same prefix.
    pub fn names_alike(&self, other: &PrefixChain, i: usize) -> bool {
        matches!((self.links.get(i), other.links.get(i)), (Some(a), Some(b)) if a.hash == b.hash)
    }

    /// Number of full blocks named.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    /// True before the first full block.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    fn parent_number(&self, i: usize) -> u64 {
        if i == 0 { ROOT } else { self.links[i - 1].publication }
    }

    fn parent_hash(&self, i: usize) -> u64 {
        match i {
            0 => root_hash(self.key),
            i => self.links[i - 1].hash,
        }
    }
}

fn root_hash(key: CacheKey) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(&[key.salt, key.adapter]), 0)
}

fn hash_block(parent: u64, tokens: &[TokenId], mask: u64) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(tokens), parent) & mask
}

/// What a published block holds, besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Publication {
    /// Unique for the life of the cache, above 0.
    number: u64,
    parent_number: u64,
    hash: u64,
    parent_hash: u64,
    key: CacheKey,
    /// Tokens that can be found: all of a full block, those of a tail otherwise.
    len: u32,
    stats: PrefixStats,
    /// The block of the first tokens, and its number while it held them.
    root: (BlockId, u64),
    /// Of the content and of its parent's, where identities are kept.
    id: Option<(ContentId, ContentId)>,
}

/// What a published block was worth as the end of a hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PrefixStats {
    /// Blocks from the first token to this one.
    pub depth: u32,
    pub hits: u64,
    pub hit_tokens: u64,
    pub last_hit_step: u64,
}

/// Where a publication is listed under its parent: parent's number, key, first token, own number.
type ChildKey = (u64, CacheKey, TokenId, u64);

#[derive(Debug)]
pub(super) struct PrefixCache {
    block_size: usize,
    hash_mask: u64,
    block_of_hash: FxHashMap<u64, BlockId>,
    /// The findable blocks again, by what they follow.
    children: BTreeMap<ChildKey, BlockId>,
    publications: Vec<Publication>, // [num_blocks]
    tokens: Vec<TokenId>,           // [num_blocks, block_size]
    last_number: u64,
    num_forgotten: u64,
}

/// What publishing a block came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// Another block holds the same content already.
    Duplicate,
    /// Another block has its hash and is to keep it.
    Refused,
    /// The block can be found; the block that had its hash until now can not.
    Now { hash: u64, replaced: Option<BlockId> },
}

impl PrefixCache {
    pub fn new(num_blocks: u32, block_size: u32, hash_mask: u64) -> Self {
        let (num_blocks, block_size) = (num_blocks as usize, block_size as usize);
        PrefixCache {
            block_size,
            hash_mask,
            block_of_hash: FxHashMap::default(),
            children: BTreeMap::new(),
            publications: vec![Publication::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            last_number: ROOT,
            num_forgotten: 0,
        }
    }

    /// Appends to `hit` the blocks that hold the first tokens of a sequence, at most all of `tokens`: whole ones, and one
    /// found in part. Returns how many tokens of the last one count, when it was found in part.
    pub fn lookup(&self, chain: &PrefixChain, tokens: &[TokenId], hit: &mut Vec<BlockId>) -> u32 {
        let parent = self.walk(chain, tokens, tokens.len() / self.block_size, |block| hit.push(block));
        let rest = &tokens[hit.len() * self.block_size..];
        let Some((block, len)) = self.longest_child(parent, chain.key, rest) else { return 0 };
        // Not worth a copy, unless nothing is left to compute.
        if (len as usize) < (self.block_size / 4).max(1).min(rest.len()) {
            return 0;
        }
        hit.push(block);
        len
    }

    /// How many whole blocks [`Self::lookup`] would find.
    pub fn count(&self, chain: &PrefixChain, tokens: &[TokenId], max_blocks: usize) -> u32 {
        let mut count = 0;
        self.walk(chain, tokens, max_blocks, |_| count += 1);
        count
    }

    /// Grows whenever a block becomes findable, or stops being so.
    pub fn num_changes(&self) -> u64 {
        self.last_number + self.num_forgotten
    }

    /// The number of the last publication found.
    pub fn walk(
        &self,
        chain: &PrefixChain,
        tokens: &[TokenId],
        max_blocks: usize,
        mut found: impl FnMut(BlockId),
    ) -> u64 {
        let mut parent = ROOT;
        for (i, link) in chain.links.iter().enumerate().take(max_blocks) {
            let Some(block) = self.find(link.hash, parent, chain.key, self.part(tokens, i)) else { break };
            found(block);
            parent = self.publications[block.idx()].number;
        }
        parent
    }

    /// The block after `parent` that begins like `tokens` for longest, at least one token, and for how long; the latest
    /// of several.
    fn longest_child(&self, parent: u64, key: CacheKey, tokens: &[TokenId]) -> Option<(BlockId, u32)> {
        let first = *tokens.first()?;
        let children = self.children.range((parent, key, first, ROOT)..=(parent, key, first, u64::MAX));
        let common = |block: BlockId| self.tokens_of(block).iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut longest = None;
        for (_, &block) in children.rev().take(MAX_COMPARED) {
            let len = common(block);
            if longest.is_none_or(|(_, so_far)| len > so_far) {
                longest = Some((block, len));
            }
        }
        longest.map(|(block, len)| (block, len as u32))
    }

    /// True when the publication that the chain knows for block `i` can still be found.
    pub fn is_findable(&self, chain: &PrefixChain, i: usize) -> bool {
        let link = chain.links[i];
        let block = self.block_of_hash.get(&link.hash);
        block.is_some_and(|block| self.publications[block.idx()].number == link.publication)
    }

    /// Makes `block` findable as part `i` of the chain, unless its equal is there. The parts before it must be findable.
    pub fn publish(
        &mut self,
        chain: &mut PrefixChain,
        tokens: &[TokenId],
        i: usize,
        block: BlockId,
        is_kept: impl Fn(BlockId) -> bool,
    ) -> Published {
        let parent_number = chain.parent_number(i);
        let hash = chain.links[i].hash;
        if let Some(equal) = self.find(hash, parent_number, chain.key, self.part(tokens, i)) {
            chain.links[i].publication = self.publications[equal.idx()].number;
            return Published::Duplicate;
        }
        if self.block_of(hash).is_some_and(is_kept) {
            return Published::Refused;
        }
        chain.links[i].publication = self.last_number + 1;
        self.insert(chain, i, block, hash, &tokens[i * self.block_size..(i + 1) * self.block_size])
    }

    /// Makes a block findable that the last of `tokens` fill in part, unless they can be found already. The parts before
    /// it must be findable.
    pub fn publish_tail(
        &mut self,
        chain: &PrefixChain,
        tokens: &[TokenId],
        block: BlockId,
        is_kept: impl Fn(BlockId) -> bool,
    ) -> Published {
        let i = tokens.len() / self.block_size;
        let tail = &tokens[i * self.block_size..];
        let found = self.longest_child(chain.parent_number(i), chain.key, tail);
        if found.is_some_and(|(_, len)| len as usize == tail.len()) {
            return Published::Duplicate;
        }
        let hash = hash_block(chain.parent_hash(i), tail, self.hash_mask);
        if self.block_of(hash).is_some_and(is_kept) {
            return Published::Refused;
        }
        self.insert(chain, i, block, hash, tail)
    }

    /// Numbers a publication, the part `i` of the chain, and makes it findable.
    fn insert(&mut self, chain: &PrefixChain, i: usize, block: BlockId, hash: u64, tokens: &[TokenId]) -> Published {
        // It may be findable as what it was before: under a parent that was published anew since.
        self.forget(block);
        self.last_number += 1;
        let (number, parent_number, parent_hash) = (self.last_number, chain.parent_number(i), chain.parent_hash(i));
        let root = match i {
            0 => (block, number),
            _ => self.block_of(parent_hash).map_or((block, ROOT), |parent| self.publications[parent.idx()].root),
        };
        let stats = PrefixStats { depth: i as u32 + 1, ..PrefixStats::default() };
        let (key, len) = (chain.key, tokens.len() as u32);
        // A tail has no identity: it does not leave the pool.
        let id = if tokens.len() == self.block_size { chain.id(i) } else { None };
        self.publications[block.idx()] =
            Publication { number, parent_number, hash, parent_hash, key, len, stats, root, id };
        let at = block.idx() * self.block_size;
        self.tokens[at..at + tokens.len()].copy_from_slice(tokens);
        self.children.insert(self.child_key(block), block);
        let replaced = self.block_of_hash.insert(hash, block).filter(|old| *old != block);
        if let Some(old) = replaced {
            self.children.remove(&self.child_key(old));
        }
        Published::Now { hash, replaced }
    }

    /// The block can no longer be found; what it held stays known until its next publication.
    pub fn forget(&mut self, block: BlockId) {
        let hash = self.publications[block.idx()].hash;
        if self.block_of_hash.get(&hash) == Some(&block) {
            self.block_of_hash.remove(&hash);
            self.children.remove(&self.child_key(block));
            self.num_forgotten += 1;
        }
    }

    /// Undoes [`Self::forget`], before anything else was published.
    pub fn restore(&mut self, block: BlockId) {
        self.block_of_hash.insert(self.publications[block.idx()].hash, block);
        self.children.insert(self.child_key(block), block);
    }

    fn child_key(&self, block: BlockId) -> ChildKey {
        let publication = &self.publications[block.idx()];
        (publication.parent_number, publication.key, self.tokens_of(block)[0], publication.number)
    }

    /// An admission's longest match ended in this block.
    pub fn count_hit(&mut self, block: BlockId, tokens: u32, step: u64) {
        let stats = &mut self.publications[block.idx()].stats;
        stats.hits += 1;
        stats.hit_tokens += u64::from(tokens);
        stats.last_hit_step = step;
    }

    pub fn stats_of(&self, block: BlockId) -> PrefixStats {
        self.publications[block.idx()].stats
    }

    pub fn number_of(&self, block: BlockId) -> u64 {
        self.publications[block.idx()].number
    }

    /// The block that can be found under this hash.
    pub fn block_of(&self, hash: u64) -> Option<BlockId> {
        self.block_of_hash.get(&hash).copied()
    }

    /// The block before this one in its prefix, where it can be found.
    pub fn parent_of(&self, block: BlockId) -> Option<BlockId> {
        let child = &self.publications[block.idx()];
        self.block_of(child.parent_hash).filter(|parent| self.number_of(*parent) == child.parent_number)
    }

    /// The block of the first tokens of this one's prefix, while it still holds them.
    pub fn root_of(&self, block: BlockId) -> Option<BlockId> {
        let (root, number) = self.publications[block.idx()].root;
        (number != ROOT && self.number_of(root) == number).then_some(root)
    }

    /// The blocks that can be found, by the number of their parent.
    pub fn children(&self) -> FxHashMap<u64, Vec<BlockId>> {
        let mut children: FxHashMap<u64, Vec<BlockId>> = FxHashMap::default();
        for block in self.block_of_hash.values() {
            children.entry(self.publications[block.idx()].parent_number).or_default().push(*block);
        }
        children
    }

    pub fn hash_of(&self, block: BlockId) -> u64 {
        self.publications[block.idx()].hash
    }

    /// What names the content of a published block outside the pool.
    pub fn content_key_of(&self, block: BlockId) -> Option<ContentKey> {
        let publication = &self.publications[block.idx()];
        let (id, parent) = publication.id?;
        Some(ContentKey { id, parent, key: publication.key, hash: publication.hash })
    }

    pub fn key_of(&self, block: BlockId) -> CacheKey {
        self.publications[block.idx()].key
    }

    /// The tokens that can be found in a published block.
    pub fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        let (start, len) = (block.idx() * self.block_size, self.publications[block.idx()].len as usize);
        &self.tokens[start..start + len]
    }

    /// By hash, and by what they follow: two equal numbers.
    pub fn num_findable(&self) -> (usize, usize) {
        (self.block_of_hash.len(), self.children.len())
    }

    /// Checks that a published block is found under its hash and that its hash follows from its parent's and its tokens.
    pub fn check(&self, block: BlockId) -> Result<(), String> {
        let publication = self.publications[block.idx()];
        if self.block_of_hash.get(&publication.hash) != Some(&block) {
            return Err(format!("invariant 7: published block {block} is not found under its hash"));
        }
        if self.children.get(&self.child_key(block)) != Some(&block) {
            return Err(format!("invariant 7: published block {block} is not listed under its parent"));
        }
        if hash_block(publication.parent_hash, self.tokens_of(block), self.hash_mask) != publication.hash {
            return Err(format!("invariant 7: the hash of block {block} does not follow from its tokens"));
        }
        if publication.parent_number == ROOT && publication.parent_hash != root_hash(publication.key) {
            return Err(format!("invariant 7: block {block} has no parent, but its chain does not start at its key"));
        }
        if publication.number == ROOT || publication.parent_number >= publication.number {
            return Err(format!("invariant 7: block {block} was published before its parent"));
        }
        Ok(())
    }

    fn find(&self, hash: u64, parent_number: u64, key: CacheKey, tokens: &[TokenId]) -> Option<BlockId> {
        let block = *self.block_of_hash.get(&hash)?;
        let publication = &self.publications[block.idx()];
        let equal =
            publication.parent_number == parent_number && publication.key == key && self.tokens_of(block) == tokens;
        equal.then_some(block)
    }

    fn part<'a>(&self, tokens: &'a [TokenId], i: usize) -> &'a [TokenId] {
        &tokens[i * self.block_size..(i + 1) * self.block_size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Publishes `tokens` in blocks of 2 from block `first` on.
    fn publish(cache: &mut PrefixCache, salt: u64, tokens: &[TokenId], first: u32) -> PrefixChain {
        let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 2, cache.hash_mask);
        chain.extend(tokens);
        for i in 0..chain.len() {
            cache.publish(&mut chain, tokens, i, BlockId(first + i as u32), |_| false);
        }
        chain
    }

    fn lookup(cache: &PrefixCache, salt: u64, tokens: &[TokenId]) -> Vec<u32> {
        let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 2, cache.hash_mask);
        chain.extend(tokens);
        let mut hit = Vec::new();
        let in_part = cache.lookup(&chain, tokens, &mut hit);
        hit.truncate(hit.len() - usize::from(in_part > 0));
        hit.iter().map(|b| b.0).collect()
    }

    /// The block found in part and how much of it, in a cache with blocks of 4.
    fn lookup_in_part(cache: &PrefixCache, salt: u64, tokens: &[TokenId]) -> Option<(u32, u32)> {
        let mut chain = PrefixChain::new(CacheKey { salt, adapter: 0 }, 4, cache.hash_mask);
        chain.extend(tokens);
        let mut hit = Vec::new();
        let len = cache.lookup(&chain, tokens, &mut hit);
        (len > 0).then(|| (hit[hit.len() - 1].0, len))
    }

    #[test]
    fn identities_depend_on_salt_and_on_every_token_before() {
        let ids = |salt, tokens: &[TokenId]| {
            let key = CacheKey { salt, ..CacheKey::default() };
            let mut chain = PrefixChain::new(key, 2, 0).with_ids();
            chain.extend(tokens);
            chain.ids.expect("kept")
        };
        let all = [ids(0, &[1, 2, 3, 4]), ids(1, &[1, 2, 3, 4]), ids(0, &[1, 9, 3, 4])];
        let mut names: Vec<ContentId> = all.concat();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 6);
        assert_eq!(ids(0, &[1, 2, 3, 4, 5])[..2], all[0][..]);
    }

    #[test]
    fn the_longest_common_run_of_full_blocks_is_found() {
        let mut cache = PrefixCache::new(10, 2, u64::MAX);
        publish(&mut cache, 0, &[1, 2, 3, 4, 5, 6, 7], 1);
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 5, 6, 7]), [1, 2, 3]);
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4, 9, 6]), [1, 2]);
        assert_eq!(lookup(&cache, 0, &[3, 4]), [] as [u32; 0], "the same tokens at another place are another prefix");
        assert_eq!(lookup(&cache, 1, &[1, 2, 3, 4]), [] as [u32; 0], "another salt is another cache");
    }

    #[test]
    fn colliding_hashes_are_told_apart_by_tokens_and_parents() {
        // Mask 0: every block has the same hash.
        let mut cache = PrefixCache::new(10, 2, 0);
        publish(&mut cache, 0, &[1, 2], 1);
        assert_eq!(lookup(&cache, 0, &[1, 2]), [1]);
        assert_eq!(lookup(&cache, 0, &[3, 4]), [] as [u32; 0], "other tokens");
        assert_eq!(lookup(&cache, 5, &[1, 2]), [] as [u32; 0], "other salt");
        publish(&mut cache, 0, &[7, 8, 1, 2], 2);
        assert_eq!(lookup(&cache, 0, &[1, 2]), [] as [u32; 0], "the same tokens below another parent");
    }

    #[test]
    fn the_block_that_goes_on_alike_for_longest_is_found_in_part() {
        // Mask 0: hashes tell nothing, and each publication takes the place of the one before.
        for mask in [u64::MAX, 0] {
            let mut cache = PrefixCache::new(10, 4, mask);
            let mut chain = PrefixChain::new(CacheKey::default(), 4, mask);
            let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
            chain.extend(&tokens);
            cache.publish(&mut chain, &tokens, 0, BlockId(1), |_| false);
            assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 9]), Some((1, 2)));
            assert_eq!(lookup_in_part(&cache, 7, &[1, 2, 9]), None, "another salt");
            assert_eq!(lookup_in_part(&cache, 0, &[2, 3]), None);
            cache.publish(&mut chain, &tokens, 1, BlockId(2), |_| false);
            let after_1 = if mask == 0 { None } else { Some((2, 3)) };
            assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6, 7, 9, 9]), after_1);
            assert_eq!(lookup_in_part(&cache, 0, &[5, 6, 7]), None, "the same tokens at another place");
        }
    }

    #[test]
    fn a_tail_is_found_with_its_tokens_and_nothing_beyond_them() {
        let mut cache = PrefixCache::new(10, 4, u64::MAX);
        let mut chain = PrefixChain::new(CacheKey::default(), 4, u64::MAX);
        let tokens = [1, 2, 3, 4, 5, 6, 7];
        chain.extend(&tokens);
        cache.publish(&mut chain, &tokens, 0, BlockId(1), |_| false);
        assert!(matches!(
            cache.publish_tail(&chain, &tokens, BlockId(2), |_| false),
            Published::Now { replaced: None, .. }
        ));
        assert_eq!(cache.publish_tail(&chain, &tokens[..6], BlockId(3), |_| false), Published::Duplicate);
        assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6, 7, 8, 9]), Some((2, 3)));
        assert_eq!(lookup_in_part(&cache, 0, &[1, 2, 3, 4, 5, 6]), Some((2, 2)));
        assert_eq!((cache.check(BlockId(1)), cache.check(BlockId(2))), (Ok(()), Ok(())));
        cache.forget(BlockId(2));
        assert_eq!(lookup_in_part(&cache, 0, &tokens), None);
        cache.restore(BlockId(2));
        assert_eq!(lookup_in_part(&cache, 0, &tokens), Some((2, 3)));
    }

    #[test]
    fn a_forgotten_parent_makes_its_children_unfindable_until_published_again() {
        let mut cache = PrefixCache::new(10, 2, u64::MAX);
        publish(&mut cache, 0, &[1, 2, 3, 4], 1);
        cache.forget(BlockId(1));
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [] as [u32; 0]);
        publish(&mut cache, 0, &[1, 2, 3, 4], 5);
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [5, 6]);
    }
}
