//! `GET /metrics`, and what the app shows: `GET /kvasir/v1/state` and `/kvasir/v1/steps`.

use super::app::App;
use super::error::ApiResult;
use super::metrics::{Facts, page};
use super::parse::QueryFields;
use super::sse;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Json, Response};
use serde::Deserialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc;
use utoipa::ToSchema;

/// Between looks at the ring of records.
const STEP_INTERVAL: Duration = Duration::from_millis(20);

/// Prometheus' text format.
pub async fn metrics(State(app): State<App>) -> Response {
    let telemetry = app.engine.telemetry();
    app.metrics.read_steps(&telemetry);
    let model = app.engine.model();
    let name = model.as_ref().map(|model| app.served_names(model).swap_remove(0)).unwrap_or_default();
    let options = app.engine.options();
    let text = page(
        &app.metrics,
        &Facts {
            model_name: &name,
            max_model_len: model.as_ref().map_or(0, |model| model.max_model_len),
            num_blocks: model.as_ref().map_or(0, |model| model.num_blocks),
            prefix_caching: options.prefix_caching,
            kv_cache_dtype: options.kv_cache_dtype.word(),
            gpu_memory_utilization: options.gpu_memory_utilization,
            snapshot: &telemetry.snapshot(),
            totals: app.engine.step_totals(),
        },
    );
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The engine's latest snapshot: the keyframe that step records build upon.
pub async fn state(State(app): State<App>) -> ApiResult<Response> {
    app.model()?;
    Ok(Json(&*app.engine.telemetry().snapshot()).into_response())
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

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
pub struct StepsQuery {
    /// Start after this step; by default with the next one.
    after: Option<u64>,
}

/// The stream of step records, an event for each, its id the number of the step. A gap in the ids means that the reader
/// was too slow: a new snapshot is then the way on.
pub async fn steps(
    State(app): State<App>,
    QueryFields(query): QueryFields<StepsQuery>,
    headers: HeaderMap,
) -> Response {
    let telemetry = app.engine.telemetry();
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
    (headers, Body::from_stream(pieces)).into_response()
}
