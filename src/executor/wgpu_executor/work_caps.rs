//! How much a graphics card is asked for at once, so that the desktop stays smooth and no driver takes a long step for a
//! hang: a limit for each dispatch and one for each submit, held by what steps were measured to take.
//!
//! Time is handed in: no clock is read here.

/// A submit takes at most this long.
const SUBMIT_US: f64 = 100_000.0;
/// The same while a window is to be drawn.
const VISIBLE_SUBMIT_US: f64 = 12_000.0;
/// A dispatch takes at most this long.
const DISPATCH_US: f64 = 40_000.0;
/// Tokens of a step before anything was measured.
const FIRST_TOKENS: u32 = 64;
/// A step may be so many times as large as the largest that was measured.
const GROWTH: u32 = 4;
/// Classes of steps by their number of tokens: 1, 2, 3 to 4, 5 to 8, and so on.
const NUM_CLASSES: usize = 24;

/// What is known of the adapter's pace with a model.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkCaps {
    submit_us: f64,
    dispatch_us: f64,
    /// The last step of each class.
    measured: [Option<Measured>; NUM_CLASSES],
    is_window_visible: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    /// Microseconds for each token.
    token_us: f64,
    /// Of the step's work, what its largest dispatch did; in (0, 1].
    largest_part: f64,
}

impl Default for WorkCaps {
    fn default() -> Self {
        WorkCaps::with_limits(SUBMIT_US, DISPATCH_US)
    }
}

impl WorkCaps {
    /// With other limits, in microseconds for a submit and for a dispatch.
    pub fn with_limits(submit_us: f64, dispatch_us: f64) -> WorkCaps {
        WorkCaps { submit_us, dispatch_us, measured: [None; NUM_CLASSES], is_window_visible: false }
    }

    pub fn set_window_visible(&mut self, is_visible: bool) {
        self.is_window_visible = is_visible;
    }

    /// Learns from a step that ran; `largest_part` of its work was done by one dispatch.
    pub fn observe(&mut self, num_tokens: u32, step_us: f64, largest_part: f64) {
        if num_tokens > 0 && step_us > 0.0 {
            let token_us = step_us / f64::from(num_tokens);
            self.measured[class(num_tokens)] = Some(Measured { token_us, largest_part });
        }
    }

    /// The nearest class that was measured, of fewer tokens if there is one.
    fn nearest(&self, num_tokens: u32) -> Option<Measured> {
        let class = class(num_tokens);
        let below = self.measured[..=class].iter().rev().flatten().next();
        below.or_else(|| self.measured[class..].iter().flatten().next()).copied()
    }

    /// What a step of so many tokens takes; `None` before any was measured.
    pub fn step_us(&self, num_tokens: u32) -> Option<f64> {
        Some(self.nearest(num_tokens)?.token_us * f64::from(num_tokens))
    }

    /// Submits that a step of so many tokens is cut in; at most `most`.
    pub fn num_submits(&self, num_tokens: u32, most: u32) -> u32 {
        let limit = if self.is_window_visible { VISIBLE_SUBMIT_US.min(self.submit_us) } else { self.submit_us };
        let wanted = self.step_us(num_tokens).map_or(1.0, |us| (us / limit).ceil());
        (wanted as u32).clamp(1, most.max(1))
    }

    /// Tokens of the next step at most. Steps grow from a few tokens on, each measured before the next is larger.
    pub fn most_tokens(&self) -> u32 {
        let Some(largest) = self.measured.iter().rposition(Option::is_some) else { return FIRST_TOKENS };
        let grown = (1u32 << largest).saturating_mul(GROWTH).max(FIRST_TOKENS);
        let fits =
            |n: &u32| self.nearest(*n).is_some_and(|m| m.token_us * m.largest_part * f64::from(*n) <= self.dispatch_us);
        (0..NUM_CLASSES as u32).map(|class| 1 << class).take_while(|n| *n <= grown).filter(fits).last().unwrap_or(1)
    }
}

/// Of steps with so many tokens.
fn class(num_tokens: u32) -> usize {
    (num_tokens.max(1).next_power_of_two().trailing_zeros() as usize).min(NUM_CLASSES - 1)
}

/// Ends of `parts` runs of about the same weight, the last of them `weights.len()`; no run is empty.
pub fn cut(weights: &[u64], parts: u32) -> Vec<usize> {
    let total: u64 = weights.iter().sum();
    let mut ends = Vec::new();
    let mut sum = 0;
    for (i, weight) in weights.iter().enumerate() {
        sum += weight;
        let is_due = u128::from(sum) * u128::from(parts) >= u128::from(total) * (ends.len() as u128 + 1);
        if is_due && ends.len() + 1 < parts as usize && i + 1 < weights.len() {
            ends.push(i + 1);
        }
    }
    ends.push(weights.len());
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_as_they_are_measured_until_a_dispatch_would_take_too_long() {
        let mut caps = WorkCaps::default();
        assert_eq!(caps.most_tokens(), 64);
        // 1 ms for each token: 400 ms for the step whose largest dispatch takes 40.
        let mut sizes = Vec::new();
        for _ in 0..5 {
            sizes.push(caps.most_tokens());
            caps.observe(caps.most_tokens(), f64::from(caps.most_tokens()) * 1000.0, 0.1);
        }
        assert_eq!(sizes, [64, 256, 256, 256, 256]);
        // A fast card is not held back.
        let mut caps = WorkCaps::default();
        for _ in 0..5 {
            caps.observe(caps.most_tokens(), f64::from(caps.most_tokens()) * 10.0, 0.1);
        }
        assert_eq!(caps.most_tokens(), 32768);
        // One that is slow with a single token still gets one.
        let mut slow = WorkCaps::default();
        slow.observe(1, 1e7, 1.0);
        assert_eq!(slow.most_tokens(), 1);
    }

    #[test]
    fn long_steps_are_cut_and_finer_while_a_window_is_drawn() {
        let mut caps = WorkCaps::default();
        assert_eq!(caps.num_submits(64, 100), 1);
        caps.observe(100, 250_000.0, 0.5);
        assert_eq!(caps.num_submits(100, 100), 3);
        assert_eq!(caps.num_submits(100, 2), 2, "no more than there are dispatches");
        assert_eq!(caps.num_submits(40, 100), 1);
        caps.set_window_visible(true);
        assert_eq!(caps.num_submits(100, 100), 21);
    }

    #[test]
    fn costs_come_from_the_nearest_class_that_was_measured() {
        let mut caps = WorkCaps::default();
        assert_eq!(caps.step_us(8), None);
        caps.observe(64, 6_400.0, 0.5);
        assert_eq!(caps.step_us(8), Some(800.0));
        caps.observe(4, 4_000.0, 0.5);
        assert_eq!(caps.step_us(8), Some(8_000.0));
        assert_eq!(caps.step_us(64), Some(6_400.0));
        assert_eq!(caps.step_us(1000), Some(100_000.0));
        caps.observe(0, 5.0, 0.5);
        caps.observe(8, 0.0, 0.5);
        assert_eq!(caps.step_us(8), Some(8_000.0), "nothing is learnt from nothing");
    }

    #[test]
    fn cuts_have_about_the_same_weight_and_no_end_is_lost() {
        assert_eq!(cut(&[1; 10], 3), [4, 7, 10]);
        assert_eq!(cut(&[1, 1, 100, 1], 2), [3, 4]);
        assert_eq!(cut(&[5], 4), [1]);
        assert_eq!(cut(&[], 2), [0]);
        for parts in 1..20 {
            let weights: Vec<u64> = (0..37).map(|i| i * 7 % 11).collect();
            let ends = cut(&weights, parts);
            assert!(ends.windows(2).all(|pair| pair[0] < pair[1]) && ends.last() == Some(&37), "{ends:?}");
            assert!(ends.len() <= parts as usize);
        }
    }
}
