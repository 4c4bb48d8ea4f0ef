//! `kvasir bench latency`: one stream on an otherwise idle engine, after one warm-up run.

use super::{Records, fixed_request, percentile, random_prompt};
use crate::cli::args::{LoraArg, ModelArgs};
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::generate::{collect, rate};
use crate::cli::{out, session};
use crate::engine::EngineHandle;
use crate::protocol::RunTimings;
use crate::telemetry::StepRecord;
use crate::telemetry::kernels::KernelProfile;
use serde_json::json;
use std::sync::Arc;

#[derive(Clone, Debug, clap::Args)]
pub struct LatencyArgs {
    /// Prompt tokens
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: u32,
    /// Output tokens
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    pub output_len: u32,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Also time each kernel of one decode step, in a run of its own
    #[arg(long)]
    pub profile: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &LatencyArgs) -> CliResult {
    let session = session::open(&args.lora.on(&args.model), Some(0), |_| {})?;
    let (engine, model) = (&session.engine, &session.model);
    let stream = |index: u64| {
        let prompt = random_prompt(model, args.input_len, index);
        collect(&engine.submit(fixed_request(prompt, args.output_len, index, session.lora))?, |_| Ok(()))
    };
    stream(0)?;
    let mut records = Records::start(engine);
    let before = engine.step_totals();
    let mut timings = Vec::new();
    for index in 1..=u64::from(args.runs) {
        timings.push(stream(index)?.timings);
        records.gather();
    }
    engine.wait_idle(std::time::Duration::from_secs(10));
    records.gather();
    let totals = engine.step_totals().since(&before);
    let itl = inter_token_ms(&records.all);
    let per_step = |count: u64| count as f64 / totals.steps.max(1) as f64;
    let decode_steps: Vec<&Arc<StepRecord>> = records.all.iter().filter(|r| r.num_prefill_tokens() == 0).collect();
    let decode_gpu_us: u64 = decode_steps.iter().map(|r| u64::from(r.gpu_us)).sum();
    let mean_us = |f: fn(&RunTimings) -> u64| timings.iter().map(f).sum::<u64>() / timings.len().max(1) as u64;
    let (ttft_us, decode_us) = (mean_us(|t| t.ttft_us), mean_us(|t| t.decode_us));
    let (prefill_tok_s, decode_tok_s) = (rate(args.input_len, ttft_us), rate(args.output_len - 1, decode_us));
    let profile = if args.profile { Some(profile_of(engine, || stream(u64::MAX))?) } else { None };
    let mut result = json!({
        "adapter": model.adapter.name,
        "driver": model.adapter.driver,
        "model": model.name,
        "prompt_len": args.input_len,
        "output_len": args.output_len,
        "prefill_tok_s": prefill_tok_s,
        "decode_tok_s": decode_tok_s,
        "ttft_ms": ttft_us as f64 / 1e3,
        "itl_ms": { "p50": percentile(&itl, 0.5), "p99": percentile(&itl, 0.99) },
        "steps": totals.steps,
        "dispatches_per_step": per_step(totals.dispatches),
        "submits_per_step": per_step(totals.submits),
        "steps_ahead": totals.steps_ahead,
        "steps_in_vain": totals.steps_in_vain,
        "gpu_ms_per_step": decode_gpu_us as f64 / 1e3 / decode_steps.len().max(1) as f64,
        "runs": args.runs,
    });
    if let Some(profile) = &profile {
        result["profile"] = serde_json::to_value(profile).unwrap_or_default();
    }
    if args.json {
        out::json(&result)?;
    } else {
        out::text(&format!(
            "{} on {} ({})\nprefill  {:.1} tok/s over {} tokens, first token after {:.0} ms\ndecode   {:.1} tok/s over {} \
             tokens, {:.1} ms between tokens (p50), {:.1} ms (p99)\nper step {:.0} dispatches, {:.1} submits; of {} steps {} were \
             submitted ahead, {} more in vain\n",
            model.name,
            model.adapter.name,
            model.adapter.driver,
            prefill_tok_s.unwrap_or(0.0),
            args.input_len,
            ttft_us as f64 / 1e3,
            decode_tok_s.unwrap_or(0.0),
            args.output_len,
            percentile(&itl, 0.5),
            percentile(&itl, 0.99),
            per_step(totals.dispatches),
            per_step(totals.submits),
            totals.steps,
            totals.steps_ahead,
            totals.steps_in_vain,
        ))?;
        if let Some(profile) = &profile {
            out::text(&profile_table(profile))?;
        }
    }
    session.engine.shutdown();
    Ok(Exit::Ok)
}

/// The kernels of the last step of a stream: one that decodes.
fn profile_of<T>(
    engine: &EngineHandle,
    stream: impl FnOnce() -> Result<T, CliError>,
) -> Result<Arc<KernelProfile>, CliError> {
    let telemetry = engine.telemetry();
    telemetry.set_profiling(true);
    let ran = stream();
    telemetry.set_profiling(false);
    ran?;
    telemetry.profile().ok_or_else(|| CliError::failure("the adapter has no timestamps: kernels cannot be timed"))
}

fn profile_table(profile: &KernelProfile) -> String {
    let total = profile.kernels_us();
    let mut rows = vec![["kernel", "for", "dispatches", "us", "share"].map(String::from).to_vec()];
    rows.extend(profile.kernels.iter().map(|k| {
        let share = 100.0 * k.us / total.max(f64::MIN_POSITIVE);
        let figures = [k.dispatches.to_string(), format!("{:.0}", k.us), format!("{share:.1} %")];
        [k.kernel.clone(), k.purpose.clone()].into_iter().chain(figures).collect()
    }));
    let between = (f64::from(profile.gpu_us) - total).max(0.0);
    let of = format!("the last step: {} token(s), {} dispatches", profile.num_tokens, profile.dispatches());
    format!("\n{of}, {total:.0} us in kernels, {between:.0} us between them\n{}", out::table(&rows))
}

/// Milliseconds from the end of one step to the end of the next, where the second decodes; sorted.
fn inter_token_ms(records: &[Arc<StepRecord>]) -> Vec<f64> {
    let end_us = |r: &StepRecord| r.t0_us + u64::from(r.total_us);
    let mut gaps: Vec<f64> = records
        .windows(2)
        .filter(|pair| pair[1].num_decode() > 0)
        .map(|pair| end_us(&pair[1]).saturating_sub(end_us(&pair[0])) as f64 / 1e3)
        .collect();
    gaps.sort_by(f64::total_cmp);
    gaps
}
