//! The fake's arithmetic without pages, batch or steps. It knows no tables: what it computes is what they must give.

use super::{attend, draw_hash, fake_continuations, mix, value};
use crate::batch::{RowSampling, TokenPenalty};
use crate::ids::TokenId;
use std::collections::VecDeque;

/// The fake's arithmetic for one sequence without pages, batch or steps: what a request alone gets.
/// Follows [`Reply::Tokens`] and [`Attention::Every`].
#[derive(Clone, Debug)]
pub struct UnpagedRun {
    groups: Vec<GroupRun>,
    num_tokens: u32,
    adapter: u64,
}

#[derive(Clone, Debug, Default)]
struct GroupRun {
    window: Option<u32>,
    last: Option<u32>,
    /// All values, folded: without a window.
    seen: u64,
    /// The values in the window.
    recent: VecDeque<u32>,
}

impl Default for UnpagedRun {
    /// A model without windows.
    fn default() -> Self {
        UnpagedRun::with_windows(&[None])
    }
}

impl UnpagedRun {
    /// A model whose layer groups see so far.
    pub fn with_windows(windows: &[Option<u32>]) -> Self {
        let group = |window: &Option<u32>| GroupRun { window: *window, ..GroupRun::default() };
        UnpagedRun { groups: windows.iter().map(group).collect(), num_tokens: 0, adapter: 0 }
    }

    /// With the weights changed by an adapter.
    pub fn with_adapter(self, adapter: u64) -> Self {
        UnpagedRun { adapter, ..self }
    }

    /// The next input token.
    pub fn push(&mut self, token: TokenId) {
        for (g, group) in self.groups.iter_mut().enumerate() {
            let before = group.last.filter(|_| group.window != Some(1));
            let value = value(before, (token, self.adapter), self.num_tokens, g);
            group.last = Some(value);
            match group.window {
                None => group.seen = attend(group.seen, value),
                Some(window) => {
                    group.recent.push_back(value);
                    if group.recent.len() > window as usize {
                        group.recent.pop_front();
                    }
                }
            }
        }
        self.num_tokens += 1;
    }

    /// The token that follows the input so far.
    pub fn draw(
        &self,
        sampling: RowSampling,
        penalties: &[TokenPenalty],
        biases: &[(TokenId, f32)],
        vocab_size: u32,
    ) -> TokenId {
        (self.hash(sampling, penalties, biases) % u64::from(vocab_size)) as TokenId
    }

    /// What a beam with the input so far is told of its next tokens, most likely first.
    pub fn continuations(
        &self,
        sampling: RowSampling,
        penalties: &[TokenPenalty],
        biases: &[(TokenId, f32)],
        vocab_size: u32,
    ) -> Vec<(TokenId, f32)> {
        let hash = self.hash(sampling, penalties, biases);
        let asked = sampling.logprobs.unwrap_or(0);
        fake_continuations((hash % u64::from(vocab_size)) as TokenId, hash, asked, vocab_size).top
    }

    fn hash(&self, sampling: RowSampling, penalties: &[TokenPenalty], biases: &[(TokenId, f32)]) -> u64 {
        let sampling = RowSampling { position: self.num_tokens, ..sampling };
        let of_group = |group: &GroupRun| match group.window {
            None => group.seen,
            Some(_) => group.recent.iter().fold(0, |seen, value| attend(seen, *value)),
        };
        let seen = self.groups.iter().map(of_group).reduce(mix).unwrap_or(0);
        draw_hash(seen, &sampling, penalties, biases)
    }
}
