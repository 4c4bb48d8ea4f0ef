//! The disk tier of a world: what an engine would write to files, in a map.

use crate::executor::Executor;
use crate::ids::HostSlot;
use crate::kv::{CacheKey, CachedContent, ContentId};
use crate::scheduler::{NewSequence, Scheduler};
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct Disk {
    files: BTreeMap<ContentId, (CachedContent, Vec<u8>)>,
}

impl Disk {
    pub fn has(&self, id: &ContentId) -> bool {
        self.files.contains_key(id)
    }

    /// Keeps contents whose bytes are in host memory now.
    pub fn keep(&mut self, contents: Vec<CachedContent>, executor: &dyn Executor) -> Result<(), String> {
        for content in contents {
            if content.parent.child(&content.tokens) != content.id {
                return Err(format!("content that leaves host slot {} comes with the tokens of another", content.host));
            }
            if let Some(bytes) = executor.read_host(content.host) {
                self.files.insert(content.id, (content, bytes.to_vec()));
            }
        }
        Ok(())
    }

    /// Brings the blocks of a prompt that the cache does not have to host memory, as far as they follow each other.
    pub fn bring(
        &mut self,
        scheduler: &mut Scheduler,
        executor: &mut dyn Executor,
        new: &NewSequence,
    ) -> Result<Vec<HostSlot>, String> {
        let mut slots = Vec::new();
        if self.files.is_empty() {
            return Ok(slots);
        }
        for id in scheduler.missing(CacheKey { salt: new.cache_salt, adapter: new.adapter }, &new.prompt) {
            let Some((content, bytes)) = self.files.get(&id).cloned() else { break };
            let Some(slot) = scheduler.adopt(&content) else { break };
            self.keep(scheduler.take_spilled(), executor)?;
            executor.write_host(slot, &bytes).map_err(|e| e.to_string())?;
            slots.push(slot);
        }
        Ok(slots)
    }
}
