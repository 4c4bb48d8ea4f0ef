//! Beam search as a state machine over log-probabilities: which beams live on, which outputs are finished, when it ends.
//!
//! Guarantees: the rules are those of `generate(num_beams = …, do_sample = False)` in transformers 5. In each step all
//! continuations of all live beams are ranked by summed log-probability. Those among the first `width` that end the
//! output are finished, with the score `sum / length ^ length_penalty`, where the length counts the output's tokens
//! including the one that ended it; those further down that end the output are dropped. The first `width` that do not
//! end are the next live beams. The best `width` finished outputs are kept, and [`EarlyStopping`] says when no better one
//! is looked for. At the length limit every continuation ends, so the places are filled.
//! Equal sums are ranked by beam, then by the order in which the candidates came.
//!
//! Where it differs: sums are f64 here (transformers adds f32), and the search begins with one beam, not with one beam
//! and its copies out of reach; both show only where scores are closer than f32 resolves, or where the vocabulary is
//! smaller than the width (then fewer beams live). It does not compute log-probabilities, and knows no blocks.
//!
//! ```
//! use kvasir::protocol::{BeamParams, EarlyStopping, FinishReason};
//! use kvasir::sampling::beam::BeamSearch;
//! let params = BeamParams { width: 2, num_return: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
//! let mut search = BeamSearch::new(params, 2, FinishReason::MaxTokens);
//! let children = search.advance(&[vec![(7, -0.5), (8, -1.0), (9, -3.0)]], |_, _| None).expect("one token is not the end");
//! assert_eq!(children.iter().map(|c| (c.parent, c.token)).collect::<Vec<_>>(), [(0, 7), (0, 8)]);
//! let end = search.advance(&[vec![(1, -2.0), (2, -2.5)], vec![(3, -0.1), (4, -9.0)]], |_, _| None);
//! assert!(end.is_none(), "the limit of two tokens is reached");
//! assert_eq!(search.outputs()[0].tokens, [8, 3]);
//! ```

use crate::ids::TokenId;
use crate::protocol::{BeamParams, EarlyStopping, FinishReason};

/// A beam that goes on: `token` after the tokens of live beam `parent` of the step before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeamChild {
    pub parent: usize,
    pub token: TokenId,
}

/// A finished output.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// The output's tokens, with the one that ended it.
    pub tokens: Vec<TokenId>,
    pub cumulative_logprob: f64,
    /// `cumulative_logprob / tokens ^ length_penalty`.
    pub score: f64,
    pub reason: FinishReason,
}

/// One output under way.
#[derive(Clone, Debug, Default, PartialEq)]
struct Beam {
    tokens: Vec<TokenId>,
    logprob: f64,
}

/// A continuation of a live beam.
#[derive(Clone, Copy, Debug)]
struct Continuation {
    parent: usize,
    token: TokenId,
    logprob: f64,
}

/// A search from its prompt to its outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamSearch {
    params: BeamParams,
    max_new_tokens: u32,
    at_limit: FinishReason,
    /// Best first; the prompt alone is one beam without tokens.
    live: Vec<Beam>,
    /// Best first, at most `width`.
    finished: Vec<Hypothesis>,
    num_tokens: u32,
    is_over: bool,
}

impl BeamSearch {
    /// A search of at most `max_new_tokens` (at least 1) tokens; an output that reaches them ends with `at_limit`.
    pub fn new(params: BeamParams, max_new_tokens: u32, at_limit: FinishReason) -> Self {
        assert!(params.width >= 1, "a search has at least one beam");
        assert!(max_new_tokens >= 1, "a search has room for at least one token");
        BeamSearch {
            params,
            max_new_tokens,
            at_limit,
            live: vec![Beam::default()],
            finished: Vec::new(),
            num_tokens: 0,
            is_over: false,
        }
    }

    /// The most likely tokens that each live beam must name so that nothing can be missed: as many as can live on, and
    /// those that can end the output before them.
    pub fn num_candidates(width: u32, num_stop_tokens: u32) -> u32 {
        width.saturating_add(num_stop_tokens)
    }

    /// Outputs may have at most this many tokens from now on, but always one more than they have.
    pub fn limit(&mut self, max_new_tokens: u32) {
        self.max_new_tokens = max_new_tokens.max(self.num_tokens + 1);
    }

    pub fn params(&self) -> &BeamParams {
        &self.params
    }

    /// Live beams, best first; 1 before the first step.
    pub fn num_live(&self) -> usize {
        self.live.len()
    }

    /// The output so far of a live beam.
    pub fn live_tokens(&self, beam: usize) -> &[TokenId] {
        &self.live[beam].tokens
    }

    /// Tokens of every live beam.
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// Takes each live beam's most likely next tokens (most likely first, with their log-probabilities over the whole
    /// vocabulary; see [`Self::num_candidates`]) and says which beams go on, best first; `None` when the search is over.
    /// `ends` says whether a token ends the output of a live beam, and why.
    pub fn advance(
        &mut self,
        candidates: &[Vec<(TokenId, f32)>],
        mut ends: impl FnMut(usize, TokenId) -> Option<FinishReason>,
    ) -> Option<Vec<BeamChild>> {
        assert!(!self.is_over, "a search that is over goes no further");
        assert_eq!(candidates.len(), self.live.len(), "one list of candidates per live beam");
        let (width, length) = (self.params.width as usize, self.num_tokens + 1);
        let is_last = length >= self.max_new_tokens;
        let mut next = Vec::with_capacity(width);
        for (rank, continuation) in self.ranked(candidates).into_iter().enumerate() {
            if rank >= width && (is_last || next.len() == width) {
                break;
            }
            let end = ends(continuation.parent, continuation.token);
            match end.or_else(|| is_last.then(|| self.at_limit.clone())) {
                Some(reason) if rank < width => self.finish(continuation, length, reason),
                Some(_) => {}
                None => next.push(continuation),
            }
        }
        next.truncate(width);
        self.keep_best_finished();
        self.num_tokens = length;
        self.is_over = next.is_empty() || !self.can_improve(next[0].logprob);
        if self.is_over {
            return None;
        }
        self.live = next.iter().map(|c| self.child(c)).collect();
        Some(next.iter().map(|c| BeamChild { parent: c.parent, token: c.token }).collect())
    }

    /// The best finished outputs, best first: `num_return` once the search is over.
    pub fn outputs(&self) -> &[Hypothesis] {
        &self.finished[..self.finished.len().min(self.params.num_return as usize)]
    }

    /// All continuations, the most likely first.
    fn ranked(&self, candidates: &[Vec<(TokenId, f32)>]) -> Vec<Continuation> {
        let of_beam = |(parent, list): (usize, &Vec<(TokenId, f32)>)| {
            let before = self.live[parent].logprob;
            let one = move |&(token, logprob): &(TokenId, f32)| Continuation {
                parent,
                token,
                logprob: before + f64::from(logprob),
            };
            list.iter().map(one).collect::<Vec<_>>()
        };
        let mut all: Vec<Continuation> = candidates.iter().enumerate().flat_map(of_beam).collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        all
    }

    fn child(&self, continuation: &Continuation) -> Beam {
        let parent = &self.live[continuation.parent].tokens;
        let mut tokens = Vec::with_capacity(parent.len() + 1);
        tokens.extend_from_slice(parent);
        tokens.push(continuation.token);
        Beam { tokens, logprob: continuation.logprob }
    }

    fn finish(&mut self, continuation: Continuation, length: u32, reason: FinishReason) {
        let Beam { tokens, logprob } = self.child(&continuation);
        self.finished.push(Hypothesis {
            tokens,
            cumulative_logprob: logprob,
            score: self.score(logprob, length),
            reason,
        });
    }

    /// Of equal scores the older stays.
    fn keep_best_finished(&mut self) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(self.params.width as usize);
    }

    /// False when the best live beam, at the length that the rule assumes for it, beats none of a full set of outputs.
    fn can_improve(&self, best_live: f64) -> bool {
        let is_full = self.finished.len() == self.params.width as usize;
        let Some(worst) = self.finished.last().filter(|_| is_full) else { return true };
        let length = match self.params.early_stopping {
            EarlyStopping::AtOnce => return false,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.max_new_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => self.num_tokens,
        };
        self.score(best_live, length) > worst.score
    }

    fn score(&self, logprob: f64, length: u32) -> f64 {
        logprob / f64::from(length).powf(f64::from(self.params.length_penalty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(width: u32, early_stopping: EarlyStopping, length_penalty: f32) -> BeamParams {
        BeamParams { width, num_return: width, length_penalty, early_stopping }
    }

    /// Token 0 ends an output.
    fn ends(_: usize, token: TokenId) -> Option<FinishReason> {
        (token == 0).then_some(FinishReason::StopToken(0))
    }

    fn pairs(children: Option<Vec<BeamChild>>) -> Vec<(usize, TokenId)> {
        children.expect("the search goes on").iter().map(|c| (c.parent, c.token)).collect()
    }

    #[test]
    fn an_end_outside_the_first_width_is_dropped_and_does_not_take_a_place() {
        let mut search = BeamSearch::new(params(2, EarlyStopping::Heuristic, 1.0), 9, FinishReason::MaxTokens);
        let first = search.advance(&[vec![(5, -1.0), (6, -2.0), (0, -3.0), (7, -4.0)]], ends);
        assert_eq!(pairs(first), [(0, 5), (0, 6)]);
        assert!(search.outputs().is_empty(), "the end was third of a width of two");
        // The end ranks first: it is finished, and two others live on.
        let next =
            search.advance(&[vec![(0, -0.1), (5, -1.0), (6, -2.0)], vec![(7, -0.5), (8, -3.0), (0, -4.0)]], ends);
        assert_eq!(pairs(next), [(0, 5), (1, 7)]);
        let done = &search.outputs()[0];
        assert_eq!((done.tokens.as_slice(), &done.reason), (&[5, 0][..], &FinishReason::StopToken(0)));
        assert!((done.score + 1.1 / 2.0).abs() < 1e-6, "two tokens, the end among them");
    }

    #[test]
    fn one_parent_may_have_all_children_and_another_none() {
        let mut search = BeamSearch::new(params(2, EarlyStopping::Heuristic, 1.0), 9, FinishReason::MaxTokens);
        search.advance(&[vec![(5, -1.0), (6, -2.0), (7, -3.0)]], ends);
        let next =
            search.advance(&[vec![(1, -0.1), (2, -0.2), (3, -9.0)], vec![(4, -5.0), (5, -6.0), (6, -7.0)]], ends);
        assert_eq!(pairs(next), [(0, 1), (0, 2)]);
        assert_eq!((search.live_tokens(0), search.live_tokens(1)), (&[5, 1][..], &[5, 2][..]));
    }

    /// Two outputs are finished after two steps with scores -1.1 and -1.3 (penalty 0); the best live beam has -1.2.
    fn two_finished(early_stopping: EarlyStopping, length_penalty: f32) -> (BeamSearch, bool) {
        let mut search = BeamSearch::new(params(2, early_stopping, length_penalty), 50, FinishReason::MaxTokens);
        search.advance(&[vec![(5, -1.0), (6, -1.2), (7, -9.0)]], ends);
        let lists = [vec![(0, -0.1), (1, -0.2), (2, -3.0)], vec![(0, -0.05), (1, -3.0), (2, -4.0)]];
        let goes_on = search.advance(&lists, ends).is_some();
        (search, goes_on)
    }

    #[test]
    fn early_stopping_ends_at_once_by_estimate_or_when_nothing_can_be_better() {
        // Ranks: (0,0) -1.1, (0,1) -1.2, (1,0) -1.25: the third is out of the width.
        let (search, goes_on) = two_finished(EarlyStopping::AtOnce, 0.0);
        assert!(goes_on && search.outputs().len() == 1);
        let full = |early, penalty| {
            let mut search = two_finished(early, penalty).0;
            // The second end comes at -1.21; what lives on has -4.2 at most.
            search
                .advance(&[vec![(0, -0.01), (1, -3.0), (2, -4.0)], vec![(5, -9.0), (6, -9.0), (7, -9.0)]], ends)
                .is_some()
        };
        assert!(!full(EarlyStopping::AtOnce, 0.0), "two are finished");
        assert!(!full(EarlyStopping::Heuristic, 0.0), "-4.2 does not beat -1.21");
        assert!(!full(EarlyStopping::Heuristic, 1.0), "-4.2 / 3 does not beat -1.1 / 2");
        assert!(!full(EarlyStopping::Never, 0.0), "no length makes -4.2 better");
        assert!(full(EarlyStopping::Never, 1.0), "-4.2 / 50 would");
    }

    #[test]
    fn the_length_limit_fills_the_places() {
        let mut search = BeamSearch::new(params(3, EarlyStopping::AtOnce, 1.0), 1, FinishReason::ContextFull);
        let end = search.advance(&[vec![(5, -1.0), (0, -2.0), (6, -3.0), (7, -4.0)]], ends);
        assert!(end.is_none());
        let reasons: Vec<_> = search.outputs().iter().map(|h| (h.tokens[0], h.reason.clone())).collect();
        let full = FinishReason::ContextFull;
        assert_eq!(reasons, [(5, full.clone()), (0, FinishReason::StopToken(0)), (6, full)]);
    }

    #[test]
    fn a_vocabulary_smaller_than_the_width_gives_fewer_beams() {
        let mut search = BeamSearch::new(params(4, EarlyStopping::Heuristic, 1.0), 3, FinishReason::MaxTokens);
        assert_eq!(pairs(search.advance(&[vec![(1, -0.5), (2, -1.0), (0, -2.0)]], ends)), [(0, 1), (0, 2)]);
        assert_eq!(search.num_live(), 2);
    }

    #[test]
    fn the_candidates_asked_for_suffice_for_every_ranking() {
        // With one end token, a beam's first width + 1 always hold width tokens that do not end.
        assert_eq!(BeamSearch::num_candidates(4, 1), 5);
        let wide = [vec![(0, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)], vec![(1, -8.0), (2, -8.0), (3, -8.0), (4, -8.0)]];
        let cut: Vec<Vec<_>> = wide.iter().map(|list| list[..3].to_vec()).collect();
        let run = |lists: &[Vec<(TokenId, f32)>]| {
            let mut search = BeamSearch::new(params(2, EarlyStopping::Heuristic, 1.0), 9, FinishReason::MaxTokens);
            search.advance(&[vec![(5, -1.0), (6, -1.0), (7, -9.0)]], ends);
            let next = search.advance(lists, ends);
            (pairs(next), search)
        };
        assert_eq!(run(&wide), run(&cut));
    }
}
