//! LoRA adapters through the engine and the server, on a small real model.

use super::*;
use crate::server::{Answer, TestServer};
use crate::support::started;
use kvasir::config::{EngineArgs, EngineSection, HumanInt};
use kvasir::engine::EngineHandle;
use kvasir::engine::handle::{EngineStatus, FailureKind, LoraError};
use kvasir::engine::loader;
use kvasir::engine::options::{EngineOptions, LoadRequest, LoraModule, ModelSource, StepLoop};
use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, RunError, SamplingParams, StopRules, Usage};
use kvasir::recording::{Recording, replay};
use kvasir::server::{Fleet, ServerOptions};
use serde_json::json;

/// A folder with two adapters, and what loads the tiny llama with some of them.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().expect("a folder");
        let tensors = read_folder(&core_fixtures().join("tiny/llama"));
        for (name, recipe) in [("a", Recipe::new(21, 8, &ALL)), ("b", Recipe::new(22, 4, &["q_proj", "down_proj"]))] {
            write_adapter(&folder.path().join(name), &recipe, &tensors);
        }
        World { folder }
    }

    fn request(&self, names: &[&str], adjust: impl FnOnce(&mut EngineArgs)) -> LoadRequest {
        let mut args = EngineArgs { max_num_seqs: Some(HumanInt(4)), steps_ahead: true, ..EngineArgs::default() };
        let module = |name: &&str| LoraModule { name: (*name).into(), path: self.folder.path().join(name) };
        args.lora.lora_modules = names.iter().map(module).collect();
        adjust(&mut args);
        let options = args.resolve(&EngineSection::default(), self.folder.path(), Some(1)).expect("options");
        LoadRequest { source: ModelSource::Path(core_fixtures().join("tiny/llama")), options }
    }
}

fn generate(engine: &EngineHandle, adapter: u64, salt: u64) -> kvasir::engine::Run {
    let request = GenerateRequest {
        owner: OwnerTag { id: 1, label: "test".into() },
        prompt: (0..37).map(|i| 5 + i * 13 % 240).collect(),
        sampling: SamplingParams::greedy(),
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(12) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: salt,
        adapter,
    };
    engine.submit(request).unwrap_or_else(|e| panic!("{e}"))
}

fn hear(run: &kvasir::engine::Run) -> (Vec<u32>, Usage) {
    let mut all = Vec::new();
    loop {
        match run.recv() {
            Some(EngineEvent::Text { tokens, .. }) => all.extend(tokens),
            Some(EngineEvent::Finished { usage, .. }) => return (all, usage),
            Some(EngineEvent::Failed { error }) => panic!("{error}"),
            Some(_) => {}
            None => panic!("no end"),
        }
    }
}

#[test]
fn adapters_share_a_batch_and_no_prefixes_and_are_replayed() {
    let world = World::new();
    let record = world.folder.path().join("run.jsonl");
    let request = world.request(&["a", "b"], |args| args.record = Some(record.clone()));
    let Some(engine) = started(request.clone()) else { return };
    let loras = engine.model().expect("loaded").loras.list();
    assert_eq!(loras.iter().map(|l| (l.name.as_str(), l.rank)).collect::<Vec<_>>(), [("a", 8), ("b", 4)]);
    let ids = [0, loras[0].id, loras[1].id];
    // Alone, each with a salt of its own.
    let alone: Vec<Vec<u32>> = ids.iter().zip(1..).map(|(id, salt)| hear(&generate(&engine, *id, salt)).0).collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2], "{alone:?}");
    let together: Vec<_> = ids.map(|id| generate(&engine, id, 0)).iter().map(hear).collect();
    for (i, (tokens, usage)) in together.iter().enumerate() {
        assert_eq!((tokens, usage.cached_tokens), (&alone[i], 0), "request {i}");
    }
    for (i, id) in ids.into_iter().enumerate() {
        let (tokens, usage) = hear(&generate(&engine, id, 0));
        assert_eq!(tokens, alone[i]);
        assert!(usage.cached_tokens >= 32, "its own prefix is found again");
    }
    engine.shutdown();
    let recording =
        Recording::read(std::io::BufReader::new(std::fs::File::open(&record).expect("recorded"))).expect("a recording");
    // Recorded with steps that were submitted ahead, replayed without.
    let options = EngineOptions { record: None, step_loop: StepLoop::Sync, ..request.options };
    let mut loaded =
        loader::load(&LoadRequest { options, ..request }, &mut |_| true).unwrap_or_else(|e| panic!("{}", e.message));
    let report = replay(&recording, Some(&mut *loaded.executor)).unwrap_or_else(|e| panic!("{e}"));
    assert!(report.identical && report.compared_tokens > 0, "{report:?}");
    let mut without = recording;
    without.header.loras.clear();
    let refused = replay(&without, Some(&mut *loaded.executor));
    assert!(refused.is_err_and(|e| e.to_string().contains("LoRA adapter")));
}

#[test]
fn adapters_come_and_go_while_the_engine_runs() {
    let world = World::new();
    let Some(engine) = started(world.request(&["a"], |args| args.lora.max_loras = Some(2))) else { return };
    let path = |name: &str| world.folder.path().join(name);
    let too_large = engine.load_lora("x", &path("none"));
    assert!(
        matches!(too_large, Err(LoraError::Unusable(ref text)) if text.contains("adapter_config.json")),
        "{too_large:?}"
    );
    let b = engine.load_lora("b", &path("b")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(engine.load_lora("b", &path("b")), Err(LoraError::NameTaken("b".into())));
    let first = hear(&generate(&engine, b.id, 0)).0;
    assert_eq!(engine.unload_lora("c"), Err(LoraError::Unknown("c".into())));
    engine.pause();
    let run = generate(&engine, b.id, 0);
    assert_eq!(engine.unload_lora("b"), Err(LoraError::InUse("b".into())));
    engine.resume();
    assert_eq!(hear(&run).0, first);
    engine.unload_lora("b").unwrap_or_else(|e| panic!("{e}"));
    let gone =
        GenerateRequest { adapter: b.id, ..GenerateRequest::embedding(OwnerTag { id: 1, label: "x".into() }, vec![5]) };
    assert!(matches!(engine.submit(gone), Err(RunError::InvalidParam(_))));
    engine.shutdown();
    // What cannot be used ends the load with its name.
    let options = world.request(&["a", "missing"], |_| {});
    let engine = EngineHandle::start(options.options.clone());
    engine.load(options);
    match engine.wait_for_model(|_| {}) {
        Err(EngineStatus::Failed { kind: FailureKind::Model, message, .. }) => {
            assert!(message.contains("the LoRA adapter missing cannot be used"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_model_of_a_request_chooses_its_adapter() {
    let world = World::new();
    let Some(engine) = started(world.request(&["a", "b"], |_| {})) else { return };
    let served = Fleet::of_one(engine.clone(), vec!["base".into()]);
    let server = TestServer::start_fleet(served, engine, ServerOptions::local());
    let cards = server.get("/v1/models").json()["data"].clone();
    let seen: Vec<_> =
        cards.as_array().expect("a list").iter().map(|c| (c["id"].clone(), c["parent"].clone())).collect();
    assert_eq!(seen, [(json!("base"), json!(null)), (json!("a"), json!("base")), (json!("b"), json!("base"))]);
    assert_eq!(server.get("/v1/models/b").json()["root"], "b");
    let complete = |model: &str| {
        let body = json!({ "model": model, "prompt": [5, 9, 31, 77, 120], "max_tokens": 8, "temperature": 0, "ignore_eos": true });
        let answer = server.ok("/v1/completions", &body);
        assert_eq!(answer["model"], model);
        answer["choices"][0]["text"].clone()
    };
    let texts = ["base", "a", "b"].map(complete);
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    assert_eq!(complete("a"), texts[1]);
    let unknown = server.post("/v1/completions", &json!({ "model": "c", "prompt": "x" }));
    assert_eq!((unknown.status, unknown.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
}

#[test]
fn clients_load_and_unload_adapters_where_the_server_allows_it() {
    let world = World::new();
    let Some(engine) = started(world.request(&["a"], |args| args.lora.max_loras = Some(2))) else { return };
    let options = ServerOptions { allows_lora_updates: true, ..ServerOptions::local() };
    let server = TestServer::start_fleet(Fleet::of_one(engine.clone(), vec!["base".into()]), engine, options);
    let path = |name: &str| world.folder.path().join(name).display().to_string();
    let load =
        |name: &str, path: &str| server.post("/v1/load_lora_adapter", &json!({ "lora_name": name, "lora_path": path }));
    let unload = |name: &str| server.post("/v1/unload_lora_adapter", &json!({ "lora_name": name }));
    let complete = |model: &str| {
        let body = json!({ "model": model, "prompt": [5, 9, 31, 77, 120], "max_tokens": 8, "temperature": 0, "ignore_eos": true });
        server.post("/v1/completions", &body)
    };
    assert_eq!(complete("b").status, 404);
    let loaded = load("b", &path("b"));
    assert_eq!((loaded.status, loaded.body.as_str()), (200, "Success: LoRA adapter 'b' added successfully."));
    assert_eq!(server.get("/v1/models/b").json()["parent"], "base");
    let texts = ["base", "a", "b"].map(|model| complete(model).json()["choices"][0]["text"].clone());
    assert!(texts[0] != texts[2] && texts[1] != texts[2], "{texts:?}");
    // Refusals, by field.
    let error = |answer: Answer| (answer.status, answer.json()["error"]["param"].clone(), answer.body);
    for name in ["b", "base"] {
        let (status, param, body) = error(load(name, &path("b")));
        assert!(status == 400 && param == "lora_name" && body.contains("has already been loaded"), "{body}");
    }
    // The same content takes no place of its own.
    let twin = load("c", &path("a"));
    assert_eq!((twin.status, twin.body.as_str()), (200, "Success: LoRA adapter 'c' added successfully."));
    let (status, param, body) = error(load("d", &path("none")));
    assert!(status == 400 && param == "lora_path" && body.contains("no adapter_config.json (none)"), "{body}");
    assert!(!body.contains(&path("")), "no other path is told: {body}");
    let (status, param, _) = error(load("", &path("b")));
    assert_eq!((status, param), (400, json!("lora_name")));
    let in_place = json!({ "lora_name": "b", "lora_path": path("b"), "load_inplace": true });
    assert_eq!(server.post("/v1/load_lora_adapter", &in_place).status, 501);
    // It goes, and comes again with the same answers.
    assert_eq!(unload("b").body, "Success: LoRA adapter 'b' removed successfully.");
    assert_eq!((unload("b").status, unload("base").status, complete("b").status), (404, 404, 404));
    assert_eq!(load("b", &path("b")).status, 200);
    assert_eq!(complete("b").json()["choices"][0]["text"], texts[2]);
}

#[test]
fn a_server_that_allows_no_adapters_of_clients_refuses_them() {
    let server = TestServer::fake();
    let body = json!({ "lora_name": "a", "lora_path": "/tmp/a" });
    for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] {
        let answer = server.post(path, &body);
        assert!(answer.status == 403 && answer.body.contains("--allow-runtime-lora-updating"), "{}", answer.body);
    }
}

#[test]
fn routers_see_whose_adapters_run() {
    let world = World::new();
    let Some(engine) = started(world.request(&["a", "b"], |_| {})) else { return };
    let server = TestServer::start_fleet(Fleet::of_one(engine.clone(), Vec::new()), engine, ServerOptions::local());
    let labels =
        |running: &str| format!("max_lora=\"2\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"\"}}");
    let shows = |running: &str| {
        let page = server.get("/metrics").body;
        page.lines().any(|line| line.starts_with("vllm:lora_requests_info{") && line.contains(&labels(running)))
    };
    assert!(shows(""), "{}", server.get("/metrics").body);
    let long = json!({ "model": "b", "prompt": [5, 9, 31], "max_tokens": 100, "temperature": 0, "ignore_eos": true });
    let is_seen = std::thread::scope(|scope| {
        let runs = scope.spawn(|| (0..20).for_each(|_| assert_eq!(server.post("/v1/completions", &long).status, 200)));
        let mut is_seen = false;
        while !is_seen && !runs.is_finished() {
            is_seen = shows("b");
        }
        is_seen
    });
    assert!(is_seen, "twenty long answers, and none was seen to run");
}
