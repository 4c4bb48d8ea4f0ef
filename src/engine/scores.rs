//! Log-probabilities of prompts: a row for each token but the first, gathered as the steps compute them.
//!
//! Guarantees: each token is scored once, in order, whatever the chunks; the rows are told before the run's first text. A
//! prompt that is scored takes nothing from the prefix cache (the handle gives its request a salt of its own).

use super::core::EngineCore;
use crate::batch::ScoredToken;
use crate::ids::RequestId;
use crate::protocol::{EngineEvent, TokenLogprobs};
use crate::scheduler::StepPlan;

/// What a run has scored so far.
#[derive(Debug)]
pub struct Scores {
    num_top: u8,
    rows: Vec<TokenLogprobs>,
}

impl Scores {
    pub fn new(num_top: u8) -> Self {
        Scores { num_top, rows: Vec::new() }
    }
}

/// Tokens that a step scores, and whose they are.
#[derive(Clone, Copy, Debug)]
pub struct ScoredSpan {
    request: RequestId,
    number: usize,
    /// The prompt ends with it.
    is_last: bool,
}

impl EngineCore {
    /// Asks for the scores of prompts that this step computes.
    pub(super) fn score_rows(&mut self, plan: &StepPlan) -> Vec<ScoredSpan> {
        let mut spans = Vec::new();
        if !self.runs.values().any(|run| run.scores.is_some()) {
            return spans;
        }
        let mut first_token = 0;
        for row in &plan.rows {
            let wanted = self.run_of(row.request).filter(|(_, choice)| *choice == 0);
            let wanted = wanted.and_then(|(run, _)| run.scores.as_ref().map(|s| (s.rows.len() as u32, s.num_top)));
            let seq = self.scheduler.get(row.request);
            if let (Some((num_taken, num_top)), Some(seq)) = (wanted, seq) {
                // The state at a position scores the token of the next one.
                let (from, to) = (row.from.max(num_taken), row.to().min(seq.num_prompt() - 1));
                for position in from..to {
                    let next = seq.tokens()[position as usize + 1];
                    self.batch.scored.push(ScoredToken { token_idx: first_token + position - row.from, next, num_top });
                }
                let number = to.saturating_sub(from) as usize;
                spans.push(ScoredSpan { request: row.request, number, is_last: row.wants_logits });
            }
            first_token += row.num_tokens;
        }
        spans
    }

    /// Gathers what came back; a prompt that is through is told.
    pub(super) fn take_scores(&mut self, spans: &[ScoredSpan], scored: Vec<TokenLogprobs>) {
        let mut scored = scored.into_iter();
        for span in spans {
            let rows: Vec<TokenLogprobs> = scored.by_ref().take(span.number).collect();
            let Some((run, _)) = self.run_of(span.request) else { continue };
            let Some(scores) = &mut run.scores else { continue };
            scores.rows.extend(rows);
            if span.is_last {
                let rows = std::mem::take(&mut scores.rows);
                run.events.push(EngineEvent::PromptLogprobs { rows });
                run.scores = None;
            }
        }
    }
}
