//! What can be wrong with a model on disk. Every message names the fault first and the path last.

use std::path::{Path, PathBuf};

/// Why a model cannot be opened. Nothing was allocated beyond a small multiple of the file's own headers.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The path holds nothing that could be a model.
    #[error("{fault} ({})", .path.display())]
    NotFound { path: PathBuf, fault: String },
    /// The file breaks its own format or contradicts itself.
    #[error("{fault} ({})", .path.display())]
    Malformed { path: PathBuf, fault: String },
    /// The file is well formed, but asks for something that is not implemented; the message names it.
    #[error("{fault} ({})", .path.display())]
    Unsupported { path: PathBuf, fault: String },
    #[error("the file cannot be read: {source} ({})", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("the file cannot be written: {source} ({})", .path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

impl ModelError {
    pub(crate) fn not_found(path: &Path, fault: impl Into<String>) -> Self {
        ModelError::NotFound { path: path.to_owned(), fault: fault.into() }
    }

    pub(crate) fn malformed(path: &Path, fault: impl Into<String>) -> Self {
        ModelError::Malformed { path: path.to_owned(), fault: fault.into() }
    }

    pub(crate) fn unsupported(path: &Path, fault: impl Into<String>) -> Self {
        ModelError::Unsupported { path: path.to_owned(), fault: fault.into() }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        ModelError::Io { path: path.to_owned(), source }
    }

    pub(crate) fn write(path: &Path, source: std::io::Error) -> Self {
        ModelError::Write { path: path.to_owned(), source }
    }
}

/// A fault without its path: what the readers of fields return, so that one caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    Malformed(String),
    Unsupported(String),
}

impl Fault {
    /// Names the tensor that the fault lies in.
    pub fn in_tensor(self, name: &str) -> Fault {
        let with_name = |text| format!("tensor {name}: {text}");
        match self {
            Fault::Malformed(text) => Fault::Malformed(with_name(text)),
            Fault::Unsupported(text) => Fault::Unsupported(with_name(text)),
        }
    }

    /// Adds the file that the fault lies in.
    pub fn at(self, path: &Path) -> ModelError {
        match self {
            Fault::Malformed(fault) => ModelError::malformed(path, fault),
            Fault::Unsupported(fault) => ModelError::unsupported(path, fault),
        }
    }
}
