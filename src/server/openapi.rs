//! Endpoints with their descriptions, and the OpenAPI document that they come to.
//!
//! Guarantees: the router and the document are made of one list, so that no route is missing in either; bodies are
//! described by the types that are read and written, and errors by the layers that a route stands behind. Events of
//! streams, which OpenAPI 3.1 has no word for, are described under `x-event-schema`.

use super::app::App;
use super::error::{ErrorResponse, ErrorShape};
use super::inference::InferenceError;
use super::wire::messages::MessagesError;
use super::{guard, routes};
use axum::handler::Handler;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use serde_json::{Map, Value, json};
use std::sync::OnceLock;
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

/// Statuses of a route that reads a body.
const OF_BODIES: [u16; 4] = [400, 408, 413, 415];
/// Statuses of a route that runs a request.
const OF_RUNS: [u16; 4] = [404, 429, 501, 503];

/// An OpenAPI document.
#[derive(ToSchema)]
#[allow(dead_code, reason = "the document describes itself, and is written as JSON")]
pub struct OpenApiDocument {
    openapi: String,
    #[schema(value_type = Object)]
    info: (),
    #[schema(value_type = Object)]
    paths: (),
}

/// One method of one path.
pub struct Endpoint {
    pub path: &'static str,
    pub handler: MethodRouter<App>,
    method: &'static str,
    tag: &'static str,
    summary: &'static str,
    /// What the body is made of: it has the fields of all of these.
    body: Vec<Value>,
    query: Value,
    /// Media types and contents of the answer 200.
    contents: Map<String, Value>,
    statuses: Vec<u16>,
    schemas: Vec<(String, RefOr<Schema>)>,
}

impl Endpoint {
    pub fn get<H: Handler<T, App>, T: 'static>(path: &'static str, summary: &'static str, handler: H) -> Self {
        Self::new("get", path, summary, get(handler))
    }

    pub fn post<H: Handler<T, App>, T: 'static>(path: &'static str, summary: &'static str, handler: H) -> Self {
        Self::new("post", path, summary, post(handler))
    }

    pub fn delete<H: Handler<T, App>, T: 'static>(path: &'static str, summary: &'static str, handler: H) -> Self {
        Self::new("delete", path, summary, delete(handler))
    }

    fn new(method: &'static str, path: &'static str, summary: &'static str, handler: MethodRouter<App>) -> Self {
        let endpoint = Endpoint {
            path,
            handler,
            method,
            tag: "server",
            summary,
            body: Vec::new(),
            query: Value::Null,
            contents: Map::new(),
            statuses: vec![403, 500],
            schemas: Vec::new(),
        };
        let of_key: &[u16] = if guard::needs_key(path) { &[401] } else { &[] };
        let of_path: &[u16] = if path.contains('{') { &[400, 404] } else { &[] };
        endpoint.refuses(of_key).refuses(of_path)
    }

    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// The body is a JSON object with the fields of `T`, and of each other type that is named so.
    pub fn takes<T: ToSchema>(mut self) -> Self {
        let schema = self.reference::<T>();
        self.body.push(schema);
        self.refuses(&OF_BODIES)
    }

    /// The query may have the fields of `T`.
    pub fn query<T: ToSchema>(mut self) -> Self {
        self.query = value_of(&T::schema());
        self.refuses(&[400])
    }

    /// The answer is JSON.
    pub fn answers<T: ToSchema>(mut self) -> Self {
        let schema = self.reference::<T>();
        self.contents.insert("application/json".into(), json!({ "schema": schema }));
        self
    }

    /// The answer is a list in JSON.
    pub fn answers_list<T: ToSchema>(mut self) -> Self {
        let schema = json!({ "type": "array", "items": self.reference::<T>() });
        self.contents.insert("application/json".into(), json!({ "schema": schema }));
        self
    }

    /// The answer can be a stream of such events; a fault ends it with an error in the place of an event.
    pub fn streams<T: ToSchema>(mut self) -> Self {
        let events = json!({ "anyOf": [self.reference::<T>(), self.error()] });
        // A schema here would be read as that of the text by some and as that of an event by others.
        let content = json!({ "x-event-schema": events });
        self.contents.insert("text/event-stream".into(), content);
        self
    }

    /// The answer is plain text.
    pub fn answers_text(mut self) -> Self {
        self.contents.insert("text/plain".into(), json!({ "schema": { "type": "string" } }));
        self
    }

    /// The answer can be bytes that mean something to its protocol.
    pub fn answers_bytes(mut self) -> Self {
        self.contents.insert("application/octet-stream".into(), json!({}));
        self
    }

    /// The request goes to the engine.
    pub fn runs(self) -> Self {
        self.refuses(&OF_RUNS)
    }

    /// Further statuses of errors.
    pub fn refuses(mut self, statuses: &[u16]) -> Self {
        self.statuses.extend(statuses);
        self
    }

    fn reference<T: ToSchema>(&mut self) -> Value {
        let name = T::name().into_owned();
        self.schemas.push((name.clone(), T::schema()));
        T::schemas(&mut self.schemas);
        json!({ "$ref": format!("#/components/schemas/{name}") })
    }

    fn error(&mut self) -> Value {
        match ErrorShape::of_path(self.path) {
            ErrorShape::OpenAi => self.reference::<ErrorResponse>(),
            ErrorShape::Anthropic => self.reference::<MessagesError>(),
            ErrorShape::Inference => self.reference::<InferenceError>(),
        }
    }

    /// The path as OpenAPI writes it.
    fn plain_path(&self) -> String {
        self.path.replace("{*", "{")
    }

    fn operation(&mut self) -> Value {
        let mut operation = json!({ "tags": [self.tag], "summary": self.summary, "operationId": self.id() });
        let parameters = self.parameters();
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(schema) = self.body_schema() {
            let content = json!({ "application/json": { "schema": schema } });
            operation["requestBody"] = json!({ "required": true, "content": content });
        }
        if !guard::needs_key(self.path) {
            operation["security"] = json!([]);
        }
        operation["responses"] = self.responses();
        operation
    }

    fn id(&self) -> String {
        let words = self.path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let path: Vec<&str> = words.collect();
        format!("{}_{}", self.method, path.join("_"))
    }

    fn parameters(&self) -> Vec<Value> {
        let path = self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let path = path.map(|name| {
            let name = name.trim_start_matches('*');
            json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string", "minLength": 1 } })
        });
        let query = self.query["properties"].as_object().into_iter().flatten().map(|(name, schema)| {
            // What is not there is not written as null.
            let mut schema = schema.clone();
            if let Some(kind) = schema["type"].as_array().and_then(|kinds| kinds.first()).cloned() {
                schema["type"] = kind;
            }
            json!({ "name": name, "in": "query", "required": false, "schema": schema })
        });
        path.chain(query).collect()
    }

    fn body_schema(&self) -> Option<Value> {
        match self.body.as_slice() {
            [] => None,
            [one] => Some(one.clone()),
            all => Some(json!({ "allOf": all })),
        }
    }

    fn responses(&mut self) -> Value {
        let id = json!({ "X-Request-Id": { "schema": { "type": "string" } } });
        let mut good = json!({ "description": "The answer", "headers": id });
        if !self.contents.is_empty() {
            good["content"] = self.contents.clone().into();
        }
        let mut all = json!({ "200": good });
        let error = self.error();
        self.statuses.sort_unstable();
        for status in &self.statuses {
            let mut headers = id.clone();
            if matches!(status, 429 | 503) {
                headers["Retry-After"] = json!({ "schema": { "type": "integer" } });
            }
            all[status.to_string()] = json!({
                "description": meaning(*status),
                "headers": headers,
                "content": { "application/json": { "schema": error } },
            });
        }
        all
    }
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong: the error names it",
        401 => "No key, or one that is not known",
        403 => "This host name is not served",
        404 => "There is no such model, response or prefix",
        408 => "The body did not come in time",
        413 => "The body is too large",
        415 => "The body is not JSON, or holds media that the model does not read",
        429 => "Too many requests wait, or too many of this key are under way",
        501 => "A field is known and not supported",
        503 => "The engine is loading, recovering or shutting down",
        _ => "The engine failed",
    }
}

/// `GET /openapi.json`.
pub async fn show() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document()).into_response()
}

/// The document as JSON text.
pub fn document() -> &'static str {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    DOCUMENT.get_or_init(|| of_endpoints(routes::endpoints()).to_string())
}

fn of_endpoints(endpoints: Vec<Endpoint>) -> Value {
    let (mut paths, mut schemas) = (json!({}), Map::new());
    for mut endpoint in endpoints {
        paths[endpoint.plain_path()][endpoint.method] = endpoint.operation();
        for (name, schema) in std::mem::take(&mut endpoint.schemas) {
            let mut schema = value_of(&schema);
            bound_integers(&mut schema);
            schemas.insert(name, schema);
        }
    }
    schemas.sort_keys();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A language model behind the APIs of OpenAI, Anthropic and the Open Inference Protocol.",
            "license": { "name": "MIT OR Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{ "bearer": [] }, { "x-api-key": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "x-api-key": { "type": "apiKey", "in": "header", "name": "x-api-key" },
            },
        },
    })
}

fn value_of(schema: &RefOr<Schema>) -> Value {
    serde_json::to_value(schema).expect("a schema holds strings, numbers and lists")
}

/// Integers get the bounds of their type where no others are said.
fn bound_integers(schema: &mut Value) {
    let bounds: Option<(i64, i64)> = match schema.get("format").and_then(Value::as_str) {
        Some("int32") if schema.get("minimum").is_some() => Some((0, i64::from(u32::MAX))),
        Some("int32") => Some((i64::from(i32::MIN), i64::from(i32::MAX))),
        Some("int64") => Some((i64::MIN, i64::MAX)),
        _ => None,
    };
    match schema {
        Value::Object(fields) => {
            if let Some((least, most)) = bounds {
                fields.entry("minimum").or_insert_with(|| least.into());
                fields.entry("maximum").or_insert_with(|| most.into());
            }
            fields.values_mut().for_each(bound_integers);
        }
        Value::Array(items) => items.iter_mut().for_each(bound_integers),
        _ => {}
    }
}
