//! A tokenizer as llguidance sees it: a trie of the tokens' bytes.

use crate::ids::TokenId;
use crate::tokenizer::Tokenizer;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use std::sync::Arc;

/// Texts whose tokens must be those bytes again, nothing before them and nothing lost, for text to be forced as tokens.
const SAMPLES: [&str; 5] = ["a", "{\"name\": \"x\", \"count\": 12}", " true", "weather_in_town\n", "\u{e9}\u{20ac}"];

struct Environment {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    is_canonical: bool,
}

/// `None` when nothing ends an output.
pub fn environment(tokenizer: &Arc<Tokenizer>, vocab_size: u32, eos_ids: &[TokenId]) -> Option<TokEnv> {
    let ends: Vec<TokenId> = eos_ids.iter().copied().filter(|&id| id < vocab_size).collect();
    let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| word(tokenizer, id, &ends)).collect();
    let info = TokRxInfo::new(vocab_size, *ends.first()?);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    let is_kept = |text: &&str| {
        let tokens = tokenizer.encode_plain(text).unwrap_or_default();
        tokens.iter().flat_map(|&token| tokenizer.token_bytes(token)).eq(text.bytes())
    };
    let is_canonical = SAMPLES.iter().all(is_kept);
    Some(Arc::new(Environment { tokenizer: tokenizer.clone(), trie, is_canonical }))
}

/// The bytes that a token adds; special tokens are marked, so that no text reaches them.
fn word(tokenizer: &Tokenizer, id: TokenId, ends: &[TokenId]) -> Vec<u8> {
    let bytes = if (id as usize) < tokenizer.vocab_size() { tokenizer.token_bytes(id) } else { Vec::new() };
    if !bytes.is_empty() && (tokenizer.is_special(id) || ends.contains(&id)) {
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat();
    }
    bytes
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| match self.tokenizer.encode_plain(text) {
            Ok(tokens) => tokens,
            Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.is_canonical
    }
}
