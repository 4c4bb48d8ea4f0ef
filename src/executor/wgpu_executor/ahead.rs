//! Steps that are submitted before they are asked for: while a step runs, the one in which all of its rows go on waits behind
//! it, and takes its tokens from it on the GPU. So the adapter need not wait until tokens were read and the next step planned.
//!
//! Guarantees: what was submitted ahead counts only for a batch whose every row is computed from the same numbers
//! ([`StepBatch::rows_in`]); for any other it has run in vain, and the batch is run as ever, behind it. What ran in vain has
//! written only to slots behind the last that its row computed, before anything that was asked for later: nobody was told
//! of them, and who writes there next does so after it. So no bit of a result depends on it.
//! Where batches keep turning out other than foreseen, what runs in vain costs more than it saves: then none is submitted.
//! It does not attempt rows that need another block, penalties, grammars, beams, prompts that are read further, the canary, or
//! layers in host memory.

use std::time::{Duration, Instant};

use super::{Load, Part, Pending, WgpuExecutor};
use crate::batch::StepBatch;
use crate::gpu::{GpuError, InFlight};
use crate::ids::TokenId;

/// Whether steps are submitted ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepsAhead {
    #[default]
    Never,
    /// As long as what they save is more than what those in vain cost.
    WhenItPays,
    /// Wherever it is possible: for tests and measurements.
    Always,
}

/// What was submitted ahead, and what became of it before.
#[derive(Debug, Default)]
pub struct Ahead {
    mode: StepsAhead,
    worth: Worth,
    guess: Option<Guess>,
    /// Turned out wrong, and not waited for yet.
    in_vain: Vec<InFlight>,
    /// When the last step had been waited for, and how long it took.
    last: Option<(Instant, Duration)>,
    num_foreseen: u64,
    num_in_vain: u64,
}

/// The batch that is likely to come next.
#[derive(Debug)]
struct Guess {
    batch: StepBatch,
    /// What the step before drew, once it was read.
    tokens: Option<Vec<TokenId>>,
    /// Where it was submitted.
    run: Option<Run>,
}

#[derive(Debug)]
struct Run {
    in_flight: InFlight,
    load: Load,
    submitted: Instant,
}

/// A step that had been submitted before it was asked for.
#[derive(Debug)]
pub struct Taken {
    pub in_flight: InFlight,
    pub load: Load,
    /// From when on it had the adapter.
    pub started: Instant,
    /// Which logit row of it each of the batch is.
    pub rows: Vec<u32>,
}

/// What a step ahead saves, on average over the last ones, in microseconds. Guesses count also where they were not submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Worth(f64);

impl Worth {
    /// Guesses that the average goes over, about.
    const WINDOW: f64 = 32.0;

    /// A batch was asked for so long after the last step, of which it was known how long steps take. If it was foreseen, the
    /// adapter would have waited in between; if not, it would have been busy with the guess for the rest of the time.
    fn observe(&mut self, was_foreseen: bool, between: Duration, step: Duration) {
        let (between_us, step_us) = (between.as_micros() as f64, step.as_micros() as f64);
        let saved = if was_foreseen { between_us.min(step_us) } else { (between_us - step_us).min(0.0) };
        self.0 += (saved - self.0) / Self::WINDOW;
    }

    /// From the start on, until something else is known.
    fn pays(self) -> bool {
        self.0 >= 0.0
    }
}

impl Ahead {
    pub fn is_on(&self) -> bool {
        self.mode != StepsAhead::Never
    }

    /// What runs as this batch already, if it does.
    pub fn take(&mut self, batch: &StepBatch) -> Option<Taken> {
        let Guess { batch: guessed, tokens, run } = self.guess.take()?;
        let rows = tokens.and_then(|tokens| batch.rows_in(&guessed, &tokens));
        if let Some((ended, step)) = self.last {
            self.worth.observe(rows.is_some(), ended.elapsed(), step);
        }
        let Run { in_flight, load, submitted } = run?;
        let Some(rows) = rows else {
            self.num_in_vain += 1;
            self.in_vain.push(in_flight);
            return None;
        };
        self.num_foreseen += 1;
        let started = self.last.map_or(submitted, |(ended, _)| ended.max(submitted));
        Some(Taken { in_flight, load, started, rows })
    }

    /// A step was waited for, took so long, and drew these tokens.
    pub fn step_drew(&mut self, tokens: &[TokenId], took: Duration) {
        self.last = Some((Instant::now(), took));
        if let Some(guess) = &mut self.guess {
            guess.tokens = Some(tokens.to_vec());
        }
    }

    fn pays(&self) -> bool {
        self.mode == StepsAhead::Always || self.worth.pays()
    }
}

impl WgpuExecutor {
    /// Whether the step that is likely to come next is submitted while one runs; never from the start. Layers in host memory
    /// are sent for steps that are asked for only. No bit of a result depends on it, but with cooperative matrices.
    pub fn set_steps_ahead(&mut self, mode: StepsAhead) {
        self.ahead.mode = if self.streamed_bytes() == 0 { mode } else { StepsAhead::Never };
    }

    /// Steps so far that had been submitted before they were asked for, and others that had been in vain.
    pub fn num_ahead(&self) -> (u64, u64) {
        (self.ahead.num_foreseen, self.ahead.num_in_vain)
    }

    /// Foresees the step that is likely to follow the one in flight, if that can be known, and submits it if that pays.
    pub(super) fn go_ahead(&mut self) {
        let Some(Pending { batch, rows, launched: Ok(_), .. }) = self.in_flight.as_ref().filter(|_| self.ahead.is_on())
        else {
            return;
        };
        let has_room = |next: &StepBatch| next.positions.iter().all(|position| *position < self.cfg.max_model_len);
        let Some(next) = batch.step_after().filter(has_room) else { return };
        let sources = rows.clone().unwrap_or_else(|| (0..next.num_rows() as u32).collect());
        // A fault shows again, and is told, when the step is asked for.
        let run = match self.ahead.pays() && self.check(&next).is_ok() {
            true => self.submit_ahead(&next, &sources).ok(),
            false => None,
        };
        self.ahead.guess = Some(Guess { batch: next, tokens: None, run });
    }

    fn submit_ahead(&mut self, next: &StepBatch, sources: &[u32]) -> Result<Run, GpuError> {
        let submitted = Instant::now();
        let (in_flight, load, _) = self.submit(next, Part::Fed(sources))?;
        Ok(Run { in_flight, load, submitted })
    }

    /// Waits for what ran in vain before a step, which had the adapter from then on; how many there were.
    pub(super) fn wait_in_vain(&mut self, started: &mut Instant) -> Result<u32, GpuError> {
        let in_vain = std::mem::take(&mut self.ahead.in_vain);
        let num = in_vain.len() as u32;
        for in_flight in in_vain {
            self.replayer.wait(&self.gpu, in_flight)?;
            *started = Instant::now();
        }
        Ok(num)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worth after rounds of so many batches foreseen, then one that was not; a step takes 10 ms.
    fn worth(between_us: u64, foreseen: u32) -> Worth {
        let (between, step) = (Duration::from_micros(between_us), Duration::from_millis(10));
        let mut worth = Worth::default();
        for _ in 0..40 {
            (0..foreseen).for_each(|_| worth.observe(true, between, step));
            worth.observe(false, between, step);
        }
        (0..foreseen / 2).for_each(|_| worth.observe(true, between, step));
        worth
    }

    #[test]
    fn steps_go_ahead_while_they_save_more_than_they_cost() {
        assert!(Worth::default().pays());
        assert!(worth(1_000, 60).pays(), "60 ms saved, 9 lost");
        assert!(!worth(1_000, 4).pays(), "4 ms saved, 9 lost");
        assert!(!worth(50, 60).pays(), "3 ms saved, 10 lost");
        assert!(worth(20_000, 1).pays(), "what ran in vain was over before anybody asked");
    }
}
