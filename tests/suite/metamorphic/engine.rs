//! The matrix on the whole engine: submitted, batched, streamed. A request has the tokens and the log-probabilities, bit
//! for bit, that it has alone.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::EngineHandle;
use kvasir::engine::handle::Run;
use kvasir::engine::options::{EngineOptions, KvCacheDtype, LoadRequest, ModelSource, PreemptionMode, StepLoop};
use kvasir::gpu::Gpu;
use kvasir::ids::RequestId;
use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, SamplingParams, StopRules, Usage};
use kvasir::telemetry::{EngineSnapshot, RowKind};

use super::tokens;
use crate::support::{core_fixtures, require_gpu};

/// Of one choice: each token with its log-probability and those of its alternatives, as bits.
type Heard = Vec<(u32, u32, Vec<(u32, u32)>)>;

/// What a run gave: its choices, and what it used.
#[derive(Clone, Debug, PartialEq)]
struct Answer {
    choices: BTreeMap<u32, Heard>,
    usage: Usage,
}

/// A model with a kind of cache.
#[derive(Clone, Copy, Debug)]
struct Column {
    family: &'static str,
    kv: KvCacheDtype,
}

/// Each family and each format; the matrix of logits has them crossed.
const COLUMNS: [Column; 2] =
    [Column { family: "llama", kv: KvCacheDtype::F16 }, Column { family: "qwen3_bf16", kv: KvCacheDtype::Int8 }];

/// Room for everything, nothing found again.
fn options(column: Column) -> EngineOptions {
    let args = EngineArgs { check_invariants: true, ..EngineArgs::default() };
    let options = args.resolve(&EngineSection::default(), Path::new("unused"), Some(1)).expect("valid options");
    EngineOptions {
        kv_cache_dtype: column.kv,
        num_gpu_blocks_override: Some(200),
        max_model_len: Some(304),
        block_size: 8,
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        adaptive_budget: false,
        prefix_caching: false,
        step_loop: StepLoop::Sync,
        ..options
    }
}

fn request(prompt: Vec<u32>, max_tokens: u32, sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest {
        owner: OwnerTag::default(),
        prompt,
        sampling: SamplingParams { logprobs: Some(5), ..sampling },
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

/// Greedy over two ranges of keys, drawn, penalised, and several choices of one prompt.
fn requests() -> Vec<GenerateRequest> {
    let drawn = SamplingParams { temperature: 0.9, top_p: 0.95, seed: Some(7), ..SamplingParams::greedy() };
    let penalised = SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.5, seed: Some(8), ..drawn.clone() };
    let several = Decoding::Sample { n: 3, best_of: 3 };
    vec![
        request(tokens(262, 1), 12, SamplingParams::greedy()),
        request(tokens(21, 2), 24, drawn.clone()),
        request(tokens(30, 3), 20, penalised),
        GenerateRequest { decoding: several, ..request(tokens(19, 4), 16, drawn) },
    ]
}

fn start(column: Column, options: EngineOptions) -> EngineHandle {
    let engine = EngineHandle::start(options.clone());
    let path = core_fixtures().join("tiny").join(column.family);
    engine.load(LoadRequest { source: ModelSource::Path(path), options });
    engine.wait_for_model(|_| {}).unwrap_or_else(|e| panic!("{e:?}"));
    engine
}

fn hear(run: &Run) -> Answer {
    let mut choices: BTreeMap<u32, Heard> = BTreeMap::new();
    loop {
        match run.recv_timeout(Duration::from_secs(120)).expect("the engine goes on") {
            EngineEvent::Text { choice, logprobs, .. } => {
                let bits = |top: Vec<(u32, f32)>| top.into_iter().map(|(t, l)| (t, l.to_bits())).collect();
                let heard = logprobs.into_iter().map(|l| (l.token, l.logprob.to_bits(), bits(l.top)));
                choices.entry(choice).or_default().extend(heard);
            }
            EngineEvent::Finished { usage, .. } => return Answer { choices, usage },
            EngineEvent::Failed { error } => panic!("{error}"),
            _ => {}
        }
    }
}

/// All requests at once: they are taken between two steps.
fn together(engine: &EngineHandle, requests: &[GenerateRequest]) -> Vec<Answer> {
    engine.pause();
    let runs: Vec<Run> = requests.iter().map(|r| engine.submit(r.clone()).expect("taken")).collect();
    engine.resume();
    runs.iter().map(hear).collect()
}

fn one_by_one(engine: &EngineHandle, requests: &[GenerateRequest]) -> Vec<Answer> {
    requests.iter().map(|r| hear(&engine.submit(r.clone()).expect("taken"))).collect()
}

fn idle(engine: &EngineHandle) -> std::sync::Arc<EngineSnapshot> {
    assert!(engine.wait_idle(Duration::from_secs(60)), "all runs have ended");
    engine.telemetry().snapshot()
}

/// Prompt rows of a request, over all steps.
fn num_chunks(engine: &EngineHandle, id: RequestId) -> u32 {
    let records = engine.telemetry().records_after(None).0;
    let rows = records.iter().flat_map(|record| &record.rows);
    rows.filter(|row| row.request == id && matches!(row.kind, RowKind::Prefill { .. })).count() as u32
}

fn assert_same(got: &[Answer], want: &[Answer], what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        for (choice, want) in &want.choices {
            let got = &got.choices[choice];
            let words = |heard: &Heard| heard.iter().map(|(token, ..)| *token).collect::<Vec<_>>();
            assert_eq!(words(got), words(want), "{what}: request {i}, choice {choice}: other tokens");
            assert!(got == want, "{what}: request {i}, choice {choice}: log-probabilities have other bits");
        }
    }
}

/// Requests that came to what they come to alone, on an engine with these options; where steps are submitted ahead, which
/// they are not alone.
struct World<'a> {
    column: Column,
    requests: &'a [GenerateRequest],
    alone: &'a [Answer],
}

impl World<'_> {
    fn check(
        &self,
        what: &str,
        change: impl FnOnce(&mut EngineOptions),
        run: fn(&EngineHandle, &[GenerateRequest]) -> Vec<Answer>,
        took_place: impl FnOnce(&EngineHandle, &EngineSnapshot, &[Answer]),
    ) {
        println!("{:?}, {what}", self.column);
        let mut options = EngineOptions { step_loop: StepLoop::Ahead, ..options(self.column) };
        change(&mut options);
        let has_canary = options.kv_canary;
        let engine = start(self.column, options);
        let answers = run(&engine, self.requests);
        let snapshot = idle(&engine);
        let totals = engine.step_totals();
        assert_eq!(totals.steps_ahead > 0, !has_canary, "{what}: {totals:?}");
        assert_same(&answers, self.alone, &format!("{:?}, {what}", self.column));
        took_place(&engine, &snapshot, &answers);
        engine.shutdown();
    }
}

#[test]
fn log_probabilities_are_the_same_bits_in_every_circumstance() {
    if Gpu::adapters().is_empty() && !require_gpu() {
        println!("skipped: no adapter");
        return;
    }
    for column in COLUMNS {
        let engine = start(column, options(column));
        let requests = requests();
        let alone = one_by_one(&engine, &requests);
        engine.shutdown();
        assert!(alone.iter().all(|answer| answer.usage.cached_tokens == 0), "{alone:?}");
        assert_eq!(alone[3].choices.len(), 3);
        assert_ne!(alone[3].choices[&0], alone[3].choices[&1], "choices are drawn apart");
        let world = World { column, requests: &requests, alone: &alone };
        cut_otherwise(&world);
        found_again(&world);
        gave_way(&world);
        forked(&world);
        restarted(&world);
    }
}

fn cut_otherwise(world: &World<'_>) {
    world.check(
        "batched",
        |_| {},
        together,
        |engine, _, _| {
            let records = engine.telemetry().records_after(None).0;
            assert!(
                records.iter().any(|record| record.rows.len() >= 6),
                "four requests, one of them with three choices"
            );
        },
    );
    for chunk in [1, 7, 64] {
        let change = |options: &mut EngineOptions| options.long_prefill_token_threshold = chunk;
        world.check(&format!("chunks of {chunk}"), change, together, |engine, _, _| {
            assert_eq!(num_chunks(engine, RequestId(1)), 262u32.div_ceil(chunk));
        });
    }
    let change = |options: &mut EngineOptions| {
        options.block_size = 32;
        options.kv_canary = true;
    };
    world.check("blocks of 32, with the canary", change, together, |_, snapshot, _| {
        assert_eq!(snapshot.block_size, 32);
    });
}

fn found_again(world: &World<'_>) {
    let twice = |engine: &EngineHandle, requests: &[GenerateRequest]| {
        one_by_one(engine, requests);
        together(engine, requests)
    };
    world.check(
        "warm",
        |options| options.prefix_caching = true,
        twice,
        |_, snapshot, answers| {
            let cached: Vec<u32> = answers.iter().map(|answer| answer.usage.cached_tokens).collect();
            assert_eq!(cached, [261, 20, 29, 18], "all but the last token");
            assert!(snapshot.kv.partial_hit_tokens > 0);
        },
    );
    let crowded = |options: &mut EngineOptions| {
        options.prefix_caching = true;
        options.num_gpu_blocks_override = Some(46);
    };
    world.check("evicted to host memory", crowded, twice, |_, snapshot, _| {
        assert!(snapshot.kv.host_hit_tokens > 0, "{:?}", snapshot.kv);
    });
}

fn gave_way(world: &World<'_>) {
    for (mode, prefix_caching) in
        [(PreemptionMode::Recompute, false), (PreemptionMode::Swap, false), (PreemptionMode::Swap, true)]
    {
        let change = |options: &mut EngineOptions| {
            options.num_gpu_blocks_override = Some(47);
            options.preemption = mode;
            options.prefix_caching = prefix_caching;
            // Marks travel with what is swapped: nothing is called damaged.
            options.kv_canary = prefix_caching || mode == PreemptionMode::Swap;
        };
        world.check(&format!("{mode:?}, prefix cache {prefix_caching}"), change, together, |_, snapshot, _| {
            assert!(snapshot.preemptions_total > 0);
            assert_eq!(snapshot.swaps_total > 0, mode == PreemptionMode::Swap);
            let recomputed = snapshot.recomputed_tokens_total;
            assert!(if mode == PreemptionMode::Recompute { recomputed > 0 } else { prefix_caching || recomputed == 0 });
        });
    }
}

/// The engine is dropped; a new one on the same folder finds what the last one left, unless the files are damaged.
fn restarted(world: &World<'_>) {
    let dir = tempfile::tempdir().expect("a folder");
    let change = |options: &mut EngineOptions| {
        options.prefix_caching = true;
        options.prefix_cache_dir = Some(dir.path().to_path_buf());
    };
    // Whole blocks only, and the last token is computed.
    let whole: u64 = world.requests.iter().map(|r| (r.prompt.len() as u64 - 1) / 8 * 8).sum();
    for (what, found) in [("first start", 0), ("warm start", whole)] {
        world.check(what, change, together, |_, snapshot, _| assert_eq!(snapshot.kv.disk_hit_tokens, found, "{what}"));
    }
    damage_every_file(dir.path());
    world.check("damaged files", change, together, |_, snapshot, _| assert_eq!(snapshot.kv.disk_hit_tokens, 0));
    let by_another_word = |options: &mut EngineOptions| {
        change(options);
        if options.kv_cache_dtype == KvCacheDtype::F16 {
            options.kv_cache_dtype = KvCacheDtype::Auto;
        }
    };
    world.check("start after the damage", by_another_word, together, |_, snapshot, _| {
        assert_eq!(snapshot.kv.disk_hit_tokens, whole, "also where the format has another word");
    });
    if world.column.kv != KvCacheDtype::F16 {
        return;
    }
    let with_canary = |options: &mut EngineOptions| {
        change(options);
        options.kv_canary = true;
    };
    for (what, found) in [("first start with the canary", 0), ("warm start with the canary", whole)] {
        let took_place = |_: &EngineHandle, snapshot: &EngineSnapshot, _: &[Answer]| {
            assert_eq!(snapshot.kv.disk_hit_tokens, found, "{what}");
        };
        world.check(what, with_canary, together, took_place);
    }
}

fn damage_every_file(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            damage_every_file(&path);
            continue;
        }
        if path.extension().is_none_or(|x| x != "kv") {
            continue;
        }
        let mut bytes = std::fs::read(&path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&path, bytes).expect("written");
    }
}

/// A branch from the middle of a live request, and from one that has ended.
fn forked(world: &World<'_>) {
    let engine = start(world.column, EngineOptions { prefix_caching: true, ..options(world.column) });
    let parent = &world.requests[1];
    let own = [5u32, 6];
    let known: Vec<u32> = world.alone[1].choices[&0].iter().map(|(token, ..)| *token).collect();
    let whole = [&parent.prompt[..], &known[..5], &own].concat();
    let branch = |prompt: Vec<u32>| GenerateRequest { prompt, ..request(Vec::new(), 9, parent.sampling.clone()) };
    let plain = start(world.column, options(world.column));
    let want = one_by_one(&plain, &[branch(whole)]);
    plain.shutdown();
    let long = StopRules { max_tokens: Some(200), ..parent.stop.clone() };
    let run = engine.submit(GenerateRequest { stop: long, ..parent.clone() }).expect("taken");
    let keep = parent.prompt.len() as u32 + 5;
    let mut num_heard = 0;
    while num_heard < 6 {
        match run.recv_timeout(Duration::from_secs(120)).expect("the engine goes on") {
            EngineEvent::Text { tokens, .. } => num_heard += tokens.len(),
            EngineEvent::Failed { error } => panic!("{error}"),
            _ => {}
        }
    }
    let live = hear(&engine.fork(run.id(), keep, branch(own.to_vec())).expect("taken"));
    assert!(!engine.telemetry().snapshot().requests.iter().any(|r| r.id == run.id() && r.finish.is_some()));
    hear(&run);
    let ended = hear(&engine.fork(run.id(), keep, branch(own.to_vec())).expect("taken"));
    for (answer, what) in [(&live, "branch of a live request"), (&ended, "branch of one that ended")] {
        assert!(answer.usage.cached_tokens >= 24, "{what}: {answer:?}");
        assert_same(std::slice::from_ref(answer), &want, &format!("{:?}, {what}", world.column));
    }
    engine.shutdown();
}
