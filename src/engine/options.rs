//! What the engine can be told at load. Every limit is said by the caller; `config.rs` has the defaults.

pub use crate::executor::wgpu_executor::TuneMode;
use crate::executor::wgpu_executor::{CANARY_BYTES, KvFormat, LoraLimits};
use crate::memory::KvTokenBytes;
use crate::model::hub::DefaultAccess;
use crate::telemetry::{QueuePolicy, VictimPolicy};

pub use crate::scheduler::PreemptionMode;
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

/// Whether steps are encoded, and submitted, while the one before them runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepLoop {
    /// On a graphics card, where it pays.
    Auto,
    Sync,
    /// On software adapters as well, wherever it is possible.
    Ahead,
}

/// What keys and values are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvCacheDtype {
    /// f16, and f32 in the reference mode.
    Auto,
    F16,
    F32,
    /// Signed bytes with a scale for each token and head: half of f16.
    Int8,
}

impl KvCacheDtype {
    /// The words that flags and files use.
    pub const WORDS: [&'static str; 4] = ["auto", "f16", "f32", "int8"];

    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            KvCacheDtype::Auto => "auto",
            KvCacheDtype::F16 => "f16",
            KvCacheDtype::F32 => "f32",
            KvCacheDtype::Int8 => "int8",
        }
    }

    /// Reads one of [`Self::WORDS`], in any case.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word.to_ascii_lowercase().as_str() {
            "auto" => KvCacheDtype::Auto,
            "f16" => KvCacheDtype::F16,
            "f32" => KvCacheDtype::F32,
            "int8" => KvCacheDtype::Int8,
            _ => return None,
        })
    }
}

/// A LoRA adapter under the name by which requests ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraModule {
    pub name: String,
    /// A folder as PEFT writes it.
    pub path: PathBuf,
}

/// Which LoRA adapters are loaded with a model, and how much room there is for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraOptions {
    pub modules: Vec<LoraModule>,
    /// Adapters that there is room for; at least as many as modules.
    pub max_loras: u32,
    /// Largest rank that there is room for; `None` takes that of the modules.
    pub max_rank: Option<u32>,
}

impl LoraOptions {
    /// No adapters, and no room for any.
    pub fn none() -> LoraOptions {
        LoraOptions { modules: Vec::new(), max_loras: 0, max_rank: None }
    }

    /// One more adapter.
    pub fn add(&mut self, module: LoraModule) {
        self.modules.push(module);
        self.max_loras = self.max_loras.max(self.modules.len() as u32);
    }

    /// What the executor makes room for, once the modules' ranks are known.
    pub fn limits(&self) -> LoraLimits {
        match self.max_loras {
            0 => LoraLimits::NONE,
            max_adapters => LoraLimits { max_adapters, max_rank: self.max_rank.unwrap_or(1).max(1) },
        }
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
    /// The adapter's memory, where it is known; `None` leaves a graphics card's limit to its driver.
    pub gpu_memory_bytes: Option<u64>,
    /// Layers of at most so many bytes stay in host memory; `None` keeps some there as the last resort.
    pub cpu_offload_bytes: Option<u64>,
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
    /// How preempted requests get their K and V back.
    pub preemption: PreemptionMode,
    /// Host memory for blocks of preempted requests and for prefixes that left the pool; 0 turns both off.
    pub swap_space_bytes: u64,
    /// Where prefixes are kept that leave host memory, or outlive the process; `None` keeps none.
    pub prefix_cache_dir: Option<PathBuf>,
    /// What files of one model may take there.
    pub prefix_cache_bytes: u64,
    /// f32 activations, no integer dot products, and f32 KV unless [`Self::kv_cache_dtype`] says otherwise: the
    /// reference mode.
    pub precise: bool,
    pub kv_cache_dtype: KvCacheDtype,
    /// Chats are rendered with this template instead of the model's.
    pub chat_template: Option<PathBuf>,
    /// Mark every slot of the KV cache with its token, and check the marks before each read.
    pub kv_canary: bool,
    pub lora: LoraOptions,
    /// Use no optional feature of the adapter.
    pub floor: bool,
    /// Keep bounds, loop and division checks in every shader.
    pub checked_shaders: bool,
    /// Compute products of many tokens by the adapter's cooperative matrices: results then hang on how a prompt was cut.
    pub matrix_units: bool,
    pub step_loop: StepLoop,
    /// Requests that may wait; more are refused at submit.
    pub max_queue: u32,
    /// Seeds the requests that bring no seed; `None` draws them.
    pub seed: Option<u64>,
    pub check: CheckLevel,
    /// Where the run is recorded, for `kvasir replay`; a second load begins the file anew.
    pub record: Option<PathBuf>,
    /// Whether kernels are measured at load.
    pub tune: TuneMode,
    /// Receives the default model when it is fetched, and what was measured.
    pub cache_dir: PathBuf,
    /// Nothing is fetched: `HF_HUB_OFFLINE`.
    pub offline: bool,
}

impl EngineOptions {
    /// Where the default model comes from.
    pub fn default_access(&self) -> DefaultAccess<'_> {
        DefaultAccess { cache_dir: &self.cache_dir, offline: self.offline }
    }

    /// How keys and values are stored.
    pub fn kv_format(&self) -> KvFormat {
        match self.kv_cache_dtype {
            KvCacheDtype::Auto if self.precise => KvFormat::F32,
            KvCacheDtype::Auto | KvCacheDtype::F16 => KvFormat::F16,
            KvCacheDtype::F32 => KvFormat::F32,
            KvCacheDtype::Int8 => KvFormat::I8,
        }
    }

    /// What a cached token takes.
    pub fn kv_token_bytes(&self) -> KvTokenBytes {
        let format = self.kv_format();
        let per_token = if self.kv_canary { CANARY_BYTES } else { 0 };
        KvTokenBytes { per_element: format.value_bytes(), per_head: format.scale_bytes(), per_token }
    }
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
    /// Places for blocks in host memory.
    pub num_host_blocks: u32,
    pub preemption: PreemptionMode,
    pub prefix_cache_dir: Option<PathBuf>,
    pub scheduling_policy: QueuePolicy,
    /// When invariants are checked.
    pub check: CheckLevel,
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
            num_host_blocks: 0,
            preemption: PreemptionMode::Auto,
            prefix_cache_dir: None,
            scheduling_policy: QueuePolicy::Fair,
            check: CheckLevel::EveryStep,
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
