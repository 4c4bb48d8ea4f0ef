//! What evicted blocks held, by name: where all layers have windows, a prefix whose first blocks are gone is still told
//! apart by all of its tokens.
//!
//! Guarantees: bounded, the oldest go first; a name that was given up is never given to another content.

use super::CacheKey;
use crate::ids::{BlockId, TokenId};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// What an evicted block of the anchor held.
#[derive(Debug)]
pub(super) struct Name {
    pub number: u64,
    pub parent_number: u64,
    pub key: CacheKey,
    pub tokens: Box<[TokenId]>, // [block_size]
}

/// Names at most: with blocks of 16 tokens, those of two million tokens.
pub(super) const MAX_NAMES: usize = 1 << 17;

/// Names of evicted blocks, the latest under each hash.
#[derive(Debug)]
pub(super) struct Names {
    pub limit: usize,
    pub of_hash: FxHashMap<u64, Name>,
    /// Hash and number in order of eviction; a name that was replaced or taken is still listed.
    order: VecDeque<(u64, u64)>,
    /// Evicted by the open step: block and number.
    pub pending: Vec<(BlockId, u64)>,
}

impl Names {
    pub fn new(limit: usize) -> Self {
        Names { limit, of_hash: FxHashMap::default(), order: VecDeque::new(), pending: Vec::new() }
    }

    pub fn find(&self, hash: u64, parent_number: u64, key: CacheKey, tokens: &[TokenId]) -> Option<u64> {
        let name = self.of_hash.get(&hash)?;
        let equal = name.parent_number == parent_number && name.key == key && *name.tokens == *tokens;
        equal.then_some(name.number)
    }

    pub fn take(&mut self, hash: u64, parent_number: u64, key: CacheKey, tokens: &[TokenId]) -> Option<u64> {
        let number = self.find(hash, parent_number, key, tokens)?;
        self.of_hash.remove(&hash);
        Some(number)
    }

    pub fn insert(&mut self, hash: u64, name: Name) {
        self.order.push_back((hash, name.number));
        self.of_hash.insert(hash, name);
        while self.order.len() > self.limit {
            let Some((hash, number)) = self.order.pop_front() else { return };
            if self.of_hash.get(&hash).is_some_and(|name| name.number == number) {
                self.of_hash.remove(&hash);
            }
        }
    }
}
