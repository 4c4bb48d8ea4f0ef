//! `kvasir bench http`: what the HTTP front end costs, on the simulated engine, over loopback.
//!
//! Three loads: whole answers of one token (CPU time of a request), paced streams in which each token is an event of its
//! own (CPU time of a streamed token), and streams as fast as they go (tokens per second, with engine and clients on the same
//! machine). CPU time is that of the server's own threads, as Linux counts it; elsewhere it is not measured.

use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::out;
use crate::engine::EngineHandle;
use crate::engine::options::{CheckLevel, FakeOptions};
use crate::server::{Server, ServerOptions};
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A step of the paced load: about what a real model takes for so many rows.
const PACE: Duration = Duration::from_millis(20);
const CONNECTIONS: usize = 8;
const MAX_MODEL_LEN: u32 = 4096;
const BLOCK_SIZE: u32 = 16;

#[derive(Clone, Debug, clap::Args)]
pub struct HttpArgs {
    /// Whole answers
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Streams at once
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub streams: u32,
    /// Tokens of each paced stream; those of the fast ones are ten times as many
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=300))]
    pub tokens: u32,
    /// Threads for HTTP
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What a load came to.
struct Load {
    seconds: f64,
    /// Of the server's threads; `None` where it cannot be measured.
    cpu_us: Option<f64>,
    events: u64,
}

pub fn run(args: &HttpArgs) -> CliResult {
    let requests = with_server(args, Duration::ZERO, |address| ask(address, args.requests))?;
    let paced = with_server(args, PACE, |address| stream(address, args.streams, args.tokens))?;
    let fast = with_server(args, Duration::ZERO, |address| stream(address, args.streams, 10 * args.tokens))?;
    let paced_tokens = f64::from(args.streams * args.tokens);
    let fast_tokens = 10.0 * paced_tokens;
    let per = |load: &Load, count: f64| load.cpu_us.map(|us| us / count);
    let request_us = per(&requests, f64::from(args.requests));
    let (token_us, fast_us) = (per(&paced, paced_tokens), per(&fast, fast_tokens));
    let tokens_s = fast_tokens / fast.seconds;
    if args.json {
        out::json(&json!({
            "requests": args.requests,
            "requests_s": f64::from(args.requests) / requests.seconds,
            "cpu_us_per_request": request_us,
            "streams": args.streams,
            "cpu_us_per_token": token_us,
            "events_per_token": paced.events as f64 / paced_tokens,
            "fast_tokens_s": tokens_s,
            "fast_cpu_us_per_token": fast_us,
            "fast_events_per_token": fast.events as f64 / fast_tokens,
            "threads": args.threads,
        }))?;
        return Ok(Exit::Ok);
    }
    let us = |us: Option<f64>| us.map_or("CPU time not measured here".to_owned(), |us| format!("{us:.1} µs of CPU"));
    out::line(&format!("Whole answers: {} each", us(request_us)))?;
    out::line(&format!("{} streams, a token every {} ms: {} a token", args.streams, PACE.as_millis(), us(token_us)))?;
    out::line(&format!(
        "{} streams as fast as they go: {tokens_s:.0} tokens/s, {} a token",
        args.streams,
        us(fast_us)
    ))?;
    Ok(Exit::Ok)
}

/// Measures a load on a server of its own.
fn with_server(
    args: &HttpArgs,
    step_delay: Duration,
    load: impl FnOnce(SocketAddr) -> std::io::Result<u64>,
) -> Result<Load, CliError> {
    let fault = |e: &dyn std::fmt::Display| CliError::failure(format!("the load could not be run: {e}"));
    let fake = FakeOptions {
        step_delay,
        num_blocks: 256 * (MAX_MODEL_LEN / BLOCK_SIZE) + 1,
        block_size: BLOCK_SIZE,
        max_num_seqs: args.streams,
        max_num_batched_tokens: 2048,
        max_model_len: MAX_MODEL_LEN,
        max_queue: 512,
        check: CheckLevel::WhenIdle,
        ..FakeOptions::small()
    };
    let options = ServerOptions { logs_requests: false, num_threads: args.threads as usize, ..ServerOptions::local() };
    let server = Server::bind(EngineHandle::start_fake(fake), options).map_err(|e| fault(&e))?;
    let address = server.local_addr().ok_or_else(|| fault(&"no address"))?;
    let stops = Arc::new(AtomicU32::new(0));
    let asked = stops.clone();
    let thread = std::thread::Builder::new()
        .name("bench-server".into())
        .spawn(move || server.run(move || asked.load(Ordering::SeqCst)))
        .map_err(|e| fault(&e))?;
    // What is made at the first request is not part of a request.
    ask(address, 32).map_err(|e| fault(&e))?;
    let (before, started) = (server_cpu_us(), Instant::now());
    let result = load(address);
    let (seconds, after) = (started.elapsed().as_secs_f64(), server_cpu_us());
    stops.store(2, Ordering::SeqCst);
    let ended = thread.join().map_err(|_| fault(&"the server panicked"))?;
    ended.map_err(|e| fault(&e))?;
    let events = result.map_err(|e| fault(&e))?;
    Ok(Load { seconds, cpu_us: before.zip(after).map(|(before, after)| after - before), events })
}

/// CPU time of this process's HTTP threads.
fn server_cpu_us() -> Option<f64> {
    let mut total_ns = 0u64;
    for thread in std::fs::read_dir("/proc/self/task").ok()? {
        let path = thread.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.trim() == "http" {
            let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
            total_ns += times.split(' ').next()?.parse::<u64>().ok()?;
        }
    }
    Some(total_ns as f64 / 1e3)
}

fn body(max_tokens: u32, streams: bool) -> String {
    let text = "Tell me something about the sea, and about those who live by it. ".repeat(4);
    json!({
        "model": "Simulation", "messages": [{ "role": "user", "content": text }], "max_tokens": max_tokens,
        "ignore_eos": true, "stream": streams,
    })
    .to_string()
}

fn request(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
}

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

/// Whole answers over a few connections that stay open.
fn ask(address: SocketAddr, requests: u32) -> std::io::Result<u64> {
    let text = request(&body(1, false));
    on_threads(CONNECTIONS.min(requests as usize), |i| {
        let mut stream = connect(address)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let own = (i..requests as usize).step_by(CONNECTIONS.min(requests as usize)).count();
        for _ in 0..own {
            stream.write_all(text.as_bytes())?;
            read_answer(&mut reader)?;
        }
        Ok(own as u64)
    })
}

fn read_answer(reader: &mut BufReader<TcpStream>) -> std::io::Result<()> {
    let (mut line, mut length) = (String::new(), 0usize);
    let mut is_first = true;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        if std::mem::take(&mut is_first) && !line.starts_with("HTTP/1.1 200") {
            return Err(std::io::Error::other(format!("the server answered {}", line.trim())));
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.trim().parse().map_err(std::io::Error::other)?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    reader.read_exact(&mut vec![0; length])
}

/// Streams at once, each on a connection of its own; how many events came.
fn stream(address: SocketAddr, streams: u32, tokens: u32) -> std::io::Result<u64> {
    let text = request(&body(tokens, true));
    on_threads(streams as usize, |_| {
        let mut stream = connect(address)?;
        stream.write_all(text.as_bytes())?;
        count_events(&mut stream)
    })
}

/// Reads a stream to its end and counts the empty lines behind events.
fn count_events(stream: &mut TcpStream) -> std::io::Result<u64> {
    let mut piece = [0u8; 64 << 10];
    let (mut last, mut events) = (Vec::new(), 0);
    let mut before = 0;
    loop {
        let read = stream.read(&mut piece)?;
        if read == 0 {
            return Err(std::io::Error::other("a stream ended early"));
        }
        for &byte in &piece[..read] {
            events += u64::from(byte == b'\n' && before == b'\n');
            before = byte;
        }
        last.extend_from_slice(&piece[read.saturating_sub(32)..read]);
        last.drain(..last.len().saturating_sub(32));
        if last.windows(6).any(|end| end == b"[DONE]") {
            return Ok(events);
        }
    }
}

/// The sum of what so many threads count.
fn on_threads(count: usize, work: impl Fn(usize) -> std::io::Result<u64> + Sync) -> std::io::Result<u64> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|i| {
                scope.spawn({
                    let work = &work;
                    move || work(i)
                })
            })
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().map_err(|_| std::io::Error::other("a panic"))?);
        results.sum()
    })
}
