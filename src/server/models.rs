//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::{App, AppState};
use super::error::ApiResult;
use super::fleet::Model;
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
    }
    Ok(Json(ModelList { object: "list", data }))
}

pub async fn show(State(app): State<App>, PathFields(id): PathFields<String>) -> ApiResult<Json<ModelCard>> {
    let (model, id) = app.fleet.find(Some(&id))?;
    card(&app, model, id).map(Json)
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
