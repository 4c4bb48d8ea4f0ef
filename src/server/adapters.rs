//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them: LoRA adapters come and go while the
//! server runs.
//!
//! Guarantees: only where the server was told to allow it, since a client names a folder of the server's machine; an
//! adapter that a request uses stays; answers name no other path than the client's own. An adapter that came so goes with
//! its model, where that is unloaded for another.

use super::app::{App, AppState};
use super::error::{ApiError, ApiResult};
use super::fleet::ModelUse;
use super::parse::{self, JsonBody};
use crate::engine::handle::LoraError;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use utoipa::ToSchema;

/// What an adapter is called, and the folder on the server's machine that PEFT wrote it to.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct LoadLoraFields {
    #[schema(min_length = 1)]
    pub lora_name: String,
    #[schema(min_length = 1)]
    pub lora_path: String,
    /// The model that it is for; the first where none is named.
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct UnloadLoraFields {
    #[schema(min_length = 1)]
    pub lora_name: String,
    /// The model that has it; the first where none is named.
    #[allow(dead_code, reason = "the model was opened before the other fields are read")]
    pub model: Option<String>,
}

pub async fn load(State(app): State<App>, JsonBody(value): JsonBody) -> ApiResult<String> {
    check_allowed(&app)?;
    let LoadLoraFields { lora_name: name, lora_path: path, .. } = parse::fields(&value)?;
    // An adapter in use would change under its requests.
    parse::refuse(&value, &[("load_inplace", |given| *given == false)])?;
    check_given("lora_name", &name)?;
    check_given("lora_path", &path)?;
    let model = app.open(value["model"].as_str()).await?;
    if app.fleet.find(Some(&name)).is_ok() {
        return Err(fault(&LoraError::NameTaken(name), ""));
    }
    let done = format!("Success: LoRA adapter '{name}' added successfully.");
    change(model, move |model| {
        let loaded = model.model.engine.load_lora(&name, Path::new(&path));
        loaded.map(drop).map_err(|error| fault(&error, &path))
    })
    .await?;
    Ok(done)
}

pub async fn unload(State(app): State<App>, JsonBody(value): JsonBody) -> ApiResult<String> {
    check_allowed(&app)?;
    let UnloadLoraFields { lora_name: name, .. } = parse::fields(&value)?;
    check_given("lora_name", &name)?;
    let model = app.open(value["model"].as_str()).await?;
    let done = format!("Success: LoRA adapter '{name}' removed successfully.");
    change(model, move |model| model.model.engine.unload_lora(&name).map_err(|error| fault(&error, ""))).await?;
    Ok(done)
}

/// The engine takes its time: files are read, and the step under way ends first.
async fn change(model: Arc<ModelUse>, work: impl FnOnce(&ModelUse) -> ApiResult<()> + Send + 'static) -> ApiResult<()> {
    tokio::task::spawn_blocking(move || work(&model)).await.map_err(|_| ApiError::internal())?
}

fn check_allowed(app: &AppState) -> ApiResult<()> {
    if app.options.allows_lora_updates {
        return Ok(());
    }
    let message = "adapters come and go only where the server was started with --allow-runtime-lora-updating";
    Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message))
}

fn check_given(field: &'static str, value: &str) -> ApiResult<()> {
    if value.is_empty() { Err(ApiError::invalid(field, format!("{field} must not be empty"))) } else { Ok(()) }
}

/// `path` is the client's, of which answers name the last part alone.
fn fault(error: &LoraError, path: &str) -> ApiError {
    let message = format!("LoRA adapter: {error}");
    match error {
        LoraError::NoModel => ApiError::unavailable("the model is not ready"),
        LoraError::Unusable(text) => {
            let folder = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
            let text = if path.is_empty() { text.clone() } else { text.replace(path, &folder) };
            ApiError::invalid("lora_path", format!("the LoRA adapter cannot be used: {text}"))
        }
        // Clients look for these words.
        LoraError::NameTaken(name) => {
            ApiError::invalid("lora_name", format!("the LoRA adapter '{name}' has already been loaded"))
        }
        LoraError::NoRoom(_) => ApiError::bad_request(message).with_code("no_room"),
        LoraError::Unknown(_) => ApiError::not_found(message).with_param("lora_name"),
        LoraError::InUse(_) => {
            ApiError::new(StatusCode::CONFLICT, "conflict_error", message).with_param("lora_name").with_code("in_use")
        }
    }
}
