//! Metrics under vLLM's names, the engine's state and its steps.

use super::{TestServer, request};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::time::Duration;

/// Samples by name and labels other than those that all have.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = name.split_once('{').expect("labels");
        let rest = labels.strip_prefix("model_name=\"Simulation\",engine=\"0\"").expect("the common labels");
        let key = format!("{name}{}", rest.trim_end_matches('}').trim_start_matches(','));
        assert!(found.insert(key, value.parse().expect("a number")).is_none(), "twice: {line}");
    }
    found
}

#[test]
fn metrics_have_the_names_and_buckets_that_dashboards_know() {
    let server = TestServer::fake();
    let body = json!({ "prompt": "x".repeat(40), "max_tokens": 10, "ignore_eos": true, "n": 2 });
    server.ok("/v1/completions", &body);
    server.ok("/v1/completions", &body);
    // Gauges come from the latest snapshot, which may be a moment older than the answer.
    server.wait_until("a snapshot of the end", |server| {
        let kv = server.engine.telemetry().snapshot().kv;
        kv.query_tokens >= 80 && kv.used == 0
    });
    let answer = server.get("/metrics");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let found = samples(&answer.body);
    let check = |name: &str, want: f64| assert_eq!(found.get(name), Some(&want), "{name}");
    check("vllm:prompt_tokens_total", 80.0);
    check("vllm:generation_tokens_total", 40.0);
    check("vllm:request_success_totalfinished_reason=\"length\"", 2.0);
    check("vllm:request_success_totalfinished_reason=\"abort\"", 0.0);
    check("vllm:time_to_first_token_seconds_count", 2.0);
    check("vllm:e2e_request_latency_seconds_bucketle=\"+Inf\"", 2.0);
    check("vllm:inter_token_latency_seconds_count", 36.0);
    check("vllm:request_params_n_bucketle=\"1.0\"", 0.0);
    check("vllm:request_params_n_bucketle=\"2.0\"", 2.0);
    check("vllm:request_prompt_tokens_bucketle=\"50.0\"", 2.0);
    check("vllm:request_prompt_tokens_bucketle=\"20.0\"", 0.0);
    check("vllm:num_requests_running", 0.0);
    assert!(found["vllm:prefix_cache_queries_total"] >= 80.0 && found["vllm:prefix_cache_hits_total"] > 0.0);
    assert!(found["vllm:iteration_tokens_total_count"] >= 10.0);
    assert_eq!(found["vllm:iteration_tokens_total_count"], found["kvasir:steps_total"]);
    let bounds = |name: &str| -> Vec<f64> {
        let prefix = format!("{name}_bucketle=\"");
        let mut bounds: Vec<f64> = found
            .keys()
            .filter_map(|key| key.strip_prefix(&prefix)?.trim_end_matches('"').parse().ok())
            .filter(|bound: &f64| bound.is_finite())
            .collect();
        bounds.sort_by(f64::total_cmp);
        bounds
    };
    let ttft = bounds("vllm:time_to_first_token_seconds");
    assert_eq!((ttft.len(), ttft[0], ttft[21]), (22, 0.001, 2560.0));
    let latency = bounds("vllm:e2e_request_latency_seconds");
    assert_eq!((latency.len(), latency[0], latency[20]), (21, 0.3, 7680.0));
    assert_eq!(bounds("vllm:inter_token_latency_seconds").len(), 19);
    assert_eq!(bounds("vllm:request_prompt_tokens").last(), Some(&1000.0), "the context is 1024");
    for line in answer.body.lines().filter(|line| line.starts_with("# TYPE")) {
        let mut words = line.split(' ').skip(2);
        let (name, kind) = (words.next().expect("a name"), words.next().expect("a kind"));
        assert_eq!(kind == "counter", name.ends_with("_total") && name != "vllm:iteration_tokens_total", "{line}");
    }
    let config = found.keys().find(|key| key.starts_with("vllm:cache_config_info")).expect("the cache's settings");
    assert!(config.contains("block_size=\"16\"") && config.contains("num_gpu_blocks=\"129\""), "{config}");
}

/// Every name of vLLM that boards and routers look for, with its kind.
const NAMES: [(&str, &[&str]); 3] = [
    (
        "gauge",
        &[
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_waiting_by_reason",
            "kv_cache_usage_perc",
            "cache_config_info",
            "engine_sleep_state",
            "gpu_cache_usage_perc",
            "gpu_prefix_cache_hit_rate",
        ],
    ),
    (
        "counter",
        &[
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
            "prompt_tokens_total",
            "prompt_tokens_cached_total",
            "generation_tokens_total",
            "request_success_total",
            "corrupted_requests_total",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "gpu_prefix_cache_hits_total",
            "gpu_prefix_cache_queries_total",
        ],
    ),
    (
        "histogram",
        &[
            "request_prompt_tokens",
            "request_generation_tokens",
            "iteration_tokens_total",
            "request_params_n",
            "request_params_max_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "kv_block_lifetime_seconds",
            "kv_block_idle_before_evict_seconds",
            "kv_block_reuse_gap_seconds",
        ],
    ),
];

#[test]
fn every_name_that_is_promised_is_there_from_the_start() {
    let server = TestServer::fake();
    let page = server.get("/metrics").body;
    for (kind, names) in NAMES {
        for name in names {
            assert!(page.contains(&format!("# TYPE vllm:{name} {kind}\n")), "{kind} {name}");
            let sample =
                if kind == "histogram" { format!("\nvllm:{name}_bucket{{") } else { format!("\nvllm:{name}{{") };
            assert!(page.contains(&sample), "a sample of {name}");
        }
    }
}

#[test]
fn a_page_of_metrics_takes_less_than_a_millisecond() {
    let server = TestServer::fake();
    server.ok("/v1/completions", &json!({ "prompt": "x", "max_tokens": 5, "ignore_eos": true, "n": 2 }));
    let mut times: Vec<Duration> = (0..101)
        .map(|_| {
            let started = std::time::Instant::now();
            assert_eq!(server.get("/metrics").status, 200);
            started.elapsed()
        })
        .collect();
    times.sort();
    // With a new connection each, and on a machine that may be busy; a build without optimisation gets more.
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 20 } else { 8 });
    assert!(times[50] < limit, "{:?}", times[50]);
}

#[test]
fn an_abort_is_counted_as_one() {
    let fake = FakeOptions { step_delay: Duration::from_millis(10), ..FakeOptions::small() };
    let server = TestServer::start(EngineHandle::start_fake(fake), ServerOptions::local());
    let body = json!({ "prompt": "x", "max_tokens": 1000, "ignore_eos": true }).to_string();
    let load = |server: &TestServer| server.get("/load").json()["server_load"].clone();
    for _ in 0..3 {
        let mut stream = server.connect();
        let head = [("content-type", "application/json")];
        stream.write_all(request("POST", "/v1/completions", &head, &body).as_bytes()).expect("a server that reads");
        server.wait_until("a request under way", |server| load(server) == 1);
        drop(stream);
        server.wait_until("its end", |server| load(server) == 0);
    }
    let found = samples(&server.get("/metrics").body);
    assert_eq!(found["vllm:request_success_totalfinished_reason=\"abort\""], 3.0);
}

#[test]
fn steps_are_streamed_as_they_happen() {
    let server = TestServer::fake();
    server.ok("/v1/completions", &json!({ "prompt": "x", "max_tokens": 5, "ignore_eos": true }));
    let state = server.get("/kvasir/v1/state").json();
    assert_eq!(state["block_size"], 16);
    let mut stream = server.connect();
    stream.write_all(request("GET", "/kvasir/v1/steps?after=2", &[], "").as_bytes()).expect("a server that reads");
    let mut text = String::new();
    let mut piece = [0u8; 4096];
    while text.matches("\n\n").count() < 4 {
        let read = stream.read(&mut piece).expect("more steps");
        text.push_str(std::str::from_utf8(&piece[..read]).expect("UTF-8"));
    }
    let steps: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    assert_eq!(steps[0]["step"], 3);
    assert!(text.contains("id: 3\n") && steps[0]["rows"].is_array(), "{text}");
}

/// The metrics that an expression of Prometheus names: words with a colon.
fn metrics_of(expression: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    expression.split(move |c| !is_part(c)).filter(|word| word.contains(':'))
}

#[test]
fn the_grafana_board_asks_for_metrics_and_labels_that_there_are() {
    let server = TestServer::fake();
    server.ok("/v1/completions", &json!({ "prompt": "x", "max_tokens": 5, "ignore_eos": true }));
    let page = server.get("/metrics").body;
    let names: BTreeSet<&str> =
        page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split('{').next()).collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/grafana/kvasir.json");
    let board: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("the board")).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    let mut asked = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().expect("a title");
        for target in panel["targets"].as_array().expect("targets") {
            let expression = target["expr"].as_str().expect("an expression");
            assert_eq!(expression.matches('(').count(), expression.matches(')').count(), "{title}: {expression}");
            for name in metrics_of(expression) {
                assert!(names.contains(name), "{title}: there is no metric {name}");
                asked.insert(name);
            }
            // A label that the legend shows, or that the sum is by, is one of the metric's.
            for label in target["legendFormat"].as_str().unwrap_or_default().split("{{").skip(1) {
                let label = label.split("}}").next().expect("an end");
                let name = metrics_of(expression).next().expect("a metric");
                let has = page
                    .lines()
                    .any(|line| line.starts_with(&format!("{name}{{")) && line.contains(&format!("{label}=")));
                assert!(label == "instance" || has, "{title}: {name} has no label {label}");
            }
        }
    }
    assert!(panels.len() >= 12 && asked.len() >= 25, "{} panels, {asked:?}", panels.len());
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "ids are unique");
    for variable in board["templating"]["list"].as_array().expect("variables").iter().skip(1) {
        let query = variable["query"].as_str().expect("a query");
        assert!(metrics_of(query).all(|name| names.contains(name)), "{query}");
    }
}
