//! Runs a [`StepBatch`]: on the GPU ([`wgpu_executor`]), on the CPU as the reference ([`reference_executor`]), or on a
//! paged memory of hashes that catches every scheduling fault ([`paged_fake`]).
//!
//! Executors know nothing of requests, queues or the cache's bookkeeping.

use crate::batch::StepBatch;
use crate::gpu::GpuError;
use crate::ids::{HostSlot, TokenId};
pub use crate::kernels::canary::Corruption;
use crate::kernels::weights::WeightError;
use crate::model::ModelError;
use crate::model::lora::Adapter;
use crate::model::spec::WeightRole;
use crate::protocol::TokenLogprobs;
use crate::telemetry::kernels::KernelTime;
use std::sync::Arc;

mod host_store;
pub mod paged_fake;
mod reference_draw;
pub mod reference_executor;
mod reference_ffn;
mod reference_latent;
mod reference_lora;
pub mod wgpu_executor;

/// Most alternatives that a row can ask for.
pub const MAX_LOGPROBS: u32 = crate::kernels::logprobs::MAX_TOP;

/// What a step gave back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The drawn token of each logit row; empty when logits were wanted instead.
    pub tokens: Vec<TokenId>, // [num_logits]
    /// Rows whose logits held a NaN or an infinity: their token is not to be used.
    pub not_finite: Vec<bool>, // [num_logits]
    pub logprobs: Vec<Option<TokenLogprobs>>, // [num_logits]
    /// f32 `[num_logits, vocab]` when the batch asked for them.
    pub logits: Option<Vec<f32>>,
    /// Of each token of [`StepBatch::scored`].
    pub scored: Vec<TokenLogprobs>,
    /// f32 `[number, hidden_size]` of each span of [`StepBatch::hidden`].
    pub hidden: Vec<Vec<f32>>,
    /// Rows whose blocks the KV canary found damaged: their tokens are not to be used.
    pub corrupted: Vec<Corruption>,
    pub gpu_us: u32,
    /// Time that copying between blocks and host memory took beside the GPU's own work.
    pub swap_us: u32,
    /// GPU time by kernel, where it was [asked for](Executor::set_profiling).
    pub kernels: Vec<KernelTime>,
    pub stats: StepStats,
}

/// Counters of one step, for budgets in tests and `bench latency`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepStats {
    pub submits: u32,
    pub passes: u32,
    pub dispatches: u32,
    pub readback_bytes: u32,
    /// 1 where it had been submitted before it was asked for.
    pub ahead: u32,
    /// Steps that had been, before it, and were not asked for.
    pub in_vain: u32,
}

/// A step in flight. It must be waited for before the next launch in the synchronous loop.
#[derive(Debug)]
pub struct StepHandle(pub u64);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// The device is gone; rebuild the executor and recompute.
    #[error("the GPU was lost: {0}")]
    DeviceLost(String),
    #[error("the GPU is out of memory: {0}")]
    OutOfMemory(String),
    /// The batch broke a rule, or the driver refused a command: nothing was run.
    #[error("the step was refused: {0}")]
    Rejected(String),
}

/// Why a model could not be made ready to run.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Weights(#[from] WeightError),
    #[error("the model has no tensor for {role:?}")]
    MissingWeight { role: WeightRole },
    #[error("{fault} (tensor {tensor})")]
    Unreadable { tensor: String, fault: String },
    #[error("{0}")]
    Unsupported(String),
    #[error("loading was cancelled")]
    Cancelled,
}

/// How far a load is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// What is being done, in words for a person.
    pub phase: &'static str,
    pub done: u64,
    pub total: u64,
}

/// Runs steps. Three implementations exist today.
pub trait Executor: Send {
    /// Starts a step. On an error nothing was written that a later step could read as valid.
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError>;
    /// Waits for a launched step.
    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError>;
    /// Blocks in the KV pool, the null block included.
    fn num_blocks(&self) -> u32;
    fn block_size(&self) -> u32;
    fn vocab_size(&self) -> u32;
    /// Bytes of K and V of one block over all layers of a group.
    fn kv_bytes_per_block(&self) -> u64;
    /// Bytes of everything that it holds on a GPU.
    fn gpu_bytes(&self) -> u64 {
        0
    }
    /// How far each layer group sees ([`crate::model::groups::LayerGroups`]); batches have slots and tables for each.
    fn windows(&self) -> Vec<Option<u32>> {
        vec![None]
    }
    /// True when batches are to carry chains, for the KV canary.
    fn has_canary(&self) -> bool {
        false
    }
    /// Damages a block, to show that it is noticed. Between steps only.
    fn corrupt_block(&mut self, block: u32) -> Result<(), ExecError> {
        Err(ExecError::Rejected(format!("block {block} of this executor cannot be damaged")))
    }
    /// Whether steps from now on say how long each kernel took. False where that cannot be measured.
    fn set_profiling(&mut self, _on: bool) -> bool {
        false
    }
    /// Tokens that the next step may compute, so that no dispatch of it keeps the adapter from others for long. Rises as
    /// steps are measured; no limit on a software adapter.
    fn most_tokens(&self) -> u32 {
        u32::MAX
    }
    /// Whether a window is being drawn: then the adapter is given work in smaller pieces.
    fn set_window_visible(&mut self, _is_visible: bool) {}
    /// Makes an adapter ready: from now on rows may have it. Between steps only; an adapter that is there stays.
    fn load_adapter(&mut self, adapter: &Arc<Adapter>) -> Result<(), ExecError> {
        Err(ExecError::Rejected(format!("this executor runs no adapters ({})", adapter.path.display())))
    }
    /// Gives an adapter's place free. Between steps only; no row of a later step may have it.
    fn unload_adapter(&mut self, _adapter: u64) {}
    /// Places for blocks in host memory; 0 where content cannot be swapped.
    fn num_host_blocks(&self) -> u32 {
        0
    }
    /// The content of a place in host memory: what a finished step or [`Executor::write_host`] put there. `None` where
    /// nothing was.
    fn read_host(&self, _slot: HostSlot) -> Option<&[u8]> {
        None
    }
    /// Puts the content of one block, as [`Executor::read_host`] gave it, into host memory. Between steps only.
    fn write_host(&mut self, slot: HostSlot, _bytes: &[u8]) -> Result<(), ExecError> {
        Err(ExecError::Rejected(format!("there is no host slot {slot}")))
    }
}
