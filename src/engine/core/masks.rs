//! Which tokens the rows of a step may draw: the masks of constrained runs.

use super::EngineCore;
use crate::ids::RequestId;
use crate::protocol::{InvalidParam, RunError};
use crate::scheduler::StepPlan;

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
}
