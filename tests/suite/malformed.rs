//! Broken model files end in an error that names the fault: no panic, no hang, no balloon.
//! The corpus says what is wrong with each case; faults of tokenizers and templates are tried where those are read.

use crate::support::{full_fixtures, read_json};
use kvasir::model::dtype::DType;
use kvasir::model::gguf::GgufFile;
use kvasir::model::{Model, ModelError};
use kvasir::tokenizer::AddSpecial;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Loads whose fault lies in the tokenizer: the model part must not mind them.
fn is_tokenizer_case(path: &str) -> bool {
    path.starts_with("hf/tok_") || path.starts_with("hf/tpl_") || path == "gguf/pre_unknown.gguf"
}

/// What the model part does before a GPU is touched.
fn load(path: &Path) -> Result<Model, ModelError> {
    let model = Model::open(path)?;
    model.verify_finite()?;
    Ok(model)
}

#[test]
fn every_broken_model_of_the_corpus_is_refused_and_the_controls_open() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    let manifest = read_json(&root.join("manifest.json"));
    let mut wrong = Vec::new();
    let (mut refused, mut opened) = (0, 0);
    for case in manifest["cases"].as_array().expect("a list") {
        let name = case["path"].as_str().expect("a path");
        let fault = case["fault"].as_str().expect("a fault");
        let may_open = is_tokenizer_case(name) || name.contains("/valid") || name == "gguf/eos_out_of_range.gguf";
        let begin = Instant::now();
        let result = load(&root.join(name));
        if begin.elapsed() > Duration::from_secs(5) {
            wrong.push(format!("{name}: took {:?}", begin.elapsed()));
        }
        match result {
            Ok(_) if may_open => opened += 1,
            Ok(_) => wrong.push(format!("{name}: opened although {fault}")),
            Err(e) if may_open => wrong.push(format!("{name}: refused although it may open: {e}")),
            Err(e) => {
                println!("{name}: {e}");
                refused += 1;
                if !e.to_string().contains(name.rsplit('/').next().expect("a name")) {
                    wrong.push(format!("{name}: the error does not name the file: {e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(refused >= 70 && opened >= 2, "{refused} refused, {opened} opened");
}

#[test]
fn errors_name_the_field_or_the_tensor_at_fault() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    let expectations = [
        ("hf/cfg_negative_eps", "epsilon"),
        ("hf/cfg_missing_num_layers", "num_hidden_layers is missing"),
        ("hf/cfg_negative_window", "sliding_window"),
        ("hf/cfg_huge_int", "hidden_size"),
        ("hf/cfg_rope_no_factor", "factor is missing"),
        ("hf/cfg_encoder_architecture", "BertForMaskedLM"),
        ("hf/cfg_quant_unknown", "`nope`"),
        ("hf/cfg_utf16", "UTF-8"),
        ("hf/cfg_untied_without_head", "lm_head.weight"),
        ("hf/st_duplicate_key", "q_proj.weight appears twice"),
        ("hf/st_nan_weight", "model.norm.weight"),
        ("hf/st_wrong_shape", "q_proj.weight has the shape [8, 32]"),
        ("hf/index_absolute_path", "/etc/passwd"),
        ("gguf/nan_scale.gguf", "blk.0.attn_q.weight"),
        ("gguf/tensor_missing.gguf", "blk.0.attn_v.weight"),
        ("gguf/tensor_type_removed.gguf", "Q4_2"),
        ("gguf/big_endian.gguf", "big-endian"),
        ("gguf/duplicate_key.gguf", "llama.block_count appears twice"),
        ("gguf/split_first_only.gguf", "split.count"),
        ("gguf/token_type_short.gguf", "token_type has 5 entries"),
    ];
    for (name, words) in expectations {
        let text = load(&root.join(name)).expect_err(name).to_string();
        assert!(text.contains(words), "{name}: {text}");
    }
}

#[test]
fn a_stop_token_outside_the_vocabulary_is_dropped_with_a_warning() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    let model = load(&root.join("gguf/eos_out_of_range.gguf")).expect("opens");
    assert!(model.spec().eos_token_ids.is_empty());
    assert!(model.warnings()[0].contains("999999"), "{:?}", model.warnings());
}

#[test]
fn a_template_that_is_no_text_is_reported_when_asked_for() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    let model = load(&root.join("hf/tpl_not_string")).expect("opens");
    let text = model.chat_template().expect_err("not a text").to_string();
    assert!(text.contains("chat_template must be a string"), "{text}");
}

/// Writes little GGUF files by hand: what a test does not set is a valid file with one tensor.
struct Gguf {
    pairs: Vec<u8>,
    num_pairs: u64,
    tensors: Vec<u8>,
    num_tensors: u64,
    data: Vec<u8>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    fn new() -> Gguf {
        Gguf { pairs: Vec::new(), num_pairs: 0, tensors: Vec::new(), num_tensors: 0, data: Vec::new() }
    }

    fn pair(mut self, key: &str, type_id: u32, value: &[u8]) -> Gguf {
        text(&mut self.pairs, key);
        self.pairs.extend(type_id.to_le_bytes());
        self.pairs.extend(value);
        self.num_pairs += 1;
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, offset: u64) -> Gguf {
        text(&mut self.tensors, name);
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| self.tensors.extend(d.to_le_bytes()));
        self.tensors.extend(type_id.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.num_tensors += 1;
        self
    }

    fn data(mut self, num_bytes: usize) -> Gguf {
        self.data = vec![0; num_bytes];
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.num_tensors.to_le_bytes());
        out.extend(self.num_pairs.to_le_bytes());
        out.extend(&self.pairs);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }

    fn open(&self) -> Result<GgufFile, ModelError> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path: PathBuf = dir.path().join("m.gguf");
        std::fs::write(&path, self.bytes()).expect("written");
        GgufFile::open(&path)
    }

    fn refusal(&self) -> String {
        self.open().expect_err("refused").to_string()
    }
}

#[test]
fn a_small_gguf_reads_back() {
    let mut list = 8u32.to_le_bytes().to_vec();
    list.extend(2u64.to_le_bytes());
    text(&mut list, "a");
    text(&mut list, "bß");
    let file = Gguf::new().pair("n", 5, &(-3i32).to_le_bytes()).pair("l", 9, &list).tensor("t", &[4, 2], 0, 0).data(32);
    let file = file.open().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(file.strings("l").expect("strings"), Some(vec!["a", "bß"]));
    assert!(file.u32("n").expect_err("negative").to_string().contains("n does not fit"));
    assert!(file.string("n").expect_err("a number").to_string().contains("must be a string, not a whole number"));
    let tensor = file.tensor("t").expect("there");
    assert_eq!((tensor.ty.dtype, tensor.shape.as_slice()), (Some(DType::F32), &[2u64, 4][..]));
    assert_eq!(file.bytes(tensor).len(), 32);
}

#[test]
fn impossible_ggufs_are_refused_by_the_reader() {
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()[..]].concat();
    let cases = [
        (Gguf::new().pair("x", 9, &array(6, 1 << 60)), "counts 1152921504606846976 elements of x"),
        (Gguf::new().pair("x", 9, &array(8, 1 << 60)), "counts 1152921504606846976 elements of x"),
        (Gguf::new().pair("x", 9, &array(9, 1).repeat(5)), "x nests arrays more than 4 deep"),
        (Gguf::new().pair("x", 8, &u64::MAX.to_le_bytes()), "the file ends inside x"),
        (Gguf::new().tensor("t", &[u64::MAX, 2], 0, 0), "more elements than 64 bits"),
        (Gguf::new().tensor("t", &[1 << 62], 0, 0), "reaches beyond the end"),
        (Gguf::new().tensor("t", &[0], 0, 0), "dimension of 0"),
        (Gguf::new().tensor("t", &[31], 2, 0).data(32), "no multiple of 32 (Q4_0)"),
        (Gguf::new().tensor("t", &[1], 0, 4).data(64), "no multiple of the alignment"),
        (Gguf::new().tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 32).data(64), "tensor t appears twice"),
        (Gguf::new().tensor("t", &[16], 0, 0).tensor("u", &[8], 0, 32).data(64), "tensor u overlaps tensor t"),
        (Gguf::new().tensor("t", &[1, 1, 1, 1, 1], 0, 0).data(32), "5 dimensions"),
    ];
    for (file, words) in cases {
        let refusal = file.refusal();
        assert!(refusal.contains(words), "{words}: {refusal}");
    }
}

#[test]
fn an_unsupported_tensor_type_is_refused_by_name_before_anything_is_read() {
    let Some(root) = full_fixtures() else { return };
    let mut bytes = std::fs::read(root.join("malformed/gguf/valid.gguf")).expect("readable");
    let name = b"blk.0.attn_norm.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).expect("there") + name.len() + 4 + 8;
    assert_eq!(bytes[at..at + 4], 0u32.to_le_bytes(), "the norm is F32");
    bytes[at..at + 4].copy_from_slice(&26u32.to_le_bytes());
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, &bytes).expect("written");
    let text = Model::open(&path).expect_err("refused").to_string();
    assert!(text.contains("blk.0.attn_norm.weight has type I32, which is not supported"), "{text}");
}

/// Truncation and flipped bytes at every place of a valid file: an error or a model, never a panic.
#[test]
fn no_cut_and_no_flipped_byte_panics() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let gguf = std::fs::read(root.join("gguf/valid.gguf")).expect("readable");
    let path = dir.path().join("m.gguf");
    let header = gguf.windows(18).rposition(|w| w == b"output_norm.weight").expect("there") + 64;
    for at in 0..header {
        for change in [0x01u8, 0x80, 0xff] {
            let mut bytes = gguf.clone();
            bytes[at] ^= change;
            std::fs::write(&path, &bytes).expect("written");
            let _ = Model::open(&path);
        }
        if at % 7 == 0 {
            std::fs::write(&path, &gguf[..at]).expect("written");
            assert!(Model::open(&path).is_err(), "cut at {at}");
        }
    }
    let folder = dir.path().join("hf");
    std::fs::create_dir(&folder).expect("made");
    std::fs::copy(root.join("hf/valid/config.json"), folder.join("config.json")).expect("copied");
    let weights = std::fs::read(root.join("hf/valid/model.safetensors")).expect("readable");
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().expect("8 bytes")) as usize;
    for at in 0..header {
        let mut bytes = weights.clone();
        bytes[at] ^= 0x11;
        std::fs::write(folder.join("model.safetensors"), &bytes).expect("written");
        let _ = Model::open(&folder);
    }
}

/// A sound folder with one value of its config changed.
fn changed_folder(change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let from = crate::support::core_fixtures().join("tiny/llama");
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(from.join(name), dir.path().join(name)).expect("copied");
    }
    let mut config = read_json(&from.join("config.json"));
    change(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    dir
}

/// The refusal before a GPU is opened, and that it came at once.
fn quick_refusal(path: &Path) -> String {
    let begin = Instant::now();
    let refusal = kvasir::engine::loader::read_text_side(path).err().expect("refused").message;
    assert!(begin.elapsed() < Duration::from_secs(1), "took {:?}: {refusal}", begin.elapsed());
    refusal
}

#[test]
fn unknown_families_formats_and_tokenizers_are_refused_by_name_at_once() {
    let family = changed_folder(|config| {
        config["model_type"] = "mamba7".into();
        config["architectures"] = serde_json::json!(["Mamba7ForCausalLM"]);
    });
    assert!(quick_refusal(family.path()).contains("mamba7"));
    let scheme = changed_folder(|config| config["quantization_config"] = serde_json::json!({"quant_method": "hqq9"}));
    assert!(quick_refusal(scheme.path()).contains("hqq9"));
    let context = changed_folder(|config| config["max_position_embeddings"] = 1.into());
    let refusal = quick_refusal(context.path());
    assert!(refusal.contains("max_position_embeddings") && refusal.contains("config.json"), "{refusal}");
    let tokenizer = changed_folder(|_| ());
    let path = tokenizer.path().join("tokenizer.json");
    let mut json = read_json(&path);
    json["model"]["type"] = "Rune".into();
    std::fs::write(&path, json.to_string()).expect("written");
    assert!(quick_refusal(tokenizer.path()).contains("Rune"));
    std::fs::remove_file(&path).expect("removed");
    assert!(quick_refusal(tokenizer.path()).contains("tokenizer.json"));
    let Some(root) = full_fixtures().map(|f| f.join("malformed/gguf")) else { return };
    for (name, words) in [("tensor_type_removed.gguf", "Q4_2"), ("pre_unknown.gguf", "pre")] {
        let refusal = quick_refusal(&root.join(name));
        assert!(refusal.contains(words), "{name}: {refusal}");
    }
}

/// The tiny llama, whose embedding has 512 rows, with `change` made to its tokenizer.
pub fn with_tokenizer(change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let folder = changed_folder(|_| ());
    let path = folder.path().join("tokenizer.json");
    let mut json = read_json(&path);
    change(&mut json);
    std::fs::write(&path, json.to_string()).expect("written");
    folder
}

pub fn added_token(text: &str, id: u64) -> serde_json::Value {
    serde_json::json!({
        "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true
    })
}

#[test]
fn an_added_token_beyond_the_embedding_is_refused_where_it_is_used() {
    let add = |text: &'static str, id: u64| {
        with_tokenizer(move |json| json["added_tokens"].as_array_mut().expect("a list").push(added_token(text, id)))
    };
    let beyond = add("<image_soft_token>", 512);
    let side = kvasir::engine::loader::read_text_side(beyond.path()).expect("loads");
    assert_eq!(side.tokenizer.token_id("<image_soft_token>"), Some(512));
    let fault = side.tokenizer.encode("an <image_soft_token>", AddSpecial::No).expect_err("no such row").to_string();
    assert!(fault.contains("<image_soft_token>") && fault.contains("512"), "{fault}");
    assert!(side.tokenizer.encode("an image", AddSpecial::Yes).is_ok());
    let plain = side.tokenizer.encode_plain("<image_soft_token>").expect("characters");
    assert!(plain.iter().all(|&id| id < 512), "{plain:?}");
    assert!(side.eos_token_ids.iter().all(|&id| id < 512));
    // One that would end outputs cannot.
    let end = add("<end_of_turn>", 512);
    let side = kvasir::engine::loader::read_text_side(end.path()).expect("loads");
    assert!(!side.eos_token_ids.contains(&512), "{:?}", side.eos_token_ids);
    let refusal = quick_refusal(add("<far>", 4_000_000_000).path());
    assert!(refusal.contains("4000000000"), "{refusal}");
    let larger = with_tokenizer(|json| json["model"]["vocab"]["longer_than_the_rest"] = 512.into());
    let refusal = quick_refusal(larger.path());
    assert!(refusal.contains("the tokenizer has 513 tokens, the model's embedding only 512"), "{refusal}");
}
