//! Layers that are kept in host memory: the same bits, and on the GPU what was foretold.

use super::*;
use kvasir::executor::wgpu_executor::weight_sizes;

/// Dense and fused, quantised (read as texels on software adapters), experts, latents, and types that differ by layer.
const CASES: [(&str, &str); 5] = [
    ("tiny", "llama"),
    ("gguf", "q4_k"),
    ("tiny", "mistral_swa"),
    ("families", "qwen2_moe"),
    ("families", "deepseek_v3"),
];

fn open_streamed(case: &Case, mode: Mode, num_streamed: u32) -> Option<WgpuExecutor> {
    let request =
        GpuRequest { backend: None, adapter: None, floor: mode.floor, checked_shaders: false, matrix_units: false };
    let gpu = match Gpu::open(&request) {
        Ok(gpu) => gpu,
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let config = config(mode, 50, 256);
    let executor = WgpuExecutor::with_streamed(gpu, &model, config, num_streamed, &mut |_| true);
    Some(executor.unwrap_or_else(|e| panic!("{}: {e}", case.name)))
}

/// What stays on the GPU and what does not, within 3 %.
fn check_sizes(case: &Case, executor: &WgpuExecutor, num_streamed: u32) {
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let sizes = weight_sizes(&model).unwrap_or_else(|e| panic!("{e}"));
    let pairs = [
        ("GPU", sizes.on_gpu(num_streamed), executor.weights_bytes()),
        ("host", sizes.on_host(num_streamed), executor.streamed_bytes()),
    ];
    for (what, estimated, taken) in pairs {
        let error = (estimated as f64 - taken as f64).abs() / (taken as f64).max(1.0);
        let line = format!("{}: {num_streamed} layers, {what}: {estimated} estimated, {taken} taken", case.name);
        assert!(error <= 0.03 || estimated == taken, "{line}");
    }
}

#[test]
fn layers_in_host_memory_change_no_bit() {
    for (kind, name) in CASES {
        let Some(case) = case(&core_fixtures(), kind, name) else { continue };
        let num_layers = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}")).spec().num_layers;
        for mode in [DEFAULT_MODE, Mode { floor: true, ..PRECISE_MODE }] {
            let prompts = prompt_ids(&case);
            let plan = LogitsPlan { chunk: Some(40), is_batched: true, ..WHOLE };
            let Some(mut whole) = open_streamed(&case, mode, 0) else { return };
            let want = logits(&mut whole, &prompts, plan);
            drop(whole);
            for num_streamed in [1, num_layers] {
                let mut executor = open_streamed(&case, mode, num_streamed).expect("opened before");
                check_sizes(&case, &executor, num_streamed);
                let got = logits(&mut executor, &prompts, plan);
                assert!(got == want, "{} {mode:?}: {num_streamed} layers in host memory changed bits", case.name);
                // Again, with the slots full of the last layers.
                assert!(logits(&mut executor, &prompts, plan) == want, "{} {mode:?}: the second time", case.name);
            }
        }
    }
}
