//! Fields of a response's request, and the chat that they come to.

use crate::server::blocks::Block;
use crate::server::error::{ApiError, ApiResult};
use crate::server::parse;
use crate::server::wire::responses::{ResponseObject, ResponsesFields, ResponsesFormat, ResponsesText, ResponsesTool};
use serde_json::{Value, json};

/// Fields that are known and not supported, with the values that mean nothing.
pub const UNSUPPORTED: [(&str, fn(&Value) -> bool); 6] = [
    ("background", |value| *value == false),
    ("conversation", |_| false),
    ("prompt", |_| false),
    ("prompt_logprobs", |_| false),
    ("top_logprobs", |value| *value == 0),
    ("truncation", |value| value == "disabled"),
];

const SERVER_TOOLS: [&str; 11] = [
    "web_search",
    "web_search_preview",
    "file_search",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "local_shell",
    "shell",
    "apply_patch",
    "mcp",
    "custom",
];

/// Tools that the server would have to bring are refused by their type, before their fields are read.
pub fn check_tools(value: &Value) -> ApiResult<()> {
    for (i, tool) in value["tools"].as_array().into_iter().flatten().enumerate() {
        if let Some(kind) = tool["type"].as_str().filter(|kind| *kind != "function") {
            let param = format!("tools[{i}].type");
            return Err(ApiError::unsupported_kind(param, "tools", kind, SERVER_TOOLS.contains(&kind)));
        }
    }
    Ok(())
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
    body.insert("model".into(), json!(fields.model));
    body.insert("messages".into(), messages.into());
    body.insert("n".into(), 1.into());
    body.insert("max_tokens".into(), json!(fields.max_output_tokens));
    body.insert("reasoning_effort".into(), json!(fields.reasoning.as_ref().map(|reasoning| &reasoning.effort)));
    if let Some(format) = fields.text.as_ref().and_then(|text| text.format.as_ref()) {
        body.insert("response_format".into(), response_format(format));
    }
    if let Some(tools) = &fields.tools {
        let tool = |tool: &ResponsesTool| json!({ "type": tool.kind, "function": tool.function });
        body.insert("tools".into(), tools.iter().map(tool).collect());
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

/// A response before its answer.
pub fn head(fields: ResponsesFields, id: &str, model: &str, created: u64) -> ResponseObject {
    let text = fields.text.filter(|text| text.format.is_some());
    ResponseObject {
        id: id.to_owned(),
        object: "response",
        created_at: created,
        status: "in_progress",
        model: model.to_owned(),
        background: false,
        error: None,
        incomplete_details: None,
        output: Vec::new(),
        usage: None,
        instructions: fields.instructions,
        max_output_tokens: fields.max_output_tokens,
        metadata: fields.metadata.unwrap_or_default(),
        parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
        previous_response_id: fields.previous_response_id,
        reasoning: fields.reasoning.unwrap_or_default(),
        store: fields.store.unwrap_or(true),
        temperature: fields.temperature.unwrap_or(1.0),
        text: text.unwrap_or(ResponsesText { format: Some(ResponsesFormat::Text {}) }),
        tool_choice: fields.tool_choice.unwrap_or_else(|| "auto".into()),
        tools: fields.tools.unwrap_or_default(),
        top_p: fields.top_p.unwrap_or(1.0),
        truncation: "disabled",
    }
}

fn push_item(at: &str, item: &Value, messages: &mut Vec<Value>) -> ApiResult<()> {
    let text = |field| parse::text_of(item, at, field);
    let missing = |field: &str| ApiError::invalid(format!("{at}.{field}"), format!("{at}.{field} is missing"));
    match item["type"].as_str() {
        None | Some("message") => {
            if item["content"].is_null() {
                return Err(missing("content"));
            }
            messages.push(json!({ "role": text("role")?, "content": item["content"] }));
        }
        Some("function_call") => {
            let call = call(text("call_id")?.into(), text("name")?.into(), text("arguments")?.into());
            // Calls of one turn are one message.
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) if last["tool_calls"].is_array() => {
                    last["tool_calls"].as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
                }
                Some(last) => last["tool_calls"] = json!([call]),
                None => messages.push(json!({ "role": "assistant", "content": "", "tool_calls": [call] })),
            }
        }
        Some("function_call_output") => {
            if item["output"].is_null() {
                return Err(missing("output"));
            }
            messages.push(json!({ "role": "tool", "tool_call_id": text("call_id")?, "content": item["output"] }));
        }
        Some("reasoning") => {}
        Some(kind) => {
            let is_known = kind == "item_reference" || kind.ends_with("_call") || kind.ends_with("_call_output");
            return Err(ApiError::unsupported_kind(at, &format!("{at}: items"), kind, is_known));
        }
    }
    Ok(())
}

fn call(id: Value, name: Value, arguments: Value) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

pub fn response_format(format: &ResponsesFormat) -> Value {
    match format {
        ResponsesFormat::Text {} => json!({ "type": "text" }),
        ResponsesFormat::JsonObject {} => json!({ "type": "json_object" }),
        ResponsesFormat::JsonSchema { name, schema, .. } => {
            json!({ "type": "json_schema", "json_schema": { "name": name, "schema": schema } })
        }
    }
}
