//! Quantised checkpoints in folders: the fixtures' weights bit for bit, and formats that no fixture has, written here.

use crate::support::{files_with_extension, folders, full_fixtures, read_json};
use kvasir::model::dtype::DType;
use kvasir::model::spec::WeightRole;
use kvasir::model::{Model, ModelError};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::path::Path;

fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn floats(model: &Model, role: WeightRole) -> Vec<f32> {
    model.weight(role).expect("legal").expect("there").to_f32().expect("whole blocks")
}

#[test]
fn weights_of_the_fixtures_equal_their_reference_bit_for_bit() {
    let Some(root) = full_fixtures() else { return };
    let found = folders(&root.join("quant"));
    assert_eq!(found.len(), 6);
    for folder in found {
        let bytes = std::fs::read(folder.join("dequant_layer0.safetensors")).expect("readable");
        let reference = safetensors::SafeTensors::deserialize(&bytes).expect("a reference");
        for config in ["config.json", "config.legacy.json"] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            std::fs::copy(folder.join("model.safetensors"), dir.path().join("model.safetensors")).expect("copied");
            std::fs::copy(folder.join(config), dir.path().join("config.json")).expect("copied");
            let model = open(dir.path());
            model.verify_finite().expect("finite");
            let roles = [(WeightRole::K(0), "self_attn.k_proj"), (WeightRole::Down(0), "mlp.down_proj")];
            for (role, name) in roles {
                let want = reference.tensor(&format!("model.layers.0.{name}.weight")).expect("there");
                let want: Vec<f32> = bytemuck::pod_collect_to_vec(want.data());
                assert!(floats(&model, role) == want, "{} {config} {name}", folder.display());
                let form = model.weight_form(role).expect("legal").expect("there");
                assert_ne!(form.dtype, DType::F32, "{} {name}", folder.display());
                assert_eq!(form.order.is_some(), folder.ends_with("gptq_4bit_g32_actorder"), "{name}");
            }
        }
    }
}

/// A tiny llama of one layer whose matrices `write` stores in some format; everything else is f32.
struct Folder {
    config: Value,
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    matrices: Vec<(WeightRole, Vec<f32>)>,
}

/// Integers of so many values from a seed.
fn numbers(seed: u64, len: usize, below: u64) -> Vec<u32> {
    let mut random = crate::kernels::harness::Random(seed);
    (0..len).map(|_| (random.bits() % below) as u32).collect()
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

type Stored = (Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>, Vec<f32>);

impl Folder {
    /// `store` gives a matrix's tensors by suffix, and what they mean.
    fn new(quantization: Value, store: impl Fn(u64, usize, usize) -> Stored) -> Folder {
        let (hidden, inner, kv) = (64usize, 96usize, 32usize);
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
            "quantization_config": quantization,
        });
        let mut folder = Folder { config, tensors: Vec::new(), matrices: Vec::new() };
        for name in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"] {
            folder.tensors.push((format!("{name}.weight"), Dtype::F32, vec![hidden], le(&vec![1.0; hidden])));
        }
        let embedding = le(&vec![0.5; 32 * hidden]);
        folder.tensors.push(("model.embed_tokens.weight".into(), Dtype::F32, vec![32, hidden], embedding));
        let matrices = [
            (WeightRole::Q(0), "self_attn.q_proj", hidden, hidden),
            (WeightRole::K(0), "self_attn.k_proj", kv, hidden),
            (WeightRole::V(0), "self_attn.v_proj", kv, hidden),
            (WeightRole::O(0), "self_attn.o_proj", hidden, hidden),
            (WeightRole::Gate(0), "mlp.gate_proj", inner, hidden),
            (WeightRole::Up(0), "mlp.up_proj", inner, hidden),
            (WeightRole::Down(0), "mlp.down_proj", hidden, inner),
        ];
        for (seed, (role, name, n, k)) in matrices.into_iter().enumerate() {
            let (stored, values) = store(seed as u64, n, k);
            for (suffix, dtype, shape, bytes) in stored {
                folder.tensors.push((format!("model.layers.0.{name}.{suffix}"), dtype, shape, bytes));
            }
            folder.matrices.push((role, values));
        }
        folder
    }

    fn write(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let views = self.tensors.iter().map(|(name, dtype, shape, bytes)| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("a legal tensor"))
        });
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("written");
        std::fs::write(dir.path().join("config.json"), self.config.to_string()).expect("written");
        assert_eq!(files_with_extension(dir.path(), "safetensors").len(), 1);
        dir
    }

    /// Opens and compares every matrix; gives the types that they are handed out as.
    fn check(&self, what: &str, tolerance: f32) -> Vec<DType> {
        let dir = self.write();
        let model = open(dir.path());
        let mut types = Vec::new();
        for (role, want) in &self.matrices {
            let got = floats(&model, *role);
            let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
            let worst = got.iter().zip(want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(
                got.len() == want.len() && worst <= tolerance * largest,
                "{what} {role:?}: {worst:e} of {largest:e}"
            );
            types.push(model.weight_form(*role).expect("legal").expect("there").dtype);
        }
        types
    }
}

/// Numbers of a few bits in a row as words, from the lowest bit up.
fn words(values: &[u32], bits: usize) -> Vec<u32> {
    let mut words = vec![0u32; (values.len() * bits).div_ceil(32)];
    for (i, value) in values.iter().enumerate() {
        let both = u64::from(*value) << (i * bits % 32);
        words[i * bits / 32] |= both as u32;
        if both >> 32 != 0 {
            words[i * bits / 32 + 1] |= (both >> 32) as u32;
        }
    }
    words
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Rows of words turned so that each column holds what was a row.
fn down(rows: &[Vec<u32>]) -> Vec<u32> {
    (0..rows[0].len()).flat_map(|w| rows.iter().map(move |row| row[w])).collect()
}

fn scale_of(seed: u32) -> f32 {
    half::f16::from_f32(0.001 + seed as f32 * 1e-4).to_f32()
}

#[test]
fn gptq_of_every_width_version_and_order_is_read() {
    for bits in [2usize, 3, 4, 8] {
        for (version, is_ordered) in [("gptq", false), ("gptq_v2", false), ("gptq", true)] {
            let config = json!({"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version});
            let folder = Folder::new(config, |seed, n, k| {
                let (groups, most) = (k / 32, 1u64 << bits);
                let codes = numbers(seed, n * k, most);
                let zeros: Vec<u32> = numbers(seed + 50, n * groups, most - 1).iter().map(|z| z + 1).collect();
                let scales: Vec<f32> = numbers(seed + 90, n * groups, 50).into_iter().map(scale_of).collect();
                let group_of: Vec<u32> = (0..k).map(|i| if is_ordered { i % groups } else { i / 32 } as u32).collect();
                let stored = u32::from(version == "gptq");
                let qweight = down(&codes.chunks_exact(k).map(|row| words(row, bits)).collect::<Vec<_>>());
                let zero_rows = zeros
                    .chunks_exact(n)
                    .flat_map(|row| words(&row.iter().map(|z| z - stored).collect::<Vec<_>>(), bits));
                let values = (0..n * k).map(|at| {
                    let (row, i) = (at / k, at % k);
                    let place = group_of[i] as usize * n + row;
                    (codes[at] as i32 - zeros[place] as i32) as f32 * scales[place]
                });
                let stored = vec![
                    ("qweight", Dtype::I32, vec![k * bits / 32, n], bytes_of(&qweight)),
                    ("qzeros", Dtype::I32, vec![groups, n * bits / 32], bytes_of(&zero_rows.collect::<Vec<_>>())),
                    ("scales", Dtype::F32, vec![groups, n], le(&scales)),
                    ("g_idx", Dtype::I32, vec![k], bytes_of(&group_of)),
                ];
                (stored, values.collect())
            });
            let types = folder.check(&format!("{bits} bits {version} {is_ordered}"), 0.0);
            assert!(!types.contains(&DType::F32), "{types:?}");
        }
    }
}

#[test]
fn mlx_folders_of_every_width_are_read() {
    for bits in [2usize, 3, 4, 5, 6, 8] {
        let config = json!({"bits": bits, "group_size": 32});
        let folder = Folder::new(config, |seed, n, k| {
            let (groups, codes) = (k / 32, numbers(seed, n * k, 1 << bits));
            let scales: Vec<f32> = numbers(seed + 90, n * groups, 50).into_iter().map(scale_of).collect();
            let biases: Vec<f32> = scales.iter().map(|s| -7.5 * s).collect();
            let rows: Vec<u32> = codes.chunks_exact(k).flat_map(|row| words(row, bits)).collect();
            let value = |at: usize| scales[at / 32] * codes[at] as f32 + biases[at / 32];
            let stored = vec![
                ("weight", Dtype::U32, vec![n, k * bits / 32], bytes_of(&rows)),
                ("scales", Dtype::F32, vec![n, groups], le(&scales)),
                ("biases", Dtype::F32, vec![n, groups], le(&biases)),
            ];
            (stored, (0..n * k).map(value).collect())
        });
        folder.check(&format!("{bits} bits"), 1e-6);
    }
}

#[test]
fn bytes_and_eight_bit_floats_take_scales_of_all_rows_and_blocks() {
    let shapes: [fn(usize, usize) -> [usize; 2]; 3] =
        [|_, _| [1, 1], |n, _| [n, 1], |n, k| [n.div_ceil(32), k.div_ceil(32)]];
    for is_float in [false, true] {
        for (kind, shape) in shapes.iter().enumerate() {
            if !is_float && kind == 2 {
                continue;
            }
            let config = match (is_float, kind) {
                (true, 2) => json!({"quant_method": "fp8", "weight_block_size": [32, 32]}),
                (true, _) => json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
                _ => json!({"quant_method": "compressed-tensors", "format": "int-quantized"}),
            };
            let folder = Folder::new(config, |seed, n, k| {
                let [rows, groups] = shape(n, k);
                let codes: Vec<u8> = numbers(seed, n * k, 255).iter().map(|c| *c as u8).collect();
                let codes: Vec<u8> = codes.iter().map(|c| if is_float && c & 127 == 127 { 0 } else { *c }).collect();
                let scales: Vec<f32> = numbers(seed + 90, rows * groups, 50).into_iter().map(scale_of).collect();
                let value = |at: usize| {
                    let (row, i) = (at / k * rows / n, at % k);
                    let row = if kind == 2 { at / k / 32 } else { row };
                    let group = if groups == 1 { 0 } else { i / 32 };
                    let code = match is_float {
                        true => kvasir::model::quant::e4m3(codes[at]),
                        false => f32::from(codes[at] as i8),
                    };
                    code * scales[row * groups + group]
                };
                let suffix = if kind == 2 { "weight_scale_inv" } else { "weight_scale" };
                let dtype = if is_float { Dtype::F8_E4M3 } else { Dtype::I8 };
                let values = (0..n * k).map(value).collect();
                let scale_shape = if kind == 0 { vec![1] } else { vec![rows, groups] };
                let stored =
                    vec![("weight", dtype, vec![n, k], codes.clone()), (suffix, Dtype::F32, scale_shape, le(&scales))];
                (stored, values)
            });
            folder.check(&format!("floats {is_float}, scales {kind}"), 0.0);
        }
    }
}

#[test]
fn unknown_methods_and_missing_tensors_are_named() {
    let dir = Folder::new(json!({"bits": 4, "group_size": 32}), |_, n, k| {
        (vec![("weight", Dtype::F32, vec![n, k], le(&vec![0.0; n * k]))], Vec::new())
    });
    let cases = [
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "quantization method `bitsandbytes`"),
        (json!({"quant_method": "gptq", "bits": 5}), "GPTQ with 5 bits"),
        (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "GPTQ format `marlin`"),
        (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "AWQ version `gemv`"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "format `marlin-24`"),
        (json!({"quant_method": "gptq", "bits": 4}), "o_proj.qweight is missing"),
        (json!({"bits": 4, "group_size": 32}), "o_proj.scales is missing"),
        (json!({"bits": 4, "group_size": 32, "mode": "mxfp4"}), "MLX quantisation mode `mxfp4`"),
        (json!([1]), "quantization_config must be an object"),
    ];
    for (quantization, words) in cases {
        let mut folder = Folder { config: dir.config.clone(), tensors: dir.tensors.clone(), matrices: Vec::new() };
        folder.config["quantization_config"] = quantization;
        let text = Model::open(folder.write().path()).map_err(|e: ModelError| e.to_string()).expect_err("refused");
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(read_json(&dir.write().path().join("config.json"))["vocab_size"], 32);
}

/// The fixture of gpt-oss with its experts in 4-bit floats as published, and with the same numbers as plain floats.
pub fn mxfp4_and_plain() -> [tempfile::TempDir; 2] {
    let from = crate::support::core_fixtures().join("families/gpt_oss");
    let config = read_json(&from.join("config.json"));
    let bytes = std::fs::read(from.join("model.safetensors")).expect("readable");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
    const LEVELS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (mut packed, mut plain) = (Vec::new(), Vec::new());
    for (name, tensor) in file.tensors() {
        let (dtype, shape, data) = (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
        if !name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj") {
            packed.push((name.clone(), dtype, shape.clone(), data.clone()));
            plain.push((name, dtype, shape, data));
            continue;
        }
        // Stored `[experts, inputs, rows]`; in 4 bits `[experts, rows, inputs / 32, 16]`.
        let [experts, k, rows] = shape[..] else { panic!("{name}: {shape:?}") };
        let (mut blocks, mut scales) = (Vec::new(), Vec::new());
        let mut floats = vec![0f32; experts * k * rows];
        for e in 0..experts {
            for row in 0..rows {
                for group in 0..k / 32 {
                    let exponent = 118 + ((e + row + group) % 5) as u8;
                    scales.push(exponent);
                    for byte in 0..16 {
                        let codes = [0, 1].map(|i| ((row * 7 + e * 3 + (2 * byte + i) * 5 + group) % 16) as u8);
                        blocks.push(codes[0] | codes[1] << 4);
                        for (i, code) in codes.into_iter().enumerate() {
                            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                            let value = sign * LEVELS[usize::from(code & 7)] * 2f32.powi(i32::from(exponent) - 127);
                            floats[(e * k + group * 32 + 2 * byte + i) * rows + row] = value;
                        }
                    }
                }
            }
        }
        packed.push((format!("{name}_blocks"), Dtype::U8, vec![experts, rows, k / 32, 16], blocks));
        packed.push((format!("{name}_scales"), Dtype::U8, vec![experts, rows, k / 32], scales));
        plain.push((name, Dtype::F32, shape, le(&floats)));
    }
    let quantization = json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"] });
    let packed = Folder { config: with(&config, quantization), tensors: packed, matrices: Vec::new() };
    [packed, Folder { config, tensors: plain, matrices: Vec::new() }].map(|folder| folder.write())
}

fn with(config: &Value, quantization: Value) -> Value {
    let mut config = config.clone();
    config["quantization_config"] = quantization;
    config
}

#[test]
fn experts_in_4_bit_floats_are_the_numbers_that_they_stand_for() {
    let dirs = mxfp4_and_plain();
    let [packed, plain] = [&dirs[0], &dirs[1]].map(|dir| open(dir.path()));
    packed.verify_finite().expect("finite");
    assert_eq!((packed.spec(), packed.info().quant.as_str()), (plain.spec(), "MXFP4"));
    let mut num_packed = 0;
    for role in plain.spec().roles() {
        assert!(floats(&packed, role) == floats(&plain, role), "{role:?}");
        let form = packed.weight_form(role).expect("legal").expect("there");
        num_packed += usize::from(form.dtype == DType::MXFP4);
        assert_eq!(form.dtype == DType::MXFP4, matches!(role, WeightRole::Expert(..)) && !role.is_vector(), "{role:?}");
    }
    assert_eq!(num_packed, 2 * 4 * 3);
}

#[test]
fn a_folder_that_says_mxfp4_and_has_none_is_refused() {
    let dirs = mxfp4_and_plain();
    let config = std::fs::read(dirs[0].path().join("config.json")).expect("readable");
    std::fs::write(dirs[1].path().join("config.json"), config).expect("written");
    let refusal = Model::open(dirs[1].path()).expect_err("refused").to_string();
    assert!(refusal.contains("gate_up_proj_blocks is missing"), "{refusal}");
}
