//! Flags that several commands share.

use super::error::CliError;
use crate::config::{EngineArgs, HumanInt};
use crate::engine::handle::GenerationDefaults;
use crate::protocol::{Pooling, SamplingParams, StopRules};
use std::path::{Path, PathBuf};

/// Which model, and how to run it.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// A GGUF file, a Hugging Face folder or the id of a model found here (default: the built-in default model)
    #[arg(long, value_name = "PATH|ID", env = "KVASIR_MODEL", hide_env_values = true)]
    pub model: Option<String>,
    /// What [`LoraArg`] names, for commands that have it.
    #[arg(skip)]
    pub lora: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// An adapter for all that a command runs.
#[derive(Clone, Debug, clap::Args)]
pub struct LoraArg {
    /// Apply a LoRA adapter: a folder as PEFT writes it
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    lora: Option<PathBuf>,
}

impl LoraArg {
    /// The model with the adapter.
    pub fn on(&self, model: &ModelArgs) -> ModelArgs {
        ModelArgs { lora: self.lora.clone(), ..model.clone() }
    }
}

/// How tokens are drawn and when the output ends.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 takes the most likely token (default: the model's, else 0.7)
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens that reaches this probability (default: the model's, else 1)
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all (default: the model's, else 0)
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this share of the most likely one (default: the model's, else 0)
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens that occurred (default: the model's, else 1)
    #[arg(long, value_name = "R")]
    pub repetition_penalty: Option<f32>,
    /// Lower the logits of tokens that the output has
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub presence_penalty: f32,
    /// Lower the logits of tokens by how often the output has them
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub frequency_penalty: f32,
    /// Repeats the draws
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// End the output before this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the model's end of sequence
    #[arg(long)]
    pub ignore_eos: bool,
    /// Report the log-probabilities of this many alternatives
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=20))]
    pub logprobs: Option<u8>,
}

impl SamplingArgs {
    /// Flags over the model's own defaults over ours.
    pub fn params(&self, model: &GenerationDefaults) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.or(model.temperature).unwrap_or(0.7),
            top_k: self.top_k.or(model.top_k).unwrap_or(0),
            top_p: self.top_p.or(model.top_p).unwrap_or(1.0),
            min_p: self.min_p.or(model.min_p).unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: Vec::new(),
            seed: self.seed,
            logprobs: self.logprobs,
        }
    }

    pub fn stop_rules(&self, max_tokens: Option<HumanInt>) -> StopRules {
        StopRules {
            max_tokens: max_tokens.map(|n| n.0),
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            stop_strings: self.stop.clone(),
            ignore_eos: self.ignore_eos,
        }
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct PoolingArg {
    /// How embeddings are made of hidden states: auto (as the model's files say), last or mean
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = ["auto", "last", "mean"])]
    pooling: String,
}

impl PoolingArg {
    /// `None` leaves it to the model's files.
    pub fn pooling(&self) -> Option<Pooling> {
        match self.pooling.as_str() {
            "last" => Some(Pooling::Last),
            "mean" => Some(Pooling::Mean),
            _ => None,
        }
    }
}

/// Reads a JSON file that a flag named.
pub fn read_json(flag: &str, path: &Path) -> Result<serde_json::Value, CliError> {
    let bytes = read_file(flag, path)?;
    serde_json::from_slice(&bytes)
        .map_err(|e| CliError::usage(format!("{flag}: the file is not valid JSON: {e}: {}", path.display())))
}

/// Reads a text file that a flag named.
pub fn read_text(flag: &str, path: &Path) -> Result<String, CliError> {
    String::from_utf8(read_file(flag, path)?)
        .map_err(|e| CliError::usage(format!("{flag}: the file is not UTF-8 text: {e}: {}", path.display())))
}

fn read_file(flag: &str, path: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(path).map_err(|e| CliError::usage(format!("{flag}: {e}: {}", path.display())))
}

/// Reads `[ids…]` or `[[ids…], …]` as lists of token ids.
pub fn token_lists(flag: &str, path: &Path) -> Result<Vec<Vec<u32>>, CliError> {
    let value = read_json(flag, path)?;
    let fault = || {
        CliError::usage(format!("{flag}: a list of token ids, or a list of such lists, is wanted: {}", path.display()))
    };
    let items = value.as_array().ok_or_else(fault)?;
    if items.first().is_some_and(serde_json::Value::is_array) {
        items.iter().map(|item| token_list(item).ok_or_else(fault)).collect()
    } else {
        Ok(vec![token_list(&value).ok_or_else(fault)?])
    }
}

fn token_list(value: &serde_json::Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}
