//! KV events as a router hears them.

use super::TestServer;
use axum::body::Bytes;
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::kv::{CacheKey, prefix_id};
use kvasir::server::{KvEventFormat, KvEventOptions, ServeError, Server, ServerOptions};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const BLOCK: usize = 16;
const WAIT: Duration = Duration::from_secs(20);
/// No message for so long: none is on its way.
const QUIET: Duration = Duration::from_millis(300);

fn options(format: KvEventFormat) -> ServerOptions {
    let kv_events = KvEventOptions {
        endpoint: "tcp://127.0.0.1:0".into(),
        replay_endpoint: Some("tcp://127.0.0.1:0".into()),
        topic: None,
        format,
    };
    ServerOptions { kv_events: Some(kv_events), served_names: vec!["tiny".into()], ..ServerOptions::local() }
}

/// A pool of 24 blocks.
fn server(format: KvEventFormat) -> TestServer {
    let fake = FakeOptions { num_blocks: 25, ..FakeOptions::small() };
    TestServer::start(EngineHandle::start_fake(fake), options(format))
}

fn prompt(kind: u32, len: usize) -> Value {
    (0..len as u32).map(|i| 1 + (kind * 37 + i * 3) % 120).collect()
}

/// What a subscriber and the replay socket gave, by number: the number of the message and its events.
struct Router {
    runtime: tokio::runtime::Runtime,
    socket: SubSocket,
    replay: SocketAddr,
    messages: BTreeMap<u64, Vec<Value>>,
    topic: String,
}

impl Router {
    /// Subscribed, once a first message has come.
    fn connect(server: &TestServer) -> Router {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (events, replay) = server.kv_events;
        let mut socket = runtime.block_on(async { SubSocket::new() });
        let endpoint = format!("tcp://{}", events.expect("an address"));
        runtime.block_on(socket.connect(&endpoint)).expect("a socket that listens");
        runtime.block_on(socket.subscribe("kv@")).expect("a subscription");
        let topic = format!("kv@{}@tiny", server.address);
        let replay = replay.expect("an address");
        let mut router = Router { runtime, socket, replay, messages: BTreeMap::new(), topic };
        for kind in 0.. {
            server.ok("/v1/completions", &json!({ "prompt": prompt(1000 + kind, 20), "max_tokens": 1 }));
            router.listen();
            if !router.messages.is_empty() {
                break;
            }
            assert!(kind < 50, "no message comes");
        }
        router
    }

    /// Reads until nothing comes for a while.
    fn listen(&mut self) {
        loop {
            let next = async { tokio::time::timeout(QUIET, self.socket.recv()).await };
            let Ok(message) = self.runtime.block_on(next) else { return };
            self.take(message.expect("a message"));
        }
    }

    fn take(&mut self, message: ZmqMessage) {
        let frames = message.into_vec();
        assert_eq!(frames.len(), 3, "topic, number, batch");
        assert_eq!(frames[0], self.topic.as_bytes());
        let (seq, events) = decode(&frames[1], &frames[2]);
        assert!(self.messages.insert(seq, events).is_none(), "message {seq} came twice");
    }

    /// Asks for what was sent before the subscription, as routers do.
    fn catch_up(&mut self) {
        let missed = self.runtime.block_on(async {
            let mut socket = DealerSocket::new();
            socket.connect(&format!("tcp://{}", self.replay)).await.expect("a socket that listens");
            let ask = vec![Bytes::new(), Bytes::copy_from_slice(&0u64.to_be_bytes())];
            socket.send(ZmqMessage::try_from(ask).expect("two frames")).await.expect("a router that reads");
            let mut missed = BTreeMap::new();
            loop {
                let answer = tokio::time::timeout(WAIT, socket.recv()).await.expect("an answer").expect("a message");
                let frames = answer.into_vec();
                assert_eq!((frames.len(), frames[0].len()), (4, 0));
                assert_eq!(frames[1], self.topic.as_bytes());
                if frames[3].is_empty() {
                    assert_eq!(frames[2].as_ref(), (-1i64).to_be_bytes());
                    return missed;
                }
                let (seq, events) = decode(&frames[2], &frames[3]);
                missed.insert(seq, events);
            }
        });
        for (seq, events) in missed {
            let known = self.messages.entry(seq).or_insert_with(|| events.clone());
            assert_eq!(*known, events, "the same message again");
        }
    }

    /// What can be found by the events alone: parent and tokens by hash.
    fn findable(&self) -> HashMap<u64, (Option<u64>, Vec<u32>)> {
        let numbers: Vec<u64> = self.messages.keys().copied().collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<u64>>(), "no gap");
        let mut findable = HashMap::new();
        for event in self.messages.values().flatten() {
            apply(event, &mut findable);
        }
        findable
    }
}

fn decode(seq: &[u8], batch: &[u8]) -> (u64, Vec<Value>) {
    let seq = u64::from_be_bytes(seq.try_into().expect("eight bytes"));
    let (seconds, events, rank): (f64, Vec<Value>, Option<u32>) = rmp_serde::from_slice(batch).expect("a batch");
    assert!(seconds > 1.7e9 && rank.is_none() && !events.is_empty(), "{seconds} {rank:?} {events:?}");
    (seq, events)
}

/// A field by its place in arrays and by its name in maps.
fn field<'a>(event: &'a Value, place: usize, name: &str) -> &'a Value {
    event.get(place).or_else(|| event.get(name)).unwrap_or_else(|| panic!("{event} has no {name}"))
}

fn hashes(event: &Value) -> Vec<u64> {
    let hashes = field(event, 1, "block_hashes").as_array().expect("hashes");
    hashes.iter().map(|hash| hash.as_u64().expect("a hash")).collect()
}

fn apply(event: &Value, findable: &mut HashMap<u64, (Option<u64>, Vec<u32>)>) {
    match field(event, 0, "type").as_str().expect("a type") {
        "BlockStored" => {
            let mut parent = field(event, 2, "parent_block_hash").as_u64();
            let tokens = field(event, 3, "token_ids").as_array().expect("tokens");
            let tokens: Vec<u32> = tokens.iter().map(|token| token.as_u64().expect("a token") as u32).collect();
            let hashes = hashes(event);
            assert_eq!(*field(event, 4, "block_size"), json!(BLOCK));
            assert_eq!(tokens.len(), hashes.len() * BLOCK);
            assert_eq!(*field(event, 6, "medium"), json!("GPU"));
            for (hash, tokens) in hashes.into_iter().zip(tokens.chunks(BLOCK)) {
                assert!(parent.is_none_or(|parent| findable.contains_key(&parent)), "a block without its parent");
                assert!(findable.insert(hash, (parent, tokens.to_vec())).is_none(), "{hash:x} was there");
                parent = Some(hash);
            }
        }
        "BlockRemoved" => {
            hashes(event).iter().for_each(|hash| assert!(findable.remove(hash).is_some(), "{hash:x} was not there"));
        }
        "AllBlocksCleared" => findable.clear(),
        other => panic!("unknown event {other}"),
    }
}

/// All tokens from the first to those of this block.
fn prefix_of(hash: u64, findable: &HashMap<u64, (Option<u64>, Vec<u32>)>) -> Option<Vec<u32>> {
    let (parent, own) = findable.get(&hash)?;
    let before = parent.map_or(Some(Vec::new()), |parent| prefix_of(parent, findable))?;
    Some([before.as_slice(), own].concat())
}

#[test]
fn a_router_knows_every_cached_block_and_learns_of_evictions() {
    for format in [KvEventFormat::Array, KvEventFormat::Map] {
        let server = server(format);
        let mut router = Router::connect(&server);
        let shared = prompt(1, 64);
        server.ok("/v1/completions", &json!({ "prompt": shared, "max_tokens": 20, "ignore_eos": true }));
        router.listen();
        router.catch_up();
        let findable = router.findable();
        let first: Vec<u32> = serde_json::from_value(shared).expect("ids");
        let id = |len: usize| prefix_id(CacheKey::default(), BLOCK as u32, &first[..len]).expect("a block");
        for len in [16, 32, 48, 64] {
            assert_eq!(prefix_of(id(len), &findable).as_deref(), Some(&first[..len]), "{format:?}");
        }
        // More than the pool holds: the first prompt goes.
        for kind in 2..10 {
            server.ok("/v1/completions", &json!({ "prompt": prompt(kind, 80), "max_tokens": 2 }));
        }
        router.listen();
        let findable = router.findable();
        assert!(!findable.contains_key(&id(64)), "it was evicted");
        assert!(findable.len() > 10, "{}", findable.len());
        for hash in findable.keys() {
            if let Some(tokens) = prefix_of(*hash, &findable) {
                assert_eq!(prefix_id(CacheKey::default(), BLOCK as u32, &tokens), Some(*hash), "tokens name the block");
            }
        }
        server.wait_until("a snapshot with the same blocks", |server| {
            let snapshot = server.engine.telemetry().snapshot();
            let cached: Vec<u64> = snapshot.blocks.iter().filter_map(|block| block.hash).collect();
            findable.keys().all(|hash| cached.contains(hash))
        });
        assert_eq!(server.send("POST", "/reset_prefix_cache", &[], "").status, 200);
        router.listen();
        assert!(router.findable().is_empty(), "nothing is found any more");
    }
}

#[test]
fn a_salt_is_told_with_the_first_block() {
    let server = server(KvEventFormat::Map);
    let mut router = Router::connect(&server);
    let known = router.messages.len();
    server.ok("/v1/completions", &json!({ "prompt": prompt(3, 33), "max_tokens": 1, "cache_salt": "secret" }));
    router.listen();
    let keys: Vec<Value> =
        router.messages.values().skip(known).flatten().map(|event| event["extra_keys"].clone()).collect();
    let salt = keys[0][0][0].as_str().expect("a salt");
    assert!(salt.len() == 16 && !salt.contains("secret"), "{salt}");
    assert!(keys.iter().flat_map(|keys| keys.as_array()).flatten().skip(1).all(Value::is_null), "{keys:?}");
}

#[test]
fn an_endpoint_that_is_taken_or_malformed_is_told_at_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let bind = |endpoint: String| {
        let mut options = options(KvEventFormat::Array);
        options.kv_events = options.kv_events.map(|events| KvEventOptions { endpoint, ..events });
        Server::bind(EngineHandle::start_fake(FakeOptions::small()), options).map(|_| ())
    };
    let busy = bind(format!("tcp://{}", taken.local_addr().expect("an address")));
    assert!(matches!(busy, Err(ServeError::Busy { .. })), "{busy:?}");
    for malformed in ["ipc:///tmp/x", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:99999"] {
        let error = bind(malformed.into()).expect_err("refused").to_string();
        assert!(error.contains(malformed) && error.contains("tcp://HOST:PORT"), "{error}");
    }
}
