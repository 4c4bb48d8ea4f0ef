//! How many KV blocks a model gets on this machine, and how long a context fits.
//!
//! Guarantees: what was asked for by name (`--max-model-len`, `--num-gpu-blocks-override`) is given in full or refused
//! with the figures and the smallest change that fits; what was not is chosen to fit. It does not know how much memory a
//! graphics card has left: there the driver's refusal is the limit, unless `--gpu-memory-gb` tells it.

mod advice;

use super::handle::FailureKind;
use super::loader::LoadFailure;
use super::options::EngineOptions;
use crate::executor::wgpu_executor::{self, ExecutorConfig, WeightSizes};
use crate::ids::MIN_CONTEXT;
use crate::memory::{self, FixedBytes, KvSize, MemoryConfig, MemoryPlan};
use crate::model::groups::LayerGroups;
use crate::model::spec::ModelSpec;
use crate::model::{Model, ModelError};

/// KV memory that is taken without being asked for: enough for several chats, small enough to start fast.
const DEFAULT_KV_BYTES_CPU: u64 = 512 << 20;
const DEFAULT_KV_BYTES_GPU: u64 = 2 << 30;
/// A context that a model should have room for before layers leave the GPU.
const USUAL_LEN: u32 = 2048;
/// Host memory for blocks is at most one part in so many of what is free.
const HOST_SHARE: u64 = 4;
/// The books of more places than this would cost more than they give.
const MAX_HOST_BLOCKS: u64 = 1 << 16;

/// What the plan has to fit in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The adapter computes on the CPU, in the machine's own memory.
    pub is_cpu: bool,
    /// Memory that is free now; `None` where it is not known.
    pub available_bytes: Option<u64>,
    /// Largest storage binding of the adapter: a layer's keys are bound at once.
    pub max_binding_bytes: u64,
}

/// The sizes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnginePlan {
    pub memory: MemoryPlan,
    /// Longest prompt and output together.
    pub max_model_len: u32,
    /// Places for blocks in host memory, and what they take once they are filled.
    pub num_host_blocks: u32,
    pub host_bytes: u64,
    /// Last layers whose matrices stay in host memory, and what they take there.
    pub num_streamed: u32,
    pub streamed_bytes: u64,
}

impl Machine {
    /// This machine with an adapter of this kind.
    pub fn with_adapter(is_cpu: bool, max_binding_bytes: u64) -> Machine {
        Machine { is_cpu, available_bytes: if is_cpu { available_memory() } else { None }, max_binding_bytes }
    }
}

/// Sizes pool and context, or says what does not fit, with the smallest change that does.
pub fn plan(model: &Model, options: &EngineOptions, machine: Machine) -> Result<EnginePlan, LoadFailure> {
    let spec = model.spec();
    if let Some(asked) = options.max_model_len.filter(|&len| len > spec.most_positions()) {
        let fault = format!("the model's context holds {} tokens, not {asked}", spec.most_positions());
        return Err(LoadFailure::new(FailureKind::Model, fault)
            .with_fix(format!("use --max-model-len {} or less", spec.most_positions())));
    }
    let planner = Planner { model, machine, sizes: wgpu_executor::weight_sizes(model)? };
    planner.plan(options).map_err(|failure| match failure.kind {
        FailureKind::DoesNotFit if failure.fix.is_none() => failure.with_fix(advice::of(&planner, options)),
        _ => failure,
    })
}

/// A model on a machine, to be planned for with one set of options after another.
struct Planner<'a> {
    model: &'a Model,
    machine: Machine,
    sizes: WeightSizes,
}

impl Planner<'_> {
    /// Where no context was asked for, the longest that fits.
    fn plan(&self, options: &EngineOptions) -> Result<EnginePlan, LoadFailure> {
        let longest = self.model.spec().max_position;
        let first = self.plan_for(options, options.max_model_len.unwrap_or(longest));
        let is_short = first.as_ref().map_or_else(
            |failure| failure.kind == FailureKind::DoesNotFit,
            |plan| plan.max_model_len < longest.min(USUAL_LEN),
        );
        if options.max_model_len.is_some() || !is_short {
            return first;
        }
        // What a context takes beside the pool (tables, partial results) is room that a shorter one leaves to it.
        let holds =
            |len: u64| self.plan_for(options, len as u32).is_ok_and(|plan| u64::from(plan.max_model_len) == len);
        match largest(options.block_size.into(), longest.into(), holds) {
            Some(len) => self.plan_for(options, len as u32),
            None => first,
        }
    }

    fn workspace(&self, options: &EngineOptions, len: u32) -> Result<u64, ModelError> {
        wgpu_executor::workspace_bytes(self.model, &executor_config(options, memory::MIN_BLOCKS, len))
    }

    /// A card whose memory was told is planned for like one.
    fn is_cpu(&self, options: &EngineOptions) -> bool {
        self.machine.is_cpu && options.gpu_memory_bytes.is_none()
    }

    fn limit(&self, options: &EngineOptions) -> Limit {
        let available = options.gpu_memory_bytes.or(self.machine.available_bytes);
        let share = |bytes: u64| (bytes as f64 * f64::from(options.gpu_memory_utilization)) as u64;
        Limit { available, bytes: available.map_or(u64::MAX, share) }
    }

    /// The plan for a context of `wanted_len` tokens, or for what of it the pool holds where it was not asked for.
    fn plan_for(&self, options: &EngineOptions, wanted_len: u32) -> Result<EnginePlan, LoadFailure> {
        let spec = self.model.spec();
        let workspace = self.workspace(options, wanted_len)?;
        let mut config = memory_config(options, wanted_len);
        let num_streamed = self.num_streamed(options, workspace, &config);
        let streamed_bytes = self.sizes.on_host(num_streamed);
        check_host(num_streamed, streamed_bytes)?;
        let fixed = FixedBytes { weights: self.sizes.on_gpu(num_streamed), workspace };
        let memory = self.pool(options, fixed, &mut config)?;
        let room = memory::max_context(spec, &config, memory.num_blocks);
        if options.max_model_len.is_some_and(|asked| asked > room) {
            let fault = format!("a context of {wanted_len} tokens does not fit: the KV pool holds {room} tokens");
            return Err(LoadFailure::new(FailureKind::DoesNotFit, fault));
        }
        if room < MIN_CONTEXT {
            let least = MIN_CONTEXT;
            let fault =
                format!("the KV pool has room for {room} of the {least} tokens that the shortest context takes");
            return Err(LoadFailure::new(FailureKind::DoesNotFit, fault)
                .with_fix("raise --num-gpu-blocks-override or --block-size"));
        }
        let per_block = memory.kv_bytes_per_token * u64::from(options.block_size);
        let num_host_blocks = self.num_host_blocks(options, per_block);
        let max_model_len = wanted_len.min(room);
        let workspace = self.workspace(options, max_model_len)?;
        config.kv = KvSize::Blocks(memory.num_blocks);
        Ok(EnginePlan {
            memory: memory::estimate(spec, FixedBytes { workspace, ..fixed }, &config),
            max_model_len,
            num_streamed,
            streamed_bytes,
            num_host_blocks: num_host_blocks as u32,
            host_bytes: num_host_blocks * per_block,
        })
    }

    /// Layers that stay in host memory: as many as was asked for, or as few as leave room for a usual context.
    fn num_streamed(&self, options: &EngineOptions, workspace: u64, config: &MemoryConfig) -> u32 {
        let spec = self.model.spec();
        let needed_len = options.max_model_len.unwrap_or(config.max_model_len.min(USUAL_LEN));
        match options.cpu_offload_bytes {
            Some(bytes) => self.sizes.layers_within(bytes),
            // Where both are one memory nothing is gained.
            None if self.is_cpu(options) => 0,
            None => {
                let needed_kv = match options.num_gpu_blocks_override {
                    Some(blocks) => pool_bytes(spec, config, blocks),
                    None => kv_bytes_of(spec, config, needed_len),
                };
                let left = self.limit(options).bytes.saturating_sub(workspace).saturating_sub(needed_kv);
                self.sizes.layers_over(left).unwrap_or(0)
            }
        }
    }

    /// The pool beside what is fixed, or a refusal where there is none.
    fn pool(
        &self,
        options: &EngineOptions,
        fixed: FixedBytes,
        config: &mut MemoryConfig,
    ) -> Result<MemoryPlan, LoadFailure> {
        let (spec, limit) = (self.model.spec(), self.limit(options));
        config.kv = match options.num_gpu_blocks_override {
            Some(blocks) => KvSize::Blocks(blocks),
            None => {
                let taken = fixed.weights.saturating_add(fixed.workspace);
                let default_kv = if self.is_cpu(options) { DEFAULT_KV_BYTES_CPU } else { DEFAULT_KV_BYTES_GPU };
                // A context that was asked for by name has to fit, whatever is usual.
                let asked_kv = options.max_model_len.map_or(0, |len| kv_bytes_of(spec, config, len));
                KvSize::Budget { total_bytes: taken.saturating_add(default_kv.max(asked_kv)).min(limit.bytes) }
            }
        };
        let mut memory = memory::estimate(spec, fixed, config);
        if options.num_gpu_blocks_override.is_none() {
            let most = most_blocks(spec, options, self.machine.max_binding_bytes);
            config.kv = KvSize::Blocks(memory.num_blocks.min(most));
            memory = memory::estimate(spec, fixed, config);
        }
        if memory.total_bytes > limit.bytes { Err(too_large(&memory, limit)) } else { Ok(memory) }
    }

    /// Host memory is taken as blocks come to it; on a small machine not more than a share of what is free.
    fn num_host_blocks(&self, options: &EngineOptions, per_block: u64) -> u64 {
        let host = if self.is_cpu(options) { self.machine.available_bytes } else { None };
        let free = host.or_else(available_memory).map_or(u64::MAX, |bytes| bytes / HOST_SHARE);
        // What slid out of a window is not kept anywhere, so a windowed model's blocks do not go to host memory.
        let swap_space_bytes = if has_windows(self.model.spec()) { 0 } else { options.swap_space_bytes };
        (swap_space_bytes.min(free) / per_block).min(MAX_HOST_BLOCKS)
    }
}

/// What a plan may take.
#[derive(Clone, Copy)]
struct Limit {
    bytes: u64,
    /// Of which it is a share.
    available: Option<u64>,
}

fn memory_config(options: &EngineOptions, max_model_len: u32) -> MemoryConfig {
    MemoryConfig {
        kv: KvSize::Blocks(memory::MIN_BLOCKS),
        block_size: options.block_size,
        max_tokens_per_step: options.max_num_batched_tokens.max(options.max_num_seqs),
        max_num_seqs: options.max_num_seqs,
        max_model_len,
        kv_token: options.kv_token_bytes(),
    }
}

/// The largest number in `least..=most` that passes, where all below one that passes do so too.
fn largest(least: u64, most: u64, passes: impl Fn(u64) -> bool) -> Option<u64> {
    if least > most || !passes(least) {
        return None;
    }
    let (mut good, mut end) = (least, most + 1);
    while end - good > 1 {
        let middle = good + (end - good) / 2;
        if passes(middle) { good = middle } else { end = middle }
    }
    Some(good)
}

/// Whether layers of the model read a sliding window alone: their blocks stay on the GPU and are not shared in part.
pub(super) fn has_windows(spec: &ModelSpec) -> bool {
    LayerGroups::of(spec).windows != [None]
}

/// Host memory has to hold what stays there.
fn check_host(num_layers: u32, bytes: u64) -> Result<(), LoadFailure> {
    let Some(free) = available_memory().filter(|free| bytes > *free) else { return Ok(()) };
    let fault = format!("{num_layers} layers in host memory take {} MiB, {} MiB are free", mib(bytes), mib(free));
    Err(LoadFailure::new(FailureKind::DoesNotFit, fault))
}

/// Blocks of which a layer's keys can be bound at once.
fn most_blocks(spec: &ModelSpec, options: &EngineOptions, max_binding_bytes: u64) -> u32 {
    let layout = wgpu_executor::kv_layout(spec, &executor_config(options, memory::MIN_BLOCKS, 1));
    u32::try_from(max_binding_bytes / layout.block_bytes().max(1)).unwrap_or(u32::MAX).max(memory::MIN_BLOCKS)
}

/// The pool that one full context needs, the null block included.
fn kv_bytes_of(spec: &ModelSpec, config: &MemoryConfig, len: u32) -> u64 {
    pool_bytes(spec, config, memory::blocks_of(spec, config, len).saturating_add(1))
}

fn pool_bytes(spec: &ModelSpec, config: &MemoryConfig, blocks: u32) -> u64 {
    let pool = MemoryConfig { kv: KvSize::Blocks(blocks), ..*config };
    memory::estimate(spec, FixedBytes { weights: 0, workspace: 0 }, &pool).kv_bytes
}

fn too_large(plan: &MemoryPlan, limit: Limit) -> LoadFailure {
    let message = format!(
        "the model needs {} MiB ({} weights, {} KV, {} workspace), and may take {} of {} MiB of memory",
        mib(plan.total_bytes),
        mib(plan.weights_bytes),
        mib(plan.kv_bytes),
        mib(plan.workspace_bytes),
        limit.bytes >> 20,
        mib(limit.available.unwrap_or(limit.bytes))
    );
    LoadFailure::new(FailureKind::DoesNotFit, message)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// What the executor is built with.
pub fn executor_config(options: &EngineOptions, num_blocks: u32, max_model_len: u32) -> ExecutorConfig {
    ExecutorConfig {
        num_blocks,
        block_size: options.block_size,
        max_tokens_per_step: options.max_num_batched_tokens.max(options.max_num_seqs),
        max_num_seqs: options.max_num_seqs,
        max_model_len,
        precise: options.precise,
        kv: options.kv_format(),
        canary: options.kv_canary,
        lora: options.lora.limits(),
    }
}

/// Memory that programs may take without swapping; `None` where the system does not say.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::options::FakeOptions;

    fn tiny() -> Model {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        Model::open(&root.join("tests/data/fixtures/tiny/llama")).expect("a fixture")
    }

    fn options(len: Option<u32>, blocks: Option<u32>) -> EngineOptions {
        let options = crate::engine::fake::engine_options(&FakeOptions::small());
        EngineOptions { max_model_len: len, num_gpu_blocks_override: blocks, ..options }
    }

    fn on_cpu(available_mib: u64) -> Machine {
        Machine { is_cpu: true, available_bytes: Some(available_mib << 20), max_binding_bytes: 128 << 20 }
    }

    #[test]
    fn a_small_model_gets_room_for_every_row() {
        let plan = plan(&tiny(), &options(None, None), on_cpu(1000)).unwrap();
        // 8 rows of the whole context of 512 tokens, and the null block.
        assert_eq!((plan.max_model_len, plan.memory.num_blocks), (512, 8 * 512 / 16 + 1));
    }

    #[test]
    fn what_was_asked_for_is_given_or_refused() {
        let model = tiny();
        let given = plan(&model, &options(Some(100), Some(50)), on_cpu(1000)).unwrap();
        assert_eq!((given.max_model_len, given.memory.num_blocks), (100, 50));
        let refused = |len, blocks, mib| plan(&model, &options(len, blocks), on_cpu(mib)).unwrap_err();
        assert_eq!(refused(Some(513), None, 1000).kind, FailureKind::Model);
        assert_eq!(refused(None, Some(1 << 24), 1000).kind, FailureKind::DoesNotFit);
        assert_eq!(refused(Some(500), Some(10), 1000).kind, FailureKind::DoesNotFit);
        // The block beside the null block has one token.
        let one_token = EngineOptions { block_size: 1, ..options(None, Some(2)) };
        let failure = plan(&model, &one_token, on_cpu(1000)).unwrap_err();
        assert!(
            failure.kind == FailureKind::DoesNotFit && failure.message.contains("room for 1 of the 2 tokens"),
            "{failure:?}"
        );
        let full = refused(None, None, 1);
        assert!(full.kind == FailureKind::DoesNotFit && full.message.contains("weights"), "{full:?}");
    }

    #[test]
    fn host_memory_is_what_was_asked_for_within_a_share_of_what_is_free() {
        let model = tiny();
        let with = |bytes, mib| {
            let options = EngineOptions { swap_space_bytes: bytes, ..options(None, None) };
            plan(&model, &options, on_cpu(mib)).unwrap()
        };
        assert_eq!((with(0, 1000).num_host_blocks, with(0, 1000).host_bytes), (0, 0));
        let given = with(1 << 20, 1000);
        let per_block = given.memory.kv_bytes_per_token * 16;
        assert_eq!(u64::from(given.num_host_blocks), (1 << 20) / per_block);
        assert!(with(1 << 40, 100).host_bytes <= 25 << 20);
    }

    #[test]
    fn the_pool_of_a_layer_fits_a_binding() {
        let machine = Machine { max_binding_bytes: 64 << 10, ..on_cpu(1000) };
        let small = plan(&tiny(), &options(None, None), machine).unwrap();
        // A block of keys has 16 tokens, 2 heads of 16 dims, f16.
        assert_eq!(small.memory.num_blocks, (64 << 10) / (16 * 2 * 16 * 2));
    }

    #[test]
    fn layers_stay_in_host_memory_when_asked_or_as_the_last_resort() {
        let model = tiny();
        let with = |offload: Option<u64>, gpu_kib: u64| {
            let gpu_memory_bytes = Some(gpu_kib << 10);
            let options = EngineOptions {
                gpu_memory_bytes,
                cpu_offload_bytes: offload,
                gpu_memory_utilization: 1.0,
                ..options(None, None)
            };
            plan(&model, &options, on_cpu(1000))
        };
        let roomy = with(None, 1 << 20).unwrap();
        assert_eq!((roomy.num_streamed, roomy.streamed_bytes), (0, 0));
        let sizes = wgpu_executor::weight_sizes(&model).unwrap();
        let asked = with(Some(sizes.on_host(1)), 1 << 20).unwrap();
        assert_eq!((asked.num_streamed, asked.streamed_bytes), (1, sizes.on_host(1)));
        // Half a layer less than it takes whole with its context of 512 tokens and the null block: with all three away, two
        // still take turns on the GPU.
        let fixed = roomy.memory.total_bytes - roomy.memory.kv_bytes;
        let tight_kib = (fixed + 33 * 16 * roomy.memory.kv_bytes_per_token - sizes.on_host(1) / 2) >> 10;
        let tight = with(None, tight_kib).unwrap();
        assert_eq!(tight.num_streamed, 3);
        assert!(tight.memory.total_bytes <= tight_kib << 10, "{tight:?}");
        assert_eq!(with(Some(0), tight_kib).unwrap().num_streamed, 0, "a shorter context is all that is left");
        // Its tables and partial results leave what they do not take to the pool.
        let short = with(Some(0), fixed >> 10).unwrap();
        assert!(short.max_model_len < 512 && short.memory.total_bytes <= fixed, "{short:?}");
        assert_eq!(with(Some(0), fixed >> 11).unwrap_err().kind, FailureKind::DoesNotFit);
    }

    #[test]
    fn a_small_pool_shortens_the_context() {
        let plan = plan(&tiny(), &options(None, Some(11)), on_cpu(1000)).unwrap();
        assert_eq!(plan.max_model_len, 160);
    }
}
