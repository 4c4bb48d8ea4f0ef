//! LoRA adapters on the GPU.

use super::*;
use crate::support::require_gpu;
use kvasir::executor::wgpu_executor::{self, ExecutorConfig, KvFormat, LoraLimits, WgpuExecutor};
use kvasir::executor::{ExecError, StepStats};
use kvasir::gpu::{Gpu, GpuError, GpuRequest};

/// max |difference| / max |logit|, as the golden tests have it.
const PRECISE: f32 = 5e-5;
const DEFAULT: f32 = 4e-2;

#[derive(Clone, Copy, Debug)]
struct Mode {
    precise: bool,
    floor: bool,
}

const PRECISE_MODE: Mode = Mode { precise: true, floor: false };
const DEFAULT_MODE: Mode = Mode { precise: false, floor: false };
const MODES: [Mode; 4] =
    [PRECISE_MODE, DEFAULT_MODE, Mode { floor: true, ..PRECISE_MODE }, Mode { floor: true, ..DEFAULT_MODE }];

const LIMITS: LoraLimits = LoraLimits { max_adapters: 2, max_rank: 10 };

fn config(mode: Mode, lora: LoraLimits) -> ExecutorConfig {
    ExecutorConfig {
        num_blocks: 40,
        block_size: 16,
        max_tokens_per_step: 64,
        max_num_seqs: 8,
        max_model_len: 128,
        precise: mode.precise,
        kv: if mode.precise { KvFormat::F32 } else { KvFormat::F16 },
        canary: false,
        lora,
    }
}

/// `None` (with a line printed) where there is no adapter.
fn open_gpu(model: &Model, mode: Mode, lora: LoraLimits) -> Option<WgpuExecutor> {
    open_streamed(model, mode, lora, 0)
}

/// The same with the last layers in host memory.
fn open_streamed(model: &Model, mode: Mode, lora: LoraLimits, num_streamed: u32) -> Option<WgpuExecutor> {
    let request =
        GpuRequest { backend: None, adapter: None, floor: mode.floor, checked_shaders: false, matrix_units: false };
    match Gpu::open(&request) {
        Ok(gpu) => Some(
            WgpuExecutor::with_streamed(gpu, model, config(mode, lora), num_streamed, &mut |_| true)
                .unwrap_or_else(|e| panic!("{mode:?}: {e}")),
        ),
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The tiny llama of the GGUF fixtures, whose default mode has all fused products, with two adapters.
fn quantised() -> (Model, [Arc<Adapter>; 2]) {
    let model = open(&core_fixtures().join("gguf/q4_1"));
    let folder = tempfile::tempdir().expect("a folder");
    let shapes = hf_shapes(&model);
    let recipes = [Recipe::new(11, 10, &ALL), Recipe::new(12, 3, &["v_proj", "up_proj"])];
    let adapters = recipes.map(|recipe| {
        let path = write_adapter(&folder.path().join(recipe.seed.to_string()), &recipe, &shapes);
        Arc::new(Adapter::open(&path, &model).unwrap_or_else(|e| panic!("{e}")))
    });
    (model, adapters)
}

#[test]
fn the_gpu_computes_adapters_as_the_reference_does() {
    for case in cases() {
        let mut reference = reference(&case.model);
        reference.load_adapter(&case.adapter).expect("there is room");
        let want = logits(&mut reference, case.adapter.id);
        let merged = logits(&mut super::reference(&open(&case.merged)), 0);
        for (mode, tolerance) in [(PRECISE_MODE, PRECISE), (DEFAULT_MODE, DEFAULT)] {
            let Some(mut executor) = open_gpu(&case.model, mode, LIMITS) else { return };
            executor.load_adapter(&case.adapter).unwrap_or_else(|e| panic!("{e}"));
            let got = logits(&mut executor, case.adapter.id);
            let errors = [relative_error(&got, &want), relative_error(&got, &merged)];
            println!("{} {mode:?}: {errors:?}", case.base.display());
            assert!(errors.iter().all(|e| *e <= tolerance), "{} {mode:?}: {errors:?}", case.base.display());
        }
    }
}

#[test]
fn fused_products_compute_adapters_as_the_reference_does() {
    let (model, adapters) = quantised();
    let mut reference = reference(&model);
    let plain = logits(&mut reference, 0);
    for mode in MODES {
        let Some(mut executor) = open_gpu(&model, mode, LIMITS) else { return };
        for adapter in &adapters {
            executor.load_adapter(adapter).unwrap_or_else(|e| panic!("{e}"));
            reference.load_adapter(adapter).expect("there is room");
            let (got, want) = (logits(&mut executor, adapter.id), logits(&mut reference, adapter.id));
            let (error, change) = (relative_error(&got, &want), relative_error(&want, &plain));
            println!("{mode:?} rank {}: error {error:.1e}, change {change:.1e}", adapter.rank);
            assert!(error <= if mode.precise { PRECISE } else { DEFAULT }, "{mode:?}: {error:e}");
            assert!(change > 0.1, "the adapter changes {change:e} only");
        }
    }
}

/// Logits of three prompts with these adapters, in one batch or one after the other.
fn three(executor: &mut dyn Executor, adapters: [u64; 3], is_batched: bool, chunk: Option<u32>) -> [Vec<u32>; 3] {
    let prompt = |from: u32, len: u32| (0..len).map(|i| 3 + (from + i * 17) % 200).collect::<Vec<u32>>();
    let prompts = [prompt(1, 19), prompt(5, 11), prompt(9, 6)];
    let plan = LogitsPlan { chunk, is_batched, max_tokens_per_step: 64 };
    let mut all: [Vec<u32>; 3] = Default::default();
    let on_rows = &mut |prompt: usize, _: usize, rows: &[f32]| all[prompt].extend(rows.iter().map(|v| v.to_bits()));
    adapted_logits(executor, &prompts, &adapters, plan, on_rows).unwrap_or_else(|e| panic!("{e}"));
    all
}

#[test]
fn rows_have_the_bits_that_they_have_alone_whoever_has_an_adapter() {
    let (model, [a, b]) = quantised();
    for mode in MODES {
        let (Some(mut executor), Some(mut bare)) =
            (open_gpu(&model, mode, LIMITS), open_gpu(&model, mode, LoraLimits::NONE))
        else {
            return;
        };
        for adapter in [&a, &b] {
            executor.load_adapter(adapter).unwrap_or_else(|e| panic!("{e}"));
        }
        let plain = three(&mut bare, [0; 3], false, None);
        assert!(three(&mut executor, [0; 3], true, None) == plain, "{mode:?}: room for adapters changed bits");
        let with_a = three(&mut executor, [a.id; 3], false, None);
        let with_b = three(&mut executor, [b.id; 3], false, None);
        for (ids, chunk) in [
            ([a.id, 0, b.id], None),
            ([b.id, a.id, 0], Some(3)),
            ([0, b.id, a.id], Some(1)),
            ([a.id, a.id, 0], Some(5)),
        ] {
            let got = three(&mut executor, ids, true, chunk);
            for (row, (got, id)) in got.iter().zip(ids).enumerate() {
                let want = if id == a.id {
                    &with_a
                } else if id == b.id {
                    &with_b
                } else {
                    &plain
                };
                assert!(*got == want[row], "{mode:?} {ids:x?} {chunk:?}: row {row} has other bits");
            }
        }
    }
}

#[test]
fn layers_in_host_memory_give_adapters_the_same_bits() {
    let (model, [a, b]) = quantised();
    let num_layers = model.spec().num_layers;
    for mode in MODES {
        let (Some(mut whole), Some(mut streamed)) =
            (open_gpu(&model, mode, LIMITS), open_streamed(&model, mode, LIMITS, num_layers))
        else {
            return;
        };
        assert!(streamed.streamed_bytes() > 0, "{mode:?}: no layer is streamed");
        for executor in [&mut whole, &mut streamed] {
            for adapter in [&a, &b] {
                executor.load_adapter(adapter).unwrap_or_else(|e| panic!("{e}"));
            }
        }
        let adapters = [a.id, 0, b.id];
        let want = three(&mut whole, adapters, true, Some(3));
        assert!(three(&mut streamed, adapters, true, Some(3)) == want, "{mode:?}: other bits");
    }
}

/// The counters of a step with one row.
fn step(executor: &mut dyn Executor, adapter: u64) -> StepStats {
    let mut batch = kvasir::batch::StepBatch::default();
    batch.begin(1, 16);
    batch.push_row(kvasir::batch::BatchRow {
        slot: kvasir::ids::SeqSlot(0),
        first_position: 0,
        write_from: 0,
        tokens: &[5],
        blocks: &[kvasir::ids::BlockId(1)],
        logits: kvasir::batch::RowLogits::All,
    });
    batch.set_adapter(adapter);
    let handle = executor.launch(&batch).unwrap_or_else(|e| panic!("{e}"));
    executor.wait(handle).unwrap_or_else(|e| panic!("{e}")).stats
}

#[test]
fn a_step_without_adapters_costs_nothing_and_one_with_them_two_dispatches_for_each_site() {
    let (model, [a, b]) = quantised();
    let (Some(mut executor), Some(mut bare)) =
        (open_gpu(&model, DEFAULT_MODE, LIMITS), open_gpu(&model, DEFAULT_MODE, LoraLimits::NONE))
    else {
        return;
    };
    for adapter in [&a, &b] {
        executor.load_adapter(adapter).unwrap_or_else(|e| panic!("{e}"));
    }
    let (plain, layers) = (step(&mut bare, 0).dispatches, model.spec().num_layers);
    assert_eq!(step(&mut executor, 0).dispatches, plain);
    assert_eq!(step(&mut executor, a.id).dispatches, plain + layers * 8);
    // Q, K and V; gate and up.
    assert_eq!(step(&mut executor, b.id).dispatches, plain + layers * 4);
}

#[test]
fn adapters_find_room_or_are_refused_with_the_limit() {
    let (model, [a, b]) = quantised();
    let rejected = |result: Result<(), ExecError>, words: &str| match result {
        Err(ExecError::Rejected(text)) => assert!(text.contains(words), "{text}"),
        other => panic!("{other:?}"),
    };
    let Some(mut executor) = open_gpu(&model, DEFAULT_MODE, LoraLimits::NONE) else { return };
    rejected(executor.load_adapter(&a), "--max-loras");
    let one = LoraLimits { max_adapters: 1, max_rank: 10 };
    let mut executor = open_gpu(&model, DEFAULT_MODE, one).expect("opened before");
    executor.load_adapter(&b).expect("there is room");
    executor.load_adapter(&b).expect("it is there");
    rejected(executor.load_adapter(&a), "room for 1 adapters");
    let want = logits(&mut executor, b.id);
    executor.unload_adapter(b.id);
    executor.load_adapter(&a).expect("there is room again");
    assert_ne!(logits(&mut executor, a.id), want);
    executor.unload_adapter(a.id);
    executor.load_adapter(&b).expect("there is room again");
    assert_eq!(logits(&mut executor, b.id), want, "what was there before leaves no trace");
    let mut executor = open_gpu(&model, DEFAULT_MODE, LoraLimits { max_rank: 8, ..one }).expect("opened before");
    rejected(executor.load_adapter(&a), "the adapter's rank is 10, --max-lora-rank is 8");
}

#[test]
fn room_for_adapters_is_what_the_estimate_says() {
    let (model, _) = quantised();
    for mode in [DEFAULT_MODE, PRECISE_MODE] {
        let Some(bare) = open_gpu(&model, mode, LoraLimits::NONE) else { return };
        let limits = LoraLimits { max_adapters: 5, max_rank: 64 };
        let executor = open_gpu(&model, mode, limits).expect("opened before");
        let bytes =
            |limits| wgpu_executor::workspace_bytes(&model, &config(mode, limits)).unwrap_or_else(|e| panic!("{e}"));
        let estimated = bytes(limits) - bytes(LoraLimits::NONE);
        // Rows of gate and up are kept by the kernels of adapters; parameters come in pages.
        let size = kvasir::kernels::stride(model.spec().intermediate_size);
        let kept = if mode.precise { 0 } else { 64 * 2 * 4 * u64::from(size) };
        let allocated = executor.allocated_bytes() - bare.allocated_bytes() - kept;
        let percent = 100.0 * (estimated as f64 / allocated as f64 - 1.0);
        assert!(percent.abs() <= 3.0, "{estimated} estimated, {allocated} allocated: {percent:.2} %");
    }
}
