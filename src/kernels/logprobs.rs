//! `logprobs`: for rows that ask, the log-probability of the sampled token and the most likely tokens. The reference is
//! [`crate::sampling::reference::logprobs`]. Logits are those after penalties and biases, at temperature 1.

use std::sync::Arc;

use super::Class;
use super::sample::workgroup_size;
use crate::gpu::{Bound, BufferSlice, Defines, Gpu, GpuError, Recording};
use crate::protocol::TokenLogprobs;

/// Most alternatives that a row can ask for.
pub const MAX_TOP: u32 = 20;
/// Bytes of one row's result.
pub const ROW_BYTES: u64 = 8 * (1 + MAX_TOP as u64);

/// The file and defines, for compiling ahead.
pub fn kernel(class: Class) -> (&'static str, Defines) {
    ("logprobs", Defines::new().set("WG", i64::from(workgroup_size(class))).set("TOP", i64::from(MAX_TOP)))
}

/// What [`Logprobs::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    pub step_meta: &'a BufferSlice,
    /// f32 `[num_logits, stride]`
    pub logits: &'a BufferSlice,
    /// As `sample` wrote it.
    pub sampled: &'a BufferSlice,
    /// [`ROW_BYTES`] per logit row, written for rows that ask.
    pub logprobs: &'a BufferSlice,
    /// Holds `sample`'s `Params`.
    pub params: &'a BufferSlice,
}

/// The kernel with its buffers. Record it after `sample`, only when some row asks.
#[derive(Clone, Debug)]
pub struct Logprobs(Arc<Bound>);

impl Logprobs {
    pub fn new(gpu: &Gpu, class: Class, buffers: &Buffers<'_>) -> Result<Logprobs, GpuError> {
        let (name, defines) = kernel(class);
        let kernel = gpu.kernel(name, &defines)?;
        let bindings = [
            ("step_meta", buffers.step_meta),
            ("logits", buffers.logits),
            ("sampled", buffers.sampled),
            ("logprobs", buffers.logprobs),
            ("params", buffers.params),
        ];
        Ok(Logprobs(gpu.bind(&kernel, &bindings)?))
    }

    pub fn record(&self, recording: &mut Recording, num_logits: u32) {
        recording.dispatch("logprobs", &self.0, num_logits);
    }
}

/// Reads one row's result: [`ROW_BYTES`] bytes, of a row that asked for `asked` alternatives and got `token`.
pub fn decode(row: &[u8], token: u32, asked: u8) -> TokenLogprobs {
    let words: Vec<u32> = bytemuck::pod_collect_to_vec(row);
    let top = (0..u32::from(asked).min(MAX_TOP) as usize)
        .map(|i| (words[2 + 2 * i], f32::from_bits(words[3 + 2 * i])))
        .take_while(|(token, _)| *token != u32::MAX)
        .collect();
    TokenLogprobs { token, logprob: f32::from_bits(words[1]), top }
}
