//! SentencePiece models of all kinds that load, and BERT's word pieces, against ids made by the libraries they come from
//! (`tests/data/fixtures/pieces`).

use kvasir::tokenizer::folder::{self, FolderVocab};
use kvasir::tokenizer::{AddSpecial, GgufVocab, Tokenizer};
use serde_json::Value;

use super::{ids_of, streamed};
use crate::support::{core_fixtures, read_json};
use std::sync::Arc;

fn cases(value: &Value) -> &Vec<Value> {
    let cases = value.as_array().expect("a list of cases");
    assert!(cases.len() >= 30);
    cases
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().expect("text")
}

/// The lists that a SentencePiece model holds; a GGUF file has the same.
fn vocab(name: &str) -> GgufVocab {
    let path = core_fixtures().join(format!("pieces/{name}.model"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let files = FolderVocab { tokenizer_model: Some(bytes), ..FolderVocab::default() };
    folder::read(files).expect("valid").expect("there")
}

#[test]
fn sentencepiece_models_give_their_own_ids_and_texts() {
    let vectors = read_json(&core_fixtures().join("pieces/vectors.json"));
    for (name, model) in [("unigram", "t5"), ("unigram_bytes", "t5"), ("nodummy", "t5"), ("bpe_map", "llama")] {
        let vocab = vocab(name);
        assert_eq!(vocab.model, model);
        let unk = vocab.unk.expect("an unknown token");
        let tokenizer = Arc::new(Tokenizer::from_gguf(vocab).expect("valid"));
        for case in cases(&vectors["sentencepiece"][name]) {
            let (text, ids) = (text(case, "text"), ids_of(&case["ids"]));
            assert_eq!(tokenizer.encode_plain(text).expect("encodable"), ids, "{name}: {text:?}");
            // SentencePiece writes the unknown token as a sign of its own, and a `▁` of the text is a space to it.
            if !ids.contains(&unk) && !text.starts_with('▁') {
                assert_eq!(tokenizer.decode(&ids, false), self::text(case, "decoded"), "{name}: {text:?}");
                assert_eq!(
                    streamed(&tokenizer, &ids, false),
                    self::text(case, "decoded"),
                    "{name}: {text:?}, streamed"
                );
            }
        }
    }
}

#[test]
fn a_unigram_vocabulary_of_a_gguf_file_ends_its_texts() {
    // As converters write it: no begin, an end, spaces as the model says.
    let file = GgufVocab { add_bos: None, add_eos: None, ..vocab("unigram") };
    let tokenizer = Tokenizer::from_gguf(file.clone()).expect("valid");
    let plain = tokenizer.encode("Hello world", AddSpecial::No).expect("encodable");
    let whole = tokenizer.encode("Hello world", AddSpecial::Yes).expect("encodable");
    assert_eq!(whole, [plain.as_slice(), &[file.eos.expect("an end")]].concat());
    // User-defined symbols are found in plain text, control tokens are not.
    let sep = tokenizer.token_id("<sep>").expect("it has the token");
    let ids = tokenizer.encode_plain("a<sep>b</s>").expect("encodable");
    assert!(ids.contains(&sep) && !ids.contains(&file.eos.expect("an end")), "{ids:?}");
    let mut broken = file.clone();
    broken.char_map.truncate(40);
    let error = Tokenizer::from_gguf(broken).err().expect("refused").to_string();
    assert!(error.contains("precompiled_charsmap"), "{error}");
    let error = Tokenizer::from_gguf(GgufVocab { scores: vec![0.0], ..file }).err().expect("refused").to_string();
    assert!(error.contains("tokenizer.ggml.scores"), "{error}");
}

/// A BERT vocabulary as converters write it: `▁` before pieces that begin a word, nothing before those that go on.
fn bert(tokens: &[&str]) -> GgufVocab {
    let is_special = |token: &str| ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].contains(&token);
    let spelled = |token: &&str| match token.strip_prefix("##") {
        _ if is_special(token) => (*token).to_owned(),
        Some(rest) => rest.to_owned(),
        None => format!("▁{token}"),
    };
    let id = |name: &str| tokens.iter().position(|t| *t == name).map(|id| id as u32);
    GgufVocab {
        model: "bert".into(),
        tokens: tokens.iter().map(spelled).collect(),
        token_types: tokens.iter().map(|t| if is_special(t) { 3 } else { 1 }).collect(),
        bos: id("[CLS]"),
        sep: id("[SEP]"),
        unk: id("[UNK]"),
        pad: id("[PAD]"),
        ..GgufVocab::default()
    }
}

#[test]
fn word_pieces_give_the_ids_of_berts_tokenizer() {
    let vectors = read_json(&core_fixtures().join("pieces/vectors.json"));
    let vectors = &vectors["wordpiece"];
    let tokens: Vec<&str> = vectors["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_str).collect();
    for (lowercase, key) in [(None, "lower"), (Some(false), "cased")] {
        let tokenizer = Tokenizer::from_gguf(GgufVocab { lowercase, ..bert(&tokens) }).expect("valid");
        for case in cases(&vectors[key]) {
            let text = text(case, "text");
            assert_eq!(tokenizer.encode(text, AddSpecial::Yes).expect("encodable"), ids_of(&case["ids"]), "{text:?}");
            assert_eq!(tokenizer.encode(text, AddSpecial::No).expect("encodable"), ids_of(&case["plain"]), "{text:?}");
        }
        let ids = tokenizer.encode("the license", AddSpecial::Yes).expect("encodable");
        assert_eq!(tokenizer.decode(&ids, true), "the license");
    }
    let error = Tokenizer::from_gguf(GgufVocab { unk: Some(9999), ..bert(&tokens) }).err().expect("refused");
    assert!(error.to_string().contains("unknown_token_id"), "{error}");
}

#[test]
fn bpe_over_text_spells_unknown_characters_in_bytes() {
    let mut tokens: Vec<String> = (0..=255u8).map(|b| format!("<0x{b:02X}>")).collect();
    tokens.extend(["▁", "a", "b", "▁a", "\n", "\n\n", "\n\n\n\n", "<bos>"].map(String::from));
    let mut token_types = vec![6; 256];
    token_types.extend([1, 1, 1, 1, 1, 1, 1, 3]);
    let vocab = GgufVocab {
        model: "gemma4".into(),
        merges: ["▁ a", "\n \n"].map(String::from).to_vec(),
        bos: Some(263),
        tokens,
        token_types,
        ..GgufVocab::default()
    };
    let tokenizer = Tokenizer::from_gguf(vocab).expect("valid");
    let check = |text: &str, ids: &[u32]| {
        assert_eq!(tokenizer.encode(text, AddSpecial::No).expect("encodable"), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    };
    check("a ab", &[257, 259, 258]);
    check("é", &[0xc3, 0xa9]);
    // A run that is a token is one; others are merged.
    check("\n\n\n\n", &[262]);
    check("a\n\n\nb", &[257, 261, 260, 258]);
    assert_eq!(tokenizer.encode("a", AddSpecial::Yes).expect("encodable"), [263, 257]);
}
