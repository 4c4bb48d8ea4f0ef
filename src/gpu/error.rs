//! What can go wrong on a GPU.

use super::shader::ShaderError;

/// Clonable, so that a device's first fault can be returned by every later call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// The message says what to install or which names exist.
    #[error("{0}")]
    NoAdapter(String),
    /// There are adapters, none of the name that was asked for; the message lists them.
    #[error("{0}")]
    NoSuchAdapter(String),
    #[error("the adapter gave no device: {0}")]
    NoDevice(String),
    /// Cooperative matrices were asked for; the message names the adapter and says what is wrong with its.
    #[error("{0}")]
    NoMatrixUnits(String),
    #[error("not enough GPU memory for {what} ({bytes} bytes): {reason}")]
    OutOfMemory { what: String, bytes: u64, reason: String },
    /// A buffer that kernels read as a whole.
    #[error("{what} has {bytes} bytes, and this adapter binds at most {limit} at once")]
    BindingTooLarge { what: String, bytes: u64, limit: u64 },
    /// The device is gone: rebuild it and everything on it.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    #[error(transparent)]
    Shader(#[from] ShaderError),
    /// wgpu refused a call: a mistake in this program.
    #[error("{what}: {message}")]
    Validation { what: String, message: String },
}

impl GpuError {
    pub(crate) fn validation(what: impl Into<String>, message: impl Into<String>) -> GpuError {
        GpuError::Validation { what: what.into(), message: message.into() }
    }
}
