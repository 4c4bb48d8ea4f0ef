//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::{App, AppState};
use super::error::ApiResult;
use super::fleet::{LoraName, Model};
use super::parse::PathFields;
use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use utoipa::ToSchema;

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    pub root: String,
    pub parent: Option<String>,
    /// Longest prompt and output together, in tokens.
    pub max_model_len: u32,
}

pub async fn list(State(app): State<App>) -> ApiResult<Json<ModelList>> {
    let mut data = Vec::new();
    for model in app.fleet.models() {
        for id in model.names()? {
            data.push(card(&app, model, id)?);
        }
        for lora in model.loras() {
            data.push(lora_card(&app, model, &lora)?);
        }
    }
    Ok(Json(ModelList { object: "list", data }))
}

pub async fn show(State(app): State<App>, PathFields(id): PathFields<String>) -> ApiResult<Json<ModelCard>> {
    let (model, id) = app.fleet.find(Some(&id))?;
    let names = model.names()?;
    match model.loras().iter().find(|lora| lora.name == id && !names.contains(&id)) {
        Some(lora) => lora_card(&app, model, lora).map(Json),
        None => card(&app, model, id).map(Json),
    }
}

/// An adapter: its root is where it was read from, its parent the model that it changes.
fn lora_card(app: &AppState, model: &Model, lora: &LoraName) -> ApiResult<ModelCard> {
    let card = card(app, model, lora.name.clone())?;
    Ok(ModelCard { root: folder_name(lora), parent: Some(model.label()), ..card })
}

/// Paths are not told, the last part of them is.
fn folder_name(lora: &LoraName) -> String {
    lora.path.file_name().map_or_else(|| lora.name.clone(), |name| name.to_string_lossy().into_owned())
}

fn card(app: &AppState, model: &Model, id: String) -> ApiResult<ModelCard> {
    let (root, max_model_len) = model.facts()?;
    Ok(ModelCard {
        id,
        object: "model",
        created: app.created,
        owned_by: if app.options.is_vllm_compatible { "vllm" } else { "kvasir" },
        root,
        parent: None,
        max_model_len,
    })
}
