//! The real scheduler and cache on an executor whose logits come back with every step.

use std::collections::BTreeMap;

use kvasir::batch::{StepBatch, Want};
use kvasir::executor::{ExecError, Executor, StepHandle, StepOutput};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kv::{KvCache, KvConfig, KvGroups};
use kvasir::protocol::{SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewFork, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePlace, QueuePolicy, Scheduler,
    SchedulerConfig, StepPlan, VictimPolicy,
};

/// Tokens that a step may compute.
pub const MAX_TOKENS: u32 = 512;
pub const MAX_SEQS: u32 = 8;
pub const MAX_MODEL_LEN: u32 = 400;

/// A request: its prompt and how many tokens it gets.
pub type Request = (Vec<TokenId>, u32);
/// Each output token with the logits that it was taken from, as bits.
pub type Output = Vec<(TokenId, Vec<u32>)>;

/// What the scheduler is told; the executor may have more blocks than the pool.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks that requests can have.
    pub pool: u32,
    /// Tokens of one prompt per step.
    pub chunk: u32,
    pub cache: bool,
    pub preemption: PreemptionMode,
    pub host_blocks: u32,
}

/// Everything fits, in one piece, and nothing is found again.
pub const PLAIN: Setup =
    Setup { pool: u32::MAX, chunk: MAX_TOKENS, cache: false, preemption: PreemptionMode::Recompute, host_blocks: 0 };

/// What happened, for asserting that a world is what it says.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Rows of each prompt chunk, by request.
    pub chunks: BTreeMap<u64, u32>,
    pub most_rows: usize,
    pub copies: usize,
    pub grouped_rows: usize,
    /// Tokens found, by request, at its first admission.
    pub cached: BTreeMap<u64, u32>,
    pub abandoned: u32,
    /// Of the last step.
    pub dispatches: u32,
    /// Request, position.
    pub corrupted: Vec<(u64, u32)>,
}

pub struct Drive<'a> {
    pub scheduler: Scheduler,
    pub executor: &'a mut dyn Executor,
    pub requests: BTreeMap<u64, Request>,
    pub outputs: BTreeMap<u64, Output>,
    pub seen: Seen,
    setup: Setup,
    step: u64,
}

impl<'a> Drive<'a> {
    pub fn new(executor: &'a mut dyn Executor, setup: Setup) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: MAX_SEQS,
            max_tokens_per_step: MAX_TOKENS,
            max_model_len: MAX_MODEL_LEN,
            max_waiting: 100,
            long_prefill_cap: setup.chunk,
            watermark_blocks: 0,
            max_preemptions: 1_000,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption: setup.preemption,
            check: CheckLevel::Full,
        };
        let kv = cache(executor, setup);
        Drive {
            scheduler: Scheduler::new(config, kv),
            executor,
            requests: BTreeMap::new(),
            outputs: BTreeMap::new(),
            seen: Seen::default(),
            setup,
            step: 0,
        }
    }

    pub fn add(&mut self, id: u64, (prompt, max_tokens): &Request) {
        self.scheduler.add(sequence(id, prompt, *max_tokens)).expect("it fits");
        self.requests.insert(id, (prompt.clone(), *max_tokens));
    }

    /// A request that goes on from the first `keep` tokens of a live one.
    pub fn fork(&mut self, parent: u64, id: u64, keep: usize, own: &[TokenId], max_tokens: u32) {
        let tokens = self.scheduler.get(RequestId(parent)).expect("the parent is live").tokens();
        self.requests.insert(id, ([&tokens[..keep], own].concat(), max_tokens));
        let sequence = sequence(id, own, max_tokens);
        let fork = NewFork { keep_tokens: keep as u32, sequence, place: QueuePlace::AsNew };
        self.scheduler.fork(RequestId(parent), fork).expect("it fits");
    }

    fn plan(&mut self) -> (StepPlan, StepBatch) {
        self.step += 1;
        let inputs = PlanInputs {
            step: self.step,
            max_tokens: MAX_TOKENS,
            max_prefill_tokens: MAX_TOKENS,
            costs: PreemptCosts::default(),
        };
        let plan = self.scheduler.plan_step(inputs);
        let mut batch = StepBatch::default();
        batch.build(&plan, &self.scheduler);
        batch.want = Want::Logits;
        if self.executor.has_canary() {
            batch.add_chains(&plan, &self.scheduler);
        }
        (plan, batch)
    }

    fn run(&mut self, plan: &StepPlan, batch: &StepBatch) -> Vec<f32> {
        let handle = self.executor.launch(batch).unwrap_or_else(|e| panic!("{e}"));
        let output = self.executor.wait(handle).unwrap_or_else(|e| panic!("{e}"));
        self.seen.dispatches = output.stats.dispatches;
        let request = |row: u32| plan.rows[row as usize].request.0;
        self.seen.corrupted.extend(output.corrupted.iter().map(|found| (request(found.row), found.position)));
        output.logits.unwrap_or_default()
    }

    pub fn step(&mut self) {
        self.step_with(|_, _| {});
    }

    /// A step before which something is done to the executor.
    pub fn step_with(&mut self, before: impl FnOnce(&StepPlan, &mut dyn Executor)) {
        let (plan, batch) = self.plan();
        self.note(&plan, &batch);
        before(&plan, self.executor);
        let logits = self.run(&plan, &batch);
        let rows: Vec<&[f32]> = logits.chunks_exact(self.executor.vocab_size() as usize).collect();
        let tokens: Vec<TokenId> = rows.iter().map(|row| argmax(row)).collect();
        let committed = self.scheduler.commit(&plan, &tokens, &vec![false; tokens.len()]);
        for row in committed.rows {
            let (Some(token), Some(idx)) = (row.token, row.logit_idx) else { continue };
            let bits = rows[idx as usize].iter().map(|v| v.to_bits()).collect();
            self.outputs.entry(row.request.0).or_default().push((token, bits));
        }
        self.scheduler.take_ended();
        self.scheduler.drain_block_events();
    }

    /// A step that copies what is cached to host memory and computes nothing.
    pub fn plan_save(&mut self) -> (StepPlan, StepBatch) {
        self.step += 1;
        let plan = self.scheduler.plan_save(self.step, 1_000, &|_| false);
        let mut batch = StepBatch::default();
        batch.build(&plan, &self.scheduler);
        (plan, batch)
    }

    /// A step that runs to its end, and whose result is lost.
    pub fn lose_a_step(&mut self) {
        let (plan, batch) = self.plan();
        if !plan.is_empty() {
            self.run(&plan, &batch);
        }
        self.scheduler.abandon(&plan);
        self.scheduler.drain_block_events();
        self.seen.abandoned += 1;
    }

    /// The device and all its blocks are gone; requests go on from their tokens.
    pub fn lose_the_device(&mut self) {
        for block in 0..self.executor.num_blocks() {
            self.executor.corrupt_block(block).expect("between steps");
        }
        let kv = cache(self.executor, self.setup);
        self.scheduler.restart(kv);
        self.scheduler.drain_block_events();
    }

    pub fn run_to_end(&mut self) {
        while self.scheduler.has_work() {
            self.step();
        }
    }

    fn note(&mut self, plan: &StepPlan, batch: &StepBatch) {
        let seen = &mut self.seen;
        for row in plan.rows.iter().filter(|row| row.kind != kvasir::scheduler::RowKind::Decode) {
            *seen.chunks.entry(row.request.0).or_default() += 1;
        }
        for admission in plan.admitted.iter().filter(|a| !a.is_resumed) {
            seen.cached.insert(admission.request.0, admission.cached_tokens);
        }
        seen.most_rows = seen.most_rows.max(plan.rows.len());
        seen.copies += plan.copies.len();
        seen.grouped_rows += batch.groups.rows.len();
    }
}

fn cache(executor: &dyn Executor, setup: Setup) -> KvCache {
    let num_blocks = executor.num_blocks().min(setup.pool.saturating_add(1));
    let (block_size, groups) = (executor.block_size(), KvGroups::new(&executor.windows()));
    let config = KvConfig { num_blocks, block_size, groups, enable_prefix_cache: setup.cache };
    KvCache::new(config).with_host_pool(setup.host_blocks.min(executor.num_host_blocks()), setup.cache)
}

fn sequence(id: u64, prompt: &[TokenId], max_tokens: u32) -> NewSequence {
    NewSequence {
        id: RequestId(id),
        prompt: prompt.to_vec(),
        sampling: SamplingParams::greedy(),
        seed: 0,
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        eos_ids: Vec::new(),
        priority: 0,
        cache_salt: 0,
        adapter: 0,
        client: 0,
    }
}

fn argmax(row: &[f32]) -> TokenId {
    row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best }) as TokenId
}

/// An executor whose blocks carry other numbers than the scheduler gave them: no order of ids is left.
pub struct Permuted<'a>(pub &'a mut dyn Executor);

impl Permuted<'_> {
    /// A bijection of the ids; the null block stays.
    fn id(&self, block: u32) -> u32 {
        let n = self.0.num_blocks() - 1;
        assert!(!n.is_multiple_of(37), "the multiplier has no factor in common with {n}");
        if block == 0 { 0 } else { 1 + ((block - 1) * 37 + 11) % n }
    }
}

impl Executor for Permuted<'_> {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        let mut batch = batch.clone();
        let size = batch.block_size;
        batch.block_tables.iter_mut().for_each(|block| *block = self.id(*block));
        batch.kv_slots.iter_mut().for_each(|slot| *slot = self.id(*slot / size) * size + *slot % size);
        for copy in &mut batch.copies {
            (copy.from, copy.to) = (self.id(copy.from), self.id(copy.to));
        }
        for transfer in batch.swap_out.iter_mut().chain(&mut batch.swap_in) {
            transfer.block.0 = self.id(transfer.block.0);
        }
        self.0.launch(&batch)
    }
    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError> {
        self.0.wait(handle)
    }
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks()
    }
    fn block_size(&self) -> u32 {
        self.0.block_size()
    }
    fn vocab_size(&self) -> u32 {
        self.0.vocab_size()
    }
    fn kv_bytes_per_block(&self) -> u64 {
        self.0.kv_bytes_per_block()
    }
    fn num_host_blocks(&self) -> u32 {
        self.0.num_host_blocks()
    }
}
