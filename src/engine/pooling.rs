//! Embeddings: the hidden states of a prompt, pooled to one vector as the steps compute them.
//!
//! Guarantees: states are added in the order of positions, each once, in f64, so that the vector does not depend on
//! chunks, batch-mates or preemption; it is told before the run's terminal event. A mean needs every position: its request
//! takes nothing from the prefix cache (the handle gives it a salt of its own).

use super::core::EngineCore;
use crate::ids::RequestId;
use crate::protocol::{EngineEvent, Pooling, RunError};
use crate::scheduler::{PlanRow, StepPlan};

/// What a run has pooled so far.
#[derive(Debug)]
pub struct Pool {
    pooling: Pooling,
    /// Positions before this one are in.
    num_taken: u32,
    sum: Vec<f64>, // [hidden_size]
}

/// A span of the step's hidden states, and whose it is.
#[derive(Clone, Copy, Debug)]
pub struct PooledSpan {
    request: RequestId,
    first_position: u32,
    /// The prompt ends with it.
    is_last: bool,
}

impl Pool {
    pub fn new(pooling: Pooling) -> Self {
        Pool { pooling, num_taken: 0, sum: Vec::new() }
    }

    /// The positions of a row that are wanted: first and number.
    fn wanted(&self, row: &PlanRow) -> Option<(u32, u32)> {
        match self.pooling {
            Pooling::Last => row.wants_logits.then(|| (row.to() - 1, 1)),
            Pooling::Mean => {
                let first = row.from.max(self.num_taken);
                (first < row.to()).then(|| (first, row.to() - first))
            }
        }
    }

    fn take(&mut self, states: &[f32], number: usize) {
        let size = states.len() / number.max(1);
        self.sum.resize(size, 0.0);
        for state in states.chunks_exact(size.max(1)) {
            self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum += f64::from(*value));
            self.num_taken += 1;
        }
    }

    /// The vector; the error names a position whose state is not a number.
    fn finish(&self) -> Result<Vec<f32>, RunError> {
        let number = f64::from(self.num_taken.max(1));
        let values: Vec<f32> = self.sum.iter().map(|sum| (sum / number) as f32).collect();
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => Err(RunError::NotFinite { position: self.num_taken.saturating_sub(1) }),
        }
    }
}

/// The first `dimensions` values of a vector (or all), scaled to length 1.
pub fn normalised(mut values: Vec<f32>, dimensions: Option<usize>) -> Vec<f32> {
    values.truncate(dimensions.unwrap_or(usize::MAX));
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    values
}

impl EngineCore {
    /// Asks for the hidden states that pooled runs want of this step.
    pub(super) fn pool_rows(&mut self, plan: &StepPlan) -> Vec<PooledSpan> {
        let mut spans = Vec::new();
        if !self.runs.values().any(|run| run.pool.is_some()) {
            return spans;
        }
        let mut first_token = 0;
        for row in &plan.rows {
            let wanted = self.run_of(row.request).and_then(|(run, _)| run.pool.as_ref()?.wanted(row));
            if let Some((first_position, number)) = wanted {
                self.batch.hidden.push((first_token + first_position - row.from, number));
                spans.push(PooledSpan { request: row.request, first_position, is_last: row.wants_logits });
            }
            first_token += row.num_tokens;
        }
        spans
    }

    /// Pools what came back; a prompt that is through is told.
    pub(super) fn take_hidden(&mut self, spans: &[PooledSpan], hidden: &[Vec<f32>]) {
        let numbers: Vec<usize> = self.batch.hidden.iter().map(|(_, number)| *number as usize).collect();
        for ((span, states), number) in spans.iter().zip(hidden).zip(numbers) {
            let Some((run, _)) = self.run_of(span.request) else { continue };
            let Some(pool) = &mut run.pool else { continue };
            if pool.pooling == Pooling::Mean {
                assert_eq!(pool.num_taken, span.first_position, "a mean takes every position, in order");
            }
            pool.take(states, number);
            if span.is_last {
                let event = match pool.finish() {
                    Ok(values) => EngineEvent::Embedding { values },
                    Err(error) => EngineEvent::Failed { error },
                };
                run.events.push(event);
                run.pool = None;
            }
        }
    }
}
