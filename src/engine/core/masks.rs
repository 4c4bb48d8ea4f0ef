//! Which tokens the rows of a step may draw: the masks of constrained runs; and which need no drawing.

use super::EngineCore;
use crate::ids::{RequestId, TokenId};
use crate::protocol::{FinishReason, InvalidParam, RunError};
use crate::scheduler::StepPlan;
use crate::telemetry::StepRecord;
use std::collections::HashMap;

impl EngineCore {
    /// Puts the masks of constrained rows into the batch. Requests whose constraint failed come back; their rows may draw
    /// anything, since what they draw is not told.
    pub(super) fn mask_rows(&mut self, plan: &StepPlan) -> Vec<(RequestId, RunError)> {
        let mut failed = Vec::new();
        if !self.runs.values().any(|run| run.is_constrained()) {
            return failed;
        }
        let mut mask = vec![0u32; self.model.vocab_size.div_ceil(32) as usize];
        for (l, row) in plan.rows.iter().filter(|row| row.wants_logits).enumerate() {
            let Some((_, run)) = self.runs.range_mut(..=row.request).next_back() else { continue };
            let Some(choice) = run.choice_of(row.request) else { continue };
            let Some(constraint) = run.constraint(choice) else { continue };
            let output = self.scheduler.get(row.request).map_or(&[][..], |seq| seq.output());
            match constraint.allow(output, &mut mask) {
                Ok(()) => self.batch.mask_row(l, &mask),
                Err(message) => {
                    let message = format!("cannot be followed: {message}");
                    failed.push((row.request, InvalidParam { field: "structured_outputs", message }.into()));
                }
            }
        }
        failed
    }

    /// Appends what the grammars force behind the tokens that this step sampled: the next step computes it beside them, so
    /// that no step is made for a token that is known. Runs that tell log-probabilities go token by token, since a forced
    /// token has none, and so do all runs of models with windows; the tokens are the same. At the end of a block the next
    /// step is made for one token, and takes the next block as any step does.
    pub(super) fn jump_forward(&mut self, record: &mut StepRecord) {
        if !self.runs.values().any(|run| run.is_constrained()) {
            return;
        }
        let mut stops = HashMap::new();
        for shown in record.rows.iter_mut().filter(|row| row.sampled.is_some()) {
            let request = shown.request;
            let Some(seq) = self.scheduler.get(request) else { continue };
            if seq.sampling().logprobs.is_some() {
                continue;
            }
            let Some((_, run)) = self.runs.range_mut(..=request).next_back() else { continue };
            let Some(constraint) = run.choice_of(request).and_then(|choice| run.constraint(choice)) else { continue };
            // A fault comes up again where the next token is to be drawn, and ends the run there.
            let forced = constraint.forced(seq.output()).unwrap_or_default();
            let num_taken = self.take_forced(request, &forced, &mut stops);
            shown.forced = forced[..num_taken].to_vec();
        }
        self.settle_ended(&stops);
    }

    /// Appends and tells forced tokens up to the end of the output; how many.
    fn take_forced(&mut self, request: RequestId, forced: &[TokenId], stops: &mut HashMap<RequestId, String>) -> usize {
        let at = self.step_time();
        for (i, &token) in forced.iter().enumerate() {
            if !self.scheduler.can_force(request) {
                return i;
            }
            let finish = self.scheduler.force(request, token);
            self.shared.add_totals(|t| t.forced_tokens += 1);
            let Some((run, choice)) = self.run_of(request) else { return i };
            let is_stop_token = matches!(finish, Some(FinishReason::StopToken(_)));
            if let Some(stop) = run.token(at, choice, token, None, is_stop_token) {
                self.scheduler.finish(request, FinishReason::StopString(stop.clone()));
                stops.insert(request, stop);
                return i + 1;
            }
            if finish.is_some() {
                return i + 1;
            }
        }
        forced.len()
    }
}
