//! Fields of a response's request, and the chat that they come to.

use crate::server::blocks::Block;
use crate::server::error::{ApiError, ApiResult};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Fields that are known and not supported, with the values that mean nothing.
pub const UNSUPPORTED: [(&str, fn(&Value) -> bool); 5] = [
    ("background", |value| *value == false),
    ("conversation", |_| false),
    ("prompt", |_| false),
    ("top_logprobs", |value| *value == 0),
    ("truncation", |value| value == "disabled"),
];

/// Model and sampling fields go along to the chat under their own names.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponsesFields {
    /// A text, or a list of items.
    #[schema(value_type = Object)]
    pub input: Value,
    /// Said first by the system; not carried over to later turns.
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub stream: Option<bool>,
    #[schema(value_type = Option<Vec<Object>>)]
    pub tools: Option<Vec<Value>>,
    #[schema(value_type = Option<Object>)]
    pub tool_choice: Option<Value>,
    pub parallel_tool_calls: Option<bool>,
    #[schema(value_type = Option<Object>)]
    pub text: Option<Value>,
    #[schema(value_type = Option<Object>)]
    pub reasoning: Option<Value>,
    /// False does not keep the response.
    pub store: Option<bool>,
    pub previous_response_id: Option<String>,
}

/// The same request as a chat, and its conversation without the instructions.
pub fn chat_body(fields: &ResponsesFields, value: &Value, before: Vec<Value>) -> ApiResult<(Value, Vec<Value>)> {
    let mut conversation = before;
    match &fields.input {
        Value::String(text) => conversation.push(json!({ "role": "user", "content": text })),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                push_item(&format!("input[{i}]"), item, &mut conversation)?;
            }
        }
        _ => return Err(ApiError::invalid("input", "input must be a string or a list of items")),
    }
    let system = fields.instructions.iter().map(|text| json!({ "role": "system", "content": text }));
    let messages: Vec<Value> = system.chain(conversation.iter().cloned()).collect();
    // Sampling fields that the chat knows go along under their own names.
    let mut body = value.as_object().cloned().unwrap_or_default();
    for own in
        ["input", "instructions", "text", "reasoning", "tools", "tool_choice", "store", "metadata", "top_logprobs"]
    {
        body.remove(own);
    }
    body.insert("messages".into(), messages.into());
    body.insert("n".into(), 1.into());
    body.insert("max_tokens".into(), json!(fields.max_output_tokens));
    body.insert("reasoning_effort".into(), fields.reasoning.as_ref().map_or(Value::Null, |r| r["effort"].clone()));
    if let Some(format) = fields.text.as_ref().and_then(|text| text.get("format")) {
        body.insert("response_format".into(), response_format(format)?);
    }
    if let Some(tools) = &fields.tools {
        let tools: ApiResult<Vec<Value>> = tools.iter().enumerate().map(|(i, tool)| function(i, tool)).collect();
        body.insert("tools".into(), tools?.into());
    }
    if let Some(choice) = &fields.tool_choice {
        let nested = match choice.get("name") {
            Some(name) => json!({ "type": choice["type"], "function": { "name": name } }),
            None => choice.clone(),
        };
        body.insert("tool_choice".into(), nested);
    }
    Ok((Value::Object(body), conversation))
}

/// What was said, as messages of a later turn. Reasoning is left out, as templates do it.
pub fn messages_of_output(blocks: &[Block]) -> Vec<Value> {
    let (mut text, mut calls) = (String::new(), Vec::new());
    for block in blocks {
        match block {
            Block::Text(more) => text.push_str(more),
            Block::Call { id, name, arguments } => {
                calls.push(call(id.as_str().into(), name.as_str().into(), arguments.as_str().into()))
            }
            Block::Reasoning(_) => {}
        }
    }
    let mut message = json!({ "role": "assistant", "content": text });
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    vec![message]
}

/// The fields of a response that do not depend on its answer.
pub fn head(fields: &ResponsesFields, value: &Value, id: &str, model: &str, created: u64) -> Value {
    let or = |name: &str, default: Value| value.get(name).filter(|given| !given.is_null()).cloned().unwrap_or(default);
    let reasoning = json!({ "effort": null, "summary": null });
    json!({
        "id": id, "object": "response", "created_at": created, "status": "in_progress", "model": model,
        "background": false, "error": null, "incomplete_details": null, "output": [], "usage": null,
        "instructions": fields.instructions, "max_output_tokens": fields.max_output_tokens,
        "metadata": or("metadata", json!({})), "parallel_tool_calls": fields.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": fields.previous_response_id, "reasoning": or("reasoning", reasoning),
        "store": fields.store.unwrap_or(true), "temperature": or("temperature", json!(1.0)),
        "text": or("text", json!({ "format": { "type": "text" } })), "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])), "top_p": or("top_p", json!(1.0)), "truncation": "disabled",
    })
}

fn push_item(at: &str, item: &Value, messages: &mut Vec<Value>) -> ApiResult<()> {
    match item["type"].as_str() {
        None | Some("message") => {
            messages.push(json!({ "role": item["role"], "content": item["content"] }));
        }
        Some("function_call") => {
            let call = call(item["call_id"].clone(), item["name"].clone(), item["arguments"].clone());
            // Calls of one turn are one message.
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) if last["tool_calls"].is_array() => {
                    last["tool_calls"].as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
                }
                Some(last) => last["tool_calls"] = json!([call]),
                None => messages.push(json!({ "role": "assistant", "content": "", "tool_calls": [call] })),
            }
        }
        Some("function_call_output") => messages.push(json!({
            "role": "tool", "tool_call_id": item["call_id"], "content": item["output"],
        })),
        Some("reasoning") => {}
        Some(kind) => {
            return Err(ApiError::unsupported(at, format!("{at}: items of type `{kind}` are not supported")));
        }
    }
    Ok(())
}

fn call(id: Value, name: Value, arguments: Value) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

fn response_format(format: &Value) -> ApiResult<Value> {
    Ok(match format["type"].as_str() {
        Some("json_schema") => {
            json!({ "type": "json_schema", "json_schema": { "name": format["name"], "schema": format["schema"] } })
        }
        Some("text" | "json_object") => format.clone(),
        _ => return Err(ApiError::invalid("text.format", "text.format.type must be text, json_object or json_schema")),
    })
}

fn function(i: usize, tool: &Value) -> ApiResult<Value> {
    let mut fields: Map<String, Value> = tool.as_object().cloned().unwrap_or_default();
    match fields.remove("type").as_ref().and_then(Value::as_str) {
        Some("function") => Ok(json!({ "type": "function", "function": fields })),
        kind => {
            let message = format!("tools[{i}]: tools of type `{}` are not supported", kind.unwrap_or_default());
            Err(ApiError::unsupported(format!("tools[{i}].type"), message))
        }
    }
}
