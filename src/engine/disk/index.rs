//! Which files there are, as far as this process knows, and whether more can be written.
//!
//! Guarantees: contents in order of use; whether writing fails is said once, until it succeeds.

use super::folder::Listing;
use crate::kv::ContentId;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// After a failure nothing is written for so long.
const RETRY_AFTER: Duration = if cfg!(test) { Duration::from_secs(2) } else { Duration::from_secs(10) };

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Content and order of its last use.
    uses: HashMap<ContentId, u64>,
    by_use: BTreeSet<(u64, ContentId)>,
    last_use: u64,
    /// Contents that were given to be kept, or found in the folder.
    offered: HashSet<ContentId>,
    /// When writing last failed, unless it has succeeded since.
    failed: Option<Instant>,
    /// It was told since the last failure that writing may be tried again.
    is_tried_again: bool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Index {
    pub fn len(&self) -> u64 {
        self.uses.len() as u64
    }

    pub fn has(&self, id: &ContentId) -> bool {
        self.uses.contains_key(id)
    }

    pub fn known(&self) -> HashSet<ContentId> {
        self.uses.keys().copied().collect()
    }

    pub fn known_or_offered(&self) -> Vec<ContentId> {
        self.uses.keys().chain(&self.offered).copied().collect()
    }

    pub fn was_offered(&self, id: &ContentId) -> bool {
        self.offered.contains(id)
    }

    pub fn offer(&mut self, id: ContentId) {
        self.offered.insert(id);
    }

    /// There is a file of this content, used last.
    pub fn touch(&mut self, id: ContentId) {
        self.forget(&id);
        self.last_use += 1;
        self.uses.insert(id, self.last_use);
        self.by_use.insert((self.last_use, id));
    }

    /// There is no such file. Tells whether there was.
    pub fn forget(&mut self, id: &ContentId) -> bool {
        let used = self.uses.remove(id);
        used.is_some_and(|used| self.by_use.remove(&(used, *id)))
    }

    /// There is no such file, and its content was never offered. Tells whether there was a file.
    pub fn withdraw(&mut self, id: &ContentId) -> bool {
        self.offered.remove(id);
        self.forget(id)
    }

    /// The file used longest ago, where there are more than so many.
    pub fn oldest_beyond(&self, max_files: u64) -> Option<ContentId> {
        let (_, id) = self.by_use.first().filter(|_| self.len() > max_files)?;
        Some(*id)
    }

    /// What the folder holds is what there is. What is gone with its folder may be offered again; what is gone alone had
    /// to make room.
    pub fn agree_with(&mut self, listing: &Listing) {
        let gone: Vec<ContentId> = self.uses.keys().filter(|id| !listing.known.contains(id)).copied().collect();
        for id in &gone {
            self.forget(id);
        }
        if listing.is_missing {
            self.offered.clear();
        }
        for id in &listing.new {
            self.touch(*id);
            self.offer(*id);
        }
    }

    /// True while nothing is to be written.
    pub fn is_failing(&self, now: Instant) -> bool {
        self.failed.is_some_and(|failed| now.duration_since(failed) < RETRY_AFTER)
    }

    /// True once after each failure, when it may be tried again.
    pub fn is_to_be_tried(&mut self, now: Instant) -> bool {
        let is_due = self.failed.is_some() && !self.is_failing(now);
        is_due && !std::mem::replace(&mut self.is_tried_again, true)
    }

    /// Writing failed. True when that is news.
    pub fn fails(&mut self, now: Instant) -> bool {
        self.is_tried_again = false;
        self.failed.replace(now).is_none()
    }

    /// Writing succeeded. True when that is news.
    pub fn succeeds(&mut self) -> bool {
        self.failed.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_news_once_and_tried_again_after_a_while() {
        let (mut index, start) = (Index::default(), Instant::now());
        assert!(!index.succeeds() && !index.is_to_be_tried(start));
        assert!(index.fails(start) && !index.fails(start), "told once");
        assert!(index.is_failing(start) && !index.is_to_be_tried(start));
        let later = start + RETRY_AFTER;
        assert!(!index.is_failing(later) && index.is_to_be_tried(later) && !index.is_to_be_tried(later));
        assert!(!index.fails(later) && index.is_failing(later), "still the same failure");
        assert!(index.is_to_be_tried(later + RETRY_AFTER));
        assert!(index.succeeds() && !index.succeeds());
        assert!(index.fails(later), "another failure");
    }
}
