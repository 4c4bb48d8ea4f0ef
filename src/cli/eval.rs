//! `kvasir eval`: raw logits and perplexity, for comparing with references.

use super::args::{LoraArg, ModelArgs, token_lists};
use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, session};
use crate::engine::loader::{self, LoadFailure, Loaded};
use crate::engine::logits::{LogitsPlan, adapted_logits, kl_divergence, logits_of_two, nll};
use crate::engine::options::{KvCacheDtype, LoadRequest};
use crate::executor::ExecError;
use crate::ids::TokenId;
use crate::model::Model;
use crate::model::groups::LayerGroups;
use crate::tokenizer::AddSpecial;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Rows of a batch that the executor is built for.
const MAX_ROWS: usize = 256;

#[derive(Clone, Debug, clap::Subcommand)]
pub enum EvalCommand {
    /// Logits of every position of given token lists
    Logits(LogitsArgs),
    /// Perplexity of a text, as one window without special tokens
    Perplexity(PerplexityArgs),
    /// How far predictions over a text are from those with another KV cache
    Divergence(DivergenceArgs),
}

#[derive(Clone, Debug, clap::Args)]
pub struct LogitsArgs {
    /// [[ids…], …] as JSON
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// Receives tensors logits.<i>, f32 [len, vocab]
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Tokens of a prompt per step (default: as many as a step holds)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// All prompts in one batch
    #[arg(long)]
    pub batched: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub struct PerplexityArgs {
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Tokens per step (default: as many as a step holds)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub struct DivergenceArgs {
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What keys and values are stored as in the run that is the reference: auto, f16, f32 or int8
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = KvCacheDtype::WORDS)]
    pub from_kv: String,
    /// Tokens per step (default: as many as a step holds)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(command: &EvalCommand) -> CliResult {
    match command {
        EvalCommand::Logits(args) => logits(args),
        EvalCommand::Perplexity(args) => perplexity(args),
        EvalCommand::Divergence(args) => divergence(args),
    }
}

fn logits(args: &LogitsArgs) -> CliResult {
    let prompts = token_lists("--tokens", &args.tokens)?;
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(CliError::usage(format!("--tokens: an empty list has no logits: {}", args.tokens.display())));
    }
    if args.batched && prompts.len() > MAX_ROWS {
        return Err(CliError::usage(format!("--batched takes at most {MAX_ROWS} prompts, not {}", prompts.len())));
    }
    let (mut loaded, plan) = open(&args.lora.on(&args.model), &prompts, args.chunk, args.batched)?;
    let started = Instant::now();
    let vocab = loaded.executor.vocab_size() as usize;
    let mut all: Vec<Vec<u8>> = prompts.iter().map(|p| Vec::with_capacity(p.len() * vocab * 4)).collect();
    let adapters = vec![session::lora_of(&loaded.model); prompts.len()];
    adapted_logits(&mut *loaded.executor, &prompts, &adapters, plan, &mut |prompt_idx, _, rows| {
        all[prompt_idx].extend(rows.iter().flat_map(|x| x.to_le_bytes()));
    })
    .map_err(step_failed)?;
    let seconds = started.elapsed().as_secs_f64();
    write_logits(args, &prompts, &all, vocab)?;
    let num_tokens: usize = prompts.iter().map(Vec::len).sum();
    if args.json {
        out::json(&json!({ "prompts": prompts.len(), "tokens": num_tokens, "seconds": seconds }))?;
    } else {
        out::line(&format!("{num_tokens} tokens of {} prompts in {seconds:.2} s", prompts.len()))?;
    }
    Ok(Exit::Ok)
}

fn write_logits(args: &LogitsArgs, prompts: &[Vec<TokenId>], all: &[Vec<u8>], vocab: usize) -> Result<(), CliError> {
    let fault = |e: &dyn std::fmt::Display| CliError::failure(format!("--out: {e}: {}", args.out.display()));
    let mut tensors = Vec::new();
    for (i, (prompt, bytes)) in prompts.iter().zip(all).enumerate() {
        let view = TensorView::new(Dtype::F32, vec![prompt.len(), vocab], bytes).map_err(|e| fault(&e))?;
        tensors.push((format!("logits.{i}"), view));
    }
    safetensors::serialize_to_file(tensors, None, &args.out).map_err(|e| fault(&e))
}

fn perplexity(args: &PerplexityArgs) -> CliResult {
    let (tokens, mean) = mean_nll(&args.lora.on(&args.model), &args.file, args.chunk)?;
    if args.json {
        out::json(&json!({ "tokens": tokens, "nll": mean, "ppl": mean.exp() }))?;
    } else {
        out::line(&format!("perplexity {:.4} over {tokens} tokens (mean nll {mean:.5})", mean.exp()))?;
    }
    Ok(Exit::Ok)
}

/// Tokens of a text, and their mean negative log-likelihood in one window.
pub(super) fn mean_nll(
    model: &ModelArgs,
    file: &std::path::Path,
    chunk: Option<u32>,
) -> Result<(usize, f64), CliError> {
    let prompts = [tokens_of(file, model)?];
    let (mut loaded, plan) = open(model, &prompts, chunk, false)?;
    let vocab = loaded.executor.vocab_size() as usize;
    let targets = &prompts[0];
    let mut sum = 0.0;
    let adapters = [session::lora_of(&loaded.model)];
    adapted_logits(&mut *loaded.executor, &prompts, &adapters, plan, &mut |_, first, rows| {
        for (i, row) in rows.chunks_exact(vocab).enumerate() {
            if let Some(&target) = targets.get(first + i + 1) {
                sum += nll(row, target);
            }
        }
    })
    .map_err(step_failed)?;
    Ok((targets.len(), finite(sum / (targets.len() - 1) as f64)?))
}

pub(super) fn tokens_of(file: &std::path::Path, model: &ModelArgs) -> Result<Vec<TokenId>, CliError> {
    let text = super::args::read_text("FILE", file)?;
    let tokenizer = session::tokenizer_of_model(model.model.as_deref())?;
    let tokens = tokenizer.encode(&text, AddSpecial::No).map_err(|e| CliError::failure(e.to_string()))?;
    if tokens.len() < 2 {
        return Err(CliError::usage(format!("a text of at least two tokens is wanted: {}", file.display())));
    }
    Ok(tokens)
}

fn finite(value: f64) -> Result<f64, CliError> {
    if value.is_finite() {
        return Ok(value);
    }
    Err(CliError::failure("the model produced logits that are not numbers")
        .with_fix("try --precise; if that helps, please report the adapter and the model"))
}

/// What the rows of two runs come to together.
#[derive(Default)]
struct Divergence {
    kl: Vec<f64>,
    same_top: usize,
    /// Of the next token, of the reference and of the run that is measured.
    nll: (f64, f64),
}

impl Divergence {
    fn add(&mut self, want: &[f32], got: &[f32], target: Option<TokenId>) {
        let top = |row: &[f32]| row.iter().enumerate().fold(0, |best, (i, x)| if *x > row[best] { i } else { best });
        self.kl.push(kl_divergence(want, got));
        self.same_top += usize::from(top(want) == top(got));
        if let Some(target) = target {
            self.nll = (self.nll.0 + nll(want, target), self.nll.1 + nll(got, target));
        }
    }
}

/// The text on two executors in lockstep, which differ in how keys and values are stored.
fn divergence(args: &DivergenceArgs) -> CliResult {
    let prompts = [tokens_of(&args.file, &args.model)?];
    let mut reference = args.model.clone();
    reference.engine.kv_cache_dtype = Some(args.from_kv.clone());
    let (mut want, _) = open(&reference, &prompts, args.chunk, false)?;
    let (mut got, plan) = open(&args.model, &prompts, args.chunk, false)?;
    let (vocab, targets) = (got.executor.vocab_size() as usize, &prompts[0]);
    let mut sums = Divergence::default();
    let mut on_rows = |first: usize, want: &[f32], got: &[f32]| {
        for (i, (want, got)) in want.chunks_exact(vocab).zip(got.chunks_exact(vocab)).enumerate() {
            sums.add(want, got, targets.get(first + i + 1).copied());
        }
    };
    logits_of_two((&mut *want.executor, &mut *got.executor), targets, plan, &mut on_rows).map_err(step_failed)?;
    let Divergence { mut kl, same_top, nll } = sums;
    let n = targets.len();
    let mean = finite(kl.iter().sum::<f64>() / n as f64)?;
    kl.sort_by(f64::total_cmp);
    let (p99, max) = (kl[(n - 1) * 99 / 100], kl[n - 1]);
    let ppl = |sum: f64| (sum / (n - 1) as f64).exp();
    let same_top = same_top as f64 / n as f64;
    if args.json {
        out::json(&json!({
            "tokens": n, "kl_mean": mean, "kl_p99": p99, "kl_max": max, "same_top": same_top,
            "ppl_from": ppl(nll.0), "ppl": ppl(nll.1),
        }))?;
    } else {
        out::line(&format!(
            "KL divergence {mean:.3e} nats on average over {n} tokens (p99 {p99:.3e}, largest {max:.3e}); the most \
             likely token is the same at {:.2} %; perplexity {:.4} instead of {:.4}",
            100.0 * same_top,
            ppl(nll.1),
            ppl(nll.0)
        ))?;
    }
    Ok(Exit::Ok)
}

/// An executor that is just large enough for the prompts.
fn open(
    args: &ModelArgs,
    prompts: &[Vec<TokenId>],
    chunk: Option<u32>,
    is_batched: bool,
) -> Result<(Loaded, LogitsPlan), CliError> {
    let file = session::config()?;
    let mut plan = LogitsPlan { chunk, is_batched, max_tokens_per_step: 0 };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let model = Model::open(&session::local_path(args.model.as_deref())?).map_err(LoadFailure::from)?;
    let num_groups = LayerGroups::of(model.spec()).num_groups();
    let options = session::options(args, &file, None, |options| {
        let needs = plan.needs(prompts, options.block_size, num_groups);
        let wanted = chunk.unwrap_or(longest).min(longest).saturating_mul(needs.num_rows);
        options.max_num_batched_tokens = options.max_num_batched_tokens.min(wanted);
        options.num_gpu_blocks_override = Some(needs.num_blocks.max(2));
        options.max_num_seqs = needs.num_rows;
        options.max_model_len = Some(longest + 1);
        plan.max_tokens_per_step = options.max_num_batched_tokens;
    })?;
    let source = session::source(args.model.as_deref(), &file)?;
    let mut progress = session::Progress::default();
    let loaded = loader::load(&LoadRequest { source, options }, &mut |p| {
        progress.show(p.phase, p.done, p.total);
        interrupt::presses() == 0
    });
    progress.clear();
    let loaded = loaded?;
    loaded.model.check_head()?;
    let vocab = loaded.executor.vocab_size();
    if let Some(&token) = prompts.iter().flatten().find(|&&t| t >= vocab) {
        return Err(crate::protocol::RunError::TokenOutOfRange { token, vocab }.into());
    }
    Ok((loaded, plan))
}

pub(super) fn step_failed(error: ExecError) -> CliError {
    CliError::failure(error.to_string())
}
