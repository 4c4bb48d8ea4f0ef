//! Who is let in: keys, hosts, origins, sizes, limits.

use super::{TestServer, answer, request};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const JSON: (&str, &str) = ("content-type", "application/json");

fn start(adjust: impl FnOnce(&mut ServerOptions)) -> TestServer {
    let mut options = ServerOptions::local();
    adjust(&mut options);
    TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options)
}

#[test]
fn a_wrong_key_reaches_no_handler() {
    let server = start(|options| options.api_keys = vec!["first".into(), "second".into()]);
    let body = r#"{"prompt":"x","max_tokens":1}"#;
    for (headers, status) in [
        (vec![JSON], 401),
        (vec![JSON, ("authorization", "Bearer wrong")], 401),
        (vec![JSON, ("authorization", "Bearer ")], 401),
        (vec![JSON, ("authorization", "first")], 401),
        (vec![JSON, ("authorization", "Bearer firs")], 401),
        (vec![JSON, ("authorization", "Bearer first")], 200),
        (vec![JSON, ("authorization", "bearer second")], 200),
        (vec![JSON, ("x-api-key", "second")], 200),
    ] {
        let answer = server.send("POST", "/v1/completions", &headers, body);
        assert_eq!(answer.status, status, "{headers:?}: {}", answer.body);
    }
    for path in ["/v1/models", "/load", "/no/such/path", "/tokenize", "/v1/loads", "/healthy", "/is_sleeping"] {
        let answer = server.get(path);
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
    }
    let answer = server.send("POST", "/v1/messages", &[JSON], "{}");
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (401, &"authentication_error".into()));
    for path in ["/health", "/health/live", "/health/ready", "/ping", "/version"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

/// Every path that the server says it serves, its parameters filled in.
fn all_paths() -> BTreeSet<String> {
    let document = TestServer::fake().get("/openapi.json").json();
    let paths = document["paths"].as_object().expect("paths").keys();
    let filled = paths.map(|path| path.split('/').map(|part| if part.starts_with('{') { "x" } else { part }));
    filled.map(|parts| parts.collect::<Vec<_>>().join("/")).collect()
}

#[test]
fn without_its_key_no_route_answers_but_those_of_health() {
    let server = start(|options| options.api_keys = vec!["right".into()]);
    let open = [
        "/health",
        "/health/live",
        "/health/ready",
        "/health/generate",
        "/ping",
        "/version",
        "/metrics",
        "/v2/health/live",
        "/v2/health/ready",
    ];
    let paths = all_paths();
    assert!(paths.len() > 30 && open.iter().all(|path| paths.contains(*path)), "{paths:?}");
    let body =
        r#"{"prompt":"x","max_tokens":1,"messages":[{"role":"user","content":"x"}],"input":"x","text_input":"x"}"#;
    for path in paths.iter().filter(|path| !open.contains(&path.as_str())) {
        for method in ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"] {
            for header in
                [("x-none", "x"), ("authorization", "Bearer wrong"), ("x-api-key", "Right"), ("api-key", "right")]
            {
                let answer = server.send(method, path, &[JSON, header], if method == "POST" { body } else { "" });
                assert_eq!(answer.status, 401, "{method} {path} {header:?}: {}", answer.body);
            }
        }
    }
    let under_way = server.send("GET", "/load", &[("x-api-key", "right")], "");
    assert_eq!(under_way.json()["server_load"], 0);
    assert_eq!(server.engine.step_totals().steps, 0, "nothing ran");
    // Paths that differ a little are not open either.
    for path in ["/health/../v1/models", "//health", "/Health", "/metrics/", "/health?/v1/models", "/v1/models?/health"]
    {
        let status = server.get(path).status;
        assert!(status == 401 || (path.starts_with("/health?") && status == 200), "{path}: {status}");
    }
}

#[test]
fn foreign_host_names_are_not_answered_on_loopback() {
    let server = start(|options| options.allowed_hosts = vec!["my.box".into()]);
    for (host, status) in [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("my.box:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.evil.example", 403),
        ("localhost:80.evil.example", 403),
        ("localhost:80", 200),
    ] {
        assert_eq!(server.send("GET", "/v1/models", &[("host", host)], "").status, status, "{host}");
    }
    for request in [
        "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        "GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ] {
        assert_eq!(first_line(&server, request), "HTTP/1.1 403 Forbidden", "{request}");
    }
}

/// The first line of the answer to these bytes.
fn first_line(server: &TestServer, request: &str) -> String {
    let mut stream = server.connect();
    stream.write_all(request.as_bytes()).expect("sent");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("an answer");
    line.trim_end().to_owned()
}

#[test]
fn a_body_that_announces_too_much_is_refused_before_it_comes() {
    let server = start(|_| {});
    let request = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n{";
    assert_eq!(first_line(&server, request), "HTTP/1.1 413 Payload Too Large");
}

#[test]
fn request_ids_come_back_and_odd_ones_are_replaced() {
    let server = start(|_| {});
    let id = |given: &str| {
        let answer = server.send("GET", "/health", &[("x-request-id", given)], "");
        answer.header("x-request-id").expect("an id").to_owned()
    };
    assert_eq!(id("abc-123"), "abc-123");
    let long = "x".repeat(300);
    assert!(id(&long).starts_with("req-"));
    assert!(server.get("/no/such/path").header("x-request-id").is_some_and(|id| id.starts_with("req-")));
}

#[test]
fn pages_of_allowed_origins_may_ask_without_a_key() {
    let server = start(|options| {
        options.allowed_origins = vec!["https://app.example".into()];
        options.api_keys = vec!["key".into()];
    });
    let ask = |origin| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization"),
        ];
        let answer = server.send("OPTIONS", "/v1/chat/completions", &headers, "");
        answer.header("access-control-allow-origin").map(str::to_owned)
    };
    assert_eq!(ask("https://app.example").as_deref(), Some("https://app.example"));
    assert_eq!(ask("https://evil.example"), None);
    let closed = start(|_| {});
    let answer = closed.send("GET", "/health", &[("origin", "https://app.example")], "");
    assert_eq!(answer.header("access-control-allow-origin"), None);
}

#[test]
fn large_bodies_are_refused() {
    let server = start(|options| options.max_body_bytes = 1000);
    let body = json!({ "prompt": "x".repeat(1000) }).to_string();
    let answer = server.send("POST", "/v1/completions", &[JSON], &body);
    assert_eq!(answer.status, 413, "{}", answer.body);
}

#[test]
fn a_body_that_is_cut_short_is_a_bad_request() {
    let server = start(|options| options.max_body_bytes = 1000);
    let whole = request("POST", "/v1/completions", &[JSON], &json!({ "prompt": "x".repeat(100) }).to_string());
    let mut stream = server.connect();
    stream.write_all(&whole.as_bytes()[..whole.len() - 20]).expect("a server that reads");
    stream.shutdown(std::net::Shutdown::Write).expect("half a connection");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let answer = answer(&bytes);
    assert_eq!(answer.status, 400, "{}", answer.body);
    assert!(answer.body.contains("the body ended early"), "{}", answer.body);
}

/// A server on which a request takes seconds, with one running.
fn busy(max_queue: u32, max_requests_per_key: usize) -> (TestServer, TcpStream) {
    let fake =
        FakeOptions { step_delay: Duration::from_millis(20), max_queue, max_num_seqs: 1, ..FakeOptions::small() };
    let options = ServerOptions { max_requests_per_key, ..ServerOptions::local() };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    let first = open(&server, "a");
    server.wait_until("the first request", |server| {
        server.engine.telemetry().snapshot().requests.iter().any(|r| r.output_tokens > 0)
    });
    (server, first)
}

const LONG: &str = r#"{"prompt":"x","max_tokens":900,"ignore_eos":true,"stream":true}"#;

fn open(server: &TestServer, key: &str) -> TcpStream {
    let mut stream = server.connect();
    let bearer = format!("Bearer {key}");
    let headers = [JSON, ("authorization", bearer.as_str())];
    stream.write_all(request("POST", "/v1/completions", &headers, LONG).as_bytes()).expect("a server that reads");
    stream
}

#[test]
fn a_full_queue_answers_429_with_a_time_to_try_again() {
    let (server, _first) = busy(2, 9);
    let _waiting = [open(&server, "a"), open(&server, "b")];
    server.wait_until("a full queue", |server| server.get("/load").json()["server_load"] == 3);
    let answer = server.send("POST", "/v1/completions", &[JSON, ("authorization", "Bearer c")], LONG);
    assert_eq!(answer.status, 429, "{}", answer.body);
    assert!(answer.header("retry-after").is_some() && answer.body.contains("queue is full"), "{}", answer.body);
}

#[test]
fn a_key_has_a_limit_of_its_own() {
    let (server, _first) = busy(9, 3);
    let _waiting = [open(&server, "a"), open(&server, "a")];
    server.wait_until("three of one key", |server| server.get("/load").json()["server_load"] == 3);
    let answer = server.send("POST", "/v1/completions", &[JSON, ("authorization", "Bearer a")], LONG);
    assert_eq!(answer.status, 429, "{}", answer.body);
    assert!(answer.body.contains("3 requests of this key"), "{}", answer.body);
    let _other = open(&server, "b");
    server.wait_until("another key", |server| server.get("/load").json()["server_load"] == 4);
}

#[test]
fn routers_are_told_what_runs_waits_and_comes_out() {
    let (server, _first) = busy(9, 9);
    let _waiting = [open(&server, "a"), open(&server, "b")];
    let load = |server: &TestServer| server.get("/v1/loads").json()["loads"][0].clone();
    server.wait_until("two that wait", |server| load(server)["num_waiting_reqs"] == 2);
    let load = load(&server);
    assert_eq!((&load["num_running_reqs"], &load["num_total_reqs"]), (&1.into(), &3.into()));
    // A prompt of one token each.
    assert_eq!(load["num_waiting_uncached_tokens"], 2);
    // A step of 20 ms gives one token, whatever else it takes.
    let rate = load["gen_throughput"].as_f64().expect("a number");
    assert!(rate > 0.0 && rate <= 50.0, "{load}");
}

#[test]
fn a_key_neither_sees_nor_ends_what_is_of_another() {
    let options = ServerOptions { api_keys: vec!["first".into(), "second".into()], ..ServerOptions::local() };
    let fake = FakeOptions { step_delay: Duration::from_millis(5), ..FakeOptions::small() };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    let of = |key: &str| ("authorization", format!("Bearer {key}"));
    let send = |method: &str, path: &str, key: &str, body: &str| {
        let (name, bearer) = of(key);
        server.send(method, path, &[JSON, (name, bearer.as_str())], body)
    };
    let made = send("POST", "/v1/responses", "first", r#"{"input":"hi","max_output_tokens":2}"#).json();
    let id = made["id"].as_str().expect("an id");
    let path = format!("/v1/responses/{id}");
    assert_eq!(send("GET", &path, "second", "").status, 404);
    assert_eq!(send("DELETE", &path, "second", "").status, 404);
    let follow = format!(r#"{{"input":"and?","previous_response_id":"{id}","max_output_tokens":2}}"#);
    assert_eq!(send("POST", "/v1/responses", "second", &follow).status, 404);
    assert_eq!(send("POST", "/v1/responses", "first", &follow).status, 200);

    let mut stream = open(&server, "first");
    server.wait_until("a running request", |server| server.engine.telemetry().snapshot().kv.used > 0);
    assert_eq!(send("POST", "/abort_requests", "second", "{}").json()["num_aborted"], 0);
    assert_eq!(send("POST", "/abort_requests", "first", "{}").json()["num_aborted"], 1);
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an end");
    assert!(text.contains("\"finish_reason\":\"abort\""), "{text}");
    assert_eq!(send("DELETE", &path, "first", "").status, 200);
}
