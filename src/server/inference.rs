//! The Open Inference Protocol with the generate extension, as Triton's clients speak it.

use super::app::{App, Caller, new_id};
use super::completions;
use super::error::{ApiError, ApiResult};
use super::parse;
use super::reducer::{Delta, Tally};
use super::sse::{self, Encode};
use axum::body::Body;
use axum::extract::{Extension, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Map, Value, json};

/// `GET /v2`: what the server is.
pub async fn server() -> Json<Value> {
    Json(json!({ "name": "kvasir", "version": env!("CARGO_PKG_VERSION"), "extensions": ["generate"] }))
}

/// `GET /v2/models/{name}`.
pub async fn model(State(app): State<App>, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let model = app.model()?;
    let name = app.check_name(&model, Some(&name))?;
    let text = |name: &str| json!({ "name": name, "datatype": "BYTES", "shape": [1] });
    Ok(Json(json!({
        "name": name, "versions": ["1"], "platform": "kvasir",
        "inputs": [text("text_input")], "outputs": [text("text_output")],
    })))
}

/// `GET /v2/models/{name}/ready`.
pub async fn model_ready(State(app): State<App>, Path(name): Path<String>) -> ApiResult<Response> {
    if let Some(reason) = app.unready() {
        return Err(ApiError::unavailable(reason));
    }
    app.check_name(&*app.model()?, Some(&name))?;
    Ok(StatusCode::OK.into_response())
}

/// `POST /v2/models/{name}/generate`.
pub async fn generate(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    run(app, caller, name, headers, body, false).await
}

/// `POST /v2/models/{name}/generate_stream`.
pub async fn generate_stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    run(app, caller, name, headers, body, true).await
}

async fn run(
    app: App,
    caller: Caller,
    name: String,
    headers: HeaderMap,
    body: Body,
    streams: bool,
) -> ApiResult<Response> {
    let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
    let id = value.get("id").and_then(Value::as_str).map_or_else(|| new_id("gen-"), str::to_owned);
    let prepared = completions::prepare_off_thread(&app, &caller, completion_body(&name, value)?).await?;
    let (mut generation, mut reducer) = prepared.start(&app, &caller, &id)?;
    let mut writer = Writer { id, name, finish: None };
    if streams {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    let mut text = String::new();
    while let Some((run, event)) = generation.recv().await {
        for delta in reducer.push(run, event).map_err(|e| ApiError::of_run(&e, "text_input"))? {
            text.push_str(&writer.text(delta));
        }
    }
    Ok(Json(writer.response(&text)).into_response())
}

/// The same request as a plain completion: parameters are fields.
fn completion_body(name: &str, value: Value) -> ApiResult<Value> {
    let prompt = value.get("text_input").and_then(Value::as_str);
    let prompt = prompt.ok_or_else(|| ApiError::invalid("text_input", "text_input must be a string"))?;
    let mut fields = Map::new();
    for source in [Some(&value), value.get("parameters")].into_iter().flatten() {
        fields.extend(source.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    }
    for own in ["text_input", "parameters", "id", "stream", "echo", "logprobs", "n", "best_of", "model"] {
        fields.remove(own);
    }
    fields.insert("prompt".into(), prompt.into());
    fields.insert("model".into(), name.into());
    Ok(Value::Object(fields))
}

struct Writer {
    id: String,
    name: String,
    finish: Option<&'static str>,
}

impl Writer {
    fn text(&mut self, delta: Delta) -> String {
        self.finish = delta.finish.map(|finish| finish.reason).or(self.finish);
        completions::text_of(delta.parts)
    }

    fn response(&self, text: &str) -> Value {
        json!({
            "id": self.id, "model_name": self.name, "model_version": "1", "text_output": text,
            "details": { "finish_reason": self.finish },
        })
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, _: Tally, out: &mut String) {
        let text = self.text(delta);
        if !text.is_empty() || self.finish.is_some() {
            sse::data(out, &self.response(&text));
        }
    }

    fn end(&mut self, _: Tally, _: &mut String) {}
}
