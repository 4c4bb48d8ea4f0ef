//! What a load would come to, without loading: name, memory and context of a model.
//!
//! Guarantees: headers are checked as a load checks them; no adapter is opened; the figures are those that a load on this
//! machine would come to now. It does not attempt the tokenizer, the template or the values of the weights.

use super::loader::{self, LoadFailure, OnProgress};
use super::loras;
use super::memory_plan::{self, Machine};
use super::options::LoadRequest;
use crate::model::Model;

/// What is known of a model before it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// As the loaded model will be called.
    pub name: String,
    /// Weights, workspace and KV pool.
    pub bytes: u64,
    /// Longest prompt and output together, in tokens.
    pub max_model_len: u32,
}

/// Reads the headers of a model, downloading the default model on first use.
pub fn survey(request: &LoadRequest, machine: Machine, on_progress: OnProgress<'_>) -> Result<Survey, LoadFailure> {
    let path = loader::locate(&request.source, request.options.default_access(), on_progress)?;
    let model = Model::open(&path)?;
    let options = loras::resolved(&model, &request.options)?;
    let plan = memory_plan::plan(&model, &options, machine)?;
    Ok(Survey { name: loader::name_of(&model), bytes: plan.memory.total_bytes, max_model_len: plan.max_model_len })
}
