//! `/v1/chat/completions`.

use super::{PromptLogprobs, StopCause, UsageBody};
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ChatFields {
    #[schema(value_type = Vec<ChatMessage>, min_items = 1)]
    pub messages: Vec<Value>,
    #[schema(minimum = 1)]
    pub max_tokens: Option<u32>,
    /// The newer name of `max_tokens`; it goes first.
    #[schema(minimum = 1)]
    pub max_completion_tokens: Option<u32>,
    pub logprobs: Option<bool>,
    /// Alternatives per token; more than none needs `logprobs`.
    #[schema(maximum = 20)]
    pub top_logprobs: Option<u32>,
    pub reasoning_effort: Option<String>,
    /// A template to use instead of the model's.
    pub chat_template: Option<String>,
    /// Further variables for the template.
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<BTreeMap<String, Value>>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
}

/// A message of a conversation. Templates may read further fields.
#[derive(ToSchema)]
#[allow(dead_code, reason = "messages stay JSON, since templates read what they like of them")]
pub struct ChatMessage {
    /// system, developer, user, assistant or tool, as far as the template knows them.
    role: String,
    content: Option<ChatContent>,
    /// Calls that an assistant made.
    tool_calls: Option<Vec<MadeCall>>,
    /// The call that a tool answers.
    tool_call_id: Option<String>,
    name: Option<String>,
}

/// A text, or parts of text.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "messages stay JSON, since templates read what they like of them")]
pub enum ChatContent {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "messages stay JSON, since templates read what they like of them")]
pub enum ContentPart {
    Text { text: String },
    InputText { text: String },
    OutputText { text: String },
    Refusal { refusal: String },
    Thinking { thinking: String },
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "messages stay JSON, since templates read what they like of them")]
pub struct MadeCall {
    id: Option<String>,
    function: MadeFunctionCall,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "messages stay JSON, since templates read what they like of them")]
pub struct MadeFunctionCall {
    name: String,
    /// JSON text.
    arguments: String,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AssistantMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopCause>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct AssistantMessage {
    pub role: &'static str,
    pub content: Option<String>,
    pub refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub function: FunctionCall,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct FunctionCall {
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct ChatLogprobs {
    pub content: Vec<TokenLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TokenLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TopLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

/// A chunk of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<UsageBody>)]
    pub usage: Option<Option<UsageBody>>,
    /// With the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: ChunkDelta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<StopCause>)]
    pub stop_reason: Option<Option<StopCause>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// A piece of a tool call: id, type and name come once, with its first piece.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ToolCallDelta {
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    pub function: FunctionDelta,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}
