//! Fields that bind the output to a grammar or to lists of tokens.

use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::parse;
use crate::constrain::{Grammar, TokenLists};
use crate::engine::handle::LoadedModel;
use crate::ids::TokenId;
use crate::protocol::{OutputRules, TokenConstraint};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct StructuredFields {
    pub response_format: Option<ResponseFormat>,
    pub structured_outputs: Option<StructuredOutputs>,
    /// Older names of what `structured_outputs` holds.
    #[schema(value_type = Option<SchemaField>)]
    pub guided_json: Option<Value>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    /// Only these tokens may be drawn.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Texts that may not come about.
    pub bad_words: Option<Vec<String>>,
    /// False shows special tokens in the text.
    pub skip_special_tokens: Option<bool>,
    #[schema(ignore)]
    ignore_eos: Option<bool>,
    #[schema(ignore)]
    min_tokens: Option<u32>,
}

/// A JSON schema, as an object or as text.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "schemas stay JSON")]
pub enum SchemaField {
    #[schema(value_type = Object)]
    Schema(Value),
    Text(String),
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponseFormat {
    /// text, json_object or json_schema.
    #[serde(rename = "type")]
    #[schema(pattern = "^(text|json_object|json_schema)$")]
    pub kind: String,
    pub json_schema: Option<JsonSchemaFormat>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct JsonSchemaFormat {
    #[schema(value_type = SchemaField)]
    pub schema: Option<Value>,
}

/// One of these.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct StructuredOutputs {
    #[schema(value_type = Option<SchemaField>)]
    pub json: Option<Value>,
    pub json_object: Option<bool>,
    pub regex: Option<String>,
    pub choice: Option<Vec<String>>,
    /// In Lark's notation, from `start`, or in GBNF, from `root`.
    pub grammar: Option<String>,
    #[schema(ignore)]
    structural_tag: Option<Value>,
}

/// The rules of a request whose body is `value`; `own` is a grammar that comes from elsewhere (required tools).
pub fn rules(model: &ModelUse, value: &Value, own: Option<(&'static str, Grammar)>) -> ApiResult<OutputRules> {
    let fields: StructuredFields = parse::fields(value)?;
    let shows_special = fields.skip_special_tokens == Some(false);
    let mut grammars = grammars(&fields)?;
    grammars.extend(own);
    if grammars.len() > 1 {
        let (field, _) = grammars[1];
        let message = format!("{} and {field} exclude each other", grammars[0].0);
        return Err(ApiError::invalid(field, message));
    }
    let mut constraint = None;
    if let Some((field, grammar)) = grammars.pop() {
        if fields.ignore_eos == Some(true) {
            return Err(ApiError::invalid("ignore_eos", format!("ignore_eos and {field} exclude each other")));
        }
        if fields.min_tokens.is_some_and(|n| n > 0) {
            return Err(ApiError::invalid("min_tokens", format!("min_tokens and {field} exclude each other")));
        }
        let compiled = model.compiler()?.compile(&grammar);
        constraint = Some(compiled.map_err(|e| ApiError::invalid(field, format!("{field}: {e}")))?);
    }
    let constraint = with_lists(&fields, model, constraint)?;
    Ok(OutputRules { constraint, shows_special, ..OutputRules::default() })
}

/// The same rules for another prompt of the request.
pub fn fork(rules: &OutputRules) -> OutputRules {
    OutputRules {
        constraint: rules.constraint.as_ref().map(|constraint| constraint.fork()),
        shows_special: rules.shows_special,
        prompt_logprobs: rules.prompt_logprobs,
        pooling: rules.pooling,
    }
}

fn grammars(fields: &StructuredFields) -> ApiResult<Vec<(&'static str, Grammar)>> {
    let mut found = Vec::new();
    if let Some(format) = &fields.response_format {
        match format.kind.as_str() {
            "text" => {}
            "json_object" => found.push(("response_format", Grammar::JsonObject)),
            "json_schema" => {
                let schema = format.json_schema.as_ref().and_then(|named| named.schema.clone());
                let field = "response_format.json_schema.schema";
                let schema = schema.ok_or_else(|| ApiError::invalid(field, format!("{field} is missing")))?;
                found.push(("response_format", Grammar::JsonSchema(schema)));
            }
            kind => {
                let is_known = kind == "structural_tag" || kind == "grammar";
                return Err(ApiError::unsupported_kind("response_format", "response formats", kind, is_known));
            }
        }
    }
    let nested = fields.structured_outputs.clone().unwrap_or_default();
    if nested.structural_tag.is_some() {
        let field = "structured_outputs.structural_tag";
        return Err(ApiError::unsupported(field, format!("{field} is not supported")));
    }
    let older = StructuredOutputs {
        json: fields.guided_json.clone(),
        regex: fields.guided_regex.clone(),
        choice: fields.guided_choice.clone(),
        grammar: fields.guided_grammar.clone(),
        ..StructuredOutputs::default()
    };
    let named = [
        (
            nested,
            [
                "structured_outputs.json",
                "structured_outputs.regex",
                "structured_outputs.choice",
                "structured_outputs.grammar",
            ],
        ),
        (older, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"]),
    ];
    for (given, [json, regex, choice, grammar]) in named {
        if let Some(schema) = given.json {
            found.push((json, Grammar::JsonSchema(parsed(json, schema)?)));
        }
        if given.json_object == Some(true) {
            found.push(("structured_outputs.json_object", Grammar::JsonObject));
        }
        found.extend(given.regex.map(|text| (regex, Grammar::Regex(text))));
        found.extend(given.choice.map(|choices| (choice, Grammar::Choice(choices))));
        found.extend(given.grammar.map(|text| (grammar, Grammar::Lark(text))));
    }
    Ok(found)
}

/// A schema may come as JSON text.
fn parsed(field: &'static str, schema: Value) -> ApiResult<Value> {
    match schema {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|e| ApiError::invalid(field, format!("{field}: the schema is not valid JSON: {e}"))),
        schema => Ok(schema),
    }
}

fn with_lists(
    fields: &StructuredFields,
    model: &LoadedModel,
    grammar: Option<Box<dyn TokenConstraint>>,
) -> ApiResult<Option<Box<dyn TokenConstraint>>> {
    if fields.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
        let message = "allowed_token_ids must not be empty: no token could follow";
        return Err(ApiError::invalid("allowed_token_ids", message));
    }
    let allowed = fields.allowed_token_ids.as_deref();
    if let Some(id) = allowed.and_then(|ids| ids.iter().find(|&&id| id >= model.vocab_size)) {
        let message =
            format!("token {id} of allowed_token_ids is outside the vocabulary of {} tokens", model.vocab_size);
        return Err(ApiError::invalid("allowed_token_ids", message));
    }
    let mut banned = Vec::new();
    for word in fields.bad_words.iter().flatten().filter(|word| !word.is_empty()) {
        // At the start of a word most vocabularies have the space in the token.
        for text in [word.clone(), format!(" {}", word.trim_start())] {
            let tokens = model.tokenizer.encode_plain(&text);
            banned.push(tokens.map_err(|e| ApiError::invalid("bad_words", e.to_string()))?);
        }
    }
    if allowed.is_none() && banned.is_empty() {
        return Ok(grammar);
    }
    Ok(Some(Box::new(TokenLists::new(allowed, banned, grammar))))
}
