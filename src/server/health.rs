//! Health, version, load, and what routers ask besides; answered without waiting for the engine.

use super::app::{App, Caller, unix_seconds};
use super::error::{ApiError, ApiResult};
use super::parse::{self, JsonBody, ModelQuery, QueryFields};
use crate::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, SamplingParams, StopRules};
use crate::telemetry::{RequestState, StepRecord, Telemetry};
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use utoipa::ToSchema;

/// A token must come by then for the engine to count as healthy.
const GENERATE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Version {
    pub version: &'static str,
    pub engine: &'static str,
    pub model: Option<String>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ServerLoad {
    /// Requests under way.
    pub server_load: usize,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplicaLoads {
    pub timestamp: u64,
    pub dp_rank_count: u32,
    pub loads: Vec<ReplicaLoad>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ReplicaLoad {
    pub dp_rank: u32,
    pub num_running_reqs: u32,
    pub num_waiting_reqs: u32,
    /// Tokens that waiting requests have to compute. What the prefix cache has of them is known when they join, and is
    /// counted until then.
    pub num_waiting_uncached_tokens: u32,
    pub num_total_reqs: u32,
    pub num_used_tokens: u32,
    pub max_total_num_tokens: u32,
    pub token_usage: f64,
    /// Generated tokens per second over the last steps, ten seconds of them at most; 0 while nothing runs.
    pub gen_throughput: f64,
    pub cache_hit_rate: f64,
    pub utilization: f64,
    pub max_running_requests: u32,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Sleeping {
    pub is_sleeping: bool,
}

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct AbortFields {
    /// Ids of requests or answers; all of the caller's key where nothing is said.
    pub request_ids: Option<Vec<String>>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Aborted {
    pub num_aborted: usize,
}

/// 200 with an empty body when requests are served; 503 while loading, recovering, draining or stuck.
pub async fn ready(State(app): State<App>) -> Response {
    match app.unready() {
        None => StatusCode::OK.into_response(),
        Some(reason) => ApiError::unavailable(reason).into_response(),
    }
}

/// 503 only when a restart would help: the engine has work and makes no progress.
pub async fn live(State(app): State<App>) -> Response {
    match app.is_stalled() {
        false => StatusCode::OK.into_response(),
        true => ApiError::unavailable("the engine makes no progress").into_response(),
    }
}

/// Runs one token through the engine.
pub async fn generate(State(app): State<App>) -> ApiResult<Response> {
    let health = Caller { request_id: "health".into(), owner: u64::MAX, trace: None };
    let model = app.open(None).await?;
    let _guard = app.admit(&health, &model.model)?;
    let request = GenerateRequest {
        owner: OwnerTag { id: health.owner, label: health.request_id.clone() },
        prompt: vec![0],
        sampling: SamplingParams::greedy(),
        stop: StopRules::max_tokens(1),
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    let run = model.model.engine.submit(request).map_err(|e| ApiError::of_run(&e, "prompt"))?;
    let ended = async {
        loop {
            match std::future::poll_fn(|cx| run.poll_recv(cx)).await {
                Some(EngineEvent::Finished { .. }) => return true,
                Some(EngineEvent::Failed { .. }) | None => return false,
                Some(_) => {}
            }
        }
    };
    match tokio::time::timeout(GENERATE_TIMEOUT, ended).await {
        Ok(true) => Ok(StatusCode::OK.into_response()),
        Ok(false) | Err(_) => Err(ApiError::unavailable("the engine gave no token")),
    }
}

/// The version, and what must agree between replicas.
pub async fn version(State(app): State<App>) -> Json<Version> {
    let model = app.fleet.first().engine.model().map(|model| model.name.clone());
    Json(Version { version: env!("CARGO_PKG_VERSION"), engine: "kvasir", model })
}

pub async fn load(State(app): State<App>) -> Json<ServerLoad> {
    Json(ServerLoad { server_load: app.num_under_way() })
}

/// Load in the words of SGLang's routers.
pub async fn loads(
    State(app): State<App>,
    QueryFields(query): QueryFields<ModelQuery>,
) -> ApiResult<Json<ReplicaLoads>> {
    let (served, _) = app.fleet.find(query.model.as_deref())?;
    let model = served.loaded()?;
    let snapshot = served.engine.telemetry().snapshot();
    let (mut running, mut waiting, mut waiting_tokens) = (0, 0, 0);
    for request in &snapshot.requests {
        match request.state {
            RequestState::Finished => {}
            RequestState::Waiting { .. } => {
                waiting += 1;
                waiting_tokens += (request.prompt_tokens + request.output_tokens).saturating_sub(request.num_computed);
            }
            _ => running += 1,
        }
    }
    let kv = snapshot.kv;
    let (used, total) = (kv.used * model.block_size, kv.total * model.block_size);
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let load = ReplicaLoad {
        dp_rank: 0,
        num_running_reqs: running,
        num_waiting_reqs: waiting,
        num_waiting_uncached_tokens: waiting_tokens,
        num_total_reqs: running + waiting,
        num_used_tokens: used,
        max_total_num_tokens: total,
        token_usage: share(f64::from(used), f64::from(total)),
        gen_throughput: if running > 0 { gen_throughput(&served.engine.telemetry()) } else { 0.0 },
        cache_hit_rate: share(kv.hit_tokens as f64, kv.query_tokens as f64),
        utilization: share(f64::from(running), f64::from(model.max_num_seqs)),
        max_running_requests: model.max_num_seqs,
    };
    Ok(Json(ReplicaLoads { timestamp: unix_seconds(), dp_rank_count: 1, loads: vec![load] }))
}

/// Tokens per second that the steps of the last ten seconds sampled, of at most 512 steps.
fn gen_throughput(telemetry: &Telemetry) -> f64 {
    let (records, _) = telemetry.records_after(telemetry.snapshot().step.checked_sub(512));
    let end_us = |record: &StepRecord| record.t0_us + u64::from(record.total_us);
    let Some(end) = records.last().map(|last| end_us(last)) else { return 0.0 };
    let recent = records.iter().filter(|record| record.t0_us + 10_000_000 >= end);
    let begin = recent.clone().map(|record| record.t0_us).next().unwrap_or(end);
    let tokens =
        recent.flat_map(|record| &record.rows).map(|row| row.forced.len() + usize::from(row.sampled.is_some()));
    if end > begin { tokens.sum::<usize>() as f64 * 1e6 / (end - begin) as f64 } else { 0.0 }
}

pub async fn is_sleeping() -> Json<Sleeping> {
    Json(Sleeping { is_sleeping: false })
}

pub async fn reset_prefix_cache(State(app): State<App>) -> ApiResult<Response> {
    let loaded: Vec<_> = app.fleet.models().iter().filter(|model| model.engine.model().is_some()).collect();
    if loaded.is_empty() {
        return Err(ApiError::unavailable("the model is not ready"));
    }
    loaded.iter().for_each(|model| model.engine.reset_prefix_cache());
    Ok(StatusCode::OK.into_response())
}

/// Aborts requests by the id of the request or of the answer; all where none is named. Where keys are checked, those of
/// the caller's key.
pub async fn abort_requests(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    JsonBody(value): JsonBody,
) -> ApiResult<Json<Aborted>> {
    let fields: AbortFields = parse::fields(&value)?;
    Ok(Json(Aborted { num_aborted: app.abort(&caller, fields.request_ids.as_deref()) }))
}
