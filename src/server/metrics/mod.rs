//! Counters and histograms under vLLM's names, so that dashboards and routers made for it work unchanged.
//!
//! Guarantees: recording is a few atomic additions; a scrape waits for nobody but another scrape and reads the engine's
//! latest snapshot, which may be 33 ms old. Requests are seen by [`RunMeter`], steps by [`StepMeter`].

mod histogram;
mod page;
mod run_meter;
mod step_meter;

pub use page::{Facts, page};
pub use run_meter::RunMeter;

use crate::telemetry::Telemetry;
use histogram::Histogram;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use step_meter::StepMeter;

const TTFT: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const ITL: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const LATENCY: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Steps of 1, 2 and 5; what lies above the context is not shown.
const COUNTS: [f64; 22] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6,
    1e7,
];
const CHOICES: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
const STEP_TOKENS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const RESIDENCY: [f64; 21] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
];
const GPU_STEP: [f64; 14] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];

/// Why requests end, in vLLM's words; the last is for failures.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// Everything that is counted.
pub struct Metrics {
    prompt_tokens: AtomicU64,
    prompt_tokens_cached: AtomicU64,
    generation_tokens: AtomicU64,
    corrupted_requests: AtomicU64,
    finished: [AtomicU64; REASONS.len()],
    ttft: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    step_tokens: Histogram,
    step_gpu: Histogram,
    block_lifetime: Histogram,
    block_idle: Histogram,
    block_reuse: Histogram,
    steps: Mutex<StepMeter>,
}

impl Metrics {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Metrics {
            prompt_tokens: zero(),
            prompt_tokens_cached: zero(),
            generation_tokens: zero(),
            corrupted_requests: zero(),
            finished: [zero(), zero(), zero(), zero()],
            ttft: Histogram::new(&TTFT),
            inter_token: Histogram::new(&ITL),
            per_output_token: Histogram::new(&ITL),
            e2e: Histogram::new(&LATENCY),
            queue: Histogram::new(&LATENCY),
            inference: Histogram::new(&LATENCY),
            prefill: Histogram::new(&LATENCY),
            decode: Histogram::new(&LATENCY),
            request_prompt_tokens: Histogram::new(&COUNTS),
            request_generation_tokens: Histogram::new(&COUNTS),
            params_n: Histogram::new(&CHOICES),
            params_max_tokens: Histogram::new(&COUNTS),
            step_tokens: Histogram::new(&STEP_TOKENS),
            step_gpu: Histogram::new(&GPU_STEP),
            block_lifetime: Histogram::new(&RESIDENCY),
            block_idle: Histogram::new(&RESIDENCY),
            block_reuse: Histogram::new(&RESIDENCY),
            steps: Mutex::new(StepMeter::default()),
        }
    }

    /// Takes the steps that were made since the last call. Called about once a second and before each scrape.
    pub fn read_steps(&self, telemetry: &Telemetry) {
        self.steps.lock().unwrap_or_else(|e| e.into_inner()).read(telemetry, self);
    }

    fn count_finish(&self, reason: &str) {
        let at = REASONS.iter().position(|known| *known == reason).unwrap_or(REASONS.len() - 1);
        self.finished[at].fetch_add(1, Ordering::Relaxed);
    }
}
