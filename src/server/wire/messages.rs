//! `/v1/messages` and `/v1/messages/count_tokens`.

use super::responses::ResponsesFormat;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesFields {
    pub model: Option<String>,
    #[schema(value_type = Vec<MessagesTurn>, min_items = 1)]
    pub messages: Vec<Value>,
    #[schema(value_type = Option<SystemText>)]
    pub system: Option<Value>,
    /// Texts that end the output.
    #[schema(max_items = 64)]
    pub stop_sequences: Option<Vec<String>>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 100)]
    pub temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    #[schema(minimum = -1, maximum = 4_294_967_295_i64)]
    pub top_k: Option<i64>,
    #[schema(max_items = 128)]
    pub tools: Option<Vec<MessagesTool>>,
    pub tool_choice: Option<MessagesToolChoice>,
    pub thinking: Option<ThinkingField>,
    pub output_config: Option<OutputConfig>,
}

/// How the answer is to look.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct OutputConfig {
    pub format: Option<ResponsesFormat>,
}

/// What only answers need.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
pub struct MessagesLimit {
    /// At most so many output tokens.
    #[schema(minimum = 1)]
    pub max_tokens: u32,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "messages become JSON of another shape without being types between")]
pub struct MessagesTurn {
    /// user, assistant or system.
    #[schema(pattern = "^(user|assistant|system)$")]
    role: String,
    content: MessagesContent,
}

/// A text, or blocks.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "messages become JSON of another shape without being types between")]
pub enum MessagesContent {
    Text(String),
    Blocks(Vec<MessagesBlockField>),
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "messages become JSON of another shape without being types between")]
pub enum MessagesBlockField {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
    },
    RedactedThinking {
        data: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Value,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<SystemText>,
    },
}

/// A text, or blocks of text.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "messages become JSON of another shape without being types between")]
pub enum SystemText {
    Text(String),
    Blocks(Vec<TextBlock>),
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "messages become JSON of another shape without being types between")]
pub enum TextBlock {
    Text { text: String },
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesTool {
    /// `custom`.
    #[serde(rename = "type")]
    #[schema(pattern = "^custom$")]
    pub kind: Option<String>,
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$")]
    pub name: String,
    pub description: Option<String>,
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    pub input_schema: Option<serde_json::Map<String, Value>>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesToolChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ThinkingField {
    /// enabled, adaptive or disabled.
    #[serde(rename = "type")]
    pub kind: ThinkingKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingKind {
    Enabled,
    Adaptive,
    Disabled,
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Message {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub role: &'static str,
    pub model: String,
    pub content: Vec<MessagesBlock>,
    #[serde(flatten)]
    pub end: MessageEnd,
    pub usage: MessagesUsage,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct MessageEnd {
    /// end_turn, max_tokens, stop_sequence or tool_use; null while the answer goes on.
    pub stop_reason: Option<&'static str>,
    pub stop_sequence: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct MessagesUsage {
    pub input_tokens: u32,
    pub cache_creation_input_tokens: u32,
    pub cache_read_input_tokens: u32,
    pub output_tokens: u32,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesBlock {
    Thinking {
        thinking: String,
        signature: &'static str,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Value,
    },
}

/// An event of a stream; its name is its type.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesEvent {
    MessageStart { message: Message },
    ContentBlockStart { index: usize, content_block: MessagesBlock },
    ContentBlockDelta { index: usize, delta: MessagesDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageEnd, usage: MessagesUsage },
    MessageStop {},
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub enum MessagesDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: String },
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct MessageCount {
    pub input_tokens: usize,
}

/// The body of every error.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct MessagesError {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub error: MessagesFault,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct MessagesFault {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub message: String,
}
