//! Pinned prefixes: computed as requests of their own, then held by the cache.
//!
//! A pin is admitted, computed and if need be preempted like any request; when it ends well its blocks stay. Guarantees:
//! pins take at most [`MAX_PINNED_PERCENT`] of the pool, and never so much that a live request could not run to its end;
//! a request that could not run beside the pins is refused. Pins whose cache was lost or became suspect are computed again.

use super::{Ended, NewSequence, Op, Scheduler, Sequence};
use crate::ids::{RequestId, TokenId};
use crate::kv::{CacheKey, ContentId, PinSpec};
use crate::protocol::{FinishReason, InvalidParam, RunError, SamplingParams, StopRules};

/// Share of the pool that pinned prefixes may take.
pub const MAX_PINNED_PERCENT: u32 = 50;

/// What [`Scheduler::add_pin`] takes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NewPin {
    /// Of the request that computes it, as in [`NewSequence`].
    pub id: RequestId,
    pub name: Option<String>,
    /// Its whole blocks are kept.
    pub tokens: Vec<TokenId>,
    pub cache_salt: u64,
    pub adapter: u64,
    pub client: u64,
}

/// A pin that let its blocks go because a request could never have ended beside it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct YieldedPin {
    /// The request that computed it.
    pub request: RequestId,
    pub name: Option<String>,
}

impl Scheduler {
    /// Contents that were evicted on purpose since the last call, see [`crate::kv::KvCache::take_forgotten`].
    pub fn take_forgotten(&mut self) -> Vec<(ContentId, bool)> {
        self.kv.take_forgotten()
    }

    /// Computes a prefix, as far as the cache does not have it, and keeps it. The request of this id ends with
    /// [`FinishReason::MaxTokens`] once it is pinned; the token that it samples means nothing. Refused when it fills no
    /// block, or when it takes more than pins may.
    pub fn add_pin(&mut self, pin: NewPin) -> Result<(), RunError> {
        self.note(|_| Op::AddPin(pin.clone()));
        self.enqueue_pin(pin)
    }

    fn enqueue_pin(&mut self, pin: NewPin) -> Result<(), RunError> {
        let NewPin { id, name, mut tokens, cache_salt, adapter, client } = pin;
        let (size, key) = (self.kv.block_size(), CacheKey { salt: cache_salt, adapter });
        if !self.kv.shares_prefixes() {
            return Err(
                InvalidParam { field: "prefix", message: "cannot be pinned: the prefix cache is off".into() }.into()
            );
        }
        let num_blocks = tokens.len() as u32 / size;
        if num_blocks == 0 {
            let message = format!("must fill a block of {size} tokens, not {}", tokens.len());
            return Err(InvalidParam { field: "prefix", message }.into());
        }
        tokens.truncate((num_blocks * size) as usize);
        let mut chain = self.kv.new_chain(key);
        chain.extend(&tokens);
        let needed = num_blocks - self.kv.num_pinned_of(&chain, &tokens, num_blocks);
        let (pinned, limit) = (self.kv.num_pinned() + self.pinning_blocks, self.pin_limit());
        if pinned + needed > limit {
            return Err(RunError::PinLimit { needed, pinned, limit });
        }
        let sequence = NewSequence {
            id,
            prompt: tokens.clone(),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(1) },
            eos_ids: Vec::new(),
            cache_salt,
            adapter,
            priority: 0,
            client,
        };
        self.enqueue(sequence)?;
        self.pinning_blocks += needed;
        let idx = self.by_id[&id];
        self.seq_mut(idx).pin =
            Some(Box::new(Pinning { spec: PinSpec { request: id, name, tokens, key, client }, needed }));
        Ok(())
    }

    /// Pins a prefix that the cache has, or names a pinned one anew: as [`Scheduler::add_pin`] does with its tokens.
    pub fn keep_prefix(
        &mut self,
        id: RequestId,
        prefix: u64,
        name: Option<String>,
        client: u64,
    ) -> Result<(), RunError> {
        let (tokens, key) = self.kv.prefix_tokens(prefix).ok_or(RunError::PrefixLost)?;
        self.add_pin(NewPin { id, name, tokens, cache_salt: key.salt, adapter: key.adapter, client })
    }

    /// Lets the pinned prefix of this id go. False when there is none.
    pub fn unpin(&mut self, id: u64) -> bool {
        assert!(self.in_flight.is_none(), "prefixes are handled between steps");
        self.note(|_| Op::Unpin { prefix: id });
        let was_pinned = self.kv.unpin(id);
        self.recount_pinning();
        was_pinned
    }

    /// Forgets a prefix that is not pinned; returns how many blocks that were.
    pub fn evict_prefix(&mut self, id: u64) -> u32 {
        assert!(self.in_flight.is_none(), "prefixes are handled between steps");
        self.note(|_| Op::EvictPrefix { prefix: id });
        self.kv.evict_prefix(id)
    }

    /// Forgets every prefix that is not pinned; returns how many blocks that were.
    pub fn reset_prefixes(&mut self) -> u32 {
        assert!(self.in_flight.is_none(), "prefixes are handled between steps");
        self.note(|_| Op::ResetPrefixes);
        self.kv.reset_prefixes()
    }

    /// Blocks that a new request of these tokens may come to use: all but those that pins keep from it.
    pub fn room_for(&self, prompt: &[TokenId], key: CacheKey) -> u32 {
        let total = self.kv.num_usable();
        let pinned = self.kv.num_pinned() + self.pinning_blocks;
        if pinned == 0 {
            return total;
        }
        let mut chain = self.kv.new_chain(key);
        chain.extend(prompt);
        // At least one token is computed, so the last block of the prompt is its own even where it is pinned.
        let max_blocks = (prompt.len() as u32).saturating_sub(1) / self.kv.block_size();
        total - pinned + self.kv.num_pinned_of(&chain, prompt, max_blocks)
    }

    /// Pins give way, the newest first, where a running request (or the next, while none runs) could never end beside
    /// them: its prompt may have counted on a pinned block that it then could not share.
    pub(super) fn yield_pins(&mut self) {
        while self.kv.num_pinned() > 0 {
            let room = self.kv.num_usable() - self.kv.num_pinned();
            let next = self.waiting.first().filter(|_| self.running.is_empty());
            // The beams of a search count with their leader.
            let parties = self.running.iter().copied().chain(next).map(|idx| self.seq(idx));
            let mut parties = parties.filter(|seq| seq.pin.is_none() && !seq.is_follower());
            if !parties.any(|seq| self.own_blocks(seq) > room) {
                return;
            }
            self.yielded
                .extend(self.kv.unpin_newest().map(|spec| YieldedPin { request: spec.request, name: spec.name }));
            self.recount_pinning();
        }
    }

    /// Blocks that a request may come to hold and no pin holds for it.
    fn own_blocks(&self, seq: &Sequence) -> u32 {
        let shared = match seq.table.num_blocks() {
            0 => {
                let max_tokens = seq.num_tokens().saturating_sub(1 + u32::from(self.is_held(seq)));
                // What the beams of a search have in common for sure is their prompt.
                let max_tokens = if seq.gang.is_some() { max_tokens.min(seq.num_prompt) } else { max_tokens };
                self.kv.num_pinned_of(&seq.chain, &seq.tokens, max_tokens / self.kv.block_size())
            }
            _ => seq.table.ids().iter().filter(|id| self.kv.block(**id).is_pinned).count() as u32,
        };
        self.most_blocks(seq).saturating_sub(shared)
    }

    /// Blocks that pins may take beside the requests that live now.
    fn pin_limit(&self) -> u32 {
        let total = self.kv.num_usable();
        let live = self.seqs.iter().flatten().filter(|seq| seq.pin.is_none());
        let most = live.map(|seq| self.most_blocks(seq)).max().unwrap_or(0);
        (total * MAX_PINNED_PERCENT / 100).min(total - most.min(total))
    }

    /// The last act of a pin's request: its blocks become the pin's, or are given back.
    pub(super) fn settle_pin(&mut self, mut seq: Sequence, outcome: Result<FinishReason, RunError>) {
        let usage = seq.usage();
        let mut outcome = outcome;
        if let Some(pinning) = seq.pin.take() {
            self.pinning_blocks -= pinning.needed;
            if outcome == Ok(FinishReason::MaxTokens) {
                if self.kv.pin(pinning.spec, &seq.chain, seq.table).is_none() {
                    outcome = Err(RunError::PrefixLost);
                }
            } else {
                self.kv.free(seq.table);
            }
        } else {
            self.kv.free(seq.table);
        }
        let parent = seq.fork_of.map(|fork| fork.parent);
        self.ended.push(Ended { request: seq.id, outcome, usage, tokens: seq.tokens, key: seq.key, parent });
    }

    /// A pin under way counts what others do not pin yet: it takes over what one of them lets go.
    fn recount_pinning(&mut self) {
        if self.pinning_blocks == 0 && self.kv.num_pinned() == 0 {
            return;
        }
        self.pinning_blocks = 0;
        let (kv, size) = (&self.kv, self.kv.block_size());
        for seq in self.seqs.iter_mut().flatten() {
            let Some(pinning) = &mut seq.pin else { continue };
            let num_blocks = pinning.spec.tokens.len() as u32 / size;
            pinning.needed = num_blocks - kv.num_pinned_of(&seq.chain, &pinning.spec.tokens, num_blocks);
            self.pinning_blocks += pinning.needed;
        }
    }

    /// Computes these pins again, under the ids that they had; what cannot be pinned any more is told as an end.
    pub(super) fn renew_pins(&mut self, specs: Vec<PinSpec>) {
        if !specs.is_empty() {
            self.recount_pinning();
        }
        for spec in specs {
            let PinSpec { request, name, tokens, key, client } = spec;
            let pin = NewPin { id: request, name, tokens, cache_salt: key.salt, adapter: key.adapter, client };
            if let Err(error) = self.enqueue_pin(pin) {
                let usage = Default::default();
                self.ended.push(Ended { request, outcome: Err(error), usage, tokens: Vec::new(), key, parent: None });
            }
        }
    }
}

/// A prefix on its way to being pinned.
#[derive(Debug)]
pub(super) struct Pinning {
    pub spec: PinSpec,
    /// Blocks that will be pinned and were not yet when it came.
    pub needed: u32,
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;
    use crate::kv::{KvCache, KvConfig};

    fn scheduler() -> Scheduler {
        let config = SchedulerConfig {
            max_num_seqs: 2,
            max_tokens_per_step: 64,
            max_model_len: 64,
            max_waiting: 8,
            long_prefill_cap: 64,
            watermark_blocks: 0,
            max_preemptions: 8,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption: PreemptionMode::Recompute,
            check: CheckLevel::Full,
        };
        Scheduler::new(config, KvCache::new(KvConfig { num_blocks: 9, block_size: 4, enable_prefix_cache: true }))
    }

    fn inputs(step: u64) -> PlanInputs {
        PlanInputs { step, max_tokens: 64, max_prefill_tokens: 64, costs: PreemptCosts::default() }
    }

    fn step(scheduler: &mut Scheduler, step: u64) -> StepPlan {
        let plan = scheduler.plan_step(inputs(step));
        let tokens = vec![7; plan.num_logits()];
        scheduler.commit(&plan, &tokens, &vec![false; tokens.len()]);
        plan
    }

    #[test]
    fn a_pin_that_gives_way_is_named_in_every_plan_until_one_is_committed() {
        let mut scheduler = scheduler();
        let tokens: Vec<TokenId> = (0..8).collect();
        let name = Some("system".to_string());
        let pin = NewPin { id: RequestId(1), name: name.clone(), tokens, cache_salt: 0, adapter: 0, client: 0 };
        scheduler.add_pin(pin).unwrap();
        assert_eq!(step(&mut scheduler, 1).yielded, []);
        assert_eq!(scheduler.kv.num_pinned(), 2);
        // It fits beside the pin because it begins with its blocks.
        let sequence = NewSequence {
            id: RequestId(2),
            prompt: (0..10).collect(),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules::max_tokens(22),
            eos_ids: Vec::new(),
            priority: 0,
            cache_salt: 0,
            adapter: 0,
            client: 0,
        };
        scheduler.add(sequence).unwrap();
        // Where it cannot share them in the end, the pin stands in its way.
        let spec = scheduler.kv.pin_specs().next().unwrap().clone();
        scheduler.by_id.values().for_each(|&idx| {
            let seq = scheduler.seqs[idx as usize].as_mut().unwrap();
            seq.chain = scheduler.kv.new_chain(CacheKey { salt: 9, adapter: 0 });
            seq.chain.extend(&seq.tokens);
        });
        let plan = scheduler.plan_step(inputs(2));
        let yielded = [YieldedPin { request: spec.request, name }];
        assert_eq!((&plan.yielded[..], scheduler.kv.num_pinned()), (&yielded[..], 0));
        scheduler.release(&plan);
        let plan = scheduler.plan_step(inputs(3));
        assert_eq!(plan.yielded, yielded, "the step before it failed: it is told again");
        scheduler.release(&plan);
    }
}
