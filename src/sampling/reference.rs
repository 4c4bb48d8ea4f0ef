//! The CPU sampler that defines what the kernels compute. Probabilities are f64; logits stay f32, as on the GPU.

use super::rng::{gumbel, token_bits};
use super::{Draw, NotFinite, PenaltyStrengths, SeenToken, Warp};
use crate::ids::TokenId;

/// Tokens that survive top-k, top-p and min-p, with their probabilities. At least one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Ascending.
    pub tokens: Vec<TokenId>,
    /// Of `tokens`; they sum to 1.
    pub probs: Vec<f64>,
    /// Everything at or above this logit is kept.
    pub cut: f32,
}

/// Changes logits by what came before and by the bias list: repetition over prompt and output (CTRL, arXiv 1909.05858),
/// presence and frequency over the output, then the biases. Each token occurs at most once in `seen` and in `biases`;
/// tokens outside the row are ignored.
pub fn apply_penalties(
    logits: &mut [f32],
    strengths: &PenaltyStrengths,
    seen: &[SeenToken],
    biases: &[(TokenId, f32)],
) {
    for entry in seen {
        if let Some(logit) = logits.get_mut(entry.token as usize) {
            *logit = penalised(*logit, strengths, entry.output_count);
        }
    }
    for &(token, bias) in biases {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

fn penalised(logit: f32, strengths: &PenaltyStrengths, output_count: u32) -> f32 {
    let scaled = if logit > 0.0 { logit / strengths.repetition } else { logit * strengths.repetition };
    let presence = if output_count > 0 { strengths.presence } else { 0.0 };
    scaled - strengths.frequency * output_count as f32 - presence
}

/// The largest logit's token, the lowest id on ties. An empty row gives 0.
pub fn argmax(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as TokenId
}

/// Which tokens may be drawn, and how likely each is. Logits must be finite and the row not empty.
pub fn kept(logits: &[f32], warp: &Warp) -> Kept {
    if warp.is_greedy() {
        let token = argmax(logits);
        return Kept { tokens: vec![token], probs: vec![1.0], cut: logits[token as usize] };
    }
    let mut order: Vec<f32> = logits.to_vec();
    order.sort_by(|a, b| b.total_cmp(a));
    let max = order[0];
    let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) / f64::from(warp.temperature)).exp();

    let mut cut = order[order.len() - 1];
    if warp.top_k > 0 && (warp.top_k as usize) < order.len() {
        cut = order[warp.top_k as usize - 1];
    }
    if warp.top_p < 1.0 {
        let total: f64 = order.iter().take_while(|&&l| l >= cut).map(|&l| weight(l)).sum();
        let target = f64::from(warp.top_p) * total;
        let mut mass = 0.0;
        for &logit in order.iter().take_while(|&&l| l >= cut) {
            mass += weight(logit);
            if mass >= target {
                cut = logit;
                break;
            }
        }
    }
    if warp.min_p > 0.0 {
        let floor = order.iter().take_while(|&&l| weight(l) >= f64::from(warp.min_p)).last();
        cut = cut.max(floor.copied().unwrap_or(max));
    }

    let tokens: Vec<TokenId> = (0..logits.len()).filter(|&i| logits[i] >= cut).map(|i| i as TokenId).collect();
    let weights: Vec<f64> = tokens.iter().map(|&t| weight(logits[t as usize])).collect();
    let total: f64 = weights.iter().sum();
    Kept { tokens, probs: weights.iter().map(|w| w / total).collect(), cut }
}

/// What the argmax of a draw compares: `logit / temperature + gumbel(seed, position, token)` (Gumbel-max: the argmax is
/// a draw from the softmax). It depends on no other token, so the order in which lanes look at tokens does not matter.
pub fn score(logit: f32, temperature: f32, draw: Draw, token: TokenId) -> f64 {
    f64::from(logit) / f64::from(temperature) + gumbel(token_bits(draw, token))
}

/// Draws a token from a row whose penalties and biases are applied.
pub fn sample(logits: &[f32], warp: &Warp, draw: Draw) -> Result<TokenId, NotFinite> {
    if let Some(token) = logits.iter().position(|l| !l.is_finite()) {
        return Err(NotFinite { token: token as TokenId });
    }
    if warp.is_greedy() {
        return Ok(argmax(logits));
    }
    let kept = kept(logits, warp);
    let mut best = (f64::NEG_INFINITY, kept.tokens[0]);
    for &token in &kept.tokens {
        let score = score(logits[token as usize], warp.temperature, draw, token);
        if score > best.0 {
            best = (score, token);
        }
    }
    Ok(best.1)
}

/// Log-probabilities of one row, natural logarithm, temperature 1.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLogprobs {
    /// ln of the sum of exp over the row.
    pub logsumexp: f64,
    /// The most likely tokens, most likely first, the lowest id first on ties.
    pub top: Vec<(TokenId, f64)>,
}

/// `top_n` alternatives of a row of finite logits; `logits[token] - logsumexp` is any token's log-probability.
pub fn logprobs(logits: &[f32], top_n: usize) -> RowLogprobs {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum();
    most_likely(logits, top_n, f64::from(max) + sum.ln())
}

/// The most likely tokens of a row whose `logsumexp` is known: 0 where the row holds log-probabilities already.
pub fn most_likely(logits: &[f32], top_n: usize, logsumexp: f64) -> RowLogprobs {
    let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    let top = order.iter().take(top_n).map(|&t| (t, f64::from(logits[t as usize]) - logsumexp)).collect();
    RowLogprobs { logsumexp, top }
}

/// What a beam's continuations are ranked by, most likely first: log-probabilities over the whole vocabulary, which
/// penalties and biases change afterwards. They are not normalised again, as transformers does it.
pub fn beam_logprobs(
    logits: &[f32],
    strengths: &PenaltyStrengths,
    seen: &[SeenToken],
    biases: &[(TokenId, f32)],
    top_n: usize,
) -> Vec<(TokenId, f64)> {
    let logsumexp = logprobs(logits, 0).logsumexp;
    let mut row: Vec<f32> = logits.iter().map(|&logit| (f64::from(logit) - logsumexp) as f32).collect();
    apply_penalties(&mut row, strengths, seen, biases);
    most_likely(&row, top_n, 0.0).top
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_tokens(logits: &[f32], warp: Warp) -> Vec<TokenId> {
        kept(logits, &warp).tokens
    }

    const OFF: Warp = Warp { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

    #[test]
    fn greedy_takes_the_lowest_id_on_ties() {
        assert_eq!(argmax(&[1.0, 5.0, 5.0, -1.0]), 1);
        assert_eq!(sample(&[1.0, 5.0, 5.0], &Warp::GREEDY, Draw { seed: 1, position: 0 }), Ok(1));
    }

    #[test]
    fn each_stage_keeps_its_set() {
        let logits = [0.0, 2.0, 1.0, 3.0, -4.0];
        assert_eq!(kept_tokens(&logits, OFF), [0, 1, 2, 3, 4]);
        assert_eq!(kept_tokens(&logits, Warp { top_k: 2, ..OFF }), [1, 3]);
        assert_eq!(kept_tokens(&logits, Warp { top_k: 99, ..OFF }), [0, 1, 2, 3, 4]);
        assert_eq!(kept_tokens(&logits, Warp { top_p: 0.6, ..OFF }), [3]);
        assert_eq!(kept_tokens(&logits, Warp { top_p: 0.65, ..OFF }), [1, 3]);
        assert_eq!(kept_tokens(&logits, Warp { min_p: 0.3, ..OFF }), [1, 3]);
        assert_eq!(kept_tokens(&logits, Warp { min_p: 1.0, ..OFF }), [3]);
        assert_eq!(kept_tokens(&[1.0, 1.0, 0.0], Warp { top_k: 1, ..OFF }), [0, 1]);
    }

    #[test]
    fn probabilities_sum_to_one_and_follow_temperature() {
        let kept = kept(&[0.0, 1.0], &Warp { temperature: 0.5, ..OFF });
        assert!((kept.probs.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((kept.probs[1] / kept.probs[0] - 2f64.exp()).abs() < 1e-9);
    }

    #[test]
    fn penalties_change_only_what_was_seen() {
        let mut logits = [2.0, -2.0, 1.0, 0.5];
        let strengths = PenaltyStrengths { repetition: 2.0, presence: 0.25, frequency: 0.5 };
        let seen = [SeenToken { token: 0, output_count: 0 }, SeenToken { token: 1, output_count: 2 }];
        apply_penalties(&mut logits, &strengths, &seen, &[(3, -1.0), (900, 5.0)]);
        assert_eq!(logits, [1.0, -5.25, 1.0, -0.5]);
    }

    #[test]
    fn a_row_with_a_nan_or_infinity_is_refused_with_its_token() {
        let draw = Draw { seed: 0, position: 0 };
        assert_eq!(sample(&[0.0, f32::NAN], &OFF, draw), Err(NotFinite { token: 1 }));
        assert_eq!(sample(&[f32::INFINITY, 0.0], &Warp::GREEDY, draw), Err(NotFinite { token: 0 }));
    }

    #[test]
    fn a_beams_penalties_act_on_log_probabilities() {
        // Both tokens have a log-probability of -ln 2; the penalty doubles one, and nothing is normalised again.
        let strengths = PenaltyStrengths { repetition: 2.0, presence: 0.0, frequency: 0.0 };
        let top = beam_logprobs(&[5.0, 5.0], &strengths, &[SeenToken { token: 0, output_count: 1 }], &[], 2);
        assert_eq!((top[0].0, top[1].0), (1, 0));
        assert!((top[0].1 + 2f64.ln()).abs() < 1e-6 && (top[1].1 + 2.0 * 2f64.ln()).abs() < 1e-6, "{top:?}");
    }

    #[test]
    fn logprobs_are_normalised_and_ordered() {
        let row = logprobs(&[0.0, 1.0, 1.0, -3.0], 3);
        assert_eq!(row.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 0]);
        let total: f64 = [0.0f64, 1.0, 1.0, -3.0].iter().map(|l| (l - row.logsumexp).exp()).sum();
        assert!((total - 1.0).abs() < 1e-12);
    }
}
