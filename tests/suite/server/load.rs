//! Many connections at once: they queue, none fails, and each that goes frees what it held.

use super::{TestServer, answer, request};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use kvasir::telemetry::RequestState;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const CONNECTIONS: usize = 256;
const HEADERS: [(&str, &str); 1] = [("content-type", "application/json")];

fn server(step_delay: Duration) -> TestServer {
    let fake = FakeOptions { step_delay, max_queue: 512, ..FakeOptions::small() };
    TestServer::start(EngineHandle::start_fake(fake), ServerOptions::local())
}

fn open(server: &TestServer, body: &Value) -> TcpStream {
    let mut stream = server.connect();
    let text = request("POST", "/v1/completions", &HEADERS, &body.to_string());
    stream.write_all(text.as_bytes()).expect("a server that reads");
    stream
}

fn used_blocks(server: &TestServer) -> u32 {
    server.engine.telemetry().snapshot().kv.used
}

fn under_way(server: &TestServer) -> Value {
    server.get("/load").json()["server_load"].clone()
}

#[test]
fn connections_beyond_the_batch_wait_and_none_fails() {
    let server = server(Duration::ZERO);
    let body = |i: usize, stream: bool| json!({ "prompt": format!("Prompt {}", i % 16), "max_tokens": 12, "seed": i % 16, "stream": stream });
    let alone: Vec<Value> =
        (0..16).map(|i| server.ok("/v1/completions", &body(i, false))["choices"][0]["text"].clone()).collect();
    let streams: Vec<TcpStream> = (0..CONNECTIONS).map(|i| open(&server, &body(i, true))).collect();
    for (i, mut stream) in streams.into_iter().enumerate() {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("a whole stream");
        let chunks = answer(&bytes).chunks();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(alone[i % 16], text, "connection {i}");
    }
    server.wait_until("free blocks", |server| used_blocks(server) == 0);
    assert_eq!(under_way(&server), 0);
}

#[test]
fn a_disconnect_frees_its_blocks_within_one_step() {
    let server = server(Duration::from_millis(250));
    for num_streams in [1, 8] {
        let body = json!({ "prompt": "x", "max_tokens": 900, "ignore_eos": true, "stream": true });
        let streams: Vec<TcpStream> = (0..num_streams).map(|_| open(&server, &body)).collect();
        server.wait_until("running requests", |server| used_blocks(server) >= num_streams);
        let before = server.engine.step_totals().steps;
        drop(streams);
        server.wait_until("free blocks", |server| used_blocks(server) == 0);
        // The step under way when the client left, and the one before whose plan the server may have told the engine.
        let steps = server.engine.step_totals().steps - before;
        assert!(steps <= 2, "{num_streams} streams: {steps} more steps");
    }
}

#[test]
fn a_crowd_that_leaves_at_once_leaves_nothing_behind() {
    let server = server(Duration::from_millis(5));
    for stream in [true, false] {
        let body = json!({ "prompt": "x", "max_tokens": 900, "ignore_eos": true, "stream": stream });
        let crowd: Vec<TcpStream> = (0..CONNECTIONS).map(|_| open(&server, &body)).collect();
        server.wait_until("the whole crowd", |server| under_way(server) == CONNECTIONS);
        drop(crowd);
        server.wait_until("an end of all requests", |server| under_way(server) == 0 && used_blocks(server) == 0);
        let snapshot = server.engine.telemetry().snapshot();
        assert!(snapshot.requests.iter().all(|request| request.state == RequestState::Finished));
    }
    let after = server.ok("/v1/completions", &json!({ "prompt": "x", "max_tokens": 3, "ignore_eos": true }));
    assert_eq!(after["usage"]["completion_tokens"], 3);
}
