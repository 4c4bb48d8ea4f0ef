//! Several models by name: loaded when they are asked for, unloaded to make room or for being idle.

use super::{TestServer, request};
use kvasir::engine::EngineHandle;
use kvasir::engine::handle::EngineStatus;
use kvasir::engine::options::{FakeOptions, LoadRequest, ModelSource};
use kvasir::server::{Fleet, FleetLimits, OnDemand, ServerOptions};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const LIMITS: FleetLimits =
    FleetLimits { memory_bytes: Some(200), idle_timeout: None, room_timeout: Duration::from_secs(60) };

/// Simulated models of 100 bytes each; the first one is loaded.
struct Models {
    server: TestServer,
    engines: Vec<EngineHandle>,
}

impl Models {
    fn start(names: &[&str], step_delay: Duration, limits: FleetLimits) -> Models {
        let model = |(i, name): (usize, &&str)| {
            let engine = EngineHandle::start_fake(FakeOptions { step_delay, ..FakeOptions::small() });
            if i > 0 {
                engine.unload();
            }
            let request = LoadRequest { source: ModelSource::Default, options: engine.options() };
            (engine, vec![(*name).to_owned()], OnDemand { request, bytes: 100, max_model_len: 1024 })
        };
        let models: Vec<_> = names.iter().enumerate().map(model).collect();
        let engines: Vec<EngineHandle> = models.iter().map(|(engine, ..)| engine.clone()).collect();
        let fleet = Fleet::on_demand(models, limits);
        let server = TestServer::start_fleet(fleet, engines[0].clone(), ServerOptions::local());
        let models = Models { server, engines };
        models.server.wait_until("a quiet start", |_| models.loaded() == [0]);
        models
    }

    fn loaded(&self) -> Vec<usize> {
        let is_loaded = |i: &usize| matches!(self.engines[*i].status(), EngineStatus::Ready(_));
        (0..self.engines.len()).filter(is_loaded).collect()
    }

    fn complete(&self, model: &str) -> Value {
        self.server.ok("/v1/completions", &json!({ "model": model, "prompt": "x", "max_tokens": 4, "temperature": 0 }))
    }
}

#[test]
fn the_model_that_was_used_longest_ago_gives_way() {
    let models = Models::start(&["a", "b", "c"], Duration::ZERO, LIMITS);
    let list = models.server.get("/v1/models").json();
    let ids: Vec<&str> =
        list["data"].as_array().expect("a list").iter().filter_map(|card| card["id"].as_str()).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    assert!(list["data"].as_array().expect("a list").iter().all(|card| card["max_model_len"] == 1024));
    let first = models.complete("a");
    assert_eq!(first["model"], "a");
    assert_eq!(models.complete("b")["model"], "b");
    assert_eq!(models.loaded(), [0, 1]);
    models.complete("a");
    models.complete("c");
    assert_eq!(models.loaded(), [0, 2], "b was used before a");
    assert_eq!(models.complete("a")["choices"], first["choices"], "the same model as ever");
    let unknown = models.server.post("/v1/completions", &json!({ "model": "d", "prompt": "x" }));
    assert_eq!((unknown.status, unknown.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
    assert_eq!(models.server.get("/v1/models/b").json()["id"], "b");
    let page = models.server.get("/metrics").body;
    let sample = |name: &str, model: &str| {
        let start = format!("{name}{{model_name=\"{model}\",engine=\"0\"");
        let line = page.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {start}"));
        line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).expect("a number")
    };
    assert_eq!(["a", "b", "c"].map(|model| sample("vllm:generation_tokens_total", model)), [12.0, 4.0, 4.0]);
    assert_eq!(["a", "b", "c"].map(|model| sample("kvasir:model_loads_total", model)), [1.0, 1.0, 1.0]);
    assert_eq!(["a", "b", "c"].map(|model| sample("kvasir:model_unloads_total", model)), [0.0, 1.0, 0.0]);
    assert_eq!(["a", "b", "c"].map(|model| sample("vllm:engine_sleep_state", model)), [1.0, 0.0, 1.0]);
    assert_eq!(page.matches("# TYPE vllm:generation_tokens_total").count(), 1);
}

#[test]
fn every_api_loads_the_model_that_it_names() {
    let models = Models::start(&["a", "b"], Duration::ZERO, FleetLimits { memory_bytes: Some(100), ..LIMITS });
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let requests = [
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 2 })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 2 })),
        ("/v1/responses", json!({ "input": "hi", "max_output_tokens": 2 })),
        ("/v1/embeddings", json!({ "input": "hi" })),
        ("/tokenize", json!({ "prompt": "hi" })),
        ("/detokenize", json!({ "tokens": [104] })),
        ("/kvasir/v1/prefixes", json!({ "prompt": "x".repeat(40) })),
    ];
    for (i, (path, mut body)) in requests.into_iter().enumerate() {
        for (at, name) in [(1, "b"), (0, "a")] {
            body["model"] = name.into();
            models.server.ok(path, &body);
            assert_eq!(models.loaded(), [at], "request {i} to {path}");
        }
    }
    models.server.ok("/v2/models/b/generate", &json!({ "text_input": "hi", "max_tokens": 2 }));
    assert_eq!(models.loaded(), [1]);
    assert_eq!(models.server.get("/v2/models/a/ready").status, 200, "it is loaded for whoever asks");
    assert_eq!(models.server.get("/kvasir/v1/state?model=b").status, 200);
    assert_eq!(models.server.get("/kvasir/v1/state?model=a").status, 503);
    assert_eq!(models.server.get("/kvasir/v1/state?model=x").status, 404);
    assert_eq!(models.server.get("/health").status, 200);
}

#[test]
fn a_model_in_use_is_not_unloaded() {
    let limits = FleetLimits { memory_bytes: Some(100), ..LIMITS };
    let models = Models::start(&["a", "b"], Duration::from_millis(5), limits);
    let body = json!({ "model": "a", "prompt": "x", "max_tokens": 100, "ignore_eos": true, "stream": true });
    let mut stream = models.server.connect();
    let text = request("POST", "/v1/completions", &[("content-type", "application/json")], &body.to_string());
    stream.write_all(text.as_bytes()).expect("a server that reads");
    models.server.wait_until("a running request", |server| server.engine.telemetry().snapshot().kv.used > 0);
    let started = Instant::now();
    assert_eq!(models.complete("b")["model"], "b");
    assert!(started.elapsed() >= Duration::from_millis(200), "it waited for a: {:?}", started.elapsed());
    assert_eq!(models.loaded(), [1]);
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the whole stream");
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
}

#[test]
fn a_request_that_finds_no_room_is_told_so() {
    let limits = FleetLimits { memory_bytes: Some(100), room_timeout: Duration::from_millis(50), ..LIMITS };
    let models = Models::start(&["a", "b"], Duration::from_millis(5), limits);
    let body = json!({ "model": "a", "prompt": "x", "max_tokens": 900, "ignore_eos": true });
    let mut connection = models.server.connect();
    let text = request("POST", "/v1/completions", &[("content-type", "application/json")], &body.to_string());
    connection.write_all(text.as_bytes()).expect("a server that reads");
    models.server.wait_until("a running request", |server| server.engine.telemetry().snapshot().kv.used > 0);
    let refused = models.server.post("/v1/completions", &json!({ "model": "b", "prompt": "x" }));
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("model_memory_in_use")));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(models.loaded(), [0]);
    // The client goes, and with it the last use of the model.
    drop(connection);
    models.server.wait_until("room for b", |server| {
        server.post("/v1/completions", &json!({ "model": "b", "prompt": "x", "max_tokens": 1 })).status == 200
    });
    assert_eq!(models.loaded(), [1]);
}

#[test]
fn an_idle_model_is_unloaded_and_comes_back() {
    let limits = FleetLimits { memory_bytes: None, idle_timeout: Some(Duration::from_millis(100)), ..LIMITS };
    let models = Models::start(&["a"], Duration::ZERO, limits);
    let before = models.complete("a");
    models.server.wait_until("an unloaded model", |_| models.loaded().is_empty());
    assert_eq!(models.server.get("/health").status, 200, "it is loaded for whoever asks");
    assert_eq!(models.server.get("/v1/models").json()["data"][0]["id"], "a");
    assert!(models.server.get("/metrics").body.contains("sleep_state=\"discard_all\"} 1"));
    assert_eq!(models.complete("a")["choices"], before["choices"]);
}

#[test]
fn a_model_that_cannot_be_loaded_stops_no_other() {
    let good = EngineHandle::start_fake(FakeOptions::small());
    let on_demand =
        |source| OnDemand { request: LoadRequest { source, options: good.options() }, bytes: 100, max_model_len: 1024 };
    let broken = EngineHandle::start(good.options());
    let path = std::path::PathBuf::from("no/such/model.gguf");
    let fleet = Fleet::on_demand(
        vec![
            (good.clone(), vec!["good".into()], on_demand(ModelSource::Default)),
            (broken, vec!["broken".into()], on_demand(ModelSource::Path(path))),
        ],
        LIMITS,
    );
    let server = TestServer::start_fleet(fleet, good, ServerOptions::local());
    for _ in 0..2 {
        let answer = server.post("/v1/completions", &json!({ "model": "broken", "prompt": "x" }));
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (503, Some("model_not_loaded")));
        assert!(!answer.body.contains("no/such"), "{}", answer.body);
    }
    server.ok("/v1/completions", &json!({ "model": "good", "prompt": "x", "max_tokens": 1 }));
}

#[test]
fn many_requests_to_an_unloaded_model_share_one_load() {
    let models = Models::start(&["a", "b", "c"], Duration::ZERO, LIMITS);
    std::thread::scope(|scope| {
        for i in 0..30 {
            let models = &models;
            scope.spawn(move || models.complete(["a", "b", "c"][i % 3]));
        }
    });
    assert!(models.loaded().len() <= 2, "{:?}", models.loaded());
}
