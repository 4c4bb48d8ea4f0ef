//! KV events over ZMQ, as vLLM sends them: routers learn from them which replica has which prefix.
//!
//! Guarantees: only full blocks that can be found are told, parents before children; a message has three frames (topic,
//! number as eight bytes with the highest first, batch in msgpack), and numbers have no gaps but where a batch was
//! dropped; nobody waits for subscribers. A batch is `[seconds, events, rank]`, its events are arrays or maps.
//! It does not attempt to keep messages for subscribers that come later, but for those that ask the replay socket.

use super::app::App;
use super::fleet::Model;
use super::options::{KvEventFormat, KvEventOptions};
use super::run::{self, ServeError};
use crate::engine::handle::LoraInfo;
use crate::telemetry::prefixes::{PrefixBatch, PrefixChange};
use axum::body::Bytes;
use serde::Serialize;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// Batches that may wait for the thread which encodes them.
const QUEUE: usize = 1024;
/// What is kept for replay, in bytes.
const REPLAY_BYTES: usize = 32 << 20;
/// Ends a replay.
const END_OF_REPLAY: [u8; 8] = (-1i64).to_be_bytes();
/// What is told is in the pool.
const MEDIUM: &str = "GPU";

/// A block or several that follow each other. The order of fields is that of vLLM's arrays.
#[derive(Debug, PartialEq, Serialize)]
struct BlockStored<'a> {
    r#type: &'static str,
    block_hashes: Vec<u64>,
    parent_block_hash: Option<u64>,
    token_ids: Vec<u32>,
    block_size: usize,
    /// Number of the adapter among those loaded, from 1.
    lora_id: Option<usize>,
    medium: &'static str,
    lora_name: Option<&'a str>,
    /// What else the first block of a prefix depends on: the salt.
    extra_keys: Option<Vec<Option<[String; 1]>>>,
}

#[derive(Debug, PartialEq, Serialize)]
struct BlockRemoved {
    r#type: &'static str,
    block_hashes: Vec<u64>,
    medium: &'static str,
}

#[derive(Debug, PartialEq, Serialize)]
struct AllBlocksCleared {
    r#type: &'static str,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Event<'a> {
    Stored(BlockStored<'a>),
    Removed(BlockRemoved),
    Cleared(AllBlocksCleared),
}

/// An encoded batch on its way to the socket.
struct Outgoing {
    topic: String,
    seq: u64,
    batch: Vec<u8>,
}

/// A message as it was sent.
#[derive(Clone, Debug)]
struct Kept {
    topic: Bytes,
    seq: u64,
    batch: Bytes,
}

/// What was sent last, oldest first.
#[derive(Default)]
struct Sent {
    batches: VecDeque<Kept>,
    num_bytes: usize,
}

/// Bound, and not yet served.
pub struct Sockets {
    options: KvEventOptions,
    events: TcpListener,
    replay: Option<TcpListener>,
}

/// Binds what the options name.
pub fn bind(options: &KvEventOptions) -> Result<Sockets, ServeError> {
    let events = bind_endpoint(&options.endpoint)?;
    let replay = options.replay_endpoint.as_deref().map(bind_endpoint).transpose()?;
    Ok(Sockets { options: options.clone(), events, replay })
}

/// Of ZMQ's endpoints those over TCP; `*` is any address of this machine.
fn bind_endpoint(endpoint: &str) -> Result<TcpListener, ServeError> {
    let place = endpoint.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
    let Some((host, port)) = place.and_then(|(host, port)| Some((host, port.parse().ok()?))) else {
        let fault = std::io::Error::other("an endpoint is tcp://HOST:PORT");
        return Err(ServeError::Bind { address: endpoint.to_owned(), fault });
    };
    let host = if host == "*" { "0.0.0.0" } else { host.trim_start_matches('[').trim_end_matches(']') };
    run::bind_tcp(host, port)
}

impl Sockets {
    /// Where events are published.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.events.local_addr().ok()
    }

    /// Where past events are asked for, if they are kept.
    pub fn replay_addr(&self) -> Option<SocketAddr> {
        self.replay.as_ref().and_then(|replay| replay.local_addr().ok())
    }

    /// Sends the changes of each model's prefix cache from now on. `replica` names this server in topics: `host:port`.
    pub async fn start(self, app: &App, replica: &str) -> Result<(), ServeError> {
        let Sockets { options, events, replay: past } = self;
        let fault = |fault: ZmqError| ServeError::Runtime(std::io::Error::other(fault.to_string()));
        let mut socket = PubSocket::new();
        let bound = socket.bind_listener(events).await.map_err(fault)?;
        tracing::info!("KV events are published at {bound}");
        let mut sent = None;
        if let Some(past) = past {
            let mut socket = RouterSocket::new();
            let bound = socket.bind_listener(past).await.map_err(fault)?;
            tracing::info!("KV events are replayed at {bound}");
            let kept = sent.insert(Arc::new(Mutex::new(Sent::default())));
            tokio::spawn(replay(socket, kept.clone()));
        }
        let (sender, outgoing) = mpsc::channel(QUEUE);
        tokio::spawn(publish(socket, outgoing, sent));
        for model in app.fleet.models() {
            let batches = model.engine.telemetry().prefix_feed().follow(QUEUE);
            let encoder = Encoder {
                model: Arc::downgrade(model),
                topic: options.topic.clone(),
                replica: replica.to_owned(),
                format: options.format,
            };
            let sender = sender.clone();
            std::thread::Builder::new()
                .name("kv events".into())
                .spawn(move || encoder.run(&batches, &sender))
                .map_err(ServeError::Runtime)?;
        }
        Ok(())
    }
}

async fn publish(mut socket: PubSocket, mut outgoing: mpsc::Receiver<Outgoing>, sent: Option<Arc<Mutex<Sent>>>) {
    while let Some(Outgoing { topic, seq, batch }) = outgoing.recv().await {
        let kept = Kept { topic: Bytes::from(topic), seq, batch: Bytes::from(batch) };
        let frames = [kept.topic.clone(), Bytes::copy_from_slice(&seq.to_be_bytes()), kept.batch.clone()];
        if let Some(sent) = &sent {
            lock(sent).keep(kept);
        }
        // A subscriber that does not keep up misses messages, and sees it by their numbers.
        if let Err(fault) = socket.send(message(frames)).await {
            tracing::warn!("a KV event could not be sent: {fault}");
        }
    }
}

/// Answers who asks for all from a number on, with `["", topic, number, batch]` for each that is still kept.
async fn replay(mut socket: RouterSocket, sent: Arc<Mutex<Sent>>) {
    loop {
        let asked = match socket.recv().await {
            Ok(asked) => asked.into_vec(),
            Err(fault) => return tracing::warn!("KV events are not replayed any more: {fault}"),
        };
        let (Some(peer), Some(from)) = (asked.first(), asked.last()) else { continue };
        let Ok(from) = <[u8; 8]>::try_from(from.as_ref()).map(u64::from_be_bytes) else {
            tracing::debug!("a replay was asked for with {} bytes where a number has 8", from.len());
            continue;
        };
        let kept = lock(&sent).since(from);
        // Readers look at the topic of the end, too.
        let topic = kept.last().map(|last| last.topic.clone()).unwrap_or_default();
        let answers = kept.into_iter().map(|kept| (kept.topic, kept.seq.to_be_bytes(), kept.batch));
        for (topic, seq, batch) in answers.chain([(topic, END_OF_REPLAY, Bytes::new())]) {
            let frames = [peer.clone(), Bytes::new(), topic, Bytes::copy_from_slice(&seq), batch];
            if let Err(fault) = socket.send(message(frames)).await {
                tracing::debug!("a replay ended early: {fault}");
                break;
            }
        }
    }
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(frames.to_vec()).expect("a message has frames")
}

impl Sent {
    fn keep(&mut self, sent: Kept) {
        self.num_bytes += sent.batch.len();
        self.batches.push_back(sent);
        while self.num_bytes > REPLAY_BYTES && self.batches.len() > 1 {
            self.num_bytes -= self.batches.pop_front().map_or(0, |oldest| oldest.batch.len());
        }
    }

    fn since(&self, seq: u64) -> Vec<Kept> {
        self.batches.iter().filter(|kept| kept.seq >= seq).cloned().collect()
    }
}

/// Puts the changes of one model's cache in vLLM's words.
struct Encoder {
    /// Not held: an engine that nobody uses ends, and this with it.
    model: Weak<Model>,
    topic: Option<String>,
    replica: String,
    format: KvEventFormat,
}

impl Encoder {
    fn run(self, batches: &Receiver<PrefixBatch>, sender: &mpsc::Sender<Outgoing>) {
        let mut label = String::new();
        while let Ok(batch) = batches.recv() {
            let Some(model) = self.model.upgrade() else { return };
            let loras = model.engine.model().map(|model| model.loras.list()).unwrap_or_default();
            // A model that was just unloaded is called as before.
            label = Some(model.label()).filter(|label| !label.is_empty()).unwrap_or(label);
            drop(model);
            let seconds = super::app::unix_ns() as f64 / 1e9;
            let events = events(&batch.changes, &loras);
            let topic = self.topic.clone().unwrap_or_else(|| format!("kv@{}@{label}", self.replica));
            let batch = match encode(seconds, &events, self.format) {
                Ok(bytes) => Outgoing { topic, seq: batch.seq, batch: bytes },
                Err(fault) => {
                    tracing::warn!("a batch of KV events could not be encoded: {fault}");
                    continue;
                }
            };
            if sender.blocking_send(batch).is_err() {
                return;
            }
        }
    }
}

fn encode(seconds: f64, events: &[Event], format: KvEventFormat) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    // No rank: a replica is one engine.
    let batch = (seconds, events, None::<u32>);
    match format {
        KvEventFormat::Array => rmp_serde::to_vec(&batch),
        KvEventFormat::Map => rmp_serde::to_vec_named(&batch),
    }
}

/// Changes in order; blocks that follow each other, and removals in a row, become one event.
fn events<'a>(changes: &[PrefixChange], loras: &'a [LoraInfo]) -> Vec<Event<'a>> {
    let mut events: Vec<Event> = Vec::new();
    for change in changes {
        match (events.last_mut(), change) {
            (Some(Event::Stored(last)), PrefixChange::Stored { hash, parent: Some(parent), tokens, .. })
                if last.block_hashes.last() == Some(parent) && last.block_size == tokens.len() =>
            {
                last.block_hashes.push(*hash);
                last.token_ids.extend(tokens.iter());
                if let Some(keys) = &mut last.extra_keys {
                    keys.push(None);
                }
            }
            (_, PrefixChange::Stored { hash, parent, tokens, cache_salt, adapter }) => {
                let lora = loras.iter().position(|lora| lora.id == *adapter);
                let is_salted = *cache_salt != 0 && parent.is_none();
                events.push(Event::Stored(BlockStored {
                    r#type: "BlockStored",
                    block_hashes: vec![*hash],
                    parent_block_hash: *parent,
                    token_ids: tokens.to_vec(),
                    block_size: tokens.len(),
                    lora_id: lora.map(|place| place + 1),
                    medium: MEDIUM,
                    lora_name: lora.map(|place| loras[place].name.as_str()),
                    extra_keys: is_salted.then(|| vec![Some([format!("{cache_salt:016x}")])]),
                }));
            }
            (Some(Event::Removed(last)), PrefixChange::Removed { hash }) => last.block_hashes.push(*hash),
            (_, PrefixChange::Removed { hash }) => events.push(Event::Removed(BlockRemoved {
                r#type: "BlockRemoved",
                block_hashes: vec![*hash],
                medium: MEDIUM,
            })),
            (_, PrefixChange::Cleared) => {
                events.push(Event::Cleared(AllBlocksCleared { r#type: "AllBlocksCleared" }));
            }
        }
    }
    events
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn stored(hash: u64, parent: Option<u64>, tokens: [u32; 2], (cache_salt, adapter): (u64, u64)) -> PrefixChange {
        PrefixChange::Stored { hash, parent, tokens: tokens.into(), cache_salt, adapter }
    }

    fn decoded(changes: &[PrefixChange], loras: &[LoraInfo], format: KvEventFormat) -> Value {
        let bytes = encode(1.5, &events(changes, loras), format).expect("a batch");
        rmp_serde::from_slice(&bytes).expect("msgpack")
    }

    #[test]
    fn blocks_in_a_row_are_one_event_and_arrays_have_the_fields_in_order() {
        let changes = [
            PrefixChange::Cleared,
            stored(u64::MAX, None, [1, 2], (0, 0)),
            stored(8, Some(u64::MAX), [3, 4], (0, 0)),
            stored(9, Some(7), [5, 6], (0, 0)),
            PrefixChange::Removed { hash: 8 },
            PrefixChange::Removed { hash: 9 },
        ];
        let expected = json!([
            1.5,
            [
                ["AllBlocksCleared"],
                ["BlockStored", [u64::MAX, 8], null, [1, 2, 3, 4], 2, null, "GPU", null, null],
                ["BlockStored", [9], 7, [5, 6], 2, null, "GPU", null, null],
                ["BlockRemoved", [8, 9], "GPU"],
            ],
            null
        ]);
        assert_eq!(decoded(&changes, &[], KvEventFormat::Array), expected);
    }

    #[test]
    fn maps_name_the_fields_and_the_batch_stays_an_array() {
        let lora = LoraInfo { name: "poet".into(), path: "poet".into(), id: 77, rank: 8 };
        let changes = [
            stored(5, None, [1, 2], (0xabc, 77)),
            stored(6, Some(5), [3, 4], (0xabc, 77)),
            PrefixChange::Removed { hash: 5 },
        ];
        let expected = json!([1.5, [
            {
                "type": "BlockStored", "block_hashes": [5, 6], "parent_block_hash": null, "token_ids": [1, 2, 3, 4],
                "block_size": 2, "lora_id": 1, "medium": "GPU", "lora_name": "poet",
                "extra_keys": [["0000000000000abc"], null],
            },
            { "type": "BlockRemoved", "block_hashes": [5], "medium": "GPU" },
        ], null]);
        assert_eq!(decoded(&changes, &[lora], KvEventFormat::Map), expected);
    }

    #[test]
    fn what_was_sent_is_kept_up_to_a_limit() {
        let mut sent = Sent::default();
        for seq in 0..100 {
            sent.keep(Kept { topic: Bytes::new(), seq, batch: Bytes::from(vec![0; REPLAY_BYTES / 10]) });
        }
        let kept: Vec<u64> = sent.since(0).into_iter().map(|kept| kept.seq).collect();
        assert_eq!(kept, (90..100).collect::<Vec<u64>>());
        assert_eq!(sent.since(98).len(), 2);
    }
}
