//! The model on the GPU.
//!
//! Guarantees: a step is one submit with one compute pass, after one metadata write; only token ids (and log-probabilities
//! or logits that were asked for) come back; a row's bits do not depend on the rest of the batch. Steps that want more
//! logits than the logits buffer holds run their head in several submits, and a layer whose matrices come from host memory is
//! a submit of its own. Where it is asked to, a step is submitted while the one before it runs ([`ahead`]).

mod activation;
mod ahead;
mod ffn;
mod folding;
mod forward;
mod hidden;
mod kv_buffers;
mod latents;
mod loras;
mod product;
mod results;
mod rope_tables;
mod scores;
mod shapes;
mod sizes;
mod swap;
mod tuning;
mod weights;
pub mod work_caps;

use std::sync::Arc;
use std::time::Instant;

use super::{ExecError, Executor, LoadError, LoadProgress, StepHandle, StepOutput};
use crate::batch::{StepBatch, Want};
use crate::gpu::{Buffer, BufferUse, Gpu, GpuError, InFlight, Recording, Replayer};
use crate::ids::HostSlot;
use crate::kernels::Choices;
use crate::kernels::attention_work::{AttentionWork, Take, WorkLimits};
use crate::kernels::canary::Canary;
use crate::kernels::feed::Feed;
use crate::kernels::lora_work::LoraWork;
use crate::kernels::matmul::token_counts;
use crate::kernels::sample::Sampled;
use crate::kernels::{logprobs, step_meta};
use crate::model::Model;
use crate::model::groups::LayerGroups;
use crate::model::lora::Adapter;
use crate::model::spec::{ModelSpec, RopePairing};
use ahead::{Ahead, Taken};
use forward::Forward;
use loras::LoraSlots;
use shapes::StepShape;
use swap::{Outgoing, Swapper};
use weights::ModelWeights;
use work_caps::WorkCaps;

pub use crate::kernels::canary::MARK_BYTES as CANARY_BYTES;
pub use crate::kernels::kv_layout::KvFormat;
pub use ahead::StepsAhead;
pub use loras::LoraLimits;
pub use shapes::kv_layout;
pub use sizes::{WeightSizes, weight_sizes, weights_bytes, workspace_bytes};
pub use tuning::{TuneMode, Tuning};
pub use weights::Progress;

/// Sizes of everything that is allocated at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// Blocks of the KV pool, the null block included.
    pub num_blocks: u32,
    /// A power of two.
    pub block_size: u32,
    pub max_tokens_per_step: u32,
    pub max_num_seqs: u32,
    /// Longest sequence; bounds the rope table.
    pub max_model_len: u32,
    /// f32 activations instead of i8: the reference mode.
    pub precise: bool,
    /// What keys and values are stored as.
    pub kv: KvFormat,
    /// Marks every slot of the pool with what was written to it, and checks the marks before reading.
    pub canary: bool,
    /// How many LoRA adapters can be loaded.
    pub lora: LoraLimits,
}

/// Runs steps on a GPU.
pub struct WgpuExecutor {
    gpu: Gpu,
    spec: ModelSpec,
    cfg: ExecutorConfig,
    groups: LayerGroups,
    /// Held for the buffers that the bound kernels use.
    weights: ModelWeights,
    weights_bytes: u64,
    forward: Forward,
    replayer: Replayer,
    meta: Buffer,
    meta_words: Vec<u32>,
    work: AttentionWork,
    work_limits: WorkLimits,
    loras: LoraSlots,
    lora_work: LoraWork,
    recording: Recording,
    swapper: Swapper,
    canary: Option<Canary>,
    in_flight: Option<Pending>,
    feed: Feed,
    ahead: Ahead,
    /// Of a graphics card, which others wait for, too.
    caps: Option<WorkCaps>,
}

/// A launched step.
struct Pending {
    step: u64,
    batch: StepBatch,
    /// The error of a step that failed after it had written pages.
    launched: Result<Launched, GpuError>,
    started: Instant,
    /// Logit rows of the first submit.
    num_logits: u32,
    /// Which logit row of what runs each of the batch is, where it was submitted ahead and is not known to be the same.
    rows: Option<Vec<u32>>,
}

/// What a submit runs.
#[derive(Clone, Copy, Debug)]
enum Part<'a> {
    /// All of a step.
    Whole,
    /// All of a step but the transfers, which were done before it.
    WithoutSwaps,
    /// A further round of logit rows over the same hidden states.
    Head,
    /// A step whose tokens these logit rows of the one before it draw. [num_tokens]
    Fed(&'a [u32]),
}

/// What runs, for learning from the time that it takes.
#[derive(Clone, Copy, Debug)]
struct Load {
    num_tokens: u32,
    /// Of the work, what its largest dispatch does.
    largest_part: f64,
}

/// A submit, and what becomes of content that leaves the pool with it.
struct Launched {
    in_flight: InFlight,
    load: Load,
    /// Read back by this submit, after all else.
    outgoing: Option<Outgoing>,
    /// Read back by submits before it.
    kept: Vec<(Outgoing, Vec<u8>)>,
}

impl WgpuExecutor {
    /// Uploads the weights, compiles and warms up the kernels. `progress` may cancel by returning `false`.
    pub fn new(
        gpu: Gpu,
        model: &Model,
        cfg: ExecutorConfig,
        progress: Progress<'_>,
    ) -> Result<WgpuExecutor, LoadError> {
        WgpuExecutor::with_streamed(gpu, model, cfg, 0, progress)
    }

    /// As [`WgpuExecutor::new`]; the matrices of the last `num_streamed` layers stay in host memory and take turns with
    /// the room of two on the GPU. No bit of a result depends on it.
    pub fn with_streamed(
        gpu: Gpu,
        model: &Model,
        cfg: ExecutorConfig,
        num_streamed: u32,
        progress: Progress<'_>,
    ) -> Result<WgpuExecutor, LoadError> {
        WgpuExecutor::with_choices(gpu, model, cfg, num_streamed, Choices::default(), progress)
    }

    /// As [`WgpuExecutor::with_streamed`], with products computed in the ways that `choices` says. No bit of a result
    /// depends on it.
    pub fn with_choices(
        gpu: Gpu,
        model: &Model,
        cfg: ExecutorConfig,
        num_streamed: u32,
        choices: Choices,
        progress: Progress<'_>,
    ) -> Result<WgpuExecutor, LoadError> {
        if !cfg.block_size.is_power_of_two() {
            return Err(LoadError::Unsupported(format!("a block size of {} is no power of two", cfg.block_size)));
        }
        let spec = model.spec().clone();
        let is_half = spec.rope.pairing == RopePairing::Half && spec.block.latent.is_none();
        if is_half && !spec.rope.rotary_dim.is_multiple_of(4) {
            let fault = format!("a rotary dimension of {} is no multiple of 4", spec.rope.rotary_dim);
            return Err(LoadError::Unsupported(fault));
        }
        let before = gpu.allocated_bytes();
        let weights = weights::upload(&gpu, model, cfg.precise, num_streamed, progress)?;
        let weights_bytes = gpu.allocated_bytes() - before;
        let groups = LayerGroups::of(&spec);
        if cfg.canary && groups.windows != [None] {
            return Err(LoadError::Unsupported("the KV canary does not know layers that see a window only".into()));
        }
        let slots = shapes::attention_slots(&spec, &cfg, gpu.caps().max_binding_bytes);
        let words = shapes::meta_words(&spec, &cfg, u64::from(groups.num_groups()), slots);
        let meta = gpu.alloc("step metadata", words * 4, BufferUse::Storage)?;
        let loras = LoraSlots::alloc(&gpu, &spec, cfg.lora, cfg.max_tokens_per_step)?;
        let forward = Forward::new(&gpu, (&spec, &groups), &cfg, (&weights, &loras), &meta, (choices, None))?;
        let feed = Feed::new(&gpu, &meta.whole(), &forward.sampled.whole())?;
        let compiling = &mut |done, total| progress(LoadProgress { phase: "Compiling kernels", done, total });
        if !gpu.finish_compiling(compiling)? || !progress(LoadProgress { phase: "Warming up", done: 0, total: 1 }) {
            return Err(LoadError::Cancelled);
        }
        let replayer = Replayer::new(&gpu);
        let canary = match &forward.kv.marks {
            Some(marks) => Some(Canary::new(&gpu, &meta.whole(), &marks.whole(), cfg.max_num_seqs)?),
            None => None,
        };
        let mut executor = WgpuExecutor {
            replayer,
            feed,
            ahead: Ahead::default(),
            meta,
            meta_words: Vec::new(),
            work: AttentionWork::default(),
            work_limits: shapes::work_limits(&gpu, &spec, &cfg, forward.attention_cut),
            loras,
            lora_work: LoraWork::default(),
            recording: Recording::new("step"),
            canary,
            in_flight: None,
            caps: (!gpu.caps().is_cpu).then(WorkCaps::default),
            gpu,
            spec,
            cfg,
            groups,
            swapper: Swapper::new(&forward.kv, 0),
            weights,
            weights_bytes,
            forward,
        };
        executor.set_preparing(!executor.gpu.caps().is_cpu);
        executor.warm_up()?;
        executor.gpu.save_pipelines();
        Ok(executor)
    }

    /// With so many places for blocks in host memory, allocated as they are filled.
    pub fn with_host_blocks(mut self, num_host_blocks: u32) -> WgpuExecutor {
        self.swapper = Swapper::new(&self.forward.kv, num_host_blocks);
        self
    }

    /// The adapter that runs it.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Bytes of packed weights on the GPU.
    pub fn weights_bytes(&self) -> u64 {
        self.weights_bytes
    }

    /// Bytes of packed weights in host memory.
    pub fn streamed_bytes(&self) -> u64 {
        self.weights.layers.iter().filter_map(|layer| layer.streamed.as_ref()).map(|content| content.num_bytes()).sum()
    }

    /// Bytes of everything that the executor holds on the GPU.
    pub fn allocated_bytes(&self) -> u64 {
        self.gpu.allocated_bytes()
    }

    /// Whether long rows are split over workgroups, and whether rows on one prefix read it together. No bit of a result
    /// depends on it; the start is [`Take::WhenItPays`] for both.
    pub fn set_attention(&mut self, split: Take, share: Take) {
        self.work_limits = WorkLimits { split, share, ..self.work_limits };
    }

    /// Whether a step that is expected is encoded while the one before it runs. It is from the start on a graphics card; a
    /// software adapter would lose the core that encodes. No bit of a result depends on it.
    pub fn set_preparing(&mut self, on: bool) {
        self.replayer.set_preparing(on);
    }

    /// Limits on what the adapter is given at once; a graphics card has them from the start, a software adapter has none.
    /// No bit of a result depends on it.
    pub fn set_work_caps(&mut self, caps: Option<WorkCaps>) {
        self.caps = caps;
    }

    /// Steps so far that were encoded before they were launched.
    pub fn num_prepared(&self) -> u64 {
        self.replayer.num_prepared()
    }

    /// A block's bytes as they lie on the GPU, plane after plane: for tests and tools, not for the step loop.
    pub fn read_block(&self, block: u32) -> Result<Vec<u8>, GpuError> {
        let mut bytes = Vec::with_capacity(self.forward.kv.block_bytes() as usize);
        for plane in self.forward.kv.planes() {
            bytes.extend(self.gpu.read(&plane.block(block))?);
        }
        Ok(bytes)
    }

    fn warm_up(&mut self) -> Result<(), GpuError> {
        const HEADER: usize = 4 * step_meta::HEADER_WORDS;
        self.gpu.write(&self.meta.slice(0, HEADER as u64), &[0; HEADER]);
        self.recording.clear();
        self.feed.record(&mut self.recording, 1);
        self.forward.record_warm_up(&mut self.recording, &token_counts(&self.gpu));
        let in_flight = self.replayer.submit(&self.gpu, &self.recording, &[])?;
        self.replayer.wait(&self.gpu, in_flight)?;
        Ok(())
    }

    /// Plans the batch's attention once the batch is known to be sound, and checks the sizes of both.
    fn check(&mut self, batch: &StepBatch) -> Result<(), ExecError> {
        batch.check(self.cfg.num_blocks, self.spec.vocab_size).map_err(ExecError::Rejected)?;
        batch.check_transfers(self.cfg.num_blocks, self.num_host_blocks()).map_err(ExecError::Rejected)?;
        self.work.plan(batch, &self.work_limits);
        let loras = &self.loras;
        let missing = |id| ExecError::Rejected(format!("adapter {id:016x} is not loaded"));
        self.lora_work.plan(batch, |id| loras.place(id)).map_err(missing)?;
        // A word more for each token, should all be fed.
        let words = step_meta::num_words(batch, &self.work) + self.lora_work.num_words() + batch.num_tokens();
        let limits = [
            ("tokens", batch.num_tokens(), self.cfg.max_tokens_per_step as usize),
            ("metadata words", words, (self.meta.size() / 4) as usize),
        ];
        if let Some((what, n, limit)) = limits.iter().find(|(_, n, limit)| n > limit) {
            return Err(ExecError::Rejected(format!("{n} {what} in a step, the limit is {limit}")));
        }
        if batch.want == Want::Ids && batch.num_logits() > self.forward.max_logits as usize {
            let (n, limit) = (batch.num_logits(), self.forward.max_logits);
            return Err(ExecError::Rejected(format!("{n} rows to sample in a step, the limit is {limit}")));
        }
        if batch.num_groups() != self.groups.windows.len() {
            let (n, groups) = (batch.num_groups(), self.groups.windows.len());
            return Err(ExecError::Rejected(format!("tables of {n} layer groups, the model has {groups}")));
        }
        if batch.block_size != self.cfg.block_size {
            return Err(ExecError::Rejected(format!("block size {}, not {}", batch.block_size, self.cfg.block_size)));
        }
        Ok(())
    }

    /// Writes the metadata and submits.
    fn submit(&mut self, batch: &StepBatch, part: Part<'_>) -> Result<(InFlight, Load, Option<Outgoing>), GpuError> {
        step_meta::encode(batch, &self.work, &mut self.meta_words);
        self.lora_work.append(&mut self.meta_words);
        if let Part::Fed(sources) = part {
            step_meta::append_feed(&mut self.meta_words, sources);
        }
        let (head_only, swaps) = (matches!(part, Part::Head), matches!(part, Part::Whole));
        let bytes = bytemuck::cast_slice(&self.meta_words);
        self.gpu.write(&self.meta.slice(0, bytes.len() as u64), bytes);
        let shape = StepShape {
            num_tokens: batch.num_tokens() as u32,
            num_logits: batch.num_logits() as u32,
            attention: self.work.counts,
            has_penalties: !batch.penalties.is_empty() || !batch.biases.is_empty(),
            has_masks: !batch.masks.is_empty(),
            has_logprobs: batch.sampling.iter().any(|s| s.logprobs.is_some()),
            has_hidden: !batch.hidden.is_empty(),
            lora: self.lora_work.shape(),
        };
        let samples = batch.want == Want::Ids;
        self.recording.clear();
        let mut outgoing = None;
        if swaps && !batch.swap_out.is_empty() {
            outgoing = Some(self.swapper.record_out(&self.gpu, &mut self.recording, &batch.swap_out)?);
        }
        if swaps && !batch.swap_in.is_empty() {
            self.swapper.record_in(&self.gpu, &mut self.recording, &batch.swap_in)?;
        }
        if !head_only {
            self.forward.record_copies(&mut self.recording, &batch.copies);
        }
        let mut marks = None;
        if let Some(canary) = self.canary.as_ref().filter(|_| !head_only && !batch.chains.is_empty()) {
            marks = Some(canary.record(&mut self.recording, batch));
        }
        if shape.num_tokens == 0 {
            // Nothing but content to be moved.
        } else if head_only {
            self.forward.record_head(&mut self.recording, shape, samples);
        } else {
            // Where it feeds nothing as well, so that steps are alike and can be encoded before they are known.
            if self.ahead.is_on() {
                self.feed.record(&mut self.recording, shape.num_tokens);
            }
            self.forward.record(&mut self.recording, shape, samples);
        }
        let rows = u64::from(shape.num_logits);
        let mut readback = Vec::new();
        if rows > 0 && samples {
            readback.push(self.forward.sampled.slice(0, rows * size_of::<Sampled>() as u64));
            if shape.has_logprobs {
                readback.push(self.forward.row_logprobs.slice(0, rows * logprobs::ROW_BYTES));
            }
        } else if rows > 0 {
            readback.push(self.forward.logits.slice(0, rows * u64::from(self.forward.logits_stride) * 4));
        }
        if !head_only {
            readback.extend(batch.hidden.iter().map(|span| self.forward.hidden.span(*span)));
        }
        readback.extend(marks);
        let outgoing = outgoing.map(|(outgoing, slice)| {
            readback.push(slice);
            outgoing
        });
        let parts = match &self.caps {
            Some(caps) => caps.num_submits(shape.num_tokens, self.recording.num_dispatches()),
            None => 1,
        };
        let weights = if self.caps.is_some() { self.recording.weights() } else { Vec::new() };
        let ends = if parts > 1 { work_caps::cut(&weights, parts) } else { Vec::new() };
        let (largest, all) = (weights.iter().max().copied().unwrap_or(0), weights.iter().sum::<u64>().max(1));
        let load = Load { num_tokens: shape.num_tokens, largest_part: largest as f64 / all as f64 };
        Ok((self.replayer.submit_in(&self.gpu, &self.recording, &readback, &ends)?, load, outgoing))
    }

    /// Everything of a step that is launched. The error says whether pages were written before it.
    fn submit_all(&mut self, batch: &StepBatch) -> Result<Launched, (GpuError, bool)> {
        let most = batch.swap_out.len().max(batch.swap_in.len());
        let in_rounds = most > self.swapper.blocks_per_round();
        let mut kept = Vec::new();
        if in_rounds {
            let gpu = (&self.gpu, &mut self.replayer);
            kept = swap::in_rounds(&mut self.swapper, gpu, &batch.swap_out, &batch.swap_in)?;
        }
        let part = if in_rounds { Part::WithoutSwaps } else { Part::Whole };
        let submitted = if batch.num_logits() > self.forward.max_logits as usize {
            let round = self.round(batch, 0);
            self.submit(&round, part)
        } else {
            self.submit(batch, part)
        };
        let (in_flight, load, outgoing) =
            submitted.map_err(|error| (error, in_rounds || self.replayer.ran_partly()))?;
        Ok(Launched { in_flight, load, outgoing, kept })
    }
}

impl Executor for WgpuExecutor {
    fn launch(&mut self, batch: &StepBatch) -> Result<StepHandle, ExecError> {
        self.check(batch)?;
        let (launched, started, rows) = match self.ahead.take(batch) {
            Some(Taken { in_flight, load, started, rows }) => {
                (Ok(Launched { in_flight, load, outgoing: None, kept: Vec::new() }), started, Some(rows))
            }
            None => {
                let started = Instant::now();
                match self.submit_all(batch) {
                    Ok(launched) => (Ok(launched), started, None),
                    // Pages were written: the step counts as launched, and fails when it is waited for.
                    Err((error, true)) => (Err(error), started, None),
                    Err((error, false)) => return Err(exec_error(error)),
                }
            }
        };
        let num_logits = (batch.num_logits() as u32).min(self.forward.max_logits);
        let step = batch.step;
        self.in_flight = Some(Pending { step, batch: batch.clone(), launched, started, num_logits, rows });
        self.go_ahead();
        Ok(StepHandle(step))
    }

    fn wait(&mut self, handle: StepHandle) -> Result<StepOutput, ExecError> {
        match self.in_flight.take() {
            Some(pending) if pending.step == handle.0 => self.finish(pending).map_err(exec_error),
            _ => Err(ExecError::Rejected(format!("step {} is not in flight", handle.0))),
        }
    }

    fn num_blocks(&self) -> u32 {
        self.cfg.num_blocks
    }

    fn block_size(&self) -> u32 {
        self.cfg.block_size
    }

    fn vocab_size(&self) -> u32 {
        self.spec.vocab_size
    }

    fn has_canary(&self) -> bool {
        self.canary.is_some()
    }

    fn set_profiling(&mut self, on: bool) -> bool {
        self.replayer.set_profiling(on)
    }

    fn most_tokens(&self) -> u32 {
        self.caps.as_ref().map_or(u32::MAX, WorkCaps::most_tokens)
    }

    fn set_window_visible(&mut self, is_visible: bool) {
        self.caps.iter_mut().for_each(|caps| caps.set_window_visible(is_visible));
    }

    fn corrupt_block(&mut self, block: u32) -> Result<(), ExecError> {
        if block >= self.cfg.num_blocks {
            return Err(ExecError::Rejected(format!("there is no block {block}")));
        }
        for plane in self.forward.kv.planes() {
            let slice = plane.block(block);
            let mut bytes = self.gpu.read(&slice).map_err(exec_error)?;
            // Small changes that leave floats finite: the canary is to notice, not the sampler.
            bytes.iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
            self.gpu.write(&slice, &bytes);
        }
        Ok(())
    }

    fn kv_bytes_per_block(&self) -> u64 {
        self.forward.kv.block_bytes()
    }

    fn load_adapter(&mut self, adapter: &Arc<Adapter>) -> Result<(), ExecError> {
        if self.loras.is_empty() {
            let fault = "no room was made for adapters when the model was loaded (--max-loras)";
            return Err(ExecError::Rejected(fault.into()));
        }
        self.loras.load(&self.gpu, &self.spec, adapter)
    }

    fn unload_adapter(&mut self, adapter: u64) {
        self.loras.unload(adapter);
    }

    fn gpu_bytes(&self) -> u64 {
        self.allocated_bytes()
    }

    fn windows(&self) -> Vec<Option<u32>> {
        self.groups.windows.clone()
    }

    fn num_host_blocks(&self) -> u32 {
        self.swapper.store().num_slots()
    }

    fn read_host(&self, slot: HostSlot) -> Option<&[u8]> {
        self.swapper.store().get(slot)
    }

    fn write_host(&mut self, slot: HostSlot, bytes: &[u8]) -> Result<(), ExecError> {
        self.swapper.put(slot, bytes)
    }
}

fn exec_error(error: GpuError) -> ExecError {
    match error {
        GpuError::Lost(reason) => ExecError::DeviceLost(reason),
        GpuError::OutOfMemory { .. } => ExecError::OutOfMemory(error.to_string()),
        other => ExecError::Rejected(other.to_string()),
    }
}
