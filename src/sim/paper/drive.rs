//! The real scheduler and cache without an executor: each row that asks for a token gets a made-up one.

use super::lengths::Lengths;
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig};
use crate::protocol::{SamplingParams, StopRules};
use crate::scheduler::{
    CheckLevel, Committed, GangAdvance, NewFork, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePlace,
    QueuePolicy, Scheduler, SchedulerConfig, StepPlan, VictimPolicy,
};

/// What a figure varies; everything else is as the engine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Blocks that requests can hold.
    pub usable_blocks: u32,
    pub block_size: u32,
    pub max_num_seqs: u32,
    pub max_tokens_per_step: u32,
    pub watermark_blocks: u32,
    pub prefix_cache: bool,
}

/// Steps taken one by one.
pub struct Drive {
    pub scheduler: Scheduler,
    step: u64,
    last_id: u64,
    max_tokens_per_step: u32,
}

impl Drive {
    pub fn new(setup: Setup) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: setup.max_num_seqs,
            max_tokens_per_step: setup.max_tokens_per_step,
            max_model_len: u32::MAX,
            max_waiting: u32::MAX,
            long_prefill_cap: setup.max_tokens_per_step,
            watermark_blocks: setup.watermark_blocks,
            max_preemptions: 4,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 1,
            victim: VictimPolicy::LastIn,
            preemption: PreemptionMode::Recompute,
            check: CheckLevel::Cheap,
        };
        let kv = KvCache::new(KvConfig {
            num_blocks: setup.usable_blocks + 1,
            block_size: setup.block_size,
            enable_prefix_cache: setup.prefix_cache,
        });
        Drive {
            scheduler: Scheduler::new(config, kv),
            step: 0,
            last_id: 0,
            max_tokens_per_step: setup.max_tokens_per_step,
        }
    }

    /// Puts a request of exactly `output` tokens at the end of the queue.
    pub fn submit(&mut self, prompt: Vec<TokenId>, output: u32) -> RequestId {
        self.last_id += 1;
        let id = RequestId(self.last_id);
        self.scheduler.add(new_sequence(id, prompt, output)).expect("every request fits alone");
        id
    }

    /// A request whose prompt nobody shares.
    pub fn submit_alone(&mut self, prompt: u32, output: u32) -> RequestId {
        self.submit(self.own_prompt(prompt), output)
    }

    fn own_prompt(&self, len: u32) -> Vec<TokenId> {
        let owner = self.last_id + 1;
        (0..len).map(|position| made_up(owner, position)).collect()
    }

    /// As [`Drive::submit_alone`], with ids for `width` outputs, as the engine gives them: they stand together in the queue.
    pub fn submit_outputs(&mut self, lengths: Lengths, width: u32) -> RequestId {
        let id = self.submit_alone(lengths.prompt, lengths.output);
        self.last_id += u64::from(width) - 1;
        id
    }

    /// Output `choice` of a live request, from the end of its prompt on.
    pub fn fork(&mut self, parent: RequestId, choice: u32, lengths: Lengths) {
        if self.scheduler.get(parent).is_none() {
            return;
        }
        let sequence = new_sequence(RequestId(parent.0 + u64::from(choice)), Vec::new(), lengths.output);
        let fork = NewFork { keep_tokens: lengths.prompt, sequence, place: QueuePlace::WithParent };
        self.scheduler.fork(parent, fork).expect("every output fits alone");
    }

    /// A search of `width` beams whose prompt nobody shares.
    pub fn submit_search(&mut self, lengths: Lengths, width: u32) -> RequestId {
        let id = RequestId(self.last_id + 1);
        let new = new_sequence(id, self.own_prompt(lengths.prompt), lengths.output);
        self.scheduler.add_gang(new, width).expect("every search fits alone");
        self.last_id += u64::from(width);
        id
    }

    pub fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    /// One step with the whole budget.
    pub fn step(&mut self) -> Taken {
        self.step_with(self.max_tokens_per_step)
    }

    /// One step in which at most `max_prefill_tokens` are computed beside those who decode.
    pub fn step_with(&mut self, max_prefill_tokens: u32) -> Taken {
        let plan = self.plan_with(max_prefill_tokens);
        self.finish(plan, &[])
    }

    /// Plans a step with the whole budget.
    pub fn plan(&mut self) -> StepPlan {
        self.plan_with(self.max_tokens_per_step)
    }

    fn plan_with(&mut self, max_prefill_tokens: u32) -> StepPlan {
        self.step += 1;
        self.scheduler.plan_step(PlanInputs {
            step: self.step,
            max_tokens: self.max_tokens_per_step,
            max_prefill_tokens,
            costs: PreemptCosts::default(),
        })
    }

    /// Commits a planned step; the searches in it go on as `advances` say.
    pub fn finish(&mut self, plan: StepPlan, advances: &[GangAdvance]) -> Taken {
        let wanted = plan.rows.iter().filter(|row| row.wants_logits);
        let sampled: Vec<TokenId> = wanted.map(|row| made_up(row.request.0, row.to())).collect();
        let committed = self.scheduler.commit_gangs(&plan, &sampled, &vec![false; sampled.len()], advances);
        self.scheduler.take_ended();
        self.scheduler.drain_block_events();
        Taken { plan, committed }
    }
}

fn new_sequence(id: RequestId, prompt: Vec<TokenId>, output: u32) -> NewSequence {
    NewSequence {
        id,
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 0,
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(output) },
        eos_ids: Vec::new(),
        priority: 0,
        cache_salt: 0,
        adapter: 0,
        client: 0,
    }
}

/// A step that was taken.
pub struct Taken {
    pub plan: StepPlan,
    pub committed: Committed,
}

/// A token that differs between requests and positions as good as always.
fn made_up(owner: u64, position: u32) -> TokenId {
    let mixed = (owner << 32 | u64::from(position)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 33) as TokenId
}
