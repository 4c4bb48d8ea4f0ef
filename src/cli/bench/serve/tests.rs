//! The arrival process, the reader of streams, the figures, and a run against a real socket.

use super::client::Outcome;
use super::figures::{between, limits};
use super::*;
use crate::engine::EngineHandle;
use crate::engine::options::FakeOptions;
use crate::engine::remote::EventLines as Lines;
use crate::server::{Server, ServerOptions};
use clap::Parser;
use serde_json::json;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    args: ServeBenchArgs,
}

fn args(flags: &[&str]) -> ServeBenchArgs {
    Flags::parse_from([&["bench"], flags].concat()).args
}

#[test]
fn gaps_have_the_mean_and_the_spread_that_were_asked_for() {
    for (shape, rate) in [(1.0, 4.0), (0.5, 10.0), (4.0, 2.0)] {
        let flags = [format!("--request-rate={rate}"), format!("--burstiness={shape}")];
        let mut gaps = Gaps::new(&args(&flags.iter().map(String::as_str).collect::<Vec<_>>()));
        let drawn: Vec<f64> = (0..20_000).map(|_| gaps.next().as_secs_f64()).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let variance = drawn.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
        assert!((mean * rate - 1.0).abs() < 0.03, "{shape} {rate}: mean {mean}");
        let wanted = 1.0 / (shape * rate * rate);
        assert!((variance / wanted - 1.0).abs() < 0.1, "{shape} {rate}: variance {variance}, not {wanted}");
    }
    assert_eq!(Gaps::new(&args(&[])).next(), Duration::ZERO);
}

#[test]
fn events_are_put_together_from_any_pieces() {
    let text = "data: {\"a\":\"é\"}\n\n: comment\n\ndata: [DONE]\n\ndata:{}\n\n";
    for cut in 0..text.len() {
        let mut lines = Lines::default();
        let mut all = lines.push(&text.as_bytes()[..cut]);
        all.extend(lines.push(&text.as_bytes()[cut..]));
        assert_eq!(all, ["{\"a\":\"é\"}", "{}"], "cut at {cut}");
    }
}

#[test]
fn figures_are_those_of_the_outcomes() {
    let outcome = |started_s, ttft_s, itls_s: Vec<f64>| Outcome {
        started_s,
        input_tokens: 10,
        output_tokens: 1 + itls_s.len() as u32,
        ttft_s,
        e2el_s: ttft_s + itls_s.iter().sum::<f64>(),
        itls_s,
        ..Outcome::default()
    };
    let failed = Outcome { fault: Some("503".into()), ..Outcome::default() };
    let outcomes = vec![outcome(0.0, 0.1, vec![0.1, 0.1]), outcome(0.2, 0.3, vec![0.2; 4]), failed];
    let figures = Figures { model: "m".into(), duration_s: 2.0, outcomes };
    let limits = limits(&["ttft:200".into(), "e2el:5000".into()]).unwrap();
    let result = figures.json(&args(&["--save-detailed"]), &limits);
    let close = |name: &str, wanted: f64| {
        let value = result[name].as_f64().unwrap();
        assert!((value - wanted).abs() < 1e-9, "{name}: {value}, not {wanted}");
    };
    for (name, wanted) in [
        ("completed", 2.0),
        ("failed", 1.0),
        ("total_input_tokens", 20.0),
        ("total_output_tokens", 8.0),
        ("request_throughput", 1.0),
        ("request_goodput", 0.5),
        ("output_throughput", 4.0),
        ("total_token_throughput", 14.0),
        ("max_concurrent_requests", 2.0),
        ("max_output_tokens_per_s", 6.0),
        ("mean_ttft_ms", 200.0),
        ("std_ttft_ms", 100.0),
        ("p99_ttft_ms", 298.0),
        ("mean_tpot_ms", 150.0),
        ("mean_itl_ms", 1000.0 / 6.0),
        ("median_e2el_ms", 700.0),
    ] {
        close(name, wanted);
    }
    assert_eq!(result["errors"], json!(["", "", "503"]));
    assert_eq!((between(&[], 0.5), between(&[1.0, 2.0], 0.5)), (0.0, 1.5));
    assert!(super::figures::limits(&["ttft".into()]).is_err());
}

#[test]
fn a_server_is_measured_over_http() {
    let engine = EngineHandle::start_fake(FakeOptions { step_delay: Duration::from_millis(2), ..FakeOptions::small() });
    let server = Server::bind(engine, ServerOptions::local()).unwrap();
    let url = format!("http://{}", server.local_addr().unwrap());
    let stops = Arc::new(AtomicU32::new(0));
    let asked = stops.clone();
    let thread = std::thread::spawn(move || server.run(move || asked.load(Ordering::SeqCst)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for endpoint in ["completions", "chat"] {
        let lens = ["--random-input-len=20", "--random-output-len=8", "--num-prompts=12", "--max-concurrency=4"];
        let own = [format!("--base-url={url}"), format!("--endpoint={endpoint}")];
        let args = args(&[&lens[..], &[&own[0], &own[1]]].concat());
        let result = runtime.block_on(measure(&args)).unwrap().json(&args, &[]);
        assert_eq!((&result["completed"], &result["failed"]), (&json!(12), &json!(0)), "{result}");
        assert_eq!(result["total_output_tokens"], 12 * 8);
        if endpoint == "completions" {
            assert_eq!(result["total_input_tokens"], 12 * 20);
        }
        assert_eq!(result["model_id"], "Simulation");
        assert!(result["max_concurrent_requests"].as_u64().is_some_and(|n| (1..=4).contains(&n)), "{result}");
        let (ttft, end) = (result["mean_ttft_ms"].as_f64().unwrap(), result["mean_e2el_ms"].as_f64().unwrap());
        assert!(ttft >= 2.0 && end >= ttft + 14.0, "{result}");
    }
    stops.store(1, Ordering::SeqCst);
    thread.join().unwrap().unwrap();
}
