//! Follows the server: its model, its steps, its state.

use super::{EventLines, Link, NO_ANSWER, good, with_causes};
use crate::engine::describe::Description;
use crate::engine::handle::{EngineStatus, FailureKind};
use crate::telemetry::{EngineSnapshot, StepRecord};
use reqwest::Method;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Between attempts.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Snapshots are asked for at most this often.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(200);
/// How long a stream may be silent: the server sends a comment more often than this.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Described {
    id: String,
    model: Description,
}

/// For as long as the handle lives.
pub async fn follow(link: Arc<Link>) {
    loop {
        let fault = match session(&link).await {
            Ok(()) => "the connection ended".to_owned(),
            Err(fault) => fault,
        };
        tracing::info!("{}: {fault}", link.options.url);
        if link.shared.is_shutting_down() {
            return;
        }
        // What a person has to mend is said; what time mends is waited for.
        if fault.contains("API key") {
            link.shared.set_status(EngineStatus::Failed {
                kind: FailureKind::Engine,
                message: format!("{}: {fault}", link.options.url),
                fix: Some("give the server's key with --api-key".into()),
            });
        } else {
            let host = link.options.host();
            let phase = match fault.as_str() {
                NO_ANSWER => format!("The engine at {host} does not answer; trying again"),
                _ => format!("The engine at {host}: {fault}; trying again"),
            };
            link.shared.set_status(EngineStatus::Loading { phase, done: 0, total: 0 });
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// One connection, until it ends.
async fn session(link: &Arc<Link>) -> Result<(), String> {
    let described = good(link.request(Method::GET, &link.path("/kvasir/v1/model"))).await?;
    let described: Described = read(described).await?;
    let model = tokio::task::spawn_blocking(|| described.model.build());
    let model = Arc::new(model.await.map_err(|e| e.to_string())??);
    *link.name.lock().unwrap_or_else(|e| e.into_inner()) = Some(described.id);
    let mut step = snapshot(link).await?;
    link.shared.set_model(Some(model.clone()), u32::MAX);
    link.shared.set_status(EngineStatus::Ready(model));
    let path = link.path(&format!("/kvasir/v1/steps?after={step}"));
    let mut steps = good(link.request(Method::GET, &path)).await?;
    let mut lines = EventLines::default();
    let mut shown = Instant::now();
    loop {
        let bytes = match tokio::time::timeout(SNAPSHOT_INTERVAL, steps.chunk()).await {
            Ok(bytes) => bytes.map_err(|e| broken(&e))?.ok_or("the server ended the stream of steps")?,
            // Nothing happens: what the last step left is shown once.
            Err(_) if step_is_shown(link, step) && shown.elapsed() < SILENCE / 30 => continue,
            Err(_) => {
                snapshot(link).await?;
                shown = Instant::now();
                continue;
            }
        };
        for data in lines.push(&bytes) {
            let record: StepRecord = serde_json::from_str(&data).map_err(|e| format!("a step record: {e}"))?;
            step = record.step;
            link.shared.telemetry.push(record);
        }
        if shown.elapsed() >= SNAPSHOT_INTERVAL {
            snapshot(link).await?;
            shown = Instant::now();
        }
        link.shared.wake();
    }
}

/// What is shown of an answer that was cut off; the log has the causes.
fn broken(error: &reqwest::Error) -> String {
    tracing::info!("{}", with_causes(error));
    "the connection broke".into()
}

fn step_is_shown(link: &Link, step: u64) -> bool {
    link.shared.telemetry.snapshot().step >= step
}

/// Brings the engine's latest snapshot here; the step that it was taken after.
async fn snapshot(link: &Link) -> Result<u64, String> {
    let mut snapshot: EngineSnapshot =
        read(good(link.request(Method::GET, &link.path("/kvasir/v1/state"))).await?).await?;
    link.restore_owners(&mut snapshot.requests);
    let step = snapshot.step;
    link.shared.telemetry.publish(snapshot);
    link.shared.wake();
    Ok(step)
}

async fn read<T: serde::de::DeserializeOwned>(response: reqwest::Response) -> Result<T, String> {
    let path = response.url().path().to_owned();
    let bytes = response.bytes().await.map_err(|e| broken(&e))?;
    serde_json::from_slice(&bytes).map_err(|e| format!("{path}: {e}"))
}
