//! Load for figures: one large world on an executor that does nothing, and the cost of planning beside a long queue.
//!
//! Guarantees: the scheduler's release checks are on; nothing is read back from a memory, so that the figures are those
//! of scheduler, cache and batch alone. The caller's clock is the only one.

use super::rng::Rng;
use crate::batch::StepBatch;
use crate::executor::{ExecError, Executor, StepHandle, StepOutput, StepStats};
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig};
use crate::protocol::{SamplingParams, StopRules};
use crate::scheduler::{
    CheckLevel, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig,
    StepPlan, VictimPolicy,
};
use std::time::Duration;

const BLOCK_SIZE: u32 = 16;
const VOCAB: u32 = 32_000;
const MAX_TOKENS_PER_STEP: u32 = 512;

/// What the large world came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadReport {
    pub sequences: u32,
    pub blocks: u32,
    pub steps: u64,
    /// Steps per second by the caller's clock; 0 when it stood still.
    pub steps_s: f64,
    pub tokens: u64,
    pub requests: u64,
    pub preemptions: u64,
    pub hit_tokens: u64,
    /// Running requests per step, in the mean.
    pub mean_running: f64,
}

/// What planning a step costs, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanningReport {
    pub running: u32,
    pub waiting: u32,
    pub us_p50: f64,
    pub us_max: f64,
    /// The same with nobody else waiting.
    pub us_p50_empty_queue: f64,
    /// Sequences that planning one step looked at, at most.
    pub looked_at: u64,
}

/// Gives each logit row some token at once: what a GPU would compute is no part of the figures.
struct NullExecutor {
    num_blocks: u32,
    output: StepOutput,
}

impl Executor for NullExecutor {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        let token = |t: &u32| {
            let t = *t as usize;
            (batch.input_ids[t].wrapping_mul(0x9e37_79b9) ^ batch.positions[t].wrapping_mul(0x85eb_ca6b)) % VOCAB
        };
        self.output.tokens = batch.logit_tokens.iter().map(token).collect();
        self.output.not_finite = vec![false; batch.num_logits()];
        Ok(StepHandle(batch.step))
    }

    fn wait(&mut self, _: StepHandle) -> Result<StepOutput, ExecError> {
        Ok(std::mem::take(&mut self.output))
    }

    fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    fn block_size(&self) -> u32 {
        BLOCK_SIZE
    }

    fn vocab_size(&self) -> u32 {
        VOCAB
    }

    fn kv_bytes_per_block(&self) -> u64 {
        0
    }
}

/// Scheduler and cache under load.
struct Load {
    scheduler: Scheduler,
    executor: NullExecutor,
    batch: StepBatch,
    rng: Rng,
    prefixes: Vec<Vec<TokenId>>,
    step: u64,
    next_id: u64,
    tokens: u64,
}

impl Load {
    fn new(max_num_seqs: u32, num_blocks: u32) -> Self {
        let config = SchedulerConfig {
            max_num_seqs,
            max_tokens_per_step: MAX_TOKENS_PER_STEP,
            max_model_len: 4096,
            max_waiting: 20_000,
            long_prefill_cap: MAX_TOKENS_PER_STEP,
            watermark_blocks: num_blocks / 100,
            max_preemptions: 4,
            queue_policy: QueuePolicy::Fair,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption: PreemptionMode::Recompute,
            check: CheckLevel::Cheap,
        };
        let kv = KvConfig { num_blocks, block_size: BLOCK_SIZE, enable_prefix_cache: true };
        let mut rng = Rng::new(1);
        let prefixes = (0..8).map(|i| (0..40 * (i + 1)).map(|_| rng.range(0, VOCAB - 1)).collect()).collect();
        Load {
            scheduler: Scheduler::new(config, KvCache::new(kv)),
            executor: NullExecutor {
                num_blocks,
                output: StepOutput { stats: StepStats::default(), ..StepOutput::default() },
            },
            batch: StepBatch::default(),
            rng,
            prefixes,
            step: 0,
            next_id: 0,
            tokens: 0,
        }
    }

    /// A request of one of `clients`, half of them behind one of eight common prefixes.
    fn add(&mut self, suffix: (u32, u32), output: (u32, u32), clients: u32) {
        self.next_id += 1;
        let mut prompt =
            if self.rng.percent(50) { self.prefixes[self.rng.range(0, 7) as usize].clone() } else { Vec::new() };
        let suffix = self.rng.range(suffix.0, suffix.1);
        prompt.extend((0..suffix).map(|_| self.rng.range(0, VOCAB - 1)));
        let max_tokens = self.rng.range(output.0, output.1);
        let new = NewSequence {
            id: RequestId(self.next_id),
            prompt,
            sampling: SamplingParams::greedy(),
            seed: self.next_id,
            stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
            eos_ids: Vec::new(),
            cache_salt: 0,
            adapter: 0,
            priority: 0,
            client: u64::from(self.rng.range(1, clients)),
        };
        self.scheduler.add(new).expect("every request fits the pool and the queue");
    }

    fn plan(&mut self) -> StepPlan {
        self.step += 1;
        self.scheduler.plan_step(PlanInputs {
            step: self.step,
            max_tokens: MAX_TOKENS_PER_STEP,
            max_prefill_tokens: MAX_TOKENS_PER_STEP / 2,
            costs: PreemptCosts::default(),
        })
    }

    fn finish_step(&mut self, plan: &StepPlan) {
        self.batch.build(plan, &self.scheduler);
        let handle = self.executor.launch(&self.batch).expect("nothing is refused");
        let output = self.executor.wait(handle).expect("nothing fails");
        let committed = self.scheduler.commit(plan, &output.tokens, &output.not_finite);
        self.tokens += committed.rows.iter().filter(|row| row.token.is_some()).count() as u64;
        self.scheduler.take_ended();
        self.scheduler.drain_block_events();
    }
}

/// 64 sequences on 4,096 blocks, twice as many requests always there, for so many steps.
pub fn run_load(steps: u64, mut now: impl FnMut() -> Duration) -> LoadReport {
    const SEQUENCES: u32 = 64;
    const BLOCKS: u32 = 4096;
    let mut load = Load::new(SEQUENCES, BLOCKS);
    let mut running = 0;
    let started = now();
    for _ in 0..steps {
        while load.scheduler.num_live() < 2 * SEQUENCES as usize {
            load.add((16, 700), (64, 900), 16);
        }
        let plan = load.plan();
        running += u64::from(plan.num_running);
        load.finish_step(&plan);
    }
    let seconds = now().saturating_sub(started).as_secs_f64();
    LoadReport {
        sequences: SEQUENCES,
        blocks: BLOCKS,
        steps,
        steps_s: if seconds > 0.0 { steps as f64 / seconds } else { 0.0 },
        tokens: load.tokens,
        requests: load.next_id,
        preemptions: load.scheduler.totals().preemptions,
        hit_tokens: load.scheduler.kv().counts().hit_tokens,
        mean_running: running as f64 / steps.max(1) as f64,
    }
}

/// Plans `steps` steps for 256 running requests, one leaving and one joining in each, with `waiting` behind them, and as
/// many with nobody else waiting.
pub fn run_planning(waiting: u32, steps: u32, mut now: impl FnMut() -> Duration) -> PlanningReport {
    let (us_empty, _) = plan_times(0, steps, &mut now);
    let (us, looked_at) = plan_times(waiting, steps, &mut now);
    PlanningReport {
        running: PLANNED,
        waiting,
        us_p50: us[us.len() / 2],
        us_max: us[us.len() - 1],
        us_p50_empty_queue: us_empty[us_empty.len() / 2],
        looked_at,
    }
}

const PLANNED: u32 = 256;

/// Ascending microseconds of each plan, and the most sequences that one looked at.
fn plan_times(waiting: u32, steps: u32, now: &mut impl FnMut() -> Duration) -> (Vec<f64>, u64) {
    let mut load = Load::new(PLANNED, 16_384);
    for _ in 0..PLANNED {
        load.add((16, 64), (2_000, 2_100), 500);
    }
    while load.scheduler.num_decoding() < PLANNED as usize {
        let plan = load.plan();
        load.finish_step(&plan);
    }
    for _ in 0..waiting {
        load.add((16, 64), (100, 200), 500);
    }
    let (mut us, mut looked_at) = (Vec::new(), 0);
    for _ in 0..steps.max(1) {
        // One leaves and one joins in each step.
        let first = load.scheduler.running().next().map(|seq| seq.id());
        load.scheduler.abort(first.expect("the batch is full"));
        load.scheduler.take_ended();
        if load.scheduler.num_waiting() == 0 {
            load.add((16, 64), (2_000, 2_100), 500);
        }
        let (before, started) = (load.scheduler.num_looked_at(), now());
        let plan = load.plan();
        us.push(now().saturating_sub(started).as_secs_f64() * 1e6);
        looked_at = looked_at.max(load.scheduler.num_looked_at() - before);
        load.finish_step(&plan);
    }
    us.sort_unstable_by(f64::total_cmp);
    (us, looked_at)
}
