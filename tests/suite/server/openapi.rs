//! The document at `/openapi.json`, and that every answer of these tests is as it says.

use super::{Answer, TestServer};
use kvasir::server::openapi_document;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::OnceLock;

fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| serde_json::from_str(openapi_document()).expect("JSON"))
}

/// Holds an answer against the document. Paths that are not served are not in it.
pub fn check(method: &str, path: &str, answer: &Answer) {
    // What browsers ask first is not the API's.
    if method == "OPTIONS" {
        return;
    }
    let path = path.split('?').next().unwrap_or_default();
    let Some(operation) = operation(method, path) else {
        assert!(matches!(answer.status, 404 | 405 | 401 | 403), "{method} {path} is not in the document");
        return;
    };
    let at = format!("{method} {path} {}: {}", answer.status, answer.body);
    let response = &operation["responses"][answer.status.to_string()];
    assert!(response.is_object(), "the status is not in the document: {at}");
    assert!(answer.header("x-request-id").is_some(), "{at}");
    let kind = answer.header("content-type").and_then(|kind| kind.split(';').next());
    let Some(kind) = kind else {
        assert!(answer.body.is_empty() && response.get("content").is_none(), "{at}");
        return;
    };
    let content = &response["content"][kind];
    assert!(content.is_object(), "{kind} is not in the document: {at}");
    if kind == "application/json" {
        fits(&answer.json(), &content["schema"]).unwrap_or_else(|fault| panic!("{fault}: {at}"));
    }
    if kind == "text/event-stream" {
        let events = answer.body.split("\n\n").filter_map(|event| event.lines().find_map(|l| l.strip_prefix("data: ")));
        for event in events.filter(|event| *event != "[DONE]") {
            let event: Value = serde_json::from_str(event).expect("JSON");
            fits(&event, &content["x-event-schema"]).unwrap_or_else(|fault| panic!("{fault}: {event} of {at}"));
        }
    }
}

fn operation(method: &str, path: &str) -> Option<&'static Value> {
    let paths = document()["paths"].as_object().expect("paths");
    let known = paths.get(path).or_else(|| {
        let parts: Vec<&str> = path.split('/').collect();
        let is_meant = |known: &&String| {
            let known: Vec<&str> = known.split('/').collect();
            let same = |(a, b): (&&str, &&str)| a == b || a.starts_with('{');
            // The names of models may have slashes.
            let is_long = known == ["", "v1", "models", "{id}"] && parts.len() > 4;
            (known.len() == parts.len() || is_long) && known.iter().zip(&parts).all(same)
        };
        paths.keys().find(is_meant).and_then(|known| paths.get(known))
    });
    known?.get(method.to_ascii_lowercase())
}

/// The part of JSON Schema that the document uses.
fn fits(value: &Value, schema: &Value) -> Result<(), String> {
    let fault = |what: &str| Err(format!("{value} {what} {schema}"));
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.strip_prefix("#/components/schemas/")) {
        return fits(value, &document()["components"]["schemas"][name]);
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        let Some(parts) = schema[key].as_array() else { continue };
        let faults: Vec<String> = parts.iter().filter_map(|part| fits(value, part).err()).collect();
        let num_good = parts.len() - faults.len();
        let is_good = match key {
            "anyOf" => num_good > 0,
            "oneOf" => num_good == 1,
            _ => faults.is_empty(),
        };
        if !is_good {
            return Err(format!("{key}: {num_good} fit; {}", faults.join("; ")));
        }
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_i64() || n.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_kind = |wanted: &Value| *wanted == kind || (wanted == "number" && kind == "integer");
    match &schema["type"] {
        Value::Null => {}
        Value::Array(kinds) if kinds.iter().any(is_kind) => {}
        one if is_kind(one) => {}
        _ => return fault("has another type than"),
    }
    if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
        return fault("is none of");
    }
    if let Some(n) = value.as_f64() {
        let is_low = schema["minimum"].as_f64().is_some_and(|least| n < least);
        if is_low || schema["maximum"].as_f64().is_some_and(|most| n > most) {
            return fault("is out of the bounds of");
        }
    }
    for item in value.as_array().into_iter().flatten() {
        if schema["items"].is_object() {
            fits(item, &schema["items"])?;
        }
    }
    let Some(fields) = value.as_object() else { return Ok(()) };
    for name in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(name.as_str().expect("a name")) {
            return fault(&format!("lacks {name} of"));
        }
    }
    for (name, value) in fields {
        if let Some(schema) = schema["properties"].get(name) {
            fits(value, schema).map_err(|fault| format!("{name}: {fault}"))?;
        }
    }
    Ok(())
}

#[test]
fn the_document_has_every_endpoint_and_no_loose_end() {
    let document = document();
    let wanted = [
        "post /v1/chat/completions",
        "post /v1/completions",
        "post /v1/embeddings",
        "post /v1/responses",
        "get /v1/responses/{id}",
        "delete /v1/responses/{id}",
        "post /v1/messages",
        "post /v1/messages/count_tokens",
        "get /v1/models",
        "get /v1/models/{id}",
        "post /tokenize",
        "post /detokenize",
        "get /health",
        "get /health/ready",
        "get /health/live",
        "get /health/generate",
        "get /version",
        "get /ping",
        "get /load",
        "get /metrics",
        "post /reset_prefix_cache",
        "post /abort_requests",
        "get /kvasir/v1/state",
        "get /kvasir/v1/steps",
        "get /kvasir/v1/prefixes",
        "post /kvasir/v1/prefixes",
        "post /kvasir/v1/prefixes/{id}",
        "delete /kvasir/v1/prefixes/{id}",
        "post /v2/models/{name}/generate",
        "post /v2/models/{name}/generate_stream",
        "post /v2/models/{name}/infer",
        "get /openapi.json",
    ];
    for endpoint in wanted {
        let (method, path) = endpoint.split_once(' ').expect("a method");
        assert!(document["paths"][path][method].is_object(), "{endpoint}");
    }
    let mut ids = BTreeSet::new();
    for operation in document["paths"].as_object().expect("paths").values().flat_map(|item| item.as_object()).flatten()
    {
        assert!(ids.insert(operation.1["operationId"].to_string()), "{} comes twice", operation.1["operationId"]);
    }
    let mut pending = vec![document];
    while let Some(value) = pending.pop() {
        if let Some(name) = value["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
            assert!(document["components"]["schemas"][name].is_object(), "{name} is named and not described");
        }
        pending.extend(value.as_object().into_iter().flat_map(|fields| fields.values()));
        pending.extend(value.as_array().into_iter().flatten());
    }
}

#[test]
fn every_endpoint_of_the_document_is_served() {
    let server = TestServer::fake();
    assert_eq!(server.get("/openapi.json").json(), *document());
    for (path, item) in document()["paths"].as_object().expect("paths") {
        // A stream without end.
        if path == "/kvasir/v1/steps" {
            continue;
        }
        for method in item.as_object().expect("methods").keys() {
            let path = path.replace("{id}", "Simulation").replace("{name}", "Simulation");
            let json = [("content-type", "application/json")];
            let answer = server.send(&method.to_ascii_uppercase(), &path, &json, "{}");
            assert!(answer.status != 405 && answer.status < 500, "{method} {path}: {}", answer.body);
            assert!(!answer.body.contains("there is nothing at this path"), "{method} {path}");
            let wrong = server.send("PATCH", &path, &[], "");
            assert_eq!(wrong.status, 405, "{path}");
            assert!(wrong.header("allow").is_some(), "{path}");
        }
    }
    for path in ["/kvasir/v1/steps?after=x", "/v2/models/%ff/ready", "/v1/models/%ff", "/v1/responses/%ff"] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.header("content-type")), (400, Some("application/json")), "{path}");
    }
}

#[test]
fn what_the_document_forbids_is_refused() {
    let server = TestServer::fake();
    let message = |message: Value| json!({ "messages": [message], "max_tokens": 1 });
    for (path, body) in [
        ("/v1/chat/completions", message(json!({ "role": "user", "content": "x", "tool_calls": 5 }))),
        ("/v1/chat/completions", message(json!({ "role": "user", "content": "x", "tool_calls": [{ "id": "1" }] }))),
        ("/v1/chat/completions", message(json!({ "role": "tool", "content": "x", "tool_call_id": 1 }))),
        ("/v1/chat/completions", message(json!({ "role": "tool", "content": "x", "name": {} }))),
        ("/v1/messages", message(json!({ "role": "user" }))),
        (
            "/v1/messages",
            message(json!({ "role": "user", "content": [{ "type": "tool_use", "id": "1", "name": "f" }] })),
        ),
        ("/v1/messages", message(json!({ "role": "user", "content": [{ "type": "text" }] }))),
        ("/v1/responses", json!({ "input": [{ "role": "user" }] })),
        ("/v1/responses", json!({ "input": [{ "type": "function_call", "name": "f" }] })),
        ("/v1/responses", json!({ "input": [{ "type": "poem" }] })),
        ("/v1/responses", json!({ "input": "x", "metadata": 1 })),
        ("/v1/responses", json!({ "input": "x", "text": { "format": { "type": "xml" } } })),
        ("/v1/responses", json!({ "input": "x", "tools": [{ "type": "poem" }] })),
        ("/v2/models/Simulation/generate", json!({ "text_input": "x", "parameters": [] })),
        ("/v2/models/Simulation/generate", json!({ "text_input": "x", "id": 1 })),
        ("/v1/completions", json!({ "prompt": "x", "response_format": { "type": "xml" } })),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path} {body}: {}", answer.body);
    }
}
