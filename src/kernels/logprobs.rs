//! `logprobs`: for rows that ask, the log-probability of the sampled token and the most likely tokens. The reference is
//! [`crate::sampling::reference::logprobs`]. Logits are those after penalties and biases, at temperature 1.

use std::sync::Arc;

use super::KernelContext;
use super::sample::Params;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};
use crate::protocol::TokenLogprobs;

/// Most alternatives that a row can ask for: as many as a beam search of some width needs.
pub const MAX_TOP: u32 = 64;
/// Bytes of one row's result.
pub const ROW_BYTES: u64 = 8 * (1 + MAX_TOP as u64);

/// One row is one workgroup. It scans the row once per alternative, and software drivers stop a lane after 65,535 rounds
/// of its loops: with so many lanes the largest vocabularies stay far below.
const WORKGROUP_SIZE: i64 = 256;

/// The defines of the one variant.
pub fn defines() -> Defines {
    Defines::new().set("WG", WORKGROUP_SIZE).set("TOP", i64::from(MAX_TOP))
}

/// The kernel with its buffers. Record it after `sample`, only when some row asks.
#[derive(Clone, Debug)]
pub struct Logprobs(Arc<Bound>);

impl Logprobs {
    /// `logits` and `sampled` as `sample` has them; `logprobs` gets [`ROW_BYTES`] per logit row that asks.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        params: Params,
        logits: &BufferSlice,
        sampled: &BufferSlice,
        logprobs: &BufferSlice,
    ) -> Result<Logprobs, GpuError> {
        let params = params.push(ctx)?;
        let kernel = ctx.gpu.kernel("logprobs", &defines())?;
        let bindings = [
            ("step_meta", ctx.step_meta),
            ("logits", logits),
            ("sampled", sampled),
            ("logprobs", logprobs),
            ("params", &params),
        ];
        Ok(Logprobs(ctx.gpu.bind(&kernel, &bindings)?))
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
