//! Broken tokenizer files and vocabularies end in an error that names the file and the fault, soon and without a panic.

use super::{gguf_metadata, hf_tokenizer};
use crate::support::{fixtures, full_fixtures, read_json};
use kvasir::tokenizer::chat_template::template_of_config;
use kvasir::tokenizer::{AddSpecial, ChatTemplate, GgufVocab, HfTokenizerFiles, Now, RenderRequest, SpecialTokens};
use kvasir::tokenizer::{Tokenizer, TokenizerError};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

fn refused(loaded: Result<Tokenizer, TokenizerError>, words: &[&str]) {
    let message = loaded.map(|_| ()).expect_err("it is broken").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word:?}");
    }
}

#[test]
fn broken_tokenizer_json_is_refused_by_name() {
    let Some(root) = full_fixtures() else { return };
    let mut checked = 0;
    for case in read_json(&root.join("malformed/manifest.json"))["cases"].as_array().expect("cases") {
        let path = case["path"].as_str().expect("path");
        if path.starts_with("hf/tok_") && case["stage"] == "load" {
            let loaded = hf_tokenizer(&root.join("malformed").join(path));
            assert!(loaded.is_err(), "{path} was loaded: {}", case["fault"]);
            refused(loaded, &["tokenizer.json: "]);
            checked += 1;
        }
    }
    assert!(checked >= 9, "only {checked} files found");
    assert!(hf_tokenizer(&root.join("malformed/hf/valid")).is_ok(), "the valid control must load");
}

#[test]
fn broken_vocabularies_of_the_fixtures_are_refused_by_name() {
    let Some(root) = full_fixtures() else { return };
    let load = |name: &str| Tokenizer::from_gguf(gguf_metadata::vocab(&root.join("malformed/gguf").join(name)));
    refused(load("token_type_short.gguf"), &["tokenizer.ggml.token_type", "5 entries", "272"]);
    refused(load("pre_unknown.gguf"), &["tokenizer.ggml.pre", "martian"]);
    refused(load("eos_out_of_range.gguf"), &["tokenizer.ggml.eos_token_id", "999999", "272"]);
    assert!(load("valid.gguf").is_ok(), "the valid control must load");
}

/// A byte-level vocabulary small enough to break by hand.
fn small_bpe() -> GgufVocab {
    let tokens = ["a", "b", "ab", "<s>"].map(str::to_owned).to_vec();
    GgufVocab {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        scores: Vec::new(),
        token_types: vec![1, 1, 1, 3],
        merges: vec!["a b".to_owned()],
        bos: Some(3),
        eos: Some(3),
        unk: None,
        pad: None,
        add_bos: None,
        add_eos: None,
        tokens,
        ..GgufVocab::default()
    }
}

#[test]
fn broken_gguf_fields_are_refused_by_key() {
    let load = Tokenizer::from_gguf;
    let good = load(small_bpe()).expect("the unbroken one loads");
    assert_eq!(good.encode("ab<s>", AddSpecial::Yes).expect("encodable"), [2, 3]);

    refused(load(GgufVocab { tokens: Vec::new(), ..small_bpe() }), &["tokenizer.ggml.tokens"]);
    refused(load(GgufVocab { model: "rwkv".to_owned(), ..small_bpe() }), &["tokenizer.ggml.model", "rwkv"]);
    refused(load(GgufVocab { merges: vec!["ab".to_owned()], ..small_bpe() }), &["tokenizer.ggml.merges", "entry 0"]);
    refused(load(GgufVocab { merges: vec!["a x".to_owned()], ..small_bpe() }), &["tokenizer.ggml.merges", "x"]);
    refused(load(GgufVocab { token_types: vec![1, 1, 1, 9], ..small_bpe() }), &["token_type", "type 9"]);
    refused(load(GgufVocab { token_types: vec![1, 1, 6, 3], ..small_bpe() }), &["token_type", "no byte token"]);
    refused(load(GgufVocab { bos: None, add_bos: Some(true), ..small_bpe() }), &["add_bos_token"]);
    refused(load(GgufVocab { model: "llama".to_owned(), ..small_bpe() }), &["tokenizer.ggml.scores", "0 entries"]);
}

#[test]
fn begin_and_end_are_added_as_the_file_says() {
    let vocab = GgufVocab { add_bos: Some(true), add_eos: Some(true), ..small_bpe() };
    let tokenizer = Tokenizer::from_gguf(vocab).expect("valid");
    assert_eq!(tokenizer.encode("ab", AddSpecial::Yes).expect("encodable"), [3, 2, 3]);
    assert_eq!(tokenizer.encode("ab", AddSpecial::No).expect("encodable"), [2]);
}

#[test]
fn contradicting_fields_of_tokenizer_json_are_an_error_and_no_panic() {
    let good = read_json(&fixtures().join("tiny/llama/tokenizer.json"));
    let load = |json: &serde_json::Value| {
        Tokenizer::from_hf(HfTokenizerFiles {
            tokenizer_json: json.to_string().into_bytes(),
            tokenizer_config: None,
            special_tokens_map: None,
        })
    };
    assert!(load(&good).is_ok());
    let broken = |pointer: &str, value: serde_json::Value| {
        let mut json = good.clone();
        *json.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
        load(&json)
    };
    refused(broken("/model/continuing_subword_prefix", "much longer than any merge".into()), &["tokenizer.json"]);
    refused(broken("/model/vocab/!", serde_json::json!(4_000_000_000_u32)), &["tokenizer.json", "4000000000"]);
    refused(broken("/model/dropout", serde_json::json!(0.5)), &["tokenizer.json", "dropout"]);
    refused(broken("/decoder", serde_json::json!(null)), &["tokenizer.json", "decoder"]);
    refused(
        broken("/decoder", serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        &["tokenizer.json", "WordPiece"],
    );
}

#[test]
fn a_regex_that_backtracks_without_end_ends_soon() {
    let mut json = read_json(&fixtures().join("tiny/llama/tokenizer.json"));
    // The second one needs the backtracking engine, since it looks ahead.
    for regex in ["(a|a)*(a|a)*(a|a)*b", "(?=a)(a|a)*(a|a)*(a|a)*(?!a)b"] {
        *json.pointer_mut("/pre_tokenizer/pretokenizers/0/pattern/Regex").expect("the pattern") = regex.into();
        let tokenizer = Tokenizer::from_hf(HfTokenizerFiles {
            tokenizer_json: json.to_string().into_bytes(),
            tokenizer_config: None,
            special_tokens_map: None,
        })
        .expect("the pattern is valid");
        let start = Instant::now();
        let text = "a".repeat(200);
        match tokenizer.encode(&text, AddSpecial::No) {
            Ok(ids) => assert_eq!(tokenizer.decode(&ids, true), text),
            Err(e) => assert!(e.to_string().contains("cannot be encoded")),
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{regex} took {:?}", start.elapsed());
    }
}

#[test]
fn hostile_templates_of_the_fixtures_end_in_an_error_soon() {
    let Some(root) = full_fixtures() else { return };
    let mut checked = 0;
    for case in read_json(&root.join("malformed/manifest.json"))["cases"].as_array().expect("cases") {
        let path = case["path"].as_str().expect("path");
        if !path.starts_with("hf/tpl_") {
            continue;
        }
        let config = read_json(&root.join("malformed").join(path).join("tokenizer_config.json"));
        let start = Instant::now();
        let rendered = template_of_config(&config).and_then(|source| {
            let source = source.unwrap_or_else(|| panic!("{path} has no template"));
            ChatTemplate::new(source, SpecialTokens::default())?.render(&RenderRequest {
                messages: &serde_json::json!([{"role": "user", "content": "Hi"}]),
                tools: None,
                add_generation_prompt: true,
                now: Now { year: 2024, month: 1, day: 1, hour: 0, minute: 0, second: 0 },
                extra: &BTreeMap::new(),
            })
        });
        let error = rendered.expect_err(path);
        assert!(error.to_string().contains("template"), "{path}: {error}");
        assert!(start.elapsed() < Duration::from_secs(10), "{path} took {:?}", start.elapsed());
        checked += 1;
    }
    assert!(checked >= 6, "only {checked} templates found");
}
