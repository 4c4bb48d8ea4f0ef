//! `kvasir serve`: the OpenAI-compatible server.

use super::args::PoolingArg;
use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, serve_fleet, session};
use crate::config::{Dirs, EngineArgs, HumanInt};
use crate::engine::EngineHandle;
use crate::engine::handle::EngineStatus;
use crate::server::tools::FORMATS;
use crate::server::{KvEventFormat, KvEventOptions, ServeError, Server, ServerOptions, TlsFiles};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// As --model
    #[arg(value_name = "MODEL", conflicts_with = "models")]
    pub names: Vec<String>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes any free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Listen on this Unix socket instead
    #[arg(long, value_name = "PATH")]
    pub uds: Option<PathBuf>,
    /// Speak TLS with the certificate in this PEM file, its issuers behind it
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile", conflicts_with = "uds")]
    pub ssl_certfile: Option<PathBuf>,
    /// The certificate's private key, a PEM file
    #[arg(long, value_name = "FILE", requires = "ssl_certfile")]
    pub ssl_keyfile: Option<PathBuf>,
    /// Adapters that share a model; there is one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1))]
    pub tensor_parallel_size: u32,
    /// Adapters that take turns with a model's layers; there is one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1))]
    pub pipeline_parallel_size: u32,
    /// A key that lets clients in (repeatable); none lets everyone in
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// What clients call the model (repeatable; the first is used in answers)
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// Let pages of this origin call the server; `*` is all (repeatable)
    #[arg(long, value_name = "ORIGIN")]
    pub allowed_origins: Vec<String>,
    /// Answer to this host name on loopback, too (repeatable)
    #[arg(long, value_name = "NAME")]
    pub allowed_hosts: Vec<String>,
    /// Requests that may wait; more are refused
    #[arg(long, value_name = "N")]
    pub max_queue: Option<HumanInt>,
    /// Requests that one key may have under way
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_requests_per_key: u32,
    /// Largest request body, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_body_size: u32,
    /// Seconds that running requests get after SIGTERM or Ctrl-C; a second signal ends at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub shutdown_timeout: u64,
    /// Seconds that a stream may stay unread
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub slow_client_timeout: u64,
    /// Seconds without a step after which a busy engine counts as stuck
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    pub stall_timeout: u64,
    /// What routers see as the owner of the model: vllm or none
    #[arg(long, value_name = "NAME", default_value = "vllm", value_parser = ["vllm", "none"])]
    pub compat: String,
    /// How the model writes tool calls (default: what its template tells it)
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = FORMATS)]
    pub tool_call_parser: String,
    /// Whether reasoning between marks such as <think> is told apart: auto or none
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = ["auto", "none"])]
    pub reasoning_parser: String,
    /// Let clients load and unload LoRA adapters from folders of this machine (/v1/load_lora_adapter)
    #[arg(long, env = "KVASIR_ALLOW_RUNTIME_LORA_UPDATING", hide_env_values = true)]
    pub allow_runtime_lora_updating: bool,
    #[command(flatten)]
    pub pooling: PoolingArg,
    /// Send a span for each request to this OpenTelemetry collector, as OTLP over HTTP (http://localhost:4318)
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// Tell routers over ZMQ which prefixes are cached, as vLLM does: bind a PUB socket here (tcp://*:5557)
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_endpoint: Option<String>,
    /// The same as vLLM takes it: a JSON object with enable_kv_cache_events, publisher, endpoint, replay_endpoint and topic
    #[arg(long, value_name = "JSON", conflicts_with_all = ["kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"])]
    pub kv_events_config: Option<String>,
    /// Send past events again to who asks a ROUTER socket here (tcp://*:5558)
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events_endpoint")]
    pub kv_events_replay_endpoint: Option<String>,
    /// First frame of each event (default: kv@HOST:PORT@MODEL)
    #[arg(long, value_name = "TOPIC", requires = "kv_events_endpoint")]
    pub kv_events_topic: Option<String>,
    /// How events are written: array (the default) or map
    #[arg(long, value_name = "FORMAT", value_parser = KvEventFormat::WORDS)]
    pub kv_events_format: Option<String>,
    /// Read long prompts in pieces beside running requests; it is always so
    #[arg(long)]
    pub enable_chunked_prefill: bool,
    /// No line per request
    #[arg(long)]
    pub disable_log_requests: bool,
    /// Seeds requests that bring no seed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// A GGUF file, a Hugging Face folder or the id of a model found here (repeatable: the first is loaded at once, the
    /// others when they are asked for; default: the built-in default model)
    #[arg(long = "model", value_name = "[NAME=]PATH|ID", env = "KVASIR_MODEL", hide_env_values = true)]
    pub models: Vec<String>,
    /// Memory that several models may take together, in GiB; the one idle for longest gives way (default: what is free
    /// now where the adapter is a CPU, else what the device gives)
    #[arg(long, value_name = "GIB")]
    pub model_memory: Option<f64>,
    /// Seconds after which a model that nobody uses is unloaded, to be loaded again when it is asked for
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub model_idle_timeout: Option<u64>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

pub fn run(args: &ServeArgs) -> CliResult {
    let file = session::config()?;
    let mut engine_args = args.engine.clone();
    engine_args.lora.enable_lora |= args.allow_runtime_lora_updating;
    let engine_options = session::engine_options(&engine_args, &file, args.seed, |options| {
        options.max_queue = args.max_queue.map_or(options.max_queue, |n| n.0.max(1));
    })?;
    let plan = serve_fleet::plan(args, engine_options, &file)?;
    let (engine, request) = (plan.engines[0].clone(), plan.first);
    // Before the model is read, so that a port that is taken shows at once.
    let server = Server::bind_fleet(plan.fleet, server_options(args)?)?;
    match (server.local_addr(), &args.uds) {
        (Some(address), _) => {
            let scheme = if args.ssl_certfile.is_some() { "https" } else { "http" };
            out::note(&format!("listening on {scheme}://{address}"));
        }
        (None, path) => out::note(&format!("listening on {}", path.clone().unwrap_or_default().display())),
    }
    engine.load(request);
    let has_failed = Arc::new(AtomicBool::new(false));
    let loading = {
        let (engine, has_failed) = (engine.clone(), has_failed.clone());
        std::thread::Builder::new().name("load watch".into()).spawn(move || wait_for_model(&engine, &has_failed))?
    };
    let stop = has_failed.clone();
    let result = server.run(move || interrupt::presses() + 2 * u32::from(stop.load(Ordering::Acquire)));
    engine.cancel_load();
    let loaded = loading.join().unwrap_or_else(|_| Err(CliError::failure("the load was not watched to its end")));
    drop(engine);
    plan.engines.into_iter().for_each(EngineHandle::shutdown);
    result?;
    if has_failed.load(Ordering::Acquire) && interrupt::presses() == 0 {
        loaded?;
    }
    Ok(Exit::Ok)
}

/// Waits for the load that was asked for; a failure ends the server.
fn wait_for_model(engine: &EngineHandle, has_failed: &AtomicBool) -> Result<(), CliError> {
    let mut progress = session::Progress::default();
    let loaded = engine.wait_for_model(|status| {
        if let EngineStatus::Loading { phase, done, total } = status {
            progress.show(phase, *done, *total);
        }
    });
    progress.clear();
    match loaded {
        Ok(model) => {
            out::note(&format!("serving {} with a context of {} tokens", model.name, model.max_model_len));
            Ok(())
        }
        Err(status) => {
            has_failed.store(true, Ordering::Release);
            Err(status.into())
        }
    }
}

fn server_options(args: &ServeArgs) -> Result<ServerOptions, CliError> {
    Ok(ServerOptions {
        host: args.host.clone(),
        port: args.port,
        uds: args.uds.clone(),
        tls: tls_files(args),
        api_keys: api_keys(args)?,
        served_names: args.served_model_name.clone(),
        allowed_origins: args.allowed_origins.clone(),
        allowed_hosts: args.allowed_hosts.clone(),
        max_body_bytes: (args.max_body_size as usize) << 20,
        max_requests_per_key: args.max_requests_per_key as usize,
        max_prompts: 256,
        shutdown_timeout: Duration::from_secs(args.shutdown_timeout),
        slow_client_timeout: Duration::from_secs(args.slow_client_timeout),
        stall_timeout: Duration::from_secs(args.stall_timeout),
        keep_alive: Duration::from_secs(15),
        logs_requests: !args.disable_log_requests,
        is_vllm_compatible: args.compat == "vllm",
        tool_call_parser: args.tool_call_parser.clone(),
        splits_reasoning: args.reasoning_parser == "auto",
        allows_lora_updates: args.allow_runtime_lora_updating,
        pooling: args.pooling.pooling(),
        num_threads: 2,
        otlp_traces_endpoint: args.otlp_traces_endpoint.clone(),
        kv_events: kv_event_options(args)?,
        stall_dir: Some(Dirs::resolve()?.logs),
    })
}

fn api_keys(args: &ServeArgs) -> Result<Vec<String>, CliError> {
    if args.api_key.iter().any(String::is_empty) {
        return Err(CliError::usage("--api-key is empty, which would let everyone in")
            .with_fix("give a key, or leave --api-key and KVASIR_API_KEY out"));
    }
    Ok(args.api_key.clone())
}

fn tls_files(args: &ServeArgs) -> Option<TlsFiles> {
    Some(TlsFiles { certificates: args.ssl_certfile.clone()?, key: args.ssl_keyfile.clone()? })
}

/// What `--kv-events-config` holds, by vLLM's names. Its queues and buffers are this server's own matter.
#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct KvEventsConfig {
    enable_kv_cache_events: Option<bool>,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    topic: Option<String>,
    #[serde(rename = "buffer_steps")]
    _buffer_steps: Option<u64>,
    #[serde(rename = "hwm")]
    _hwm: Option<u64>,
    #[serde(rename = "max_queue_size")]
    _max_queue_size: Option<u64>,
}

fn kv_event_options(args: &ServeArgs) -> Result<Option<KvEventOptions>, CliError> {
    let format = args.kv_events_format.as_deref().and_then(KvEventFormat::parse).unwrap_or(KvEventFormat::Array);
    let Some(text) = &args.kv_events_config else {
        let Some(endpoint) = args.kv_events_endpoint.clone() else {
            return match args.kv_events_format {
                Some(_) => Err(CliError::usage("--kv-events-format is for --kv-events-endpoint")),
                None => Ok(None),
            };
        };
        let (replay_endpoint, topic) = (args.kv_events_replay_endpoint.clone(), args.kv_events_topic.clone());
        return Ok(Some(KvEventOptions { endpoint, replay_endpoint, topic, format }));
    };
    let fault = |fault: String| CliError::usage(format!("--kv-events-config: {fault}"));
    let config: KvEventsConfig = serde_json::from_str(text).map_err(|e| fault(e.to_string()))?;
    match config.publisher.as_deref() {
        Some("null") => return Ok(None),
        None | Some("zmq") => {}
        Some(other) => return Err(fault(format!("the publisher is zmq or null, not `{other}`"))),
    }
    if config.enable_kv_cache_events == Some(false) {
        return Ok(None);
    }
    Ok(Some(KvEventOptions {
        endpoint: config.endpoint.unwrap_or_else(|| "tcp://*:5557".into()),
        replay_endpoint: config.replay_endpoint,
        topic: config.topic,
        format,
    }))
}

impl From<ServeError> for CliError {
    fn from(error: ServeError) -> Self {
        let exit = match error {
            ServeError::Busy { .. } => Exit::PortBusy,
            ServeError::Bind { .. } | ServeError::Tls { .. } | ServeError::Runtime(_) => Exit::Failure,
            ServeError::NoKvEvents => Exit::Usage,
        };
        let fixed = CliError::new(exit, error.to_string());
        match exit {
            Exit::PortBusy => {
                fixed.with_fix("choose another port (--port, or that of the endpoint), or end the other program")
            }
            Exit::Usage => fixed.with_fix("build it with --features kv-events"),
            _ => fixed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn options(flags: &[&str]) -> Result<Option<KvEventOptions>, String> {
        let line = Line::try_parse_from(std::iter::once(&"serve").chain(flags)).map_err(|e| e.to_string())?;
        kv_event_options(&line.args).map_err(|e| e.message)
    }

    #[test]
    fn an_empty_key_does_not_open_the_server() {
        let keys = |keys: &[&str]| {
            let flags = keys.iter().flat_map(|key| ["--api-key", key]);
            let line = Line::try_parse_from(std::iter::once("serve").chain(flags)).unwrap();
            api_keys(&line.args).map_err(|e| e.message)
        };
        assert_eq!(keys(&["a", "b"]), Ok(vec!["a".into(), "b".into()]));
        assert!(keys(&["a", ""]).is_err_and(|fault| fault.contains("--api-key")));
    }

    #[test]
    fn vllms_object_for_kv_events_is_what_the_flags_say() {
        let object = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2", "topic": "t", "buffer_steps": 100}"#;
        let flags =
            ["--kv-events-endpoint", "tcp://*:1", "--kv-events-replay-endpoint", "tcp://*:2", "--kv-events-topic", "t"];
        let of_object = options(&["--kv-events-config", object]).unwrap();
        assert!(of_object.is_some());
        assert_eq!(of_object, options(&flags).unwrap());
        assert_eq!(options(&["--kv-events-config", r#"{"enable_kv_cache_events": false}"#]), Ok(None));
        assert_eq!(options(&["--kv-events-config", r#"{"publisher": "null"}"#]), Ok(None));
        assert_eq!(options(&[]), Ok(None));
        let map = options(&["--kv-events-config", "{}", "--kv-events-format", "map"]).unwrap().unwrap();
        assert_eq!((map.endpoint.as_str(), map.format), ("tcp://*:5557", KvEventFormat::Map));
        for (flags, words) in [
            (&["--kv-events-config", "{"][..], "--kv-events-config"),
            (&["--kv-events-config", r#"{"publisher": "nats"}"#], "nats"),
            (&["--kv-events-config", r#"{"endpiont": "tcp://*:1"}"#], "endpiont"),
            (&["--kv-events-format", "map"], "--kv-events-format"),
            (&["--kv-events-config", "{}", "--kv-events-endpoint", "tcp://*:1"], "--kv-events-endpoint"),
        ] {
            let fault = options(flags).expect_err(words);
            assert!(fault.contains(words), "{fault}");
        }
    }
}
