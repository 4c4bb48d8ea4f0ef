//! Swapped, demoted and restarted on the real executors: the same bits as alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvasir::batch::{StepBatch, Want};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::{EngineOptions, LoadRequest, ModelSource};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::executor::wgpu_executor::{ExecutorConfig, WgpuExecutor};
use kvasir::gpu::{Gpu, GpuError, GpuRequest};
use kvasir::ids::RequestId;
use kvasir::kernels::kv_layout::KvFormat;
use kvasir::kv::{CachedContent, KvCache, KvConfig};
use kvasir::model::Model;
use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig,
    VictimPolicy,
};

use crate::support::{core_fixtures, require_gpu};

const BLOCK_SIZE: u32 = 4;
const NUM_HOST_BLOCKS: u32 = 64;

fn tiny_llama() -> PathBuf {
    core_fixtures().join("tiny/llama")
}

/// The GPU executor on the tiny model, or `None` (with a line printed) where there is no adapter.
fn on_gpu(num_blocks: u32, precise: bool) -> Option<Box<dyn Executor>> {
    let gpu = match Gpu::open(&GpuRequest { backend: None, adapter: None, floor: false, checked_shaders: false }) {
        Ok(gpu) => gpu,
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let model = Model::open(&tiny_llama()).unwrap_or_else(|e| panic!("{e}"));
    let cfg = ExecutorConfig {
        num_blocks,
        block_size: BLOCK_SIZE,
        max_tokens_per_step: 64,
        max_num_seqs: 4,
        max_model_len: 200,
        precise,
        kv: if precise { KvFormat::F32 } else { KvFormat::F16 },
        canary: false,
    };
    let executor = WgpuExecutor::new(gpu, &model, cfg, &mut |_| true).unwrap_or_else(|e| panic!("{e}"));
    Some(Box::new(executor.with_host_blocks(NUM_HOST_BLOCKS)))
}

fn on_cpu(num_blocks: u32) -> Box<dyn Executor> {
    let model = Model::open(&tiny_llama()).unwrap_or_else(|e| panic!("{e}"));
    let executor = ReferenceExecutor::new(&model, ReferenceConfig { num_blocks, block_size: BLOCK_SIZE });
    Box::new(executor.unwrap_or_else(|e| panic!("{e}")).with_host_blocks(NUM_HOST_BLOCKS))
}

/// Logits of each request by position.
type Logits = BTreeMap<(u64, u32), Vec<u32>>;

/// The scheduler on an executor whose logits come back with every step.
struct Drive {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    step: u64,
    logits: Logits,
}

impl Drive {
    fn new(executor: Box<dyn Executor>, preemption: PreemptionMode) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 4,
            max_tokens_per_step: 64,
            max_model_len: 200,
            max_waiting: 100,
            long_prefill_cap: 7,
            watermark_blocks: 0,
            max_preemptions: 100,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption,
            check: CheckLevel::Full,
        };
        let (num_blocks, block_size) = (executor.num_blocks(), executor.block_size());
        let kv = KvCache::new(KvConfig { num_blocks, block_size, enable_prefix_cache: true });
        let scheduler = Scheduler::new(config, kv.with_host_pool(executor.num_host_blocks(), true));
        Drive { scheduler, executor, step: 0, logits: Logits::new() }
    }

    fn add(&mut self, id: u64, prompt: &[u32], max_tokens: u32) {
        let new = NewSequence {
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
        };
        self.scheduler.add(new).expect("it fits");
    }

    fn run_to_end(&mut self) {
        while self.scheduler.has_work() {
            self.step += 1;
            let costs = PreemptCosts::default();
            let plan =
                self.scheduler.plan_step(PlanInputs { step: self.step, max_tokens: 64, max_prefill_tokens: 64, costs });
            let mut batch = StepBatch::default();
            batch.build(&plan, &self.scheduler);
            batch.want = Want::Logits;
            let handle = self.executor.launch(&batch).expect("launched");
            let logits = self.executor.wait(handle).expect("ran").logits.unwrap_or_default();
            let mut tokens = Vec::new();
            let rows = logits.chunks_exact(self.executor.vocab_size() as usize);
            for (row, planned) in rows.zip(plan.rows.iter().filter(|row| row.wants_logits)) {
                let best = row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best });
                tokens.push(best as u32);
                let bits = row.iter().map(|v| v.to_bits()).collect();
                self.logits.insert((planned.request.0, planned.to()), bits);
            }
            self.scheduler.commit(&plan, &tokens, &vec![false; tokens.len()]);
            self.scheduler.drain_block_events();
        }
    }
}

fn prompt(len: u32, tag: u32) -> Vec<u32> {
    (0..len).map(|i| 3 + (i * 17 + tag * 29) % 200).collect()
}

/// Two requests, each alone in a large pool.
fn alone(executor: Box<dyn Executor>) -> Logits {
    let mut drive = Drive::new(executor, PreemptionMode::Recompute);
    for id in [1, 2] {
        drive.add(id, &prompt(21, id as u32), 24);
        drive.run_to_end();
    }
    drive.logits
}

/// The same two in a pool that holds one and a half of them.
fn crowded(executor: Box<dyn Executor>, preemption: PreemptionMode) -> Drive {
    let mut drive = Drive::new(executor, preemption);
    for id in [1, 2] {
        drive.add(id, &prompt(21, id as u32), 24);
    }
    drive.run_to_end();
    assert!(drive.scheduler.totals().preemptions > 0, "the pool is too large");
    drive
}

fn check_preemption(open: &dyn Fn(u32) -> Option<Box<dyn Executor>>) {
    let Some(executor) = open(64) else { return };
    let want = alone(executor);
    for mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let drive = crowded(open(18).expect("opened before"), mode);
        let totals = drive.scheduler.totals();
        assert_eq!(totals.swaps > 0, mode == PreemptionMode::Swap, "{totals:?}");
        assert!(mode == PreemptionMode::Recompute || totals.recomputed_tokens == 0 && totals.restored_tokens > 0);
        assert!(drive.logits == want, "{mode:?} changed bits");
    }
}

#[test]
fn preempted_requests_have_the_logits_of_those_that_were_not() {
    for precise in [false, true] {
        check_preemption(&|num_blocks| on_gpu(num_blocks, precise));
    }
}

#[test]
fn preempted_requests_have_the_logits_of_those_that_were_not_on_the_reference() {
    check_preemption(&|num_blocks| Some(on_cpu(num_blocks)));
}

#[test]
fn evicted_prefixes_come_back_from_host_memory_with_the_same_bits() {
    let Some(executor) = on_gpu(64, false) else { return };
    let want = alone(executor);
    let mut drive = Drive::new(on_gpu(18, false).expect("opened before"), PreemptionMode::Auto);
    // The third fills the pool; what the first left goes to host memory and is found there.
    drive.add(1, &prompt(21, 1), 24);
    drive.run_to_end();
    drive.add(3, &prompt(50, 3), 10);
    drive.run_to_end();
    drive.logits.clear();
    drive.add(1 << 32, &prompt(21, 1), 24);
    drive.run_to_end();
    let counts = drive.scheduler.kv().counts();
    assert!(counts.host_hit_tokens >= 8, "most of it was evicted: {counts:?}");
    assert_eq!(counts.hit_tokens, 20, "and all full blocks of the prompt were found");
    for ((_, position), bits) in &drive.logits {
        assert!(want[&(1, *position)] == *bits, "position {position} changed bits");
    }
    assert_eq!(drive.logits.len(), 24);
}

#[test]
fn bytes_in_host_memory_restart_on_another_executor() {
    let Some(executor) = on_gpu(64, false) else { return };
    let mut first = Drive::new(executor, PreemptionMode::Auto);
    first.add(1, &prompt(41, 1), 12);
    first.run_to_end();
    // A step that only copies, as an idle engine makes one.
    let plan = first.scheduler.plan_save(first.step + 1, 100, &|_| false);
    assert_eq!(plan.swap_out.len(), 13, "41 + 11 computed tokens fill 13 blocks");
    let mut batch = StepBatch::default();
    batch.build(&plan, &first.scheduler);
    let handle = first.executor.launch(&batch).expect("launched");
    first.executor.wait(handle).expect("ran");
    first.scheduler.commit(&plan, &[], &[]);
    let saved: Vec<(CachedContent, Vec<u8>)> = first
        .scheduler
        .kv()
        .host_contents()
        .map(|content| {
            let bytes = first.executor.read_host(content.host).expect("stored").to_vec();
            (content, bytes)
        })
        .collect();
    let mut second = Drive::new(on_gpu(40, false).expect("opened before"), PreemptionMode::Auto);
    for (content, bytes) in saved {
        let slot = second.scheduler.adopt(&content).expect("there is room");
        second.executor.write_host(slot, &bytes).expect("a whole block");
        assert!(second.scheduler.adopt(&content).is_none(), "it is there already");
    }
    second.add(1, &prompt(41, 1), 12);
    second.run_to_end();
    assert_eq!(second.scheduler.kv().counts().disk_hit_tokens, 40);
    assert!(second.logits == first.logits, "a restart changed bits");
}

fn options(cache: Option<&Path>) -> EngineOptions {
    let args = kvasir::config::EngineArgs {
        num_gpu_blocks_override: Some(kvasir::config::HumanInt(40)),
        prefix_cache_dir: cache.map(Path::to_path_buf),
        check_invariants: true,
        ..kvasir::config::EngineArgs::default()
    };
    args.resolve(&kvasir::config::EngineSection::default(), Path::new("unused"), Some(1)).expect("valid options")
}

/// Tokens and log-probabilities (as bits) that a fresh engine gives, and the tokens that it found on disk.
fn generate(options: EngineOptions, prompts: &[Vec<u32>]) -> (Vec<Vec<(u32, u32)>>, u64) {
    let engine = EngineHandle::start(options.clone());
    engine.load(LoadRequest { source: ModelSource::Path(tiny_llama()), options });
    engine.wait_for_model(|_| {}).unwrap_or_else(|e| panic!("{e:?}"));
    let request = |prompt: &Vec<u32>| GenerateRequest {
        owner: OwnerTag::default(),
        prompt: prompt.clone(),
        sampling: SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() },
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(20) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    let runs: Vec<_> = prompts.iter().map(|prompt| engine.submit(request(prompt)).expect("taken")).collect();
    let mut heard = Vec::new();
    for run in runs {
        let mut tokens = Vec::new();
        while !run.is_finished() {
            match run.recv_timeout(Duration::from_millis(50)) {
                Some(EngineEvent::Text { logprobs, .. }) => {
                    tokens.extend(logprobs.into_iter().map(|l| (l.token, l.logprob.to_bits())));
                }
                Some(EngineEvent::Failed { error }) => panic!("{error}"),
                _ => {}
            }
        }
        heard.push(tokens);
    }
    let records = engine.telemetry().records_after(None).0;
    let disk_hit_tokens = records.last().map_or(0, |record| record.kv.disk_hit_tokens);
    (heard, disk_hit_tokens)
}

#[test]
fn a_new_engine_starts_warm_from_the_folder_of_the_last_one() {
    if on_gpu(18, false).is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let prompts = [prompt(70, 1), prompt(50, 2)];
    let (want, _) = generate(options(None), &prompts);
    assert!(want.iter().all(|tokens| tokens.len() == 20), "{want:?}");
    let (cold, found) = generate(options(Some(dir.path())), &prompts);
    assert_eq!((&cold, found), (&want, 0));
    let (warm, found) = generate(options(Some(dir.path())), &prompts);
    assert_eq!(found, 64 + 48, "every full block of both prompts was read from disk");
    assert!(warm == want, "a warm start changed tokens or log-probabilities");
    damage_every_file(dir.path());
    let (mended, found) = generate(options(Some(dir.path())), &prompts);
    assert_eq!((&mended, found), (&want, 0), "damaged files are skipped");
}

fn damage_every_file(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            damage_every_file(&path);
            continue;
        }
        let mut bytes = std::fs::read(&path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&path, bytes).expect("written");
    }
}
