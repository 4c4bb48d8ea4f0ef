//! Log-probabilities of tokens that are known to follow: the head again over hidden states of the step, in rounds of their
//! own after it, with the known tokens in the place of sampled ones.
//!
//! Guarantees: no logits come back, only a row for each token; steps without scored tokens cost nothing.

use super::WgpuExecutor;
use super::shapes::StepShape;
use crate::batch::{RowSampling, ScoredToken, StepBatch};
use crate::gpu::{Finished, GpuError};
use crate::kernels::attention_work::WorkCounts;
use crate::kernels::lora_work::LoraShape;
use crate::kernels::sample::Sampled;
use crate::kernels::{logprobs, step_meta};
use crate::protocol::{SamplingParams, TokenLogprobs};

impl WgpuExecutor {
    /// Logit rows from `first` on, as many as one round takes.
    pub(super) fn round(&self, batch: &StepBatch, first: usize) -> StepBatch {
        let last = (first + self.forward.max_logits as usize).min(batch.num_logits());
        StepBatch { logit_tokens: batch.logit_tokens[first..last].to_vec(), ..batch.clone() }
    }

    pub(super) fn take_logits(&self, finished: &Finished, out: &mut Vec<f32>) {
        let (stride, vocab) = (self.forward.logits_stride as usize, self.spec.vocab_size as usize);
        for bytes in finished.readback.iter().take(1) {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
            values.chunks_exact(stride).for_each(|row| out.extend_from_slice(&row[..vocab]));
        }
    }

    /// Scores the tokens of a step that has run.
    pub(super) fn score(&mut self, batch: &StepBatch) -> Result<Vec<TokenLogprobs>, GpuError> {
        let mut all = Vec::with_capacity(batch.scored.len());
        for round in batch.scored.chunks(self.forward.max_logits as usize) {
            self.score_round(batch, round, &mut all)?;
        }
        Ok(all)
    }

    fn score_round(
        &mut self,
        batch: &StepBatch,
        round: &[ScoredToken],
        all: &mut Vec<TokenLogprobs>,
    ) -> Result<(), GpuError> {
        let sampling = |s: &ScoredToken| RowSampling {
            logprobs: Some(s.num_top),
            ..RowSampling::new(&SamplingParams::greedy(), 0)
        };
        let rows = StepBatch {
            block_size: batch.block_size,
            input_ids: batch.input_ids.clone(),
            positions: batch.positions.clone(),
            logit_tokens: round.iter().map(|s| s.token_idx).collect(),
            sampling: round.iter().map(sampling).collect(),
            penalty_start: vec![0; round.len() + 1],
            bias_start: vec![0; round.len() + 1],
            ..StepBatch::default()
        };
        step_meta::encode(&rows, &self.work, &mut self.meta_words);
        let bytes = bytemuck::cast_slice(&self.meta_words);
        self.gpu.write(&self.meta.slice(0, bytes.len() as u64), bytes);
        let known: Vec<Sampled> = round.iter().map(|s| Sampled { token: s.next, not_finite: 0 }).collect();
        self.gpu.write(&self.forward.sampled.whole(), bytemuck::cast_slice(&known));
        self.recording.clear();
        let shape = StepShape {
            num_tokens: 0,
            num_logits: round.len() as u32,
            attention: WorkCounts::some(1),
            has_penalties: false,
            has_masks: false,
            has_logprobs: true,
            has_hidden: false,
            lora: LoraShape::default(),
        };
        self.forward.record_head(&mut self.recording, shape, false);
        self.forward.logprobs.record(&mut self.recording, shape.num_logits);
        let readback = [self.forward.row_logprobs.slice(0, round.len() as u64 * logprobs::ROW_BYTES)];
        let in_flight = self.replayer.submit(&self.gpu, &self.recording, &readback)?;
        let finished = self.replayer.wait(&self.gpu, in_flight)?;
        let rows = finished.readback.iter().flat_map(|bytes| bytes.chunks_exact(logprobs::ROW_BYTES as usize));
        all.extend(round.iter().zip(rows).map(|(s, row)| logprobs::decode(row, s.next, s.num_top)));
        Ok(())
    }
}
