//! What can be found by content, told block by block to whoever routes requests by it.
//!
//! Guarantees: nothing is kept while nobody asks; changes of an undone step are not among those told; a block is told
//! after the block before it in its prefix.

use super::{CacheKey, PrefixCache, Publication};
use crate::ids::{BlockId, TokenId};
use crate::kv::KvCache;

/// A change of what can be found. Full blocks only, and of a model with layer groups those that name prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefixChange {
    /// These tokens can be found, behind the block of hash `parent` (`None`: they are the first).
    Stored { hash: u64, parent: Option<u64>, key: CacheKey, tokens: Box<[TokenId]> },
    /// What was stored under this hash is not found any more.
    Removed { hash: u64 },
}

impl PrefixChange {
    /// By which the block is known.
    pub fn hash(&self) -> u64 {
        match self {
            PrefixChange::Stored { hash, .. } | PrefixChange::Removed { hash } => *hash,
        }
    }
}

/// Changes that were not asked for yet.
#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    /// `None` while nobody asks.
    changes: Option<Vec<PrefixChange>>,
    /// Length when the open step began.
    before_step: usize,
}

impl ChangeLog {
    pub fn note(&mut self, change: impl FnOnce() -> PrefixChange) {
        if let Some(changes) = &mut self.changes {
            changes.push(change());
        }
    }

    pub fn begin(&mut self) {
        self.before_step = self.changes.as_ref().map_or(0, Vec::len);
    }

    pub fn undo(&mut self) {
        if let Some(changes) = &mut self.changes {
            changes.truncate(self.before_step);
        }
    }
}

impl PrefixCache {
    /// A step begins.
    pub fn begin(&mut self) {
        self.log.begin();
    }

    fn findable(&self) -> Vec<PrefixChange> {
        let mut blocks: Vec<BlockId> =
            self.block_of_hash.values().copied().filter(|block| self.is_told(*block)).collect();
        blocks.sort_unstable_by_key(|block| self.number_of(*block));
        blocks.into_iter().map(|block| stored(&self.publications[block.idx()], self.tokens_of(block))).collect()
    }

    /// True for a full block of the group that names prefixes.
    pub(super) fn is_told(&self, block: BlockId) -> bool {
        self.is_named(block) && self.publications[block.idx()].len as usize == self.block_size
    }

    pub(super) fn note_removed(&mut self, block: BlockId) {
        if self.is_told(block) {
            let hash = self.hash_of(block);
            self.log.note(|| PrefixChange::Removed { hash });
        }
    }
}

pub(super) fn stored(publication: &Publication, tokens: &[TokenId]) -> PrefixChange {
    let &Publication { hash, parent_hash, depth, key, .. } = publication;
    PrefixChange::Stored { hash, parent: (depth > 1).then_some(parent_hash), key, tokens: tokens.into() }
}

impl KvCache {
    /// Whether changes are kept for [`KvCache::take_changes`]; those from before are not told.
    pub fn keep_changes(&mut self, is_wanted: bool) {
        self.prefix.log.changes = is_wanted.then(Vec::new);
    }

    /// True while changes are kept.
    pub fn keeps_changes(&self) -> bool {
        self.prefix.log.changes.is_some()
    }

    /// What changed since the last call, in order. Called between steps.
    pub fn take_changes(&mut self) -> Vec<PrefixChange> {
        self.prefix.log.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// All that can be found now, as if it had just been stored: parents before children.
    pub fn findable(&self) -> Vec<PrefixChange> {
        self.prefix.findable()
    }
}
