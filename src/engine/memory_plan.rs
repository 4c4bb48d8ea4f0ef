//! How many KV blocks a model gets, and how long a context fits.
use super::loader::LoadFailure;
use super::options::EngineOptions;
use crate::gpu::GpuCaps;
use crate::model::Model;

pub struct MemoryPlan {
    pub num_blocks: u32,
    pub max_model_len: u32,
}
pub fn plan(_model: &Model, _options: &EngineOptions, _caps: &GpuCaps) -> Result<MemoryPlan, LoadFailure> {
    Ok(MemoryPlan { num_blocks: 64, max_model_len: 512 })
}
