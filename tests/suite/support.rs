//! The one place that reads the environment for tests: fixtures, `REQUIRE_GPU`, the shared adapter.

use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::EngineHandle;
use kvasir::engine::handle::{EngineStatus, FailureKind};
use kvasir::engine::options::{EngineOptions, LoadRequest, ModelSource};
use kvasir::gpu::{Gpu, GpuError, GpuRequest};
use std::path::{Path, PathBuf};

/// The fixtures that every clone has.
pub fn core_fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fixtures")
}

/// The full set: `KVASIR_FIXTURES`, else `../shared/fixtures`. Prints a line and returns `None` where it is absent;
/// with `REQUIRE_FIXTURES=1` (set in CI where the set exists) absence is a failure.
pub fn full_fixtures() -> Option<PathBuf> {
    let root = match std::env::var_os("KVASIR_FIXTURES") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
    };
    if root.join("manifest.json").is_file() {
        return Some(root);
    }
    assert!(
        std::env::var_os("REQUIRE_FIXTURES").is_none(),
        "REQUIRE_FIXTURES is set, but there is no {}",
        root.display()
    );
    println!("skipped: the full fixture set is not at {}", root.display());
    None
}

/// The full set where it exists, else the core set.
pub fn fixtures() -> PathBuf {
    full_fixtures().unwrap_or_else(core_fixtures)
}

/// True when recordings are to be made anew instead of compared.
pub fn renews_traces() -> bool {
    std::env::var("KVASIR_RENEW_TRACES").is_ok_and(|v| v == "1")
}

/// How long each fuzz test goes on: `FUZZ_SECONDS`, else one round over its seeds.
pub fn fuzz_seconds() -> Option<u64> {
    std::env::var("FUZZ_SECONDS").ok().and_then(|v| v.parse().ok())
}

/// Where the random numbers of fuzz tests begin: `SEED`, else 1.
pub fn fuzz_seed() -> u64 {
    std::env::var("SEED").ok().and_then(|v| v.parse().ok()).unwrap_or(1)
}

/// True when a missing adapter is a failure and not a skip.
pub fn require_gpu() -> bool {
    std::env::var("REQUIRE_GPU").is_ok_and(|v| v == "1")
}

/// Files in `dir` with this extension, sorted; panics with the path if the folder cannot be read.
pub fn files_with_extension(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("readable entry").path())
        .filter(|p| p.extension().is_some_and(|x| x == extension))
        .collect();
    found.sort();
    found
}

/// Folders in `dir`, sorted.
pub fn folders(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("readable entry").path())
        .filter(|p| p.is_dir())
        .collect();
    found.sort();
    found
}

/// Parses a JSON file, panicking with its path.
pub fn read_json(path: &Path) -> serde_json::Value {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The default model's file: `KVASIR_DEFAULT_MODEL`, else where the cache keeps it. Prints a line and returns `None`
/// where it is absent.
pub fn default_model() -> Option<PathBuf> {
    let given = std::env::var_os("KVASIR_DEFAULT_MODEL").map(PathBuf::from);
    let cache = || match std::env::var_os("XDG_CACHE_HOME") {
        Some(dir) => Some(PathBuf::from(dir)),
        None => Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")),
    };
    let cached = || Some(cache()?.join("kvasir/models").join(kvasir::model::hub::DEFAULT_MODEL.file));
    let found = given.or_else(cached).filter(|path| path.is_file());
    if found.is_none() {
        println!("skipped: the default model is not on this machine");
    }
    found
}

/// The best adapter; `None`, with a line printed, where there is none.
pub fn open_gpu() -> Option<Gpu> {
    match Gpu::open(&GpuRequest {
        backend: None,
        adapter: None,
        floor: false,
        checked_shaders: false,
        matrix_units: false,
    }) {
        Ok(gpu) => Some(gpu),
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// An engine with this model; `None`, with a line printed, where there is no adapter to run on.
pub fn started(request: LoadRequest) -> Option<EngineHandle> {
    let engine = EngineHandle::start(request.options.clone());
    engine.load(request);
    match engine.wait_for_model(|_| {}) {
        Ok(_) => Some(engine),
        Err(EngineStatus::Failed { kind: FailureKind::NoAdapter, message, .. }) if !require_gpu() => {
            println!("skipped: {message}");
            None
        }
        Err(status) => panic!("{status:?}"),
    }
}

/// The tiny llama with 256 blocks and 512 positions, or what `adjust` makes of that.
pub fn tiny_llama_engine(adjust: impl FnOnce(&mut EngineOptions)) -> Option<EngineHandle> {
    tiny_engine(core_fixtures().join("tiny/llama"), adjust)
}

/// The same with another model.
pub fn tiny_engine(path: PathBuf, adjust: impl FnOnce(&mut EngineOptions)) -> Option<EngineHandle> {
    let mut options = EngineArgs::default()
        .resolve(&EngineSection::default(), &std::env::temp_dir(), Some(0))
        .expect("default options");
    options.num_gpu_blocks_override = Some(256);
    options.max_model_len = Some(512);
    adjust(&mut options);
    started(LoadRequest { source: ModelSource::Path(path), options })
}
