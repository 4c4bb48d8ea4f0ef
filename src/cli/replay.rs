//! `kvasir replay`: a recorded run again, to the same decisions and tokens, or with other settings.

use super::error::{CliError, CliResult, Exit};
use super::{out, session};
use crate::config::{Dirs, EngineArgs, HumanInt, LoraArgs};
use crate::engine::loader;
use crate::engine::options::{LoadRequest, LoraModule};
use crate::recording::LoraIdentity;
use crate::recording::what_if::{self, Figures, Settings};
use crate::recording::{
    Difference, Header, MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_TOKENS, Recording, ReplayReport, replay,
};
use crate::scheduler::{QueuePolicy, VictimPolicy, default_watermark};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Args)]
pub struct ReplayArgs {
    /// A recording (`--record FILE` writes one)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Compute the tokens again on this model and compare them too
    #[arg(long, value_name = "PATH|ID")]
    pub model: Option<String>,
    /// Graphics interface for --model: auto, vulkan, metal or dx12
    #[arg(long, value_name = "NAME", requires = "model")]
    pub backend: Option<String>,
    /// Use the adapter whose name holds this text
    #[arg(long, value_name = "TEXT", requires = "model")]
    pub adapter: Option<String>,
    #[command(flatten)]
    pub what_if: WhatIfArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Any of these replays the arrivals instead, with the setting changed.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
#[command(next_help_heading = "What if")]
pub struct WhatIfArgs {
    /// Tokens of a KV block
    #[arg(long, value_name = "N", conflicts_with = "model")]
    pub block_size: Option<HumanInt>,
    /// KV blocks, the null block included (default: the recorded memory in blocks of this size)
    #[arg(long, value_name = "N", conflicts_with = "model")]
    pub num_blocks: Option<HumanInt>,
    /// Token budget of a step
    #[arg(long, value_name = "N", conflicts_with = "model")]
    pub max_num_batched_tokens: Option<HumanInt>,
    /// Rows of the batch
    #[arg(long, value_name = "N", conflicts_with = "model")]
    pub max_num_seqs: Option<HumanInt>,
    /// Who is admitted first
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = ["fcfs", "priority", "longest-prefix", "fair"])]
    pub scheduling_policy: Option<String>,
    /// Who gives way when KV blocks are short
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = ["last-in", "least-computed", "priority"])]
    pub victim_policy: Option<String>,
    /// Compute every prompt anew
    #[arg(long, conflicts_with = "model")]
    pub no_prefix_caching: bool,
}

pub fn run(args: &ReplayArgs) -> CliResult {
    let recording = read(&args.file)?;
    if args.what_if != WhatIfArgs::default() {
        return compare(args, &recording);
    }
    let report = match &args.model {
        None => quietly(|| replay(&recording, None)),
        Some(model) => replay_on(args, model, &recording)?,
    };
    let report = report.map_err(|error| CliError::failure(format!("{error}: {}", args.file.display())))?;
    if args.json {
        out::json(&serde_json::to_value(&report).map_err(|e| CliError::failure(e.to_string()))?)?;
    } else {
        out::line(&in_words(&report))?;
    }
    match report.identical {
        true => Ok(Exit::Ok),
        // The difference is on standard output already.
        false => Err(CliError::failure("the replay differs from the recording")),
    }
}

/// A recording; what is left of a run that was cut off is enough.
pub fn read(path: &Path) -> Result<Recording, CliError> {
    let fault = |fault: String| CliError::failure(format!("{fault}: {}", path.display()));
    let file = std::fs::File::open(path).map_err(|e| fault(format!("the recording cannot be read: {e}")))?;
    let recording = Recording::read(std::io::BufReader::new(file)).map_err(|e| fault(e.to_string()))?;
    if recording.is_truncated {
        out::note("warning: the last line of the recording was cut off and is left out");
    }
    Ok(recording)
}

fn in_words(report: &ReplayReport) -> String {
    let tokens = match report.compared_tokens {
        0 => String::new(),
        n => format!(", {n} tokens computed again"),
    };
    match &report.first_difference {
        None => format!("{} steps{tokens}: identical", report.steps),
        Some(Difference { step, field, recorded, replayed }) => {
            format!("step {step}: {field} was {recorded}, is {replayed}")
        }
    }
}

type Replayed = Result<ReplayReport, crate::recording::replay::ReplayError>;

/// Loads the model with the recorded pool and limits, and computes every step again.
fn replay_on(args: &ReplayArgs, model: &str, recording: &Recording) -> Result<Replayed, CliError> {
    let header = &recording.header;
    let engine = EngineArgs {
        backend: args.backend.clone(),
        adapter: args.adapter.clone(),
        max_model_len: Some(HumanInt(header.scheduler.max_model_len)),
        max_num_seqs: Some(HumanInt(header.scheduler.max_num_seqs)),
        max_num_batched_tokens: Some(HumanInt(header.scheduler.max_tokens_per_step)),
        block_size: Some(HumanInt(header.kv.block_size)),
        num_gpu_blocks_override: Some(HumanInt(header.kv.num_blocks)),
        precise: header.precise,
        kv_cache_dtype: Some(header.kv_cache_dtype.clone()),
        floor: header.floor,
        checked_shaders: header.checked_shaders,
        matrix_units: header.matrix_units,
        lora: LoraArgs {
            lora_modules: header
                .loras
                .iter()
                .map(|l| LoraModule { name: l.name.clone(), path: l.path.clone() })
                .collect(),
            ..LoraArgs::default()
        },
        ..EngineArgs::default()
    };
    let file = session::config()?;
    let mut options = engine.resolve(&file.engine, &Dirs::resolve()?.cache, header.seed)?;
    if header.num_host_blocks > 0 && header.swap_space_bytes > 0 {
        options.swap_space_bytes = header.swap_space_bytes;
    }
    let source = session::source(Some(model), &file)?;
    let mut progress = session::Progress::default();
    let mut loaded = loader::load(&LoadRequest { source, options }, &mut |p| {
        progress.show(p.phase, p.done, p.total);
        super::interrupt::presses() == 0
    })?;
    progress.clear();
    if loaded.model.vocab_size != header.model.vocab_size {
        return Err(CliError::model(format!(
            "the recording is of {} with {} tokens in its vocabulary, this model has {}",
            header.model.name, header.model.vocab_size, loaded.model.vocab_size
        )));
    }
    let is_same = |lora: &&LoraIdentity| loaded.model.loras.find(&lora.name).is_some_and(|now| now.id == lora.id);
    if let Some(other) = header.loras.iter().find(|lora| !is_same(lora)) {
        let (name, path) = (&other.name, other.path.display());
        return Err(CliError::model(format!("the LoRA adapter {name} is not the one that was recorded: {path}")));
    }
    Ok(quietly(|| replay(recording, Some(&mut *loaded.executor))))
}

/// A recording that was tampered with meets the scheduler's assertions. What they say becomes the command's error: they
/// are not to be printed as crashes as well.
fn quietly<T>(run: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = run();
    std::panic::set_hook(hook);
    result
}

fn settings(args: &WhatIfArgs, header: &Header) -> Result<Settings, CliError> {
    let mut settings = Settings { kv: header.kv, scheduler: header.scheduler };
    let Settings { kv, scheduler } = &mut settings;
    let within = |name: &str, given: Option<HumanInt>, (least, most): (u32, u32)| match given {
        Some(HumanInt(n)) if n < least || n > most => {
            Err(CliError::usage(format!("{name} must be {least} to {most}, not {n}")))
        }
        given => Ok(given.map(|n| n.0)),
    };
    if let Some(block_size) = within("--block-size", args.block_size, (1, MAX_BLOCK_SIZE))? {
        let slots = u64::from(kv.num_blocks - 1) * u64::from(kv.block_size);
        kv.num_blocks = (slots / u64::from(block_size)).clamp(1, u64::from(MAX_BLOCKS - 1)) as u32 + 1;
        kv.block_size = block_size;
    }
    kv.num_blocks = within("--num-blocks", args.num_blocks, (2, MAX_BLOCKS))?.unwrap_or(kv.num_blocks);
    kv.enable_prefix_cache &= !args.no_prefix_caching;
    let seqs = within("--max-num-seqs", args.max_num_seqs, (1, MAX_SEQS))?;
    scheduler.max_num_seqs = seqs.unwrap_or(scheduler.max_num_seqs);
    let budget = within("--max-num-batched-tokens", args.max_num_batched_tokens, (1, MAX_TOKENS))?;
    // As the engine does: every row can decode.
    scheduler.max_tokens_per_step = budget.unwrap_or(scheduler.max_tokens_per_step).max(scheduler.max_num_seqs);
    scheduler.long_prefill_cap = scheduler.long_prefill_cap.max(1).min(scheduler.max_tokens_per_step);
    if budget.is_some() && header.scheduler.long_prefill_cap == header.scheduler.max_tokens_per_step {
        scheduler.long_prefill_cap = scheduler.max_tokens_per_step;
    }
    if kv.num_blocks != header.kv.num_blocks {
        scheduler.watermark_blocks = default_watermark(kv.num_blocks);
    }
    scheduler.queue_policy = match args.scheduling_policy.as_deref() {
        None => scheduler.queue_policy,
        Some("priority") => QueuePolicy::Priority,
        Some("longest-prefix") => QueuePolicy::LongestPrefix,
        Some("fair") => QueuePolicy::Fair,
        Some(_) => QueuePolicy::Fcfs,
    };
    scheduler.victim = match args.victim_policy.as_deref() {
        None => scheduler.victim,
        Some("least-computed") => VictimPolicy::LeastComputed,
        Some("priority") => VictimPolicy::Priority,
        Some(_) => VictimPolicy::LastIn,
    };
    Ok(settings)
}

fn compare(args: &ReplayArgs, recording: &Recording) -> CliResult {
    let header = &recording.header;
    let changed = settings(&args.what_if, header)?;
    let run = |settings| {
        quietly(|| what_if::what_if(recording, settings))
            .map_err(|error| CliError::failure(format!("{error}: {}", args.file.display())))
    };
    let recorded = run(Settings { kv: header.kv, scheduler: header.scheduler })?;
    let what_if = run(changed)?;
    let cost = what_if::fit(recording);
    let left_out = what_if::left_out(recording);
    if args.json {
        let settings = |s: &Settings| json!({ "kv": s.kv, "scheduler": s.scheduler });
        out::json(&json!({
            "cost_model": cost,
            "left_out": left_out,
            "recorded": { "settings": settings(&Settings { kv: header.kv, scheduler: header.scheduler }), "figures": recorded },
            "what_if": { "settings": settings(&changed), "figures": what_if },
        }))?;
    } else {
        let note = format!(
            "Arrivals at their recorded times; a step costs {:.2} ms, {:.3} ms per decoding row and {:.3} ms per prompt \
             token, fitted to the recorded steps.\n",
            cost.step_us / 1e3,
            cost.decode_row_us / 1e3,
            cost.prefill_token_us / 1e3
        );
        out::text(&(table(&recorded, &what_if) + &note))?;
        if let Some(words) = left_out.words() {
            out::note(&format!("left out on both sides: {words}"));
        }
    }
    Ok(Exit::Ok)
}

fn table(recorded: &Figures, what_if: &Figures) -> String {
    let mut rows = vec![["", "recorded settings", "what if"].map(String::from).to_vec()];
    let mut row = |what: &str, show: &dyn Fn(&Figures) -> String| {
        rows.push(vec![what.into(), show(recorded), show(what_if)]);
    };
    row("requests", &|f| f.requests.to_string());
    row("refused", &|f| f.refused.to_string());
    row("steps", &|f| f.steps.to_string());
    row("mean batch", &|f| format!("{:.2}", f.mean_batch));
    row("KV use, mean (max)", &|f| format!("{:.1} % ({:.1} %)", 100.0 * f.kv_use, 100.0 * f.kv_use_max));
    row("preemptions", &|f| f.preemptions.to_string());
    row("recompute tax", &|f| format!("{:.2} %", 100.0 * f.recompute_tax));
    row("hit tokens", &|f| f.hit_tokens.to_string());
    row("queue, steps", &|f| format!("{:.1}", f.queue_steps));
    row("first token, ms", &|f| format!("{:.1}", f.ttft_ms));
    row("between tokens, ms (p99)", &|f| format!("{:.1} ({:.1})", f.itl_ms, f.itl_p99_ms));
    row("whole run, ms", &|f| format!("{:.0}", f.total_ms));
    out::table(&rows)
}
