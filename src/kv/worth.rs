//! What prefixes were worth: hits by where they ended, for longer than the pool holds their blocks.
//!
//! Guarantees: a hit is counted once, for the prefix that all that was found makes up, in whichever tier its last block
//! was; counts outlive eviction, until as many other prefixes were hit since; a count is only shown for content that
//! equals what was hit: key, depth and the last block's tokens are compared, and the content's identity where it has one.
//! Counts change when a step is over, never within one, so there is nothing to undo.

use super::host_pool::ContentKey;
use super::prefix_cache::{CacheKey, ContentId};
use super::{BlockTable, KvCache};
use crate::ids::{BlockId, HostSlot, RequestId, TokenId};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Prefixes that are remembered at least; as many as the pool has blocks where that is more.
const MIN_REMEMBERED: usize = 4096;
/// First tokens that are remembered of a prefix at most.
pub(super) const MAX_HEAD: usize = 32;

/// The last block of a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PrefixEnd {
    /// Chained content hash.
    pub hash: u64,
    pub key: CacheKey,
    /// Blocks from the first token to this one.
    pub depth: u32,
    pub tokens: Box<[TokenId]>,
    /// Of the content and of its parent's, where identities are kept.
    pub id: Option<(ContentId, ContentId)>,
}

/// What a prefix was worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HitStats {
    pub hits: u64,
    pub hit_tokens: u64,
    /// Of these, in host memory, and of those, there because they were read from disk.
    pub host_tokens: u64,
    pub disk_tokens: u64,
    pub last_step: u64,
}

/// An admission that found something.
#[derive(Debug)]
pub(super) struct Hit {
    owner: RequestId,
    end: HitEnd,
    tokens: u32,
    host_tokens: u32,
    disk_tokens: u32,
}

#[derive(Debug)]
enum HitEnd {
    Block(BlockId),
    Host { end: Box<PrefixEnd>, head: Box<[TokenId]> },
}

/// A prefix that was hit.
#[derive(Debug)]
pub(super) struct Remembered {
    pub end: PrefixEnd,
    /// The first tokens, as far as they were known.
    pub head: Box<[TokenId]>,
    pub stats: HitStats,
}

/// Prefixes that were hit, one for each hash.
#[derive(Debug)]
pub(super) struct Worth {
    limit: usize,
    of_hash: FxHashMap<u64, Remembered>,
    /// Last step of a hit, and hash.
    by_use: BTreeSet<(u64, u64)>,
}

impl Worth {
    pub fn new(num_blocks: u32) -> Self {
        let limit = MIN_REMEMBERED.max(num_blocks as usize);
        Worth { limit, of_hash: FxHashMap::default(), by_use: BTreeSet::new() }
    }

    pub fn get(&self, hash: u64) -> Option<&Remembered> {
        self.of_hash.get(&hash)
    }

    pub fn all(&self) -> impl Iterator<Item = &Remembered> {
        self.of_hash.values()
    }

    pub fn forget(&mut self, hash: u64) {
        if let Some(old) = self.of_hash.remove(&hash) {
            self.by_use.remove(&(old.stats.last_step, hash));
        }
    }

    pub fn retain(&mut self, is_kept: impl Fn(&PrefixEnd) -> bool) {
        let doomed: Vec<u64> = self.all().map(|known| &known.end).filter(|end| !is_kept(end)).map(|e| e.hash).collect();
        doomed.into_iter().for_each(|hash| self.forget(hash));
    }

    /// Another content of the same hash takes the place of the one that had it.
    fn count(&mut self, end: PrefixEnd, head: Box<[TokenId]>, hit: &Hit, step: u64) {
        let hash = end.hash;
        let known = self.of_hash.remove(&hash);
        if let Some(known) = &known {
            self.by_use.remove(&(known.stats.last_step, hash));
        }
        let mut known = known.filter(|known| known.end == end).unwrap_or_else(|| Remembered {
            end,
            head: Box::default(),
            stats: HitStats::default(),
        });
        if known.head.is_empty() {
            known.head = head;
        }
        known.stats.hits += 1;
        known.stats.hit_tokens += u64::from(hit.tokens);
        known.stats.host_tokens += u64::from(hit.host_tokens);
        known.stats.disk_tokens += u64::from(hit.disk_tokens);
        known.stats.last_step = step;
        self.by_use.insert((step, hash));
        self.of_hash.insert(hash, known);
        while self.of_hash.len() > self.limit {
            let Some((_, oldest)) = self.by_use.pop_first() else { return };
            self.of_hash.remove(&oldest);
        }
    }
}

impl KvCache {
    /// An admission found whole blocks in the pool, up to this one.
    pub(super) fn note_hit(&mut self, owner: RequestId, last: BlockId, tokens: u32) {
        self.hits.push(Hit { owner, end: HitEnd::Block(last), tokens, host_tokens: 0, disk_tokens: 0 });
    }

    /// The same admission found these contents after what the pool had, which `table` holds.
    pub(super) fn note_host_hit(&mut self, table: &BlockTable, hosts: &[HostSlot], num_from_disk: u32) {
        let (Some(&last), size) = (hosts.last(), self.config.block_size) else { return };
        let owner = table.owner();
        let in_pool = self.hits.pop_if(|hit| hit.owner == owner && table.num_rows() > 0);
        let ContentKey { id, parent, key, hash } = self.host.slot(last).key;
        let depth = table.num_rows() + hosts.len() as u32;
        let tokens = self.host.tokens_of(last).into();
        let end = Box::new(PrefixEnd { hash, key, depth, tokens, id: Some((id, parent)) });
        let first = match table.ids().first() {
            Some(&block) => self.prefix.tokens_of(block),
            None => self.host.tokens_of(hosts[0]),
        };
        let head = first[..first.len().min(MAX_HEAD)].into();
        let host_tokens = hosts.len() as u32 * size;
        let tokens = host_tokens + in_pool.map_or(0, |hit| hit.tokens);
        let end = HitEnd::Host { end, head };
        self.hits.push(Hit { owner, end, tokens, host_tokens, disk_tokens: num_from_disk * size });
    }

    /// The step is over: its hits count.
    pub(super) fn count_hits(&mut self) {
        let step = self.pool.header.step;
        for mut hit in std::mem::take(&mut self.hits) {
            let (end, head) = match std::mem::replace(&mut hit.end, HitEnd::Block(BlockId::NULL)) {
                HitEnd::Block(block) => (self.prefix.end_of(block), self.head_of(block)),
                HitEnd::Host { end, head } => (*end, head),
            };
            self.worth.count(end, head, &hit, step);
        }
    }

    /// What the prefix was worth that ends in this block.
    pub(super) fn worth_of(&self, last: BlockId) -> HitStats {
        let known = self.worth.get(self.prefix.hash_of(last));
        known.filter(|known| self.prefix.is_end(last, &known.end)).map(|known| known.stats).unwrap_or_default()
    }

    /// The first tokens of this block's prefix, as far as the pool has them.
    pub(super) fn head_of(&self, last: BlockId) -> Box<[TokenId]> {
        let first = self.prefix.root_of(last).map(|root| self.prefix.tokens_of(root)).unwrap_or_default();
        first[..first.len().min(MAX_HEAD)].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(worth: &mut Worth, hash: u64, last_token: TokenId, step: u64) {
        let end = PrefixEnd { hash, depth: 1, tokens: [last_token].into(), ..PrefixEnd::default() };
        let end_at = HitEnd::Block(BlockId::NULL);
        let hit = Hit { owner: RequestId(1), end: end_at, tokens: 8, host_tokens: 4, disk_tokens: 2 };
        worth.count(end, [1].into(), &hit, step);
    }

    #[test]
    fn what_was_hit_longest_ago_is_forgotten_first_and_another_content_starts_anew() {
        let mut worth = Worth { limit: 2, ..Worth::new(1) };
        hit(&mut worth, 1, 7, 1);
        hit(&mut worth, 2, 7, 2);
        hit(&mut worth, 1, 7, 3);
        hit(&mut worth, 3, 7, 4);
        assert!(worth.get(2).is_none());
        let stats = HitStats { hits: 2, hit_tokens: 16, host_tokens: 8, disk_tokens: 4, last_step: 3 };
        assert_eq!(worth.get(1).expect("hit last").stats, stats);
        hit(&mut worth, 1, 8, 5);
        assert_eq!(worth.get(1).expect("hit").stats.hits, 1, "the same hash, another content");
        worth.retain(|end| end.hash == 1);
        assert_eq!((worth.of_hash.len(), worth.by_use.len()), (1, 1));
    }
}
