//! Messages and texts to prompt tokens, through the model's template.

use super::error::{ApiError, ApiResult};
use super::parse;
use super::tools::{self, Tools};
use super::wire::chat::ChatFields;
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::tokenizer::{AddSpecial, ChatTemplate, Now, RenderRequest, TemplateError};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What a chat comes to as text.
pub struct Rendered {
    pub text: String,
    /// The text of the last message, where the answer continues it.
    pub continued: Option<String>,
    pub template: Arc<ChatTemplate>,
}

/// Renders a chat. A template that does not show tools gets them as a system message.
pub fn render_chat(fields: &ChatFields, tools: Option<&Tools>, model: &LoadedModel) -> ApiResult<Rendered> {
    let mut messages = messages(&fields.messages)?;
    let template = template(fields, model)?;
    if let Some(tools) = tools.filter(|_| !tools::shows_tools(template.source())) {
        instruct(&mut messages, &tools.instructions());
    }
    let continues = fields.continue_final_message == Some(true);
    let add_generation_prompt = fields.add_generation_prompt.unwrap_or(!continues);
    if continues && add_generation_prompt {
        let message = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let mut extra = fields.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = &fields.reasoning_effort {
        extra.entry("reasoning_effort".into()).or_insert_with(|| Value::from(effort.as_str()));
    }
    let last = messages.last().and_then(|message| message["content"].as_str()).map(str::to_owned);
    let messages = Value::from(messages);
    let tools = tools.map(|tools| &tools.schemas);
    let request = RenderRequest { messages: &messages, tools, add_generation_prompt, now: now(), extra: &extra };
    let text = template.render(&request).map_err(template_fault)?;
    if !continues {
        return Ok(Rendered { text, continued: None, template });
    }
    let last = last.unwrap_or_default();
    let text = up_to_last(&text, &last).ok_or_else(|| {
        ApiError::invalid("continue_final_message", "the template does not show the last message as it is")
    })?;
    Ok(Rendered { text, continued: Some(last), template })
}

/// Adds to what the system says first.
fn instruct(messages: &mut Vec<Value>, text: &str) {
    match messages.first_mut().filter(|first| first["role"] == "system") {
        Some(first) => {
            let said = first["content"].as_str().unwrap_or_default();
            first["content"] = format!("{said}\n\n{text}").into();
        }
        None => messages.insert(0, serde_json::json!({ "role": "system", "content": text })),
    }
}

/// The rendering up to the end of the last message's text.
fn up_to_last(text: &str, last: &str) -> Option<String> {
    let (whole, trimmed) = (text.rfind(last).map(|at| at + last.len()), last.trim());
    let end = whole.or_else(|| text.rfind(trimmed).map(|at| at + trimmed.len()))?;
    Some(text[..end].to_owned())
}

/// Tokens of a rendered chat or a plain prompt.
pub fn encode(model: &LoadedModel, text: &str, add_special: bool, field: &'static str) -> ApiResult<Vec<TokenId>> {
    let special = if add_special { AddSpecial::Yes } else { AddSpecial::No };
    model.tokenizer.encode(text, special).map_err(|e| ApiError::invalid(field, e.to_string()))
}

fn template(fields: &ChatFields, model: &LoadedModel) -> ApiResult<Arc<ChatTemplate>> {
    if let Some(source) = &fields.chat_template {
        let template = ChatTemplate::new(source, model.tokenizer.special_tokens());
        return template.map(Arc::new).map_err(|e| ApiError::invalid("chat_template", e.to_string()));
    }
    model.template.clone().ok_or_else(|| {
        let fault = model.template_fault.as_deref().unwrap_or("the model has no chat template");
        ApiError::bad_request(format!("{fault}; pass chat_template, or use /v1/completions"))
    })
}

fn template_fault(error: TemplateError) -> ApiError {
    ApiError::invalid("messages", error.to_string())
}

/// Messages as templates expect them: content as one string, arguments of tool calls as objects.
fn messages(given: &[Value]) -> ApiResult<Vec<Value>> {
    if given.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
    given.iter().enumerate().map(|(i, message)| one_message(i, message)).collect()
}

fn one_message(i: usize, message: &Value) -> ApiResult<Value> {
    let at = format!("messages[{i}]");
    let Some(fields) = message.as_object() else {
        return Err(ApiError::invalid(at.clone(), format!("{at} must be an object")));
    };
    let role = fields.get("role").and_then(Value::as_str).ok_or_else(|| {
        let param = format!("{at}.role");
        ApiError::invalid(param.clone(), format!("{param} must be a string"))
    })?;
    // Templates know the older word.
    let role = if role == "developer" { "system" } else { role };
    let mut out: Map<String, Value> = fields.clone();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content(&at, fields.get("content"))?.into());
    out.retain(|_, value| !value.is_null());
    for field in ["tool_call_id", "name"] {
        if out.contains_key(field) {
            parse::text_of(message, &at, field)?;
        }
    }
    if let Some(calls) = out.get_mut("tool_calls") {
        check_calls(&format!("{at}.tool_calls"), calls)?;
        calls.as_array_mut().into_iter().flatten().for_each(parse_arguments);
    }
    Ok(Value::Object(out))
}

fn check_calls(at: &str, calls: &Value) -> ApiResult<()> {
    let Some(calls) = calls.as_array() else {
        return Err(ApiError::invalid(at, format!("{at} must be a list")));
    };
    for (i, call) in calls.iter().enumerate() {
        let at = format!("{at}[{i}].function");
        let function = &call["function"];
        parse::text_of(function, &at, "name")?;
        if !function["arguments"].is_object() {
            parse::text_of(function, &at, "arguments")?;
        }
    }
    Ok(())
}

/// Text parts are joined by line ends.
fn content(at: &str, content: Option<&Value>) -> ApiResult<String> {
    let param = format!("{at}.content");
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: ApiResult<Vec<String>> =
                parts.iter().enumerate().map(|(i, part)| text_of_part(&format!("{param}[{i}]"), part)).collect();
            Ok(texts?.join("\n"))
        }
        Some(_) => Err(ApiError::invalid(param.clone(), format!("{param} must be a string or a list of parts"))),
    }
}

fn text_of_part(at: &str, part: &Value) -> ApiResult<String> {
    if let Some(text) = part.as_str() {
        return Ok(text.to_owned());
    }
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let field = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        "image_url" | "input_image" | "image" | "input_audio" | "audio_url" | "video_url" | "file" | "input_file"
        | "document" => {
            return Err(ApiError::media(at, format!("{at}: the model reads text only, not `{kind}`")));
        }
        _ => return Err(ApiError::invalid(at, format!("{at}: the type `{kind}` is not known"))),
    };
    let text = part.get(field).and_then(Value::as_str);
    text.map(str::to_owned).ok_or_else(|| ApiError::invalid(at, format!("{at}.{field} must be a string")))
}

/// Arguments come as JSON text; templates show them as objects.
fn parse_arguments(call: &mut Value) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return };
    if let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
        && parsed.is_object()
    {
        *arguments = parsed;
    }
}

/// The local date and time, for templates that tell it.
fn now() -> Now {
    let now = jiff::ZonedDateTime::now();
    Now {
        year: now.year(),
        month: now.month(),
        day: now.day(),
        hour: now.hour(),
        minute: now.minute(),
        second: now.second(),
    }
}
