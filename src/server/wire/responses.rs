//! `/v1/responses`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Further fields of chats go along under their own names.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponsesFields {
    pub model: Option<String>,
    #[schema(value_type = ResponsesInput)]
    pub input: Value,
    /// Said first by the system; not carried over to later turns.
    pub instructions: Option<String>,
    #[schema(minimum = 1)]
    pub max_output_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 100)]
    pub temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    pub stream: Option<bool>,
    #[schema(max_items = 128)]
    pub tools: Option<Vec<ResponsesTool>>,
    #[schema(value_type = Option<ResponsesToolChoice>)]
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    pub text: Option<ResponsesText>,
    pub reasoning: Option<ResponsesReasoning>,
    /// False does not keep the response.
    pub store: Option<bool>,
    pub previous_response_id: Option<String>,
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}

/// A text, or items.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "items become messages without being types between")]
pub enum ResponsesInput {
    Text(String),
    Items(Vec<ResponsesItem>),
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "items become messages without being types between")]
pub enum ResponsesItem {
    Message { role: String, content: super::chat::ChatContent },
    FunctionCall { call_id: String, name: String, arguments: String },
    FunctionCallOutput { call_id: String, output: super::chat::ChatContent },
    Reasoning {},
}

#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct ResponsesTool {
    /// `function`.
    #[serde(rename = "type")]
    #[schema(pattern = "^function$")]
    pub kind: String,
    #[serde(flatten)]
    #[schema(value_type = crate::server::tools::FunctionField)]
    pub function: Map<String, Value>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "the chat reads the same field in its own shape")]
pub enum ResponsesToolChoice {
    Word(crate::server::tools::ChoiceWord),
    Named {
        #[serde(rename = "type")]
        kind: String,
        name: String,
    },
}

#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub struct ResponsesText {
    pub format: Option<ResponsesFormat>,
}

#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesFormat {
    Text {},
    JsonObject {},
    JsonSchema {
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        #[schema(value_type = Object)]
        schema: Value,
        #[serde(skip_serializing_if = "Option::is_none")]
        strict: Option<bool>,
    },
}

#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub struct ResponsesReasoning {
    pub effort: Option<String>,
    pub summary: Option<String>,
}

/// The answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ResponseObject {
    pub id: String,
    pub object: &'static str,
    pub created_at: u64,
    /// in_progress, completed, incomplete, cancelled or failed.
    pub status: &'static str,
    pub model: String,
    pub background: bool,
    pub error: Option<ResponsesFault>,
    pub incomplete_details: Option<IncompleteDetails>,
    pub output: Vec<OutputItem>,
    pub usage: Option<ResponsesUsage>,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub reasoning: ResponsesReasoning,
    pub store: bool,
    pub temperature: f32,
    pub text: ResponsesText,
    #[schema(value_type = ResponsesToolChoice)]
    pub tool_choice: Value,
    pub tools: Vec<ResponsesTool>,
    pub top_p: f32,
    pub truncation: &'static str,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ResponsesFault {
    pub code: &'static str,
    pub message: String,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct IncompleteDetails {
    pub reason: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct ResponsesUsage {
    pub input_tokens: u32,
    pub input_tokens_details: InputTokensDetails,
    pub output_tokens: u32,
    pub output_tokens_details: OutputTokensDetails,
    pub total_tokens: u32,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct InputTokensDetails {
    pub cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct OutputTokensDetails {
    pub reasoning_tokens: u32,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    Message {
        id: String,
        status: &'static str,
        role: &'static str,
        content: Vec<OutputPart>,
    },
    Reasoning {
        id: String,
        status: &'static str,
        #[schema(max_items = 0)]
        summary: Vec<String>,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        status: &'static str,
        call_id: String,
        name: String,
        arguments: String,
    },
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    OutputText {
        text: String,
        #[schema(max_items = 0)]
        annotations: Vec<String>,
        #[schema(max_items = 0)]
        logprobs: Vec<String>,
    },
    ReasoningText {
        text: String,
    },
}

/// An event of a stream; its name is its type.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct NumberedEvent {
    #[serde(flatten)]
    pub event: ResponsesEvent,
    /// Counts the events of the stream, from 0.
    pub sequence_number: u64,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub enum ResponsesEvent {
    #[serde(rename = "response.created")]
    Created { response: ResponseObject },
    #[serde(rename = "response.in_progress")]
    InProgress { response: ResponseObject },
    #[serde(rename = "response.completed")]
    Completed { response: ResponseObject },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: ResponseObject },
    #[serde(rename = "response.failed")]
    Failed { response: ResponseObject },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: OutputItem },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded {
        #[serde(flatten)]
        at: Place,
        part: OutputPart,
    },
    #[serde(rename = "response.content_part.done")]
    PartDone {
        #[serde(flatten)]
        at: Place,
        part: OutputPart,
    },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        #[serde(flatten)]
        at: Place,
        delta: String,
        #[schema(max_items = 0)]
        logprobs: Vec<String>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        #[serde(flatten)]
        at: Place,
        text: String,
        #[schema(max_items = 0)]
        logprobs: Vec<String>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta {
        #[serde(flatten)]
        at: Place,
        delta: String,
    },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone {
        #[serde(flatten)]
        at: Place,
        text: String,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
}

/// Where in the response something happens.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Place {
    pub item_id: String,
    pub output_index: usize,
    pub content_index: usize,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DeletedResponse {
    pub id: String,
    pub object: &'static str,
    pub deleted: bool,
}
