//! `/v1/completions`.

use super::{PromptLogprobs, StopCause, UsageBody};
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct CompletionFields {
    pub prompt: PromptField,
    /// At most so many output tokens; 16 where nothing is said.
    #[schema(minimum = 1)]
    pub max_tokens: Option<u32>,
    /// Report the log-probabilities of so many alternatives.
    #[schema(maximum = 20)]
    pub logprobs: Option<u32>,
}

/// A text, several, token ids, or several lists of them.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string, a list of strings, a list of token ids or a list of such lists")]
pub enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<TokenId>),
    TokenLists(Vec<Vec<TokenId>>),
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<UsageBody>)]
    pub usage: Option<Option<UsageBody>>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// Four lists of equal length, an entry per output token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// Characters from the start of the text to the token.
    pub text_offset: Vec<usize>,
    /// Null for the first token of a prompt, which nothing comes before.
    pub token_logprobs: Vec<Option<f32>>,
    pub tokens: Vec<String>,
    /// Token texts to log-probabilities.
    #[schema(value_type = Vec<Option<Object>>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
}

impl CompletionLogprobs {
    /// Appends what came later.
    pub fn extend(&mut self, more: CompletionLogprobs) {
        self.text_offset.extend(more.text_offset);
        self.token_logprobs.extend(more.token_logprobs);
        self.tokens.extend(more.tokens);
        self.top_logprobs.extend(more.top_logprobs);
    }
}
