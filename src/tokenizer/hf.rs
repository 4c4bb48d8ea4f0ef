//! `tokenizer.json` and its companions, read by the `tokenizers` crate and checked here.
//!
//! Decoding is ours: from the file's decoder follows how a token spells its bytes. Decoders that are more than a
//! spelling (word pieces, CTC) are refused by name.

use super::table::{self, Entry, TokenTable, byte_level_bytes, byte_token, sentencepiece_bytes};
use super::{Encoder, NamedToken, NamedTokens, Tokenizer, TokenizerError};
use crate::ids::TokenId;
use serde_json::Value as Json;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::tokenizer::AddedToken;

/// The files of a Hugging Face folder that say how text becomes tokens.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct HfTokenizerFiles {
    /// The bytes of `tokenizer.json`.
    #[serde(with = "text")]
    pub tokenizer_json: Vec<u8>,
    /// `tokenizer_config.json`: names of special tokens, and tokens added later.
    pub tokenizer_config: Option<Json>,
    /// `special_tokens_map.json`, asked where the config is silent.
    pub special_tokens_map: Option<Json>,
}

/// Bytes that are text are written as text.
mod text {
    use serde::{Deserialize, Deserializer, Serializer, ser::Error};

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(std::str::from_utf8(bytes).map_err(S::Error::custom)?)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        String::deserialize(deserializer).map(String::into_bytes)
    }
}

const FILE: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

/// How tokens spell bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Spelling {
    byte_level: bool,
    /// `▁` is a space.
    sentencepiece: bool,
    /// `<0xE2>` is a byte.
    byte_tokens: bool,
    strips_first_space: bool,
}

pub(super) fn load(files: HfTokenizerFiles) -> Result<Tokenizer, TokenizerError> {
    let mut pipeline = parse(&files.tokenizer_json)?;
    check_added_ids(&files.tokenizer_json, pipeline.get_vocab_size(true))?;
    if let Some(config) = &files.tokenizer_config {
        add_tokens_of_config(&mut pipeline, config)?;
    }
    let spelling = spelling(pipeline.get_decoder())?;
    let table = table(&pipeline, spelling)?;
    let named = named_tokens(&pipeline, &files);
    let added = pipeline.get_added_vocabulary().clone();
    let mut added_plain = added.clone();
    added_plain.set_encode_special_tokens(true);
    let encoder = Encoder::HuggingFace(Box::new(pipeline));
    Ok(Tokenizer { encoder, added, added_plain, table, named, num_rows: u32::MAX })
}

fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, TokenizerError> {
    // The crate trusts some fields (a `continuing_subword_prefix` longer than a merge overruns a slice); a file must
    // not end the process.
    let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json))
        .map_err(|_| TokenizerError::bad(FILE, "its fields contradict each other"))?;
    // The crate says only that no known part matches.
    let mut pipeline = parsed.map_err(|e| unknown_part(json).unwrap_or(TokenizerError::bad(FILE, e.to_string())))?;
    if let ModelWrapper::BPE(bpe) = pipeline.get_model()
        && bpe.dropout.is_some_and(|p| p > 0.0)
    {
        let name = "dropout".to_owned();
        return Err(TokenizerError::Unsupported { file: FILE, what: "the model option", name });
    }
    if let Some(processor) = pipeline.get_post_processor() {
        let json = serde_json::to_value(processor).map_err(|e| TokenizerError::bad(FILE, e.to_string()))?;
        check_post_processor(&json)?;
    }
    pipeline.with_padding(None);
    pipeline.with_truncation(None).map_err(|e| TokenizerError::bad(FILE, e.to_string()))?;
    Ok(pipeline)
}

/// Refuses added tokens whose id lies far beyond the vocabulary: the crate would number them anew without a word.
fn check_added_ids(json: &[u8], num_tokens: usize) -> Result<(), TokenizerError> {
    #[derive(serde::Deserialize)]
    struct Listed {
        #[serde(default)]
        added_tokens: Vec<ListedToken>,
    }
    #[derive(serde::Deserialize)]
    struct ListedToken {
        id: u64,
    }
    let listed: Listed = serde_json::from_slice(json).map_err(|e| TokenizerError::bad(FILE, e.to_string()))?;
    match listed.added_tokens.iter().find(|token| table::is_far_beyond(token.id, num_tokens)) {
        None => Ok(()),
        Some(ListedToken { id }) => Err(table::far_beyond(FILE, *id, num_tokens)),
    }
}

/// The first part of a pipeline whose type the crate does not know.
fn unknown_part(json: &[u8]) -> Option<TokenizerError> {
    let json: Json = serde_json::from_slice(json).ok()?;
    PARTS.iter().find_map(|&(key, what, lists, known)| {
        let part = json.get(key)?;
        let inner = lists.iter().filter_map(|list| part.get(list)).filter_map(Json::as_array).flatten();
        let types = std::iter::once(part).chain(inner).filter_map(|part| part.get("type")).filter_map(Json::as_str);
        let name = types.into_iter().find(|name| !known.contains(name))?.to_owned();
        Some(TokenizerError::Unsupported { file: FILE, what, name })
    })
}

/// Parts of a pipeline: key, name, keys of lists of parts, known types.
type Part = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);
const PARTS: [Part; 5] = [
    ("model", "the tokenizer model", &[], &["BPE", "WordPiece", "WordLevel", "Unigram"]),
    (
        "normalizer",
        "the normalizer",
        &["normalizers"],
        &[
            "BertNormalizer",
            "Strip",
            "StripAccents",
            "NFC",
            "NFD",
            "NFKC",
            "NFKD",
            "Sequence",
            "Lowercase",
            "Nmt",
            "Precompiled",
            "Replace",
            "Prepend",
            "ByteLevel",
        ],
    ),
    (
        "pre_tokenizer",
        "the pre-tokenizer",
        &["pretokenizers"],
        &[
            "BertPreTokenizer",
            "ByteLevel",
            "CharDelimiterSplit",
            "Metaspace",
            "Whitespace",
            "WhitespaceSplit",
            "Sequence",
            "Split",
            "Punctuation",
            "Digits",
            "UnicodeScripts",
            "FixedLength",
        ],
    ),
    (
        "post_processor",
        "the post-processor",
        &["processors"],
        &["RobertaProcessing", "BertProcessing", "ByteLevel", "TemplateProcessing", "Sequence"],
    ),
    (
        "decoder",
        "the decoder",
        &["decoders"],
        &[
            "BPEDecoder",
            "ByteLevel",
            "WordPiece",
            "Metaspace",
            "CTC",
            "Sequence",
            "Replace",
            "Fuse",
            "Strip",
            "ByteFallback",
        ],
    ),
];

/// A template may only name the special tokens that it declares; the crate would index with the others.
fn check_post_processor(json: &Json) -> Result<(), TokenizerError> {
    let entries = |key: &str| json.get(key).and_then(Json::as_array).into_iter().flatten();
    entries("processors").try_for_each(check_post_processor)?;
    for piece in entries("single").chain(entries("pair")) {
        let Some(id) = piece.pointer("/SpecialToken/id").and_then(Json::as_str) else { continue };
        if json.get("special_tokens").and_then(|declared| declared.get(id)).is_none() {
            return Err(TokenizerError::bad(
                FILE,
                format!("TemplateProcessing names {id:?}, which it does not declare"),
            ));
        }
    }
    Ok(())
}

/// Tokens that only `added_tokens_decoder` lists, as older folders do.
fn add_tokens_of_config(pipeline: &mut tokenizers::Tokenizer, config: &Json) -> Result<(), TokenizerError> {
    let Some(listed) = config.get("added_tokens_decoder").and_then(Json::as_object) else { return Ok(()) };
    let mut missing: Vec<(TokenId, AddedToken)> = Vec::new();
    for (id, entry) in listed {
        let id = id.parse().map_err(|_| bad_added(id, "the id is no number"))?;
        let Some(content) = entry.get("content").and_then(Json::as_str) else {
            return Err(bad_added(id, "there is no content"));
        };
        if pipeline.token_to_id(content).is_none() && !content.is_empty() {
            let flag = |name: &str| entry.get(name).and_then(Json::as_bool).unwrap_or(false);
            let token = AddedToken::from(content, flag("special"))
                .normalized(flag("normalized"))
                .lstrip(flag("lstrip"))
                .rstrip(flag("rstrip"))
                .single_word(flag("single_word"));
            missing.push((id, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    for (id, token) in missing {
        let content = token.content.clone();
        pipeline.add_tokens([token]).map_err(|e| bad_added(id, &e.to_string()))?;
        if pipeline.token_to_id(&content) != Some(id) {
            return Err(bad_added(id, "the vocabulary does not end just before this id"));
        }
    }
    Ok(())
}

fn bad_added(id: impl std::fmt::Display, fault: &str) -> TokenizerError {
    TokenizerError::bad(CONFIG, format!("added_tokens_decoder, entry {id}: {fault}"))
}

fn spelling(decoder: Option<&DecoderWrapper>) -> Result<Spelling, TokenizerError> {
    let mut found = Spelling::default();
    match decoder {
        None => return Err(TokenizerError::bad(FILE, "there is no decoder")),
        Some(decoder) => apply(decoder, &mut found)?,
    }
    if found.byte_level && found.sentencepiece {
        return Err(TokenizerError::bad(FILE, "the decoder mixes byte-level and SentencePiece spelling"));
    }
    Ok(found)
}

fn apply(decoder: &DecoderWrapper, found: &mut Spelling) -> Result<(), TokenizerError> {
    match decoder {
        DecoderWrapper::ByteLevel(_) => found.byte_level = true,
        DecoderWrapper::ByteFallback(_) => found.byte_tokens = true,
        DecoderWrapper::Fuse(_) => {}
        DecoderWrapper::Metaspace(space) if space.get_replacement() == '▁' => {
            found.sentencepiece = true;
            found.strips_first_space |= space.get_prepend_scheme() != PrependScheme::Never;
        }
        DecoderWrapper::Strip(strip) if strip.content == ' ' && strip.start <= 1 && strip.stop == 0 => {
            found.strips_first_space |= strip.start == 1;
        }
        DecoderWrapper::Replace(_) if is_space_replacement(decoder) => found.sentencepiece = true,
        DecoderWrapper::Sequence(steps) => {
            for step in steps.get_decoders() {
                apply(step, found)?;
            }
        }
        other => {
            let name = serde_json::to_string(other).unwrap_or_else(|e| e.to_string());
            return Err(TokenizerError::Unsupported { file: FILE, what: "the decoder", name });
        }
    }
    Ok(())
}

fn is_space_replacement(decoder: &DecoderWrapper) -> bool {
    // The crate keeps the pattern to itself; its JSON form does not.
    serde_json::to_value(decoder).is_ok_and(|json| json["pattern"]["String"] == "▁" && json["content"] == " ")
}

fn table(pipeline: &tokenizers::Tokenizer, spelling: Spelling) -> Result<TokenTable, TokenizerError> {
    let added = pipeline.get_added_tokens_decoder();
    let mut entries = Vec::new();
    for (token, id) in pipeline.get_vocab(true) {
        if added.contains_key(&id) {
            continue;
        }
        let bytes = match byte_token(&token) {
            Some(byte) if spelling.byte_tokens => vec![byte],
            _ if spelling.byte_level => byte_level_bytes(&token),
            _ if spelling.sentencepiece => sentencepiece_bytes(&token),
            _ => token.into_bytes(),
        };
        entries.push(Entry { id, bytes, is_special: false });
    }
    for (id, token) in added {
        let bytes = match token.special {
            // User-defined pieces of SentencePiece models may hold escaped spaces.
            false if spelling.sentencepiece => sentencepiece_bytes(&token.content),
            _ => token.content.into_bytes(),
        };
        entries.push(Entry { id, bytes, is_special: token.special });
    }
    TokenTable::new(FILE, entries, spelling.strips_first_space)
}

fn named_tokens(pipeline: &tokenizers::Tokenizer, files: &HfTokenizerFiles) -> NamedTokens {
    let named = |key: &str| {
        let places = [&files.tokenizer_config, &files.special_tokens_map];
        let entry = places.into_iter().flatten().filter_map(|json| json.get(key)).find(|entry| !entry.is_null())?;
        // Either a string or an object with the string as `content`.
        let text = entry.as_str().or_else(|| entry.get("content").and_then(Json::as_str))?;
        Some(NamedToken { text: text.to_owned(), id: pipeline.token_to_id(text) })
    };
    NamedTokens { bos: named("bos_token"), eos: named("eos_token"), unk: named("unk_token"), pad: named("pad_token") }
}
