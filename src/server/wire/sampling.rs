//! Fields that chat and plain completions share.

use crate::ids::TokenId;
use serde::Deserialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// How tokens are drawn, when the output ends and how it is sent.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct SamplingFields {
    /// A served name; nothing is the model that is loaded.
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
    /// The answer's id, behind its usual beginning: 1 to 200 visible ASCII characters.
    #[schema(pattern = "^[!-~]{1,200}$")]
    pub request_id: Option<String>,
    /// 0 takes the most likely token, the lowest id on ties.
    #[schema(minimum = 0, maximum = 100)]
    pub temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    /// 0 and -1 keep all tokens.
    #[schema(minimum = -1, maximum = 4_294_967_295_i64)]
    pub top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// Choices to return.
    #[schema(minimum = 1, maximum = 128)]
    pub n: Option<u32>,
    /// Choices to draw, of which the `n` most likely are returned.
    #[schema(minimum = 1, maximum = 128)]
    pub best_of: Option<u32>,
    pub stop: Option<StopField>,
    pub stop_token_ids: Option<Vec<TokenId>>,
    pub include_stop_str_in_output: Option<bool>,
    pub seed: Option<i64>,
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f32>,
    #[schema(exclusive_minimum = 0)]
    pub repetition_penalty: Option<f32>,
    /// Token ids, as strings, to what is added to their logits: -100 to 100.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    /// The end of sequence does not count before so many tokens.
    pub min_tokens: Option<u32>,
    pub ignore_eos: Option<bool>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// Under the priority policy the lowest runs first.
    pub priority: Option<i32>,
    /// Prefixes are shared only between requests of equal salt.
    pub cache_salt: Option<String>,
    pub return_token_ids: Option<bool>,
    /// Report the log-probabilities of the prompt's tokens, with so many alternatives.
    #[schema(maximum = 20)]
    pub prompt_logprobs: Option<u32>,
    pub use_beam_search: Option<bool>,
    #[schema(minimum = -5, maximum = 5)]
    pub length_penalty: Option<f32>,
    pub early_stopping: Option<EarlyStoppingField>,
    /// Keep only so many tokens at the end of the prompt; -1 keeps what the context holds.
    pub truncate_prompt_tokens: Option<i64>,
    pub add_special_tokens: Option<bool>,
    pub echo: Option<bool>,
}

/// When a beam search ends: `true` at as many outputs as beams, `false` when no better one is likely, `"never"` when none
/// is possible.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected true, false or \"never\"")]
pub enum EarlyStoppingField {
    Flag(bool),
    Word(EarlyStoppingWord),
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EarlyStoppingWord {
    Never,
}

/// One string that ends the output, or several.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum StopField {
    One(String),
    Several(Vec<String>),
}

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// A last chunk without choices tells what was used.
    pub include_usage: Option<bool>,
    /// Every chunk does.
    pub continuous_usage_stats: Option<bool>,
}
