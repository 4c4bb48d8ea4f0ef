//! Recordings: a run of the engine as a file, run again to the same decisions, run otherwise, or shown as a trace.
//!
//! Guarantees: a recording holds everything that the scheduler's decisions and the tokens depend on, so that
//! [`replay()`] comes to the same ones; writing never makes a step wait, is bounded, and ends with a warning where the
//! disk is full or too slow; a damaged file is named by line. Prompt text is not in it, token ids are.
//!
//! # The format, version 1
//!
//! JSON lines. The first is `{"header": …}` ([`Header`]); then, in order of happening:
//!
//! - `{"op": {"at_us": t, "op": …}}`: an operation on the scheduler ([`Op`]): arrivals with tokens, sampling, seed, stop
//!   rules, priority and salt; forks; ends; plans with all their inputs; what became of each step with its tokens; block
//!   changes. `at_us` counts from the engine's start. An operation takes effect before the plan that follows it.
//! - `{"record": …}`: the [`StepRecord`] of a finished step, with its times.
//!
//! Fields may be added within a version; a reader refuses another version by its number.

mod difference;
mod reader;
pub mod replay;
pub mod trace;
pub mod what_if;
mod writer;

pub use difference::Difference;
pub use reader::{ReadError, Recording};
pub use replay::{ReplayReport, replay};
pub use writer::Recorder;

use crate::ids::TokenId;
use crate::kv::KvConfig;
use crate::scheduler::{Op, SchedulerConfig};
use crate::telemetry::StepRecord;
use serde::{Deserialize, Serialize};

/// The format that this version writes.
pub const VERSION: u32 = 1;

/// One line of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Header(Box<Header>),
    Op(Box<TimedOp>),
    Record(Box<StepRecord>),
}

/// An operation and when it was noted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedOp {
    /// Microseconds since the engine started.
    pub at_us: u64,
    pub op: Op,
}

/// Largest numbers that a header, or a run with other settings, may name: what no engine goes beyond.
pub const MAX_BLOCKS: u32 = 1 << 24;
pub const MAX_BLOCK_SIZE: u32 = 4096;
pub const MAX_SEQS: u32 = 4096;
pub const MAX_TOKENS: u32 = 1 << 24;

/// Names the first number of a scheduler and its cache that lies outside what can be run, with its range.
pub fn check_settings(kv: &KvConfig, scheduler: &SchedulerConfig) -> Result<(), String> {
    let ranges = [
        ("kv.num_blocks", kv.num_blocks, 2, MAX_BLOCKS),
        ("kv.block_size", kv.block_size, 1, MAX_BLOCK_SIZE),
        ("scheduler.max_num_seqs", scheduler.max_num_seqs, 1, MAX_SEQS),
        ("scheduler.max_tokens_per_step", scheduler.max_tokens_per_step, scheduler.max_num_seqs, MAX_TOKENS),
        ("scheduler.max_model_len", scheduler.max_model_len, 1, MAX_TOKENS),
        ("scheduler.long_prefill_cap", scheduler.long_prefill_cap, 1, u32::MAX),
        ("scheduler.aging_steps", scheduler.aging_steps, 1, u32::MAX),
    ];
    match ranges.into_iter().find(|(_, value, least, most)| value < least || value > most) {
        Some((name, value, least, most)) => Err(format!("{name} is {value}, must be {least} to {most}")),
        None => Ok(()),
    }
}

/// What the run was made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub version: u32,
    pub kv: KvConfig,
    /// Places for blocks in host memory.
    #[serde(default)]
    pub num_host_blocks: u32,
    /// What they may take.
    #[serde(default)]
    pub swap_space_bytes: u64,
    pub scheduler: SchedulerConfig,
    pub model: ModelIdentity,
    pub adapter: AdapterIdentity,
    /// Prompt chunks beside decoding rows are fitted to measured times.
    pub adaptive_budget: bool,
    /// f32 activations and KV.
    pub precise: bool,
    /// What keys and values are stored as, in the word of the flag.
    #[serde(default = "auto")]
    pub kv_cache_dtype: String,
    /// No optional feature of the adapter was used; every check was kept in the shaders.
    #[serde(default)]
    pub floor: bool,
    #[serde(default)]
    pub checked_shaders: bool,
    /// Products of many tokens were computed by cooperative matrices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub matrix_units: bool,
    /// The LoRA adapters that were there at the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loras: Vec<LoraIdentity>,
    /// Seeds requests that bring none.
    pub seed: Option<u64>,
}

fn auto() -> String {
    "auto".into()
}

/// The model that ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelIdentity {
    pub name: String,
    pub arch: String,
    pub quant: String,
    pub num_params: u64,
    pub file_bytes: u64,
    pub vocab_size: u32,
    pub eos_token_ids: Vec<TokenId>,
}

/// A LoRA adapter that rows could have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoraIdentity {
    pub name: String,
    /// The folder that it was read from.
    pub path: std::path::PathBuf,
    /// Of its content.
    pub id: u64,
}

/// What it ran on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdapterIdentity {
    pub name: String,
    pub driver: String,
    pub backend: String,
}
