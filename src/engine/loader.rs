//! From a name to a running executor: find or download the model, check its files, plan the memory, open the adapter,
//! upload the weights.
//!
//! Guarantees: files are checked in full before an adapter is opened; every failure says what, why and how to mend it; a
//! load can be cancelled between any two reports of progress.

use super::handle::{AdapterSummary, EngineStatus, FailureKind, GenerationDefaults, LoadedModel};
use super::options::{BackendChoice, EngineOptions, LoadRequest, ModelSource};
use super::text_side::{self, TextSide};
use crate::executor::Executor;
use crate::executor::wgpu_executor::{ExecutorConfig, LoadError, WgpuExecutor};
use crate::gpu::{Gpu, GpuBackend, GpuError, GpuRequest};
use crate::memory;
use crate::model::{Model, ModelError, hub};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to get an adapter where there is none.
pub const ADAPTER_FIX: &str = "install a Vulkan driver (Debian and Ubuntu: sudo apt install libvulkan1 \
                               mesa-vulkan-drivers); `kvasir doctor` shows what is found";

/// What a load is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    pub phase: &'a str,
    pub done: u64,
    /// 0 while it is not known.
    pub total: u64,
}

/// Reports progress; false cancels.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress<'_>) -> bool;

/// Builds the executor again after the device was lost.
pub type Rebuild = Box<dyn FnMut(OnProgress<'_>) -> Result<Box<dyn Executor>, LoadFailure> + Send>;

/// A model ready to run.
pub struct Loaded {
    pub model: Arc<LoadedModel>,
    pub executor: Box<dyn Executor>,
    pub options: EngineOptions,
    pub rebuild: Rebuild,
}

/// Why a model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadFailure {
    pub kind: FailureKind,
    pub message: String,
    pub fix: Option<String>,
}

impl LoadFailure {
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        LoadFailure { kind, message: message.into(), fix: None }
    }

    pub fn engine(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Engine, message)
    }

    /// A fault of the files at `path`.
    pub fn model(fault: impl std::fmt::Display, path: &Path) -> Self {
        Self::new(FailureKind::Model, format!("{fault} ({})", path.display()))
    }

    pub fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    pub fn into_status(self) -> EngineStatus {
        EngineStatus::Failed { kind: self.kind, message: self.message, fix: self.fix }
    }
}

impl From<ModelError> for LoadFailure {
    fn from(error: ModelError) -> Self {
        let fix = match &error {
            ModelError::NotFound { .. } => Some("`kvasir models` lists the models on this machine"),
            ModelError::Malformed { .. } => Some("download the model again"),
            ModelError::Unsupported { .. } => Some("`kvasir models` shows which models on this machine can be run"),
            ModelError::Io { .. } => None,
        };
        LoadFailure { kind: FailureKind::Model, message: error.to_string(), fix: fix.map(String::from) }
    }
}
