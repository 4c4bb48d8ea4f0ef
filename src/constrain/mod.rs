//! Grammars for outputs: JSON schemas, regular expressions, choices, and grammars in Lark's notation or in GBNF, compiled
//! for a vocabulary.
//!
//! Guarantees: a compiled grammar allows a token only where its bytes can go on to a text of the grammar, and the end only
//! where the text is complete; what compiling and each step may cost is bounded, and a grammar beyond that is refused; the
//! last grammars are kept compiled. Text that the grammar leaves no choice about is written in the tokens that the tokenizer
//! makes of it (as far as no other token could go beyond its end), so which tokens are forced hangs on the output alone, and
//! appending them without running the model gives what masks give one by one.
//!
//! The work is llguidance's (an Earley parser over derivatives of regular expressions).

mod gbnf;
mod lists;
mod vocabulary;

pub use lists::TokenLists;

use crate::ids::TokenId;
use crate::protocol::TokenConstraint;
use crate::tokenizer::Tokenizer;
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Compiled grammars that are kept.
const MAX_CACHED: usize = 64;
/// Longest text of a grammar, in bytes.
const MAX_GRAMMAR_BYTES: usize = 1 << 20;
/// Tokens that are forced at once.
const MAX_FORCED: usize = 1024;
/// Spaces and line ends in a row that JSON may have between its parts.
const WHITE_SPACE: &str = r"[ \n\t]{0,16}";

/// What an output must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// A JSON value of this schema.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's notation whose start rule is `start`, or in GBNF from `root`.
    Lark(String),
}

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error("the grammar has {bytes} bytes, the limit is {limit}")]
    TooLarge { bytes: usize, limit: usize },
    #[error("there is nothing to choose from")]
    NoChoice,
    #[error("{0}")]
    Invalid(String),
    /// The vocabulary has nothing that ends an output.
    #[error("the model has no end-of-sequence token")]
    NoEnd,
}

/// Compiles grammars for one vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
    ends: Arc<[TokenId]>,
    /// By the grammar's own text, the last used at the end.
    cache: Mutex<VecDeque<(String, Matcher)>>,
}

impl GrammarCompiler {
    /// `eos_ids` end an output; `vocab_size` counts the logits of the model.
    pub fn new(tokenizer: &Arc<Tokenizer>, vocab_size: u32, eos_ids: &[TokenId]) -> Result<Self, GrammarError> {
        let env = vocabulary::environment(tokenizer, vocab_size, eos_ids).ok_or(GrammarError::NoEnd)?;
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|e| GrammarError::Invalid(e.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(GrammarCompiler { factory, ends: eos_ids.into(), cache: Mutex::new(VecDeque::new()) })
    }

    /// The constraint of a grammar, from the cache where it was compiled before.
    pub fn compile(&self, grammar: &Grammar) -> Result<Box<dyn TokenConstraint>, GrammarError> {
        let source = source(grammar)?;
        let key = serde_json::to_string(&source).map_err(|e| GrammarError::Invalid(e.to_string()))?;
        if key.len() > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLarge { bytes: key.len(), limit: MAX_GRAMMAR_BYTES });
        }
        if let Some(matcher) = self.cached(&key) {
            return Ok(self.follower(matcher));
        }
        let mut matcher = Matcher::new(self.factory.create_parser(source));
        // The first mask also shows grammars that no text can follow.
        let first = matcher.compute_mask_or_eos();
        if let Some(fault) = matcher.get_error().or(first.err().map(|e| e.to_string())) {
            return Err(GrammarError::Invalid(plain(&fault)));
        }
        let mut cache = self.cache.lock().unwrap_or_else(|e| e.into_inner());
        if cache.len() == MAX_CACHED {
            cache.pop_front();
        }
        cache.push_back((key, matcher.deep_clone()));
        drop(cache);
        Ok(self.follower(matcher))
    }

    fn follower(&self, matcher: Matcher) -> Box<dyn TokenConstraint> {
        Box::new(Follower::at_start(Arc::new(matcher), self.ends.clone()))
    }

    fn cached(&self, key: &str) -> Option<Matcher> {
        let mut cache = self.cache.lock().unwrap_or_else(|e| e.into_inner());
        let at = cache.iter().position(|(known, _)| known == key)?;
        let entry = cache.remove(at)?;
        let matcher = entry.1.deep_clone();
        cache.push_back(entry);
        Some(matcher)
    }
}

/// The first sentence of a fault.
fn plain(fault: &str) -> String {
    fault.lines().next().unwrap_or_default().trim().to_owned()
}

fn source(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        Grammar::JsonObject => TopLevelGrammar::from_json_schema(with_white_space(json!({ "type": "object" }))),
        Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(with_white_space(schema.clone())),
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Choice(choices) if choices.is_empty() => return Err(GrammarError::NoChoice),
        Grammar::Choice(choices) => {
            let quoted: Vec<String> = choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
            TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
        }
        Grammar::Lark(text) if gbnf::is_gbnf(text) => {
            TopLevelGrammar::from_lark(gbnf::to_lark(text).map_err(GrammarError::Invalid)?)
        }
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

/// Bounds white space, which small models repeat without end; options that a schema brings stay.
fn with_white_space(schema: Value) -> Value {
    let Value::Object(mut fields) = schema else { return schema };
    let options = fields.entry("x-guidance").or_insert_with(|| json!({}));
    if let Some(options) = options.as_object_mut() {
        options.entry("whitespace_pattern").or_insert_with(|| WHITE_SPACE.into());
    }
    Value::Object(fields)
}

/// A grammar on its way through one output.
struct Follower {
    /// Before the first token.
    first: Arc<Matcher>,
    /// What ends an output.
    ends: Arc<[TokenId]>,
    /// After the output and what is forced behind it.
    matcher: Matcher,
    num_taken: usize,
    /// Tokens that must come next.
    forced: VecDeque<TokenId>,
}

impl Follower {
    fn at_start(first: Arc<Matcher>, ends: Arc<[TokenId]>) -> Self {
        let matcher = first.deep_clone();
        Follower { first, ends, matcher, num_taken: 0, forced: VecDeque::new() }
    }

    /// Takes in what the output has more than at the last call.
    fn follow(&mut self, output: &[TokenId]) -> Result<(), String> {
        let new = output.get(self.num_taken..).ok_or("the output has become shorter")?;
        for &token in new {
            match self.forced.pop_front() {
                Some(forced) if forced == token => {}
                Some(forced) => return Err(format!("token {token} came instead of {forced}")),
                // What follows a complete text (an end of sequence that is ignored) does not count.
                None if self.matcher.is_stopped() => {}
                None => self.matcher.consume_token(token).map_err(|e| plain(&e.to_string()))?,
            }
        }
        self.num_taken = output.len();
        Ok(())
    }

    /// Forces the next tokens where the grammar leaves no choice of text. The same wherever one looks: what is forced is
    /// followed to its end before the next look.
    fn look_ahead(&mut self) {
        if self.forced.is_empty() && !self.matcher.is_stopped() {
            self.forced.extend(self.matcher.consume_ff_tokens());
        }
    }

    /// What may come next where nothing is forced.
    fn choice(&mut self) -> Result<SimpleVob, String> {
        self.matcher.compute_mask_or_eos().map_err(|e| plain(&e.to_string()))
    }
}

impl TokenConstraint for Follower {
    fn allow(&mut self, output: &[TokenId], mask: &mut [u32]) -> Result<(), String> {
        self.follow(output)?;
        self.look_ahead();
        mask.fill(0);
        if let Some(&token) = self.forced.front() {
            let word = mask.get_mut((token / 32) as usize).ok_or("a token outside the vocabulary is forced")?;
            *word = 1 << (token % 32);
            return Ok(());
        }
        let allowed = self.choice()?;
        let words = allowed.as_slice();
        let shared = words.len().min(mask.len());
        mask[..shared].copy_from_slice(&words[..shared]);
        Ok(())
    }

    fn forced(&mut self, output: &[TokenId]) -> Result<Vec<TokenId>, String> {
        self.follow(output)?;
        let mut all = Vec::new();
        loop {
            self.look_ahead();
            let only = match self.forced.is_empty() {
                true => only_bit(self.choice()?.as_slice()),
                false => None,
            };
            let is_end = only.is_some_and(|token| self.ends.contains(&token));
            if let Some(token) = only {
                if !is_end {
                    self.matcher.consume_token(token).map_err(|e| plain(&e.to_string()))?;
                }
                self.forced.push_back(token);
            }
            // What is known to come is followed here already; `follow` compares it with what came.
            let num_new = self.forced.len();
            all.extend(self.forced.drain(..));
            if num_new == 0 || is_end || all.len() >= MAX_FORCED {
                self.forced.extend(all.iter().copied());
                return Ok(all);
            }
        }
    }

    fn fork(&self) -> Box<dyn TokenConstraint> {
        Box::new(Self::at_start(self.first.clone(), self.ends.clone()))
    }
}

/// The one bit that is set, if it is one.
fn only_bit(words: &[u32]) -> Option<TokenId> {
    let mut set = words.iter().enumerate().filter(|(_, word)| **word != 0);
    let (at, word) = set.next()?;
    (set.next().is_none() && word.is_power_of_two()).then(|| at as u32 * 32 + word.trailing_zeros())
}

#[cfg(test)]
mod tests;
