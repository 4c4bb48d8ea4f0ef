//! How the next token is chosen, as plain functions over one row of f32 logits.
//!
//! Guarantees: the stages run in the order penalties, bias, temperature, top-k, top-p, min-p; what is kept is always the
//! set of tokens whose logit is at or above one cut, so ties at a cut are kept whole; a draw is a function of
//! (logits, parameters, seed, position) and of nothing else. The GPU kernels in `kernels/{penalties,sample,logprobs}.rs`
//! compute the same functions and are tested against [`reference`].
//!
//! It does not attempt to be fast: the kernels are.
//!
//! ```
//! use kvasir::sampling::{Draw, Warp, reference};
//! let logits = [0.0, 3.0, 1.0];
//! let warp = Warp { temperature: 0.8, top_k: 2, top_p: 1.0, min_p: 0.0 };
//! let token = reference::sample(&logits, &warp, Draw { seed: 7, position: 12 }).unwrap();
//! assert!(token == 1 || token == 2);
//! ```

use crate::ids::TokenId;

pub mod beam;
pub mod reference;
pub mod rng;

/// The stages that follow penalties and bias. Off values: temperature 0 (greedy), top_k 0, top_p 1, min_p 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Warp {
    /// 0 is greedy; the other fields are then unused.
    pub temperature: f32,
    /// Keep the k largest logits and those equal to the k-th; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens until their probability reaches this share of what top-k kept; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
}

impl Warp {
    /// The largest logit, the lowest id on ties.
    pub const GREEDY: Warp = Warp { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

/// What fixes a draw besides logits and parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub seed: u64,
    /// Position of the token being drawn.
    pub position: u32,
}

/// Strengths of the penalties. Off values: repetition 1, presence 0, frequency 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PenaltyStrengths {
    /// Positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
    pub repetition: f32,
    /// Subtracted once from the logit of a token in the output.
    pub presence: f32,
    /// Subtracted per occurrence in the output.
    pub frequency: f32,
}

/// A token of the prompt or the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenToken {
    pub token: TokenId,
    /// Occurrences in the output; 0 when it is in the prompt only.
    pub output_count: u32,
}

/// A logit is a NaN or an infinity: nothing can be drawn from the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logit of token {token} is not finite")]
pub struct NotFinite {
    pub token: TokenId,
}
