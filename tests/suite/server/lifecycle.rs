//! Starting, clients that leave, draining, stopping.

use super::{TestServer, request};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::{ServeError, Server, ServerOptions};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn slow() -> TestServer {
    let fake = FakeOptions { step_delay: Duration::from_millis(10), ..FakeOptions::small() };
    TestServer::start(EngineHandle::start_fake(fake), ServerOptions::local())
}

fn open(server: &TestServer, body: &Value) -> TcpStream {
    let mut stream = server.connect();
    let text = request("POST", "/v1/completions", &[("content-type", "application/json")], &body.to_string());
    stream.write_all(text.as_bytes()).expect("a server that reads");
    stream
}

fn used_blocks(server: &TestServer) -> u32 {
    server.engine.telemetry().snapshot().kv.used
}

#[test]
fn a_disconnect_frees_the_blocks() {
    let server = slow();
    for stream in [true, false] {
        let body = json!({ "prompt": "x", "max_tokens": 900, "ignore_eos": true, "n": 2, "stream": stream });
        let connection = open(&server, &body);
        server.wait_until("a running request", |server| used_blocks(server) > 0);
        drop(connection);
        let left = Instant::now();
        server.wait_until("free blocks", |server| used_blocks(server) == 0);
        // A step takes 10 ms here, and the snapshot may be 33 ms old.
        assert!(left.elapsed() < Duration::from_millis(1500), "{:?}", left.elapsed());
        server.wait_until("no request under way", |server| server.get("/load").json()["server_load"] == 0);
    }
}

/// Whether a stream that nobody read until now has its last event, and whether its body has its end.
fn end_of(mut stream: TcpStream) -> (bool, bool) {
    let mut late = Vec::new();
    // The end may be a reset.
    let _ = stream.read_to_end(&mut late);
    let tail = String::from_utf8_lossy(&late[late.len().saturating_sub(64)..]).into_owned();
    (tail.contains("[DONE]"), tail.ends_with("0\r\n\r\n"))
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_slows_nobody() {
    let fake = FakeOptions { max_model_len: 1024, ..FakeOptions::small() };
    let options = ServerOptions { slow_client_timeout: Duration::from_millis(300), ..ServerOptions::local() };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    // Many streams that echo a long prompt fill the socket's buffers; nobody reads them.
    let prompt = "word ".repeat(150);
    let prompts: Vec<&str> = vec![prompt.as_str(); 8];
    let body = json!({
        "prompt": prompts, "max_tokens": 200, "ignore_eos": true, "n": 16, "echo": true, "stream": true,
        "return_token_ids": true, "logprobs": 5,
    });
    let unread: Vec<TcpStream> = (0..2).map(|_| open(&server, &body)).collect();
    let started = Instant::now();
    let quick = server.ok("/v1/completions", &json!({ "prompt": "x", "max_tokens": 2 }));
    assert_eq!(quick["usage"]["completion_tokens"], 2);
    assert!(started.elapsed() < Duration::from_secs(30));
    server.wait_until("an end of the unread streams", |server| server.get("/load").json()["server_load"] == 0);
    let ends: Vec<(bool, bool)> = unread.into_iter().map(end_of).collect();
    assert!(ends.iter().all(|(is_whole, is_closed)| is_whole == is_closed), "a cut answer looks whole: {ends:?}");
    assert!(ends.iter().any(|(is_whole, _)| !is_whole), "no stream was cut off: {ends:?}");
}

#[test]
fn an_engine_that_makes_no_progress_is_noticed_dumped_and_well_again_when_it_does() {
    let fake = FakeOptions { step_delay: Duration::from_secs(3), ..FakeOptions::small() };
    let folder = tempfile::tempdir().expect("a folder");
    let stall_dir = Some(folder.path().join("logs"));
    let options = ServerOptions {
        stall_timeout: Duration::from_millis(300),
        stall_dir: stall_dir.clone(),
        ..ServerOptions::local()
    };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    assert_eq!(server.get("/health").status, 200);
    let _waiting = open(&server, &json!({ "prompt": "12345", "max_tokens": 1 }));
    server.wait_until("a server that is not well", |server| server.get("/health").status == 503);
    let files = || std::fs::read_dir(stall_dir.as_ref()?).ok()?.next()?.ok().map(|file| file.path());
    server.wait_until("a file", |_| files().is_some());
    let read = || -> Option<Value> { serde_json::from_slice(&std::fs::read(files()?).ok()?).ok() };
    server.wait_until("a whole file", |_| read().is_some());
    let dump = read().expect("JSON");
    assert_eq!(dump["in_flight"]["rows"][0]["num_tokens"], 5, "{dump}");
    assert_eq!((&dump["in_flight"]["num_running"], &dump["steps"]), (&json!(1), &json!(0)), "{dump}");
    assert!(dump["stalled_ms"].as_u64() >= Some(300) && dump["snapshot"]["kv"].is_object(), "{dump}");
    let live = server.get("/health/live");
    assert!(live.status == 503 && live.body.contains("no progress"), "{}", live.body);
    server.wait_until("a server that is well", |server| server.get("/health/live").status == 200);
}

#[test]
fn the_name_of_a_prefix_has_a_bounded_length() {
    let server = slow();
    let body = |name: usize| json!({ "prompt": "a prefix of some blocks ".repeat(4), "name": "x".repeat(name) });
    let refused = server.post("/kvasir/v1/prefixes", &body(300));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("name")), "{}", refused.body);
    let kept = server.ok("/kvasir/v1/prefixes", &body(200));
    let path = format!("/kvasir/v1/prefixes/{}", kept["id"].as_str().expect("an id"));
    let refused = server.post(&path, &json!({ "pinned": true, "name": "x".repeat(300) }));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("name")), "{}", refused.body);
}

#[test]
fn a_drain_finishes_what_runs_and_refuses_what_is_new() {
    let mut server = slow();
    let mut connection = open(&server, &json!({ "prompt": "x", "max_tokens": 60, "ignore_eos": true, "stream": true }));
    server.wait_until("a running request", |server| used_blocks(server) > 0);
    server.stop();
    server.wait_until("an unready server", |server| server.get("/health").status == 503);
    assert_eq!(server.get("/health/live").status, 200);
    let refused = server.post("/v1/completions", &json!({ "prompt": "x" }));
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.header("retry-after").is_some());
    let mut text = String::new();
    connection.read_to_string(&mut text).expect("the rest of the stream");
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    server.join();
    assert!(TcpStream::connect(server.address).is_err(), "nobody listens any more");
}

#[test]
fn what_outlasts_the_time_of_a_drain_is_told_so() {
    let options = ServerOptions { shutdown_timeout: Duration::from_millis(200), ..ServerOptions::local() };
    let fake = FakeOptions { step_delay: Duration::from_millis(10), ..FakeOptions::small() };
    let mut server = TestServer::start(EngineHandle::start_fake(fake), options);
    let long = json!({ "prompt": "x", "max_tokens": 1000, "ignore_eos": true });
    let mut streaming = long.clone();
    streaming["stream"] = true.into();
    let mut connections = [open(&server, &streaming), open(&server, &long)];
    server.wait_until("two that run", |server| {
        let snapshot = server.engine.telemetry().snapshot();
        snapshot.requests.iter().filter(|request| request.output_tokens > 0).count() == 2
    });
    server.stop();
    let [stream, whole] = connections.each_mut().map(|connection| {
        let mut text = String::new();
        connection.read_to_string(&mut text).expect("an answer with an end");
        text
    });
    assert!(stream.contains("data: {\"error\":") && stream.contains("shutting down"), "{stream}");
    assert!(!stream.contains("[DONE]") && stream.ends_with("0\r\n\r\n"), "{stream}");
    assert!(whole.starts_with("HTTP/1.1 503") && whole.contains("shutting down"), "{whole}");
    server.join();
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut server = slow();
    let _running = open(&server, &json!({ "prompt": "x", "max_tokens": 1000, "ignore_eos": true }));
    server.wait_until("a running request", |server| used_blocks(server) > 0);
    server.stop();
    server.stop();
    let started = Instant::now();
    server.join();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    let engine = server.engine.clone();
    assert!(engine.wait_idle(Duration::from_secs(10)), "its requests were aborted");
}

#[test]
fn a_server_without_a_model_listens_and_is_not_ready() {
    let options = kvasir::config::EngineArgs::default()
        .resolve(&kvasir::config::EngineSection::default(), std::path::Path::new("cache"), None)
        .expect("default options");
    let server = TestServer::start(EngineHandle::start(options), ServerOptions::local());
    assert_eq!(server.get("/health").status, 503);
    assert_eq!(server.get("/health/live").status, 200);
    let answer = server.post("/v1/chat/completions", &json!({ "messages": [{ "role": "user", "content": "hi" }] }));
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert_eq!(server.get("/v1/models").status, 503);
}

#[test]
fn requests_are_aborted_by_name() {
    let server = slow();
    let body = json!({ "prompt": "x", "max_tokens": 900, "ignore_eos": true }).to_string();
    let mut stream = server.connect();
    let headers = [("content-type", "application/json"), ("x-request-id", "mine")];
    stream.write_all(request("POST", "/v1/completions", &headers, &body).as_bytes()).expect("a server that reads");
    server.wait_until("a running request", |server| used_blocks(server) > 0);
    assert_eq!(server.ok("/abort_requests", &json!({ "request_ids": ["other"] }))["num_aborted"], 0);
    assert_eq!(server.ok("/abort_requests", &json!({ "request_ids": ["mine"] }))["num_aborted"], 1);
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.contains("\"finish_reason\":\"abort\""), "{text}");
}

#[test]
fn a_taken_port_is_told_before_anything_is_loaded() {
    let server = TestServer::fake();
    let options = ServerOptions { port: server.address.port(), ..ServerOptions::local() };
    let error = Server::bind(server.engine.clone(), options).err().expect("a taken port");
    assert!(matches!(error, ServeError::Busy { .. }), "{error}");
}

#[cfg(unix)]
#[test]
fn a_unix_socket_serves_and_is_removed() {
    use std::os::unix::net::UnixStream;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("kvasir.sock");
    let engine = EngineHandle::start_fake(FakeOptions::small());
    let options = || ServerOptions { uds: Some(path.clone()), ..ServerOptions::local() };
    let server = Server::bind(engine.clone(), options()).expect("a socket");
    let stops = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let asked = stops.clone();
    let thread = std::thread::spawn(move || server.run(move || asked.load(std::sync::atomic::Ordering::SeqCst)));
    let mut stream = UnixStream::connect(&path).expect("a server that listens");
    stream.write_all(request("GET", "/health", &[], "").as_bytes()).expect("a server that reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(matches!(Server::bind(engine, options()), Err(ServeError::Busy { .. })));
    stops.store(1, std::sync::atomic::Ordering::SeqCst);
    thread.join().expect("no panic").expect("a good end");
    assert!(!path.exists());
}
