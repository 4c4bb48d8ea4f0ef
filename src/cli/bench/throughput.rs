//! `kvasir bench throughput`: many prompts offline, as one continuously changing batch or as fixed batches.

use super::{Records, fixed_request, random_prompt, splitmix};
use crate::cli::args::ModelArgs;
use crate::cli::error::{CliError, CliResult, Exit};
use crate::cli::generate::{Output, collect};
use crate::cli::{out, session};
use crate::telemetry::StepRecord;
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

#[derive(Clone, Debug, clap::Args)]
pub struct ThroughputArgs {
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_prompts: u32,
    /// Rows of the batch
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub concurrency: u32,
    /// Prompt tokens
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: u32,
    /// Output tokens
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: u32,
    /// Output lengths vary by this share of --output-len, up and down
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub spread: f64,
    /// A finished row is replaced at once, or only when its whole batch is done
    #[arg(long, value_enum, default_value_t = Mode::Continuous)]
    pub mode: Mode,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    Continuous,
    Static,
}

pub fn run(args: &ThroughputArgs) -> CliResult {
    if !(0.0..1.0).contains(&args.spread) {
        return Err(CliError::usage(format!("--spread must be at least 0 and below 1, not {}", args.spread)));
    }
    let session = session::open(&args.model, Some(0), |options| {
        options.max_num_seqs = args.concurrency;
        options.max_queue = options.max_queue.max(args.num_prompts);
    })?;
    let (engine, model) = (&session.engine, &session.model);
    let warm_up = fixed_request(random_prompt(model, args.input_len, 0), 2.min(args.output_len), 0, 0);
    collect(&engine.submit(warm_up)?, |_| Ok(()))?;
    engine.wait_idle(std::time::Duration::from_secs(10));

    let mut records = Records::start(engine);
    let before = engine.telemetry().snapshot();
    let started = Instant::now();
    let outputs = run_all(args, &session, &mut records)?;
    let seconds = started.elapsed().as_secs_f64();
    engine.wait_idle(std::time::Duration::from_secs(10));
    records.gather();

    let after = engine.telemetry().snapshot();
    let output_tokens: u64 = outputs.iter().map(|o| u64::from(o.usage.output_tokens)).sum();
    let prompt_tokens: u64 = outputs.iter().map(|o| u64::from(o.usage.prompt_tokens)).sum();
    let num_steps = records.all.len();
    let rows: usize = records.all.iter().map(|r| r.rows.len()).sum();
    let computed = after.computed_tokens_total - before.computed_tokens_total;
    let recomputed = after.recomputed_tokens_total - before.recomputed_tokens_total;
    let result = json!({
        "requests_s": f64::from(args.num_prompts) / seconds,
        "output_tok_s": output_tokens as f64 / seconds,
        "total_tok_s": (output_tokens + prompt_tokens) as f64 / seconds,
        "steady_decode_tok_s": steady_decode_tok_s(&records.all, args.concurrency),
        "steps": num_steps,
        "mean_batch": rows as f64 / num_steps.max(1) as f64,
        "kv_peak_blocks": records.all.iter().map(|r| r.kv.used).max().unwrap_or(0),
        "preemptions": after.preemptions_total - before.preemptions_total,
        "recompute_tax": recomputed as f64 / computed.max(1) as f64,
    });
    if args.json {
        out::json(&result)?;
    } else {
        out::text(&format!(
            "{} on {}\n{:.2} requests/s, {:.1} output tok/s, {:.1} tok/s with prompts, mean batch {:.1} over {num_steps} \
             steps\nsteady decode of {} rows: {}\n",
            model.name,
            model.adapter.name,
            f64::from(args.num_prompts) / seconds,
            output_tokens as f64 / seconds,
            (output_tokens + prompt_tokens) as f64 / seconds,
            rows as f64 / num_steps.max(1) as f64,
            args.concurrency,
            steady_decode_tok_s(&records.all, args.concurrency)
                .map_or("not reached".into(), |tok_s| format!("{tok_s:.1} tok/s")),
        ))?;
    }
    session.engine.shutdown();
    Ok(Exit::Ok)
}

fn run_all(args: &ThroughputArgs, session: &session::Session, records: &mut Records) -> Result<Vec<Output>, CliError> {
    let indices: Vec<u64> = (1..=u64::from(args.num_prompts)).collect();
    let group = match args.mode {
        Mode::Continuous => indices.len(),
        Mode::Static => args.concurrency as usize,
    };
    let mut outputs = Vec::new();
    for batch in indices.chunks(group) {
        let mut runs = Vec::new();
        for &index in batch {
            let prompt = random_prompt(&session.model, args.input_len, index);
            runs.push(session.engine.submit(fixed_request(prompt, output_len(args, index), index, 0))?);
        }
        for run in runs {
            outputs.push(collect(&run, |_| Ok(()))?);
            records.gather();
        }
    }
    Ok(outputs)
}

fn output_len(args: &ThroughputArgs, index: u64) -> u32 {
    let unit = (splitmix(index) >> 11) as f64 / (1u64 << 53) as f64;
    let factor = 1.0 + args.spread * (2.0 * unit - 1.0);
    (f64::from(args.output_len) * factor).round().max(1.0) as u32
}

/// Output tokens per second over the steps in which `concurrency` rows decode and nothing prefills.
fn steady_decode_tok_s(records: &[Arc<StepRecord>], concurrency: u32) -> Option<f64> {
    let (mut tokens, mut us) = (0u64, 0u64);
    for pair in records.windows(2) {
        let is_steady = |r: &StepRecord| r.num_decode() == concurrency && r.num_prefill_tokens() == 0;
        if is_steady(&pair[0]) && is_steady(&pair[1]) {
            // From start to start, so that the work between two steps counts.
            us += pair[1].t0_us.saturating_sub(pair[0].t0_us);
            tokens += u64::from(concurrency);
        }
    }
    (us > 0).then(|| tokens as f64 * 1e6 / us as f64)
}
