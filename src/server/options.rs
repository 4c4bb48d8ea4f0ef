//! What the server can be told at start. Every limit is said by the caller; the command line has the defaults.

use super::tls::TlsFiles;
use crate::protocol::Pooling;
use std::path::PathBuf;
use std::time::Duration;

/// How events of KV caches are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvEventFormat {
    /// Fields by their place, as vLLM wrote them for long and most readers expect.
    Array,
    /// Fields by their names, as newer vLLM writes them.
    Map,
}

impl KvEventFormat {
    /// The words that flags use.
    pub const WORDS: [&'static str; 2] = ["array", "map"];

    /// Reads one of [`Self::WORDS`].
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "array" => Some(KvEventFormat::Array),
            "map" => Some(KvEventFormat::Map),
            _ => None,
        }
    }
}

/// Where changes of prefix caches are told over ZMQ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventOptions {
    /// A PUB socket is bound there: `tcp://*:5557`.
    pub endpoint: String,
    /// A ROUTER socket is bound there that sends past messages again.
    pub replay_endpoint: Option<String>,
    /// First frame of each message; `None` is `kv@HOST:PORT@MODEL`.
    pub topic: Option<String>,
    pub format: KvEventFormat,
}

/// How the server listens, whom it lets in and what it bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerOptions {
    /// Address or host name to listen on.
    pub host: String,
    /// 0 takes any free port.
    pub port: u16,
    /// Listen on this Unix socket instead.
    pub uds: Option<PathBuf>,
    /// Speaks TLS, with these; not on a Unix socket.
    pub tls: Option<TlsFiles>,
    /// Any of these lets a client in; none lets everyone in.
    pub api_keys: Vec<String>,
    /// Names that requests may call the model by, the first in answers; empty takes the model's own.
    pub served_names: Vec<String>,
    /// Origins whose pages may call; `*` is all, none turns CORS off.
    pub allowed_origins: Vec<String>,
    /// Host names that are accepted on loopback besides the usual ones.
    pub allowed_hosts: Vec<String>,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Requests that one key may have under way.
    pub max_requests_per_key: usize,
    /// Prompts of one request.
    pub max_prompts: usize,
    /// How long a drain waits for what runs.
    pub shutdown_timeout: Duration,
    /// How long a client may leave its stream unread, once the merged text waits.
    pub slow_client_timeout: Duration,
    /// How long the engine may have work and make no step before it counts as stuck.
    pub stall_timeout: Duration,
    /// What a stuck engine was doing is written to a file here; `None` writes none.
    pub stall_dir: Option<PathBuf>,
    /// Between comments in a stream that has nothing to say.
    pub keep_alive: Duration,
    /// A line per request in the log.
    pub logs_requests: bool,
    /// Calls itself vLLM where routers look (`owned_by`).
    pub is_vllm_compatible: bool,
    /// How the model writes tool calls: one of [`super::tools::FORMATS`].
    pub tool_call_parser: String,
    /// Reasoning is told apart from content where the template has marks for it.
    pub splits_reasoning: bool,
    /// Clients may load and unload LoRA adapters.
    pub allows_lora_updates: bool,
    /// How embeddings are pooled; `None` leaves it to the model's files.
    pub pooling: Option<Pooling>,
    /// Threads for HTTP.
    pub num_threads: usize,
    /// A collector that gets a span for each request, as OTLP over HTTP.
    pub otlp_traces_endpoint: Option<String>,
    /// Tells routers what the prefix caches hold.
    pub kv_events: Option<KvEventOptions>,
}

impl ServerOptions {
    /// Any free port of the loopback interface, for everyone who can reach it; the limits of the command line.
    pub fn local() -> Self {
        ServerOptions {
            host: "127.0.0.1".into(),
            port: 0,
            uds: None,
            tls: None,
            api_keys: Vec::new(),
            served_names: Vec::new(),
            allowed_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            max_body_bytes: 8 << 20,
            max_requests_per_key: 256,
            max_prompts: 256,
            shutdown_timeout: Duration::from_secs(30),
            slow_client_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(120),
            stall_dir: None,
            keep_alive: Duration::from_secs(15),
            logs_requests: true,
            is_vllm_compatible: true,
            tool_call_parser: "auto".into(),
            splits_reasoning: true,
            allows_lora_updates: false,
            pooling: None,
            num_threads: 2,
            otlp_traces_endpoint: None,
            kv_events: None,
        }
    }
}
