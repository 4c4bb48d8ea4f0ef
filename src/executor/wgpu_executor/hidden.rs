//! Hidden states that come back: the output norm of a step's tokens as f32, for embeddings.
//!
//! Guarantees: recorded only in steps that want them; a token's bits do not depend on the rest of the step.

use super::super::LoadError;
use super::activation::Activation;
use super::forward::{Builder, Scratch};
use super::shapes::StepShape;
use super::weights::NormWeights;
use crate::gpu::{BufferSlice, Recording};
use crate::kernels::context::RowCount;
use crate::kernels::norm::Norm;
use crate::kernels::stride;

/// The norm of all tokens, and where it writes.
pub struct Hidden {
    norm: Vec<Norm>,
    states: BufferSlice, // f32 [tokens, stride(hidden)]
    size: u32,
}

impl Hidden {
    /// Writes where nothing is read after the last layer, if there is room; to a buffer of its own where there is not.
    pub(super) fn new(b: &mut Builder<'_>, output_norm: &NormWeights, scratch: &Scratch) -> Result<Hidden, LoadError> {
        let (size, rows) = (b.spec.hidden_size, b.cfg.max_tokens_per_step);
        let bytes = u64::from(rows) * u64::from(stride(size)) * 4;
        let mut free = scratch.branch.iter().chain([&scratch.qkv]);
        let states = match free.find(|slice| slice.size >= bytes) {
            Some(slice) => slice.clone(),
            None => b.f32_rows("hidden states", rows, stride(size))?,
        };
        let out = Activation { f32: Some(states.clone()), i8: None };
        let norm = b.norm(Some(output_norm), scratch, &out, RowCount::Tokens)?;
        Ok(Hidden { norm, states, size })
    }

    /// Where the step wants them.
    pub fn record(&self, recording: &mut Recording, shape: StepShape) {
        let norms = self.norm.iter().filter(|_| shape.has_hidden);
        norms.for_each(|norm| norm.record(recording, shape.num_tokens));
    }

    /// Where the states of `number` tokens from `first` on lie.
    pub fn span(&self, (first, number): (u32, u32)) -> BufferSlice {
        let row = u64::from(stride(self.size)) * 4;
        self.states.buffer.slice(self.states.offset + u64::from(first) * row, u64::from(number) * row)
    }

    /// The states that were read back. [number, hidden_size]
    pub fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
        let rows = values.chunks_exact(stride(self.size) as usize);
        rows.flat_map(|row| &row[..self.size as usize]).copied().collect()
    }
}
