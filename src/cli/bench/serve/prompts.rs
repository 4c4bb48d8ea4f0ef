//! Prompts of given lengths for a server whose tokenizer only it has.
//!
//! Where the server has `/tokenize`, prompts are made of the tokens of a plain text in random order, and their lengths are
//! exact in completions. Elsewhere they are short words, of which most are a token each; the server's usage then says how
//! many there were.

use super::ServeBenchArgs;
use super::client::{Endpoint, Target};
use crate::cli::bench::splitmix;
use crate::cli::error::CliError;
use serde_json::{Value, json};

const WORDS: &str = "time way day man thing part life child world school state hand place week company system number \
                     night point home water room mother area money story fact month lot right study book eye job word \
                     business issue side kind head house service friend father power hour game line end member law car";

/// A prompt, and how long its answer is to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Token ids or a text.
    pub content: Value,
    /// Tokens, as far as they are known.
    pub input_len: u32,
    pub output_len: u32,
}

pub async fn make(target: &Target, args: &ServeBenchArgs) -> Result<Vec<Prompt>, CliError> {
    let tokenize = json!({ "model": target.model, "prompt": WORDS, "add_special_tokens": false });
    let answer = target.post("/tokenize", &tokenize).await.unwrap_or_default();
    let tokens: Vec<u64> = answer["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let words: Vec<&str> = WORDS.split(' ').collect();
    let mut random = Random(args.seed);
    let shared: Vec<usize> = (0..args.random_prefix_len).map(|_| random.below(usize::MAX)).collect();
    let mut prompts = Vec::with_capacity(args.num_prompts as usize);
    for _ in 0..args.num_prompts {
        let input_len = random.around(args.random_input_len, args.random_range_ratio);
        let output_len = random.around(args.random_output_len, args.random_range_ratio);
        let picks: Vec<usize> =
            shared.iter().copied().chain((0..input_len).map(|_| random.below(usize::MAX))).collect();
        let content = if tokens.is_empty() {
            picks.iter().map(|pick| words[pick % words.len()]).collect::<Vec<_>>().join(" ").into()
        } else {
            let ids: Vec<u64> = picks.iter().map(|pick| tokens[pick % tokens.len()]).collect();
            match args.endpoint {
                Endpoint::Completions => json!(ids),
                Endpoint::Chat => {
                    let body = json!({ "model": target.model, "tokens": ids });
                    let text = target.post("/detokenize", &body).await.map_err(CliError::failure)?;
                    text["prompt"].clone()
                }
            }
        };
        prompts.push(Prompt { content, input_len: input_len + args.random_prefix_len, output_len });
    }
    Ok(prompts)
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = splitmix(self.0);
        (self.0 >> 1) as usize % limit
    }

    /// Between `(1 - share) * len` and `(1 + share) * len`, at least 1.
    fn around(&mut self, len: u32, share: f64) -> u32 {
        let spread = (f64::from(len) * share) as u32;
        let least = len.saturating_sub(spread).max(1);
        least + self.below((len + spread - least + 1) as usize) as u32
    }
}
