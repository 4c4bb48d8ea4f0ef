//! Log-probabilities in the two shapes of OpenAI's API.

use super::wire::chat::{ChatLogprobs, TokenLogprob, TopLogprob};
use super::wire::completion::CompletionLogprobs;
use super::wire::{PromptLogprob, PromptLogprobs};
use crate::ids::TokenId;
use crate::protocol::TokenLogprobs;
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// JSON has no infinity.
const LEAST: f32 = -9999.0;

/// The chat form: an entry per token, with its raw bytes.
pub fn of_chat(tokenizer: &Tokenizer, rows: &[TokenLogprobs]) -> ChatLogprobs {
    let top = |&(token, logprob): &(TokenId, f32)| TopLogprob {
        token: tokenizer.token_text(token),
        logprob: logprob.max(LEAST),
        bytes: tokenizer.token_bytes(token),
    };
    let row = |row: &TokenLogprobs| TokenLogprob {
        token: tokenizer.token_text(row.token),
        logprob: row.logprob.max(LEAST),
        bytes: tokenizer.token_bytes(row.token),
        top_logprobs: row.top.iter().map(top).collect(),
    };
    ChatLogprobs { content: rows.iter().map(row).collect() }
}

/// The completion form: parallel lists. `offset` is where the next token begins, in characters.
pub fn of_completion(tokenizer: &Tokenizer, rows: &[TokenLogprobs], offset: &mut usize) -> CompletionLogprobs {
    let mut all = CompletionLogprobs::default();
    for row in rows {
        let text = tokenizer.token_text(row.token);
        let mut top: Map<String, Value> = Map::new();
        for &(token, logprob) in row.top.iter().chain([&(row.token, row.logprob)]) {
            top.entry(tokenizer.token_text(token)).or_insert_with(|| logprob.max(LEAST).into());
        }
        all.text_offset.push(*offset);
        *offset += text.chars().count();
        all.token_logprobs.push(Some(row.logprob.max(LEAST)));
        all.tokens.push(text);
        all.top_logprobs.push(Some(top));
    }
    all
}

/// The tokens of an echoed prompt in the completion form; `rows` begin with the second one.
pub fn of_echo(
    tokenizer: &Tokenizer,
    first: TokenId,
    rows: &[TokenLogprobs],
    offset: &mut usize,
) -> CompletionLogprobs {
    let text = tokenizer.token_text(first);
    let mut all = CompletionLogprobs {
        text_offset: vec![*offset],
        token_logprobs: vec![None],
        tokens: vec![text.clone()],
        top_logprobs: vec![None],
    };
    *offset += text.chars().count();
    all.extend(of_completion(tokenizer, rows, offset));
    all
}

/// vLLM's form; `rows` begin with the second token of the prompt.
pub fn of_prompt(tokenizer: &Tokenizer, rows: &[TokenLogprobs]) -> PromptLogprobs {
    let entry = |token: TokenId, logprob: f32, rank: Option<u32>| {
        let logprob = logprob.max(LEAST);
        (token.to_string(), PromptLogprob { logprob, rank, decoded_token: tokenizer.token_text(token) })
    };
    let row = |row: &TokenLogprobs| {
        let top = row.top.iter().zip(1..).map(|(&(token, logprob), rank)| entry(token, logprob, Some(rank)));
        let mut all: BTreeMap<String, PromptLogprob> = top.collect();
        let (name, own) = entry(row.token, row.logprob, None);
        all.entry(name).or_insert(own);
        Some(all)
    };
    PromptLogprobs(std::iter::once(None).chain(rows.iter().map(row)).collect())
}
