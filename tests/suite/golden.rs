//! Logits and greedy continuations against references that transformers made. See the fixtures' README for tolerances.

mod forks;
mod forms;
mod limits;
mod long;
mod odd;
mod offload;
mod sizes;
mod table;
mod tuned;
mod units;

use std::path::{Path, PathBuf};

use kvasir::engine::logits::{LogitsPlan, all_logits};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::executor::wgpu_executor::{ExecutorConfig, KvFormat, LoraLimits, WgpuExecutor};
use kvasir::gpu::{Gpu, GpuError, GpuRequest};
use kvasir::kernels::attention_work::Take;
use kvasir::model::Model;
use safetensors::SafeTensors;
use table::Column;

use crate::support::{core_fixtures, default_model, files_with_extension, fixtures, folders, require_gpu};

/// max |difference| / max |logit| in the reference mode: far above the noise of reordering (6e-6), below the effect of
/// a wrong GELU (1.3e-4).
const PRECISE: f32 = 5e-5;
/// The same with f16 KV and i8 activations, and the mean KL divergence in nats.
const DEFAULT: f32 = 4e-2;
const DEFAULT_KL: f64 = 2e-3;
/// The same with int8 KV.
const INT8: f32 = 6e-2;
const INT8_KL: f64 = 4e-3;

/// Folders under `tiny/` of the families that load.
const FAMILIES: [&str; 16] = [
    "llama",
    "llama_tied_llama3rope",
    "llama_yarn",
    "llama_linear_bias",
    "mistral_swa",
    "qwen2_sharded",
    "qwen3_bf16",
    "gemma2",
    "gemma3_text",
    "phi3_f16",
    "gpt2",
    "gpt_neox",
    "stablelm",
    "starcoder2",
    "mixtral",
    "qwen3_moe",
];
/// Folders under `gguf/` of the types that load on the GPU.
const TYPES: [&str; 13] =
    ["bf16", "f16", "iq4_nl", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"];

/// Folders under `quant/`.
const QUANTISED: [&str; 6] =
    ["awq_4bit_g32", "ct_w4a16_g32", "ct_w8a16_channel", "gptq_4bit_g32", "gptq_4bit_g32_actorder", "gptq_8bit_g32"];

/// A model with its reference.
struct Case {
    name: String,
    model: PathBuf,
    has_experts: bool,
    prompts: Vec<Prompt>,
}

struct Prompt {
    ids: Vec<u32>,
    logits: Vec<f32>, // [ids, vocab]
    greedy: Vec<u32>,
    margin: Vec<f32>,
}

/// How an executor is opened.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mode {
    precise: bool,
    floor: bool,
    block_size: u32,
    kv: KvFormat,
}

const PRECISE_MODE: Mode = Mode { precise: true, floor: false, block_size: 16, kv: KvFormat::F32 };
const DEFAULT_MODE: Mode = Mode { precise: false, floor: false, block_size: 16, kv: KvFormat::F16 };
const INT8_MODE: Mode = Mode { kv: KvFormat::I8, ..DEFAULT_MODE };
const WHOLE: LogitsPlan = LogitsPlan { chunk: None, is_batched: false, max_tokens_per_step: 256 };

fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<u8> {
    file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
}

fn ids(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let values: Vec<i64> = bytemuck::pod_collect_to_vec(&tensor(file, name));
    values.iter().map(|&v| v as u32).collect()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&tensor(file, name))
}

/// The case in a folder; `None` where the core fixtures do not have it.
fn case(root: &Path, kind: &str, name: &str) -> Option<Case> {
    let folder = root.join(kind).join(name);
    if !folder.is_dir() {
        println!("skipped: {kind}/{name} is in the full fixture set only");
        return None;
    }
    let model = match files_with_extension(&folder, "gguf").pop() {
        Some(file) => file,
        None => folder.clone(),
    };
    let bytes = std::fs::read(folder.join("reference.safetensors")).expect("a reference");
    let file = SafeTensors::deserialize(&bytes).expect("a reference");
    let prompts = ["long", "one", "short"]
        .iter()
        .map(|p| Prompt {
            ids: ids(&file, &format!("{p}.input_ids")),
            logits: floats(&file, &format!("{p}.logits")),
            greedy: ids(&file, &format!("{p}.greedy_ids")),
            margin: floats(&file, &format!("{p}.greedy_margin")),
        })
        .collect();
    let has_experts = Model::open(&model).unwrap_or_else(|e| panic!("{e}")).spec().block.experts.is_some();
    Some(Case { name: format!("{kind}/{name}"), model, has_experts, prompts })
}

fn cases() -> Vec<Case> {
    let root = fixtures();
    let tiny = FAMILIES.iter().filter_map(|name| case(&root, "tiny", name));
    let gguf = TYPES.iter().filter_map(|name| case(&root, "gguf", name));
    let families = family_folders().into_iter().filter_map(|name| case(&core_fixtures(), "families", &name));
    let quant = QUANTISED.iter().filter_map(|name| case(&root, "quant", name));
    tiny.chain(gguf).chain(families).chain(quant).collect()
}

/// Names of the small checkpoints that only the core fixtures have.
fn family_folders() -> Vec<String> {
    let found = folders(&core_fixtures().join("families"));
    found.iter().map(|f| f.file_name().expect("a folder has a name").to_string_lossy().into_owned()).collect()
}

/// An executor for this model, or `None` (with a line printed) where there is no adapter.
fn open(path: &Path, mode: Mode, num_blocks: u32, max_model_len: u32) -> Option<WgpuExecutor> {
    open_with(path, mode.floor, config(mode, num_blocks, max_model_len))
}

fn config(mode: Mode, num_blocks: u32, max_model_len: u32) -> ExecutorConfig {
    ExecutorConfig {
        num_blocks,
        block_size: mode.block_size,
        max_tokens_per_step: 256,
        max_num_seqs: 8,
        max_model_len,
        precise: mode.precise,
        kv: mode.kv,
        canary: false,
        lora: LoraLimits::NONE,
    }
}

/// As [`open`]; what it allocates must be what the headers foretell.
fn open_with(path: &Path, floor: bool, cfg: ExecutorConfig) -> Option<WgpuExecutor> {
    let gpu = match Gpu::open(&GpuRequest {
        backend: None,
        adapter: None,
        floor,
        checked_shaders: false,
        matrix_units: false,
    }) {
        Ok(gpu) => gpu,
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let model = Model::open(path).unwrap_or_else(|e| panic!("{e}"));
    let executor =
        WgpuExecutor::new(gpu, &model, cfg, &mut |_| true).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    sizes::check(path, &model, &cfg, &executor);
    Some(executor)
}

fn open_case(case: &Case, mode: Mode) -> Option<WgpuExecutor> {
    open(&case.model, mode, 400 / mode.block_size * 2, 256)
}

/// Logits of each prompt, `[ids, vocab]`.
fn logits(executor: &mut dyn Executor, prompts: &[Vec<u32>], plan: LogitsPlan) -> Vec<Vec<f32>> {
    let mut all = vec![Vec::new(); prompts.len()];
    all_logits(executor, prompts, plan, &mut |prompt, _, rows| all[prompt].extend_from_slice(rows)).expect("steps run");
    all
}

fn prompt_ids(case: &Case) -> Vec<Vec<u32>> {
    case.prompts.iter().map(|p| p.ids.clone()).collect()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// max |difference| / max |want|.
fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().all(|v| v.is_finite()), "a logit is not finite");
    let worst = got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    worst / largest(want)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
    row.iter().map(|&v| f64::from(v - max) - sum.ln()).collect()
}

/// Mean over positions of KL(want || got), in nats.
fn mean_kl(got: &[f32], want: &[f32], vocab: usize) -> f64 {
    let kl = kl_of_rows(got, want, vocab);
    kl.iter().sum::<f64>() / kl.len() as f64
}

fn median_kl(got: &[f32], want: &[f32], vocab: usize) -> f64 {
    let mut kl = kl_of_rows(got, want, vocab);
    kl.sort_unstable_by(f64::total_cmp);
    kl[kl.len() / 2]
}

fn kl_of_rows(got: &[f32], want: &[f32], vocab: usize) -> Vec<f64> {
    let rows = want.chunks_exact(vocab).zip(got.chunks_exact(vocab));
    let kl = rows.map(|(want, got)| {
        let (p, q) = (log_softmax(want), log_softmax(got));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
    });
    kl.collect()
}

fn argmax(row: &[f32]) -> u32 {
    row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best }) as u32
}

/// Checks logits against the reference; gives the worst error and the mean KL. Of experts over an int8 cache it is the
/// median: a token that takes another expert in a model this small is far off, most others must be close.
fn check_logits(case: &Case, mode: Mode, tolerance: f32) -> Option<(f32, f64)> {
    let mut executor = open_case(case, mode)?;
    let vocab = executor.vocab_size() as usize;
    let got = logits(&mut executor, &prompt_ids(case), WHOLE);
    let mut worst = (0.0f32, 0.0f64);
    for (got, prompt) in got.iter().zip(&case.prompts) {
        let error = relative_error(got, &prompt.logits);
        // A token near the border between two experts may change them by any rounding: by the mean then.
        let is_judged = mode.precise || !case.has_experts;
        assert!(error <= tolerance || !is_judged, "{} {mode:?}: error {error:e}", case.name);
        let kl = if case.has_experts && mode.kv == INT8_MODE.kv { median_kl } else { mean_kl };
        worst = (worst.0.max(error), worst.1.max(kl(got, &prompt.logits, vocab)));
    }
    Some(worst)
}

#[test]
fn precise_logits_equal_the_reference() {
    for case in cases() {
        let Some((error, _)) = check_logits(&case, PRECISE_MODE, PRECISE) else { return };
        println!("{}: {error:.1e}", case.name);
        table::check(&case, Column::Precise, f64::from(error));
    }
}

#[test]
fn default_logits_are_close_to_the_reference() {
    for case in cases() {
        let Some((error, kl)) = check_logits(&case, DEFAULT_MODE, DEFAULT) else { return };
        println!("{}: {error:.1e}, mean KL {kl:.1e}", case.name);
        table::check(&case, Column::Default, f64::from(error));
        table::check(&case, Column::DefaultKl, kl);
        assert!(kl <= DEFAULT_KL, "{}: mean KL {kl:e}", case.name);
    }
}

#[test]
fn logits_over_an_int8_cache_are_close_to_the_reference() {
    for case in cases() {
        let Some((error, kl)) = check_logits(&case, INT8_MODE, INT8) else { return };
        println!("{}: {error:.1e}, mean KL {kl:.1e}", case.name);
        assert!(kl <= INT8_KL, "{}: mean KL {kl:e}", case.name);
    }
}

#[test]
fn an_adapter_without_optional_features_computes_the_same_model() {
    let root = core_fixtures();
    for case in [case(&root, "tiny", "qwen3_bf16"), case(&root, "gguf", "q4_k")].into_iter().flatten() {
        let Some(_) = check_logits(&case, Mode { floor: true, ..PRECISE_MODE }, PRECISE) else { return };
        check_logits(&case, Mode { floor: true, ..DEFAULT_MODE }, DEFAULT);
        check_logits(&case, Mode { floor: true, ..INT8_MODE }, INT8);
    }
}

#[test]
fn greedy_continuations_follow_the_reference_where_its_margin_allows() {
    for case in cases() {
        let Some(mut executor) = open_case(&case, PRECISE_MODE) else { return };
        let vocab = executor.vocab_size() as usize;
        for prompt in &case.prompts {
            let mut tokens = prompt.ids.clone();
            tokens.extend_from_slice(&prompt.greedy[..prompt.greedy.len() - 1]);
            let got = logits(&mut executor, std::slice::from_ref(&tokens), WHOLE).remove(0);
            let tolerance = 2.0 * PRECISE * largest(&prompt.logits);
            for (i, (&want, &margin)) in prompt.greedy.iter().zip(&prompt.margin).enumerate() {
                let row = &got[(prompt.ids.len() - 1 + i) * vocab..][..vocab];
                assert!(argmax(row) == want || margin < tolerance, "{}: step {i}, margin {margin}", case.name);
            }
        }
    }
}

#[test]
fn logits_are_the_same_bits_however_the_work_is_cut() {
    let root = core_fixtures();
    let families =
        [("families", "gpt_oss"), ("families", "qwen2_moe"), ("families", "olmo2"), ("families", "deepseek_v3")];
    let names = [("tiny", "llama"), ("tiny", "mistral_swa"), ("gguf", "q4_1"), ("gguf", "q6_k")];
    let names = names.into_iter().chain(families);
    for case in names.filter_map(|(kind, name)| case(&root, kind, name)) {
        for mode in [DEFAULT_MODE, PRECISE_MODE, INT8_MODE] {
            let Some(mut executor) = open_case(&case, mode) else { return };
            let prompts = prompt_ids(&case);
            let want = logits(&mut executor, &prompts, WHOLE);
            let plans = [
                LogitsPlan { chunk: Some(1), ..WHOLE },
                LogitsPlan { chunk: Some(7), ..WHOLE },
                LogitsPlan { is_batched: true, ..WHOLE },
                LogitsPlan { chunk: Some(5), is_batched: true, ..WHOLE },
            ];
            for plan in plans {
                let got = logits(&mut executor, &prompts, plan);
                assert!(got == want, "{} {mode:?} {plan:?} changed bits", case.name);
            }
            executor.set_attention(Take::Always, Take::Always);
            let got = logits(&mut executor, &prompts, LogitsPlan { chunk: Some(7), is_batched: true, ..WHOLE });
            assert!(got == want, "{} {mode:?}: attention in pieces changed bits", case.name);
            for block_size in [8, 32] {
                let mut executor = open_case(&case, Mode { block_size, ..mode }).expect("opened before");
                let got = logits(&mut executor, &prompts, LogitsPlan { is_batched: true, ..WHOLE });
                assert!(got == want, "{} {mode:?}: block size {block_size} changed bits", case.name);
            }
        }
    }
}

#[test]
fn a_block_can_be_read_whole_and_the_null_block_stays_empty() {
    let Some(case) = case(&core_fixtures(), "tiny", "llama") else { return };
    let Some(mut executor) = open_case(&case, DEFAULT_MODE) else { return };
    let read = |executor: &WgpuExecutor, block| executor.read_block(block).expect("the device works");
    assert_eq!(read(&executor, 1).len() as u64, executor.kv_bytes_per_block());
    logits(&mut executor, &prompt_ids(&case)[..1], WHOLE);
    let used = (1..executor.num_blocks()).filter(|&b| read(&executor, b).iter().any(|byte| *byte != 0)).count();
    assert_eq!(used, case.prompts[0].ids.len().div_ceil(DEFAULT_MODE.block_size as usize));
    assert!(read(&executor, 0).iter().all(|byte| *byte == 0));
}

#[test]
fn the_reference_executor_agrees_with_transformers() {
    for case in cases() {
        let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
        let mut executor = ReferenceExecutor::new(&model, ReferenceConfig { num_blocks: 64, block_size: 4 })
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let short: Vec<Vec<u32>> = case.prompts.iter().skip(1).map(|p| p.ids.clone()).collect();
        let got = logits(&mut executor, &short, LogitsPlan { chunk: Some(5), ..WHOLE });
        for (got, prompt) in got.iter().zip(&case.prompts[1..]) {
            let error = relative_error(got, &prompt.logits);
            assert!(error <= 2e-5, "{}: {error:e}", case.name);
        }
    }
}

/// A prompt of the real model's reference: ids with the continuation, and for each step the token and its margin.
fn smollm2_prompts() -> Vec<(String, Vec<u32>, Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(core_fixtures().join("smollm2/reference.safetensors")).expect("a reference");
    let file = SafeTensors::deserialize(&bytes).expect("a reference");
    let mut names: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_suffix(".greedy_ids")).collect();
    names.sort_unstable();
    let prompt = |name: &&str| {
        let part = |suffix: &str| format!("{name}.{suffix}");
        (
            name.to_string(),
            ids(&file, &part("input_ids")),
            ids(&file, &part("greedy_ids")),
            floats(&file, &part("margin")),
        )
    };
    names.iter().map(prompt).filter(|(_, ids, _, _)| ids.len() < 400).collect()
}

/// Steps whose most likely token differs from the reference's though its margin exceeds `tolerance`, and all steps.
fn smollm2_differences(executor: &mut dyn Executor, tolerance: f32) -> (usize, usize) {
    let (mut wrong, mut steps) = (0, 0);
    let vocab = executor.vocab_size() as usize;
    for (name, prompt, greedy, margin) in smollm2_prompts() {
        let mut tokens = prompt.clone();
        tokens.extend_from_slice(&greedy[..greedy.len() - 1]);
        let got = logits(executor, std::slice::from_ref(&tokens), WHOLE).remove(0);
        for (i, (&want, &margin)) in greedy.iter().zip(&margin).enumerate() {
            let row = &got[(prompt.len() - 1 + i) * vocab..][..vocab];
            steps += 1;
            if argmax(row) != want && margin > tolerance {
                println!("{name}: step {i} gives {}, the reference {want} by {margin}", argmax(row));
                wrong += 1;
            }
        }
    }
    (wrong, steps)
}

#[test]
fn the_default_model_follows_its_reference() {
    let Some(path) = default_model() else { return };
    for (mode, tolerance) in [(PRECISE_MODE, 2e-3), (DEFAULT_MODE, 0.35)] {
        let Some(mut executor) = open(&path, mode, 64, 512) else { return };
        let (wrong, steps) = smollm2_differences(&mut executor, tolerance);
        assert!(steps > 200, "{steps} steps");
        assert_eq!(wrong, 0, "{mode:?}: of {steps} steps");
    }
}
