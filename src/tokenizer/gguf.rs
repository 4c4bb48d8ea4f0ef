//! The vocabulary of a GGUF file: checks, then a tokenizer that gives llama.cpp's ids.
//!
//! `tokenizer.ggml.model` "gpt2" is byte-level BPE with the splitting rule named by `tokenizer.ggml.pre`; "llama" is
//! SentencePiece by score. Other models are refused by name. Every length and index is checked here.

use super::pre_types::{PreType, pre_type};
use super::spm::Spm;
use super::table::{Entry, TokenTable, byte_level_bytes, byte_token, sentencepiece_bytes};
use super::{Encoder, Ends, NamedToken, NamedTokens, Tokenizer, TokenizerError};
use crate::ids::TokenId;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{AddedToken, AddedVocabulary, SplitDelimiterBehavior};

/// The keys `tokenizer.ggml.*` of a GGUF file. Lists that a file lacks are empty.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: "gpt2" or "llama".
    pub model: String,
    /// `tokenizer.ggml.pre`; a file without it means "default".
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// One for each token; only "llama" needs them.
    pub scores: Vec<f32>,
    /// One for each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty: all are normal.
    pub token_types: Vec<i32>,
    /// Pairs separated by a space, best first; only "gpt2" needs them.
    pub merges: Vec<String>,
    pub bos: Option<TokenId>,
    pub eos: Option<TokenId>,
    pub unk: Option<TokenId>,
    pub pad: Option<TokenId>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// "llama" only; true when absent.
    pub add_space_prefix: Option<bool>,
}

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";

#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Byte,
}

impl TokenType {
    /// Special tokens stand for structure: decoding can skip them, plain encoding does not find them.
    fn is_special(self) -> bool {
        matches!(self, TokenType::Unknown | TokenType::Control)
    }

    /// Tokens that are looked for in the text as they are spelled.
    fn is_added(self) -> bool {
        self.is_special() || self == TokenType::UserDefined
    }
}

pub(super) fn load(vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    if vocab.tokens.is_empty() {
        return Err(TokenizerError::bad(TOKENS, "there are no tokens"));
    }
    match vocab.model.as_str() {
        "gpt2" => load_bpe(vocab),
        "llama" => load_spm(vocab),
        other => Err(TokenizerError::Unsupported {
            file: "tokenizer.ggml.model",
            what: "the tokenizer model",
            name: other.to_owned(),
        }),
    }
}

fn load_bpe(vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    let pre_name = vocab.pre.as_deref().unwrap_or("default");
    let Some(pre) = pre_type(pre_name) else {
        return Err(TokenizerError::Unsupported {
            file: "tokenizer.ggml.pre",
            what: "the pre-tokenizer",
            name: pre_name.to_owned(),
        });
    };
    let types = token_types(&vocab)?;
    let named = named_tokens(&vocab)?;
    let ends = ends(&vocab, &named, pre.adds_bos)?;
    let table = table(&vocab, &types, false, byte_level_bytes)?;

    let ids = vocab.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as TokenId)).collect();
    let model = bpe(ids, merge_pairs(&vocab.merges)?, pre.ignores_merges)?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_pre_tokenizer(Some(splitter(&pre)?));
    let added = added_tokens(&vocab, &types, pipeline.get_model())?;
    let encoder = Encoder::GgufBpe { pipeline: Box::new(pipeline), ends };
    Ok(assemble(encoder, added, table, named))
}

fn load_spm(mut vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    if vocab.scores.len() != vocab.tokens.len() {
        let fault = format!("it has {} entries, {TOKENS} has {}", vocab.scores.len(), vocab.tokens.len());
        return Err(TokenizerError::bad("tokenizer.ggml.scores", fault));
    }
    // What SentencePiece itself assigns and older files leave out.
    let default_id = |id: TokenId| (vocab.tokens.len() > id as usize).then_some(id);
    vocab.unk = vocab.unk.or(default_id(0));
    vocab.bos = vocab.bos.or(default_id(1));
    vocab.eos = vocab.eos.or(default_id(2));

    let types = token_types(&vocab)?;
    let named = named_tokens(&vocab)?;
    let ends = ends(&vocab, &named, true)?;
    let add_space_prefix = vocab.add_space_prefix.unwrap_or(true);
    let table = table(&vocab, &types, add_space_prefix, sentencepiece_bytes)?;

    let special = types.iter().enumerate().filter(|(_, t)| t.is_added());
    let ids = special.map(|(id, _)| (vocab.tokens[id].clone(), id as TokenId)).collect();
    let added = added_tokens(&vocab, &types, &bpe(ids, Vec::new(), false)?)?;
    let spm = Box::new(Spm::new(&vocab.tokens, std::mem::take(&mut vocab.scores), vocab.unk));
    Ok(assemble(Encoder::GgufSpm { spm, add_space_prefix, ends }, added, table, named))
}

fn assemble(encoder: Encoder, added: AddedVocabulary, table: TokenTable, named: NamedTokens) -> Tokenizer {
    let mut added_plain = added.clone();
    added_plain.set_encode_special_tokens(true);
    Tokenizer { encoder, added, added_plain, table, named }
}

fn token_types(vocab: &GgufVocab) -> Result<Vec<TokenType>, TokenizerError> {
    let num_tokens = vocab.tokens.len();
    if vocab.token_types.is_empty() {
        return Ok(vec![TokenType::Normal; num_tokens]);
    }
    if vocab.token_types.len() != num_tokens {
        let fault = format!("it has {} entries, {TOKENS} has {num_tokens}", vocab.token_types.len());
        return Err(TokenizerError::bad(TYPES, fault));
    }
    let read = |(id, &code): (usize, &i32)| match code {
        0 | 1 | 5 => Ok(TokenType::Normal),
        2 => Ok(TokenType::Unknown),
        3 => Ok(TokenType::Control),
        4 => Ok(TokenType::UserDefined),
        6 => Ok(TokenType::Byte),
        _ => Err(TokenizerError::bad(TYPES, format!("token {id} has type {code}; known are 0 to 6"))),
    };
    vocab.token_types.iter().enumerate().map(read).collect()
}

fn named_tokens(vocab: &GgufVocab) -> Result<NamedTokens, TokenizerError> {
    let named = |key: &'static str, id: Option<TokenId>| -> Result<Option<NamedToken>, TokenizerError> {
        let Some(id) = id else { return Ok(None) };
        let text = vocab.tokens.get(id as usize).ok_or_else(|| {
            TokenizerError::bad(key, format!("token {id} is outside the vocabulary of {} tokens", vocab.tokens.len()))
        })?;
        Ok(Some(NamedToken { text: text.clone(), id: Some(id) }))
    };
    Ok(NamedTokens {
        bos: named("tokenizer.ggml.bos_token_id", vocab.bos)?,
        eos: named("tokenizer.ggml.eos_token_id", vocab.eos)?,
        unk: named("tokenizer.ggml.unknown_token_id", vocab.unk)?,
        pad: named("tokenizer.ggml.padding_token_id", vocab.pad)?,
    })
}

fn ends(vocab: &GgufVocab, named: &NamedTokens, adds_bos: bool) -> Result<Ends, TokenizerError> {
    let first = super::id_of(&named.bos);
    let last = super::id_of(&named.eos);
    if vocab.add_bos == Some(true) && first.is_none() {
        return Err(TokenizerError::bad("tokenizer.ggml.add_bos_token", "it is set, but no bos_token_id is"));
    }
    if vocab.add_eos == Some(true) && last.is_none() {
        return Err(TokenizerError::bad("tokenizer.ggml.add_eos_token", "it is set, but no eos_token_id is"));
    }
    Ok(Ends {
        first: first.filter(|_| vocab.add_bos.unwrap_or(adds_bos)),
        last: last.filter(|_| vocab.add_eos.unwrap_or(false)),
    })
}

fn table(
    vocab: &GgufVocab,
    types: &[TokenType],
    strips_first_space: bool,
    normal_bytes: fn(&str) -> Vec<u8>,
) -> Result<TokenTable, TokenizerError> {
    let entry = |(id, (token, &kind)): (usize, (&String, &TokenType))| {
        let bytes = match kind {
            TokenType::Normal => normal_bytes(token),
            TokenType::Byte => match byte_token(token) {
                Some(byte) => vec![byte],
                None => return Err(TokenizerError::bad(TYPES, format!("token {id} ({token:?}) is no byte token"))),
            },
            TokenType::Unknown | TokenType::Control | TokenType::UserDefined => token.clone().into_bytes(),
        };
        Ok(Entry { id: id as TokenId, bytes, is_special: kind.is_special() })
    };
    let entries: Result<Vec<Entry>, TokenizerError> = vocab.tokens.iter().zip(types).enumerate().map(entry).collect();
    TokenTable::new(TOKENS, entries?, strips_first_space)
}

fn added_tokens(
    vocab: &GgufVocab,
    types: &[TokenType],
    model: &impl tokenizers::Model,
) -> Result<AddedVocabulary, TokenizerError> {
    let tokens = vocab.tokens.iter().zip(types).filter(|(token, kind)| kind.is_added() && !token.is_empty());
    let tokens = tokens.map(|(token, kind)| AddedToken::from(token.as_str(), kind.is_special()).normalized(false));
    let no_normalizer: Option<&tokenizers::NormalizerWrapper> = None;
    let mut added = AddedVocabulary::new();
    added
        .add_tokens(tokens.collect::<Vec<_>>(), model, no_normalizer)
        .map_err(|e| TokenizerError::bad(TOKENS, e.to_string()))?;
    Ok(added)
}

fn merge_pairs(merges: &[String]) -> Result<Vec<(String, String)>, TokenizerError> {
    let split = |(idx, merge): (usize, &String)| {
        // The first character may itself be a space.
        let space = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let Some(at) = space else {
            return Err(TokenizerError::bad("tokenizer.ggml.merges", format!("entry {idx} ({merge:?}) has no space")));
        };
        Ok((merge[..at].to_owned(), merge[at + 1..].to_owned()))
    };
    merges.iter().enumerate().map(split).collect()
}

fn bpe(
    ids: tokenizers::models::bpe::Vocab,
    merges: Vec<(String, String)>,
    ignores_merges: bool,
) -> Result<BPE, TokenizerError> {
    BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(ignores_merges)
        .build()
        .map_err(|e| TokenizerError::bad("tokenizer.ggml.merges", e.to_string()))
}

fn splitter(pre: &PreType) -> Result<Sequence, TokenizerError> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for regex in pre.regexes {
        let pattern = SplitPattern::Regex((*regex).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| TokenizerError::bad("tokenizer.ggml.pre", e.to_string()))?;
        steps.push(split.into());
    }
    steps.push(ByteLevel::new(false, false, false).into());
    Ok(Sequence::new(steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expressions_of_every_splitting_rule_are_valid() {
        let names = [
            "default",
            "llama-bpe",
            "dbrx",
            "gpt-2",
            "smollm",
            "qwen2",
            "qwen35",
            "deepseek-coder",
            "deepseek-v3",
            "falcon",
            "bloom",
            "viking",
            "tekken",
            "gpt-4o",
            "bailingmoe",
            "seed-coder",
            "exaone-moe",
        ];
        for name in names {
            let pre = pre_type(name).unwrap_or_else(|| panic!("{name} is not known"));
            assert!(splitter(&pre).is_ok(), "{name}");
        }
        assert!(pre_type("martian").is_none());
    }

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let pre = pre_type(name).expect("a known name");
        let mut pieces = tokenizers::PreTokenizedString::from(text);
        for step in splitter(&pre).expect("valid expressions").as_ref() {
            // The last step only spells bytes as characters.
            if !matches!(step, PreTokenizerWrapper::ByteLevel(_)) {
                tokenizers::PreTokenizer::pre_tokenize(step, &mut pieces).expect("it splits");
            }
        }
        let splits = pieces.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::None);
        splits.into_iter().map(|(piece, _, _)| piece.to_owned()).collect()
    }

    #[test]
    fn rules_differ_where_they_are_known_to_differ() {
        assert_eq!(pieces("gpt-2", "I'LL pay 12345  now"), ["I", "'", "LL", " pay", " 12345", " ", " now"]);
        assert_eq!(pieces("llama-bpe", "I'LL pay 12345"), ["I", "'LL", " pay", " ", "123", "45"]);
        assert_eq!(pieces("qwen2", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(pieces("smollm", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(pieces("gpt-4o", "camelCase's"), ["camel", "Case's"]);
        assert_eq!(pieces("tekken", "HTMLPage"), ["HTMLPage"]);
        assert_eq!(pieces("falcon", "x=1234"), ["x", "=", "123", "4"]);
    }
}
