//! What can be known of a request when it is submitted: whether it makes sense, and fits the pool beside pinned prefixes.
//!
//! Guarantees: what is refused here could not have run. What is not known here (a pin on its way, the tokens of a fork)
//! is left to the engine, whose refusal is the run's terminal event.

use super::core::EngineCore;
use super::handle::{LoadedModel, check_tokens};
use super::{beams, choices};
use crate::kv::{BlockEvent, CacheKey, prefix_ids};
use crate::protocol::{GenerateRequest, InvalidParam, RunError};
use std::collections::HashSet;

/// Everything that can be known at submit, so that no request waits for what cannot happen. `kept` tokens of another
/// request come before its own.
pub(super) fn check_request(
    request: &GenerateRequest,
    kept: u32,
    model: &LoadedModel,
    pinned: &PinnedRoom,
) -> Result<(), RunError> {
    request.sampling.validate()?;
    model.loras.check(request.adapter)?;
    choices::check(&request.decoding)?;
    beams::check(request, model)?;
    let prompt = kept.saturating_add(request.prompt.len() as u32);
    if prompt == 0 {
        return Err(RunError::EmptyPrompt);
    }
    check_tokens(&request.prompt, model.vocab_size)?;
    let max_model_len = model.max_model_len;
    if prompt >= max_model_len {
        return Err(RunError::PromptTooLong { prompt, max_model_len });
    }
    if request.stop.max_tokens == Some(0) {
        return Err(InvalidParam { field: "max_tokens", message: "must be at least 1, not 0".into() }.into());
    }
    let needed = match request.stop.max_tokens {
        Some(max_tokens) => prompt.saturating_add(max_tokens),
        None => prompt.saturating_add(1),
    };
    if needed > max_model_len {
        return Err(RunError::ContextExceeded { needed, max_model_len });
    }
    let total = pinned.left_for(request, kept, model);
    match beams::most_blocks(request, prompt, needed, model).filter(|needed| *needed > total) {
        Some(needed) => Err(RunError::NeverFits { needed, total }),
        None => Ok(()),
    }
}

/// Blocks that pins hold. Those of a pin under way are not counted: a request may share them once they are computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PinnedRoom {
    num_blocks: u32,
    /// Of the blocks that can be shared.
    hashes: HashSet<u64>,
}

impl PinnedRoom {
    /// Blocks that a request may come to use: all of the pool, without those that pins keep from it. `kept` tokens of
    /// another request, which are not known here, come before its own.
    pub fn left_for(&self, request: &GenerateRequest, kept: u32, model: &LoadedModel) -> u32 {
        let total = model.num_blocks - 1;
        if self.num_blocks == 0 || kept > 0 {
            return total;
        }
        let key = CacheKey { salt: request.cache_salt, adapter: request.adapter };
        // At least one token is computed, in a block of its own.
        let shareable = &request.prompt[..request.prompt.len().saturating_sub(1)];
        let ids = prefix_ids(key, model.block_size, shareable);
        let num_shared = ids.into_iter().take_while(|id| self.hashes.contains(id)).count() as u32;
        (total.saturating_sub(self.num_blocks) + num_shared).min(total)
    }
}

impl EngineCore {
    /// Tells those who submit what pins leave.
    pub(super) fn tell_room(&self) {
        let kv = self.scheduler.kv();
        let hashes = kv.blocks().filter(|block| block.is_pinned).filter_map(|block| block.hash).collect();
        self.shared.set_pinned(PinnedRoom { num_blocks: kv.num_pinned(), hashes });
    }

    /// As [`Self::tell_room`], where the step changed it: before anyone hears that a prefix is pinned.
    pub(super) fn tell_pins(&self) {
        let is_pin = |event: &BlockEvent| matches!(event, BlockEvent::Pin { .. } | BlockEvent::Unpin { .. });
        if self.scheduler.kv().events().iter().any(is_pin) {
            self.tell_room();
        }
    }
}
