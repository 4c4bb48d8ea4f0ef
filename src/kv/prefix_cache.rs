//! Finds blocks by what they hold: a hash chain over the tokens names a block, the tokens themselves decide.
//!
//! Guarantees: a hit means that salt, every token of the block and every token before it are equal. Hashes only find
//! candidates: each publication has a number, names the number of its parent, and stores its tokens, so two prefixes
//! whose hashes collide can never be taken for each other. One block is published per hash, the latest.
//! It does not attempt partial blocks.

use crate::ids::{BlockId, TokenId};
use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The number that stands for "no parent": the block holds the first tokens.
const ROOT: u64 = 0;

/// The names of a sequence's full blocks: `hash[i] = xxh3(tokens of block i, seeded with hash[i - 1])`, and the first
/// is seeded with the salt's hash. Grows with the sequence's tokens and survives preemption.
#[derive(Clone, Debug)]
pub struct PrefixChain {
    salt: u64,
    hash_mask: u64,
    block_size: u32,
    links: Vec<Link>, // [number of full blocks named so far]
}

#[derive(Clone, Copy, Debug)]
struct Link {
    hash: u64,
    /// The publication known to hold this block's content; 0 when none was met. May be gone: ask before use.
    publication: u64,
}

impl PrefixChain {
    pub(super) fn new(salt: u64, block_size: u32, hash_mask: u64) -> Self {
        PrefixChain { salt, hash_mask, block_size, links: Vec::new() }
    }

    /// Names the blocks that `tokens` (all of the sequence's, from the first) fill.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        let size = self.block_size as usize;
        while (self.links.len() + 1) * size <= tokens.len() {
            let i = self.links.len();
            let hash = hash_block(self.parent_hash(i), &tokens[i * size..(i + 1) * size], self.hash_mask);
            self.links.push(Link { hash, publication: ROOT });
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

    fn parent_hash(&self, i: usize) -> u64 {
        match i {
            0 => root_hash(self.salt),
            i => self.links[i - 1].hash,
        }
    }
}

fn root_hash(salt: u64) -> u64 {
    xxh3_64_with_seed(&salt.to_le_bytes(), 0)
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
    salt: u64,
}

#[derive(Debug)]
pub(super) struct PrefixCache {
    block_size: usize,
    hash_mask: u64,
    block_of_hash: FxHashMap<u64, BlockId>,
    publications: Vec<Publication>, // [num_blocks]
    tokens: Vec<TokenId>,           // [num_blocks, block_size]
    last_number: u64,
}

/// What publishing a block came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// Another block holds the same content already.
    Duplicate,
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
            publications: vec![Publication::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            last_number: ROOT,
        }
    }

    /// Appends to `hit` the blocks that hold the first tokens of a sequence, at most `max_blocks`.
    pub fn lookup(&self, chain: &PrefixChain, tokens: &[TokenId], max_blocks: usize, hit: &mut Vec<BlockId>) {
        let mut parent = ROOT;
        for (i, link) in chain.links.iter().enumerate().take(max_blocks) {
            let Some(block) = self.find(link.hash, parent, chain.salt, self.part(tokens, i)) else { return };
            hit.push(block);
            parent = self.publications[block.idx()].number;
        }
    }

    /// True when the publication that the chain knows for block `i` can still be found.
    pub fn is_findable(&self, chain: &PrefixChain, i: usize) -> bool {
        let link = chain.links[i];
        let block = self.block_of_hash.get(&link.hash);
        block.is_some_and(|block| self.publications[block.idx()].number == link.publication)
    }

    /// Makes `block` findable as part `i` of the chain, unless its equal is there. The parts before it must be findable.
    pub fn publish(&mut self, chain: &mut PrefixChain, tokens: &[TokenId], i: usize, block: BlockId) -> Published {
        let parent_number = if i == 0 { ROOT } else { chain.links[i - 1].publication };
        let hash = chain.links[i].hash;
        if let Some(equal) = self.find(hash, parent_number, chain.salt, self.part(tokens, i)) {
            chain.links[i].publication = self.publications[equal.idx()].number;
            return Published::Duplicate;
        }
        self.last_number += 1;
        chain.links[i].publication = self.last_number;
        let parent_hash = chain.parent_hash(i);
        self.publications[block.idx()] =
            Publication { number: self.last_number, parent_number, hash, parent_hash, salt: chain.salt };
        let at = block.idx() * self.block_size;
        self.tokens[at..at + self.block_size].copy_from_slice(&tokens[i * self.block_size..(i + 1) * self.block_size]);
        let replaced = self.block_of_hash.insert(hash, block).filter(|old| *old != block);
        Published::Now { hash, replaced }
    }

    /// The block can no longer be found; what it held stays known until its next publication.
    pub fn forget(&mut self, block: BlockId) {
        let hash = self.publications[block.idx()].hash;
        if self.block_of_hash.get(&hash) == Some(&block) {
            self.block_of_hash.remove(&hash);
        }
    }

    /// Undoes [`Self::forget`], before anything else was published.
    pub fn restore(&mut self, block: BlockId) {
        self.block_of_hash.insert(self.publications[block.idx()].hash, block);
    }

    pub fn hash_of(&self, block: BlockId) -> u64 {
        self.publications[block.idx()].hash
    }

    pub fn salt_of(&self, block: BlockId) -> u64 {
        self.publications[block.idx()].salt
    }

    pub fn tokens_of(&self, block: BlockId) -> &[TokenId] {
        &self.tokens[block.idx() * self.block_size..(block.idx() + 1) * self.block_size]
    }

    pub fn num_findable(&self) -> usize {
        self.block_of_hash.len()
    }

    /// Checks that a published block is found under its hash and that its hash follows from its parent's and its tokens.
    pub fn check(&self, block: BlockId) -> Result<(), String> {
        let publication = self.publications[block.idx()];
        if self.block_of_hash.get(&publication.hash) != Some(&block) {
            return Err(format!("invariant 7: published block {block} is not found under its hash"));
        }
        if hash_block(publication.parent_hash, self.tokens_of(block), self.hash_mask) != publication.hash {
            return Err(format!("invariant 7: the hash of block {block} does not follow from its tokens"));
        }
        if publication.parent_number == ROOT && publication.parent_hash != root_hash(publication.salt) {
            return Err(format!("invariant 7: block {block} has no parent, but its chain does not start at its salt"));
        }
        if publication.number == ROOT || publication.parent_number >= publication.number {
            return Err(format!("invariant 7: block {block} was published before its parent"));
        }
        Ok(())
    }

    fn find(&self, hash: u64, parent_number: u64, salt: u64, tokens: &[TokenId]) -> Option<BlockId> {
        let block = *self.block_of_hash.get(&hash)?;
        let publication = &self.publications[block.idx()];
        let equal =
            publication.parent_number == parent_number && publication.salt == salt && self.tokens_of(block) == tokens;
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
        let mut chain = PrefixChain::new(salt, 2, cache.hash_mask);
        chain.extend(tokens);
        for i in 0..chain.len() {
            cache.publish(&mut chain, tokens, i, BlockId(first + i as u32));
        }
        chain
    }

    fn lookup(cache: &PrefixCache, salt: u64, tokens: &[TokenId]) -> Vec<u32> {
        let mut chain = PrefixChain::new(salt, 2, cache.hash_mask);
        chain.extend(tokens);
        let mut hit = Vec::new();
        cache.lookup(&chain, tokens, usize::MAX, &mut hit);
        hit.iter().map(|b| b.0).collect()
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
    fn a_forgotten_parent_makes_its_children_unfindable_until_published_again() {
        let mut cache = PrefixCache::new(10, 2, u64::MAX);
        publish(&mut cache, 0, &[1, 2, 3, 4], 1);
        cache.forget(BlockId(1));
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [] as [u32; 0]);
        publish(&mut cache, 0, &[1, 2, 3, 4], 5);
        assert_eq!(lookup(&cache, 0, &[1, 2, 3, 4]), [5, 6]);
    }
}
