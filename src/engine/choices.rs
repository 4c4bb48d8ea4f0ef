//! The outputs of one run: one, several, or the best of several.
//!
//! Guarantees: choice c draws from its own stream of random numbers, which depends on the run's seed and c alone; where
//! only the best are wanted nothing is sent before they are known, and they are the ones of highest mean
//! log-probability, the earlier first among equals.

use super::output::TextOutput;
use crate::ids::TokenId;
use crate::protocol::{Decoding, EngineEvent, FinishReason, InvalidParam, TokenLogprobs};

/// Outputs that one request may ask for.
pub const MAX_CHOICES: u32 = 256;

/// Each choice draws from its own stream; the first is that of a single output.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// How many outputs can be drawn; see [`super::beams::check`] for a search.
pub fn check(decoding: &Decoding) -> Result<(), InvalidParam> {
    let Decoding::Sample { n, best_of } = *decoding else { return Ok(()) };
    if n == 0 || n > best_of || best_of > MAX_CHOICES {
        let message = format!("must be from 1 to best_of, and best_of at most {MAX_CHOICES}, not {n} of {best_of}");
        return Err(InvalidParam { field: "n", message });
    }
    Ok(())
}

/// One output.
pub struct Choice {
    text: TextOutput,
    /// Output tokens turned to text so far.
    num_emitted: usize,
    logprob_sum: f64,
    num_scored: u32,
    end: Option<FinishReason>,
    /// What is kept back until the best are known.
    held: Option<Held>,
}

#[derive(Default)]
struct Held {
    text: String,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
}

impl Choice {
    /// `holds` keeps its text back.
    pub fn new(text: TextOutput, holds: bool) -> Self {
        let held = holds.then(Held::default);
        Choice { text, num_emitted: 0, logprob_sum: 0.0, num_scored: 0, end: None, held }
    }

    /// Takes a committed token: what is to be sent now, and the stop string that it completed.
    pub fn push(
        &mut self,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        is_stop_token: bool,
        shows_logprobs: bool,
    ) -> (Option<EngineEvent>, Option<String>) {
        self.num_emitted += 1;
        if let Some(logprobs) = &logprobs {
            self.logprob_sum += f64::from(logprobs.logprob);
            self.num_scored += 1;
        }
        let logprobs = logprobs.filter(|_| shows_logprobs);
        if is_stop_token {
            let event = self.text.push_stop_token(token, logprobs);
            return (self.hold(event), None);
        }
        let piece = self.text.push(token, logprobs);
        (self.hold(piece.event), piece.stop)
    }

    /// A token that is not sent.
    pub fn count(&mut self) {
        self.num_emitted += 1;
    }

    /// The end: what was held back as a possible stop string, unless a stop string or the client ended the output.
    pub fn end(&mut self, reason: FinishReason) -> Option<EngineEvent> {
        let event = if matches!(reason, FinishReason::StopString(_)) { None } else { self.text.flush() };
        self.end = Some(reason);
        event.and_then(|event| self.hold(event))
    }

    pub fn num_emitted(&self) -> usize {
        self.num_emitted
    }

    pub fn reason(&self) -> Option<&FinishReason> {
        self.end.as_ref()
    }

    /// Summed log-probability, where every token's was computed.
    pub fn cumulative_logprob(&self) -> Option<f32> {
        (self.num_scored > 0 && self.num_scored as usize == self.num_emitted).then_some(self.logprob_sum as f32)
    }

    fn mean_logprob(&self) -> f64 {
        if self.num_scored == 0 { f64::NEG_INFINITY } else { self.logprob_sum / f64::from(self.num_scored) }
    }

    /// The whole text as choice `rank`, once it is known to be among the best.
    pub fn release(&mut self, rank: u32) -> Option<EngineEvent> {
        let Held { text, tokens, logprobs } = self.held.take()?;
        Some(EngineEvent::Text { choice: rank, delta: text, tokens, logprobs })
    }

    fn hold(&mut self, event: EngineEvent) -> Option<EngineEvent> {
        let Some(held) = &mut self.held else { return Some(event) };
        if let EngineEvent::Text { delta, tokens, logprobs, .. } = event {
            held.text.push_str(&delta);
            held.tokens.extend(tokens);
            held.logprobs.extend(logprobs);
        }
        None
    }
}

/// Indices of the `n` best, best first.
pub fn best(choices: &[Choice], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by(|&a, &b| choices[b].mean_logprob().total_cmp(&choices[a].mean_logprob()));
    order.truncate(n);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fake;
    use std::sync::Arc;

    fn choice(logprobs: &[f32]) -> Choice {
        let tokenizer = Arc::new(fake::tokenizer());
        let mut choice = Choice::new(TextOutput::new(tokenizer, &[], 3), true);
        for &logprob in logprobs {
            let scored = TokenLogprobs { token: 97, logprob, top: Vec::new() };
            assert_eq!(choice.push(97, Some(scored), false, false), (None, None));
        }
        choice
    }

    #[test]
    fn the_best_have_the_highest_mean_and_the_earlier_is_first_among_equals() {
        let choices = [&[-3.0, -1.0][..], &[-1.0], &[-0.5, -1.5, -1.0], &[], &[-0.25, -0.25]].map(choice);
        assert_eq!(best(&choices, 3), [4, 1, 2]);
        assert_eq!(best(&choices, 9), [4, 1, 2, 0, 3]);
        assert_eq!(choices[0].cumulative_logprob(), Some(-4.0));
        assert_eq!(choices[3].cumulative_logprob(), None);
    }

    #[test]
    fn what_is_held_comes_whole_and_without_the_logprobs_that_nobody_asked_for() {
        let mut choice = choice(&[-1.0, -1.0]);
        assert_eq!(choice.end(FinishReason::MaxTokens), None);
        let whole = EngineEvent::Text { choice: 1, delta: "aa".into(), tokens: vec![97, 97], logprobs: Vec::new() };
        assert_eq!(choice.release(1), Some(whole));
    }

    #[test]
    fn counts_out_of_range_are_refused() {
        for (n, best_of) in [(0, 1), (2, 1), (1, 257), (300, 300)] {
            assert_eq!(check(&Decoding::Sample { n, best_of }).expect_err("out of range").field, "n");
        }
        assert_eq!(check(&Decoding::Sample { n: 2, best_of: 256 }), Ok(()));
    }

    #[test]
    fn streams_of_choices_differ_and_the_first_is_the_seed_itself() {
        assert_eq!(choice_seed(5, 0), 5);
        assert_ne!(choice_seed(5, 1), choice_seed(5, 2));
    }
}
