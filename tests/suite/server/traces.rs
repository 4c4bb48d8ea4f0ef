//! Spans of requests, as a collector gets them.

use super::TestServer;
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, sync_channel};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A collector on a free port, and the bodies that come to it.
fn collector() -> (String, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (sender, bodies) = sync_channel(64);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
            let body = loop {
                let num_read = stream.read(&mut piece).expect("a request");
                assert!(num_read > 0, "the connection ended early");
                bytes.extend_from_slice(&piece[..num_read]);
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let length = head
                    .lines()
                    .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
                if body.len() >= length.unwrap_or(0) {
                    break (
                        head.lines().next().unwrap_or_default().to_owned(),
                        serde_json::from_str(body).expect("JSON"),
                    );
                }
            };
            // Before the answer: whoever has that may look for the body at once.
            if sender.send(body).is_err() {
                return;
            }
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}");
        }
    });
    (url, bodies)
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let all = span["attributes"].as_array().expect("attributes");
    let found = all.iter().find(|attribute| attribute["key"] == key);
    &found.unwrap_or_else(|| panic!("no {key} in {span}"))["value"]
}

#[test]
fn each_request_is_a_span_of_the_clients_trace() {
    let (url, bodies) = collector();
    let options = ServerOptions { otlp_traces_endpoint: Some(url), ..ServerOptions::local() };
    let mut server = TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options);
    let body = json!({ "prompt": "hello", "max_tokens": 5, "ignore_eos": true, "temperature": 0, "n": 2 }).to_string();
    let headers = [("content-type", "application/json"), ("traceparent", PARENT), ("x-request-id", "mine")];
    assert_eq!(server.send("POST", "/v1/completions", &headers, &body).status, 200);
    let own = [("content-type", "application/json"), ("traceparent", "nonsense")];
    assert_eq!(server.send("POST", "/v1/completions", &own, &body).status, 200);
    // What is not sent yet goes out when the server ends.
    server.stop();
    server.join();
    let mut spans = Vec::new();
    while let Ok((line, body)) = bodies.try_recv() {
        assert_eq!(line, "POST /v1/traces HTTP/1.1");
        let resource = &body["resourceSpans"][0];
        assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "kvasir");
        spans.extend(resource["scopeSpans"][0]["spans"].as_array().expect("spans").clone());
    }
    assert_eq!(spans.len(), 2, "{spans:?}");
    let (first, second) = (&spans[0], &spans[1]);
    assert_eq!(
        (&first["traceId"], &first["parentSpanId"]),
        (&json!("0af7651916cd43dd8448eb211c80319c"), &json!("b7ad6b7169203331"))
    );
    assert_eq!(attribute(first, "gen_ai.request.id")["stringValue"], "mine");
    assert_eq!(attribute(first, "gen_ai.usage.prompt_tokens")["intValue"], "5");
    assert_eq!(attribute(first, "gen_ai.usage.completion_tokens")["intValue"], "10");
    assert_eq!(attribute(first, "gen_ai.request.n")["intValue"], "2");
    let times =
        ["startTimeUnixNano", "endTimeUnixNano"].map(|at| first[at].as_str().and_then(|ns| ns.parse::<u64>().ok()));
    assert!(times[0] < times[1] && times[0].is_some(), "{first}");
    let first_token = attribute(first, "gen_ai.latency.time_to_first_token")["doubleValue"].as_f64();
    assert!(first_token <= attribute(first, "gen_ai.latency.e2e")["doubleValue"].as_f64() && first_token.is_some());
    // Without a trace of the client's the span begins one.
    assert_eq!(second["parentSpanId"], "");
    assert!(second["traceId"].as_str().is_some_and(|id| id.len() == 32 && id != first["traceId"]), "{second}");
}
