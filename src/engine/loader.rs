//! From a name to a running executor: find or download the model, check its files, plan the memory, open the adapter,
//! upload the weights.
//!
//! Guarantees: files are checked in full before an adapter is opened; every failure says what, why and how to mend it; a
//! load can be cancelled between any two reports of progress.

use super::disk::{DiskConfig, DiskTier, Format};
use super::handle::{AdapterSummary, EngineStatus, FailureKind, GenerationDefaults, LoadedModel};
use super::loras::{self, LoraTable};
use super::memory_plan;
use super::options::{BackendChoice, EngineOptions, LoadRequest, ModelSource};
use super::placing;
use super::text_side::{self, TextSide};
use crate::executor::{Executor, LoadError};
use crate::gpu::{Gpu, GpuBackend, GpuError, GpuRequest};
use crate::model::hub::{self, DefaultAccess, FetchError, FetchProgress, FetchStage};
use crate::model::{Model, ModelError};
use crate::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::xxh3_128;

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
    /// The disk tier of the prefix cache, not started.
    pub disk: Option<DiskTier>,
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
        let kind = match &error {
            ModelError::Write { .. } => FailureKind::Engine,
            _ => FailureKind::Model,
        };
        let fix = match &error {
            ModelError::NotFound { .. } => Some("`kvasir models` lists the models on this machine"),
            ModelError::Malformed { .. } => Some("download the model again"),
            ModelError::Unsupported { .. } => Some("`kvasir models` shows which models on this machine can be run"),
            ModelError::Write { .. } => Some("make room there, or name a folder that can be written"),
            ModelError::Io { .. } => None,
        };
        LoadFailure { kind, message: error.to_string(), fix: fix.map(String::from) }
    }
}

impl From<GpuError> for LoadFailure {
    fn from(error: GpuError) -> Self {
        let (kind, fix) = match &error {
            GpuError::NoAdapter(_) | GpuError::NoDevice(_) => (FailureKind::NoAdapter, Some(ADAPTER_FIX)),
            GpuError::NoSuchAdapter(_) => (FailureKind::NoAdapter, Some(NAME_FIX)),
            GpuError::NoMatrixUnits(_) => (FailureKind::NoAdapter, Some(MATRIX_FIX)),
            GpuError::OutOfMemory { .. } | GpuError::BindingTooLarge { .. } => {
                (FailureKind::DoesNotFit, Some(MEMORY_FIX))
            }
            GpuError::Lost(_) | GpuError::Shader(_) | GpuError::Validation { .. } => (FailureKind::Engine, None),
        };
        LoadFailure { kind, message: error.to_string(), fix: fix.map(String::from) }
    }
}

impl From<LoadError> for LoadFailure {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Model(error) => error.into(),
            LoadError::Gpu(error) => error.into(),
            LoadError::Cancelled => LoadFailure::engine("loading was cancelled"),
            other => LoadFailure::engine(other.to_string()),
        }
    }
}

/// What helps where adapters have other names than the one that was asked for.
const NAME_FIX: &str = "give --adapter a part of one of these names, or leave it out for the best";

/// What helps where cooperative matrices cannot be used.
const MATRIX_FIX: &str =
    "leave --matrix-units out, or choose an adapter that has them (`kvasir doctor --json` shows features)";

/// What helps when the driver refuses memory.
const MEMORY_FIX: &str = "tell the adapter's memory with --gpu-memory-gb, so that what fits is planned (`kvasir estimate` shows \
                          the figures), lower --max-model-len or --max-num-seqs, or choose a smaller or more strongly \
                          quantised model";

/// What helps when nothing may be fetched.
pub const OFFLINE_FIX: &str =
    "unset HF_HUB_OFFLINE, or name a model that is on this machine (`kvasir models` lists them)";

/// The adapter that the options ask for.
pub fn gpu_request(options: &EngineOptions) -> GpuRequest {
    GpuRequest {
        backend: match options.backend {
            BackendChoice::Auto => None,
            BackendChoice::Vulkan => Some(GpuBackend::Vulkan),
            BackendChoice::Metal => Some(GpuBackend::Metal),
            BackendChoice::Dx12 => Some(GpuBackend::Dx12),
        },
        adapter: options.adapter.clone(),
        floor: options.floor,
        checked_shaders: options.checked_shaders,
        matrix_units: options.matrix_units,
    }
}

/// Opens it, with the pipelines that an earlier run left in the cache.
pub fn open_gpu(options: &EngineOptions) -> Result<Gpu, GpuError> {
    let gpu = Gpu::open(&gpu_request(options))?;
    gpu.keep_pipelines(&options.cache_dir.join("pipelines"));
    Ok(gpu)
}

/// The model's place on this machine, downloading the default model on first use.
pub fn locate(
    source: &ModelSource,
    access: DefaultAccess<'_>,
    on_progress: OnProgress<'_>,
) -> Result<PathBuf, LoadFailure> {
    match source {
        ModelSource::Path(path) => Ok(path.clone()),
        ModelSource::Default => fetch_default(access, on_progress),
    }
}

fn fetch_default(access: DefaultAccess<'_>, on_progress: OnProgress<'_>) -> Result<PathBuf, LoadFailure> {
    let cancel = AtomicBool::new(false);
    let mut report = |progress: FetchProgress| {
        let phase = match progress.stage {
            FetchStage::Downloading => "Downloading the model",
            FetchStage::Unpacking => "Unpacking the model",
            FetchStage::Verifying => "Checking the download",
        };
        if !on_progress(Progress { phase, done: progress.done_bytes, total: progress.total_bytes }) {
            cancel.store(true, Ordering::Relaxed);
        }
    };
    hub::fetch_default(access, &mut report, &cancel).map_err(|error| {
        let fix = match error {
            FetchError::Offline { .. } => OFFLINE_FIX,
            _ => "try again, or open a model file that is already on this machine (`kvasir models` lists them)",
        };
        LoadFailure::new(FailureKind::Download, error.to_string()).with_fix(fix)
    })
}

/// The tokenizer of the model at `path`, whose weights may be missing.
pub fn read_tokenizer(path: &Path) -> Result<Tokenizer, LoadFailure> {
    text_side::tokenizer_at(path)
}

/// Tokenizer and template of the model at `path`, its files checked.
pub fn read_text_side(path: &Path) -> Result<TextSide, LoadFailure> {
    text_side::read(&Model::open(path)?)
}

/// Loads a model: everything but the steps themselves.
pub fn load(request: &LoadRequest, on_progress: OnProgress<'_>) -> Result<Loaded, LoadFailure> {
    let path = locate(&request.source, request.options.default_access(), on_progress)?;
    go_on(on_progress, "Reading the model")?;
    let model = Model::open(&path)?;
    model.warnings().iter().for_each(|w| tracing::warn!("{w}"));
    let text = text_side::read_with(&model, request.options.chat_template.as_deref())?;
    model.verify_finite()?;
    let (loras, lora) = loras::open_all(&model, &request.options.lora)?;
    let options = EngineOptions { lora, ..request.options.clone() };
    go_on(on_progress, "Opening the adapter")?;
    let gpu = open_gpu(&options)?;
    let adapter = AdapterSummary {
        name: gpu.caps().name.clone(),
        driver: gpu.caps().driver.clone(),
        backend: gpu.caps().backend.clone(),
        is_cpu: gpu.caps().is_cpu,
    };
    let identity = match &request.options.prefix_cache_dir {
        Some(_) => identity(&model, &request.options, &adapter)?,
        None => [0; 32],
    };
    let is_windowed = memory_plan::has_windows(model.spec());
    let (plan, recipe, mut executor) = placing::place(gpu, &model, &options, on_progress)?;
    loras.load_all(&mut *executor)?;
    let loaded = loaded_model(&model, text, adapter, &*executor, &options, plan.max_model_len);
    let loaded = LoadedModel { loras, ..loaded };
    let recipe = recipe.again();
    let rebuild: Rebuild = Box::new(move |on_progress| {
        let gpu = open_gpu(&options)?;
        Ok(recipe.build(gpu, &model, on_progress)?)
    });
    if is_windowed && request.options.prefix_cache_dir.is_some() {
        return Err(LoadFailure::engine("the prefixes of a model with sliding-window layers are not kept on disk")
            .with_fix("leave --prefix-cache-dir out"));
    }
    if is_windowed && request.options.swap_space_bytes > 0 {
        tracing::info!("no swap space is used: layers of this model have a sliding window");
    }
    let disk = open_disk(&request.options, &*executor, (identity, executor.kv_bytes_per_block()))?;
    Ok(Loaded { model: Arc::new(loaded), executor, options: request.options.clone(), rebuild, disk })
}

/// The disk tier that the options ask for; `identity` is that of weights and arithmetic, with the bytes of
/// a block in host memory.
pub(super) fn open_disk(
    options: &EngineOptions,
    executor: &dyn Executor,
    (identity, bytes_per_block): ([u8; 32], u64),
) -> Result<Option<DiskTier>, LoadFailure> {
    let Some(dir) = options.prefix_cache_dir.clone() else { return Ok(None) };
    if executor.num_host_blocks() == 0 || !options.prefix_caching {
        return Err(LoadFailure::engine("a prefix cache on disk needs prefix caching and host memory")
            .with_fix("give --swap-space a size, or leave --prefix-cache-dir out"));
    }
    let config = DiskConfig { dir, max_bytes: options.prefix_cache_bytes };
    let format = Format { identity, block_size: executor.block_size(), bytes_per_block };
    DiskTier::open(&config, format).map(Some).map_err(|fault| LoadFailure::engine(fault.to_string()))
}

/// What content of keys and values hangs on besides tokens: weights, shape, arithmetic, storage and version.
fn identity(model: &Model, options: &EngineOptions, adapter: &AdapterSummary) -> Result<[u8; 32], ModelError> {
    let mut hash = Sha256::new_with_prefix(env!("CARGO_PKG_VERSION"));
    hash.update(format!("{:?}", model.spec()));
    hash.update(arithmetic(options, adapter));
    for role in model.spec().roles() {
        if let Some(view) = model.weight(role)? {
            hash.update(format!("{role:?} {:?} {:?}", view.dtype, view.shape));
            hash.update(xxh3_128(&view.bytes).to_le_bytes());
        }
    }
    Ok(hash.finalize().into())
}

/// The options that the bytes of a block hang on, by what they come to: `auto` and what it stands for are one.
fn arithmetic(options: &EngineOptions, adapter: &AdapterSummary) -> String {
    let EngineOptions { kv_canary, precise, floor, checked_shaders, matrix_units, .. } = options;
    let format = options.kv_format();
    let plain =
        format!("{adapter:?} {format:?} canary {kv_canary} precise {precise} floor {floor} checked {checked_shaders}");
    // What was kept before there were matrix units stays good without them.
    if *matrix_units { format!("{plain} matrix units") } else { plain }
}

/// Reports a phase of unknown length.
fn go_on(on_progress: OnProgress<'_>, phase: &str) -> Result<(), LoadFailure> {
    if on_progress(Progress { phase, done: 0, total: 0 }) {
        Ok(())
    } else {
        Err(LoadFailure::engine("loading was cancelled"))
    }
}

/// What a model is called.
pub(super) fn name_of(model: &Model) -> String {
    // The default model's file names itself by its training run.
    let info = model.info();
    let is_default = info.path.file_name().is_some_and(|name| name == hub::DEFAULT_MODEL.file);
    if is_default { hub::DEFAULT_MODEL.name.to_string() } else { info.name.clone() }
}

pub(super) fn loaded_model(
    model: &Model,
    text: TextSide,
    adapter: AdapterSummary,
    executor: &dyn Executor,
    options: &EngineOptions,
    max_model_len: u32,
) -> LoadedModel {
    let (info, defaults) = (model.info(), model.generation_defaults());
    // A model that asks for greedy decoding says so by `do_sample: false`.
    let temperature = if defaults.do_sample == Some(false) { Some(0.0) } else { defaults.temperature };
    LoadedModel {
        name: name_of(model),
        path: Some(info.path.clone()),
        arch: info.arch.clone(),
        quant: info.quant.clone(),
        num_params: info.num_params,
        file_bytes: info.file_bytes,
        max_model_len,
        vocab_size: executor.vocab_size(),
        hidden_size: model.spec().hidden_size,
        pooling: text.pooling,
        eos_token_ids: text.eos_token_ids,
        tokenizer: text.tokenizer,
        template: text.template,
        template_fault: text.template_fault,
        adapter,
        block_size: executor.block_size(),
        num_blocks: executor.num_blocks(),
        kv_bytes_per_block: executor.kv_bytes_per_block(),
        has_windows: executor.windows() != [None],
        has_head: model.has_head(),
        max_num_seqs: options.max_num_seqs,
        max_num_batched_tokens: options.max_num_batched_tokens,
        loras: LoraTable::default(),
        defaults: GenerationDefaults {
            temperature,
            top_p: defaults.top_p,
            top_k: defaults.top_k,
            min_p: defaults.min_p,
            repetition_penalty: defaults.repetition_penalty,
        },
    }
}
