//! Models on an adapter whose bindings are smaller than their tensors: embedding, head and projections are then read in
//! slices of rows. Real adapters bind 128 MiB at least, so the limit is lowered until small models pass it.

use kvasir::gpu::Gpu;
use kvasir::kernels::pack::{BLOCK_ROWS, Format};
use kvasir::model::groups::LayerGroups;
use kvasir::model::spec::WeightRole;

use super::*;
use kvasir::model::experts::ExpertPart;

/// Cases with the limit that they run under.
const CASES: [(&str, &str, u64); 9] = [
    ("tiny", "llama", 48 << 10),
    ("tiny", "qwen2_sharded", 48 << 10),
    ("tiny", "gemma2", 64 << 10),
    ("tiny", "phi3_f16", 44 << 10),
    ("tiny", "mixtral", 32 << 10),
    ("tiny", "qwen3_moe", 40 << 10),
    ("gguf", "q4_k", 48 << 10),
    ("gguf", "q8_0", 96 << 10),
    ("quant", "gptq_4bit_g32_actorder", 28 << 10),
];

/// What the case's prompts take, and no more.
fn small(case: &Case, mode: Mode) -> ExecutorConfig {
    let longest = case.prompts.iter().map(|p| p.ids.len()).max().unwrap_or(1) as u32;
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let blocks = longest.div_ceil(mode.block_size) * LayerGroups::of(model.spec()).num_groups() + 1;
    ExecutorConfig { max_tokens_per_step: 8, max_num_seqs: 1, ..config(mode, blocks, longest) }
}

const PLAN: LogitsPlan = LogitsPlan { chunk: Some(8), is_batched: false, max_tokens_per_step: 8 };

fn request(floor: bool) -> GpuRequest {
    GpuRequest { backend: None, adapter: None, floor, checked_shaders: false, matrix_units: false }
}

/// The executor on an adapter of this limit.
fn open_limited(case: &Case, mode: Mode, limit: u64) -> Option<WgpuExecutor> {
    let gpu = match Gpu::open_limited(&request(mode.floor), limit) {
        Ok(gpu) => gpu,
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    assert!(gpu.caps().max_binding_bytes <= limit);
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let executor = WgpuExecutor::new(gpu, &model, small(case, mode), &mut |_| true);
    Some(executor.unwrap_or_else(|e| panic!("{} {mode:?}: {e}", case.name)))
}

/// Bytes of a matrix's largest plane, over the experts where it has some.
fn plane_bytes(model: &Model, role: WeightRole) -> u64 {
    let Some(form) = model.weight_form(role).expect("a header") else { return 0 };
    let block = Format::of(form.dtype).block_bytes(form.shape[1] as u32);
    form.shape[0].div_ceil(u64::from(BLOCK_ROWS)) * block.q.max(block.h).max(block.s)
}

/// Embedding, head and a projection are larger than a binding.
fn check_that_it_is_cut(case: &Case, limit: u64) {
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let is_cut = |role| plane_bytes(&model, role) > limit;
    assert!(is_cut(WeightRole::TokenEmbedding), "{}: the embedding fits", case.name);
    assert!(is_cut(WeightRole::LmHead) || model.spec().tie_embeddings, "{}: the head fits", case.name);
    let gate_up = plane_bytes(&model, WeightRole::Gate(0)) + plane_bytes(&model, WeightRole::Up(0));
    let expert = plane_bytes(&model, WeightRole::Expert(0, 0, ExpertPart::Gate));
    let experts = 2 * expert * model.spec().block.experts.as_ref().map_or(0, |e| u64::from(e.num_experts));
    assert!(gate_up.max(experts) > limit, "{}: {gate_up} bytes of gate and up, {experts} of experts fit", case.name);
}

#[test]
fn tensors_larger_than_a_binding_are_read_in_slices() {
    for (kind, name, limit) in CASES {
        let Some(case) = case(&fixtures(), kind, name) else { continue };
        check_that_it_is_cut(&case, limit);
        for mode in [PRECISE_MODE, DEFAULT_MODE, Mode { floor: true, ..DEFAULT_MODE }] {
            let Some(mut executor) = open_limited(&case, mode, limit) else { return };
            let got = logits(&mut executor, &prompt_ids(&case), PLAN);
            let tolerance = if mode.precise { PRECISE } else { DEFAULT };
            for (got, prompt) in got.iter().zip(&case.prompts) {
                let error = relative_error(got, &prompt.logits);
                let is_judged = mode.precise || !case.has_experts;
                assert!(error <= tolerance || !is_judged, "{} {mode:?}: error {error:e}", case.name);
                assert!(mean_kl(got, &prompt.logits, executor.vocab_size() as usize) <= DEFAULT_KL, "{}", case.name);
            }
            let mut whole = open_limited(&case, mode, u64::MAX).expect("opened before");
            assert!(got == logits(&mut whole, &prompt_ids(&case), PLAN), "{} {mode:?}: slices changed bits", case.name);
        }
    }
}

#[test]
fn what_no_binding_can_hold_is_refused_with_its_name() {
    let Some(case) = case(&core_fixtures(), "tiny", "llama") else { return };
    let gpu = match Gpu::open_limited(&request(false), 16 << 10) {
        Ok(gpu) => gpu,
        Err(_) if !require_gpu() => return,
        Err(error) => panic!("{error}"),
    };
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let config = config(DEFAULT_MODE, 400, 256);
    let error = WgpuExecutor::new(gpu, &model, config, &mut |_| true).err().expect("it does not fit").to_string();
    assert!(error.contains("too long for this adapter's bindings") || error.contains("binds at most"), "{error}");
}
