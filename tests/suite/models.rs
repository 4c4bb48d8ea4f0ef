//! Models open from the fixtures with the facts that their configs state, and dequantise as the references say.

use crate::support::{core_fixtures, fixtures, folders, full_fixtures, read_json};
use kvasir::model::dtype::{DType, GGUF_TYPES};
use kvasir::model::inspect::inspect;
use kvasir::model::quant::dequantize;
use kvasir::model::rope::{attention_factor, inv_freq};
use kvasir::model::safetensors::SafetensorsFile;
use kvasir::model::spec::{QkNorm, RopePairing, RopeScaling, WeightRole};
use kvasir::model::{Model, ModelError, ModelFormat};
use std::path::{Path, PathBuf};

const FAMILIES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];
const OTHER_FAMILIES: [&str; 9] =
    ["gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "stablelm", "starcoder2", "mixtral", "qwen3_moe"];

fn tiny() -> PathBuf {
    fixtures().join("tiny")
}

fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

/// Tiny checkpoints of the families whose configs are a llama's.
fn supported_folders() -> Vec<PathBuf> {
    let mut found = folders(&tiny());
    found.retain(|f| FAMILIES.contains(&read_json(&f.join("config.json"))["model_type"].as_str().expect("a name")));
    found
}

/// Tiny checkpoints of all families that load.
fn loadable_folders() -> Vec<PathBuf> {
    let mut found = folders(&tiny());
    found.retain(|f| {
        let config = read_json(&f.join("config.json"));
        let name = config["model_type"].as_str().expect("a name");
        FAMILIES.contains(&name) || OTHER_FAMILIES.contains(&name)
    });
    found.extend(folders(&core_fixtures().join("families")));
    found
}

/// A copy of `folder` whose `config.json` is `config`; weights are linked.
fn with_config(folder: &Path, config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().expect("a name").to_owned();
        if name != "config.json" {
            std::fs::copy(&path, dir.path().join(name)).expect("copied");
        }
    }
    std::fs::write(dir.path().join("config.json"), config).expect("written");
    dir
}

/// The fixture's config with some keys set (null removes nothing: it is written as null).
fn edited(folder: &Path, edits: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let mut config = read_json(&folder.join("config.json"));
    for (key, value) in edits {
        config[key] = value.clone();
    }
    with_config(folder, &config.to_string())
}

#[test]
fn every_tiny_checkpoint_opens_with_the_numbers_of_its_config() {
    let folders = supported_folders();
    assert!(folders.len() >= 5, "{folders:?}");
    for folder in folders {
        let config = read_json(&folder.join("config.json"));
        let model = open(&folder);
        let spec = model.spec();
        let number = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("{key}")) as u32;
        assert_eq!(spec.arch, config["model_type"]);
        assert_eq!(spec.num_layers, number("num_hidden_layers"));
        assert_eq!(spec.hidden_size, number("hidden_size"));
        assert_eq!(spec.intermediate_size, number("intermediate_size"));
        assert_eq!(spec.num_heads, number("num_attention_heads"));
        assert_eq!(spec.num_kv_heads, number("num_key_value_heads"));
        assert_eq!(spec.vocab_size, number("vocab_size"));
        assert_eq!(spec.max_position, number("max_position_embeddings"));
        assert_eq!(f64::from(spec.rms_eps), config["rms_norm_eps"].as_f64().expect("a number") as f32 as f64);
        assert_eq!(Some(spec.rope.theta), config["rope_parameters"]["rope_theta"].as_f64());
        assert_eq!(spec.rope.pairing, RopePairing::Half);
        assert_eq!(spec.tie_embeddings, config["tie_word_embeddings"]);
        assert_eq!(spec.qk_norm == QkNorm::Head, spec.arch == "qwen3");
        assert_eq!(spec.windows.len(), spec.num_layers as usize);
        assert_eq!(model.info().format, ModelFormat::Safetensors);
        assert_eq!(model.info().context, spec.max_position);
        assert!(model.verify_finite().is_ok());
        assert!(model.chat_template().expect("readable").is_some(), "{}", folder.display());
        assert!(model.gguf().is_none() && model.folder() == Some(folder.as_path()));
    }
}

#[test]
fn old_and_new_config_styles_give_the_same_spec() {
    let folders = loadable_folders();
    assert!(folders.len() >= 5, "{folders:?}");
    for folder in folders {
        let legacy = std::fs::read_to_string(folder.join("config.legacy.json")).expect("readable");
        let copy = with_config(&folder, &legacy);
        assert_eq!(open(copy.path()).spec(), open(&folder).spec(), "{}", folder.display());
    }
}

#[test]
fn fused_transposed_and_shifted_tensors_become_the_roles_they_hold() {
    for folder in loadable_folders() {
        let model = open(&folder);
        for role in model.spec().roles() {
            let view = model.weight(role).expect("legal").expect("a role of the spec");
            assert_eq!(Some(view.shape.clone()), role.shape(model.spec()), "{} {role:?}", folder.display());
            assert_eq!(Some(view.bytes.len() as u64), view.dtype.bytes(view.shape.iter().product()));
            let values = view.to_f32().expect("whole blocks");
            assert!(values.iter().all(|v| v.is_finite()), "{} {role:?}", folder.display());
        }
    }
}

#[test]
fn rope_scaling_is_read_from_either_style() {
    let llama3 = open(&tiny().join("llama_tied_llama3rope"));
    let expected =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 32 };
    assert_eq!(llama3.spec().rope.scaling, expected);
    assert!(llama3.spec().tie_embeddings);
    assert_eq!(llama3.weight(WeightRole::LmHead).expect("legal"), None);
    let folder = tiny().join("llama");
    let yarn = serde_json::json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5});
    let yarn = edited(&folder, &[("rope_scaling", yarn)]);
    let spec = open(yarn.path()).spec().clone();
    let RopeScaling::Yarn { original_max_position, attention_factor: stored, .. } = spec.rope.scaling else {
        panic!("{:?}", spec.rope.scaling)
    };
    assert_eq!(original_max_position, 512, "max_position_embeddings stands in");
    let (full, half) = (0.1 * 4f64.ln() + 1.0, 0.05 * 4f64.ln() + 1.0);
    assert!((stored - full / half).abs() < 1e-12);
    assert_eq!(attention_factor(&spec.rope), stored as f32);
    assert_eq!(inv_freq(&spec.rope, 1).len(), 8);
}

#[test]
fn mistral_slides_on_every_layer_unless_its_window_is_null() {
    let folder = tiny().join("mistral_swa");
    assert_eq!(open(&folder).spec().windows, [Some(16); 3]);
    let without = edited(&folder, &[("sliding_window", serde_json::Value::Null)]);
    assert_eq!(open(without.path()).spec().windows, [None; 3]);
}

#[test]
fn qwen_windows_follow_layer_types_else_max_window_layers() {
    let folder = tiny().join("qwen2_sharded");
    assert_eq!(open(&folder).spec().windows, [None; 3]);
    let on = [("use_sliding_window", true.into()), ("sliding_window", 8.into()), ("max_window_layers", 1.into())];
    let mut by_count = on.to_vec();
    by_count.push(("layer_types", serde_json::Value::Null));
    assert_eq!(open(edited(&folder, &by_count).path()).spec().windows, [None, Some(8), Some(8)]);
    let mut by_type = on.to_vec();
    by_type.push(("layer_types", serde_json::json!(["sliding_attention", "full_attention", "sliding_attention"])));
    assert_eq!(open(edited(&folder, &by_type).path()).spec().windows, [Some(8), None, Some(8)]);
    let off = edited(&folder, &[("sliding_window", 8.into()), ("layer_types", serde_json::Value::Null)]);
    assert_eq!(open(off.path()).spec().windows, [None; 3]);
}

#[test]
fn biases_follow_the_family_and_the_config() {
    let qwen2 = open(&tiny().join("qwen2_sharded"));
    let spec = qwen2.spec();
    assert!(spec.q_bias && spec.k_bias && spec.v_bias && !spec.o_bias && !spec.mlp_bias);
    let bias = qwen2.weight(WeightRole::KBias(1)).expect("legal").expect("there");
    assert_eq!((bias.shape.as_slice(), bias.name.as_ref()), (&[32u64][..], "model.layers.1.self_attn.k_proj.bias"));
    assert_eq!(qwen2.weight(WeightRole::OBias(1)).expect("legal"), None);
    if let Some(full) = full_fixtures() {
        let spec = open(&full.join("tiny/llama_linear_bias")).spec().clone();
        assert!(spec.q_bias && spec.k_bias && spec.v_bias && spec.o_bias && spec.mlp_bias);
        assert_eq!(spec.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    }
}

#[test]
fn sharded_weights_are_found_in_their_shards() {
    let model = open(&tiny().join("qwen2_sharded"));
    let view = model.weight(WeightRole::Gate(2)).expect("legal").expect("there");
    assert_eq!((view.dtype, view.shape.as_slice(), view.bytes.len()), (DType::F32, &[160u64, 64][..], 160 * 64 * 4));
    assert_eq!(model.info().quant, "F32");
}

#[test]
fn stop_tokens_are_those_of_both_configs() {
    let llama = open(&tiny().join("llama"));
    assert_eq!(llama.spec().eos_token_ids, [4, 1]);
    let defaults = llama.generation_defaults();
    assert_eq!((defaults.do_sample, defaults.temperature, defaults.top_p), (Some(true), Some(0.6), Some(0.9)));
}

#[test]
fn unsupported_families_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let llama = tiny().join("llama");
    for entry in std::fs::read_dir(&llama).expect("a readable folder").flatten() {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a writable folder");
    }
    let mut config = read_json(&llama.join("config.json"));
    config["model_type"] = "zamba2".into();
    config["architectures"] = serde_json::json!(["Zamba2ForCausalLM"]);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a writable folder");
    let error = Model::open(dir.path()).expect_err("not supported");
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("architecture `zamba2`"), "{text}");
    assert!(text.contains("supported: llama, mistral, qwen2, qwen3"), "{text}");
}

#[test]
fn every_gguf_opens_with_the_same_facts_whatever_its_type() {
    let mut labels = Vec::new();
    for folder in folders(&fixtures().join("gguf")) {
        let model = open(&folder);
        let spec = model.spec();
        assert_eq!((spec.arch.as_str(), spec.num_layers, spec.hidden_size, spec.head_dim), ("llama", 2, 256, 64));
        assert_eq!((spec.num_heads, spec.num_kv_heads, spec.vocab_size, spec.max_position), (4, 2, 512, 512));
        assert_eq!(spec.rope.pairing, RopePairing::Interleaved);
        assert_eq!((spec.bos_token_id, spec.eos_token_ids.as_slice()), (Some(0), &[4u32][..]));
        assert_eq!(model.info().format, ModelFormat::Gguf);
        assert!(model.verify_finite().is_ok());
        let gguf = model.gguf().expect("a GGUF");
        let tokens = gguf.strings("tokenizer.ggml.tokens").expect("strings").expect("there");
        assert_eq!((tokens.len(), tokens[0]), (512, "<|begin_of_text|>"));
        assert_eq!(gguf.i32s("tokenizer.ggml.token_type").expect("numbers").expect("there")[..2], [3, 3]);
        assert!(model.chat_template().expect("readable").expect("there").contains("loop_messages"));
        let view = model.weight(WeightRole::Q(1)).expect("legal").expect("there");
        let mut weights = vec![0.0; 256 * 256];
        dequantize(view.dtype, &view.bytes, &mut weights).expect("whole blocks");
        assert!(weights.iter().all(|w| w.abs() < 1.0), "{}", view.name);
        labels.push(model.info().quant.clone());
    }
    for label in ["Q4_K_M", "Q4_1", "Q6_K"] {
        assert!(labels.iter().any(|l| l == label), "{labels:?}");
    }
}

#[test]
fn dequantisation_equals_the_reference_bit_for_bit() {
    let vectors = core_fixtures().join("gguf/dequant_vectors.safetensors");
    let file = SafetensorsFile::open(&vectors).unwrap_or_else(|e| panic!("{e}"));
    let bytes_of = |name: String| {
        let tensor = file.tensors().iter().find(|t| t.name == name).unwrap_or_else(|| panic!("{name}"));
        file.bytes(tensor)
    };
    // The fixtures have all but the two plainest.
    for dtype in GGUF_TYPES.into_iter().filter(|dtype| !matches!(dtype, DType::F32 | DType::F16)) {
        let expected: Vec<u32> = bytes_of(format!("{dtype}.dequant"))
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let mut out = vec![0.0; expected.len()];
        dequantize(dtype, bytes_of(format!("{dtype}.blocks")), &mut out).unwrap_or_else(|e| panic!("{e}"));
        let different = out.iter().zip(&expected).filter(|(o, e)| o.to_bits() != **e).count();
        assert_eq!(different, 0, "{dtype}: {different} of {} differ", out.len());
    }
}

#[test]
fn a_gguf_is_found_by_its_folder_only_when_it_is_the_only_one() {
    let source = fixtures().join("gguf/q4_1/tiny-llama-Q4_1.gguf");
    let dir = tempfile::tempdir().expect("a temporary folder");
    assert!(matches!(Model::open(dir.path()), Err(ModelError::NotFound { .. })));
    std::fs::copy(&source, dir.path().join("a.gguf")).expect("copied");
    assert_eq!(open(dir.path()).info().path, dir.path().join("a.gguf"));
    std::fs::copy(&source, dir.path().join("b.gguf")).expect("copied");
    let text = Model::open(dir.path()).expect_err("ambiguous").to_string();
    assert!(text.contains("2 GGUF models"), "{text}");
}

#[test]
fn weights_are_found_under_whatever_name_they_have_and_pickles_are_refused_by_name() {
    let llama = core_fixtures().join("tiny/llama");
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["config.json", "generation_config.json"] {
        std::fs::copy(llama.join(name), dir.path().join(name)).expect("copied");
    }
    std::fs::write(dir.path().join("pytorch_model-00001-of-00002.bin"), b"a pickle").expect("written");
    let refusal = Model::open(dir.path()).expect_err("nothing to read").to_string();
    assert!(refusal.contains("pickled") && refusal.contains("safetensors"), "{refusal}");

    std::fs::copy(llama.join("model.safetensors"), dir.path().join("weights-a.safetensors")).expect("copied");
    std::fs::write(dir.path().join("consolidated.safetensors"), b"the same under other names").expect("written");
    std::fs::write(dir.path().join("adapter_model.safetensors"), b"not a model").expect("written");
    assert_eq!(open(dir.path()).spec(), open(&llama).spec());

    // Repositories of GGUFs often keep the config of the model that they were made of, and its image encoder.
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::copy(llama.join("config.json"), dir.path().join("config.json")).expect("copied");
    let file = std::fs::read_dir(core_fixtures().join("gguf/q4_1")).expect("a folder").flatten().map(|e| e.path());
    let file = file.into_iter().find(|path| path.extension().is_some_and(|x| x == "gguf")).expect("a GGUF");
    std::fs::copy(&file, dir.path().join("m.gguf")).expect("copied");
    std::fs::write(dir.path().join("mmproj-m.gguf"), b"of images").expect("written");
    assert_eq!(open(dir.path()).spec(), open(&file).spec());
}

#[test]
fn inspection_shows_headers_of_what_cannot_be_run_too() {
    let gguf = inspect(&fixtures().join("gguf/q4_k")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(gguf.arch.as_deref(), Some("llama"));
    assert_eq!((gguf.tensors.len(), gguf.metadata["llama.block_count"].as_u64()), (21, Some(2)));
    assert_eq!(gguf.metadata["tokenizer.ggml.tokens"]["count"], 512);
    assert_eq!(gguf.metadata["tokenizer.ggml.tokens"]["first"][0], "<|begin_of_text|>");
    let Some(full) = full_fixtures() else { return };
    let gemma = inspect(&full.join("tiny/gemma2")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(gemma.arch.as_deref(), Some("gemma2"));
    assert!(gemma.tensors.iter().any(|t| t.name == "model.embed_tokens.weight" && t.dtype == "F32"));
}

#[test]
fn a_split_gguf_is_one_model() {
    let source = std::fs::read(fixtures().join("gguf/q4_1/tiny-llama-Q4_1.gguf")).expect("readable");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = |n: u32| dir.path().join(format!("m-{n:05}-of-00002.gguf"));
    std::fs::write(path(1), with_split_keys(&source, 0, 21)).expect("written");
    let text = Model::open(&path(1)).expect_err("a part is missing").to_string();
    assert!(text.contains("part 2 of 2 of the model is missing: m-00002-of-00002.gguf"), "{text}");
    // The second part holds no tensors: only its keys matter here.
    let mut second = b"GGUF".to_vec();
    second.extend(3u32.to_le_bytes());
    second.extend(0u64.to_le_bytes());
    second.extend(2u64.to_le_bytes());
    for (key, value) in [("split.no", 1u16), ("split.count", 2)] {
        second.extend(pair(key, value));
    }
    std::fs::write(path(2), &second).expect("written");
    assert_eq!(open(dir.path()).info().path, path(1));
    let text = Model::open(&path(2)).expect_err("not the first").to_string();
    assert!(text.contains("open the first part"), "{text}");
    std::fs::write(path(1), with_split_keys(&source, 0, 22)).expect("written");
    let text = Model::open(&path(1)).expect_err("a tensor is missing").to_string();
    assert!(text.contains("split.tensors.count is 22"), "{text}");
}

/// A `u16` metadata pair.
fn pair(key: &str, value: u16) -> Vec<u8> {
    let mut bytes = (key.len() as u64).to_le_bytes().to_vec();
    bytes.extend(key.as_bytes());
    bytes.extend(2u32.to_le_bytes());
    bytes.extend(value.to_le_bytes());
    bytes
}

/// The file with split keys put before its own; the data keeps its alignment because the keys are padded to 32 bytes.
fn with_split_keys(file: &[u8], number: u16, tensors: u16) -> Vec<u8> {
    let mut keys = [pair("split.no", number), pair("split.count", 2), pair("split.tensors.count", tensors)].concat();
    let padding = (keys.len() + 14).next_multiple_of(32) - keys.len() - 14;
    keys.extend(pair(&"x".repeat(padding), 0));
    let num_pairs = u64::from_le_bytes(file[16..24].try_into().expect("8 bytes")) + 4;
    [&file[..16], &num_pairs.to_le_bytes(), &keys, &file[24..]].concat()
}

#[test]
fn models_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<Model>();
}

#[test]
fn the_default_model_has_its_known_facts() {
    let Some(path) = crate::support::default_model() else { return };
    let model = open(&path);
    let spec = model.spec();
    assert_eq!((spec.num_layers, spec.hidden_size, spec.intermediate_size), (30, 576, 1536));
    assert_eq!((spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size), (9, 3, 64, 49152));
    assert!(spec.tie_embeddings);
    assert_eq!((spec.rope.theta, spec.max_position), (100_000.0, 8192));
    assert_eq!(model.info().quant, "Q4_1");
    assert!(model.verify_finite().is_ok());
}
