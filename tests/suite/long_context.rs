//! A long context is a sequence like any other: a million positions through the scheduler, and what a step costs the host.

use kvasir::batch::{RowSampling, StepBatch};
use kvasir::executor::Executor;
use kvasir::executor::paged_fake::{Attention, FakeConfig, PagedFake, Reply, UnpagedRun};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kernels::attention_work::{AttentionWork, Take, WorkLimits};
use kvasir::kernels::step_meta;
use kvasir::kv::{KvCache, KvConfig, KvGroups};
use kvasir::protocol::{SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig,
    VictimPolicy,
};
use std::time::{Duration, Instant};

const BLOCK_SIZE: u32 = 16;
const VOCAB: u32 = 1 << 20;
const CHUNK: u32 = 8192;

const WORK: WorkLimits = WorkLimits {
    tokens_per_workgroup: 1,
    parts: 1,
    parallel: 2,
    max_slots: 4096,
    window: None,
    split: Take::WhenItPays,
    share: Take::WhenItPays,
};

struct World {
    scheduler: Scheduler,
    executor: PagedFake,
    batch: StepBatch,
    work: AttentionWork,
    words: Vec<u32>,
    output: Vec<TokenId>,
    step: u64,
    /// The shortest time that plan, batch, metadata and commit of a decode step took.
    host: Duration,
}

impl World {
    fn new(num_blocks: u32, windows: &[Option<u32>], attention: Attention) -> World {
        let config = SchedulerConfig {
            max_num_seqs: 1,
            max_tokens_per_step: CHUNK,
            max_model_len: 1 << 20,
            max_waiting: 1,
            long_prefill_cap: CHUNK,
            watermark_blocks: 0,
            max_preemptions: 1,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 1000,
            preemption: PreemptionMode::Recompute,
            victim: VictimPolicy::LastIn,
            check: CheckLevel::Cheap,
        };
        let groups = KvGroups::new(windows);
        let kv = KvCache::new(KvConfig { num_blocks, block_size: BLOCK_SIZE, groups, enable_prefix_cache: true });
        let fake = FakeConfig {
            num_blocks,
            block_size: BLOCK_SIZE,
            vocab_size: VOCAB,
            attention,
            reply: Reply::Tokens,
            step_delay: Duration::ZERO,
            kv_bytes_per_block: 0,
        };
        World {
            scheduler: Scheduler::new(config, kv),
            executor: PagedFake::new(fake).with_windows(windows),
            batch: StepBatch::default(),
            work: AttentionWork::default(),
            words: Vec::new(),
            output: Vec::new(),
            step: 0,
            host: Duration::MAX,
        }
    }

    /// Runs one request to its end; returns its cached tokens.
    fn run(&mut self, prompt: &[TokenId], max_tokens: u32) -> u32 {
        let new = NewSequence {
            id: RequestId(self.step + 1),
            prompt: prompt.to_vec(),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules::max_tokens(max_tokens),
            eos_ids: Vec::new(),
            cache_salt: 0,
            priority: 0,
            adapter: 0,
            client: 0,
        };
        self.scheduler.add(new).expect("it fits");
        self.output.clear();
        while self.scheduler.has_work() {
            self.step += 1;
            let inputs = PlanInputs {
                step: self.step,
                max_tokens: CHUNK,
                max_prefill_tokens: CHUNK,
                costs: PreemptCosts::default(),
            };
            let start = Instant::now();
            let plan = self.scheduler.plan_step(inputs);
            self.batch.build(&plan, &self.scheduler);
            self.work.plan(&self.batch, &WORK);
            step_meta::encode(&self.batch, &self.work, &mut self.words);
            let planned = start.elapsed();
            let handle = self.executor.launch(&self.batch).expect("a valid batch");
            let result = self.executor.wait(handle).expect("it runs");
            let start = Instant::now();
            let committed = self.scheduler.commit(&plan, &result.tokens, &result.not_finite);
            self.output.extend(committed.rows.iter().filter_map(|row| row.token));
            self.scheduler.drain_block_events().for_each(drop);
            if plan.num_tokens() == 1 {
                self.host = self.host.min(planned + start.elapsed());
            }
        }
        self.scheduler.take_ended().pop().expect("one request ended").usage.cached_tokens
    }
}

fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect()
}

fn alone(prompt: &[TokenId], max_tokens: usize, windows: &[Option<u32>]) -> Vec<TokenId> {
    let mut run = UnpagedRun::with_windows(windows);
    prompt.iter().for_each(|token| run.push(*token));
    let mut output = Vec::new();
    while output.len() < max_tokens {
        let token = run.draw(RowSampling::new(&SamplingParams::greedy(), 0), &[], &[], VOCAB);
        run.push(token);
        output.push(token);
    }
    output
}

#[test]
fn a_million_positions_are_one_sequence() {
    let prompt = prompt(1_000_000);
    for windows in [&[None][..], &[Some(1000), None]] {
        let mut world = World::new(1 + 62_501 + 700, windows, Attention::Every);
        assert_eq!(world.run(&prompt, 20), 0);
        assert!(world.output == alone(&prompt, 20, windows), "{windows:?}");
        let counts = world.scheduler.kv().counts();
        assert_eq!(counts.free + counts.cached_idle, counts.total);
        let slid = world.scheduler.totals().slid_blocks;
        assert_eq!(slid > 0, windows.len() == 2, "{slid} blocks slid out");
    }
}

#[test]
fn a_windowed_model_reads_a_million_positions_in_a_small_pool() {
    let prompt = prompt(1_000_000);
    let windows = [Some(1000)];
    // 1,000 + 8,192 - 1 positions lie in at most 576 blocks.
    let mut world = World::new(1 + 576, &windows, Attention::Every);
    assert_eq!(world.run(&prompt, 20), 0);
    assert!(world.output == alone(&prompt, 20, &windows));
    assert!(world.scheduler.totals().slid_blocks > 61_000);
    // Its last blocks are idle, and the names of those before them are known.
    let again = world.run(&prompt[..999_990], 4);
    assert!(again > 990_000, "{again} tokens were found");
    assert!(world.output == alone(&prompt[..999_990], 4, &windows));
}

#[test]
fn what_a_decode_step_costs_the_host_hardly_grows_with_its_position() {
    let mut times = Vec::new();
    for len in [1024, 131_072] {
        let mut world = World::new(1 + 8192 + 8, &[None], Attention::Last);
        world.run(&prompt(len - 50), 50);
        times.push(world.host);
        println!("{len} positions: {:?} of host time per decode step", world.host);
    }
    // The block table of 8,192 entries is copied twice; nothing else may grow with the context.
    assert!(times[1] < times[0] + Duration::from_millis(1), "{times:?}");
}
