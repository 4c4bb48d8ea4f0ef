//! `GET /metrics`, and what the app shows: `GET /kvasir/v1/state` and `/kvasir/v1/steps`.

use super::app::App;
use super::error::{ApiError, ApiResult};
use super::fleet::Model;
use super::metrics::{Facts, page};
use super::parse::{ModelQuery, QueryFields};
use super::sse;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Json, Response};
use serde::Deserialize;
use serde_json::json;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc;
use utoipa::ToSchema;

/// Between looks at the ring of records.
const STEP_INTERVAL: Duration = Duration::from_millis(20);

/// Prometheus' text format.
pub async fn metrics(State(app): State<App>) -> Response {
    let text = page(app.fleet.models().iter().map(|model| facts(model)).collect());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// What one model has to tell.
fn facts(model: &Model) -> Facts {
    let telemetry = model.engine.telemetry();
    model.metrics.read_steps(&telemetry);
    let (loaded, options) = (model.engine.model(), model.engine.options());
    let loras = loaded.as_ref().map_or(Vec::new(), |model| model.loras.list());
    let mut loras: Vec<(u64, String)> = loras.into_iter().map(|lora| (lora.id, lora.name)).collect();
    // One adapter may go by several names: the first stands for it.
    let mut seen = std::collections::HashSet::new();
    loras.retain(|(id, _)| seen.insert(*id));
    Facts {
        metrics: model.metrics.clone(),
        model_name: model.label(),
        max_model_len: model.facts().map_or(0, |(_, max_model_len)| max_model_len),
        num_blocks: loaded.as_ref().map_or(0, |model| model.num_blocks),
        is_unloaded: model.is_unloaded(),
        moves: model.moves(),
        prefix_caching: options.prefix_caching,
        kv_cache_dtype: options.kv_cache_dtype.word(),
        gpu_memory_utilization: options.gpu_memory_utilization,
        max_loras: options.lora.max_loras.max(loras.len() as u32),
        loras,
        snapshot: telemetry.snapshot(),
        totals: model.engine.step_totals(),
    }
}

/// The engine's latest snapshot: the keyframe that step records build upon.
pub async fn state(State(app): State<App>, QueryFields(query): QueryFields<ModelQuery>) -> ApiResult<Response> {
    let (model, _) = app.fleet.find(query.model.as_deref())?;
    model.loaded()?;
    Ok(Json(&*model.engine.telemetry().snapshot()).into_response())
}

/// The model as a remote app needs it: its facts, its tokenizer and its template.
pub async fn model(State(app): State<App>, QueryFields(query): QueryFields<ModelQuery>) -> ApiResult<Response> {
    let model = app.open(query.model.as_deref()).await?;
    let name = model.name.clone();
    let work = tokio::task::spawn_blocking(move || {
        let description = model.model.engine.describe()?;
        serde_json::to_string(&json!({ "id": name, "model": description })).ok()
    });
    let text = work.await.map_err(|_| ApiError::internal())?.ok_or_else(ApiError::internal)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

/// A model with its tokenizer; the fields of `model` are the engine's own.
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes a type of the engine, which knows nothing of the web")]
pub struct DescribedModel {
    /// By which requests may call it.
    id: String,
    #[schema(value_type = Object)]
    model: (),
}

/// What a reader of snapshots needs to know first; the other fields are the engine's own.
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes a type of telemetry, which knows nothing of the web")]
pub struct EngineState {
    /// The step that it was taken after.
    step: u64,
    /// The requests that the engine knows.
    #[schema(value_type = Vec<Object>)]
    requests: Vec<()>,
    /// Counts of the KV cache.
    #[schema(value_type = Object)]
    kv: (),
}

/// The record of one step; the other fields are the engine's own.
#[derive(ToSchema)]
#[allow(dead_code, reason = "describes a type of telemetry, which knows nothing of the web")]
pub struct StepEvent {
    step: u64,
}

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct StepsQuery {
    /// Start after this step; by default with the next one.
    after: Option<u64>,
    /// The first model where none is named.
    model: Option<String>,
}

/// The stream of step records, an event for each, its id the number of the step. A gap in the ids means that the reader
/// was too slow: a new snapshot is then the way on.
pub async fn steps(
    State(app): State<App>,
    QueryFields(query): QueryFields<StepsQuery>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let (model, _) = app.fleet.find(query.model.as_deref())?;
    let telemetry = model.engine.telemetry();
    let seen = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let mut after = seen.or(query.after).unwrap_or_else(|| telemetry.snapshot().step);
    let (sender, mut receiver) = mpsc::channel::<Bytes>(4);
    let (keep_alive, slow) = (app.options.keep_alive, app.options.slow_client_timeout);
    tokio::spawn(async move {
        let mut idle = Duration::ZERO;
        while !app.is_draining() && !sender.is_closed() {
            let (records, _) = telemetry.records_after(Some(after));
            let mut out = String::new();
            for record in records {
                after = record.step;
                out.push_str(&format!("id: {after}\n"));
                sse::data(&mut out, &*record);
            }
            if out.is_empty() && idle >= keep_alive {
                out.push_str(": keep-alive\n\n");
            }
            if out.is_empty() {
                idle += STEP_INTERVAL;
            } else {
                idle = Duration::ZERO;
                if !matches!(tokio::time::timeout(slow, sender.send(out.into())).await, Ok(Ok(()))) {
                    return;
                }
            }
            tokio::time::sleep(STEP_INTERVAL).await;
        }
    });
    let pieces =
        futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx).map(|piece| piece.map(Ok::<_, Infallible>)));
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(pieces)).into_response())
}
