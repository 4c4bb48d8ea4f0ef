//! Several choices of one run, and forks.

use super::*;
use crate::engine::choices::choice_seed;
use crate::protocol::TokenLogprobs;

/// What each choice sent.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    text: String,
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    reason: Option<FinishReason>,
    cumulative_logprob: Option<f32>,
}

/// All choices, the terminal event's part, and how many texts came before the first choice had ended.
fn hear_choices(run: &Run, n: usize) -> (Vec<Told>, Heard, usize) {
    let (mut told, mut heard, mut num_early) = (vec![Told::default(); n], Heard::default(), 0);
    let deadline = Instant::now() + LONG;
    while !run.is_finished() {
        assert!(Instant::now() < deadline, "the run does not end: {told:?}");
        match run.recv_timeout(Duration::from_millis(50)) {
            Some(EngineEvent::Text { choice, delta, tokens, logprobs }) => {
                let told = &mut told[choice as usize];
                assert_eq!(told.reason, None, "text after the end of choice {choice}");
                told.text.push_str(&delta);
                told.tokens.extend(tokens);
                told.logprobs.extend(logprobs);
                num_early += 1;
            }
            Some(EngineEvent::Choice { choice, reason, cumulative_logprob, .. }) => {
                let told = &mut told[choice as usize];
                assert_eq!(told.reason.replace(reason), None, "choice {choice} ended twice");
                told.cumulative_logprob = cumulative_logprob;
            }
            Some(EngineEvent::Finished { reason, usage, .. }) => {
                (heard.finish, heard.usage) = (Some(reason), usage);
            }
            Some(EngineEvent::Failed { error }) => heard.error = Some(error),
            Some(EngineEvent::Preempted { .. }) => heard.num_preempted += 1,
            Some(EngineEvent::Started { .. }) => heard.num_started += 1,
            Some(EngineEvent::Reading { .. } | EngineEvent::PromptLogprobs { .. } | EngineEvent::Embedding { .. })
            | None => {}
        }
    }
    (told, heard, num_early)
}

fn dice(text: &str, max_tokens: u32, seed: u64) -> GenerateRequest {
    let sampling = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::greedy() };
    GenerateRequest { sampling, ..request(text, max_tokens) }
}

fn several(n: u32, best_of: u32, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { decoding: Decoding::Sample { n, best_of }, ..request }
}

/// What choice `choice` of a run with this seed gets when its request is alone.
fn choice_alone(options: &FakeOptions, text: &str, max_tokens: u32, seed: u64, choice: u32) -> Heard {
    let plain = FakeOptions { faults: Vec::new(), num_blocks: 512, ..options.clone() };
    let engine = EngineHandle::start_fake(plain);
    hear(&engine.submit(dice(text, max_tokens, choice_seed(seed, choice))).unwrap())
}

#[test]
fn choices_get_what_requests_with_their_seeds_get_alone_and_share_the_prompt() {
    let options = FakeOptions::small();
    for len in [31, 32, 33, 40] {
        let engine = EngineHandle::start_fake(options.clone());
        let text = "the same prompt for all of the choices".repeat(2)[..len].to_string();
        let run = engine.submit(several(4, 4, dice(&text, 24, 5))).unwrap();
        let (told, heard, _) = hear_choices(&run, 4);
        for (choice, told) in (0..).zip(&told) {
            let want = choice_alone(&options, &text, 24, 5, choice);
            assert_eq!((&told.text, &told.tokens), (&want.text, &want.tokens), "choice {choice} of {len}");
            assert_eq!((&told.reason, told.cumulative_logprob), (&want.finish, None));
        }
        assert_ne!(told[0].tokens, told[1].tokens);
        assert_eq!((heard.finish, heard.num_started), (Some(FinishReason::MaxTokens), 1));
        assert_eq!((heard.usage.prompt_tokens, heard.usage.output_tokens), (len as u32, 96));
        assert!(engine.wait_idle(LONG));
        let snapshot = engine.telemetry().snapshot();
        assert_eq!(
            snapshot.computed_tokens_total,
            len as u64 + 3 + 4 * 23,
            "the prompt once, and its last token for each"
        );
        assert_eq!(snapshot.copied_blocks_total, if len == 32 { 0 } else { 3 });
        let mut tree: Vec<_> = snapshot.requests.iter().map(|r| (r.id, r.choice, r.parent)).collect();
        tree.sort_unstable();
        let first = run.id();
        let want = [(0u32, None), (1, Some(first)), (2, Some(first)), (3, Some(first))];
        assert_eq!(tree, want.map(|(c, parent)| (RequestId(first.0 + u64::from(c)), c, parent)));
    }
}

#[test]
fn choices_survive_preemption_and_faults() {
    use FakeFault::{DeviceLost, FailedWait, None as Fine, OutOfMemory, Panic, Rejected};
    let small = FakeOptions { num_blocks: 14, block_size: 8, max_num_seqs: 4, ..FakeOptions::small() };
    let mut num_preempted = 0;
    for faults in [
        vec![],
        vec![Fine, Rejected, Fine, FailedWait],
        vec![Fine, FailedWait, FailedWait, Fine, OutOfMemory],
        vec![Fine, DeviceLost, Fine, Fine, Panic],
        vec![Panic, DeviceLost, Fine, Fine, Fine, DeviceLost],
    ] {
        let options = FakeOptions { faults: faults.clone(), ..small.clone() };
        let engine = EngineHandle::start_fake(options.clone());
        let choices = several(5, 5, dice("a prompt of some length", 30, 9));
        let runs = submit_together(&engine, [choices, request("somebody else", 40)]);
        let (told, heard, _) = hear_choices(&runs[0], 5);
        for (choice, told) in (0..).zip(&told) {
            let want = choice_alone(&options, "a prompt of some length", 30, 9, choice);
            assert_eq!((&told.text, &told.tokens), (&want.text, &want.tokens), "choice {choice} {faults:?}");
        }
        assert_eq!((heard.error, heard.usage.output_tokens), (None, 150), "{faults:?}");
        assert_eq!(hear(&runs[1]).tokens, alone(&options, "somebody else", 40).tokens);
        num_preempted += heard.num_preempted;
        eventually("all blocks come back", || kv(&engine).used == 0);
    }
    assert!(num_preempted > 0, "the pool is too large for this test");
}

#[test]
fn the_best_of_several_come_whole_at_the_end() {
    let options = FakeOptions::small();
    let engine = EngineHandle::start_fake(options.clone());
    let run = engine.submit(several(2, 4, dice("choose", 20, 3))).unwrap();
    let (told, heard, num_texts) = hear_choices(&run, 2);
    assert_eq!(num_texts, 2, "nothing is sent before the best are known");
    // The simulation gives each token the same probability: the first are the best.
    for (choice, told) in (0..).zip(&told) {
        assert_eq!(told.tokens, choice_alone(&options, "choose", 20, 3, choice).tokens);
        assert!(told.logprobs.is_empty(), "nobody asked for them");
        let sum = told.cumulative_logprob.expect("it decided");
        assert!((sum + 20.0 * std::f32::consts::LN_2).abs() < 1e-4, "{sum}");
    }
    assert_eq!((heard.usage.output_tokens, heard.usage.prompt_tokens), (80, 6));
    let one = engine.submit(several(1, 3, dice("choose", 20, 3))).unwrap();
    let heard = hear(&one);
    assert_eq!(heard.tokens, told[0].tokens);
    assert_eq!((heard.finish, heard.usage.output_tokens), (Some(FinishReason::MaxTokens), 60));
}

#[test]
fn a_first_choice_that_ends_at_once_leaves_the_others_their_prompt() {
    let options = FakeOptions::small();
    for max_tokens in [1, 2] {
        let engine = EngineHandle::start_fake(options.clone());
        let run = engine.submit(several(3, 3, dice("a short answer is wanted", max_tokens, 8))).unwrap();
        let (told, heard, _) = hear_choices(&run, 3);
        for (choice, told) in (0..).zip(&told) {
            assert_eq!(told.tokens, choice_alone(&options, "a short answer is wanted", max_tokens, 8, choice).tokens);
        }
        assert_eq!(heard.usage.output_tokens, 3 * max_tokens);
    }
}

#[test]
fn an_abort_ends_all_choices_and_frees_their_blocks() {
    for drops in [false, true] {
        let options = FakeOptions { step_delay: Duration::from_millis(1), ..FakeOptions::small() };
        let engine = EngineHandle::start_fake(options);
        let run = engine.submit(several(6, 6, dice("to be stopped", 900, 1))).unwrap();
        eventually("all choices run", || engine.telemetry().snapshot().requests.len() == 6);
        if drops {
            drop(run);
        } else {
            engine.abort(run.id());
            let (told, heard, _) = hear_choices(&run, 6);
            assert_eq!(heard.finish, Some(FinishReason::Aborted));
            assert!(told.iter().all(|told| told.reason == Some(FinishReason::Aborted)));
        }
        eventually("all blocks come back", || kv(&engine).used == 0);
        assert_eq!(hear(&engine.submit(request("next", 3)).unwrap()).tokens.len(), 3);
    }
}

#[test]
fn a_choice_that_is_not_a_number_ends_the_run_with_an_error() {
    let faults = vec![FakeFault::None, FakeFault::None, FakeFault::None, FakeFault::NotFinite];
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
    let (_, heard, _) = hear_choices(&engine.submit(several(3, 3, dice("broken", 40, 2))).unwrap(), 3);
    assert!(matches!(heard.error, Some(RunError::NotFinite { .. })), "{heard:?}");
    eventually("all blocks come back", || kv(&engine).used == 0);
    assert!(engine.wait_idle(LONG));
}

#[test]
fn stop_rules_hold_for_each_choice_by_itself() {
    let options = FakeOptions::small();
    let engine = EngineHandle::start_fake(options.clone());
    let whole: Vec<Heard> = (0..3).map(|c| choice_alone(&options, "stop somewhere", 60, 4, c)).collect();
    let stop = whole[1].text[10..13].to_string();
    let mut wanted = several(3, 3, dice("stop somewhere", 60, 4));
    wanted.stop.stop_strings = vec![stop.clone()];
    let (told, heard, _) = hear_choices(&engine.submit(wanted).unwrap(), 3);
    for (told, whole) in told.iter().zip(&whole) {
        let at = whole.text.find(&stop);
        assert_eq!(told.text, whole.text[..at.unwrap_or(whole.text.len())]);
        let reason = at.map_or(FinishReason::MaxTokens, |_| FinishReason::StopString(stop.clone()));
        assert_eq!(told.reason, Some(reason));
    }
    assert_eq!(heard.finish, told[0].reason);
}

#[test]
fn a_fork_gets_what_its_tokens_get_alone_from_a_live_and_from_an_ended_parent() {
    let options = FakeOptions { step_delay: Duration::from_millis(1), ..FakeOptions::small() };
    let engine = EngineHandle::start_fake(options.clone());
    let parent = engine.submit(request("a long conversation that is going on", 400)).unwrap();
    eventually("it decodes", || engine.telemetry().snapshot().requests.iter().any(|r| r.output_tokens > 20));
    let live: Vec<Run> =
        [36, 47, 48, 49].map(|keep| engine.fork(parent.id(), keep, request(" and", 12)).unwrap()).into();
    let heard_live: Vec<Heard> = live.iter().map(hear).collect();
    assert!(heard_live.iter().all(|heard| heard.usage.cached_tokens >= 35), "{heard_live:?}");
    let is_shown = |run: &Run| {
        let snapshot = engine.telemetry().snapshot();
        snapshot.requests.iter().any(|r| r.id == run.id() && r.parent == Some(parent.id()))
    };
    eventually("the tree is shown", || live.iter().all(is_shown));
    let output = hear(&parent);
    let all = [request("a long conversation that is going on", 1).prompt, output.tokens].concat();
    for (keep, heard) in [36, 47, 48, 49].into_iter().zip(heard_live) {
        let ended = hear(&engine.fork(parent.id(), keep, request(" and", 12)).unwrap());
        assert!(ended.usage.cached_tokens >= keep, "the prefix cache has the same tokens");
        let prompt = [&all[..keep as usize], &request(" and", 1).prompt].concat();
        let alone = EngineHandle::start_fake(options.clone());
        let want = hear(&alone.submit(GenerateRequest { prompt, ..request("", 12) }).unwrap());
        assert_eq!((&heard.tokens, &ended.tokens), (&want.tokens, &want.tokens), "keep {keep}");
    }
    let failed = |heard: Heard| match heard.error {
        Some(RunError::InvalidParam(fault)) => fault.field,
        other => panic!("{other:?}"),
    };
    assert_eq!(failed(hear(&engine.fork(parent.id(), 900, request(" and", 12)).unwrap())), "keep_tokens");
    assert_eq!(failed(hear(&engine.fork(RequestId(9_999), 1, request(" and", 12)).unwrap())), "parent");
    assert!(engine.wait_idle(LONG), "refused forks left the queue");
}
