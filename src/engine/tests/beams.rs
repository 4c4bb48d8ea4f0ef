//! Beam search through the engine on the simulation: the outputs do not hang on memory, faults or neighbours.

use super::super::handle::{EngineHandle, Run};
use super::super::options::{FakeFault, FakeOptions};
use super::submit_together;
use crate::protocol::{
    BeamParams, Decoding, EarlyStopping, EngineEvent, FinishReason, GenerateRequest, OwnerTag, RunError,
    SamplingParams, StopRules, Usage,
};
use crate::scheduler::PreemptionMode;
use std::time::{Duration, Instant};

fn search(text: &str, width: u32, max_tokens: u32) -> GenerateRequest {
    let early_stopping = EarlyStopping::Never;
    GenerateRequest {
        owner: OwnerTag { id: 7, label: "test".into() },
        prompt: text.bytes().map(u32::from).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        decoding: Decoding::Beam(BeamParams { width, num_return: width, length_penalty: 1.0, early_stopping }),
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

/// One output: text, tokens, reason and score.
type Output = (String, Vec<u32>, Option<FinishReason>, Option<f32>);

#[derive(Debug, Default, PartialEq)]
struct Heard {
    outputs: Vec<Output>,
    num_preempted: u32,
    finish: Option<FinishReason>,
    error: Option<RunError>,
    usage: Usage,
}

fn hear(run: &Run) -> Heard {
    let mut heard = Heard::default();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !run.is_finished() {
        assert!(Instant::now() < deadline, "the run does not end: {heard:?}");
        match run.recv_timeout(Duration::from_millis(50)) {
            Some(EngineEvent::Text { choice, delta, tokens, .. }) => {
                assert_eq!(choice as usize, heard.outputs.len(), "outputs come whole and in order");
                heard.outputs.push((delta, tokens, None, None));
            }
            Some(EngineEvent::Choice { choice, reason, score, .. }) => {
                let output = &mut heard.outputs[choice as usize];
                (output.2, output.3) = (Some(reason), score);
            }
            Some(EngineEvent::Preempted { .. }) => heard.num_preempted += 1,
            Some(EngineEvent::Finished { reason, usage, .. }) => {
                heard.finish = Some(reason);
                heard.usage = usage;
            }
            Some(EngineEvent::Failed { error }) => heard.error = Some(error),
            Some(
                EngineEvent::Started { .. }
                | EngineEvent::Reading { .. }
                | EngineEvent::PromptLogprobs { .. }
                | EngineEvent::Embedding { .. },
            )
            | None => {}
        }
    }
    heard
}

fn alone(request: &GenerateRequest) -> Heard {
    let engine = EngineHandle::start_fake(FakeOptions { num_blocks: 512, ..FakeOptions::small() });
    hear(&engine.submit(request.clone()).expect("it fits"))
}

fn used(engine: &EngineHandle) -> u32 {
    assert!(engine.wait_idle(Duration::from_secs(10)), "the engine comes to rest");
    engine.telemetry().snapshot().kv.used
}

#[test]
fn outputs_come_whole_and_ranked_and_all_blocks_come_back() {
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let heard = hear(&engine.submit(search("Once upon a time", 4, 30)).unwrap());
    assert_eq!(heard.outputs.len(), 4);
    let scores: Vec<f32> = heard.outputs.iter().map(|o| o.3.expect("a score")).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    assert!(heard.outputs.iter().all(|o| o.1.len() == 30 && o.2 == Some(FinishReason::MaxTokens)), "{heard:?}");
    assert_eq!((heard.finish, heard.usage.output_tokens), (Some(FinishReason::MaxTokens), 120));
    assert_eq!(used(&engine), 0);
    let one = search("Once upon a time", 1, 30);
    assert_eq!(hear(&engine.submit(one).unwrap()).outputs.len(), 1);
}

#[test]
fn a_gang_under_pressure_finds_what_it_finds_alone() {
    under_pressure(FakeOptions { num_host_blocks: 0, ..FakeOptions::small() });
    let engine =
        under_pressure(FakeOptions { num_host_blocks: 60, preemption: PreemptionMode::Swap, ..FakeOptions::small() });
    assert!(engine.telemetry().snapshot().swaps_total > 0, "searches go to host memory");
}

fn under_pressure(options: FakeOptions) -> EngineHandle {
    // Blocks of 4 tokens; each search needs up to 6 + 3 * 6 of the 27 blocks, so that two cannot stay.
    let options = FakeOptions { num_blocks: 28, block_size: 4, ..options };
    let engine = EngineHandle::start_fake(options);
    let requests: Vec<_> = (0..3).map(|i| search(&format!("{i} a prompt of one story"), 3, 24)).collect();
    let runs = submit_together(&engine, requests.iter().cloned());
    let mut num_preempted = 0;
    for (request, run) in requests.iter().zip(&runs) {
        let heard = hear(run);
        num_preempted += heard.num_preempted;
        assert_eq!(heard.outputs, alone(request).outputs);
    }
    assert!(num_preempted > 0, "the pool is too large for this test");
    assert_eq!(used(&engine), 0);
    engine
}

#[test]
fn faults_of_the_device_do_not_change_a_search() {
    let request = search("The device will be lost", 4, 24);
    let want = alone(&request).outputs;
    for fault in [FakeFault::Rejected, FakeFault::FailedWait, FakeFault::DeviceLost, FakeFault::Panic] {
        let mut faults = vec![FakeFault::None; 9];
        faults.push(fault);
        let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
        let heard = hear(&engine.submit(request.clone()).unwrap());
        assert_eq!((&heard.outputs, heard.error), (&want, None), "{fault:?}");
        assert_eq!(used(&engine), 0);
    }
}

#[test]
fn a_row_that_is_not_finite_ends_the_whole_search_and_no_other() {
    let mut faults = vec![FakeFault::None; 5];
    faults.push(FakeFault::NotFinite);
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
    let heard = hear(&engine.submit(search("A number that is none", 3, 24)).unwrap());
    assert!(matches!(heard.error, Some(RunError::NotFinite { .. })), "{heard:?}");
    assert!(heard.outputs.is_empty());
    let next = search("And the next one", 3, 24);
    assert_eq!(hear(&engine.submit(next.clone()).unwrap()).outputs, alone(&next).outputs);
    assert_eq!(used(&engine), 0);
}

#[test]
fn an_aborted_search_tells_no_outputs_and_frees_its_blocks() {
    let options = FakeOptions { step_delay: Duration::from_millis(5), ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options);
    let run = engine.submit(search("a long search", 4, 200)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let num_beams = || engine.telemetry().snapshot().requests.iter().filter(|r| r.parent == Some(run.id())).count();
    while num_beams() < 3 {
        assert!(Instant::now() < deadline, "the beams run");
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.abort(run.id());
    let heard = hear(&run);
    assert_eq!((heard.finish, heard.outputs.len()), (Some(FinishReason::Aborted), 0));
    assert_eq!(used(&engine), 0);
}

#[test]
fn stop_tokens_and_stop_strings_end_a_beam_and_not_the_search() {
    let plain = alone(&search("How does it end", 3, 20));
    let best = &plain.outputs[0].1;
    let mut request = search("How does it end", 3, 20);
    request.stop.stop_token_ids = vec![best[5]];
    let heard = alone(&request);
    let stopped: Vec<&Output> =
        heard.outputs.iter().filter(|o| o.2 == Some(FinishReason::StopToken(best[5]))).collect();
    assert!(!stopped.is_empty(), "{heard:?}");
    assert!(stopped.iter().all(|o| o.1.last() == Some(&best[5]) && o.1.iter().filter(|t| **t == best[5]).count() == 1));

    let text: String = plain.outputs[0].0.chars().skip(4).take(2).collect();
    let mut request = search("How does it end", 3, 20);
    request.stop.stop_strings = vec![text.clone()];
    let heard = alone(&request);
    let stopped: Vec<&Output> =
        heard.outputs.iter().filter(|o| o.2 == Some(FinishReason::StopString(text.clone()))).collect();
    assert!(!stopped.is_empty(), "{heard:?}");
    assert!(heard.outputs.iter().all(|o| !o.0.contains(&text)), "{heard:?}");
}

#[test]
fn searches_that_cannot_be_are_refused_with_both_numbers() {
    let options = FakeOptions { num_blocks: 21, block_size: 4, ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options);
    let refused = |request: GenerateRequest| engine.submit(request).err().expect("refused");
    // 8 tokens of prompt are 2 shared blocks; each of 4 beams has 5 of its own for 20 more.
    let request = search("12345678", 4, 20);
    assert_eq!(refused(request), RunError::NeverFits { needed: 22, total: 20 });
    assert!(engine.submit(search("12345678", 4, 16)).is_ok(), "2 + 4 * 4 fit");
    let wide = refused(search("1", 9, 4)).to_string();
    assert!(wide.contains("between 1 and 8") && wide.contains("not 9"), "{wide}");
    let mut none = search("1", 2, 4);
    none.decoding = Decoding::Beam(BeamParams {
        width: 2,
        num_return: 3,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::AtOnce,
    });
    assert!(refused(none).to_string().contains("beam width of 2, not 3"));
    let mut many_stops = search("1", 8, 4);
    many_stops.stop.stop_token_ids = (0..60).collect();
    assert!(refused(many_stops).to_string().contains("68 continuations"));
}
