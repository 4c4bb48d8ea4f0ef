//! Unigram encoding: of all ways to cut a text into pieces, the one whose scores add up to the most.
//!
//! Guarantees: the ids of Hugging Face's and llama.cpp's unigram models (sums in f64, the earlier piece among equals), in
//! time linear in the text's length for a given longest piece. Characters without a piece become the unknown token, one
//! for a run of them, or byte tokens where the vocabulary has one for each byte.

use super::TokenizerError;
use super::table::byte_token;
use crate::ids::TokenId;
use rustc_hash::FxHashMap;

/// What an unknown character costs beside the worst piece.
const UNKNOWN_PENALTY: f64 = 10.0;

pub(super) struct Unigram {
    ids: FxHashMap<String, TokenId>,
    trie: Trie,
    scores: Vec<f32>, // [vocab]
    unknown_score: f64,
    unk: Option<TokenId>,
    /// Where there is one for each byte.
    byte_ids: Option<Vec<TokenId>>, // [256]
}

/// Pieces by their bytes: children of a node, and the piece that ends there.
#[derive(Default)]
struct Trie {
    children: FxHashMap<(u32, u8), u32>,
    pieces: Vec<Option<TokenId>>, // [nodes]
}

/// The best way to reach a place in the text.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    start: usize,
    /// `None` for an unknown character.
    piece: Option<TokenId>,
}

impl Unigram {
    /// `tokens` and `scores` are equally long; `pieces` tells which tokens text may be cut into.
    pub fn new(tokens: &[String], scores: Vec<f32>, pieces: impl Fn(TokenId) -> bool, unk: Option<TokenId>) -> Unigram {
        assert_eq!(tokens.len(), scores.len(), "one score for each token");
        let mut trie = Trie { children: FxHashMap::default(), pieces: vec![None] };
        let mut ids = FxHashMap::default();
        let mut byte_ids = vec![None; 256];
        let mut least = f64::INFINITY;
        for (id, token) in tokens.iter().enumerate() {
            let id = id as TokenId;
            ids.insert(token.clone(), id);
            if let Some(byte) = byte_token(token) {
                byte_ids[usize::from(byte)] = Some(id);
            } else if pieces(id) && !token.is_empty() {
                trie.insert(token, id);
                least = least.min(f64::from(scores[id as usize]));
            }
        }
        let unknown_score = if least.is_finite() { least - UNKNOWN_PENALTY } else { -UNKNOWN_PENALTY };
        Unigram { ids, trie, scores, unknown_score, unk, byte_ids: byte_ids.into_iter().collect() }
    }

    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    /// Appends the tokens of a normalised text.
    pub fn encode(&self, text: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        let best = self.best_ends(text);
        let mut cut = Vec::new();
        let mut end = text.len();
        while end > 0 {
            let Best { start, piece, .. } = best[end].expect("every character ends somewhere");
            cut.push((start..end, piece));
            end = start;
        }
        let mut is_after_unknown = false;
        for (range, piece) in cut.into_iter().rev() {
            match (piece, &self.byte_ids) {
                (Some(id), _) => ids.push(id),
                (None, Some(bytes)) => ids.extend(text[range].bytes().map(|b| bytes[usize::from(b)])),
                (None, None) if is_after_unknown => {}
                (None, None) => ids.push(self.unknown(&text[range])?),
            }
            is_after_unknown = piece.is_none();
        }
        Ok(())
    }

    fn unknown(&self, text: &str) -> Result<TokenId, TokenizerError> {
        let fault = || TokenizerError::Encode(format!("the vocabulary has no piece for {text:?} and no unknown token"));
        self.unk.ok_or_else(fault)
    }

    /// For each byte of the text, and its end, how it is best reached; `None` within characters.
    fn best_ends(&self, text: &str) -> Vec<Option<Best>> {
        let bytes = text.as_bytes();
        let mut best: Vec<Option<Best>> = vec![None; bytes.len() + 1];
        for (start, c) in text.char_indices() {
            let so_far = best[start].map_or(0.0, |b| b.score);
            let mut offer = |end: usize, score: f64, piece: Option<TokenId>| {
                let score = so_far + score;
                if best[end].is_none_or(|b| score > b.score) {
                    best[end] = Some(Best { score, start, piece });
                }
            };
            let char_end = start + c.len_utf8();
            let mut has_char = false;
            let mut node = 0;
            for (i, &byte) in bytes[start..].iter().enumerate() {
                let Some(&next) = self.trie.children.get(&(node, byte)) else { break };
                node = next;
                if let Some(id) = self.trie.pieces[node as usize] {
                    has_char |= start + i + 1 == char_end;
                    offer(start + i + 1, f64::from(self.scores[id as usize]), Some(id));
                }
            }
            if !has_char {
                offer(char_end, self.unknown_score, None);
            }
        }
        best
    }
}

impl Trie {
    fn insert(&mut self, piece: &str, id: TokenId) {
        let mut node = 0;
        for byte in piece.bytes() {
            let next = self.pieces.len() as u32;
            node = *self.children.entry((node, byte)).or_insert(next);
            if node == next {
                self.pieces.push(None);
            }
        }
        self.pieces[node as usize] = Some(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unigram(tokens: &[(&str, f32)], unk: Option<TokenId>) -> Unigram {
        let names: Vec<String> = tokens.iter().map(|(t, _)| t.to_string()).collect();
        Unigram::new(&names, tokens.iter().map(|(_, s)| *s).collect(), |id| Some(id) != unk, unk)
    }

    fn check(unigram: &Unigram, text: &str, expected: &[TokenId]) {
        let mut ids = Vec::new();
        unigram.encode(text, &mut ids).expect("encodable");
        assert_eq!(ids, expected, "{text:?}");
    }

    #[test]
    fn the_largest_sum_wins_and_runs_of_unknown_characters_are_one() {
        let vocab = unigram(&[("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5), ("aba", -4.0)], Some(0));
        check(&vocab, "aba", &[3, 1]);
        check(&vocab, "axyb", &[1, 0, 2]);
        check(&vocab, "", &[]);
    }

    #[test]
    fn an_unknown_character_is_an_error_without_an_unknown_token() {
        let vocab = unigram(&[("a", -1.0)], None);
        assert!(vocab.encode("ax", &mut Vec::new()).is_err());
    }
}
