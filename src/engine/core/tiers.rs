//! The engine's side of the cache's tiers: requests that wait for blocks from disk, and blocks that go there.

use super::EngineCore;
use crate::batch::StepBatch;
use crate::engine::branches::Start;
use crate::engine::disk::Fetched;
use crate::engine::mailbox::EventSink;
use crate::engine::prefetch::{Held, LAST_FILES, SAVE_BLOCKS};
use crate::engine::record;
use crate::executor::StepOutput;
use crate::ids::RequestId;
use crate::protocol::{GenerateRequest, OutputRules};
use crate::telemetry::KvTotals;
use std::time::Instant;

impl EngineCore {
    /// Takes a request: at once, or when the blocks of its prompt that are on disk have been read.
    pub(in crate::engine) fn submit(
        &mut self,
        id: RequestId,
        (request, rules): (GenerateRequest, OutputRules),
        start: Start,
        events: EventSink,
    ) {
        if let Start::Fork { parent, .. } = start {
            // What is forked from must be in the queue.
            let parent = self.prefetch.as_mut().and_then(|prefetch| prefetch.release(parent));
            self.add_held(parent);
        }
        let held = Held { id, request, rules, start, events };
        let ready = match &mut self.prefetch {
            Some(prefetch) if matches!(held.start, Start::Prompt) => prefetch.hold(&mut self.scheduler, held),
            _ => Some(held),
        };
        self.add_held(ready);
    }

    /// Blocks of a prompt were read from disk: its request goes on.
    pub(in crate::engine) fn fetched(&mut self, fetched: Fetched) {
        let (Some(prefetch), Some(executor)) = (&mut self.prefetch, &mut self.executor) else { return };
        let ready = prefetch.arrive(fetched, &mut self.scheduler, executor.as_mut());
        self.add_held(ready);
    }

    /// Evicted prefixes, or all that is not pinned, go from disk as well. Requests that wait for their blocks go on
    /// without.
    pub(in crate::engine) fn forget_on_disk(&mut self, is_reset: bool) {
        let forgotten = self.scheduler.take_forgotten();
        let Some(prefetch) = &mut self.prefetch else { return };
        let held = if is_reset { prefetch.reset(&self.scheduler) } else { prefetch.forget(forgotten) };
        self.add_held(held);
    }

    pub(super) fn add_held(&mut self, held: impl IntoIterator<Item = Held>) {
        let add = |Held { id, request, rules, start, events }| self.add(id, (request, rules), start, events);
        held.into_iter().for_each(add);
    }

    /// Copies some cached blocks to host memory and from there to disk, while there is nothing else to do. False when
    /// all is kept, or cannot be.
    pub(in crate::engine) fn save_some(&mut self) -> bool {
        let (Some(prefetch), Some(executor)) = (&mut self.prefetch, &mut self.executor) else { return false };
        if prefetch.keep_cached(&self.scheduler, executor.as_ref()) {
            return true;
        }
        let tier = prefetch.tier();
        let plan = self.scheduler.plan_save(self.step + 1, SAVE_BLOCKS, &|id| tier.was_offered(id));
        prefetch.keep_spilled(&mut self.scheduler, executor.as_ref());
        let has_work = !plan.is_empty();
        let mut outcome = Ok(StepOutput::default());
        if has_work {
            self.step += 1;
            StepBatch::build(&mut self.batch, &plan, &self.scheduler);
            outcome = executor.launch(&self.batch).and_then(|handle| executor.wait(handle));
        }
        match outcome {
            Ok(_) => drop(self.scheduler.commit(&plan, &[], &[])),
            Err(error) => {
                tracing::warn!("cached blocks could not be saved: {error}");
                self.scheduler.abandon(&plan);
            }
        }
        self.collect_deltas();
        let executor = self.executor.as_deref();
        let kept = self.prefetch.as_mut().zip(executor).map(|(p, executor)| p.keep_cached(&self.scheduler, executor));
        has_work && kept == Some(true)
    }

    /// Writes what is cached to disk before the model goes.
    pub(in crate::engine) fn save_all(&mut self) {
        let started = Instant::now();
        while started.elapsed() < LAST_FILES && self.save_some() {}
        if let Some(prefetch) = &self.prefetch
            && !prefetch.tier().flush(LAST_FILES)
        {
            tracing::warn!("the prefix cache has not written all of its files");
        }
    }

    /// Counts of pool, host memory and disk.
    pub(super) fn kv_totals(&self) -> KvTotals {
        let disk_cached = self.prefetch.as_ref().map_or(0, |prefetch| prefetch.tier().len());
        KvTotals { disk_cached, ..record::totals(self.scheduler.kv()) }
    }
}
