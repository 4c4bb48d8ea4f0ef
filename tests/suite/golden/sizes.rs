//! What `estimate` says from headers against what the executor allocates. [`super::open`] checks it for each model and
//! mode that a golden test opens.

use super::*;
use kvasir::executor::wgpu_executor;
use kvasir::memory::{self, FixedBytes, KvSize, KvTokenBytes, MemoryConfig};
use kvasir::model::spec::MlpKind;

/// Largest difference, in percent.
const TOLERANCE: f64 = 3.0;

pub fn check(path: &Path, model: &Model, cfg: &ExecutorConfig, executor: &WgpuExecutor) {
    let weights = wgpu_executor::weights_bytes(model).unwrap_or_else(|e| panic!("{e}"));
    let workspace = wgpu_executor::workspace_bytes(model, cfg).unwrap_or_else(|e| panic!("{e}"));
    let config = MemoryConfig {
        kv: KvSize::Blocks(cfg.num_blocks),
        block_size: cfg.block_size,
        max_tokens_per_step: cfg.max_tokens_per_step,
        max_num_seqs: cfg.max_num_seqs,
        max_model_len: cfg.max_model_len,
        kv_token: KvTokenBytes { per_element: cfg.kv.value_bytes(), per_head: cfg.kv.scale_bytes(), per_token: 0 },
    };
    let plan = memory::estimate(model.spec(), FixedBytes { weights, workspace }, &config);
    let others = executor.allocated_bytes() - executor.weights_bytes() - plan.kv_bytes;
    let pairs = [
        ("weights", plan.weights_bytes, executor.weights_bytes()),
        ("workspace", workspace, others),
        ("all", plan.total_bytes, executor.allocated_bytes()),
    ];
    for (what, estimated, allocated) in pairs {
        // Headers do not tell whether the adapter's products keep gate and up to themselves.
        let fused = if what == "workspace" && !cfg.precise { gate_up_bytes(model, cfg) } else { 0 };
        let percent = |estimated: u64| 100.0 * (estimated as f64 / allocated as f64 - 1.0);
        let error = percent(estimated);
        let line = format!("{}: {what}: {estimated} estimated, {allocated} allocated: {error:.2} %", path.display());
        assert!(error >= -TOLERANCE && percent(estimated - fused) <= TOLERANCE, "{line}");
    }
}

/// Of a step's largest batch, where the MLP is dense.
fn gate_up_bytes(model: &Model, cfg: &ExecutorConfig) -> u64 {
    let spec = model.spec();
    let is_gated = spec.block.mlp == MlpKind::Gated && spec.block.experts.is_none();
    let row = 2 * u64::from(kvasir::kernels::stride(spec.intermediate_size)) * 4;
    if is_gated { row * u64::from(cfg.max_tokens_per_step) } else { 0 }
}

#[test]
fn an_estimate_from_headers_is_what_the_executor_allocates() {
    for name in ["llama", "mixtral"] {
        let Some(case) = case(&fixtures(), "tiny", name) else { continue };
        // A step so large that activations are most of it.
        let cfg = |mode: Mode| ExecutorConfig { max_tokens_per_step: 4096, max_num_seqs: 64, ..config(mode, 64, 512) };
        for mode in [DEFAULT_MODE, PRECISE_MODE, INT8_MODE] {
            if open_with(&case.model, mode.floor, cfg(mode)).is_none() {
                return;
            }
        }
    }
}
