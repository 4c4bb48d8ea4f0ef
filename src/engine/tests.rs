//! The engine on the simulation: aborts, slow clients, stop strings, preemption, faults, the end of the thread.

mod choices;

mod beams;

use super::handle::{EngineHandle, EngineStatus, Run};
use super::options::{FakeFault, FakeOptions};
use crate::ids::RequestId;
use crate::protocol::{
    Decoding, EngineEvent, FinishReason, GenerateRequest, InvalidParam, OwnerTag, RunError, SamplingParams, StopRules,
    Usage,
};
use crate::telemetry::{BlockDelta, KvTotals};
use crate::tokenizer::AddSpecial;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

mod prefixes;

const LONG: Duration = Duration::from_secs(20);

fn request(text: &str, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        owner: OwnerTag { id: 7, label: "test".into() },
        prompt: text.bytes().map(u32::from).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

/// Everything a run sent.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    text: String,
    tokens: Vec<u32>,
    num_started: u32,
    num_preempted: u32,
    finish: Option<FinishReason>,
    error: Option<RunError>,
    usage: Usage,
}

fn hear(run: &Run) -> Heard {
    let mut heard = Heard::default();
    let deadline = Instant::now() + LONG;
    while !run.is_finished() {
        assert!(Instant::now() < deadline, "the run does not end: {heard:?}");
        match run.recv_timeout(Duration::from_millis(50)) {
            Some(EngineEvent::Text { delta, tokens, .. }) => {
                heard.text.push_str(&delta);
                heard.tokens.extend(tokens);
            }
            Some(EngineEvent::Started { .. }) => heard.num_started += 1,
            Some(EngineEvent::Preempted { .. }) => heard.num_preempted += 1,
            Some(EngineEvent::Finished { reason, usage, .. }) => {
                heard.finish = Some(reason);
                heard.usage = usage;
            }
            Some(EngineEvent::Failed { error }) => heard.error = Some(error),
            Some(
                EngineEvent::Reading { .. }
                | EngineEvent::Choice { .. }
                | EngineEvent::PromptLogprobs { .. }
                | EngineEvent::Embedding { .. },
            )
            | None => {}
        }
    }
    heard
}

fn alone(options: &FakeOptions, text: &str, max_tokens: u32) -> Heard {
    let plain = FakeOptions { faults: Vec::new(), num_blocks: 512, ..options.clone() };
    let engine = EngineHandle::start_fake(plain);
    hear(&engine.submit(request(text, max_tokens)).unwrap())
}

/// Waits until a condition holds; panics after a while.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Submits requests so that all are there before the next step: they surely compete for the pool, however slowly this
/// thread runs.
fn submit_together(engine: &EngineHandle, requests: impl IntoIterator<Item = GenerateRequest>) -> Vec<Run> {
    engine.pause();
    eventually("it pauses", || engine.is_paused());
    let runs = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    engine.resume();
    runs
}

fn kv(engine: &EngineHandle) -> KvTotals {
    engine.telemetry().snapshot().kv
}

#[test]
fn a_run_streams_its_tokens_and_finishes_once() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let heard = hear(&engine.submit(request("Hello", 40)).unwrap());
    assert_eq!((heard.tokens.len(), &heard.finish), (40, &Some(FinishReason::MaxTokens)));
    assert_eq!((heard.num_started, heard.usage.prompt_tokens, heard.usage.output_tokens), (1, 5, 40));
    let model = engine.model().unwrap();
    assert_eq!(heard.text, model.tokenizer.decode(&heard.tokens, true));
    assert_eq!(model.tokenizer.encode("Hello", AddSpecial::Yes).unwrap(), request("Hello", 1).prompt);
    eventually("all blocks come back", || kv(&engine).used == 0);
}

#[test]
fn the_end_of_sequence_ends_a_run_unless_ignored() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let eos = engine.model().unwrap().eos_token_ids[0];
    let stop =
        StopRules { max_tokens: None, min_tokens: 0, stop_token_ids: vec![], stop_strings: vec![], ignore_eos: false };
    let heard = hear(&engine.submit(GenerateRequest { stop, ..request("Tell me", 1) }).unwrap());
    assert_eq!(heard.finish, Some(FinishReason::StopToken(eos)));
    assert_eq!((heard.tokens.last(), heard.text.contains("im_end")), (Some(&eos), false));
}

#[test]
fn abort_frees_the_blocks_within_one_step() {
    let engine =
        EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(10), ..FakeOptions::small() });
    let run = engine.submit(request("a long answer", 900)).unwrap();
    eventually("it runs", || kv(&engine).used > 0);
    let before = engine.step_totals().steps;
    engine.abort(run.id());
    let heard = hear(&run);
    assert_eq!(heard.finish, Some(FinishReason::Aborted));
    assert!(engine.step_totals().steps <= before + 2, "the step under way and no other");
    eventually("the blocks come back", || kv(&engine).used == 0);
}

#[test]
fn a_dropped_run_frees_its_blocks() {
    let engine = EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(2), ..FakeOptions::small() });
    let keep = engine.submit(request("stays", 50)).unwrap();
    let run = engine.submit(request("goes away", 900)).unwrap();
    let id = run.id();
    eventually("both run", || {
        engine.telemetry().snapshot().requests.iter().filter(|r| !r.blocks.is_empty()).count() == 2
    });
    drop(run);
    eventually("it is gone", || {
        engine.telemetry().snapshot().requests.iter().any(|r| r.id == id && r.finish == Some(FinishReason::Aborted))
    });
    assert_eq!(hear(&keep).finish, Some(FinishReason::MaxTokens));
}

#[test]
fn a_dropped_run_is_noticed_while_paused() {
    let engine = EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(2), ..FakeOptions::small() });
    let run = engine.submit(request("paused", 900)).unwrap();
    eventually("it runs", || kv(&engine).used > 0);
    engine.pause();
    eventually("it pauses", || engine.is_paused());
    drop(run);
    eventually("its blocks come back without a step", || kv(&engine).used == 0);
    engine.resume();
    assert_eq!(hear(&engine.submit(request("on", 3)).unwrap()).tokens.len(), 3);
}

#[test]
fn a_client_that_does_not_read_loses_nothing_and_blocks_nobody() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let slow = engine.submit(request("slow", 500)).unwrap();
    let fast = engine.submit(request("fast", 500)).unwrap();
    assert_eq!(hear(&fast).tokens.len(), 500);
    assert!(engine.wait_idle(LONG));
    let heard = hear(&slow);
    assert_eq!(heard.tokens.len(), 500);
    assert_eq!(heard, alone(&FakeOptions::small(), "slow", 500));
}

#[test]
fn text_stops_before_a_stop_string_wherever_it_starts() {
    let options = FakeOptions::small();
    let whole = alone(&options, "stop strings", 120).text;
    let engine = EngineHandle::start_fake(options);
    for at in (10..100).step_by(9) {
        let stop = whole[at..at + 6].to_string();
        let mut wanted = request("stop strings", 120);
        wanted.stop.stop_strings = vec!["never in there".into(), stop.clone()];
        let heard = hear(&engine.submit(wanted).unwrap());
        assert_eq!(heard.text, whole[..whole.find(&stop).unwrap()], "{stop:?}");
        assert_eq!(heard.finish, Some(FinishReason::StopString(stop)));
    }
    eventually("all blocks come back", || kv(&engine).used == 0);
}

#[test]
fn a_stop_string_on_the_last_token_counts_as_the_stop_string() {
    let options = FakeOptions::small();
    let whole = alone(&options, "last", 30).text;
    let engine = EngineHandle::start_fake(options);
    let mut wanted = request("last", 30);
    let stop = whole[27..30].to_string();
    let at = whole.find(&stop).unwrap();
    wanted.stop.max_tokens = Some(at as u32 + 3);
    wanted.stop.stop_strings = vec![stop.clone()];
    let heard = hear(&engine.submit(wanted).unwrap());
    assert_eq!((heard.text.as_str(), heard.finish), (&whole[..at], Some(FinishReason::StopString(stop))));
}

#[test]
fn text_held_back_is_sent_when_the_output_ends() {
    let options = FakeOptions::small();
    let whole = alone(&options, "held", 20).text;
    let engine = EngineHandle::start_fake(options);
    let mut wanted = request("held", 20);
    wanted.stop.stop_strings = vec![format!("{}#", &whole[15..20])];
    assert_eq!(hear(&engine.submit(wanted).unwrap()).text, whole);
}

#[test]
fn preempted_streams_go_on_without_doubled_text() {
    let options = FakeOptions { num_blocks: 17, block_size: 8, max_num_seqs: 4, ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options.clone());
    let prompts = ["first prompt", "second prompt", "third prompt", "the fourth"];
    let runs = submit_together(&engine, prompts.map(|p| request(p, 60)));
    let mut num_preempted = 0;
    for (prompt, run) in prompts.iter().zip(&runs) {
        let (heard, want) = (hear(run), alone(&options, prompt, 60));
        assert_eq!((&heard.text, &heard.tokens), (&want.text, &want.tokens), "{prompt}");
        assert_eq!((heard.num_started, heard.finish), (1, want.finish));
        num_preempted += heard.num_preempted;
        assert_eq!(heard.usage.preemptions, heard.num_preempted);
    }
    assert!(num_preempted > 0, "the pool is too large for this test");
}

#[test]
fn failed_steps_are_tried_again_without_a_trace() {
    use FakeFault::{DeviceLost, FailedWait, None as Fine, OutOfMemory, Panic, Rejected};
    for faults in [
        vec![Rejected],
        vec![Fine, Fine, Rejected, Rejected, Fine],
        vec![OutOfMemory, Fine, OutOfMemory],
        vec![Fine, FailedWait, Fine, FailedWait],
        vec![Fine, DeviceLost],
        vec![DeviceLost, DeviceLost, Fine, DeviceLost],
        vec![Fine, Fine, Fine, Panic],
        vec![Panic, Fine, Panic, DeviceLost, Fine, Rejected],
    ] {
        let options = FakeOptions { faults: faults.clone(), ..FakeOptions::small() };
        let engine = EngineHandle::start_fake(options.clone());
        let prompts = ["one", "two, which is longer than a step of the budget allows: ".repeat(3).leak(), "three"];
        let runs: Vec<Run> = prompts.iter().map(|p| engine.submit(request(p, 30)).unwrap()).collect();
        for (prompt, run) in prompts.iter().zip(&runs) {
            let (heard, want) = (hear(run), alone(&options, prompt, 30));
            assert_eq!((heard.text, heard.tokens, heard.error), (want.text, want.tokens, None), "{faults:?} {prompt}");
        }
        assert!(matches!(engine.status(), EngineStatus::Ready(_)), "{faults:?}");
        eventually("all blocks come back", || kv(&engine).used == 0);
    }
}

#[test]
fn a_row_that_is_not_a_number_ends_its_request_alone() {
    let options = FakeOptions { faults: vec![FakeFault::None, FakeFault::NotFinite], ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options.clone());
    let runs = submit_together(&engine, ["bad", "good"].map(|p| request(p, 20)));
    let [bad, good] = [0, 1].map(|i| hear(&runs[i]));
    assert!(matches!(bad.error, Some(RunError::NotFinite { .. })), "{bad:?}");
    assert_eq!(good, alone(&options, "good", 20));
}

#[test]
fn a_core_that_cannot_be_built_is_a_failed_load() {
    let fake = FakeOptions { max_model_len: 1, ..FakeOptions::small() };
    let options = super::fake::engine_options(&fake);
    let engine = EngineHandle::start_with(options.clone(), super::fake::loader(fake));
    let source = super::options::ModelSource::Default;
    engine.load(super::options::LoadRequest { source, options });
    eventually("the load ends", || !matches!(engine.status(), EngineStatus::Loading { .. }));
    let EngineStatus::Failed { message, .. } = engine.status() else { panic!("{:?}", engine.status()) };
    assert!(message.contains("max_model_len must hold"), "{message}");
}

#[test]
fn whoever_waits_for_a_load_hears_of_its_end_at_once() {
    let (fake, (release, gate)) = (FakeOptions::small(), std::sync::mpsc::sync_channel::<()>(2));
    let (options, load, gate) =
        (super::fake::engine_options(&fake), super::fake::loader(fake), std::sync::Mutex::new(gate));
    // A loader that reports nothing until it is let go.
    let slow: super::thread::Loader = Box::new(move |request, on_progress| {
        let _ = gate.lock().unwrap().recv();
        load(request, on_progress)
    });
    let engine = EngineHandle::start_with(options.clone(), slow);
    let source = super::options::ModelSource::Default;
    engine.load(super::options::LoadRequest { source: source.clone(), options: options.clone() });
    let ended = engine.wait_for_model(|_| engine.cancel_load());
    assert!(matches!(ended, Err(EngineStatus::NoModel)), "{ended:?}");
    // The next load is not disturbed by the end of the one before.
    engine.load(super::options::LoadRequest { source, options });
    release.send(()).unwrap();
    release.send(()).unwrap();
    assert!(engine.wait_for_model(|_| {}).is_ok());
}

#[test]
fn a_step_that_always_fails_ends_its_requests_and_not_the_engine() {
    for fault in [FakeFault::Rejected, FakeFault::FailedWait] {
        let engine = EngineHandle::start_fake(FakeOptions { faults: vec![fault; 3], ..FakeOptions::small() });
        let heard = hear(&engine.submit(request("doomed", 20)).unwrap());
        assert!(matches!(heard.error, Some(RunError::Engine(_))), "{heard:?}");
        assert_eq!(hear(&engine.submit(request("fine", 5)).unwrap()).tokens.len(), 5);
    }
    for fault in [FakeFault::Panic, FakeFault::DeviceLost] {
        let engine = EngineHandle::start_fake(FakeOptions { faults: vec![fault; 4], ..FakeOptions::small() });
        let heard = hear(&engine.submit(request("doomed", 20)).unwrap());
        assert!(matches!(heard.error, Some(RunError::Engine(_))), "{heard:?}");
        assert_eq!(hear(&engine.submit(request("fine", 5)).unwrap()).tokens.len(), 5);
        assert_eq!(engine.step_totals().recoveries, 4);
    }
}

#[test]
fn dropping_the_last_handle_ends_thread_and_runs() {
    let engine = EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(5), ..FakeOptions::small() });
    let run = engine.submit(request("never finished", 900)).unwrap();
    let telemetry = engine.telemetry();
    drop(engine);
    assert_eq!(hear(&run).error, Some(RunError::ShutDown));
    // The thread held a clone of the ring.
    assert_eq!(Arc::strong_count(&telemetry), 1);
}

#[test]
fn after_shutdown_other_handles_are_refused() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let other = engine.clone();
    engine.shutdown();
    assert!(matches!(other.submit(request("late", 5)).map(|_| ()), Err(RunError::NoModel | RunError::ShutDown)));
    other.abort(RequestId(1));
    other.pause();
}

#[test]
fn what_cannot_run_is_refused_at_submit() {
    let engine = EngineHandle::start_fake(FakeOptions { num_blocks: 5, max_model_len: 64, ..FakeOptions::small() });
    let refused = |r: GenerateRequest| engine.submit(r).map(|_| ()).unwrap_err();
    assert_eq!(refused(request("", 5)), RunError::EmptyPrompt);
    assert_eq!(refused(request(&"x".repeat(64), 5)), RunError::PromptTooLong { prompt: 64, max_model_len: 64 });
    assert_eq!(refused(request("x", 64)), RunError::ContextExceeded { needed: 65, max_model_len: 64 });
    let token = GenerateRequest { prompt: vec![999], ..request("x", 1) };
    assert_eq!(refused(token), RunError::TokenOutOfRange { token: 999, vocab: 258 });
    assert!(matches!(refused(request("x", 0)), RunError::InvalidParam(InvalidParam { field: "max_tokens", .. })));
    let hot = SamplingParams { temperature: f32::NAN, ..SamplingParams::greedy() };
    let hot = refused(GenerateRequest { sampling: hot, ..request("x", 1) });
    assert!(matches!(hot, RunError::InvalidParam(InvalidParam { field: "temperature", .. })));
    engine.unload();
    eventually("it unloads", || matches!(engine.status(), EngineStatus::NoModel));
    assert_eq!(refused(request("x", 1)), RunError::NoModel);
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    let engine = EngineHandle::start_fake(FakeOptions { max_queue: 3, ..FakeOptions::small() });
    engine.pause();
    eventually("it pauses", || engine.is_paused());
    let runs: Vec<Run> = (0..3).map(|i| engine.submit(request(&format!("r{i}"), 5)).unwrap()).collect();
    let refused = engine.submit(request("one too many", 5)).map(|_| ());
    assert_eq!(refused, Err(RunError::QueueFull { limit: 3 }));
    engine.resume();
    runs.iter().for_each(|run| assert_eq!(hear(run).tokens.len(), 5));
    for _ in 0..10 {
        hear(&engine.submit(request("room again", 2)).unwrap());
    }
    let run = engine.submit(request("dropped at once", 2)).unwrap();
    drop(run);
    eventually("the place in the queue is free again", || engine.wait_idle(Duration::ZERO));
}

#[test]
fn seeds_are_drawn_where_missing_and_kept_where_given() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let sampled = |seed: Option<u64>| {
        let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::greedy() };
        hear(&engine.submit(GenerateRequest { sampling, ..request("dice", 40) }).unwrap()).text
    };
    assert_eq!(sampled(Some(5)), sampled(Some(5)));
    assert_ne!(sampled(Some(5)), sampled(Some(6)));
    assert_ne!(sampled(None), sampled(None));
}

#[test]
fn equal_prompts_share_blocks_and_say_so() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let prompt = "a system prompt that fills some blocks of sixteen tokens each, and then a question";
    let first = hear(&engine.submit(request(prompt, 10)).unwrap());
    let second = hear(&engine.submit(request(prompt, 10)).unwrap());
    assert_eq!((first.usage.cached_tokens, &first.text), (0, &second.text));
    assert_eq!(second.usage.cached_tokens as usize, prompt.len() - 1, "the last token is computed for its logits");
    let salted = GenerateRequest { cache_salt: 1, ..request(prompt, 10) };
    assert_eq!(hear(&engine.submit(salted).unwrap()).usage.cached_tokens, 0);
}

#[test]
fn block_changes_in_the_records_add_up_to_the_snapshot() {
    let options = FakeOptions { num_blocks: 17, block_size: 8, max_num_seqs: 4, ..FakeOptions::small() };
    let faults = [vec![FakeFault::None; 30], vec![FakeFault::DeviceLost]].concat();
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..options });
    let runs: Vec<Run> = (0..6).map(|i| engine.submit(request(&format!("prompt number {i}"), 50)).unwrap()).collect();
    runs.iter().for_each(|run| drop(hear(run)));
    // One more step takes up what the last ends changed.
    hear(&engine.submit(request("last", 1)).unwrap());
    assert!(engine.wait_idle(LONG));
    let (records, dropped) = engine.telemetry().records_after(None);
    assert_eq!(dropped, 0);
    assert!(records.windows(2).all(|pair| pair[0].step < pair[1].step && pair[0].t0_us <= pair[1].t0_us));
    let mut holders: HashMap<u32, i64> = HashMap::new();
    let mut is_kept: HashMap<u32, bool> = HashMap::new();
    for delta in records.iter().flat_map(|r| &r.deltas) {
        match *delta {
            BlockDelta::Alloc { block, .. } | BlockDelta::Share { block, .. } => {
                *holders.entry(block.0).or_default() += 1
            }
            BlockDelta::Unref { block, .. } => *holders.entry(block.0).or_default() -= 1,
            BlockDelta::CacheIdle { block } => drop(is_kept.insert(block.0, true)),
            BlockDelta::Evict { block } | BlockDelta::Free { block } => drop(is_kept.insert(block.0, false)),
            BlockDelta::Fill { .. } | BlockDelta::Publish { .. } => {}
            BlockDelta::Copy { .. } | BlockDelta::SwapOut { .. } | BlockDelta::SwapIn { .. } => {}
            BlockDelta::Pin { .. } | BlockDelta::Unpin { .. } | BlockDelta::HostFree { .. } => {}
        }
        assert!(holders.values().all(|&n| n >= 0), "{delta:?} takes away what nobody holds");
    }
    for record in &records {
        assert!(record.num_tokens() <= record.budget, "step {}", record.step);
        assert_eq!(record.rows.len() as u32, record.num_running.max(record.rows.len() as u32));
    }
    let snapshot = engine.telemetry().snapshot();
    for (id, block) in snapshot.blocks.iter().enumerate().skip(1) {
        assert_eq!(i64::from(block.refs), holders.get(&(id as u32)).copied().unwrap_or(0), "block {id}");
    }
    let (kv, sum) = (snapshot.kv, records.iter().map(|r| r.preempted.len() as u64).sum::<u64>());
    assert_eq!((kv.used, kv.free + kv.cached_idle, snapshot.preemptions_total), (0, kv.total, sum));
    assert!(sum > 0 && snapshot.recomputed_tokens_total > 0);
}

#[test]
fn the_waker_is_called_when_something_changed() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    engine.set_waker(Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    let heard = hear(&engine.submit(request("wake", 50)).unwrap());
    assert!(engine.wait_idle(LONG));
    let calls = calls.load(Ordering::Relaxed);
    assert!(calls >= 1 && calls <= heard.tokens.len() as u64 + 10, "{calls} calls for 50 steps");
}

#[test]
fn a_new_load_ends_the_runs_before_and_is_ready_again() {
    let engine = EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(2), ..FakeOptions::small() });
    let run = engine.submit(request("on the old model", 900)).unwrap();
    engine
        .load(super::options::LoadRequest { source: super::options::ModelSource::Default, options: engine.options() });
    assert_eq!(hear(&run).error, Some(RunError::NoModel));
    assert!(engine.wait_for_model(|_| {}).is_ok());
    assert_eq!(hear(&engine.submit(request("on the new one", 5)).unwrap()).tokens.len(), 5);
}

/// A loader of the CPU reference on a fixture model: the whole street without a GPU.
fn reference_loader(model: &'static str) -> super::thread::Loader {
    use super::loader::{LoadFailure, Loaded};
    use crate::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
    Box::new(move |request, _| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fixtures").join(model);
        let config = ReferenceConfig { num_blocks: 64, block_size: request.options.block_size };
        let build = move |path: &std::path::Path| {
            let model = crate::model::Model::open(path)?;
            let executor = ReferenceExecutor::new(&model, config);
            executor.map_err(|e| LoadFailure::engine(e.to_string()))
        };
        let model = crate::model::Model::open(&path)?;
        let text = super::text_side::read(&model)?;
        let executor: Box<dyn crate::executor::Executor> = Box::new(build(&path)?);
        let adapter = super::handle::AdapterSummary::default();
        let loaded = super::loader::loaded_model(&model, text, adapter, &*executor, &request.options, 512);
        let rebuild: super::loader::Rebuild = Box::new(move |_| Ok(Box::new(build(&path)?)));
        Ok(Loaded { model: Arc::new(loaded), executor, options: request.options.clone(), rebuild, disk: None })
    })
}

#[test]
fn a_real_model_gives_the_greedy_tokens_of_its_reference() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fixtures/tiny/llama");
    let bytes = std::fs::read(root.join("reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| -> Vec<u32> {
        let bytes = file.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    };
    let fake = FakeOptions { block_size: 16, max_num_batched_tokens: 24, ..FakeOptions::small() };
    let options = super::fake::engine_options(&fake);
    let engine = EngineHandle::start_with(options.clone(), reference_loader("tiny/llama"));
    engine.load(super::options::LoadRequest { source: super::options::ModelSource::Default, options });
    let model = engine.wait_for_model(|_| {}).unwrap();
    assert_eq!((model.defaults.temperature, model.template.is_some()), (Some(0.6), true));
    let names = ["short", "one", "long"];
    let runs: Vec<Run> = names
        .iter()
        .map(|name| {
            let prompt = ids(&format!("{name}.input_ids"));
            engine.submit(GenerateRequest { prompt, ..request("", 32) }).unwrap()
        })
        .collect();
    for (name, run) in names.iter().zip(&runs) {
        assert_eq!(hear(run).tokens, ids(&format!("{name}.greedy_ids")), "{name}");
    }
}
