//! Text to tokens and back: encoding, GGUF vocabularies, chat templates, incremental detokenizing.
//!
//! Guarantees: encoding gives the ids of Hugging Face tokenizers for a `tokenizer.json`, those of llama.cpp for a GGUF
//! vocabulary, and those of the libraries they come from for a SentencePiece model and tiktoken ranks; decoding is the concatenation of each token's bytes, read as UTF-8, so that U+FFFD appears only
//! where tokens really encode invalid bytes; broken files end in a [`TokenizerError`] that names the field.
//! It does not attempt RWKV and PLaMo-2 vocabularies, truncation or padding.
//!
//! A [`Tokenizer`] is immutable and shared between threads; a [`Detokenizer`] belongs to one stream of tokens.

pub mod chat_template;
mod detokenizer;
pub mod folder;
mod gguf;
mod hf;
mod normaliser;
mod pre_types;
mod python_json;
mod rewrite;
mod spm;
mod table;
mod unigram;

pub use chat_template::{ChatTemplate, Now, RenderRequest, SpecialTokens, TemplateError};
pub use detokenizer::Detokenizer;
pub use gguf::GgufVocab;
pub use hf::HfTokenizerFiles;

use crate::ids::TokenId;
use normaliser::Normaliser;
use table::TokenTable;
use tokenizers::Model;
use tokenizers::tokenizer::{AddedVocabulary, NormalizedString, OffsetType, PreTokenizedString, PreTokenizer, Token};

/// Why a tokenizer could not be made or text not be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// `file` is a file name or a GGUF key.
    #[error("{file}: {fault}")]
    BadFile { file: &'static str, fault: String },
    #[error("{file}: {what} {name:?} is not supported")]
    Unsupported { file: &'static str, what: &'static str, name: String },
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}

impl TokenizerError {
    fn bad(file: &'static str, fault: impl Into<String>) -> Self {
        TokenizerError::BadFile { file, fault: fault.into() }
    }
}

/// Whether `encode` adds what the model wants around a text (begin or end of sequence).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    Yes,
    /// For rendered chat templates, which name their special tokens themselves.
    No,
}

/// A vocabulary and the rules that turn text into its tokens.
pub struct Tokenizer {
    encoder: Encoder,
    /// Finds special and user-defined tokens in text.
    added: AddedVocabulary,
    /// The same without the special ones.
    added_plain: AddedVocabulary,
    table: TokenTable,
    named: NamedTokens,
    /// Ids from here on cannot be encoded.
    num_rows: u32,
}

/// The tokens that a model's files single out.
#[derive(Clone, Debug, Default)]
struct NamedTokens {
    bos: Option<NamedToken>,
    eos: Option<NamedToken>,
    unk: Option<NamedToken>,
    pad: Option<NamedToken>,
}

#[derive(Clone, Debug)]
struct NamedToken {
    text: String,
    /// `None` when the text is not in the vocabulary.
    id: Option<TokenId>,
}

enum Encoder {
    /// Normalise, split, merge and post-process as a `tokenizer.json` says.
    HuggingFace(Box<tokenizers::Tokenizer>),
    /// BPE or word pieces of a GGUF file: normalise, split, merge, add begin and end. With `whole_newlines`, runs of line
    /// breaks that are tokens are not merged.
    GgufPipeline { pipeline: Box<tokenizers::Tokenizer>, whole_newlines: bool, ends: Ends },
    /// SentencePiece's models of a GGUF file: normalise, cut, add begin and end.
    GgufPieces { pieces: Box<Pieces>, normaliser: Box<Normaliser>, ends: Ends },
}

/// How SentencePiece cuts a normalised text.
enum Pieces {
    Spm(spm::Spm),
    Unigram(unigram::Unigram),
}

impl Pieces {
    fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        match self {
            Pieces::Spm(spm) => spm.encode(text, ids),
            Pieces::Unigram(unigram) => unigram.encode(text, ids),
        }
    }

    fn token_id(&self, text: &str) -> Option<TokenId> {
        match self {
            Pieces::Spm(spm) => spm.token_id(text),
            Pieces::Unigram(unigram) => unigram.token_id(text),
        }
    }
}

/// Tokens put around a text with [`AddSpecial::Yes`].
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    first: Option<TokenId>,
    last: Option<TokenId>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` with its companions.
    pub fn from_hf(files: HfTokenizerFiles) -> Result<Tokenizer, TokenizerError> {
        hf::load(files)
    }

    /// Builds the tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
        gguf::load(vocab)
    }

    /// Encodes `text`; special tokens that are spelled out in it become their ids.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_with(&self.added, text, special)
    }

    /// Encodes `text` as plain characters: what looks like a special token stays text, and nothing is added.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        self.encode_with(&self.added_plain, text, AddSpecial::No)
    }

    fn encode_with(
        &self,
        added: &AddedVocabulary,
        text: &str,
        special: AddSpecial,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let ids = self.encode_freely(added, text, special)?;
        match ids.iter().find(|&&id| id >= self.num_rows) {
            None => Ok(ids),
            Some(&id) => {
                let (text, rows) = (self.token_text(id), self.num_rows);
                let fault = format!("it has the token {text:?} ({id}), which the model's embedding of {rows} lacks");
                Err(TokenizerError::Encode(fault))
            }
        }
    }

    /// Encodes without a look at what the model has rows for.
    fn encode_freely(
        &self,
        added: &AddedVocabulary,
        text: &str,
        special: AddSpecial,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        match &self.encoder {
            Encoder::HuggingFace(pipeline) => {
                let pieces = added.extract_and_normalize(pipeline.get_normalizer(), text);
                encode_pieces(pipeline, pieces, special, false)
            }
            Encoder::GgufPipeline { pipeline, whole_newlines, ends } => {
                let pieces = added.extract_and_normalize(pipeline.get_normalizer(), text);
                Ok(ends.around(special, encode_pieces(pipeline, pieces, AddSpecial::No, *whole_newlines)?))
            }
            Encoder::GgufPieces { pieces, normaliser, ends } => {
                Ok(ends.around(special, encode_normalised(pieces, normaliser, added, text)?))
            }
        }
    }

    /// The text of `tokens`; incomplete or invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            if !(skip_special && self.is_special(token)) {
                bytes.extend_from_slice(self.table.bytes(token));
            }
        }
        let bytes = match bytes.as_slice() {
            [b' ', rest @ ..] if self.table.strips_first_space() => rest,
            all => all,
        };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// One token for display: its text, bytes that are no UTF-8 as `<0xE2>`.
    pub fn token_text(&self, token: TokenId) -> String {
        let mut text = String::new();
        for chunk in self.table.bytes(token).utf8_chunks() {
            text.push_str(chunk.valid());
            for byte in chunk.invalid() {
                text.push_str(&format!("<0x{byte:02X}>"));
            }
        }
        text
    }

    /// The bytes that the token adds to a text; empty for ids that the vocabulary does not know.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        self.table.bytes(token).to_vec()
    }

    /// True for tokens that stand for structure, such as the end of a turn, and not for text.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.table.is_special(token)
    }

    /// One more than the largest id. The model's logits may have more columns.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// Refuses to encode texts whose tokens lie beyond the `num_rows` of a model's embedding. Returns the ids of all such
    /// tokens.
    pub fn limit_to(&mut self, num_rows: u32) -> Vec<TokenId> {
        self.num_rows = num_rows;
        let beyond = num_rows..self.table.len().max(num_rows as usize) as TokenId;
        beyond.filter(|&id| self.is_added(id) || !self.table.bytes(id).is_empty()).collect()
    }

    /// True for special and user-defined tokens, which stand beside the vocabulary that texts are cut into.
    pub fn is_added(&self, token: TokenId) -> bool {
        self.added.get_added_tokens_decoder().contains_key(&token)
    }

    /// The id of a token by its exact text as the vocabulary spells it.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.encoder.token_id(text)
    }

    /// The text of the begin-of-sequence token.
    pub fn bos(&self) -> Option<&str> {
        text_of(&self.named.bos)
    }

    /// The text of the end-of-sequence token.
    pub fn eos(&self) -> Option<&str> {
        text_of(&self.named.eos)
    }

    /// The text of the unknown token.
    pub fn unk(&self) -> Option<&str> {
        text_of(&self.named.unk)
    }

    /// The text of the padding token.
    pub fn pad(&self) -> Option<&str> {
        text_of(&self.named.pad)
    }

    pub fn bos_id(&self) -> Option<TokenId> {
        id_of(&self.named.bos)
    }

    pub fn eos_id(&self) -> Option<TokenId> {
        id_of(&self.named.eos)
    }

    /// The named tokens as chat templates see them.
    pub fn special_tokens(&self) -> SpecialTokens {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        SpecialTokens { bos: owned(self.bos()), eos: owned(self.eos()), unk: owned(self.unk()), pad: owned(self.pad()) }
    }

    /// Special tokens that end a turn by convention (`<|im_end|>`, `<|eot_id|>`, …), besides [`Tokenizer::eos_id`].
    /// Files often name only one of several, so a server stops at these too.
    pub fn end_of_turn_ids(&self) -> Vec<TokenId> {
        let mut ids: Vec<TokenId> =
            END_OF_TURN.iter().filter_map(|text| self.token_id(text)).filter(|&id| self.is_special(id)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn table(&self) -> &TokenTable {
        &self.table
    }
}

const END_OF_TURN: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
];

fn text_of(token: &Option<NamedToken>) -> Option<&str> {
    token.as_ref().map(|t| t.text.as_str())
}

fn id_of(token: &Option<NamedToken>) -> Option<TokenId> {
    token.as_ref().and_then(|t| t.id)
}

impl Ends {
    fn around(self, special: AddSpecial, mut ids: Vec<TokenId>) -> Vec<TokenId> {
        if special == AddSpecial::Yes {
            if let Some(first) = self.first {
                ids.insert(0, first);
            }
            ids.extend(self.last);
        }
        ids
    }
}

impl Encoder {
    fn token_id(&self, text: &str) -> Option<TokenId> {
        match self {
            Encoder::HuggingFace(pipeline) | Encoder::GgufPipeline { pipeline, .. } => pipeline.token_to_id(text),
            Encoder::GgufPieces { pieces, .. } => pieces.token_id(text),
        }
    }
}

fn encode_pieces(
    pipeline: &tokenizers::Tokenizer,
    mut pieces: PreTokenizedString,
    special: AddSpecial,
    whole_newlines: bool,
) -> Result<Vec<TokenId>, TokenizerError> {
    let fault = |e: tokenizers::Error| TokenizerError::Encode(e.to_string());
    if let Some(splitter) = pipeline.get_pre_tokenizer() {
        splitter.pre_tokenize(&mut pieces).map_err(fault)?;
    }
    if whole_newlines {
        pieces.split(|_, piece| Ok([whole_newline_token(pipeline, piece)])).map_err(fault)?;
    }
    pipeline.get_model().tokenize_in_pretokenized(&mut pieces, None).map_err(fault)?;
    let encoding = pieces.into_encoding(None, 0, OffsetType::None).map_err(fault)?;
    let encoding = pipeline.post_process(encoding, None, special == AddSpecial::Yes).map_err(fault)?;
    Ok(encoding.get_ids().to_vec())
}

/// A run of line breaks with its token, where it has one.
fn whole_newline_token(
    pipeline: &tokenizers::Tokenizer,
    piece: NormalizedString,
) -> (NormalizedString, Option<Vec<Token>>) {
    let text = piece.get();
    let id = if text.bytes().all(|b| b == b'\n') { pipeline.token_to_id(text) } else { None };
    let token = id.map(|id| vec![Token::new(id, text.to_owned(), (0, text.len()))]);
    (piece, token)
}

/// llama.cpp normalises what lies between special tokens by itself: the prefix space comes at the start of the text and
/// again after each of them.
fn encode_normalised(
    model: &Pieces,
    normaliser: &Normaliser,
    added: &AddedVocabulary,
    text: &str,
) -> Result<Vec<TokenId>, TokenizerError> {
    let no_normalizer: Option<&tokenizers::NormalizerWrapper> = None;
    let pieces = added.extract_and_normalize(no_normalizer, text);
    let mut ids = Vec::new();
    for (piece, _, tokens) in pieces.get_splits(tokenizers::OffsetReferential::Original, OffsetType::None) {
        match tokens {
            Some(tokens) => ids.extend(tokens.iter().map(|t| t.id)),
            None => model.encode(&normaliser.normalise(piece), &mut ids)?,
        }
    }
    Ok(ids)
}
