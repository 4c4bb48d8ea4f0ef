//! Token ids and decoded text against the reference fixtures, exactly; streaming; broken files and templates beside it.

mod folders;
mod gguf_metadata;
mod malformed;
mod pieces;
mod templates;

use crate::support::{default_model, files_with_extension, fixtures, folders, full_fixtures, read_json};
use kvasir::tokenizer::{AddSpecial, Detokenizer, HfTokenizerFiles, Tokenizer, TokenizerError};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn read_if_present(path: &Path) -> Option<Value> {
    path.is_file().then(|| read_json(path))
}

fn hf_tokenizer(dir: &Path) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_hf(HfTokenizerFiles {
        tokenizer_json: std::fs::read(dir.join("tokenizer.json")).expect("tokenizer.json is readable"),
        tokenizer_config: read_if_present(&dir.join("tokenizer_config.json")),
        special_tokens_map: read_if_present(&dir.join("special_tokens_map.json")),
    })
}

fn ids_of(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids");
    ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Every case of a `tokenizer_cases.json`: ids with and without special tokens, text back, and streamed text.
fn check_cases(tokenizer: Tokenizer, cases: &Path) {
    let tokenizer = Arc::new(tokenizer);
    let cases_json = read_json(cases);
    let list = cases_json["cases"].as_array().expect("cases");
    assert!(list.len() >= 30, "{}: only {} cases", cases.display(), list.len());
    for case in list {
        let text = case["text"].as_str().expect("text");
        let at = format!("{}: {text:?}", cases.display());
        let ids = ids_of(&case["ids"]);
        assert_eq!(tokenizer.encode(text, AddSpecial::Yes).expect("encodable"), ids, "{at}");
        let bare = tokenizer.encode(text, AddSpecial::No).expect("encodable");
        assert_eq!(bare, ids_of(&case["ids_no_special"]), "{at}");
        for (skip, key) in [(false, "decoded"), (true, "decoded_skip_special")] {
            let decoded = tokenizer.decode(&ids, skip);
            assert_eq!(decoded, case[key].as_str().expect("decoded"), "{at}: {key}");
            assert_eq!(streamed(&tokenizer, &ids, skip), decoded, "{at}: streamed, {key}");
        }
    }
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut stream = Detokenizer::new(tokenizer.clone(), skip_special);
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text.push_str(&stream.finish());
    text
}

#[test]
fn tokenizer_json_gives_the_ids_and_texts_of_the_reference() {
    let mut checked = 0;
    for dir in folders(&fixtures().join("tiny")) {
        let cases = dir.join("tokenizer_cases.json");
        check_cases(hf_tokenizer(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())), &cases);
        checked += 1;
    }
    assert!(checked >= 4, "only {checked} tokenizers found");
}

#[test]
fn gguf_vocabulary_gives_the_ids_and_texts_of_its_hugging_face_original() {
    let root = fixtures().join("gguf");
    let mut checked = 0;
    for dir in folders(&root) {
        for file in files_with_extension(&dir, "gguf") {
            let tokenizer = Tokenizer::from_gguf(gguf_metadata::vocab(&file)).expect("a valid vocabulary");
            check_cases(tokenizer, &root.join("tokenizer_cases.json"));
            checked += 1;
        }
    }
    assert!(checked >= 3, "only {checked} files found");
}

/// Texts and their ids, from the files beside a vocabulary.
fn vectors(file: &Path) -> Vec<(String, Vec<u32>)> {
    let beside = |extension: &str| {
        let path = file.with_extension(format!("gguf.{extension}"));
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let (texts, ids) = (beside("inp"), beside("out"));
    let mut texts: Vec<String> = texts.split("\n__ggml_vocab_test__\n").map(str::to_owned).collect();
    assert_eq!(texts.pop().as_deref(), Some(""), "the last text is followed by the mark");
    let ids = ids.lines().map(|ids| ids.split_whitespace().map(|id| id.parse().expect("an id")).collect());
    let ids: Vec<Vec<u32>> = ids.collect();
    assert_eq!(texts.len(), ids.len(), "{}", file.display());
    texts.into_iter().zip(ids).collect()
}

#[test]
fn gguf_vocabularies_give_llama_cpps_ids() {
    let Some(root) = full_fixtures() else { return };
    let mut checked = 0;
    for file in files_with_extension(&root.join("tokenizers"), "gguf") {
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf_metadata::vocab(&file)).expect("a valid vocabulary"));
        for (text, expected) in vectors(&file) {
            let found = tokenizer.encode_plain(&text).expect("encodable");
            assert_eq!(found, expected, "{}: {text:?}", file.display());
            assert_eq!(tokenizer.decode(&found, false), text, "{}: back to text", file.display());
            assert_eq!(streamed(&tokenizer, &found, false), text, "{}: streamed", file.display());
            checked += 1;
        }
    }
    assert!(checked >= 200, "only {checked} strings compared");
}

#[test]
fn default_model_encodes_the_reference_prompts_exactly() {
    let Some(model) = default_model() else { return };
    let dir = fixtures().join("smollm2");
    let tokenizer = Tokenizer::from_gguf(gguf_metadata::vocab(&model)).expect("a valid vocabulary");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some("<|im_start|>"), Some("<|im_end|>")));
    let bytes = std::fs::read(dir.join("reference.safetensors")).expect("reference.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("valid safetensors");
    let prompts = read_json(&dir.join("reference.json"));
    for prompt in prompts["prompts"].as_array().expect("prompts") {
        let name = prompt["name"].as_str().expect("name");
        let tensor = tensors.tensor(&format!("{name}.input_ids")).expect("input_ids");
        let expected: Vec<u32> =
            tensor.data().chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")) as u32).collect();
        let text = prompt["text"].as_str().expect("text");
        for special in [AddSpecial::No, AddSpecial::Yes] {
            assert_eq!(tokenizer.encode(text, special).expect("encodable"), expected, "{name}, {special:?}");
        }
        assert_eq!(tokenizer.decode(&expected, false), text, "{name}");
        let greedy = ids_of(&prompt["greedy_ids"]);
        assert_eq!(tokenizer.decode(&greedy, false), prompt["greedy_text"].as_str().expect("greedy_text"), "{name}");
    }
}

#[test]
fn special_tokens_are_found_in_rendered_text_but_not_in_plain_text() {
    let tokenizer = hf_tokenizer(&fixtures().join("tiny/qwen2_sharded")).expect("a valid tokenizer");
    let end = tokenizer.token_id("<|im_end|>").expect("it has the token");
    assert!(tokenizer.is_special(end));
    assert!(tokenizer.end_of_turn_ids().contains(&end));
    let text = "a<|im_end|>b";
    assert!(tokenizer.encode(text, AddSpecial::No).expect("encodable").contains(&end));
    let plain = tokenizer.encode_plain(text).expect("encodable");
    assert!(!plain.contains(&end));
    assert_eq!(tokenizer.decode(&plain, true), text);
    assert_eq!(tokenizer.decode(&[end], true), "");
    assert_eq!(tokenizer.token_text(end), "<|im_end|>");
}

#[test]
fn token_display_shows_partial_characters_as_bytes() {
    let tokenizer = hf_tokenizer(&fixtures().join("tiny/mistral_swa")).expect("a valid tokenizer");
    let byte = tokenizer.token_id("<0xE2>").expect("byte fallback");
    assert_eq!((tokenizer.token_text(byte).as_str(), tokenizer.token_bytes(byte)), ("<0xE2>", vec![0xe2]));
    assert_eq!(tokenizer.token_bytes(u32::MAX), Vec::<u8>::new());
}

mod streaming {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static BYTE_LEVEL: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| tokenizer("tiny/qwen2_sharded"));
    static SENTENCEPIECE: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| tokenizer("tiny/mistral_swa"));

    fn tokenizer(dir: &str) -> Arc<Tokenizer> {
        Arc::new(hf_tokenizer(&fixtures().join(dir)).expect("a valid tokenizer"))
    }

    /// Streams `ids`; checks after each token that what came so far is what the whole gives up to there.
    fn check(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> Result<(), TestCaseError> {
        let whole = tokenizer.decode(ids, skip_special);
        let mut stream = Detokenizer::new(tokenizer.clone(), skip_special);
        let mut text = String::new();
        for (i, &id) in ids.iter().enumerate() {
            text.push_str(&stream.push(id));
            prop_assert!(whole.starts_with(&text), "{text:?} is no start of {whole:?}");
            let mut prefix = stream.clone();
            let ended = format!("{text}{}", prefix.finish());
            prop_assert_eq!(ended, tokenizer.decode(&ids[..=i], skip_special), "prefix of {} tokens", i + 1);
        }
        text.push_str(&stream.finish());
        prop_assert_eq!(text, whole);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

        #[test]
        fn any_tokens_stream_to_what_they_decode_to(ids in proptest::collection::vec(0u32..520, 0..40), skip: bool) {
            check(&BYTE_LEVEL, &ids, skip)?;
            check(&SENTENCEPIECE, &ids, skip)?;
        }

        #[test]
        fn any_text_comes_back_whole_and_without_replacement_characters(text in "\\PC{0,40}") {
            prop_assume!(!text.contains('\u{fffd}') && !text.contains('▁') && !text.contains('<'));
            let ids = SENTENCEPIECE.encode_plain(&text).expect("encodable");
            prop_assert_eq!(SENTENCEPIECE.decode(&ids, true), text);
            check(&SENTENCEPIECE, &ids, true)?;
        }
    }
}

#[test]
fn streaming_text_that_continues_keeps_its_leading_space() {
    let tokenizer = Arc::new(hf_tokenizer(&fixtures().join("tiny/mistral_swa")).expect("a valid tokenizer"));
    let ids = tokenizer.encode("and so", AddSpecial::No).expect("encodable");
    assert_eq!(streamed(&tokenizer, &ids, true), "and so");
    let mut stream = Detokenizer::continuing(tokenizer, true);
    let text: String = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(text, " and so");
}

#[test]
fn long_text_is_encoded_in_time_that_grows_like_its_length() {
    let start = Instant::now();
    for dir in ["tiny/llama", "tiny/mistral_swa", "tiny/qwen3_bf16"] {
        let tokenizer = hf_tokenizer(&fixtures().join(dir)).expect("a valid tokenizer");
        for unit in ["a", " ", "\n", "word ", "é漢😀"] {
            let text = unit.repeat(100_000 / unit.len());
            let ids = tokenizer.encode_plain(&text).expect("encodable");
            assert_eq!(tokenizer.decode(&ids, true), text);
        }
    }
    assert!(start.elapsed() < Duration::from_secs(60), "took {:?}", start.elapsed());
}
