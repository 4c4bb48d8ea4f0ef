//! The Open Inference Protocol with the generate extension, as Triton's clients speak it.

use super::app::{App, Caller, new_id};
use super::completions;
use super::error::{ApiError, ApiResult};
use super::parse::{self, PathText};
use super::reducer::{Delta, Tally};
use super::sse::{self, Encode};
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Json, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ServerMetadata {
    pub name: &'static str,
    pub version: &'static str,
    pub extensions: [&'static str; 1],
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelMetadata {
    pub name: String,
    pub versions: [&'static str; 1],
    pub platform: &'static str,
    pub inputs: [TensorMetadata; 1],
    pub outputs: [TensorMetadata; 1],
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TensorMetadata {
    pub name: &'static str,
    pub datatype: &'static str,
    pub shape: [i32; 1],
}

/// Parameters of plain completions may stand beside these fields or in `parameters`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct GenerateFields {
    pub id: Option<String>,
    #[schema(min_length = 1)]
    pub text_input: String,
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Map<String, Value>>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct GenerateResponse {
    pub id: String,
    pub model_name: String,
    pub model_version: &'static str,
    pub text_output: String,
    pub details: GenerateDetails,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct GenerateDetails {
    /// Null before the end.
    pub finish_reason: Option<&'static str>,
}

/// `GET /v2`: what the server is.
pub async fn server() -> Json<ServerMetadata> {
    Json(ServerMetadata { name: "kvasir", version: env!("CARGO_PKG_VERSION"), extensions: ["generate"] })
}

/// `GET /v2/models/{name}`.
pub async fn model(State(app): State<App>, PathText(name): PathText) -> ApiResult<Json<ModelMetadata>> {
    let model = app.model()?;
    let name = app.check_name(&model, Some(&name))?;
    let text = |name| TensorMetadata { name, datatype: "BYTES", shape: [1] };
    Ok(Json(ModelMetadata {
        name,
        versions: ["1"],
        platform: "kvasir",
        inputs: [text("text_input")],
        outputs: [text("text_output")],
    }))
}

/// `GET /v2/models/{name}/ready`.
pub async fn model_ready(State(app): State<App>, PathText(name): PathText) -> ApiResult<Response> {
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
    PathText(name): PathText,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    run(app, caller, name, headers, body, false).await
}

/// `POST /v2/models/{name}/generate_stream`.
pub async fn generate_stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathText(name): PathText,
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
    let fields: GenerateFields = parse::fields(&value)?;
    let id = fields.id.clone().unwrap_or_else(|| new_id("gen-"));
    let prepared = completions::prepare_off_thread(&app, &caller, completion_body(&name, fields, &value)).await?;
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
    Ok(Json(writer.response(text)).into_response())
}

/// The same request as a plain completion: parameters are fields.
fn completion_body(name: &str, fields: GenerateFields, value: &Value) -> Value {
    let mut body = value.as_object().cloned().unwrap_or_default();
    body.extend(fields.parameters.unwrap_or_default());
    for own in ["text_input", "parameters", "id", "stream", "echo", "logprobs", "n", "best_of", "model"] {
        body.remove(own);
    }
    body.insert("prompt".into(), fields.text_input.into());
    body.insert("model".into(), name.into());
    Value::Object(body)
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

    fn response(&self, text: String) -> GenerateResponse {
        GenerateResponse {
            id: self.id.clone(),
            model_name: self.name.clone(),
            model_version: "1",
            text_output: text,
            details: GenerateDetails { finish_reason: self.finish },
        }
    }
}

impl Encode for Writer {
    fn delta(&mut self, delta: Delta, _: Tally, out: &mut String) {
        let text = self.text(delta);
        if !text.is_empty() || self.finish.is_some() {
            sse::data(out, &self.response(text));
        }
    }

    fn end(&mut self, _: Tally, _: &mut String) {}
}
