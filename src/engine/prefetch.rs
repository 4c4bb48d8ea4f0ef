//! Prefixes between host memory and disk: a new request waits for the blocks of its prompt that are on disk; what leaves
//! host memory, and what is cached when the engine falls idle or ends, goes to disk.
//!
//! Guarantees: the engine thread reads and writes no file; a request is held back only while its blocks are being read,
//! and goes on whatever came of that.

use super::branches::Start;
use super::disk::{DiskTier, Fetched};
use super::mailbox::EventSink;
use crate::executor::Executor;
use crate::ids::RequestId;
use crate::kv::{CacheKey, ContentId};
use crate::protocol::{GenerateRequest, OutputRules};
use crate::scheduler::Scheduler;
use std::time::Duration;

/// Blocks copied to be kept between two looks at the command queue.
pub const SAVE_BLOCKS: u32 = 32;
/// How long the end of an engine waits for the last files.
pub const LAST_FILES: Duration = Duration::from_secs(10);

/// A request that is not in the queue yet.
pub(super) struct Held {
    pub id: RequestId,
    pub request: GenerateRequest,
    pub rules: OutputRules,
    pub start: Start,
    pub events: EventSink,
}

/// The disk tier and who waits for it.
pub(super) struct Prefetch {
    tier: DiskTier,
    held: Vec<Held>,
}

impl Prefetch {
    pub fn new(tier: DiskTier) -> Self {
        Prefetch { tier, held: Vec::new() }
    }

    pub fn tier(&self) -> &DiskTier {
        &self.tier
    }

    /// Holds a request back while blocks of its prompt are read; gives it back when there are none.
    pub fn hold(&mut self, scheduler: &mut Scheduler, held: Held) -> Option<Held> {
        if self.tier.is_empty() {
            return Some(held);
        }
        let key = CacheKey { salt: held.request.cache_salt, adapter: held.request.adapter };
        let missing = scheduler.missing(key, &held.request.prompt);
        let most = scheduler.kv().counts().host.total / 2;
        let ids: Vec<_> = missing.into_iter().take_while(|id| self.tier.has(id)).take(most as usize).collect();
        if ids.is_empty() || !self.tier.fetch(held.id.0, ids) {
            return Some(held);
        }
        self.held.push(held);
        None
    }

    /// Puts what was read into host memory, if the request that waited for it still does; gives that request.
    pub fn arrive(&mut self, fetched: Fetched, scheduler: &mut Scheduler, executor: &mut dyn Executor) -> Option<Held> {
        let held = self.release(RequestId(fetched.ticket))?;
        for (content, bytes) in fetched.blocks {
            let Some(slot) = scheduler.adopt(&content) else { continue };
            self.keep_spilled(scheduler, executor);
            if let Err(error) = executor.write_host(slot, &bytes) {
                // The place has a name, but not its content.
                scheduler.drop_adopted(&content.id);
                tracing::warn!("a block of the prefix cache cannot be used: {error}");
            }
        }
        Some(held)
    }

    /// What was evicted on purpose goes from disk as well; what is being read is not waited for.
    pub fn forget(&mut self, contents: Vec<(ContentId, bool)>) -> Vec<Held> {
        contents.into_iter().for_each(|(id, with_followers)| self.tier.forget(id, with_followers));
        self.release_all()
    }

    /// Everything goes from disk but what pinned prefixes hold.
    pub fn reset(&mut self, scheduler: &Scheduler) -> Vec<Held> {
        self.tier.forget_all_but(scheduler.kv().pinned_contents().collect());
        self.release_all()
    }

    /// Stops waiting for this request.
    pub fn release(&mut self, id: RequestId) -> Option<Held> {
        let at = self.held.iter().position(|held| held.id == id)?;
        Some(self.held.remove(at))
    }

    /// Stops waiting for all.
    pub fn release_all(&mut self) -> Vec<Held> {
        std::mem::take(&mut self.held)
    }

    /// Contents that are leaving host memory go to disk.
    pub fn keep_spilled(&mut self, scheduler: &mut Scheduler, executor: &dyn Executor) {
        for content in scheduler.take_spilled() {
            if let Some(bytes) = executor.read_host(content.host) {
                self.tier.keep(content, bytes);
            }
        }
    }

    /// Contents in host memory that were never given to be kept go to disk. False when none did.
    pub fn keep_cached(&mut self, scheduler: &Scheduler, executor: &dyn Executor) -> bool {
        let mut has_kept = false;
        for content in scheduler.kv().host_contents() {
            if self.tier.was_offered(&content.id) {
                continue;
            }
            let Some(bytes) = executor.read_host(content.host) else { continue };
            has_kept |= self.tier.keep(content, bytes);
        }
        has_kept
    }
}
