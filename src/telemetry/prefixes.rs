//! What the prefix cache can find, for whoever routes requests by it: batches of changes, in order, to one follower.
//!
//! Guarantees: nothing is kept while nobody follows; the engine never waits: a batch that finds the queue full is dropped,
//! and its number is missing; numbers start at 0 and go on over loads. It does not attempt to keep what was sent.

use crate::ids::TokenId;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

/// A change of what can be found by content, block by block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrefixChange {
    /// A full block of these tokens can be found, behind the block of hash `parent` (`None`: they are the first).
    Stored {
        hash: u64,
        parent: Option<u64>,
        tokens: Box<[TokenId]>,
        /// Of the requests that can find it, as in `GenerateRequest`.
        cache_salt: u64,
        adapter: u64,
    },
    /// What was stored under this hash is not found any more.
    Removed { hash: u64 },
    /// Nothing is found any more.
    Cleared,
}

/// The changes of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixBatch {
    /// Ascending without gaps, but for batches that were dropped.
    pub seq: u64,
    pub changes: Vec<PrefixChange>,
}

/// From the engine to its follower.
#[derive(Default)]
pub struct PrefixFeed {
    follower: Mutex<Option<Follower>>,
}

struct Follower {
    sender: SyncSender<PrefixBatch>,
    next_seq: u64,
}

impl PrefixFeed {
    /// Batches from now on, at most `capacity` of which wait; the first one clears what was known before, and tells all
    /// that can be found. There is one follower: a second one takes the place of the first.
    pub fn follow(&self, capacity: usize) -> Receiver<PrefixBatch> {
        let (sender, receiver) = sync_channel(capacity);
        *super::lock(&self.follower) = Some(Follower { sender, next_seq: 0 });
        receiver
    }

    /// How many batches the follower was told, `None` while nobody follows.
    pub fn num_told(&self) -> Option<u64> {
        super::lock(&self.follower).as_ref().map(|follower| follower.next_seq)
    }

    /// Sends changes, unless there are none. Engine thread only.
    pub fn tell(&self, changes: Vec<PrefixChange>) {
        let mut place = super::lock(&self.follower);
        let Some(follower) = place.as_mut().filter(|_| !changes.is_empty()) else { return };
        let batch = PrefixBatch { seq: follower.next_seq, changes };
        follower.next_seq += 1;
        if let Err(TrySendError::Disconnected(_)) = follower.sender.try_send(batch) {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_finds_the_queue_full_leaves_a_gap() {
        let feed = PrefixFeed::default();
        feed.tell(vec![PrefixChange::Cleared]);
        assert_eq!(feed.num_told(), None);
        let batches = feed.follow(1);
        for hash in 0..3 {
            feed.tell(vec![PrefixChange::Removed { hash }]);
        }
        feed.tell(Vec::new());
        assert_eq!(batches.recv().map(|batch| batch.seq), Ok(0));
        feed.tell(vec![PrefixChange::Cleared]);
        assert_eq!(batches.recv(), Ok(PrefixBatch { seq: 3, changes: vec![PrefixChange::Cleared] }));
        drop(batches);
        feed.tell(vec![PrefixChange::Cleared]);
        assert_eq!(feed.num_told(), None, "nobody listens any more");
    }
}
