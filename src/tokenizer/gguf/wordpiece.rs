//! BERT's vocabularies (`tokenizer.ggml.model` "bert"): words are cut into the longest pieces from the left.
//!
//! GGUF files mark the pieces that begin a word with `▁` where BERT's own files mark those that go on with `##`. Guarantees
//! the ids of Hugging Face's BERT tokenizers.

use super::{GgufVocab, added_tokens, assemble, named_tokens, table, token_types};
use crate::ids::TokenId;
use crate::tokenizer::table::sentencepiece_bytes;
use crate::tokenizer::{Encoder, Ends, Tokenizer, TokenizerError};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;

/// Words of more characters are unknown.
const MAX_WORD: usize = 100;

/// Ids of `[PAD]`, `[UNK]`, `[CLS]` and `[SEP]` in files that do not name them.
const DEFAULTS: [TokenId; 4] = [0, 100, 101, 102];

pub(super) fn load(mut vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    let default_id = |i: usize| Some(DEFAULTS[i]).filter(|id| (*id as usize) < vocab.tokens.len());
    vocab.pad = vocab.pad.or(default_id(0));
    vocab.unk = vocab.unk.or(default_id(1));
    vocab.bos = vocab.bos.or(default_id(2));
    vocab.sep = vocab.sep.or(default_id(3));
    let needed = |key, id: Option<TokenId>| match id {
        Some(id) if (id as usize) < vocab.tokens.len() => Ok(id),
        Some(id) => Err(TokenizerError::bad(key, format!("token {id} is outside the vocabulary"))),
        None => Err(TokenizerError::bad(key, "it is missing")),
    };
    let unk = needed("tokenizer.ggml.unknown_token_id", vocab.unk)?;
    let ends = Ends {
        first: Some(needed("tokenizer.ggml.bos_token_id", vocab.bos)?).filter(|_| vocab.add_bos.unwrap_or(true)),
        last: Some(needed("tokenizer.ggml.seperator_token_id", vocab.sep)?),
    };
    let types = token_types(&vocab)?;
    let named = named_tokens(&vocab)?;
    let table = table(&vocab, &types, true, sentencepiece_bytes)?;

    let spelled = |(id, token): (usize, &String)| {
        let text = match token.strip_prefix('▁') {
            Some(start) => start.to_owned(),
            None if types[id].is_added() => token.clone(),
            None => format!("##{token}"),
        };
        (text, id as TokenId)
    };
    let bad = |e: tokenizers::Error| TokenizerError::bad(super::TOKENS, e.to_string());
    let ids: tokenizers::models::bpe::Vocab = vocab.tokens.iter().enumerate().map(spelled).collect();
    let model = WordPiece::builder()
        .vocab(ids)
        .unk_token(vocab.tokens[unk as usize].clone())
        .continuing_subword_prefix("##".into())
        .max_input_chars_per_word(MAX_WORD)
        .build()
        .map_err(bad)?;
    let lowercase = vocab.lowercase.unwrap_or(true);
    let mut pipeline = tokenizers::Tokenizer::new(model);
    pipeline.with_normalizer(Some(BertNormalizer::new(true, true, vocab.strip_accents, lowercase))).map_err(bad)?;
    pipeline.with_pre_tokenizer(Some(BertPreTokenizer));
    let added = added_tokens(&vocab, &types, pipeline.get_model())?;
    Ok(assemble(
        Encoder::GgufPipeline { pipeline: Box::new(pipeline), whole_newlines: false, ends },
        added,
        table,
        named,
    ))
}
