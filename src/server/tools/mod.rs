//! Tools: what a request offers, which of them must be called, how the model is told, how its calls are read.
//!
//! Guarantees: `required` and named choices are enforced by a grammar; otherwise calls are read in the notation of the
//! model's template (or the one that `--tool-call-parser` names).

mod harmony;
mod parser;
mod pythonic;
mod scanner;
#[cfg(test)]
mod tests;

pub use harmony::HarmonyParser;
pub use parser::{Format, ToolParser};

use super::error::{ApiError, ApiResult};
use super::parse;
use crate::constrain::Grammar;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Names of notations for `--tool-call-parser`.
pub const FORMATS: [&str; 9] =
    ["auto", "hermes", "qwen", "mistral", "llama3_json", "pythonic", "deepseek", "harmony", "generic"];

const MAX_TOOLS: usize = 128;

/// Tools of OpenAI's API that no server of models runs by itself.
const KNOWN_KINDS: [&str; 11] = [
    "custom",
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "mcp",
    "image_generation",
    "local_shell",
    "apply_patch",
];

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct ToolFields {
    #[schema(max_items = 128)]
    pub tools: Option<Vec<ToolField>>,
    #[schema(value_type = Option<ToolChoiceField>)]
    pub tool_choice: Option<Value>,
    /// False allows one call at most.
    pub parallel_tool_calls: Option<bool>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "the field is read by hand, so that its errors say what is wrong")]
pub enum ToolChoiceField {
    Word(ChoiceWord),
    Named {
        /// `function`.
        #[serde(rename = "type")]
        #[schema(pattern = "^function$")]
        kind: String,
        function: NamedFunction,
    },
}

#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
#[allow(dead_code, reason = "the field is read by hand, so that its errors say what is wrong")]
pub enum ChoiceWord {
    None,
    Auto,
    Required,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "the field is read by hand, so that its errors say what is wrong")]
pub struct NamedFunction {
    name: String,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ToolField {
    /// `function`.
    #[serde(rename = "type")]
    #[schema(pattern = "^function$")]
    pub kind: String,
    #[schema(required, nullable = false)]
    pub function: Option<FunctionField>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct FunctionField {
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$")]
    pub name: String,
    pub description: Option<String>,
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Map<String, Value>>,
    pub strict: Option<bool>,
}

/// Which tools may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Required,
    Named(String),
}

/// The tools of a request. There is none where no tool may be called.
#[derive(Clone, Debug)]
pub struct Tools {
    /// As templates take them.
    pub schemas: Value,
    functions: Vec<FunctionField>,
    choice: Choice,
    is_parallel: bool,
}

impl Tools {
    /// The tools that a body offers, if the model may call any.
    pub fn of(value: &Value) -> ApiResult<Option<Tools>> {
        let fields: ToolFields = parse::fields(value)?;
        let tools = fields.tools.unwrap_or_default();
        if tools.len() > MAX_TOOLS {
            return Err(ApiError::invalid("tools", format!("tools holds more than {MAX_TOOLS}")));
        }
        let mut functions = Vec::new();
        for (i, tool) in tools.into_iter().enumerate() {
            functions.push(function(i, tool)?);
        }
        let Some(choice) = choice(fields.tool_choice.as_ref(), &functions)? else { return Ok(None) };
        if functions.is_empty() {
            return Ok(None);
        }
        let schemas = value["tools"].clone();
        let is_parallel = fields.parallel_tool_calls.unwrap_or(true);
        Ok(Some(Tools { schemas, functions, choice, is_parallel }))
    }

    /// What enforces the choice.
    pub fn grammar(&self) -> Option<(&'static str, Grammar)> {
        let schema = match &self.choice {
            Choice::Auto => return None,
            Choice::Named(name) => self.functions.iter().find(|f| f.name == *name).map(parameters)?,
            Choice::Required => self.required(),
        };
        Some(("tools", Grammar::JsonSchema(schema)))
    }

    /// A list of calls of any of the tools. Each tool's schema is a definition of its own, with its own definitions in it,
    /// so that equal names of two tools do not meet.
    fn required(&self) -> Value {
        let mut definitions = Map::new();
        let mut calls = Vec::new();
        for (i, function) in self.functions.iter().enumerate() {
            let name = format!("tool{i}");
            let root = format!("#/$defs/{name}");
            let mut schema = parameters(function);
            rebase(&mut schema, &root);
            definitions.insert(name, schema);
            calls.push(json!({
                "type": "object",
                "properties": { "name": { "const": function.name }, "arguments": { "$ref": root } },
                "required": ["name", "arguments"],
                "additionalProperties": false,
            }));
        }
        let mut schema = json!({ "type": "array", "minItems": 1, "items": { "anyOf": calls }, "$defs": definitions });
        if !self.is_parallel {
            schema["maxItems"] = 1.into();
        }
        schema
    }

    /// What reads the calls; `format` is the model's notation.
    pub fn parser(&self, format: Format) -> ToolParser {
        let format = match &self.choice {
            Choice::Auto => format,
            Choice::Required => Format::Required,
            Choice::Named(name) => Format::Named(name.clone()),
        };
        let names = self.functions.iter().map(|function| function.name.clone()).collect();
        ToolParser::new(format, names, self.is_parallel)
    }

    /// True when calls come in a notation that a grammar enforces.
    pub fn is_forced(&self) -> bool {
        self.choice != Choice::Auto
    }

    /// A system message for templates that do not show tools.
    pub fn instructions(&self) -> String {
        let functions: Vec<&Value> =
            self.schemas.as_array().into_iter().flatten().filter_map(|tool| tool.get("function")).collect();
        let list: Vec<String> = functions.iter().map(|function| function.to_string()).collect();
        format!(
            "You can call these functions:\n{}\nTo call one, answer with nothing but a JSON object such as \
             {{\"name\": \"function\", \"arguments\": {{\"argument\": \"value\"}}}}.",
            list.join("\n")
        )
    }
}

/// References of a schema, which count from its root, count from `root` after this.
fn rebase(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut() {
                match (name.as_str(), value) {
                    ("$ref", Value::String(path)) if path == "#" || path.starts_with("#/") => {
                        path.replace_range(..1, root);
                    }
                    // Names of the client's, with a schema each.
                    ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                        named.values_mut().for_each(|schema| rebase(schema, root));
                    }
                    // Data, which may look like anything.
                    ("const" | "enum" | "default" | "examples", _) => {}
                    (_, value) => rebase(value, root),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rebase(item, root)),
        _ => {}
    }
}

fn parameters(function: &FunctionField) -> Value {
    match &function.parameters {
        Some(schema) => Value::Object(schema.clone()),
        None => json!({ "type": "object", "properties": {} }),
    }
}

fn function(i: usize, tool: ToolField) -> ApiResult<FunctionField> {
    let at = format!("tools[{i}]");
    if tool.kind != "function" {
        let is_known = KNOWN_KINDS.contains(&tool.kind.as_str());
        return Err(ApiError::unsupported_kind(format!("{at}.type"), &format!("{at}: tools"), &tool.kind, is_known));
    }
    let function = tool.function.ok_or_else(|| ApiError::invalid(&at, format!("{at}.function is missing")))?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if function.name.is_empty() || function.name.len() > 64 || !function.name.chars().all(is_plain) {
        let message = format!("{at}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores");
        return Err(ApiError::invalid(format!("{at}.function.name"), message));
    }
    Ok(function)
}

/// `None`: no tool may be called.
fn choice(field: Option<&Value>, functions: &[FunctionField]) -> ApiResult<Option<Choice>> {
    let fault = |message: String| Err(ApiError::invalid("tool_choice", message));
    let chosen = match field {
        None | Some(Value::Null) => Choice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(None),
            "auto" => Choice::Auto,
            "required" => Choice::Required,
            word => return fault(format!("tool_choice must be none, auto, required or a function, not `{word}`")),
        },
        Some(named) if named["type"] == "function" => match named["function"]["name"].as_str() {
            Some(name) if functions.iter().any(|function| function.name == name) => Choice::Named(name.to_owned()),
            Some(name) => return fault(format!("tool_choice names `{name}`, which is not among the tools")),
            None => return fault("tool_choice.function.name is missing".into()),
        },
        Some(other) => {
            let kind = other["type"].as_str().unwrap_or_default();
            let is_known = kind == "allowed_tools" || KNOWN_KINDS.contains(&kind);
            return Err(ApiError::unsupported_kind("tool_choice", "choices", kind, is_known));
        }
    };
    if chosen == Choice::Required && functions.is_empty() {
        return fault("tool_choice is required, but there are no tools".into());
    }
    Ok(Some(chosen))
}

/// The notation that a template tells its model, or the one that `name` overrides it with.
pub fn format_of(name: &str, template: &str) -> Format {
    match name {
        "hermes" | "qwen" => return Format::Hermes,
        "mistral" => return Format::Mistral,
        "llama3_json" => return Format::Llama3Json,
        "pythonic" => return Format::Pythonic,
        "deepseek" => return Format::DeepSeek,
        "harmony" => return Format::Harmony,
        "generic" => return Format::Generic,
        _ => {}
    }
    let has = |text: &str| template.contains(text);
    match () {
        () if has("<|channel|>") && has("<|message|>") => Format::Harmony,
        () if has("<｜tool▁calls▁begin｜>") => Format::DeepSeek,
        () if has("[TOOL_CALLS]") => Format::Mistral,
        () if has("<tool_call>") => Format::Hermes,
        () if has("func_name1(") || has("<|python_start|>") => Format::Pythonic,
        () if has("<|python_tag|>") || has("Environment: ipython") => Format::Llama3Json,
        () => Format::Generic,
    }
}

/// True when a template shows tools.
pub fn shows_tools(template: &str) -> bool {
    template.contains("tools")
}
