//! What answers have in common: what a request used, as OpenAI's API counts it, and what ended it.

use crate::ids::TokenId;
use serde::Serialize;
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

/// The tokens that a request would run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RenderedPrompt {
    pub token_ids: Vec<TokenId>,
}
