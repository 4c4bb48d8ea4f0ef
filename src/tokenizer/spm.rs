//! SentencePiece encoding by score, as llama.cpp does it for `tokenizer.ggml.model` "llama".
//!
//! The text starts as characters; of all neighbours whose concatenation is a token, the pair with the best score
//! (the leftmost among equals) is merged, until none is left. What then is no token is spelled in byte tokens.
//! Guarantees O(n log n) time in the length of the text.

use super::TokenizerError;
use super::table::byte_token;
use crate::ids::TokenId;
use rustc_hash::FxHashMap;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

pub(super) struct Spm {
    ids: FxHashMap<String, TokenId>,
    scores: Vec<f32>,               // [vocab]
    byte_ids: Vec<Option<TokenId>>, // [256]
    unk: Option<TokenId>,
}

/// A run of the text that is one symbol so far; merged-away symbols have no length.
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that may be merged. It is outdated when their lengths no longer add up to `len`.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

impl Spm {
    /// `tokens` and `scores` are equally long.
    pub fn new(tokens: &[String], scores: Vec<f32>, unk: Option<TokenId>) -> Spm {
        assert_eq!(tokens.len(), scores.len(), "one score for each token");
        let mut byte_ids = vec![None; 256];
        let mut ids = FxHashMap::default();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(byte) = byte_token(token) {
                byte_ids[byte as usize] = Some(id as TokenId);
            }
            ids.insert(token.clone(), id as TokenId);
        }
        Spm { ids, scores, byte_ids, unk }
    }

    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    /// Appends the tokens of a normalised text, which holds no special token.
    pub fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        let symbols = self.merge(text);
        let mut is_after_unknown = false;
        for symbol in symbols.iter().filter(|s| s.len > 0) {
            let piece = &text[symbol.start..symbol.start + symbol.len];
            let is_unknown = match self.token_id(piece) {
                Some(id) => {
                    ids.push(id);
                    false
                }
                None => self.spell(piece, is_after_unknown, ids)?,
            };
            is_after_unknown = is_unknown;
        }
        Ok(())
    }

    fn merge(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol { start, len: c.len_utf8(), prev: i.checked_sub(1), next: Some(i + 1) })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut queue = BinaryHeap::new();
        for left in 1..symbols.len() {
            queue.extend(self.pair(text, &symbols, Some(left - 1), Some(left)));
        }
        while let Some(pair) = queue.pop() {
            let (left, right) = (&symbols[pair.left], &symbols[pair.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            let next = right.next;
            symbols[pair.left].len = pair.len;
            symbols[pair.left].next = next;
            symbols[pair.right].len = 0;
            if let Some(next) = next {
                symbols[next].prev = Some(pair.left);
            }
            let prev = symbols[pair.left].prev;
            queue.extend(self.pair(text, &symbols, prev, Some(pair.left)));
            queue.extend(self.pair(text, &symbols, Some(pair.left), next));
        }
        symbols
    }

    fn pair(&self, text: &str, symbols: &[Symbol], left: Option<usize>, right: Option<usize>) -> Option<Pair> {
        let (left, right) = (left?, right?);
        let start = symbols[left].start;
        let len = symbols[left].len + symbols[right].len;
        let id = self.token_id(&text[start..start + len])?;
        Some(Pair { score: self.scores[id as usize], left, right, len })
    }

    /// Spells in byte tokens; where one is missing the piece is unknown, and a run of such pieces is one unknown token.
    fn spell(&self, piece: &str, is_after_unknown: bool, ids: &mut Vec<TokenId>) -> Result<bool, TokenizerError> {
        let bytes: Option<Vec<TokenId>> = piece.bytes().map(|byte| self.byte_ids[usize::from(byte)]).collect();
        if let Some(bytes) = bytes {
            ids.extend(bytes);
            return Ok(false);
        }
        let fault =
            || TokenizerError::Encode(format!("the vocabulary has no token for {piece:?} and no unknown token"));
        let unk = self.unk.ok_or_else(fault)?;
        if !is_after_unknown {
            ids.push(unk);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spm(tokens: &[(&str, f32)]) -> Spm {
        let names: Vec<String> = tokens.iter().map(|(t, _)| t.to_string()).collect();
        Spm::new(&names, tokens.iter().map(|(_, s)| *s).collect(), None)
    }

    fn check(spm: &Spm, text: &str, expected: &[TokenId]) {
        let mut ids = Vec::new();
        spm.encode(text, &mut ids).expect("encodable");
        assert_eq!(ids, expected, "{text:?}");
    }

    #[test]
    fn the_best_score_merges_first_and_the_leftmost_among_equals() {
        let vocab = spm(&[("a", 0.0), ("b", 0.0), ("ab", -2.0), ("ba", -1.0), ("aa", -1.0)]);
        check(&vocab, "aba", &[0, 3]);
        check(&vocab, "aaa", &[4, 0]);
        check(&vocab, "", &[]);
    }

    #[test]
    fn characters_without_a_token_are_spelled_in_bytes_or_refused() {
        let vocab = spm(&[("<0xC3>", 0.0), ("<0xA9>", 0.0)]);
        check(&vocab, "é", &[0, 1]);
        assert!(vocab.encode("x", &mut Vec::new()).is_err());
    }
}
