//! Models whose layers see windows: the scheduler frees what slid out, and the logits stay those of a model that keeps
//! everything.

use crate::support::{core_fixtures, open_gpu, read_json};
use kvasir::batch::{StepBatch, Want};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::executor::wgpu_executor::{ExecutorConfig, LoraLimits, WgpuExecutor};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kernels::kv_layout::KvFormat;
use kvasir::kv::{KvCache, KvConfig, KvGroups};
use kvasir::model::Model;
use kvasir::protocol::{SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig,
    VictimPolicy,
};
use std::path::Path;

const BLOCK_SIZE: u32 = 4;
const NUM_BLOCKS: u32 = 200;
const PROMPT: usize = 41;
const LEN: usize = 150;

/// What came of one sequence: the logits after each known position from the prompt's last on.
type Rows = Vec<Vec<f32>>;

struct Outcome {
    rows: Vec<Rows>,
    slid_blocks: u64,
    cached_tokens: u32,
    /// The most blocks that one sequence held.
    most_held: u32,
}

fn limits(chunk: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 4,
        max_tokens_per_step: 70,
        max_model_len: 400,
        max_waiting: 10,
        long_prefill_cap: chunk,
        watermark_blocks: 0,
        max_preemptions: 100,
        queue_policy: QueuePolicy::Fcfs,
        aging_steps: 1000,
        preemption: PreemptionMode::Recompute,
        victim: VictimPolicy::LastIn,
        check: CheckLevel::Full,
    }
}

/// Lets the scheduler compute these sequences, each a prompt and the tokens that are "sampled" after it. All of a round
/// arrive together, a round after the one before has ended.
fn drive(executor: &mut dyn Executor, chunk: u32, rounds: &[&[Vec<TokenId>]]) -> Outcome {
    let groups = KvGroups::new(&executor.windows());
    let config = KvConfig { num_blocks: NUM_BLOCKS, block_size: BLOCK_SIZE, groups, enable_prefix_cache: true };
    let mut scheduler = Scheduler::new(limits(chunk), KvCache::new(config));
    let mut sequences: Vec<&Vec<TokenId>> = Vec::new();
    let mut outcome = Outcome { rows: Vec::new(), slid_blocks: 0, cached_tokens: 0, most_held: 0 };
    let (mut batch, mut step) = (StepBatch::default(), 0);
    for round in rounds {
        for tokens in *round {
            let new = NewSequence {
                id: RequestId(sequences.len() as u64 + 1),
                prompt: tokens[..PROMPT].to_vec(),
                sampling: SamplingParams::greedy(),
                seed: 0,
                stop: StopRules::max_tokens((tokens.len() - PROMPT) as u32),
                eos_ids: Vec::new(),
                cache_salt: 0,
                priority: 0,
                adapter: 0,
                client: 0,
            };
            scheduler.add(new).expect("it fits");
            sequences.push(tokens);
            outcome.rows.push(Vec::new());
        }
        while scheduler.has_work() {
            step += 1;
            let plan = scheduler.plan_step(PlanInputs {
                step,
                max_tokens: 70,
                max_prefill_tokens: 70,
                costs: PreemptCosts::default(),
            });
            batch.build(&plan, &scheduler);
            batch.want = Want::Logits;
            let handle = executor.launch(&batch).expect("a valid batch");
            let output = executor.wait(handle).expect("the step runs");
            let logits = output.logits.expect("logits are wanted");
            let mut logits = logits.chunks_exact(executor.vocab_size() as usize);
            let mut sampled = Vec::new();
            for row in plan.rows.iter().filter(|row| row.wants_logits) {
                let i = row.request.idx() - 1;
                outcome.rows[i].push(logits.next().expect("a row of logits").to_vec());
                sampled.push(sequences[i].get(row.to() as usize).copied().unwrap_or(0));
            }
            let held = scheduler.running().map(|seq| seq.table().num_blocks()).max();
            outcome.most_held = outcome.most_held.max(held.unwrap_or(0));
            scheduler.commit(&plan, &sampled, &vec![false; sampled.len()]);
            for ended in scheduler.take_ended() {
                outcome.cached_tokens += ended.usage.cached_tokens;
            }
            scheduler.drain_block_events().for_each(drop);
        }
    }
    outcome.slid_blocks = scheduler.totals().slid_blocks;
    outcome
}

fn tokens(seed: u64, len: usize) -> Vec<TokenId> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 512) as TokenId
    };
    (0..len).map(|_| next()).collect()
}

/// The model of a fixture, with these layer types and window written into its config.
fn with_layer_types(name: &str, types: &[&str], window: u32) -> Model {
    let (from, to) = (core_fixtures().join("tiny").join(name), tempfile::tempdir().expect("a temporary folder"));
    for entry in std::fs::read_dir(&from).expect("a fixture") {
        let path = entry.expect("readable entry").path();
        std::fs::copy(&path, to.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    let mut config = read_json(&from.join("config.json"));
    config["use_sliding_window"] = true.into();
    config["sliding_window"] = window.into();
    config["layer_types"] = types.into();
    std::fs::write(to.path().join("config.json"), config.to_string()).expect("written");
    Model::open(to.path()).unwrap_or_else(|e| panic!("{e}"))
}

fn on_gpu(model: &Model, precise: bool) -> Option<WgpuExecutor> {
    let gpu = open_gpu()?;
    let cfg = ExecutorConfig {
        num_blocks: NUM_BLOCKS,
        block_size: BLOCK_SIZE,
        max_tokens_per_step: 70,
        max_num_seqs: 4,
        max_model_len: 400,
        precise,
        kv: if precise { KvFormat::F32 } else { KvFormat::F16 },
        canary: false,
        lora: LoraLimits::NONE,
    };
    Some(WgpuExecutor::new(gpu, model, cfg, &mut |_| true).unwrap_or_else(|e| panic!("{e}")))
}

/// Largest difference, relative to the largest logit.
fn difference(got: &Rows, want: &Rows) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().flatten().fold(0.0f32, |top, x| top.max(x.abs()));
    let pairs = got.iter().flatten().zip(want.iter().flatten());
    pairs.fold(0.0f32, |top, (a, b)| top.max((a - b).abs())) / largest
}

/// `held` is the most blocks that a sequence may hold when prompts come in chunks of 7.
fn check(model: &Model, windows: &[Option<u32>], held: u32) {
    let (first, second) = (tokens(1, LEN), tokens(2, LEN));
    let config = ReferenceConfig { num_blocks: NUM_BLOCKS, block_size: BLOCK_SIZE };
    let mut reference = ReferenceExecutor::new(model, config).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(reference.windows(), windows);
    let alone: &[Vec<TokenId>] = std::slice::from_ref(&first);
    let want = drive(&mut reference, 7, &[alone]);
    assert!(want.slid_blocks > 0 && want.most_held <= held, "{} blocks held, {held} allowed", want.most_held);
    let Some(mut gpu) = on_gpu(model, true) else { return };
    let got = drive(&mut gpu, 7, &[alone]);
    assert_eq!((got.slid_blocks, got.most_held), (want.slid_blocks, want.most_held));
    let difference = difference(&got.rows[0], &want.rows[0]);
    assert!(difference <= 1e-4, "logits differ by {difference}");
    for precise in [true, false] {
        let Some(mut gpu) = on_gpu(model, precise) else { return };
        let got = if precise { got.rows[0].clone() } else { drive(&mut gpu, 7, &[alone]).rows.swap_remove(0) };
        for chunk in [1, 64] {
            let batched = drive(&mut gpu, chunk, &[&[second.clone(), first.clone()]]);
            assert!(batched.rows[1] == got, "chunks of {chunk} beside another sequence give other bits");
        }
        let warm = drive(&mut gpu, 64, &[alone, alone]);
        assert!(warm.cached_tokens > 0, "the second run finds the prompt");
        assert!(warm.rows[0] == got && warm.rows[1] == got, "a prefix hit gives other bits");
    }
}

#[test]
fn a_model_of_windowed_layers_forgets_and_computes_the_same() {
    let model = Model::open(&core_fixtures().join("tiny/mistral_swa")).unwrap_or_else(|e| panic!("{e}"));
    // 16 + 7 - 1 positions lie in at most 7 blocks of 4.
    check(&model, &[Some(16)], 7);
}

#[test]
fn full_and_windowed_layers_of_one_model_have_tables_of_their_own() {
    let (windowed, full) = ("sliding_attention", "full_attention");
    let model = with_layer_types("qwen3_bf16", &[windowed, full, windowed], 10);
    // Groups of one layer. 150 positions lie in 38 blocks, 10 + 7 - 1 in at most 5.
    check(&model, &[Some(10), Some(10), None], 38 + 5 + 5);
}

#[test]
fn a_long_output_needs_no_more_than_its_window() {
    let model = Model::open(Path::new(&core_fixtures().join("tiny/mistral_swa"))).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.spec().windows, [Some(16); 3]);
    let config = ReferenceConfig { num_blocks: NUM_BLOCKS, block_size: BLOCK_SIZE };
    let mut reference = ReferenceExecutor::new(&model, config).unwrap_or_else(|e| panic!("{e}"));
    let outcome = drive(&mut reference, 1, &[&[tokens(3, 300)]]);
    assert_eq!(outcome.most_held, 5, "16 positions lie in at most 5 blocks of 4");
    assert_eq!(outcome.slid_blocks, (299 + 1 - 16) / 4);
}
