//! The KV canary on the real engine: damage is found, told to whom it concerns and to nobody else; health is not called
//! damage.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::EngineHandle;
use kvasir::engine::handle::Run;
use kvasir::engine::options::{EngineOptions, LoadRequest, ModelSource};
use kvasir::gpu::Gpu;
use kvasir::ids::{BlockId, RequestId};
use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, RunError, SamplingParams, StopRules};
use kvasir::telemetry::RequestInfo;

use crate::support::{core_fixtures, require_gpu};

/// A tiny model with the canary on; `None`, with a line printed, where there is no adapter.
fn engine(adjust: impl FnOnce(&mut EngineOptions)) -> Option<EngineHandle> {
    if Gpu::adapters().is_empty() && !require_gpu() {
        println!("skipped: no adapter");
        return None;
    }
    let args = EngineArgs { kv_canary: true, check_invariants: true, ..EngineArgs::default() };
    let mut options = args.resolve(&EngineSection::default(), Path::new("cache"), Some(1)).expect("flags are right");
    options.num_gpu_blocks_override = Some(64);
    options.max_num_seqs = 4;
    options.block_size = 8;
    options.max_num_batched_tokens = 32;
    adjust(&mut options);
    let source = ModelSource::Path(core_fixtures().join("tiny/llama"));
    let engine = EngineHandle::start(options.clone());
    engine.load(LoadRequest { source, options });
    engine.wait_for_model(|_| {}).unwrap_or_else(|status| panic!("{status:?}"));
    Some(engine)
}

fn submit(engine: &EngineHandle, prompt: Vec<u32>, output: u32) -> Run {
    let request = GenerateRequest {
        owner: OwnerTag { id: 0, label: "test".into() },
        prompt,
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(output) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    engine.submit(request).expect("a place in the queue")
}

/// The tokens of a run, or how it failed.
fn collect(run: &Run) -> Result<Vec<u32>, RunError> {
    let mut all = Vec::new();
    loop {
        match run.recv_timeout(Duration::from_secs(120)).expect("the engine goes on") {
            EngineEvent::Text { tokens, .. } => all.extend(tokens),
            EngineEvent::Finished { .. } => return Ok(all),
            EngineEvent::Failed { error } => return Err(error),
            _ => {}
        }
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 3 + (i * 7 + seed * 31) % 200).collect()
}

/// Waits for a run's first text and stops the engine between two steps.
fn pause_after_text(engine: &EngineHandle, run: &Run) {
    while !matches!(run.recv_timeout(Duration::from_secs(120)).expect("the engine goes on"), EngineEvent::Text { .. }) {
    }
    engine.pause();
    while !engine.is_paused() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The request as the latest snapshot has it, once it has this many output tokens.
fn wait_for(engine: &EngineHandle, id: RequestId, output: u32) -> RequestInfo {
    let started = Instant::now();
    loop {
        let snapshot = engine.telemetry().snapshot();
        let found = snapshot.requests.iter().find(|r| r.id == id && r.output_tokens >= output);
        if let Some(found) = found {
            return found.clone();
        }
        assert!(started.elapsed() < Duration::from_secs(120), "{id:?} gets no tokens");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_damaged_block_ends_its_request_and_no_other() {
    let Some(engine) = engine(|_| {}) else { return };
    let clean = collect(&submit(&engine, prompt(2, 20), 150)).expect("nothing is damaged yet");
    let victim = submit(&engine, prompt(1, 30), 200);
    let bystander = submit(&engine, prompt(2, 20), 150);
    pause_after_text(&engine, &victim);
    let info = wait_for(&engine, victim.id(), 1);
    let block = info.blocks[1];
    engine.corrupt_block(block);
    engine.resume();
    let error = collect(&victim).expect_err("the damage is found");
    assert_eq!(error, RunError::Corrupted { request: victim.id(), position: 8, block });
    assert!(error.to_string().contains("position 8") && error.to_string().contains(&block.to_string()), "{error}");
    assert_eq!(collect(&bystander), Ok(clean), "others go on");
    // The damaged block cannot be found by its prefix: the same prompt is computed anew and ends well.
    let again = submit(&engine, prompt(1, 30), 10);
    assert_eq!(collect(&again).map(|tokens| tokens.len()), Ok(10));
    engine.shutdown();
}

#[test]
fn a_damaged_block_of_a_shared_prefix_ends_those_who_read_it() {
    let Some(engine) = engine(|_| {}) else { return };
    collect(&submit(&engine, prompt(5, 40), 2)).expect("the prefix is computed");
    let longer = |tail: u32| prompt(5, 40).into_iter().chain([tail, tail + 1]).collect::<Vec<u32>>();
    let runs: Vec<Run> = (0..2).map(|i| submit(&engine, longer(50 + i), 100)).collect();
    pause_after_text(&engine, &runs[1]);
    let block: BlockId = wait_for(&engine, runs[0].id(), 1).blocks[0];
    assert_eq!(wait_for(&engine, runs[1].id(), 1).blocks[0], block, "the prefix is shared");
    engine.corrupt_block(block);
    engine.resume();
    for run in &runs {
        assert_eq!(collect(run), Err(RunError::Corrupted { request: run.id(), position: 0, block }));
    }
    engine.shutdown();
}

#[test]
fn nothing_is_reported_where_nothing_is_damaged() {
    // Few blocks: requests are preempted, come back, and find prefixes again.
    let Some(engine) = engine(|options| options.num_gpu_blocks_override = Some(24)) else { return };
    let runs: Vec<Run> = (0..8).map(|i| submit(&engine, prompt(i % 2, 20 + 9 * (i % 3)), 40 + 10 * (i % 4))).collect();
    let mut outputs = Vec::new();
    for run in &runs {
        outputs.push(collect(run).unwrap_or_else(|error| panic!("{error}")));
    }
    let snapshot: Arc<_> = engine.telemetry().snapshot();
    assert!(snapshot.preemptions_total > 0, "the pool is small enough for preemptions");
    for (i, run) in runs.iter().enumerate() {
        let again = submit(&engine, prompt(i as u32 % 2, 20 + 9 * (i as u32 % 3)), 40 + 10 * (i as u32 % 4));
        assert_eq!(collect(&again).as_ref(), Ok(&outputs[i]), "request {:?}", run.id());
    }
    engine.shutdown();
}
