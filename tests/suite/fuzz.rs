//! Valid files with random damage: what reads them gives a value or an error, soon, and never panics.
//!
//! A normal run tries some hundred damaged copies of each seed; `FUZZ_SECONDS=300 cargo test --release fuzz::` goes on for
//! so long per test, from `SEED` on. A finding is printed with its number and its bytes are kept in the temporary folder,
//! so that it can become a case of its own.

mod damage;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use damage::{Rng, damaged_bytes, damaged_json};
use kvasir::engine::loader::read_text_side;
use kvasir::model::Model;
use kvasir::tokenizer::folder::{self, FolderVocab};
use kvasir::tokenizer::{AddSpecial, ChatTemplate, HfTokenizerFiles, Now, RenderRequest, SpecialTokens, Tokenizer};
use serde_json::{Value, json};

use crate::support::{core_fixtures, files_with_extension, fixtures, full_fixtures, fuzz_seconds, fuzz_seed};

/// No input may take longer than this, however slow the machine.
const LIMIT: Duration = Duration::from_secs(10);
/// Characters that tokenizers treat in different ways.
const TEXT: &str = "Ein Text, 12345 <s>\u{1F600}\u{0301} \t\n  def f(x): return 'it''s'";

/// A valid file and the bytes of it in which its structure lies.
struct Seed {
    name: String,
    bytes: Vec<u8>,
    within: usize,
    is_json: bool,
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn seed(path: &Path) -> Seed {
    let bytes = read(path);
    let is_json = path.extension().is_some_and(|x| x == "json");
    Seed { name: path.display().to_string(), within: bytes.len(), bytes, is_json }
}

/// Runs `check` on damaged copies of the seeds, with the seed's number, `rounds` of each or until the time is up.
fn fuzz(what: &str, seeds: &[Seed], rounds: u64, check: impl Fn(usize, &[u8])) {
    let (begin, time) = (Instant::now(), fuzz_seconds().map(Duration::from_secs));
    let first = fuzz_seed();
    let mut slowest = Duration::ZERO;
    let is_over = |i: u64| time.map_or(i >= rounds * seeds.len() as u64, |time| begin.elapsed() >= time);
    let mut tried = 0;
    while !is_over(tried) {
        let idx = (tried % seeds.len() as u64) as usize;
        let seed = &seeds[idx];
        let mut rng = Rng::new(first.wrapping_add(tried));
        let bytes = match seed.is_json && rng.below(3) > 0 {
            true => damaged_json(&seed.bytes, &mut rng),
            false => damaged_bytes(&seed.bytes, seed.within, &mut rng),
        };
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(idx, &bytes)));
        slowest = slowest.max(started.elapsed());
        if result.is_err() || started.elapsed() > LIMIT {
            let kept = std::env::temp_dir().join(format!("kvasir-fuzz-{what}-{}", first.wrapping_add(tried)));
            std::fs::write(&kept, &bytes).expect("a finding can be written");
            let fault = if result.is_err() { "a panic" } else { "too slow" };
            panic!("{fault} ({:?}) on damage {tried} of {}: {}", started.elapsed(), seed.name, kept.display());
        }
        tried += 1;
    }
    println!("{what}: {tried} damaged files in {:?}, the slowest took {slowest:?}", begin.elapsed());
}

/// A model as far as it is read before a GPU is opened: weights, tokenizer and template.
fn open_model(path: &Path) {
    if let Ok(model) = Model::open(path) {
        let _ = (model.verify_finite(), model.chat_templates());
    }
    if let Ok(text) = read_text_side(path) {
        encode(&text.tokenizer);
    }
}

fn encode(tokenizer: &Tokenizer) {
    for special in [AddSpecial::Yes, AddSpecial::No] {
        if let Ok(ids) = tokenizer.encode(TEXT, special) {
            let _ = tokenizer.decode(&ids, false);
        }
    }
}

#[test]
fn damaged_ggufs_open_or_are_refused() {
    let files = files_with_extension(&core_fixtures().join("gguf/q4_k"), "gguf");
    let more = full_fixtures().map(|root| root.join("malformed/gguf/valid.gguf"));
    let seeds: Vec<Seed> = files.iter().chain(&more).map(|path| Seed { within: 40_000, ..seed(path) }).collect();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("m.gguf");
    fuzz("gguf", &seeds, 150, |_, bytes| {
        std::fs::write(&path, bytes).expect("written");
        open_model(&path);
    });
}

/// Folders with weights of each kind.
fn model_folders() -> Vec<PathBuf> {
    let tiny = core_fixtures().join("tiny/llama");
    let quant = ["gptq_4bit_g32_actorder", "ct_w4a16_g32", "awq_4bit_g32"].map(|name| format!("quant/{name}"));
    let full = full_fixtures();
    let more = full.iter().flat_map(|root| quant.iter().map(|name| root.join(name)));
    std::iter::once(tiny).chain(more).collect()
}

/// Temporary folders that have this file of each.
fn copies(folders: Vec<PathBuf>, name: &str) -> (Vec<PathBuf>, Vec<tempfile::TempDir>) {
    let copy = |folder: &PathBuf| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::copy(folder.join(name), dir.path().join(name)).expect("copied");
        dir
    };
    let copies = folders.iter().map(copy).collect();
    (folders, copies)
}

#[test]
fn damaged_safetensors_headers_open_or_are_refused() {
    let (folders, copies) = copies(model_folders(), "config.json");
    let of_header = |folder: &PathBuf| {
        let whole = seed(&folder.join("model.safetensors"));
        let header = 8 + u64::from_le_bytes(whole.bytes[..8].try_into().expect("8 bytes")) as usize;
        Seed { within: header, ..whole }
    };
    let seeds: Vec<Seed> = folders.iter().map(of_header).collect();
    fuzz("safetensors", &seeds, 60, |idx, bytes| {
        std::fs::write(copies[idx].path().join("model.safetensors"), bytes).expect("written");
        open_model(copies[idx].path());
    });
}

#[test]
fn damaged_configs_open_or_are_refused() {
    let families = crate::support::folders(&core_fixtures().join("families"));
    let (folders, copies) = copies(model_folders().into_iter().chain(families).collect(), "model.safetensors");
    let seeds: Vec<Seed> = folders.iter().map(|folder| seed(&folder.join("config.json"))).collect();
    fuzz("config", &seeds, 40, |idx, bytes| {
        std::fs::write(copies[idx].path().join("config.json"), bytes).expect("written");
        open_model(copies[idx].path());
    });
}

#[test]
fn damaged_tokenizers_encode_or_are_refused() {
    let names = ["llama", "gpt2", "gemma3_text", "qwen3_bf16"];
    let paths = names.map(|name| fixtures().join("tiny").join(name).join("tokenizer.json"));
    let seeds: Vec<Seed> = paths.iter().filter(|path| path.exists()).map(|path| seed(path)).collect();
    fuzz("tokenizer", &seeds, 60, |_, bytes| {
        let files =
            HfTokenizerFiles { tokenizer_json: bytes.to_vec(), tokenizer_config: None, special_tokens_map: None };
        if let Ok(tokenizer) = Tokenizer::from_hf(files) {
            encode(&tokenizer);
        }
    });
}

#[test]
fn damaged_vocabularies_of_folders_encode_or_are_refused() {
    // Pieces of a SentencePiece model: text, score, type.
    let pieces = (0..40u8).flat_map(|i| [10, 9, 10, 2, b'a' + i % 26, b'a', 21, i, 0, 0, 63]).collect::<Vec<u8>>();
    let ranks: String = (0..=255u8).map(|i| format!("{} {i}\n", damage::base64(&[i]))).collect();
    let seeds = [("sentencepiece", pieces), ("tiktoken", ranks.into_bytes())];
    let seeds = seeds.map(|(name, bytes)| Seed { name: name.into(), within: bytes.len(), bytes, is_json: false });
    fuzz("vocabulary", &seeds, 200, |_, bytes| {
        let files = FolderVocab { tokenizer_model: Some(bytes.to_vec()), ..FolderVocab::default() };
        if let Ok(Some(vocab)) = folder::read(files)
            && let Ok(tokenizer) = Tokenizer::from_gguf(vocab)
        {
            encode(&tokenizer);
        }
    });
}

#[test]
fn damaged_templates_render_or_end_in_an_error() {
    let files = files_with_extension(&core_fixtures().join("chat_templates"), "jinja");
    let seeds: Vec<Seed> = files.iter().map(|path| seed(path)).collect();
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "name": "f", "content": "7"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    fuzz("template", &seeds, 12, |_, bytes| {
        let source = String::from_utf8_lossy(bytes);
        let Ok(template) = ChatTemplate::new(&source, SpecialTokens::default()) else { return };
        let _ = template.render(&RenderRequest {
            messages: &messages,
            tools: Some(&tools),
            add_generation_prompt: true,
            now: Now::parse("2024-07-26T12:34:56").expect("a date"),
            extra: &BTreeMap::<String, Value>::new(),
        });
    });
}
