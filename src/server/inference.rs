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
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The one version of a model.
const VERSION: &str = "1";
/// What a completion can be asked for and an answer of this protocol has no place for, with the values that mean nothing.
const SHAPES: [(&str, fn(&Value) -> bool); 5] = [
    ("n", |n| *n == 1),
    ("best_of", |n| *n == 1),
    ("logprobs", |_| false),
    ("echo", |value| *value == false),
    ("stream", |value| *value == false),
];

/// An error in the protocol's shape: `{"error": "…"}`.
pub struct Refusal(ApiError);

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Refusal(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({ "error": self.0.body.message }).to_string();
        let (head, _) = self.0.into_response().into_parts();
        Response::from_parts(head, body.into())
    }
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
        let name = app.check_name(&*app.model()?, Some(&self.name))?;
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
pub async fn server() -> Json<Value> {
    Json(
        json!({ "name": "kvasir", "version": env!("CARGO_PKG_VERSION"), "extensions": ["generate", "binary_tensor_data", "model_repository", "model_configuration"] }),
    )
}

/// `POST /v2/repository/index`: the models there are.
pub async fn index(State(app): State<App>) -> Result<Json<Value>, Refusal> {
    let (model, state) = (app.model()?, if app.unready().is_none() { "READY" } else { "UNAVAILABLE" });
    let entry = |name| json!({ "name": name, "version": VERSION, "state": state });
    Ok(Json(app.served_names(&model).into_iter().map(entry).collect()))
}

/// `GET /v2/models/{name}`.
pub async fn model(State(app): State<App>, Path(path): Path<ModelPath>) -> Result<Json<Value>, Refusal> {
    let name = path.check(&app)?;
    let text = |name: &str| json!({ "name": name, "datatype": "BYTES", "shape": [-1] });
    Ok(Json(json!({
        "name": name, "versions": [VERSION], "platform": "kvasir",
        "inputs": [text("text_input")], "outputs": [text("text_output"), text("finish_reason")],
    })))
}

/// `GET /v2/models/{name}/config`.
pub async fn config(State(app): State<App>, Path(path): Path<ModelPath>) -> Result<Json<Value>, Refusal> {
    let name = path.check(&app)?;
    let text = |name: &str| json!({ "name": name, "data_type": "TYPE_STRING", "dims": [-1] });
    Ok(Json(json!({
        "name": name, "platform": "", "backend": "kvasir", "max_batch_size": 0,
        "input": [text("text_input")], "output": [text("text_output"), text("finish_reason")],
    })))
}

/// `GET /v2/models/{name}/ready`.
pub async fn model_ready(State(app): State<App>, Path(path): Path<ModelPath>) -> Result<Response, Refusal> {
    if let Some(reason) = app.unready() {
        return Err(ApiError::unavailable(reason).into());
    }
    path.check(&app)?;
    Ok(StatusCode::OK.into_response())
}

/// `POST /v2/models/{name}/generate`.
pub async fn generate(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(path): Path<ModelPath>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    run(app, caller, path, headers, body, false).await
}

/// `POST /v2/models/{name}/generate_stream`.
pub async fn generate_stream(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(path): Path<ModelPath>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    run(app, caller, path, headers, body, true).await
}

async fn run(
    app: App,
    caller: Caller,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
    streams: bool,
) -> Result<Response, Refusal> {
    let value = parse::json_object(&headers, body, app.options.max_body_bytes).await?;
    let name = path.check(&app)?;
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
    for own in ["text_input", "parameters", "id"] {
        fields.remove(own);
    }
    // Which of the two paths was asked says whether the answer is streamed.
    fields.remove("stream");
    let mut body = Value::Object(fields);
    refuse_shapes(&body)?;
    body["prompt"] = prompt.into();
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

    fn response(&self, text: &str) -> Value {
        json!({
            "id": self.id, "model_name": self.name, "model_version": VERSION, "text_output": text,
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

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        sse::data(out, &json!({ "error": error.body.message }));
    }
}
