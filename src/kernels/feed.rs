//! `feed`: what the last step drew becomes this step's input, so that a step can be submitted before anybody has read the
//! tokens of the one before it.

use std::sync::Arc;

use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};

const LANES: u32 = 64;

/// The kernel with its buffers. Steps that take all tokens from the CPU may record it as well.
#[derive(Debug)]
pub struct Feed(Arc<Bound>);

/// The defines of the one variant.
pub fn defines() -> Defines {
    Defines::new()
}

impl Feed {
    /// `sampled` is [`super::sample::Sampled`] `[num_logits]`, of the step before; `step_meta` is written to.
    pub fn new(gpu: &Gpu, step_meta: &BufferSlice, sampled: &BufferSlice) -> Result<Feed, GpuError> {
        let kernel = gpu.kernel("feed", &defines())?;
        Ok(Feed(gpu.bind(&kernel, &[("step_meta", step_meta), ("sampled", sampled)])?))
    }

    /// Before anything reads the step's tokens.
    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        recording.dispatch("feed", &self.0, num_tokens.div_ceil(LANES));
    }
}

/// Each token's id: what the logit row of the last step drew that `sources` names.
pub fn reference(sampled: &[u32], sources: &[u32]) -> Vec<u32> {
    sources.iter().map(|&row| sampled[row as usize]).collect()
}
