//! Unigram vocabularies (`tokenizer.ggml.model` "t5").
//!
//! Guarantees SentencePiece's ids. Not attempted: spaces that end words instead of beginning them.

use super::{GgufVocab, added_tokens, assemble, bpe, ends, named_tokens, normaliser, scores, table, token_types};
use crate::ids::TokenId;
use crate::tokenizer::table::sentencepiece_bytes;
use crate::tokenizer::unigram::Unigram;
use crate::tokenizer::{Encoder, Pieces, Tokenizer, TokenizerError};

pub(super) fn load(mut vocab: GgufVocab) -> Result<Tokenizer, TokenizerError> {
    let default_id = |id: TokenId| (vocab.tokens.len() > id as usize).then_some(id);
    vocab.pad = vocab.pad.or(default_id(0));
    vocab.eos = vocab.eos.or(default_id(1));
    vocab.unk = vocab.unk.or(default_id(2));
    vocab.add_eos = vocab.add_eos.or(Some(true));

    let scores = scores(&mut vocab)?;
    let types = token_types(&vocab)?;
    let named = named_tokens(&vocab)?;
    let ends = ends(&vocab, &named, false)?;
    let normaliser = normaliser(&vocab, false)?;
    let table = table(&vocab, &types, normaliser.adds_prefix, sentencepiece_bytes)?;

    let special = types.iter().enumerate().filter(|(_, t)| t.is_added());
    let ids = special.map(|(id, _)| (vocab.tokens[id].clone(), id as TokenId)).collect();
    let added = added_tokens(&vocab, &types, &bpe(ids, Vec::new(), false, false)?)?;
    let unigram = Unigram::new(&vocab.tokens, scores, |id| !types[id as usize].is_added(), vocab.unk);
    let pieces = Box::new(Pieces::Unigram(unigram));
    Ok(assemble(Encoder::GgufPieces { pieces, normaliser: Box::new(normaliser), ends }, added, table, named))
}
