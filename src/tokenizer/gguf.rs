//! The vocabulary of a GGUF file: checks, then a tokenizer that gives llama.cpp's ids.
//!
//! `tokenizer.ggml.model` "gpt2" is BPE with the splitting rule named by `tokenizer.ggml.pre` ("gemma4" and "whitespace" are
//! such names, and models too); "llama" is SentencePiece by score, "t5" SentencePiece's unigram, "bert" word pieces. Other models
//! are refused by name. Every length and index is checked here.

mod unigram;
mod wordpiece;

use super::normaliser::{CharMap, Normaliser};
use super::pre_types::{PreType, Spelling, pre_type};
use super::spm::Spm;
use super::table::{Entry, TokenTable, byte_level_bytes, byte_token, sentencepiece_bytes};
use super::{Encoder, Ends, NamedToken, NamedTokens, Pieces, Tokenizer, TokenizerError};
use crate::ids::TokenId;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::Replace;
use tokenizers::normalizers::utils::Lowercase;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{AddedToken, AddedVocabulary, SplitDelimiterBehavior};

/// The keys `tokenizer.ggml.*` of a GGUF file. Lists that a file lacks are empty.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: "gpt2", "llama", "t5", "bert", "gemma4" or "whitespace".
    pub model: String,
    /// `tokenizer.ggml.pre`; a file without it means "default".
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// One for each token; only "llama" and "t5" need them.
    pub scores: Vec<f32>,
    /// One for each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty: all are normal.
    pub token_types: Vec<i32>,
    /// Pairs separated by a space, best first; only "gpt2", "gemma4" and "whitespace" need them.
    pub merges: Vec<String>,
    pub bos: Option<TokenId>,
    pub eos: Option<TokenId>,
    pub unk: Option<TokenId>,
    pub pad: Option<TokenId>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// "llama" and "t5" only; when absent, true and false.
    pub add_space_prefix: Option<bool>,
    /// "llama" and "t5" only; false when absent.
    pub remove_extra_spaces: Option<bool>,
    /// SentencePiece's `precompiled_charsmap`; "llama" and "t5" only.
    pub char_map: Vec<u8>,
    /// What ends a text; "bert" only, as those below.
    pub sep: Option<TokenId>,
    /// "bert": true when absent; "whitespace": false when absent.
    pub lowercase: Option<bool>,
    /// As `lowercase` when absent.
    pub strip_accents: Option<bool>,
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
        "whitespace" => load_bpe(vocab),
        "gemma4" => load_bpe(GgufVocab { pre: Some("gemma4".into()), ..vocab }),
        "llama" => load_spm(vocab),
        "t5" => unigram::load(vocab),
        "bert" => wordpiece::load(vocab),
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
    let bytes_of = match pre.spelling {
        Spelling::ByteLevel => byte_level_bytes,
        Spelling::SentencePiece => sentencepiece_bytes,
        Spelling::Plain => |token: &str| token.as_bytes().to_vec(),
    };
    let table = table(&vocab, &types, false, bytes_of)?;

    let ids = vocab.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as TokenId)).collect();
    let has_byte_tokens = pre.spelling == Spelling::SentencePiece;
    let model = bpe(ids, merge_pairs(&vocab.merges)?, pre.ignores_merges, has_byte_tokens)?;
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_pre_tokenizer(Some(splitter(&pre)?));
    let bad = |e: tokenizers::Error| TokenizerError::bad("tokenizer.ggml.pre", e.to_string());
    if pre.spelling == Spelling::SentencePiece {
        pipeline.with_normalizer(Some(Replace::new(" ", "▁").map_err(bad)?)).map_err(bad)?;
    } else if pre.spelling == Spelling::Plain && vocab.lowercase == Some(true) {
        pipeline.with_normalizer(Some(Lowercase)).map_err(bad)?;
    }
    let added = added_tokens(&vocab, &types, pipeline.get_model())?;
    let encoder = Encoder::GgufPipeline { pipeline: Box::new(pipeline), whole_newlines: pre.whole_newlines, ends };
    Ok(assemble(encoder, added, table, named))
}

fn load_spm(mut vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    let scores = scores(&mut vocab)?;
    // What SentencePiece itself assigns and older files leave out.
    let default_id = |id: TokenId| (vocab.tokens.len() > id as usize).then_some(id);
    vocab.unk = vocab.unk.or(default_id(0));
    vocab.bos = vocab.bos.or(default_id(1));
    vocab.eos = vocab.eos.or(default_id(2));

    let types = token_types(&vocab)?;
    let named = named_tokens(&vocab)?;
    let ends = ends(&vocab, &named, true)?;
    let normaliser = normaliser(&vocab, true)?;
    let table = table(&vocab, &types, normaliser.adds_prefix, sentencepiece_bytes)?;

    let special = types.iter().enumerate().filter(|(_, t)| t.is_added());
    let ids = special.map(|(id, _)| (vocab.tokens[id].clone(), id as TokenId)).collect();
    let added = added_tokens(&vocab, &types, &bpe(ids, Vec::new(), false, false)?)?;
    let pieces = Box::new(Pieces::Spm(Spm::new(&vocab.tokens, scores, vocab.unk)));
    Ok(assemble(Encoder::GgufPieces { pieces, normaliser: Box::new(normaliser), ends }, added, table, named))
}

/// One for each token.
fn scores(vocab: &mut GgufVocab) -> Result<Vec<f32>, TokenizerError> {
    if vocab.scores.len() != vocab.tokens.len() {
        let fault = format!("it has {} entries, {TOKENS} has {}", vocab.scores.len(), vocab.tokens.len());
        return Err(TokenizerError::bad("tokenizer.ggml.scores", fault));
    }
    Ok(std::mem::take(&mut vocab.scores))
}

fn normaliser(vocab: &GgufVocab, adds_prefix: bool) -> Result<Normaliser, TokenizerError> {
    Ok(Normaliser {
        map: CharMap::read("tokenizer.ggml.precompiled_charsmap", &vocab.char_map)?,
        adds_prefix: vocab.add_space_prefix.unwrap_or(adds_prefix),
        removes_extra_spaces: vocab.remove_extra_spaces.unwrap_or(false),
    })
}

fn assemble(encoder: Encoder, added: AddedVocabulary, table: TokenTable, named: NamedTokens) -> Tokenizer {
    let mut added_plain = added.clone();
    added_plain.set_encode_special_tokens(true);
    Tokenizer { encoder, added, added_plain, table, named, num_rows: u32::MAX }
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
    byte_fallback: bool,
) -> Result<BPE, TokenizerError> {
    BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(ignores_merges)
        .byte_fallback(byte_fallback)
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
    if pre.spelling == Spelling::ByteLevel {
        steps.push(ByteLevel::new(false, false, false).into());
    }
    Ok(Sequence::new(steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every name that llama.cpp knew in November 2026.
    const ALL_NAMES: &str = "default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano \
        deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat \
        jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en \
        jina-v2-code roberta-bpe refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe \
        poro-chat glm4 chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon \
        minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion \
        granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka \
        grok-2 afmoe laguna minimax-m2 solar-open mellum2 whitespace";

    #[test]
    fn the_expressions_of_every_splitting_rule_are_valid() {
        let names = ALL_NAMES.split_whitespace();
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

    #[test]
    fn rules_that_look_around_cut_where_their_models_do() {
        // Groups of three digits from the right.
        for name in ["afmoe", "tiny_aya", "superbpe"] {
            assert_eq!(pieces(name, "1234567"), ["1", "234", "567"], "{name}");
            assert_eq!(pieces(name, "123456"), ["123", "456"], "{name}");
        }
        assert_eq!(pieces("superbpe", "a b c"), ["a b c"]);
        assert_eq!(pieces("afmoe", "a 漢字か b"), ["a", " ", "漢字か", " b"]);
        // Han characters stand alone, whatever letters are beside them.
        assert_eq!(pieces("kimi-k2", "漢字abc Déjà's 1234"), ["漢字", "abc", " Déjà's", " ", "123", "4"]);
        assert_eq!(pieces("kimi-k2", "camelCase漢"), ["camel", "Case", "漢"]);
        // Its signs are a range that holds ASCII letters too.
        assert_eq!(pieces("deepseek-llm", "Größe 12, 漢字  "), ["Gr", "öß", "e", " ", "12", ",", " ", "漢字", "  "]);
        assert_eq!(pieces("spark2_5", "ab 123!\n\n"), ["ab", " ", "1", "2", "3", "!", "\n", "\n"]);
        assert_eq!(pieces("youtu", "한국abc DEfg 12"), ["한국", "abc", " DEfg", " ", "1", "2"]);
        assert_eq!(pieces("jais-2", "a\u{20}\u{20}\u{20}b"), ["a", "  ", " b"]);
        assert_eq!(pieces("gemma4", "a b\n\nc"), ["a b", "\n\n", "c"]);
        assert_eq!(pieces("laguna", "a\n\n b"), ["a", "\n\n", " b"]);
        assert_eq!(pieces("minicpm5", "x 1234"), ["x", " ", "123", "4"]);
        assert_eq!(pieces("ufakzeka", "Ankara'nın"), ["Ankara", "'nın"]);
        assert_eq!(pieces("chameleon", "IMGIMGABZ a,b\tc"), ["IMGIMGABZ", " a", ",", "b", "\t", "c"]);
        assert_eq!(pieces("granite-embed-multi-97m", "कि Ab's"), ["कि", " Ab's"]);
    }

    #[test]
    fn words_between_spaces_are_merged_as_they_are_written() {
        let tokens = ["<s>", "</s>", "ä", "b", "中", "äb", "B", "b中", "▁"].map(String::from).to_vec();
        let vocab = |lowercase| GgufVocab {
            model: "whitespace".into(),
            pre: Some("whitespace".into()),
            tokens: tokens.clone(),
            token_types: vec![3, 3, 1, 1, 1, 1, 1, 1, 1],
            merges: vec!["ä b".into(), "b 中".into()],
            lowercase,
            ..GgufVocab::default()
        };
        let ids = |lowercase, text: &str| {
            load(vocab(lowercase)).expect("a vocabulary").encode(text, crate::tokenizer::AddSpecial::No).expect("ids")
        };
        // Merges do not cross spaces; spaces, and what has no token, are left out.
        assert_eq!(ids(None, "äb b中\n ä  b x▁"), [5, 7, 2, 3, 8]);
        assert_eq!(ids(None, "B äb"), [6, 5]);
        assert_eq!(ids(Some(true), "B ÄB"), [3, 5]);
        assert_eq!(load(vocab(None)).expect("a vocabulary").decode(&[5, 8, 4], false), "äb▁中");
    }
}
