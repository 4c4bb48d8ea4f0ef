//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::{App, AppState};
use super::error::ApiResult;
use super::parse::PathFields;
use crate::engine::handle::LoadedModel;
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
    let model = app.model()?;
    let data = app.served_names(&model).into_iter().map(|id| card(&app, &model, id)).collect();
    Ok(Json(ModelList { object: "list", data }))
}

pub async fn show(State(app): State<App>, PathFields(id): PathFields<String>) -> ApiResult<Json<ModelCard>> {
    let model = app.model()?;
    let id = app.check_name(&model, Some(&id))?;
    Ok(Json(card(&app, &model, id)))
}

fn card(app: &AppState, model: &LoadedModel, id: String) -> ModelCard {
    ModelCard {
        id,
        object: "model",
        created: app.created,
        owned_by: if app.options.is_vllm_compatible { "vllm" } else { "kvasir" },
        root: model.name.clone(),
        parent: None,
        max_model_len: model.max_model_len,
    }
}
