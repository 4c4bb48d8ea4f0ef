//! What the engine can be told at load. Every limit is said by the caller; `config.rs` has the defaults.

use crate::telemetry::{QueuePolicy, VictimPolicy};
use std::path::PathBuf;
use std::time::Duration;

/// Which graphics interface to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best adapter of any interface.
    Auto,
    Vulkan,
    Metal,
    Dx12,
}

impl BackendChoice {
    /// The words that flags and files use.
    pub const WORDS: [&'static str; 4] = ["auto", "vulkan", "metal", "dx12"];

    /// Reads one of [`Self::WORDS`], in any case.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word.to_ascii_lowercase().as_str() {
            "auto" => BackendChoice::Auto,
            "vulkan" => BackendChoice::Vulkan,
            "metal" => BackendChoice::Metal,
            "dx12" => BackendChoice::Dx12,
            _ => return None,
        })
    }
}

/// When the invariants of scheduler and cache are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckLevel {
    /// Whenever the engine falls idle.
    WhenIdle,
    /// After every step: for tests and simulations.
    EveryStep,
}

/// How the engine runs a model.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    pub backend: BackendChoice,
    /// Part of the adapter's name, in any case; `None` takes the best.
    pub adapter: Option<String>,
    /// Longest context; `None` takes the model's own, as far as memory allows.
    pub max_model_len: Option<u32>,
    /// Rows of the batch.
    pub max_num_seqs: u32,
    /// Token budget of a step.
    pub max_num_batched_tokens: u32,
    /// Tokens of a KV block.
    pub block_size: u32,
    /// Share of the memory budget that weights, workspace and KV may take, 0 to 1.
    pub gpu_memory_utilization: f32,
    /// Exactly this many KV blocks, the null block included.
    pub num_gpu_blocks_override: Option<u32>,
    pub prefix_caching: bool,
    /// Who is admitted first.
    pub scheduling_policy: QueuePolicy,
    /// Tokens of one prompt per step at most; 0 leaves it to the budget, which concurrent prompts share evenly.
    pub long_prefill_token_threshold: u32,
    /// Fit the prefill chunks to the time that decoding rows may wait.
    pub adaptive_budget: bool,
    /// Who gives way when blocks are short.
    pub victim_policy: VictimPolicy,
    /// f32 activations and KV, no integer dot products: the reference mode.
    pub precise: bool,
    /// Use no optional feature of the adapter.
    pub floor: bool,
    /// Keep bounds, loop and division checks in every shader.
    pub checked_shaders: bool,
    /// Requests that may wait; more are refused at submit.
    pub max_queue: u32,
    /// Seeds the requests that bring no seed; `None` draws them.
    pub seed: Option<u64>,
    pub check: CheckLevel,
    /// Where the run is recorded, for `kvasir replay`; a second load begins the file anew.
    pub record: Option<PathBuf>,
    /// Receives the default model when it is fetched.
    pub cache_dir: PathBuf,
}

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The built-in default model, downloaded on first use.
    Default,
    /// A GGUF file or a Hugging Face folder.
    Path(PathBuf),
}

/// A model and how to run it.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadRequest {
    pub source: ModelSource,
    pub options: EngineOptions,
}

/// The engine without a GPU: the real scheduler and cache on a paged memory of hashes.
#[derive(Clone, Debug, PartialEq)]
pub struct FakeOptions {
    /// How long each step takes.
    pub step_delay: Duration,
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    pub block_size: u32,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    pub max_queue: u32,
    pub scheduling_policy: QueuePolicy,
    /// What the next steps do instead of running, first one first: for tests of recovery.
    pub faults: Vec<FakeFault>,
    /// Where the run is recorded.
    pub record: Option<PathBuf>,
}

impl FakeOptions {
    /// A pool that four chats fill: small blocks, steps without delay.
    pub fn small() -> Self {
        FakeOptions {
            step_delay: Duration::ZERO,
            num_blocks: 129,
            block_size: 16,
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 1024,
            max_queue: 64,
            scheduling_policy: QueuePolicy::Fair,
            faults: Vec::new(),
            record: None,
        }
    }
}

/// A fault to inject at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFault {
    /// Runs as usual.
    None,
    /// The driver refuses the step.
    Rejected,
    OutOfMemory,
    /// The step is launched and fails while it runs.
    FailedWait,
    DeviceLost,
    /// The step panics inside the executor.
    Panic,
    /// The logits of the first sampled row are not numbers.
    NotFinite,
}
