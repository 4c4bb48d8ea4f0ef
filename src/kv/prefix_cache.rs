//! Finds blocks by what they hold: a hash chain over the tokens names a block, the tokens themselves decide.
//!
//! Guarantees: a hit means that salt, adapter, every token of the block and every token before it are equal. Hashes only find
//! candidates: each publication has a number, names the number of its parent, and stores its tokens, so two prefixes
//! whose hashes collide can never be taken for each other. One block is published per hash, the latest.
//! After the whole blocks, the block that goes on like the sequence for longest is found in part: a full one, or the
//! tail that a request left behind, which is published with as many tokens as it has. Its tokens are compared as well.
//! With layer groups the blocks of one group, the anchor, name prefixes; a block of another group names the anchor's
//! publication of the same tokens, so it is found exactly when that is.
//! Where even the anchor forgets (all layers have windows), the names of evicted blocks are remembered for a while, so that
//! a prefix is found whose last blocks are there though its first are gone.
//! Only a model with one group finds blocks in part.

mod changes;
mod grouped;
mod names;

pub use changes::PrefixChange;

use super::host_pool::ContentKey;
use super::worth::PrefixEnd;
use super::{KvConfig, KvGroups};
use crate::ids::{BlockId, TokenId};
use changes::{ChangeLog, stored};
use names::{MAX_NAMES, Name, Names};
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

    /// The name of block `i`.
    pub(super) fn hash_of(&self, i: usize) -> u64 {
        self.links[i].hash
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

/// The id of the prefix that the whole blocks of these tokens make up, wherever it is kept; `None` when they fill none.
pub fn prefix_id(key: CacheKey, block_size: u32, tokens: &[TokenId]) -> Option<u64> {
    prefix_ids(key, block_size, tokens).pop()
}

/// As [`prefix_id`], of each prefix of whole blocks, the shortest first.
pub fn prefix_ids(key: CacheKey, block_size: u32, tokens: &[TokenId]) -> Vec<u64> {
    let mut chain = PrefixChain::new(key, block_size, u64::MAX);
    chain.extend(tokens);
    chain.links.iter().map(|link| link.hash).collect()
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
    /// Of the block before it; in another group than the anchor: of the anchor's block with the same tokens.
    parent_number: u64,
    group: u32,
    hash: u64,
    parent_hash: u64,
    key: CacheKey,
    /// Tokens that can be found: all of a full block, those of a tail otherwise.
    len: u32,
    /// Blocks from the first token to this one.
    depth: u32,
    /// The block of the first tokens, and its number while it held them.
    root: (BlockId, u64),
    /// Of the content and of its parent's, where identities are kept.
    id: Option<(ContentId, ContentId)>,
}

impl Publication {
    fn place(&self) -> u64 {
        place(self.hash, self.group)
    }
}

/// Under which word a block is looked for: equal contents of two groups are two blocks. Words that meet by chance are told
/// apart as colliding hashes are.
fn place(hash: u64, group: u32) -> u64 {
    hash.wrapping_add(u64::from(group).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Where a publication is listed under its parent: parent's number, key, first token, own number.
type ChildKey = (u64, CacheKey, TokenId, u64);

#[derive(Debug)]
pub(super) struct PrefixCache {
    block_size: usize,
    groups: KvGroups,
    hash_mask: u64,
    block_of_hash: FxHashMap<u64, BlockId>, // by `place`
    /// The findable blocks of the anchor again, by what they follow.
    children: BTreeMap<ChildKey, BlockId>,
    publications: Vec<Publication>, // [num_blocks]
    tokens: Vec<TokenId>,           // [num_blocks, block_size]
    last_number: u64,
    num_forgotten: u64,
    names: Names,
    log: ChangeLog,
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
    pub fn new(config: KvConfig, hash_mask: u64) -> Self {
        let (num_blocks, block_size) = (config.num_blocks as usize, config.block_size as usize);
        PrefixCache {
            block_size,
            groups: config.groups,
            hash_mask,
            block_of_hash: FxHashMap::default(),
            children: BTreeMap::new(),
            publications: vec![Publication::default(); num_blocks],
            tokens: vec![0; num_blocks * block_size],
            last_number: ROOT,
            num_forgotten: 0,
            names: Names::new(MAX_NAMES),
            log: ChangeLog::default(),
        }
    }

    /// Appends to `hit` the blocks that hold the first tokens of a sequence, at most all of `tokens`: whole ones, and one
    /// found in part. Returns how many tokens of the last one count, when it was found in part.
    /// With layer groups, row by row a block of every group, or the null block where the token after the hit does not see it.
    pub fn lookup(&self, chain: &PrefixChain, tokens: &[TokenId], hit: &mut Vec<BlockId>) -> u32 {
        if self.groups != KvGroups::ONE {
            self.lookup_groups(chain, tokens, tokens.len() / self.block_size, hit);
            return 0;
        }
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
        if self.groups != KvGroups::ONE {
            let mut hit = Vec::new();
            self.lookup_groups(chain, tokens, max_blocks, &mut hit);
            return hit.len() as u32 / self.groups.num();
        }
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

    /// True when the publication that the chain knows for block `i` can still be found, or its name is known.
    pub fn is_findable(&self, chain: &PrefixChain, i: usize) -> bool {
        let link = chain.links[i];
        let block = self.block_of_hash.get(&place(link.hash, self.groups.anchor()));
        let number = match block {
            Some(block) => Some(self.publications[block.idx()].number),
            None => self.names.of_hash.get(&link.hash).map(|name| name.number),
        };
        number == Some(link.publication)
    }

    /// Makes `block` findable as part `i` of the chain in this group, unless its equal is there. In the anchor's group, the
    /// parts before it must be findable; in another, the anchor's part `i`.
    pub fn publish(
        &mut self,
        chain: &mut PrefixChain,
        tokens: &[TokenId],
        (i, group): (usize, u32),
        block: BlockId,
        is_kept: impl Fn(BlockId) -> bool,
    ) -> Published {
        let is_anchor = group == self.groups.anchor();
        let hash = chain.links[i].hash;
        let parent_number = match (is_anchor, i) {
            (true, 0) => ROOT,
            (true, i) => chain.links[i - 1].publication,
            (false, i) => chain.links[i].publication,
        };
        if is_anchor {
            if let Some(equal) = self.find(hash, parent_number, chain.key, self.part(tokens, i)) {
                chain.links[i].publication = self.publications[equal.idx()].number;
                return Published::Duplicate;
            }
        } else if self.find_beside(hash, group, parent_number).is_some() {
            return Published::Duplicate;
        }
        let place = place(hash, group);
        if self.block_of_hash.get(&place).copied().is_some_and(is_kept) {
            return Published::Refused;
        }
        // A block that comes back keeps its name, so that what followed it is found again.
        let known =
            if is_anchor { self.names.take(hash, parent_number, chain.key, self.part(tokens, i)) } else { None };
        let number = known.unwrap_or(self.last_number + 1);
        if is_anchor {
            chain.links[i].publication = number;
        }
        self.insert(chain, (i, group), block, (hash, parent_number, number), self.part(tokens, i))
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
        let parent_number = chain.parent_number(i);
        let names = (hash, parent_number, self.last_number + 1);
        self.insert(chain, (i, self.groups.anchor()), block, names, tail)
    }

    /// Numbers a publication, the part `i` of the chain, and makes it findable.
    fn insert(
        &mut self,
        chain: &PrefixChain,
        (i, group): (usize, u32),
        block: BlockId,
        (hash, parent_number, number): (u64, u64, u64),
        tokens: &[TokenId],
    ) -> Published {
        // It may be findable as what it was before: under a parent that was published anew since.
        self.forget(block);
        // Findable again without a new number: a change all the same.
        self.num_forgotten += u64::from(number <= self.last_number);
        self.last_number = self.last_number.max(number);
        let parent_hash = chain.parent_hash(i);
        let root = match i {
            0 => (block, number),
            _ => self.block_of(parent_hash).map_or((block, ROOT), |parent| self.publications[parent.idx()].root),
        };
        let (key, len, depth) = (chain.key, tokens.len() as u32, i as u32 + 1);
        // A tail has no identity: it does not leave the pool.
        let id = if tokens.len() == self.block_size { chain.id(i) } else { None };
        self.publications[block.idx()] =
            Publication { number, parent_number, group, hash, parent_hash, key, len, depth, root, id };
        let at = block.idx() * self.block_size;
        self.tokens[at..at + tokens.len()].copy_from_slice(tokens);
        self.list_child(block);
        let replaced = self.block_of_hash.insert(place(hash, group), block).filter(|old| *old != block);
        if let Some(old) = replaced {
            self.unlist_child(old);
            self.note_removed(old);
        }
        if self.is_told(block) {
            let publication = self.publications[block.idx()];
            self.log.note(|| stored(&publication, tokens));
        }
        Published::Now { hash, replaced }
    }

    /// The block can no longer be found; what it held stays known until its next publication.
    pub fn forget(&mut self, block: BlockId) {
        let place = self.publications[block.idx()].place();
        if self.block_of_hash.get(&place) == Some(&block) {
            self.block_of_hash.remove(&place);
            self.unlist_child(block);
            self.note_removed(block);
            self.num_forgotten += 1;
        }
    }

    /// Undoes [`Self::forget`], before anything else was published.
    pub fn restore(&mut self, block: BlockId) {
        self.block_of_hash.insert(self.publications[block.idx()].place(), block);
        self.list_child(block);
    }

    fn list_child(&mut self, block: BlockId) {
        if self.publications[block.idx()].group == self.groups.anchor() {
            self.children.insert(self.child_key(block), block);
        }
    }

    fn unlist_child(&mut self, block: BlockId) {
        if self.publications[block.idx()].group == self.groups.anchor() {
            self.children.remove(&self.child_key(block));
        }
    }

    fn child_key(&self, block: BlockId) -> ChildKey {
        let publication = &self.publications[block.idx()];
        (publication.parent_number, publication.key, self.tokens_of(block)[0], publication.number)
    }

    /// Blocks from the first token to this published one.
    pub fn depth_of(&self, block: BlockId) -> u32 {
        self.publications[block.idx()].depth
    }

    /// The prefix that ends in this published block, as it is remembered.
    pub fn end_of(&self, block: BlockId) -> PrefixEnd {
        let Publication { hash, key, depth, id, .. } = self.publications[block.idx()];
        PrefixEnd { hash, key, depth, tokens: self.tokens_of(block).into(), id }
    }

    /// True when this published block is that end.
    pub fn is_end(&self, block: BlockId, end: &PrefixEnd) -> bool {
        let Publication { hash, key, depth, id, .. } = self.publications[block.idx()];
        (hash, key, depth, id) == (end.hash, end.key, end.depth, end.id) && *self.tokens_of(block) == *end.tokens
    }

    pub fn number_of(&self, block: BlockId) -> u64 {
        self.publications[block.idx()].number
    }

    /// The block that can be found under this hash.
    pub fn block_of(&self, hash: u64) -> Option<BlockId> {
        self.block_of_hash.get(&place(hash, self.groups.anchor())).copied()
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
        let anchor = self.groups.anchor();
        let named = self.block_of_hash.values().filter(|block| self.publications[block.idx()].group == anchor);
        for block in named {
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

    /// True when this published block is of the group that names prefixes.
    pub fn is_named(&self, block: BlockId) -> bool {
        self.publications[block.idx()].group == self.groups.anchor()
    }

    /// By hash, and of the group that names prefixes by what they follow.
    pub fn num_findable(&self) -> (usize, usize) {
        (self.block_of_hash.len(), self.children.len())
    }

    /// Checks that a published block is found under its hash and that its hash follows from its parent's and its tokens.
    pub fn check(&self, block: BlockId) -> Result<(), String> {
        let publication = self.publications[block.idx()];
        if self.block_of_hash.get(&publication.place()) != Some(&block) {
            return Err(format!("invariant 7: published block {block} is not found under its hash"));
        }
        let is_anchor = publication.group == self.groups.anchor();
        if is_anchor && self.children.get(&self.child_key(block)) != Some(&block) {
            return Err(format!("invariant 7: published block {block} is not listed under its parent"));
        }
        if hash_block(publication.parent_hash, self.tokens_of(block), self.hash_mask) != publication.hash {
            return Err(format!("invariant 7: the hash of block {block} does not follow from its tokens"));
        }
        if publication.parent_number == ROOT && !is_anchor {
            return Err(format!("invariant 7: block {block} of group {} names no prefix", publication.group));
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
        let block = *self.block_of_hash.get(&place(hash, self.groups.anchor()))?;
        let publication = &self.publications[block.idx()];
        let equal = publication.parent_number == parent_number
            && publication.group == self.groups.anchor()
            && publication.key == key
            && self.tokens_of(block) == tokens;
        equal.then_some(block)
    }

    fn part<'a>(&self, tokens: &'a [TokenId], i: usize) -> &'a [TokenId] {
        &tokens[i * self.block_size..(i + 1) * self.block_size]
    }
}

#[cfg(test)]
mod tests;
