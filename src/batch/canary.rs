//! What the KV canary compares: a chain over a sequence's tokens and positions. Mirrors `link` of canary.wgsl.
//!
//! Each slot of the cache carries the mark (token, position, chain) of what was written to it. Before a step reads a row's
//! blocks, every mark must follow from the one before it, and the last must be the row's own: then the row's table holds
//! its own tokens, all of them, each at its position.

use super::StepBatch;
use crate::ids::TokenId;
use crate::scheduler::{Scheduler, StepPlan};

/// The chain before the first token.
pub const START: u32 = 0x4b56_6173;

/// The chain with one token more (the mixing of the low-bias 32-bit hash by Chris Wellons).
pub fn link(chain: u32, token: TokenId, position: u32) -> u32 {
    let mut x = chain ^ token.wrapping_mul(0x9e37_79b1) ^ position.wrapping_mul(0x85eb_ca77);
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

/// The chain of a sequence's first tokens.
pub fn chain(tokens: &[TokenId]) -> u32 {
    (0u32..).zip(tokens).fold(START, |chain, (position, &token)| link(chain, token, position))
}

impl StepBatch {
    /// Adds to each row the chain of what it computed in earlier steps. Costs time in the length of the rows.
    pub fn add_chains(&mut self, plan: &StepPlan, scheduler: &Scheduler) {
        self.chains.clear();
        for row in &plan.rows {
            let seq = scheduler.get(row.request).expect("a planned row is live until its step is over");
            self.chains.push(chain(&seq.tokens()[..row.from as usize]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_tell_tokens_positions_and_order_apart() {
        assert_eq!(chain(&[]), START);
        assert_eq!(chain(&[5, 6]), link(link(START, 5, 0), 6, 1));
        let chains: std::collections::BTreeSet<u32> =
            [&[5, 6][..], &[6, 5], &[5], &[5, 6, 0], &[0, 5, 6], &[5, 5]].into_iter().map(chain).collect();
        assert_eq!(chains.len(), 6);
    }
}
