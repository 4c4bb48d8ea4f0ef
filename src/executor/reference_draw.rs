//! Tokens out of logits on the CPU, as a batch asks for them.

use crate::batch::{StepBatch, Want};
use crate::executor::{StepOutput, StepStats};
use crate::ids::TokenId;
use crate::kernels::mask;
use crate::protocol::TokenLogprobs;
use crate::sampling::{self, Draw, PenaltyStrengths, SeenToken, Warp, reference};

/// Samples each logit row, or hands the logits over.
pub(super) fn finish(batch: &StepBatch, logits: Vec<f32>, vocab: usize) -> StepOutput {
    let mut out = StepOutput { stats: StepStats::default(), ..StepOutput::default() };
    if batch.want == Want::Logits {
        out.logits = Some(logits);
        return out;
    }
    for (l, row) in logits.chunks_exact(vocab).enumerate() {
        let (token, logprobs) = match draw(batch, l, row.to_vec()) {
            Ok(drawn) => (drawn.0, drawn.1),
            Err(fault) => (fault.token, None),
        };
        out.not_finite.push(row.iter().any(|v| !v.is_finite()));
        out.tokens.push(token);
        out.logprobs.push(logprobs);
    }
    out
}

/// Penalties, biases and the draw of one logit row, as the batch asks.
fn draw(
    batch: &StepBatch,
    l: usize,
    mut logits: Vec<f32>,
) -> Result<(TokenId, Option<TokenLogprobs>), sampling::NotFinite> {
    let rules = &batch.sampling[l];
    let range = |starts: &[u32]| starts[l] as usize..starts[l + 1] as usize;
    let seen: Vec<SeenToken> = batch.penalties[range(&batch.penalty_start)]
        .iter()
        .map(|p| SeenToken { token: p.token, output_count: p.output_count })
        .collect();
    let strengths = PenaltyStrengths {
        repetition: rules.repetition_penalty,
        presence: rules.presence_penalty,
        frequency: rules.frequency_penalty,
    };
    let is_normalised = rules.is_beam && batch.changes_logits(l);
    if is_normalised {
        let logsumexp = reference::logprobs(&logits, 0).logsumexp;
        logits.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - logsumexp) as f32);
    }
    reference::apply_penalties(&mut logits, &strengths, &seen, &batch.biases[range(&batch.bias_start)]);
    mask::reference(&mut logits, |token| batch.may_draw(l, token));
    let warp = Warp { temperature: rules.temperature, top_k: rules.top_k, top_p: rules.top_p, min_p: rules.min_p };
    let token = reference::sample(&logits, &warp, Draw { seed: rules.seed, position: rules.position })?;
    let logprobs = rules.logprobs.map(|n| {
        let row = match is_normalised {
            true => reference::most_likely(&logits, usize::from(n), 0.0),
            false => reference::logprobs(&logits, usize::from(n)),
        };
        let logprob = (f64::from(logits[token as usize]) - row.logsumexp) as f32;
        TokenLogprobs { token, logprob, top: row.top.iter().map(|&(t, p)| (t, p as f32)).collect() }
    });
    Ok((token, logprobs))
}
