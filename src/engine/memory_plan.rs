//! How many KV blocks a model gets on this machine, and how long a context fits.
//!
//! Guarantees: what was asked for by name (`--max-model-len`, `--num-gpu-blocks-override`) is given in full or refused
//! with the figures; what was not is chosen to fit. It does not know how much memory a graphics card has left: there the
//! driver's refusal is the limit.

use super::handle::FailureKind;
use super::loader::LoadFailure;
use super::options::EngineOptions;
use crate::executor::wgpu_executor::{self, ExecutorConfig};
use crate::memory::{self, FixedBytes, KvSize, MemoryConfig};
use crate::model::Model;
use crate::model::groups::LayerGroups;
use crate::model::spec::ModelSpec;

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
    pub memory: memory::MemoryPlan,
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

/// Sizes pool and context, or says what does not fit.
pub fn plan(model: &Model, options: &EngineOptions, machine: Machine) -> Result<EnginePlan, LoadFailure> {
    let spec = model.spec();
    if let Some(asked) = options.max_model_len.filter(|&len| len > spec.max_position) {
        let fault = format!("the model's context holds {} tokens, not {asked}", spec.max_position);
        return Err(LoadFailure::new(FailureKind::Model, fault)
            .with_fix(format!("use --max-model-len {} or less", spec.max_position)));
    }
    let wanted_len = options.max_model_len.unwrap_or(spec.max_position);
    let sizes = wgpu_executor::weight_sizes(model)?;
    let workspace_for = |len| wgpu_executor::workspace_bytes(model, &executor_config(options, memory::MIN_BLOCKS, len));
    let workspace = workspace_for(wanted_len)?;
    // A card whose memory was told is planned for like one.
    let is_cpu = machine.is_cpu && options.gpu_memory_bytes.is_none();
    let available_bytes = options.gpu_memory_bytes.or(machine.available_bytes);
    let limit = available_bytes
        .map(|bytes| (bytes as f64 * f64::from(options.gpu_memory_utilization)) as u64)
        .unwrap_or(u64::MAX);
    let mut config = MemoryConfig {
        kv: KvSize::Blocks(memory::MIN_BLOCKS),
        block_size: options.block_size,
        max_tokens_per_step: options.max_num_batched_tokens.max(options.max_num_seqs),
        max_num_seqs: options.max_num_seqs,
        max_model_len: wanted_len,
        kv_token: options.kv_token_bytes(),
    };
    let least = memory::estimate(spec, FixedBytes { weights: sizes.total(), workspace }, &config);
    let needed_len = options.max_model_len.unwrap_or(wanted_len.min(USUAL_LEN));
    let needed_kv = kv_bytes_of(memory::blocks_of(spec, &config, needed_len), &least);
    let num_streamed = match options.cpu_offload_bytes {
        Some(bytes) => sizes.layers_within(bytes),
        // Where both are one memory nothing is gained.
        None if is_cpu => 0,
        None => sizes.layers_over(limit.saturating_sub(workspace).saturating_sub(needed_kv)).unwrap_or(0),
    };
    let streamed_bytes = sizes.on_host(num_streamed);
    check_host(num_streamed, streamed_bytes, is_cpu)?;
    let fixed = FixedBytes { weights: sizes.on_gpu(num_streamed), workspace };
    config.kv = match options.num_gpu_blocks_override {
        Some(blocks) => KvSize::Blocks(blocks),
        None => {
            let fixed = fixed.weights.saturating_add(fixed.workspace);
            let default_kv = if is_cpu { DEFAULT_KV_BYTES_CPU } else { DEFAULT_KV_BYTES_GPU };
            // A context that was asked for by name has to fit, whatever is usual.
            let asked_kv =
                options.max_model_len.map_or(0, |len| kv_bytes_of(memory::blocks_of(spec, &config, len), &least));
            KvSize::Budget { total_bytes: fixed.saturating_add(default_kv.max(asked_kv)).min(limit) }
        }
    };
    let mut memory = memory::estimate(spec, fixed, &config);
    if options.num_gpu_blocks_override.is_none() {
        config.kv = KvSize::Blocks(memory.num_blocks.min(most_blocks(spec, options, machine.max_binding_bytes)));
        memory = memory::estimate(spec, fixed, &config);
    }
    if memory.total_bytes > limit {
        return Err(too_large(&memory, available_bytes.unwrap_or(limit)));
    }
    let room = memory::max_context(spec, &config, memory.num_blocks);
    if options.max_model_len.is_some_and(|asked| asked > room) {
        let fault = format!("a context of {wanted_len} tokens does not fit: the KV pool holds {room} tokens");
        let fix = match options.num_gpu_blocks_override {
            Some(_) => {
                let needed = memory::blocks_of(spec, &config, wanted_len) + 1;
                format!("use --num-gpu-blocks-override {needed} or more, or --max-model-len {room} or less")
            }
            None => format!("use --max-model-len {room} or less, or free memory"),
        };
        return Err(LoadFailure::new(FailureKind::DoesNotFit, fault).with_fix(fix));
    }
    let per_block = memory.kv_bytes_per_token * u64::from(options.block_size);
    // It is taken as blocks come to it; on a small machine not more than a share of what is free.
    let host = if is_cpu { machine.available_bytes } else { None };
    let free = host.or_else(available_memory).map_or(u64::MAX, |bytes| bytes / HOST_SHARE);
    // What slid out of a window is not kept anywhere, so a windowed model's blocks do not go to host memory.
    let swap_space_bytes = if has_windows(spec) { 0 } else { options.swap_space_bytes };
    let num_host_blocks = (swap_space_bytes.min(free) / per_block).min(MAX_HOST_BLOCKS);
    let max_model_len = wanted_len.min(room);
    config.kv = KvSize::Blocks(memory.num_blocks);
    Ok(EnginePlan {
        memory: memory::estimate(spec, FixedBytes { workspace: workspace_for(max_model_len)?, ..fixed }, &config),
        max_model_len,
        num_streamed,
        streamed_bytes,
        num_host_blocks: num_host_blocks as u32,
        host_bytes: num_host_blocks * per_block,
    })
}

/// Whether layers of the model read a sliding window alone: their blocks stay on the GPU and are not shared in part.
pub(super) fn has_windows(spec: &ModelSpec) -> bool {
    LayerGroups::of(spec).windows != [None]
}

/// Host memory has to hold what stays there.
fn check_host(num_layers: u32, bytes: u64, is_cpu: bool) -> Result<(), LoadFailure> {
    let Some(free) = available_memory().filter(|free| bytes > *free) else { return Ok(()) };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let fault = format!("{num_layers} layers in host memory take {} MiB, {} MiB are free", mib(bytes), mib(free));
    let fix = if is_cpu { "leave --cpu-offload-gb out" } else { "lower --cpu-offload-gb, or choose a smaller model" };
    Err(LoadFailure::new(FailureKind::DoesNotFit, fault).with_fix(fix))
}

/// Blocks of which a layer's keys can be bound at once.
fn most_blocks(spec: &ModelSpec, options: &EngineOptions, max_binding_bytes: u64) -> u32 {
    let layout = wgpu_executor::kv_layout(spec, &executor_config(options, memory::MIN_BLOCKS, 1));
    u32::try_from(max_binding_bytes / layout.block_bytes().max(1)).unwrap_or(u32::MAX).max(memory::MIN_BLOCKS)
}

/// The pool that one full context needs, the null block included.
fn kv_bytes_of(blocks: u32, plan: &memory::MemoryPlan) -> u64 {
    (u64::from(blocks) + 1).saturating_mul(plan.kv_bytes / u64::from(plan.num_blocks))
}

fn too_large(plan: &memory::MemoryPlan, available: u64) -> LoadFailure {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let message = format!(
        "the model needs {} MiB ({} weights, {} KV, {} workspace), {} MiB are free",
        mib(plan.total_bytes),
        mib(plan.weights_bytes),
        mib(plan.kv_bytes),
        mib(plan.workspace_bytes),
        mib(available)
    );
    LoadFailure::new(FailureKind::DoesNotFit, message).with_fix(
        "lower --max-model-len, --max-num-seqs or --num-gpu-blocks-override, close other programs, or choose a smaller or \
         more strongly quantised model",
    )
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
        assert_eq!(with(Some(0), fixed >> 10).unwrap_err().kind, FailureKind::DoesNotFit);
    }

    #[test]
    fn a_small_pool_shortens_the_context() {
        let plan = plan(&tiny(), &options(None, Some(11)), on_cpu(1000)).unwrap();
        assert_eq!(plan.max_model_len, 160);
    }
}
