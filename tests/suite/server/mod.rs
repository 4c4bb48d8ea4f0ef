//! The server on loopback: bodies, streams, errors, who is let in, how it ends.

mod access;
mod embeddings;
mod errors;
mod fleet;
mod infer;
#[cfg(feature = "kv-events")]
mod kv_events;
mod lifecycle;
mod load;
mod logprobs;
mod observe;
mod openapi;
mod other_apis;
mod prefixes;
mod random_schemas;
mod streams;
mod structured;
mod template;
mod tls;
mod tools;
mod traces;
mod transcripts;

use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::{Fleet, Server, ServerOptions};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No answer of these tests may take longer.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A server that ends with the test.
pub struct TestServer {
    pub engine: EngineHandle,
    pub address: SocketAddr,
    /// Where KV events are published, and replayed.
    pub kv_events: (Option<SocketAddr>, Option<SocketAddr>),
    stops: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Lower-case names.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The `data:` events of a stream.
    pub fn events(&self) -> Vec<String> {
        let events = self.body.split("\n\n").filter(|event| !event.is_empty());
        events.filter_map(|event| event.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// The events of a stream as JSON, after checking that `[DONE]` is the last one.
    pub fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap_or_else(|e| panic!("{e}: {event}"))).collect()
    }
}

impl TestServer {
    /// On the simulation.
    pub fn fake() -> TestServer {
        Self::start(EngineHandle::start_fake(FakeOptions::small()), ServerOptions::local())
    }

    pub fn start(engine: EngineHandle, options: ServerOptions) -> TestServer {
        let fleet = Fleet::of_one(engine.clone(), options.served_names.clone());
        Self::start_fleet(fleet, engine, options)
    }

    /// For several models; `engine` is that of the first.
    pub fn start_fleet(fleet: Fleet, engine: EngineHandle, options: ServerOptions) -> TestServer {
        let server = Server::bind_fleet(fleet, options).expect("a free port");
        let address = server.local_addr().expect("an address");
        let kv_events = server.kv_event_addrs();
        let stops = Arc::new(AtomicU32::new(0));
        let asked = stops.clone();
        let run = move || server.run(move || asked.load(Ordering::SeqCst)).expect("a server that ends well");
        TestServer { engine, address, kv_events, stops, thread: Some(std::thread::spawn(run)) }
    }

    /// Asks the server to stop, as a signal does.
    pub fn stop(&self) {
        self.stops.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits for the end of the server.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a server that does not panic");
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("a server that listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(request(method, path, headers, body).as_bytes()).expect("a server that reads");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        let answer = answer(&bytes);
        openapi::check(method, path, &answer);
        answer
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], &body.to_string())
    }

    /// A POST whose answer must be good.
    pub fn ok(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.body);
        answer.json()
    }

    /// Waits until a condition holds.
    pub fn wait_until(&self, what: &str, holds: impl Fn(&TestServer) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < TIMEOUT, "{what} does not come");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stops.fetch_add(2, Ordering::SeqCst);
        if !std::thread::panicking() {
            self.join();
        }
    }
}

/// The bytes of a request on a connection that closes after it.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    if !headers.iter().any(|(name, _)| *name == "host") {
        text.push_str("host: localhost\r\n");
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n" + body
}

pub fn answer(bytes: &[u8]) -> Answer {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status line");
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let is_chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let body = if is_chunked { dechunk(body) } else { body.to_owned() };
    Answer { status, headers, body }
}

fn dechunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        body.push_str(&after[..size]);
        rest = after[size..].strip_prefix("\r\n").unwrap_or_default();
        if size == 0 {
            break;
        }
    }
    body
}
