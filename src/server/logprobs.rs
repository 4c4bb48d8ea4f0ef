//! Log-probabilities in the two shapes of OpenAI's API.

use super::wire::chat::{ChatLogprobs, TokenLogprob, TopLogprob};
use super::wire::completion::CompletionLogprobs;
use crate::ids::TokenId;
use crate::protocol::TokenLogprobs;
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};

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
        all.token_logprobs.push(row.logprob.max(LEAST));
        all.tokens.push(text);
        all.top_logprobs.push(top);
    }
    all
}
