//! Older tokenizer files of folders: vocabularies with known ids, written as SentencePiece models, as `vocab.json` with
//! `merges.txt`, and as tiktoken ranks.

use std::path::PathBuf;

use kvasir::tokenizer::folder::{self, FolderVocab};
use kvasir::tokenizer::{AddSpecial, GgufVocab, Tokenizer};
use serde_json::{Map, Value, json};

use super::{gguf_metadata, vectors};
use crate::support::full_fixtures;

/// A vocabulary of the fixtures.
fn source(name: &str) -> Option<(PathBuf, GgufVocab)> {
    let file = full_fixtures()?.join(format!("tokenizers/ggml-vocab-{name}.gguf"));
    let vocab = gguf_metadata::vocab(&file);
    Some((file, vocab))
}

fn load(files: FolderVocab) -> Tokenizer {
    Tokenizer::from_gguf(folder::read(files).expect("valid").expect("there")).expect("valid")
}

fn check(files: FolderVocab, file: &std::path::Path) {
    let tokenizer = load(files);
    let vectors = vectors(file);
    assert!(vectors.len() >= 40);
    for (text, ids) in vectors {
        assert_eq!(tokenizer.encode_plain(&text).expect("encodable"), ids, "{}: {text:?}", file.display());
    }
}

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 128 {
        out.push(value as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

fn bytes_field(number: u64, bytes: &[u8], out: &mut Vec<u8>) {
    varint(number << 3 | 2, out);
    varint(bytes.len() as u64, out);
    out.extend(bytes);
}

fn number_field(number: u64, value: u64, out: &mut Vec<u8>) {
    varint(number << 3, out);
    varint(value, out);
}

/// The vocabulary as SentencePiece writes it.
fn sentencepiece(vocab: &GgufVocab, model_type: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for ((token, score), kind) in vocab.tokens.iter().zip(&vocab.scores).zip(&vocab.token_types) {
        let mut piece = Vec::new();
        bytes_field(1, token.as_bytes(), &mut piece);
        varint(2 << 3 | 5, &mut piece);
        piece.extend(score.to_le_bytes());
        number_field(3, *kind as u64, &mut piece);
        bytes_field(1, &piece, &mut out);
    }
    let mut trainer = Vec::new();
    number_field(3, model_type, &mut trainer);
    number_field(40, 0, &mut trainer);
    // -1 is written as the 64-bit number.
    number_field(43, u64::MAX, &mut trainer);
    bytes_field(2, &trainer, &mut out);
    let mut normalizer = Vec::new();
    bytes_field(1, b"identity", &mut normalizer);
    number_field(4, 0, &mut normalizer);
    bytes_field(3, &normalizer, &mut out);
    out
}

#[test]
fn a_sentencepiece_model_gives_its_own_ids() {
    let Some((file, vocab)) = source("llama-spm") else { return };
    let bytes = sentencepiece(&vocab, 2);
    check(FolderVocab { tokenizer_model: Some(bytes.clone()), ..FolderVocab::default() }, &file);
    let config = json!({
        "add_bos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "</s>",
        "added_tokens_decoder": {"32002": {"content": "<|end|>", "special": true}},
    });
    let tokenizer = load(FolderVocab {
        tokenizer_model: Some(bytes.clone()),
        tokenizer_config: Some(config),
        ..FolderVocab::default()
    });
    assert_eq!(tokenizer.encode("<|end|>", AddSpecial::Yes).expect("encodable"), [1, 32002]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (32003, Some(2)));
    for cut in (0..bytes.len()).step_by(9973) {
        let files = FolderVocab { tokenizer_model: Some(bytes[..cut].to_vec()), ..FolderVocab::default() };
        let _ = folder::read(files);
    }
    let refusal = |bytes: Vec<u8>| {
        let files = FolderVocab { tokenizer_model: Some(bytes), ..FolderVocab::default() };
        folder::read(files).expect_err("refused").to_string()
    };
    assert!(refusal(sentencepiece(&vocab, 3)).contains("\"word\""));
    assert!(refusal(sentencepiece(&vocab, 4)).contains("\"char\""));
    assert!(refusal(b"not a model".to_vec()).contains("not a SentencePiece model"));
}

#[test]
fn vocab_json_with_merges_gives_the_ids_of_gpt_2() {
    let Some((file, vocab)) = source("gpt-2") else { return };
    let json: Map<String, Value> = vocab.tokens.iter().enumerate().map(|(id, t)| (t.clone(), json!(id))).collect();
    let merges = format!("#version: 0.2\n{}\n", vocab.merges.join("\n"));
    let files = FolderVocab {
        vocab_json: Some(json),
        merges: Some(merges),
        model_type: "gpt2".into(),
        ..FolderVocab::default()
    };
    check(files.clone(), &file);
    let text = folder::read(FolderVocab { merges: None, ..files }).expect_err("no merges").to_string();
    assert_eq!(text, "merges.txt: it is missing beside vocab.json");
    assert!(folder::read(FolderVocab::default()).expect("no file is broken").is_none());
}

/// The byte that a character of a byte-level vocabulary stands for.
fn byte_of(c: char) -> u8 {
    match c as u32 {
        code @ (33..=126 | 161..=172 | 174..=255) => code as u8,
        code => {
            let others = (0..=255u8).filter(|b| !matches!(b, 33..=126 | 161..=172 | 174..=255));
            others.clone().nth(code as usize - 256).expect("a byte-level character")
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0u32, |bits, b| bits << 8 | u32::from(*b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i)) as usize & 63] as char;
            out.push(if i <= three.len() { digit } else { '=' });
        }
    }
    out
}

#[test]
fn tiktoken_ranks_give_the_ids_of_llama_3() {
    let Some((file, vocab)) = source("llama-bpe") else { return };
    let plain: Vec<&String> = vocab.tokens.iter().take(128_000).collect();
    let lines: String = plain
        .iter()
        .enumerate()
        .map(|(rank, token)| {
            let bytes: Vec<u8> = token.chars().map(byte_of).collect();
            format!("{} {rank}\n", base64(&bytes))
        })
        .collect();
    let files =
        FolderVocab { tokenizer_model: Some(lines.into_bytes()), model_type: "llama".into(), ..FolderVocab::default() };
    check(files, &file);
}
