//! From drawn tokens to what the client sees: text that never splits a character, stop strings, flush at the end.
//!
//! Guarantees: the deltas of a run concatenate to the text before the stop; text is held back only while it is a proper
//! prefix of a stop string or an incomplete character; an incomplete character at the end is left out. Each token is
//! reported once, also over preemption and recovery, since only newly committed tokens arrive here.

use super::stop_strings::StopMatcher;
use crate::ids::TokenId;
use crate::protocol::{EngineEvent, TokenLogprobs};
use crate::tokenizer::{Detokenizer, Tokenizer};
use std::sync::Arc;

/// The text side of one run.
#[derive(Clone)]
pub struct TextOutput {
    choice: u32,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
}

/// One committed token, turned to text.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    pub event: EngineEvent,
    /// The stop string that the token completed.
    pub stop: Option<String>,
}

impl TextOutput {
    /// Special tokens are left out of the text; a leading space is kept, since the text goes on after the prompt.
    pub fn new(tokenizer: Arc<Tokenizer>, stop_strings: &[String], choice: u32) -> Self {
        let detokenizer = Detokenizer::continuing(tokenizer, true);
        TextOutput { choice, detokenizer, matcher: StopMatcher::new(stop_strings) }
    }

    /// Special tokens are part of the text, too.
    pub fn showing_special(mut self, shows: bool) -> Self {
        if shows {
            self.detokenizer = self.detokenizer.showing_special();
        }
        self
    }

    /// Takes the next token of the output.
    pub fn push(&mut self, token: TokenId, logprobs: Option<TokenLogprobs>) -> Piece {
        let matched = self.matcher.push(&self.detokenizer.push(token));
        let event = EngineEvent::Text {
            choice: self.choice,
            delta: matched.text,
            tokens: vec![token],
            logprobs: logprobs.into_iter().collect(),
        };
        Piece { event, stop: matched.stop }
    }

    /// Takes a token that ends the output: it is reported, but is not part of the text.
    pub fn push_stop_token(&mut self, token: TokenId, logprobs: Option<TokenLogprobs>) -> EngineEvent {
        EngineEvent::Text {
            choice: self.choice,
            delta: String::new(),
            tokens: vec![token],
            logprobs: logprobs.into_iter().collect(),
        }
    }

    /// What was held back as a possible stop string, once the output ended for another reason.
    pub fn flush(&mut self) -> Option<EngineEvent> {
        let delta = self.matcher.flush();
        let choice = self.choice;
        (!delta.is_empty()).then(|| EngineEvent::Text { choice, delta, tokens: Vec::new(), logprobs: Vec::new() })
    }
}
