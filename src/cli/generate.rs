//! `kvasir generate`: completions of one or several prompts in one batch.

use super::args::{LoraArg, ModelArgs, SamplingArgs, token_lists};
use super::error::{CliError, CliResult, Exit};
use super::{interrupt, out, session};
use crate::config::HumanInt;
use crate::engine::Run;
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{
    BeamParams, Decoding, EarlyStopping, EngineEvent, FinishReason, GenerateRequest, OwnerTag, RunTimings,
    TokenLogprobs, Usage,
};
use crate::tokenizer::{AddSpecial, Tokenizer};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// Tokens of an output where nothing is said.
const DEFAULT_MAX_TOKENS: u32 = 256;

#[derive(Clone, Debug, clap::Args)]
pub struct GenerateArgs {
    /// What to continue, or with --chat what to answer
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<String>,
    /// A further prompt (repeatable); all run as one batch
    #[arg(long = "prompt", value_name = "TEXT")]
    pub prompts: Vec<String>,
    /// Take prompts as token ids: [ids…] or [[ids…], …] as JSON
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    pub token_ids: Option<PathBuf>,
    /// Apply the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// What the assistant is told first
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Outputs per prompt
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub n: u32,
    /// Draw this many outputs per prompt and print the N most likely ones (default: N)
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub best_of: Option<u32>,
    /// Search with this many beams; -n of the best outputs are returned
    #[arg(long, value_name = "W", conflicts_with_all = ["best_of", "temperature", "top_p", "top_k", "min_p", "logprobs"])]
    pub beam_width: Option<u32>,
    /// Beams are ranked by log-probability / length ^ this (default: 1)
    #[arg(long, value_name = "P")]
    pub length_penalty: Option<f32>,
    /// When the search ends: at as many outputs as beams (true), when no better one is likely (false, the default), or
    /// when none is possible (never)
    #[arg(long, value_name = "WHEN", value_parser = ["true", "false", "never"])]
    pub early_stopping: Option<String>,
    /// At most this many tokens per output (default: 256, less where the context ends before)
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<HumanInt>,
    /// Compute this prefix first and keep it: text, or token ids in a .json file (repeatable)
    #[arg(long, value_name = "FILE")]
    pub pin_prefix: Vec<PathBuf>,
    /// Print one JSON object per prompt
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub lora: LoraArg,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// One finished output.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub text: String,
    pub token_ids: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
    pub finish: Option<FinishReason>,
    /// What a beam search ranks by.
    pub score: Option<f32>,
    pub usage: Usage,
    pub timings: RunTimings,
}

impl GenerateArgs {
    fn decoding(&self) -> Decoding {
        let Some(width) = self.beam_width else {
            return Decoding::Sample { n: self.n, best_of: self.best_of.unwrap_or(self.n) };
        };
        let early_stopping = match self.early_stopping.as_deref() {
            Some("true") => EarlyStopping::AtOnce,
            Some("never") => EarlyStopping::Never,
            _ => EarlyStopping::Heuristic,
        };
        let length_penalty = self.length_penalty.unwrap_or(1.0);
        Decoding::Beam(BeamParams { width, num_return: self.n, length_penalty, early_stopping })
    }
}

pub fn run(args: &GenerateArgs) -> CliResult {
    let token_prompts = args.token_ids.as_ref().map(|path| token_lists("--token-ids", path)).transpose()?;
    let num_texts = usize::from(args.prompt.is_some()) + args.prompts.len();
    if num_texts == 0 && token_prompts.is_none() {
        return Err(CliError::usage("a prompt is wanted: kvasir generate \"Once upon a time\""));
    }
    let of_beams =
        [("--length-penalty", args.length_penalty.is_some()), ("--early-stopping", args.early_stopping.is_some())];
    if let Some((flag, _)) = of_beams.into_iter().find(|(_, is_given)| *is_given && args.beam_width.is_none()) {
        return Err(CliError::usage(format!("{flag} is for a beam search: give --beam-width too")));
    }
    if let Some(best_of) = args.best_of.filter(|best_of| *best_of < args.n) {
        return Err(CliError::usage(format!("--best-of {best_of} is less than the {} outputs of -n", args.n)));
    }
    let num_requests = num_texts + token_prompts.as_ref().map_or(0, Vec::len);
    let session = session::open(&args.lora.on(&args.model), args.sampling.seed, |options| {
        options.max_queue = options.max_queue.max(num_requests as u32);
    })?;
    session::pin_prefixes(&session, &args.pin_prefix)?;
    let mut prompts = token_prompts.unwrap_or_default();
    for text in args.prompt.iter().chain(&args.prompts) {
        prompts.push(encode(args, &session.model, text)?);
    }
    let runs = submit_all(args, &session, &prompts)?;
    let streams_text = !args.json && num_requests == 1 && args.n == 1;
    for (prompt, run) in prompts.iter().zip(runs) {
        let show = |delta: &str| if streams_text { out::text(delta) } else { Ok(()) };
        let outputs = collect_choices(&run, args.n, show)?;
        report(args, &session.model, prompt, &outputs, streams_text)?;
    }
    session.engine.shutdown();
    Ok(Exit::Ok)
}

fn encode(args: &GenerateArgs, model: &LoadedModel, text: &str) -> Result<Vec<TokenId>, CliError> {
    if !args.chat {
        return model.tokenizer.encode(text, AddSpecial::Yes).map_err(|e| CliError::failure(e.to_string()));
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": text }));
    session::encode_chat(model, &Value::from(messages))
}

/// One run per prompt, all submitted before the first is read.
fn submit_all(args: &GenerateArgs, session: &session::Session, prompts: &[Vec<TokenId>]) -> Result<Vec<Run>, CliError> {
    let mut runs = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let room = session.model.max_model_len.saturating_sub(prompt.len() as u32).max(1);
        let max_tokens = args.max_tokens.unwrap_or(HumanInt(DEFAULT_MAX_TOKENS.min(room)));
        runs.push(session.engine.submit(GenerateRequest {
            owner: OwnerTag { id: i as u64, label: format!("prompt {}", i + 1) },
            prompt: prompt.clone(),
            sampling: args.sampling.params(&session.model.defaults),
            stop: args.sampling.stop_rules(Some(max_tokens)),
            decoding: args.decoding(),
            priority: 0,
            cache_salt: 0,
            adapter: session.lora,
        })?);
    }
    Ok(runs)
}

/// Reads a run of one output to its end, see [`collect_choices`].
pub fn collect(run: &Run, show: impl FnMut(&str) -> Result<(), CliError>) -> Result<Output, CliError> {
    Ok(collect_choices(run, 1, show)?.swap_remove(0))
}

/// Reads a run of `n` outputs to its end, showing text as it comes. Each output carries the usage and times of the whole
/// run. Ctrl-C ends it with exit code 130.
pub fn collect_choices(
    run: &Run,
    n: u32,
    mut show: impl FnMut(&str) -> Result<(), CliError>,
) -> Result<Vec<Output>, CliError> {
    let mut outputs = vec![Output::default(); n as usize];
    loop {
        interrupt::check()?;
        match run.recv_timeout(Duration::from_millis(100)) {
            Some(EngineEvent::Text { choice, delta, tokens, logprobs }) => {
                show(&delta)?;
                let output = &mut outputs[choice as usize];
                output.text.push_str(&delta);
                output.token_ids.extend(tokens);
                output.logprobs.extend(logprobs);
            }
            Some(EngineEvent::Finished { reason, usage, timings }) => {
                for output in &mut outputs {
                    output.finish.get_or_insert_with(|| reason.clone());
                    (output.usage, output.timings) = (usage, timings);
                }
                return Ok(outputs);
            }
            Some(EngineEvent::Choice { choice, reason, score, .. }) => {
                let output = &mut outputs[choice as usize];
                (output.finish, output.score) = (Some(reason), score);
            }
            Some(EngineEvent::Failed { error }) => return Err(error.into()),
            Some(
                EngineEvent::Started { .. }
                | EngineEvent::Reading { .. }
                | EngineEvent::Preempted { .. }
                | EngineEvent::PromptLogprobs { .. }
                | EngineEvent::Embedding { .. },
            )
            | None => {}
        }
    }
}

fn report(
    args: &GenerateArgs,
    model: &LoadedModel,
    prompt: &[TokenId],
    outputs: &[Output],
    was_streamed: bool,
) -> Result<(), CliError> {
    if args.json {
        return out::json(&prompt_json(model, prompt, outputs));
    }
    if was_streamed {
        return out::text("\n");
    }
    outputs.iter().try_for_each(|output| out::text(&format!("{}\n\n", output.text.trim_end())))
}

fn prompt_json(model: &LoadedModel, prompt: &[TokenId], outputs: &[Output]) -> Value {
    let items: Vec<Value> = outputs.iter().enumerate().map(|(i, o)| output_json(i, o, &model.tokenizer)).collect();
    let usage = outputs.first().map_or(Usage::default(), |output| output.usage);
    json!({
        "model": model.name,
        "prompt_tokens": prompt.len(),
        "outputs": items,
        "usage": {
            "prompt_tokens": prompt.len(),
            "completion_tokens": usage.output_tokens,
            "total_tokens": prompt.len() as u32 + usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
            "preemptions": usage.preemptions,
        },
        "timings": timings_json(outputs),
    })
}

fn output_json(index: usize, output: &Output, tokenizer: &Tokenizer) -> Value {
    let mut item = json!({
        "index": index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish.as_ref().map(FinishReason::api_word),
    });
    if let Some(score) = output.score {
        item["score"] = Value::from(score);
    }
    if !output.logprobs.is_empty() {
        let one = |token: TokenId, logprob: f32| json!({ "token_id": token, "token": tokenizer.token_text(token), "logprob": logprob });
        let rows: Vec<Value> = output
            .logprobs
            .iter()
            .map(|row| {
                let mut value = one(row.token, row.logprob);
                value["top"] = row.top.iter().map(|&(token, logprob)| one(token, logprob)).collect();
                value
            })
            .collect();
        item["logprobs"] = Value::from(rows);
    }
    item
}

/// Of the whole run: its outputs share a batch.
fn timings_json(outputs: &[Output]) -> Value {
    let Some(first) = outputs.first() else { return Value::Null };
    let (timings, usage) = (first.timings, first.usage);
    json!({
        "ttft_ms": timings.ttft_us as f64 / 1e3,
        "decode_tok_s": rate(usage.output_tokens.saturating_sub(outputs.len() as u32), timings.decode_us),
        "prefill_tok_s": rate(
            usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            timings.ttft_us.saturating_sub(timings.queue_us),
        ),
    })
}

/// Tokens per second; null when there is nothing to divide.
pub fn rate(tokens: u32, us: u64) -> Option<f64> {
    (tokens > 0 && us > 0).then(|| f64::from(tokens) * 1e6 / us as f64)
}
