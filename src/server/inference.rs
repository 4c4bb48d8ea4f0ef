//! The Open Inference Protocol with the generate extension, as Triton's clients speak it.

use super::app::{App, Caller, new_id};
use super::completions;
use super::error::{ApiError, ApiResult};
use super::parse::{self, JsonBody, PathFields};
use super::reducer::{Delta, Tally};
use super::sse::{self, Encode};
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The one version of a model.
const VERSION: &str = "1";
/// What a completion can be asked for and an answer of this protocol has no place for, with the values that mean nothing.
const SHAPES: [(&str, fn(&Value) -> bool); 6] = [
    ("n", |n| *n == 1),
    ("best_of", |n| *n == 1),
    ("logprobs", |_| false),
    ("prompt_logprobs", |_| false),
    ("echo", |value| *value == false),
    ("stream", |value| *value == false),
];

/// The body of every error.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct InferenceError {
    pub error: String,
}

/// An error in the protocol's shape.
pub fn error_body(error: &ApiError) -> InferenceError {
    InferenceError { error: error.body.message.clone() }
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ServerMetadata {
    pub name: &'static str,
    pub version: &'static str,
    pub extensions: Vec<&'static str>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelEntry {
    pub name: String,
    pub version: &'static str,
    /// READY or UNAVAILABLE.
    pub state: &'static str,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelMetadata {
    pub name: String,
    pub versions: Vec<&'static str>,
    pub platform: &'static str,
    pub inputs: Vec<TensorMetadata>,
    pub outputs: Vec<TensorMetadata>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TensorMetadata {
    pub name: &'static str,
    pub datatype: &'static str,
    pub shape: Vec<i32>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelConfig {
    pub name: String,
    pub platform: &'static str,
    pub backend: &'static str,
    pub max_batch_size: u32,
    pub input: Vec<TensorConfig>,
    pub output: Vec<TensorConfig>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TensorConfig {
    pub name: &'static str,
    pub data_type: &'static str,
    pub dims: Vec<i32>,
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

/// The model that a path names.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelPath {
    name: String,
    version: Option<String>,
}

impl ModelPath {
    /// The name to answer with; 404 where there is no such model or version.
    pub fn check(&self, app: &App) -> ApiResult<String> {
        let (_, name) = app.fleet.find(Some(&self.name))?;
        match self.version.as_deref() {
            None | Some(VERSION) => Ok(name),
            Some(other) => Err(ApiError::not_found(format!("the model `{name}` has no version {other}"))),
        }
    }
}

/// Refuses what answers of this protocol cannot show.
pub(super) fn refuse_shapes(fields: &Value) -> ApiResult<()> {
    parse::refuse(fields, &SHAPES)
}

/// `GET /v2`: what the server is.
pub async fn server() -> Json<ServerMetadata> {
    let extensions = vec!["generate", "binary_tensor_data", "model_repository", "model_configuration"];
    Json(ServerMetadata { name: "kvasir", version: env!("CARGO_PKG_VERSION"), extensions })
}

/// `POST /v2/repository/index`: the models there are.
pub async fn index(State(app): State<App>) -> ApiResult<Json<Vec<ModelEntry>>> {
    let mut entries = Vec::new();
    for model in app.fleet.models() {
        let is_ready = app.unready().is_none() && model.is_available();
        let state = if is_ready { "READY" } else { "UNAVAILABLE" };
        entries.extend(model.names()?.into_iter().map(|name| ModelEntry { name, version: VERSION, state }));
    }
    Ok(Json(entries))
}

/// `GET /v2/models/{name}`.
pub async fn model(State(app): State<App>, PathFields(path): PathFields<ModelPath>) -> ApiResult<Json<ModelMetadata>> {
    let text = |name| TensorMetadata { name, datatype: "BYTES", shape: vec![-1] };
    Ok(Json(ModelMetadata {
        name: path.check(&app)?,
        versions: vec![VERSION],
        platform: "kvasir",
        inputs: vec![text("text_input")],
        outputs: vec![text("text_output"), text("finish_reason")],
    }))
}

/// `GET /v2/models/{name}/config`.
pub async fn config(State(app): State<App>, PathFields(path): PathFields<ModelPath>) -> ApiResult<Json<ModelConfig>> {
    let text = |name| TensorConfig { name, data_type: "TYPE_STRING", dims: vec![-1] };
    Ok(Json(ModelConfig {
        name: path.check(&app)?,
        platform: "",
        backend: "kvasir",
        max_batch_size: 0,
        input: vec![text("text_input")],
        output: vec![text("text_output"), text("finish_reason")],
    }))
}

/// `GET /v2/models/{name}/ready`.
pub async fn model_ready(State(app): State<App>, PathFields(path): PathFields<ModelPath>) -> ApiResult<Response> {
    if let Some(reason) = app.unready() {
        return Err(ApiError::unavailable(reason));
    }
    path.check(&app)?;
    Ok(StatusCode::OK.into_response())
}

/// `POST /v2/models/{name}/generate`.
pub async fn generate(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(path): PathFields<ModelPath>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    run(app, caller, path, value, false).await
}

/// `POST /v2/models/{name}/generate_stream`.
pub async fn generate_stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathFields(path): PathFields<ModelPath>,
    JsonBody(value): JsonBody,
) -> ApiResult<Response> {
    run(app, caller, path, value, true).await
}

async fn run(app: App, caller: Caller, path: ModelPath, value: Value, streams: bool) -> ApiResult<Response> {
    let name = path.check(&app)?;
    let fields: GenerateFields = parse::fields(&value)?;
    let id = fields.id.clone().unwrap_or_else(|| new_id("gen-"));
    let prepared = completions::prepare_off_thread(&app, &caller, completion_body(&name, fields, &value)?).await?;
    let (generation, reducer) = prepared.start(&app, &caller, &id)?;
    let mut writer = Writer { id, name, finish: None };
    if streams {
        return Ok(sse::respond(&app, generation, reducer, writer));
    }
    let mut text = String::new();
    reducer.drain(generation, "text_input", |delta| text.push_str(&writer.text(delta))).await?;
    Ok(Json(writer.response(text)).into_response())
}

/// The same request as a plain completion: parameters are fields.
fn completion_body(name: &str, fields: GenerateFields, value: &Value) -> ApiResult<Value> {
    let mut all = value.as_object().cloned().unwrap_or_default();
    all.extend(fields.parameters.unwrap_or_default());
    // Which of the two paths was asked says whether the answer is streamed.
    for own in ["text_input", "parameters", "id", "stream"] {
        all.remove(own);
    }
    let mut body = Value::Object(all);
    refuse_shapes(&body)?;
    body["prompt"] = fields.text_input.into();
    body["model"] = name.into();
    Ok(body)
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
            model_version: VERSION,
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

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        sse::data(out, &error_body(error));
    }
}
