//! Prefixes whose last block left the pool: evicted on purpose, and their tokens, by the identities of their contents.
//!
//! Guarantees: what pool and host memory hold of such a prefix, of what follows it and of what led to it alone is
//! forgotten; whoever keeps contents outside hears of it. Nothing pinned goes.

use super::block_pool::Visibility;
use super::{BlockEvent, CacheKey, ContentId, HostState, KvCache};
use crate::ids::{BlockId, TokenId};
use rustc_hash::FxHashMap;

/// A content that pool or host memory holds.
#[derive(Clone, Copy, Debug)]
struct Known {
    parent: ContentId,
    hash: u64,
    block: Option<BlockId>,
}

impl KvCache {
    /// The tokens of a prefix as far as pool and host memory have them all, by its last content.
    pub(super) fn tokens_of_content(&self, last: ContentId) -> Option<(Vec<TokenId>, CacheKey)> {
        let known = self.known_contents();
        let mut parts: Vec<&[TokenId]> = Vec::new();
        let (mut id, mut key) = (last, CacheKey::default());
        while let Some(content) = known.get(&id) {
            match (content.block, self.host.place_of(&id)) {
                (Some(block), _) => {
                    key = self.prefix.key_of(block);
                    parts.push(self.prefix.tokens_of(block));
                }
                (None, Some(host)) => {
                    key = self.host.slot(host).key.key;
                    parts.push(self.host.tokens_of(host));
                }
                (None, None) => return None,
            }
            id = content.parent;
        }
        let is_whole = !parts.is_empty() && id == ContentId::root(key);
        is_whole.then(|| (parts.into_iter().rev().flatten().copied().collect(), key))
    }

    /// Forgets the prefix that ends in this content, as [`KvCache::evict_prefix`] does.
    pub(super) fn evict_content(&mut self, hash: u64, (id, parent): (ContentId, ContentId)) -> u32 {
        let known = self.known_contents();
        let mut children: FxHashMap<ContentId, Vec<ContentId>> = FxHashMap::default();
        known.iter().for_each(|(id, content)| children.entry(content.parent).or_default().push(*id));
        let mut doomed = vec![id];
        let mut at = 0;
        while at < doomed.len() {
            doomed.extend(children.get(&doomed[at]).into_iter().flatten());
            at += 1;
        }
        let is_pinned = |id: &ContentId| {
            let block = known.get(id).and_then(|content| content.block);
            block.is_some_and(|block| self.pool.block(block).pins > 0)
        };
        if doomed.iter().any(is_pinned) {
            return 0;
        }
        let (mut child, mut before, mut next) = (id, Vec::new(), parent);
        while let Some(content) = known.get(&next) {
            let is_own = !is_pinned(&next)
                && self.worth.get(content.hash).is_none()
                && children.get(&next).into_iter().flatten().all(|id| *id == child);
            if !is_own {
                break;
            }
            before.push(next);
            (child, next) = (next, content.parent);
        }
        if self.spilled.is_some() {
            self.forgotten.push((id, true));
            self.forgotten.extend(before.iter().map(|id| (*id, false)));
        }
        self.worth.forget(hash);
        doomed.append(&mut before);
        for id in &doomed {
            let Some(content) = known.get(id) else { continue };
            self.worth.forget(content.hash);
            if let Some(host) = self.host.forget(id) {
                self.events.push(BlockEvent::HostFree { host });
            }
            content.block.into_iter().for_each(|block| self.forget(block));
        }
        doomed.len() as u32
    }

    /// What pool and host memory hold between steps, where identities are kept.
    fn known_contents(&self) -> FxHashMap<ContentId, Known> {
        let cached = self.host.slots().filter(|(_, slot)| slot.state == HostState::Cached);
        let mut known: FxHashMap<ContentId, Known> = cached
            .map(|(_, slot)| (slot.key.id, Known { parent: slot.key.parent, hash: slot.key.hash, block: None }))
            .collect();
        for block in (1..self.config.num_blocks).map(BlockId) {
            if self.pool.block(block).visibility != Visibility::Published {
                continue;
            }
            if let Some(key) = self.prefix.content_key_of(block) {
                known.insert(key.id, Known { parent: key.parent, hash: key.hash, block: Some(block) });
            }
        }
        known
    }
}
