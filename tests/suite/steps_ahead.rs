//! Steps that are submitted before they are asked for change no plan, no token and no bit: seeded worlds on the real scheduler
//! and the GPU, once with them and once without, in lockstep.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use kvasir::batch::StepBatch;
use kvasir::executor::Executor;
use kvasir::executor::wgpu_executor::{ExecutorConfig, KvFormat, LoraLimits, StepsAhead, WgpuExecutor};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kv::{KvCache, KvConfig, KvGroups};
use kvasir::model::Model;
use kvasir::protocol::{SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewFork, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePlace, QueuePolicy, Scheduler,
    SchedulerConfig, VictimPolicy,
};

use crate::kernels::harness::Random;
use crate::support::{core_fixtures, fixtures, open_gpu};

const BLOCK: u32 = 16;
/// Too few for all that run, so that some give way.
const NUM_BLOCKS: u32 = 15;
const HOST_BLOCKS: u32 = 20;
const MAX_MODEL_LEN: u32 = 118;
const MAX_SEQS: u32 = 4;
const MAX_TOKENS: u32 = 64;
const NUM_STEPS: u64 = 160;

/// With so many places in host memory; `None`, with a line printed, where there is no adapter.
fn open(model: &Path, host_blocks: u32) -> Option<WgpuExecutor> {
    let config = ExecutorConfig {
        num_blocks: NUM_BLOCKS,
        block_size: BLOCK,
        max_tokens_per_step: MAX_TOKENS,
        max_num_seqs: MAX_SEQS,
        max_model_len: MAX_MODEL_LEN,
        precise: false,
        kv: KvFormat::F16,
        canary: false,
        lora: LoraLimits::NONE,
    };
    let gpu = open_gpu()?;
    let model = Model::open(model).unwrap_or_else(|e| panic!("{e}"));
    let executor = WgpuExecutor::new(gpu, &model, config, &mut |_| true).unwrap_or_else(|e| panic!("{e}"));
    Some(executor.with_host_blocks(host_blocks))
}

/// What a step did: the request, position and token of each row with its log-probabilities as bits, or that it was lost.
type Step = Vec<(u64, u32, Option<TokenId>, Vec<(TokenId, u32)>)>;

/// What happened in a world, for asserting that much did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    stopped: u32,
    aborted: u32,
    forked: u32,
    lost: u32,
    continued: u32,
    recomputed: u64,
    swaps: u64,
    partial_hits: u64,
    copied: u64,
}

impl Seen {
    fn add(&mut self, other: &Seen) {
        self.stopped += other.stopped;
        self.aborted += other.aborted;
        self.forked += other.forked;
        self.lost += other.lost;
        self.continued += other.continued;
        self.recomputed += other.recomputed;
        self.swaps += other.swaps;
        self.partial_hits += other.partial_hits;
        self.copied += other.copied;
    }
}

struct World<'a> {
    executor: &'a mut WgpuExecutor,
    scheduler: Scheduler,
    random: Random,
    next_id: u64,
    /// Tokens of what ended: conversations go on from there.
    ended: BTreeMap<u64, Vec<TokenId>>,
    steps: Vec<Step>,
    seen: Seen,
}

impl<'a> World<'a> {
    fn new(executor: &'a mut WgpuExecutor, seed: u64) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: MAX_SEQS,
            max_tokens_per_step: MAX_TOKENS,
            max_model_len: MAX_MODEL_LEN,
            max_waiting: 100,
            long_prefill_cap: MAX_TOKENS,
            watermark_blocks: 0,
            max_preemptions: 1_000,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption: if seed.is_multiple_of(2) { PreemptionMode::Swap } else { PreemptionMode::Recompute },
            check: CheckLevel::Full,
        };
        let (groups, host_blocks) = (KvGroups::new(&executor.windows()), executor.num_host_blocks());
        let kv = KvConfig { num_blocks: executor.num_blocks(), block_size: BLOCK, groups, enable_prefix_cache: true };
        let scheduler = Scheduler::new(config, KvCache::new(kv).with_host_pool(host_blocks, true));
        let (random, ended) = (Random(seed), BTreeMap::new());
        World { executor, scheduler, random, next_id: 1, ended, steps: Vec::new(), seen: Seen::default() }
    }

    fn below(&mut self, n: u32) -> u32 {
        self.random.below(n)
    }

    fn sequence(&mut self, prompt: Vec<TokenId>) -> NewSequence {
        let id = self.next_id;
        self.next_id += 1;
        let mut sampling = SamplingParams::greedy();
        sampling.logprobs = [None, Some(0), Some(3)][self.below(3) as usize];
        if self.below(2) == 0 {
            (sampling.temperature, sampling.top_p) = (0.9, 0.95);
        }
        if self.below(4) == 0 {
            sampling.logit_bias = vec![(40, 2.0), (41, -1.0)];
        }
        if self.below(12) == 0 {
            sampling.repetition_penalty = 1.2;
        }
        // Some reach the end of their context.
        let max_tokens = (2 + self.below(50)).min(MAX_MODEL_LEN - prompt.len() as u32);
        NewSequence {
            id: RequestId(id),
            prompt,
            sampling,
            seed: id * 77,
            stop: StopRules::max_tokens(max_tokens),
            eos_ids: (0..8).map(|i| i * 29 + 5).collect(),
            priority: 0,
            cache_salt: 0,
            adapter: 0,
            client: 0,
        }
    }

    /// Of one of three kinds, or what somebody said before and more.
    fn prompt(&mut self) -> Vec<TokenId> {
        let (kind, len) = (self.below(3), 1 + self.below(30));
        let mut prompt: Vec<TokenId> = (0..20).map(|i| 3 + (i * 17 + kind * 29) % 200).collect();
        let before = self.ended.values().filter(|tokens| tokens.len() < 60).nth(self.random.below(4) as usize);
        if let Some(before) = before.filter(|_| kind != 0) {
            prompt.clone_from(before);
            self.seen.continued += 1;
        }
        prompt.extend((0..len).map(|i| 3 + (i * 31 + kind * 7) % 200));
        prompt
    }

    fn arrivals(&mut self) {
        if self.scheduler.num_live() < 2 || self.below(12) == 0 {
            let prompt = self.prompt();
            let sequence = self.sequence(prompt);
            self.scheduler.add(sequence).expect("it fits");
        }
        let running: Vec<RequestId> = self.scheduler.running().map(|seq| seq.id()).collect();
        let Some(&one) = running.get(self.below(MAX_SEQS) as usize) else { return };
        match self.below(40) {
            0 => {
                self.scheduler.abort(one);
                self.seen.aborted += 1;
            }
            1 => {
                let keep_tokens = self.scheduler.get(one).map_or(0, |seq| seq.num_tokens());
                let sequence = self.sequence(Vec::new());
                let fork = NewFork { keep_tokens, sequence, place: QueuePlace::AsNew };
                self.seen.forked += u32::from(self.scheduler.fork(one, fork).is_ok());
            }
            _ => {}
        }
    }

    fn step(&mut self, number: u64) {
        let inputs = PlanInputs {
            step: number,
            max_tokens: MAX_TOKENS,
            max_prefill_tokens: MAX_TOKENS,
            costs: PreemptCosts::default(),
        };
        let plan = self.scheduler.plan_step(inputs);
        let mut batch = StepBatch::default();
        batch.build(&plan, &self.scheduler);
        let handle = self.executor.launch(&batch).unwrap_or_else(|e| panic!("{e}"));
        let output = self.executor.wait(handle).unwrap_or_else(|e| panic!("{e}"));
        if self.below(25) == 0 {
            self.scheduler.abandon(&plan);
            self.seen.lost += 1;
            self.steps.push(Step::new());
            return;
        }
        let committed = self.scheduler.commit(&plan, &output.tokens, &output.not_finite);
        let told = |idx: Option<u32>| {
            let told = idx.and_then(|idx| output.logprobs.get(idx as usize)).and_then(Option::as_ref);
            told.map_or(Vec::new(), |told| {
                let top = told.top.iter().map(|(token, logprob)| (*token, logprob.to_bits()));
                [(told.token, told.logprob.to_bits())].into_iter().chain(top).collect()
            })
        };
        let rows = committed.rows.iter();
        self.steps.push(rows.map(|row| (row.request.0, row.from, row.token, told(row.logit_idx))).collect());
    }

    fn run(mut self) -> (Vec<Step>, Seen) {
        for number in 1..=NUM_STEPS {
            self.arrivals();
            self.step(number);
            for ended in self.scheduler.take_ended() {
                let is_stop = matches!(ended.outcome, Ok(kvasir::protocol::FinishReason::StopToken(_)));
                self.seen.stopped += u32::from(is_stop);
                self.ended.insert(ended.request.0, ended.tokens);
            }
            self.scheduler.drain_block_events();
        }
        let (totals, counts) = (self.scheduler.totals(), self.scheduler.kv().counts());
        self.seen.recomputed = totals.recomputed_tokens;
        self.seen.swaps = totals.swaps;
        self.seen.copied = totals.copied_blocks;
        self.seen.partial_hits = counts.partial_hit_tokens;
        (self.steps, self.seen)
    }
}

/// Runs worlds with and without; what happened in them, and how many steps were submitted ahead and in vain.
fn compare(model: &Path, host_blocks: u32, seeds: RangeInclusive<u64>) -> Option<(Seen, (u64, u64))> {
    let (mut plain, mut ahead) = (open(model, host_blocks)?, open(model, host_blocks)?);
    ahead.set_steps_ahead(StepsAhead::Always);
    let mut all = Seen::default();
    for seed in seeds {
        let (want, seen) = World::new(&mut plain, seed).run();
        let (got, seen_ahead) = World::new(&mut ahead, seed).run();
        for (number, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "seed {seed}, step {}", number + 1);
        }
        assert_eq!(seen, seen_ahead, "seed {seed}");
        all.add(&seen);
    }
    assert_eq!(plain.num_ahead(), (0, 0));
    println!("ahead, in vain: {:?}; {all:?}", ahead.num_ahead());
    Some((all, ahead.num_ahead()))
}

#[test]
fn steps_submitted_ahead_change_no_bit_of_seeded_worlds() {
    let model = core_fixtures().join("gguf/q4_1");
    let Some((seen, (num_ahead, num_in_vain))) = compare(&model, HOST_BLOCKS, 1..=4) else { return };
    assert!(num_ahead > NUM_STEPS && num_in_vain > 40, "{num_ahead} ahead, {num_in_vain} in vain");
    assert!(
        seen.stopped > 10 && seen.aborted > 2 && seen.forked > 2 && seen.lost > 10 && seen.continued > 5,
        "{seen:?}"
    );
    assert!(seen.recomputed > 0 && seen.swaps > 0 && seen.partial_hits > 0 && seen.copied > 0, "{seen:?}");
}

/// Blocks of windowed layers slide away under the rows.
#[test]
fn steps_submitted_ahead_change_no_bit_where_layers_see_a_window() {
    let model = fixtures().join("tiny/mistral_swa");
    if !model.is_dir() {
        println!("skipped: tiny/mistral_swa is in the full fixture set only");
        return;
    }
    let Some((seen, (num_ahead, num_in_vain))) = compare(&model, 0, 5..=6) else { return };
    assert!(num_ahead > NUM_STEPS / 2 && num_in_vain > 10, "{num_ahead} ahead, {num_in_vain} in vain");
    assert!(seen.stopped + seen.aborted + seen.lost > 10, "{seen:?}");
}
