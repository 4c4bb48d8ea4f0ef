//! LoRA adapters: read, refused by name, and computed as if they had been merged into the weights.

mod gpu;
mod serve;
mod write;

use crate::support::{core_fixtures, full_fixtures};
use kvasir::engine::logits::{LogitsPlan, adapted_logits, all_logits};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::model::Model;
use kvasir::model::lora::{Adapter, PROJECTIONS};
use kvasir::model::spec::WeightRole;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use write::{ALL, Recipe, Tensors, adapter_tensors, config, read_folder, write_adapter, write_merged, write_tensors};

const PLAN: LogitsPlan = LogitsPlan { chunk: Some(5), is_batched: false, max_tokens_per_step: 256 };

/// A base model, an adapter for it and both merged.
struct Case {
    model: Model,
    base: PathBuf,
    adapter: Arc<Adapter>,
    merged: PathBuf,
    /// Held for its files.
    _folder: TempDir,
}

fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn case(base: &Path, recipe: &Recipe) -> Case {
    let folder = tempfile::tempdir().expect("a folder");
    let tensors = read_folder(base);
    let path = write_adapter(&folder.path().join("adapter"), recipe, &tensors);
    let merged = write_merged(&folder.path().join("merged"), base, recipe, &tensors);
    let model = open(base);
    let adapter = Adapter::open(&path, &model).unwrap_or_else(|e| panic!("{}: {e}", base.display()));
    Case { model, base: base.to_owned(), adapter: Arc::new(adapter), merged, _folder: folder }
}

fn prompts() -> Vec<Vec<u32>> {
    vec![vec![5, 9, 200, 31, 77, 6, 250, 8, 91, 120, 3], vec![17]]
}

fn reference(model: &Model) -> ReferenceExecutor {
    ReferenceExecutor::new(model, ReferenceConfig { num_blocks: 64, block_size: 4 }).unwrap_or_else(|e| panic!("{e}"))
}

/// Of all prompts, one after the other, with an adapter (0 is none).
fn logits(executor: &mut dyn Executor, adapter: u64) -> Vec<f32> {
    let mut all = Vec::new();
    let adapters = vec![adapter; prompts().len()];
    adapted_logits(executor, &prompts(), &adapters, PLAN, &mut |_, _, rows| all.extend_from_slice(rows))
        .unwrap_or_else(|e| panic!("{e}"));
    all
}

/// max |difference| / max |want|.
fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().all(|v| v.is_finite()), "a logit is not finite");
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// Families with separate, fused and transposed projections, and with plain MLPs; the first are in every clone.
fn cases() -> Vec<Case> {
    let core = |name: &str| Some(core_fixtures().join("tiny").join(name));
    let full = |name: &str| full_fixtures().map(|root| root.join("tiny").join(name));
    let rslora = Recipe { use_rslora: true, alpha: 4.0, ..Recipe::new(2, 6, &["q_proj", "v_proj"]) };
    let ranks = Recipe { other_rank: Some(("down_proj", 3)), ..Recipe::new(3, 5, &ALL) };
    let phi = Recipe::new(4, 4, &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
    let gpt2 = Recipe { is_transposed: true, ..Recipe::new(5, 4, &["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]) };
    let neox = Recipe::new(6, 4, &["query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"]);
    let cases = [
        (core("llama"), Recipe::new(1, 8, &ALL)),
        (core("qwen2_sharded"), rslora),
        (core("qwen3_bf16"), ranks.clone()),
        (full("gemma2"), ranks),
        (full("phi3_f16"), phi),
        (full("gpt2"), gpt2),
        (full("gpt_neox"), neox),
        (full("mixtral"), Recipe::new(7, 2, &["q_proj", "o_proj"])),
    ];
    cases.into_iter().filter_map(|(path, recipe)| Some(case(&path?, &recipe))).collect()
}

#[test]
fn the_reference_computes_an_adapter_as_if_it_were_merged() {
    for case in cases() {
        let mut executor = reference(&case.model);
        let plain = logits(&mut executor, 0);
        executor.load_adapter(&case.adapter).expect("there is room");
        let adapted = logits(&mut executor, case.adapter.id);
        let merged = logits(&mut reference(&open(&case.merged)), 0);
        let (error, change) = (relative_error(&adapted, &merged), relative_error(&adapted, &plain));
        println!("{}: error {error:.1e}, change {change:.1e}", case.base.display());
        assert!(error <= 2e-5, "{}: {error:e}", case.base.display());
        assert!(change >= 1e-2, "{}: the adapter changes {change:e} only", case.base.display());
        assert_eq!(logits(&mut executor, 0), plain, "a row without an adapter is as before");
    }
}

/// Names and shapes that a llama's projections have in a Hugging Face folder; all values are zero.
fn hf_shapes(model: &Model) -> Tensors {
    let names = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"];
    let mut shapes = Tensors::new();
    for l in 0..model.spec().num_layers {
        for (name, role) in names.iter().zip(PROJECTIONS) {
            let shape: Vec<usize> =
                role(l).shape(model.spec()).expect("a matrix").iter().map(|&d| d as usize).collect();
            let zeros = vec![0.0; shape[0] * shape[1]];
            shapes.insert(format!("model.layers.{l}.{name}_proj.weight"), (zeros, shape));
        }
    }
    shapes
}

/// Writes a llama of a GGUF file as a Hugging Face folder: rows of Q and K go back to where their pairs lie apart.
fn write_as_folder(folder: &Path, model: &Model) -> Tensors {
    let spec = model.spec();
    let floats = |role: WeightRole| {
        let view = model.weight(role).unwrap_or_else(|e| panic!("{e}")).expect("there");
        view.to_f32().unwrap_or_else(|e| panic!("{e}"))
    };
    let mut tensors = hf_shapes(model);
    let (hidden, dim) = (spec.hidden_size as usize, spec.head_dim as usize);
    for l in 0..spec.num_layers {
        let names = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"];
        for (name, role) in names.iter().zip(PROJECTIONS) {
            let mut values = floats(role(l));
            if name.ends_with('q') || name.ends_with('k') {
                let rows: Vec<&[f32]> = values.chunks_exact(hidden).collect();
                let turned: Vec<f32> = (0..rows.len())
                    .flat_map(|row| {
                        let (head, i) = (row / dim, row % dim);
                        let from = if i < dim / 2 { 2 * i } else { 2 * (i - dim / 2) + 1 };
                        rows[head * dim + from].to_vec()
                    })
                    .collect();
                values = turned;
            }
            tensors.get_mut(&format!("model.layers.{l}.{name}_proj.weight")).expect("named").0 = values;
        }
        for (name, role) in
            [("input_layernorm", WeightRole::AttnNorm(l)), ("post_attention_layernorm", WeightRole::FfnNorm(l))]
        {
            tensors.insert(format!("model.layers.{l}.{name}.weight"), (floats(role), vec![hidden]));
        }
    }
    tensors.insert("model.norm.weight".into(), (floats(WeightRole::OutputNorm), vec![hidden]));
    let table = vec![spec.vocab_size as usize, hidden];
    tensors.insert("model.embed_tokens.weight".into(), (floats(WeightRole::TokenEmbedding), table.clone()));
    if !spec.tie_embeddings {
        tensors.insert("lm_head.weight".into(), (floats(WeightRole::LmHead), table));
    }
    let config = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position, "rms_norm_eps": spec.rms_eps, "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
    });
    std::fs::create_dir_all(folder).expect("writable");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    tensors
}

#[test]
fn adapters_fit_gguf_files_whose_heads_are_reordered() {
    let model = open(&core_fixtures().join("gguf/q4_1"));
    let folder = tempfile::tempdir().expect("a folder");
    let base = folder.path().join("base");
    let tensors = write_as_folder(&base, &model);
    let recipe = Recipe::new(9, 5, &ALL);
    let path = write_adapter(&folder.path().join("adapter"), &recipe, &tensors);
    let merged = write_merged(&folder.path().join("merged"), &base, &recipe, &tensors);
    let adapter = Arc::new(Adapter::open(&path, &model).unwrap_or_else(|e| panic!("{e}")));
    let mut executor = reference(&model);
    executor.load_adapter(&adapter).expect("there is room");
    let error = relative_error(&logits(&mut executor, adapter.id), &logits(&mut reference(&open(&merged)), 0));
    assert!(error <= 2e-5, "{error:e}");
}

#[test]
fn a_row_with_an_adapter_that_is_not_there_is_refused() {
    let mut executor = reference(&open(&core_fixtures().join("tiny/llama")));
    let refused = adapted_logits(&mut executor, &prompts(), &[7], PLAN, &mut |_, _, _| {});
    assert!(refused.is_err_and(|e| e.to_string().contains("adapter 0000000000000007 is not loaded")));
    all_logits(&mut executor, &prompts(), PLAN, &mut |_, _, _| {}).expect("none has one");
}

/// What an adapter's files are changed to, and words of the error.
type Damage = (fn(&mut serde_json::Value, &mut Tensors), &'static str);

#[test]
fn malformed_adapters_are_refused_by_name() {
    const A: &str = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight";
    let damages: [Damage; 15] = [
        (|c, _| c["use_dora"] = true.into(), "DoRA"),
        (|c, _| c["bias"] = "lora_only".into(), "bias = \"lora_only\" is not supported"),
        (|c, _| c["modules_to_save"] = serde_json::json!(["lm_head"]), "modules_to_save"),
        (|c, _| c["peft_type"] = "IA3".into(), "peft_type IA3"),
        (|c, _| c["r"] = 3.into(), "down_proj.lora_A.weight has the shape [8, 176]; the model and r need [3, 176]"),
        (|c, _| c["r"] = (-1).into(), "r must be a whole number"),
        (|c, _| c["lora_alpha"] = 1e30.into(), "lora_alpha = 1e30 of adapter_config.json"),
        (
            |c, t| {
                c["lora_alpha"] = 80.into();
                t.get_mut(&A.replace("lora_A", "lora_B")).expect("there").0[7] = f32::MAX;
            },
            "up_proj.lora_B.weight: element 7 times the adapter's scale 10 is too large",
        ),
        (|c, _| c["target_modules"] = serde_json::json!(["q_proj", "w_pack"]), "target_modules names w_pack"),
        (|_, t| drop(t.remove(A)), "model.layers.1.mlp.up_proj has a lora_B, but no lora_A"),
        (|_, t| t.get_mut(A).expect("there").0[5] = f32::NAN, "up_proj.lora_A.weight: the value of element 5"),
        (
            |_, t| {
                let (values, shape) = t.get_mut(A).expect("there");
                *shape = vec![shape[1], shape[0]];
                assert_eq!(values.len(), 512);
            },
            "up_proj.lora_A.weight has the shape [64, 8]",
        ),
        (
            |_, t| drop(t.insert("base_model.model.lm_head.weight".into(), (vec![0.0; 4], vec![2, 2]))),
            "tensor base_model.model.lm_head.weight: a whole tensor",
        ),
        (|_, t| drop(t.insert(A.replace("lora_A.weight", "lora_magnitude_vector"), (vec![0.0; 4], vec![4]))), "DoRA"),
        (
            |_, t| drop(t.insert(A.replace("layers.1", "layers.9"), (vec![0.0; 512], vec![8, 64]))),
            "model.layers.9.mlp.up_proj of this model cannot be adapted",
        ),
    ];
    let base = core_fixtures().join("tiny/llama");
    let (model, tensors, recipe) = (open(&base), read_folder(&base), Recipe::new(1, 8, &ALL));
    let folder = tempfile::tempdir().expect("a folder");
    for (damage, words) in damages {
        let (mut json, mut own) = (config(&recipe), adapter_tensors(&recipe, &tensors));
        damage(&mut json, &mut own);
        std::fs::write(folder.path().join("adapter_config.json"), json.to_string()).expect("writable");
        write_tensors(&folder.path().join("adapter_model.safetensors"), &own);
        match Adapter::open(folder.path(), &model) {
            Ok(_) => panic!("opened, though {words}"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(words) && text.contains("adapter_"), "{text} (expected: {words})");
            }
        }
    }
    std::fs::remove_file(folder.path().join("adapter_model.safetensors")).expect("was written");
    std::fs::write(folder.path().join("adapter_config.json"), config(&recipe).to_string()).expect("writable");
    assert!(
        Adapter::open(folder.path(), &model).is_err_and(|e| e.to_string().contains("no adapter_model.safetensors"))
    );
}
