//! The LoRA adapters of a loaded model: by name for requests, by id for the batch.
//!
//! Guarantees: a name means one adapter until it is unloaded; an adapter that a request or a pinned prefix uses is not
//! unloaded; after a lost device all of them are loaded again.

use super::core::EngineCore;
use super::handle::{EngineHandle, FailureKind};
use super::loader::LoadFailure;
use super::options::{EngineOptions, LoraOptions};
use super::thread::LoadCommand;
use crate::executor::{ExecError, Executor};
use crate::model::Model;
use crate::model::lora::Adapter;
use crate::protocol::{EngineCommand, InvalidParam, RunError};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, RwLock};

/// An adapter that requests can ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraInfo {
    pub name: String,
    pub path: PathBuf,
    /// What [`crate::protocol::GenerateRequest::adapter`] takes.
    pub id: u64,
    pub rank: u32,
}

/// The adapters of a model. Clones share one table.
#[derive(Clone, Default)]
pub struct LoraTable {
    entries: Arc<RwLock<Vec<(LoraInfo, Arc<Adapter>)>>>,
    /// Of the simulation: every id is as good as another.
    permits_all: bool,
}

impl LoraTable {
    /// For the simulation, whose executor takes any adapter.
    pub(super) fn of_simulation() -> LoraTable {
        LoraTable { permits_all: true, ..LoraTable::default() }
    }

    /// In the order of loading.
    pub fn list(&self) -> Vec<LoraInfo> {
        self.read(|entries| entries.iter().map(|(info, _)| info.clone()).collect())
    }

    pub fn find(&self, name: &str) -> Option<LoraInfo> {
        self.read(|entries| entries.iter().find(|(info, _)| info.name == name).map(|(info, _)| info.clone()))
    }

    /// Whether rows may have this adapter; 0 is none.
    pub(super) fn check(&self, id: u64) -> Result<(), RunError> {
        if id == 0 || self.permits_all || self.read(|entries| entries.iter().any(|(info, _)| info.id == id)) {
            return Ok(());
        }
        Err(InvalidParam {
            field: "model",
            message: format!("asks for the LoRA adapter {id:016x}, which is not loaded"),
        }
        .into())
    }

    fn read<T>(&self, look: impl FnOnce(&[(LoraInfo, Arc<Adapter>)]) -> T) -> T {
        look(&self.entries.read().unwrap_or_else(|e| e.into_inner()))
    }

    fn insert(&self, name: String, adapter: Arc<Adapter>) -> LoraInfo {
        let info = LoraInfo { name, path: adapter.path.clone(), id: adapter.id, rank: adapter.rank };
        self.entries.write().unwrap_or_else(|e| e.into_inner()).push((info.clone(), adapter));
        info
    }

    fn remove(&self, name: &str) {
        self.entries.write().unwrap_or_else(|e| e.into_inner()).retain(|(info, _)| info.name != name);
    }

    /// Loads all of them into a new executor.
    pub(super) fn load_all(&self, executor: &mut dyn Executor) -> Result<(), LoadFailure> {
        let adapters: Vec<_> = self.read(|entries| entries.to_vec());
        for (info, adapter) in adapters {
            let fault = |e| LoadFailure::engine(format!("the LoRA adapter {} could not be loaded: {e}", info.name));
            executor.load_adapter(&adapter).map_err(fault)?;
        }
        Ok(())
    }
}

/// Reads the adapters that the options name. The options that come back say how much room there has to be.
pub fn open_all(model: &Model, options: &LoraOptions) -> Result<(LoraTable, LoraOptions), LoadFailure> {
    let table = LoraTable::default();
    let mut largest = 0;
    for module in &options.modules {
        let adapter = Adapter::open(&module.path, model).map_err(|error| {
            LoadFailure::new(FailureKind::Model, format!("the LoRA adapter {} cannot be used: {error}", module.name))
        })?;
        largest = largest.max(adapter.rank);
        table.insert(module.name.clone(), Arc::new(adapter));
    }
    if let Some(max) = options.max_rank.filter(|max| *max < largest) {
        let fault = format!("an adapter has the rank {largest}, --max-lora-rank is {max}");
        return Err(LoadFailure::new(FailureKind::Model, fault).with_fix(format!("use --max-lora-rank {largest}")));
    }
    let max_rank = Some(options.max_rank.unwrap_or(largest));
    Ok((table, LoraOptions { max_rank, ..options.clone() }))
}

/// The options with the room that the adapters need which they name.
pub fn resolved(model: &Model, options: &EngineOptions) -> Result<EngineOptions, LoadFailure> {
    Ok(EngineOptions { lora: open_all(model, &options.lora)?.1, ..options.clone() })
}

/// Asks the engine thread for a change of the table.
pub(super) enum LoraCommand {
    Load { name: String, adapter: Arc<Adapter>, reply: SyncSender<Result<LoraInfo, LoraError>> },
    Unload { name: String, reply: SyncSender<Result<(), LoraError>> },
}

/// Why an adapter was not loaded or unloaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoraError {
    #[error("no model is loaded")]
    NoModel,
    /// The files cannot be used; the text names the fault, and the file last.
    #[error("{0}")]
    Unusable(String),
    #[error("the name `{0}` is taken")]
    NameTaken(String),
    #[error("no adapter is named `{0}`")]
    Unknown(String),
    /// There is no room for it.
    #[error("{0}")]
    NoRoom(String),
    #[error("the adapter `{0}` is in use")]
    InUse(String),
}

impl EngineHandle {
    /// Reads an adapter's folder and makes it ready for requests. Waits for the step under way.
    pub fn load_lora(&self, name: &str, path: &Path) -> Result<LoraInfo, LoraError> {
        let loaded = self.model().ok_or(LoraError::NoModel)?;
        if loaded.loras.find(name).is_some() {
            return Err(LoraError::NameTaken(name.into()));
        }
        let unusable = |e: &dyn std::fmt::Display| LoraError::Unusable(e.to_string());
        let Some(model_path) = &loaded.path else { return Err(unusable(&"the simulation has no weights to adapt")) };
        let model = Model::open(model_path).map_err(|e| unusable(&e))?;
        let adapter = Arc::new(Adapter::open(path, &model).map_err(|e| unusable(&e))?);
        let name = name.to_owned();
        self.change_loras(|reply| LoraCommand::Load { name, adapter, reply })
    }

    /// Frees an adapter that no request uses.
    pub fn unload_lora(&self, name: &str) -> Result<(), LoraError> {
        let name = name.to_owned();
        self.change_loras(|reply| LoraCommand::Unload { name, reply })
    }

    fn change_loras<T>(
        &self,
        command: impl FnOnce(SyncSender<Result<T, LoraError>>) -> LoraCommand,
    ) -> Result<T, LoraError> {
        let (reply, answer) = sync_channel(1);
        self.send(EngineCommand::Load(LoadCommand::Lora(command(reply))));
        answer.recv().unwrap_or(Err(LoraError::NoModel))
    }
}

/// Runs a command on the engine thread. Whoever asked may have gone.
pub(super) fn run(core: Option<&mut EngineCore>, command: LoraCommand) {
    match command {
        LoraCommand::Load { name, adapter, reply } => {
            let result = core.map_or(Err(LoraError::NoModel), |core| core.load_lora(name, adapter));
            let _ = reply.send(result);
        }
        LoraCommand::Unload { name, reply } => {
            let result = core.map_or(Err(LoraError::NoModel), |core| core.unload_lora(&name));
            let _ = reply.send(result);
        }
    }
}

impl EngineCore {
    fn load_lora(&mut self, name: String, adapter: Arc<Adapter>) -> Result<LoraInfo, LoraError> {
        if self.model.loras.find(&name).is_some() {
            return Err(LoraError::NameTaken(name));
        }
        let executor = self.executor.as_mut().ok_or(LoraError::NoModel)?;
        executor.load_adapter(&adapter).map_err(|error| match error {
            ExecError::Rejected(fault) => LoraError::NoRoom(fault),
            error => LoraError::NoRoom(error.to_string()),
        })?;
        Ok(self.model.loras.insert(name, adapter))
    }

    fn unload_lora(&mut self, name: &str) -> Result<(), LoraError> {
        let info = self.model.loras.find(name).ok_or_else(|| LoraError::Unknown(name.into()))?;
        let has_other_name = self.model.loras.list().iter().any(|other| other.id == info.id && other.name != name);
        if !has_other_name {
            let mut live = self.scheduler.running().chain(self.scheduler.waiting());
            let is_pinned = self.scheduler.kv().pin_specs().any(|pin| pin.key.adapter == info.id);
            if is_pinned || live.any(|sequence| sequence.cache_key().adapter == info.id) {
                return Err(LoraError::InUse(name.into()));
            }
            if let Some(executor) = self.executor.as_mut() {
                executor.unload_adapter(info.id);
            }
        }
        self.model.loras.remove(name);
        Ok(())
    }
}
