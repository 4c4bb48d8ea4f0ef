//! The GPU executor.
use super::*;
use crate::gpu::Gpu;
use crate::model::Model;

#[derive(Clone, Copy, Debug)]
pub struct ExecutorConfig {
    pub num_blocks: u32,
    pub block_size: u32,
    pub max_tokens_per_step: u32,
    pub max_num_seqs: u32,
    pub max_model_len: u32,
    pub precise: bool,
}
pub struct WgpuExecutor;
impl WgpuExecutor {
    pub fn new(
        _gpu: Gpu,
        _model: &Model,
        _cfg: ExecutorConfig,
        _progress: &mut dyn FnMut(LoadProgress) -> bool,
    ) -> Result<WgpuExecutor, LoadError> {
        Err(LoadError::Unsupported("not here yet".into()))
    }
}
impl Executor for WgpuExecutor {
    fn launch(&mut self, _: &StepBatch) -> Result<StepHandle, ExecError> {
        Err(ExecError::Rejected(String::new()))
    }
    fn wait(&mut self, _: StepHandle) -> Result<StepOutput, ExecError> {
        Err(ExecError::Rejected(String::new()))
    }
    fn num_blocks(&self) -> u32 {
        0
    }
    fn block_size(&self) -> u32 {
        0
    }
    fn vocab_size(&self) -> u32 {
        0
    }
    fn kv_bytes_per_block(&self) -> u64 {
        0
    }
}
