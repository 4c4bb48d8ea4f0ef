//! The app on an engine elsewhere: the same chats, blocks and decisions through the server's API.

use super::*;
use crate::server::TestServer;
use egui_kittest::kittest::Queryable;
use kvasir::app::chat::{RunSettings, RunStatus};
use kvasir::app::state::Workspace;
use kvasir::engine::Run;
use kvasir::engine::handle::EngineStatus;
use kvasir::engine::remote::RemoteOptions;
use kvasir::ids::TokenId;
use kvasir::protocol::{
    Decoding, EngineEvent, FinishReason, GenerateRequest, OwnerTag, PinRequest, SamplingParams, StopRules, Usage,
};
use kvasir::server::ServerOptions;

fn connect(server: &TestServer, api_key: Option<&str>) -> EngineHandle {
    let url = format!("http://{}", server.address);
    let options = server.engine.options();
    EngineHandle::connect(options, RemoteOptions { url, api_key: api_key.map(str::to_owned), model: None })
}

fn request(prompt: &str, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        owner: OwnerTag { id: 1, label: "A chat about boats".into() },
        prompt: prompt.bytes().map(TokenId::from).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

/// Text, tokens and end of a run.
fn outcome(run: &Run) -> (String, Vec<TokenId>, FinishReason, Usage) {
    let (mut text, mut ids) = (String::new(), Vec::new());
    while let Some(event) = run.recv() {
        match event {
            EngineEvent::Text { delta, tokens, .. } => {
                text.push_str(&delta);
                ids.extend(tokens);
            }
            EngineEvent::Finished { reason, usage, .. } => return (text, ids, reason, usage),
            EngineEvent::Failed { error } => panic!("{error}"),
            _ => {}
        }
    }
    panic!("a run ends with a terminal event")
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

#[test]
fn runs_on_a_remote_engine_are_those_of_its_own_process() {
    let server = TestServer::start(EngineHandle::start_fake(slow(2)), ServerOptions::local());
    let remote = connect(&server, None);
    let model = remote.wait_for_model(|_| {}).expect("the server's model");
    let local = server.engine.model().expect("a model");
    assert_eq!(
        (&model.name, model.max_model_len, model.num_blocks),
        (&local.name, local.max_model_len, local.num_blocks)
    );
    assert_eq!(model.template.as_ref().map(|t| t.source()), local.template.as_ref().map(|t| t.source()));
    let prompt = "boats and ships and rafts and canoes";
    let mut expected = outcome(&server.engine.submit(request(prompt, 40)).expect("a run"));
    let run = remote.submit(request(prompt, 40)).expect("a run");
    let found = outcome(&run);
    expected.3.cached_tokens = found.3.cached_tokens;
    assert_eq!(found, expected);
    assert!(found.3.cached_tokens > 0, "the server's cache has the prompt");
    // Its steps and its end came here under the id that the server gave.
    let telemetry = remote.telemetry();
    until("the end of the run in the records", || {
        let (records, _) = telemetry.records_after(None);
        records.iter().any(|record| record.finished.iter().any(|(id, _)| *id == run.id()))
    });
    until("the snapshot after it", || {
        let snapshot = telemetry.snapshot();
        let info = snapshot.requests.iter().find(|info| info.id == run.id()).cloned();
        info.is_some_and(|info| info.owner.label == "A chat about boats" && info.finish.is_some())
    });
    // A fork goes on from its tokens, and a run that is dropped frees its blocks there.
    let kept = prompt.len() as u32 + 10;
    let whole: Vec<TokenId> = request(prompt, 1).prompt.iter().chain(&found.1[..10]).copied().collect();
    let alone = outcome(&server.engine.submit(GenerateRequest { prompt: whole, ..request("", 20) }).expect("a run"));
    let fork = remote.fork(run.id(), kept, GenerateRequest { prompt: Vec::new(), ..request("", 20) }).expect("a run");
    assert_eq!(outcome(&fork).1, alone.1);
    let long = remote.submit(request("another one", 900)).expect("a run");
    until("blocks in use", || server.engine.telemetry().snapshot().kv.used > 0);
    remote.abort(long.id());
    assert_eq!(outcome(&long).2, FinishReason::Aborted);
    until("free blocks", || server.engine.telemetry().snapshot().kv.used == 0);
    drop(remote.submit(request("and one more", 900)).expect("a run"));
    until("no request under way", || server.get("/load").json()["server_load"] == 0);
    // Prefixes are pinned there, too.
    let owner = OwnerTag { id: 1, label: "pin".into() };
    let tokens = request(&prompt.repeat(2), 1).prompt;
    let pin = PinRequest { owner, name: Some("boats".into()), tokens, cache_salt: 0, adapter: 0 };
    assert_eq!(outcome(&remote.pin_prefix(pin).expect("a pin")).2, FinishReason::Pinned);
    until("the pin in the list", || server.get("/kvasir/v1/prefixes").body.contains("\"boats\""));
}

#[test]
fn a_wrong_key_and_a_server_that_goes_are_told() {
    let options = ServerOptions { api_keys: vec!["secret".into()], ..ServerOptions::local() };
    let mut server = TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options);
    let stranger = connect(&server, None);
    until("a refusal", || matches!(stranger.status(), EngineStatus::Failed { fix: Some(_), .. }));
    assert!(stranger.submit(request("x", 1)).is_err());
    let friend = connect(&server, Some("secret"));
    friend.wait_for_model(|_| {}).expect("the server's model");
    assert_eq!(outcome(&friend.submit(request("x", 3)).expect("a run")).1.len(), 3);
    server.stop();
    server.join();
    until("the end of the connection", || matches!(friend.status(), EngineStatus::Loading { .. }));
}

#[test]
fn the_app_chats_and_inspects_through_a_server() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(EngineHandle::start_fake(slow(4)), ServerOptions::local());
    let remote = connect(&server, None);
    remote.wait_for_model(|_| {}).expect("the server's model");
    let mut app = harness(options(remote, dir.path()), [1440.0, 900.0], DemoOutcome::default());
    wait_for(&mut app, "the server's model", |state| state.model().is_some());
    let id = focused(&app);
    let settings = RunSettings { temperature: 0.0, max_tokens: 60, ..RunSettings::balanced() };
    send(&mut app, UiCommand::SetSettings { chat: id, settings: Box::new(settings) });
    send(&mut app, UiCommand::SendText { chat: id, text: "Tell me about boats".into() });
    wait_for(&mut app, "the run among the engine's requests", |state| {
        let known = |request| state.snapshot.requests.iter().any(|info| Some(info.id) == request);
        state.runs.values().any(|run| known(run.request))
    });
    send(&mut app, UiCommand::ShowWorkspace(Workspace::Inspect));
    app.run_steps(3);
    let text = screen(&app);
    assert!(text.contains("Tell me about boats"), "the chat's name stands at its request:\n{text}");
    wait_idle(&mut app);
    let answer = path(chat(&app, id)).last().expect("an answer").clone();
    let run = answer.run.as_ref().expect("a run");
    assert_eq!((run.status, run.output_tokens), (RunStatus::Done, 60));
    assert!(!answer.content.is_empty());
    // What another client does is seen as well.
    let other = server.engine.submit(request("somebody else", 300)).expect("a run");
    wait_for(&mut app, "a stranger's request", |state| {
        state.snapshot.requests.iter().any(|info| info.id == other.id())
    });
    app.run_steps(3);
    assert!(screen(&app).contains("A chat about boats"), "{}", screen(&app));
}

#[test]
fn a_server_that_is_gone_is_told_in_plain_words_inside_the_window() {
    let dir = tempfile::tempdir().expect("a folder");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let host = listener.local_addr().expect("an address").to_string();
    drop(listener);
    let remote = RemoteOptions { url: format!("http://{host}"), api_key: None, model: None };
    let engine = EngineHandle::connect(super::idle_engine().options(), remote);
    let mut app = harness(options(engine, dir.path()), [940.0, 560.0], DemoOutcome::default());
    let words = format!("The engine at {host} does not answer; trying again");
    let is_told = |s: &AppState| matches!(&s.engine, EngineStatus::Loading { phase, .. } if *phase == words);
    wait_for(&mut app, "the fault in words", is_told);
    app.run_steps(3);
    let text = screen(&app);
    assert!(text.contains(&format!("Waiting for the engine at {host}")), "{text}");
    assert!(!text.contains("drop a .gguf") && !text.contains("Cancel"), "{text}");
    let shown: Vec<_> = app.get_all_by_label_contains("does not answer").map(|node| node.rect()).collect();
    assert!(shown.len() >= 3 && shown.iter().all(|rect| rect.right() <= 940.0), "{shown:?}");
    send(&mut app, UiCommand::Split);
    send(&mut app, UiCommand::LoadDefaultModel);
    app.run_steps(3);
    let text = screen(&app);
    assert!(text.contains("Type a message; the engine is not there yet"), "{text}");
    assert!(text.contains("keeps the model"), "{text}");
}

#[test]
fn what_ran_before_is_not_denied_and_the_server_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(EngineHandle::start_fake(FakeOptions::small()), ServerOptions::local());
    outcome(&server.engine.submit(request("before anybody looked", 3)).expect("a run"));
    let remote = connect(&server, None);
    remote.wait_for_model(|_| {}).expect("the server's model");
    let mut app = harness(options(remote, dir.path()), [1440.0, 900.0], DemoOutcome::default());
    wait_for(&mut app, "the server's state", |state| state.model().is_some() && state.snapshot.step > 0);
    app.run_steps(3);
    let text = screen(&app);
    assert!(text.contains("ran before; the next ones show here"), "{text}");
    assert!(text.contains(&format!("engine at {}", server.address)), "{text}");
    assert!(!text.contains("drop a .gguf") && !text.contains("Nothing has run"), "{text}");
}
