//! Pin, unpin and evict prefixes, reset the cache.

use super::{EngineHandle, Run, check_tokens};
use crate::ids::RequestId;
use crate::kv::{self, CacheKey};
use crate::protocol::{EngineCommand, InvalidParam, OwnerTag, PinRequest, PrefixCommand, RunError};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};

/// Longest name of a prefix in bytes: it is told with every snapshot.
const MAX_NAME: usize = 256;

fn check_name(name: Option<&String>) -> Result<(), RunError> {
    match name.map(String::len).filter(|len| *len > MAX_NAME) {
        Some(len) => {
            Err(InvalidParam { field: "name", message: format!("must have at most {MAX_NAME} bytes, not {len}") }
                .into())
        }
        None => Ok(()),
    }
}

impl EngineHandle {
    /// Computes a prefix, as far as it is not cached, and keeps it: it is found by later requests until
    /// [`Self::unpin_prefix`]. It is pinned once the run has finished; a run that is dropped before pins nothing. Refused
    /// with the numbers when it would take more than pins may.
    pub fn pin_prefix(&self, request: PinRequest) -> Result<Run, RunError> {
        let model = self.model().ok_or(RunError::NoModel)?;
        check_tokens(&request.tokens, model.vocab_size)?;
        model.loras.check(request.adapter)?;
        check_name(request.name.as_ref())?;
        let id = RequestId(self.inner.next_id.fetch_add(1, Ordering::Relaxed));
        let request = Box::new(request);
        self.start_run(id, |events| EngineCommand::Prefix(PrefixCommand::Pin { id, request, events }))
    }

    /// By which id a prefix is known once it is pinned; `None` when it fills no block, or there is no model.
    pub fn prefix_id(&self, request: &PinRequest) -> Option<u64> {
        let key = CacheKey { salt: request.cache_salt, adapter: request.adapter };
        kv::prefix_id(key, self.model()?.block_size, &request.tokens)
    }

    /// Keeps a prefix that the cache has (`prefix` as in telemetry's `PrefixInfo`) like [`Self::pin_prefix`], or gives a
    /// pinned one another name.
    pub fn keep_prefix(&self, prefix: u64, name: Option<String>, owner: OwnerTag) -> Result<Run, RunError> {
        self.model().ok_or(RunError::NoModel)?;
        check_name(name.as_ref())?;
        let id = RequestId(self.inner.next_id.fetch_add(1, Ordering::Relaxed));
        let command = |events| EngineCommand::Prefix(PrefixCommand::Keep { id, prefix, name, owner, events });
        self.start_run(id, command)
    }

    /// Lets a pinned prefix go (`id` as in telemetry's `PrefixInfo`): it stays in the cache until it is evicted. The answer,
    /// which need not be waited for, says whether there was such a pin; none comes without a model.
    pub fn unpin_prefix(&self, id: u64) -> Receiver<bool> {
        let (told, answer) = sync_channel(1);
        self.send(EngineCommand::Prefix(PrefixCommand::Unpin { id, told }));
        answer
    }

    /// Forgets a prefix that is not pinned, with what follows it, in host memory and on disk too. The answer, which need
    /// not be waited for, says whether anything was forgotten; none comes without a model.
    pub fn evict_prefix(&self, id: u64) -> Receiver<bool> {
        let (told, answer) = sync_channel(1);
        self.send(EngineCommand::Prefix(PrefixCommand::Evict { id, told }));
        answer
    }

    /// Forgets every prefix that is not pinned, in host memory and on disk too. Requests that run keep their blocks and go on.
    pub fn reset_prefix_cache(&self) {
        self.send(EngineCommand::Prefix(PrefixCommand::Reset));
    }
}
