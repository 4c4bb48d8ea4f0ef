//! Tokens to text, one at a time.
//!
//! Guarantees: the concatenation of all pieces equals [`Tokenizer::decode`] of all tokens; a piece never ends inside a
//! UTF-8 character; at most three bytes are held back; each token costs time in its own length only.

use super::Tokenizer;
use crate::ids::TokenId;
use std::sync::Arc;

/// The state of one stream of tokens.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The start of a character whose other bytes have not come yet.
    pending: Vec<u8>,
    /// The next byte is the first of the text, and a space there belongs to the encoding.
    strips_space: bool,
}

impl Detokenizer {
    /// For tokens that start a text of their own, such as an answer in a chat.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Detokenizer {
        let strips_space = tokenizer.table().strips_first_space();
        Detokenizer { tokenizer, skip_special, pending: Vec::with_capacity(8), strips_space }
    }

    /// For tokens that go on after other text, such as a completion: a leading space is kept.
    pub fn continuing(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Detokenizer {
        Detokenizer { strips_space: false, ..Detokenizer::new(tokenizer, skip_special) }
    }

    /// Special tokens are part of the text.
    pub fn showing_special(self) -> Detokenizer {
        Detokenizer { skip_special: false, ..self }
    }

    /// The text that `token` completes; empty while a character is incomplete.
    pub fn push(&mut self, token: TokenId) -> String {
        if self.skip_special && self.tokenizer.is_special(token) {
            return String::new();
        }
        let mut bytes = self.tokenizer.table().bytes(token);
        if self.strips_space && !bytes.is_empty() {
            self.strips_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        self.take_complete()
    }

    /// What was held back, as U+FFFD, since its other bytes never came. The stream ends here.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    /// True when a character is incomplete.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = done + invalid.len() == self.pending.len();
            if is_last && is_incomplete(invalid) {
                break;
            }
            if !invalid.is_empty() {
                text.push('\u{fffd}');
            }
            done += invalid.len();
        }
        self.pending.drain(..done);
        text
    }
}

/// True if more bytes can make this the start of a valid character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}
