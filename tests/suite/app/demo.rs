//! The demo as a check: four chats on one system prompt, and an outcome.

use super::*;

fn run_demo(fake: FakeOptions) -> (App, Option<Result<(), String>>) {
    let dir = tempfile::tempdir().unwrap();
    let outcome = DemoOutcome::default();
    let start = AppOptions { demo: true, exit_after_demo: true, ..options(EngineHandle::start_fake(fake), dir.path()) };
    let mut app = harness(start, [1440.0, 900.0], outcome.clone());
    let mut result = None;
    wait_for(&mut app, "the end of the demo", |_| {
        result = result.take().or(outcome.take());
        result.is_some()
    });
    (app, result)
}

#[test]
fn the_demo_ends_well_and_shares_its_system_prompt() {
    let (app, result) = run_demo(FakeOptions { num_blocks: 513, max_model_len: 2048, ..FakeOptions::small() });
    assert_eq!(result, Some(Ok(())));
    let panes = &state(&app).panes.chats;
    assert_eq!(panes.len(), 4);
    let runs: Vec<_> = panes.iter().map(|id| path(chat(&app, *id)).last().unwrap().run.clone().unwrap()).collect();
    assert!(runs.iter().all(|r| r.output_tokens > 0 && r.output_tokens <= 48));
    assert!(runs.iter().all(|r| r.cached_tokens >= 64), "the system prompt's blocks are shared");
    let prefixes = &state(&app).snapshot.prefixes;
    let pinned: Vec<_> = prefixes.iter().filter(|p| p.pinned).collect();
    assert_eq!(pinned.len(), 1, "{prefixes:?}");
    assert!(pinned[0].name.as_deref().is_some_and(|n| n.starts_with("System prompt of")) && pinned[0].hits >= 1);
}

#[test]
fn the_demo_fails_with_a_reason_when_the_prompt_does_not_fit() {
    let (_, result) = run_demo(FakeOptions { max_model_len: 128, ..FakeOptions::small() });
    let reason = result.unwrap().unwrap_err();
    assert!(reason.contains("got no answer"), "{reason}");
}
