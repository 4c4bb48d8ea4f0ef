//! What answers have in common: what a request used, as OpenAI's API counts it, and what ended it.

use crate::ids::TokenId;
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct UsageBody {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose keys and values were there already.
    pub cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens of reasoning, its marks among them.
    pub reasoning_tokens: u32,
}

/// The stop string, or the token, that ended an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopCause {
    Text(String),
    Token(TokenId),
}

/// Of each prompt token, by ids as text: its log-probability and those of the most likely ones; null for the first.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct PromptLogprobs(pub Vec<Option<BTreeMap<String, PromptLogprob>>>);

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct PromptLogprob {
    pub logprob: f32,
    /// 1 is the most likely token; null where it is not among those that were asked for.
    pub rank: Option<u32>,
    pub decoded_token: String,
}

/// The tokens that a request would run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RenderedPrompt {
    pub token_ids: Vec<TokenId>,
}
