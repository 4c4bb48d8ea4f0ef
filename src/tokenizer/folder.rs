//! Vocabularies of folders without a `tokenizer.json`: SentencePiece models, `vocab.json` with `merges.txt`, and files of
//! tiktoken ranks.
//!
//! Each becomes the lists that a GGUF file has, so that one encoder serves them. Guarantees: SentencePiece's BPE and unigram
//! models give their own ids; ranks give tiktoken's. Its models of words and characters are refused by name.

mod sentencepiece;
mod tiktoken;

use super::GgufVocab;
use super::TokenizerError;
use super::table::byte_of_char;
use crate::ids::TokenId;
use serde_json::{Map, Value};

/// The files of a folder, as far as it has them.
#[derive(Clone, Debug, Default)]
pub struct FolderVocab {
    /// `tokenizer.model`: a SentencePiece model, or tiktoken ranks.
    pub tokenizer_model: Option<Vec<u8>>,
    /// A file `*.tiktoken` or `tiktoken.model`.
    pub tiktoken: Option<Vec<u8>>,
    pub vocab_json: Option<Map<String, Value>>,
    pub merges: Option<String>,
    pub tokenizer_config: Option<Value>,
    pub added_tokens: Option<Value>,
    /// `model_type` of the config: which expressions split the text of byte-level vocabularies.
    pub model_type: String,
}

/// The expressions of a family's byte-level vocabularies, by their name in GGUF files.
fn pre_of(model_type: &str, is_ranks: bool) -> &'static str {
    match model_type {
        "qwen" | "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => "qwen2",
        "llama" if is_ranks => "llama-bpe",
        "starcoder2" => "starcoder",
        _ => "gpt-2",
    }
}

/// The vocabulary of the folder; `None` when it has none of the files.
pub fn read(files: FolderVocab) -> Result<Option<GgufVocab>, TokenizerError> {
    let mut vocab = match &files {
        FolderVocab { tokenizer_model: Some(bytes), .. } if !tiktoken::is_ranks(bytes) => sentencepiece::read(bytes)?,
        FolderVocab { tokenizer_model: Some(ranks), .. } => {
            byte_level(tiktoken::read("tokenizer.model", ranks)?, &files, true)
        }
        FolderVocab { tiktoken: Some(ranks), .. } => byte_level(tiktoken::read("*.tiktoken", ranks)?, &files, true),
        FolderVocab { vocab_json: Some(vocab), merges: Some(merges), .. } => {
            byte_level((tokens_of_json(vocab)?, merge_lines(merges)), &files, false)
        }
        FolderVocab { vocab_json: Some(_), .. } => {
            return Err(TokenizerError::bad("merges.txt", "it is missing beside vocab.json"));
        }
        _ => return Ok(None),
    };
    add_tokens(&mut vocab, &files)?;
    name_tokens(&mut vocab, &files);
    Ok(Some(vocab))
}

fn empty(model: &str) -> GgufVocab {
    GgufVocab { model: model.into(), ..GgufVocab::default() }
}

fn byte_level((tokens, merges): (Vec<String>, Vec<String>), files: &FolderVocab, is_ranks: bool) -> GgufVocab {
    let pre = Some(pre_of(&files.model_type, is_ranks).to_owned());
    let token_types = vec![NORMAL; tokens.len()];
    let add_bos = if pre.as_deref() == Some("llama-bpe") { None } else { Some(false) };
    GgufVocab { pre, tokens, merges, token_types, add_bos, ..empty("gpt2") }
}

/// Types of tokens as GGUF files number them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
/// Ids beyond this come from a broken file.
const MAX_TOKENS: u64 = 4 << 20;

/// Puts a token at its id, with unused ones before it where there is a gap.
fn put(vocab: &mut GgufVocab, id: u64, text: &str, kind: i32) {
    while vocab.tokens.len() as u64 <= id {
        vocab.tokens.push(format!("[unused{}]", vocab.tokens.len()));
        vocab.token_types.push(UNUSED);
        if vocab.model != "gpt2" {
            vocab.scores.push(0.0);
        }
    }
    vocab.tokens[id as usize] = text.to_owned();
    vocab.token_types[id as usize] = kind;
}

fn tokens_of_json(json: &Map<String, Value>) -> Result<Vec<String>, TokenizerError> {
    let mut vocab = empty("gpt2");
    for (token, id) in json {
        match id.as_u64().filter(|id| *id < MAX_TOKENS) {
            Some(id) => put(&mut vocab, id, token, NORMAL),
            None => return Err(TokenizerError::bad("vocab.json", format!("the id of {token:?} is {id}"))),
        }
    }
    Ok(vocab.tokens)
}

fn merge_lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.starts_with("#version") && !line.is_empty()).map(str::to_owned).collect()
}

/// Tokens that are added to the vocabulary: `added_tokens_decoder` of the tokenizer's config, or `added_tokens.json`.
fn add_tokens(vocab: &mut GgufVocab, files: &FolderVocab) -> Result<(), TokenizerError> {
    let bad = |id: &str| TokenizerError::bad("tokenizer_config.json", format!("added token {id:?} has no valid id"));
    let listed = files.tokenizer_config.as_ref().and_then(|c| c.get("added_tokens_decoder")).and_then(Value::as_object);
    for (id, token) in listed.into_iter().flatten() {
        let number = id.parse::<u64>().ok().filter(|id| *id < MAX_TOKENS).ok_or_else(|| bad(id))?;
        let Some(text) = token.get("content").and_then(Value::as_str) else { continue };
        let is_special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        put(vocab, number, text, if is_special { CONTROL } else { USER_DEFINED });
    }
    let plain = files.added_tokens.as_ref().filter(|_| listed.is_none()).and_then(Value::as_object);
    for (text, id) in plain.into_iter().flatten() {
        let number = id.as_u64().filter(|id| *id < MAX_TOKENS).ok_or_else(|| bad(text))?;
        put(vocab, number, text, CONTROL);
    }
    Ok(())
}

/// The tokens that the tokenizer's config names, and whether begin and end are added.
fn name_tokens(vocab: &mut GgufVocab, files: &FolderVocab) {
    let Some(config) = &files.tokenizer_config else { return };
    let named = |key: &str| -> Option<TokenId> {
        let value = config.get(key)?;
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?;
        vocab.tokens.iter().position(|token| token == text).map(|id| id as TokenId)
    };
    let (bos, eos, unk, pad) = (named("bos_token"), named("eos_token"), named("unk_token"), named("pad_token"));
    vocab.bos = bos.or(vocab.bos);
    vocab.eos = eos.or(vocab.eos);
    vocab.unk = unk.or(vocab.unk);
    vocab.pad = pad.or(vocab.pad);
    let flag = |key: &str| config.get(key).and_then(Value::as_bool);
    vocab.add_bos = flag("add_bos_token").or(vocab.add_bos).map(|adds| adds && vocab.bos.is_some());
    vocab.add_eos = flag("add_eos_token").or(vocab.add_eos).map(|adds| adds && vocab.eos.is_some());
}

/// Bytes spelled in the characters of byte-level vocabularies.
fn spelled(bytes: &[u8], chars: &[char; 256]) -> String {
    bytes.iter().map(|b| chars[usize::from(*b)]).collect()
}

/// The character of each byte.
fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    for c in (0u32..0x200).filter_map(char::from_u32) {
        if let Some(byte) = byte_of_char(c) {
            chars[usize::from(byte)] = c;
        }
    }
    chars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_character() {
        let chars = byte_chars();
        assert_eq!((chars[b'a' as usize], chars[b' ' as usize], chars[0]), ('a', 'Ġ', 'Ā'));
        assert!((0..256).all(|b| byte_of_char(chars[b]) == Some(b as u8)));
    }

    #[test]
    fn gaps_between_ids_are_filled() {
        let json: Map<String, Value> = serde_json::from_str(r#"{"a": 0, "b": 3}"#).expect("an object");
        assert_eq!(tokens_of_json(&json).expect("valid"), ["a", "[unused1]", "[unused2]", "b"]);
        let json: Map<String, Value> = serde_json::from_str(r#"{"a": 99999999999}"#).expect("an object");
        assert!(tokens_of_json(&json).is_err());
    }
}
