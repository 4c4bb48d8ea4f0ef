//! How many prompt tokens the next step may compute, so that a long prompt does not freeze those who already answer.
//!
//! With some row decoding: the largest prefill chunk that keeps the step within max(50 ms, 2 × a decode-only step), but at
//! least [`MIN_PREFILL_CHUNK`] tokens, so that a prompt is read also on a slow adapter. With nothing decoding: the full
//! budget. The measured costs are inputs: time is handed in, no clock is read here.

/// What others may wait for a prompt, whatever their own speed.
const STEP_LIMIT_US: f64 = 50_000.0;
/// Prompt tokens that a step reads at least.
const MIN_PREFILL_CHUNK: u32 = 16;
/// Prompt tokens per mixed step before anything was measured.
const UNMEASURED_CHUNK: u32 = 64;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.25;

/// A finished step as the budget sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    pub num_decode: u32,
    pub num_prefill_tokens: u32,
    pub total_us: u64,
}

/// Running means of what steps cost.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdaptiveBudget {
    /// A step in which rows decode and nothing prefills.
    decode_step_us: Option<f64>,
    /// One prompt token, over what a decode-only step costs.
    prefill_token_us: Option<f64>,
}

impl AdaptiveBudget {
    /// Prompt tokens that the next step may compute beside `num_decode` decoding rows, of `max_tokens` in all.
    pub fn prefill_tokens(&self, num_decode: u32, max_tokens: u32) -> u32 {
        if num_decode == 0 {
            return max_tokens;
        }
        let chunk = match self.prefill_token_us {
            None => UNMEASURED_CHUNK,
            Some(token_us) => {
                let decode_us = self.decode_step_us.unwrap_or(0.0);
                let limit_us = STEP_LIMIT_US.max(2.0 * decode_us);
                ((limit_us - decode_us) / token_us.max(0.01)).min(f64::from(max_tokens)) as u32
            }
        };
        chunk.max(MIN_PREFILL_CHUNK).min(max_tokens.saturating_sub(num_decode))
    }

    /// What one prompt token takes; `None` before one was measured.
    pub fn prefill_token_us(&self) -> Option<f64> {
        self.prefill_token_us
    }

    /// Learns from a finished step.
    pub fn observe(&mut self, cost: StepCost) {
        let total_us = cost.total_us as f64;
        if cost.num_prefill_tokens == 0 {
            if cost.num_decode > 0 {
                mix(&mut self.decode_step_us, total_us);
            }
            return;
        }
        let base_us = if cost.num_decode > 0 { self.decode_step_us.unwrap_or(0.0) } else { 0.0 };
        // A short chunk beside a decode costs little more than the decode: the mean stays above zero.
        let token_us = ((total_us - base_us) / f64::from(cost.num_prefill_tokens)).max(total_us * 1e-4);
        mix(&mut self.prefill_token_us, token_us);
    }
}

fn mix(mean: &mut Option<f64>, newest: f64) {
    *mean = Some(match *mean {
        Some(mean) => mean + NEWEST * (newest - mean),
        None => newest,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(decode_us: u64, prefill_token_us: u64) -> AdaptiveBudget {
        let mut budget = AdaptiveBudget::default();
        budget.observe(StepCost { num_decode: 1, num_prefill_tokens: 0, total_us: decode_us });
        budget.observe(StepCost { num_decode: 0, num_prefill_tokens: 100, total_us: 100 * prefill_token_us });
        budget
    }

    #[test]
    fn nothing_decoding_gets_the_full_budget() {
        assert_eq!(AdaptiveBudget::default().prefill_tokens(0, 512), 512);
        assert_eq!(measured(80_000, 25_000).prefill_tokens(0, 512), 512);
    }

    #[test]
    fn fast_adapter_fills_fifty_milliseconds() {
        // 10 ms per decode leave 40 ms: 400 tokens of 100 µs.
        assert_eq!(measured(10_000, 100).prefill_tokens(4, 512), 400);
        assert_eq!(measured(10_000, 10).prefill_tokens(4, 512), 508);
    }

    #[test]
    fn slow_decode_lets_prefill_take_as_long_again() {
        // 200 ms per decode allow 400 ms: 100 tokens of 2 ms.
        assert_eq!(measured(200_000, 2_000).prefill_tokens(2, 512), 100);
    }

    #[test]
    fn prefill_goes_on_where_every_token_is_slow() {
        assert_eq!(measured(80_000, 25_000).prefill_tokens(3, 512), MIN_PREFILL_CHUNK);
        assert_eq!(measured(80_000, 25_000).prefill_tokens(3, 8), 5);
    }

    #[test]
    fn mixed_step_counts_only_what_the_prompt_added() {
        let mut budget = AdaptiveBudget::default();
        budget.observe(StepCost { num_decode: 1, num_prefill_tokens: 0, total_us: 20_000 });
        budget.observe(StepCost { num_decode: 1, num_prefill_tokens: 10, total_us: 30_000 });
        // 1 ms per token; 50 - 20 ms left.
        assert_eq!(budget.prefill_tokens(1, 512), 30);
    }
}
