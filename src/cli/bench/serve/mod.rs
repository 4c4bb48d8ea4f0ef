//! `kvasir bench serve`: a load generator for any server with OpenAI's API, with the measures and names of vLLM's.
//!
//! Guarantees: requests start when the arrival process says so, whether or not earlier ones have ended; times are taken
//! where the client sees them; a failed request is counted and not part of any mean. Not attempted: data sets and several
//! client processes.

mod client;
mod figures;
mod prompts;

use super::splitmix;
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::{interrupt, out};
use client::{Endpoint, Target};
use figures::Figures;
use indicatif::{ProgressBar, ProgressStyle};
use prompts::Prompt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

#[derive(Clone, Debug, clap::Args)]
pub struct ServeBenchArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub base_url: String,
    /// What is asked
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    pub endpoint: Endpoint,
    /// The model's name (default: the first that the server lists)
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_prompts: u32,
    /// Prompt tokens
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub random_input_len: u32,
    /// Output tokens; the end of sequence is ignored, where the server knows how
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub random_output_len: u32,
    /// Lengths vary by this share, up and down
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// Tokens that all prompts begin with, before their own
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub random_prefix_len: u32,
    /// Requests that start per second; inf starts all at once
    #[arg(long, value_name = "RATE", default_value_t = f64::INFINITY)]
    pub request_rate: f64,
    /// Shape of the gaps between starts: 1 is a Poisson process, less is burstier, more is more even
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0)]
    pub burstiness: f64,
    /// Requests under way at a time, at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_concurrency: Option<u32>,
    /// Limits in milliseconds that a good request keeps: ttft:MS, tpot:MS, e2el:MS (repeatable)
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    pub goodput: Vec<String>,
    /// Temperature of the requests
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Also put the times of each request into the JSON
    #[arg(long)]
    pub save_detailed: bool,
    /// Write the JSON to this file
    #[arg(long, value_name = "FILE")]
    pub result_filename: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &ServeBenchArgs) -> CliResult {
    check(args)?;
    let limits = figures::limits(&args.goodput)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let figures = runtime.block_on(measure(args))?;
    runtime.shutdown_background();
    let result = figures.json(args, &limits);
    if let Some(path) = &args.result_filename {
        std::fs::write(path, format!("{result}\n"))?;
    }
    match args.json {
        true => out::json(&result)?,
        false => out::text(&figures::table(&result))?,
    }
    match result["completed"].as_u64() {
        Some(0) => Err(CliError::failure(format!("no request ended well: {}", figures.first_fault()))),
        _ => Ok(Exit::Ok),
    }
}

fn check(args: &ServeBenchArgs) -> Result<(), CliError> {
    if !(0.0..1.0).contains(&args.random_range_ratio) {
        let message = format!("--random-range-ratio must be at least 0 and below 1, not {}", args.random_range_ratio);
        return Err(CliError::usage(message));
    }
    for (name, value) in [("--request-rate", args.request_rate), ("--burstiness", args.burstiness)] {
        if value.is_nan() || value <= 0.0 {
            return Err(CliError::usage(format!("{name} must be above 0, not {value}")));
        }
    }
    Ok(())
}

async fn measure(args: &ServeBenchArgs) -> Result<Figures, CliError> {
    let target = Arc::new(Target::connect(args).await?);
    let prompts = prompts::make(&target, args).await?;
    // The first request of all opens connections and warms up; it is not measured.
    let warm = Prompt { output_len: prompts[0].output_len.min(4), ..prompts[0].clone() };
    if let Some(fault) = target.ask(&warm).await.fault {
        return Err(CliError::failure(format!("the first request failed: {fault}")));
    }
    let bar = bar(prompts.len());
    let permits = Arc::new(Semaphore::new(args.max_concurrency.map_or(Semaphore::MAX_PERMITS, |n| n as usize)));
    let mut gaps = Gaps::new(args);
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    let mut start_at = started;
    let mut figures = Figures { model: target.model.clone(), ..Figures::default() };
    for prompt in prompts {
        tokio::time::sleep_until(start_at).await;
        interrupt::check()?;
        start_at += gaps.next();
        let (target, permits, bar) = (target.clone(), permits.clone(), bar.clone());
        tasks.spawn(async move {
            // As in vLLM's, waiting for a place is not part of a request's time.
            let permit = permits.acquire_owned().await;
            let mut outcome = target.ask(&prompt).await;
            outcome.started_s = outcome.started.map_or(0.0, |at| at.duration_since(started).as_secs_f64());
            drop(permit);
            bar.inc(1);
            outcome
        });
    }
    loop {
        match tokio::time::timeout(Duration::from_millis(100), tasks.join_next()).await {
            Err(_) => interrupt::check()?,
            Ok(None) => break,
            Ok(Some(outcome)) => {
                figures.outcomes.push(outcome.map_err(|e| CliError::failure(format!("a request was lost: {e}")))?);
            }
        }
    }
    figures.duration_s = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    Ok(figures)
}

/// Times between starts: gamma distributed with a mean of 1 / rate.
struct Gaps {
    rate: f64,
    shape: f64,
    state: u64,
}

impl Gaps {
    fn new(args: &ServeBenchArgs) -> Self {
        Gaps { rate: args.request_rate, shape: args.burstiness, state: args.seed ^ 0x6761_7073 }
    }

    fn next(&mut self) -> Duration {
        match self.rate.is_finite() {
            true => Duration::from_secs_f64(self.gamma(self.shape) / (self.shape * self.rate)),
            false => Duration::ZERO,
        }
    }

    /// Marsaglia and Tsang (2000); for shapes below 1 by a power of a uniform draw.
    fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let uniform = self.uniform();
            return self.gamma(shape + 1.0) * uniform.powf(1.0 / shape);
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            // Box and Muller's normal.
            let normal = (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos();
            let v = (1.0 + c * normal).powi(3);
            if v > 0.0 && self.uniform().ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }

    /// Above 0, at most 1.
    fn uniform(&mut self) -> f64 {
        self.state = splitmix(self.state);
        ((self.state >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

fn bar(num_requests: usize) -> ProgressBar {
    if !out::shows_progress() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar:.cyan} {pos}/{len}");
    let bar = ProgressBar::new(num_requests as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.with_message("Requests")
}

#[cfg(test)]
mod tests;
