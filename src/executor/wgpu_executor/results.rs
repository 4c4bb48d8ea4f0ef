//! What a step gave back, read and put in the batch's order.

use super::swap::Outgoing;
use super::{Launched, Part, Pending, WgpuExecutor};
use crate::batch::{StepBatch, Want};
use crate::executor::{StepOutput, StepStats};
use crate::gpu::{Finished, GpuError};
use crate::kernels::sample::Sampled;
use crate::kernels::{canary, logprobs};
use crate::telemetry::kernels::by_kernel;

impl WgpuExecutor {
    /// Stores the content that left the pool with a finished submit.
    fn keep(&mut self, outgoing: Option<Outgoing>, kept: &[(Outgoing, Vec<u8>)], finished: &mut Finished) {
        for (outgoing, bytes) in kept {
            self.swapper.keep(outgoing, bytes);
        }
        if let Some(outgoing) = outgoing {
            let bytes = finished.readback.pop().unwrap_or_default();
            self.swapper.keep(&outgoing, &bytes);
        }
    }

    /// Waits for a step and takes its results.
    pub(super) fn finish(&mut self, mut pending: Pending) -> Result<StepOutput, GpuError> {
        let Launched { in_flight, load, outgoing, kept } = pending.launched?;
        self.replayer.prepare(&self.gpu);
        let in_vain = self.wait_in_vain(&mut pending.started)?;
        let mut finished = self.replayer.wait(&self.gpu, in_flight)?;
        if let Some(caps) = &mut self.caps {
            let step_us = finished.gpu_us.map_or_else(|| pending.started.elapsed().as_micros() as f64, f64::from);
            caps.observe(load.num_tokens, step_us, load.largest_part);
        }
        self.keep(outgoing, &kept, &mut finished);
        let swap_us = self.swapper.take_busy_us();
        let mut corrupted = Vec::new();
        if self.canary.is_some() && !pending.batch.chains.is_empty() {
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(&finished.readback.pop().unwrap_or_default());
            corrupted = canary::corruptions(&pending.batch, &words);
        }
        let spans = finished.readback.split_off(finished.readback.len().saturating_sub(pending.batch.hidden.len()));
        let hidden = spans.iter().map(|bytes| self.forward.hidden.decode(bytes)).collect();
        let times = finished.dispatches.iter().map(|(kernel, label, us)| (kernel.as_str(), label.as_str(), *us));
        let kernels = by_kernel(times);
        let ahead = u32::from(pending.rows.is_some());
        let stats = StepStats { ahead, in_vain, ..stats_of(&finished) };
        let mut out = StepOutput { stats, hidden, swap_us, corrupted, kernels, ..StepOutput::default() };
        if pending.batch.want == Want::Logits {
            let mut logits = Vec::with_capacity(pending.batch.num_logits() * self.spec.vocab_size as usize);
            self.take_logits(&finished, &mut logits);
            let mut first = pending.num_logits as usize;
            while first < pending.batch.num_logits() {
                let round = self.round(&pending.batch, first);
                first += round.num_logits();
                let (in_flight, ..) = self.submit(&round, Part::Head)?;
                let finished = self.replayer.wait(&self.gpu, in_flight)?;
                self.take_logits(&finished, &mut logits);
                add(&mut out.stats, stats_of(&finished));
            }
            out.logits = Some(logits);
        } else {
            self.take_tokens((&pending.batch, pending.rows.as_deref()), &finished, &mut out);
            out.scored = self.score(&pending.batch)?;
        }
        self.ahead.step_drew(&out.tokens, pending.started.elapsed());
        out.gpu_us = finished.gpu_us.unwrap_or_else(|| pending.started.elapsed().as_micros() as u32);
        Ok(out)
    }

    /// Tokens and log-probabilities of the batch's rows, which are `rows` of what ran, or all of it in order.
    fn take_tokens(&self, (batch, rows): (&StepBatch, Option<&[u32]>), finished: &Finished, out: &mut StepOutput) {
        let Some(bytes) = finished.readback.first() else { return };
        let sampled: Vec<Sampled> = bytemuck::pod_collect_to_vec(bytes);
        let told = finished.readback.get(1).map_or(&[][..], Vec::as_slice);
        for (l, rules) in batch.sampling.iter().enumerate() {
            let row = rows.map_or(l, |rows| rows[l] as usize);
            let drawn = sampled[row];
            out.tokens.push(drawn.token);
            out.not_finite.push(drawn.not_finite != 0);
            out.logprobs.push(match (rules.logprobs, told.chunks_exact(logprobs::ROW_BYTES as usize).nth(row)) {
                (Some(asked), Some(told)) => Some(logprobs::decode(told, drawn.token, asked)),
                _ => None,
            });
        }
    }
}

fn stats_of(finished: &Finished) -> StepStats {
    let s = finished.stats;
    let (submits, passes, dispatches) = (s.submits, s.passes, s.dispatches);
    StepStats { submits, passes, dispatches, readback_bytes: s.readback_bytes, ..StepStats::default() }
}

fn add(total: &mut StepStats, more: StepStats) {
    total.submits += more.submits;
    total.passes += more.passes;
    total.dispatches += more.dispatches;
    total.readback_bytes += more.readback_bytes;
}
