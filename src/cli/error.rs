//! How a command ends: an exit class and a message in three parts: what, why, how to mend it.

use crate::config::ConfigError;
use crate::engine::handle::{EngineStatus, FailureKind};
use crate::engine::loader::LoadFailure;
use crate::protocol::RunError;

/// The exit codes of the contract; `main.rs` turns them into numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Ok,
    Failure,
    /// Wrong flags or arguments; clap ends with the same code.
    Usage,
    /// The model was not found or is not supported.
    Model,
    /// Model, context and batch need more memory than there is.
    DoesNotFit,
    NoAdapter,
    /// The address to listen on is taken.
    PortBusy,
    /// Ended by Ctrl-C or SIGTERM.
    Interrupted,
}

impl Exit {
    /// The number that the shell sees.
    pub fn code(self) -> u8 {
        match self {
            Exit::Ok => 0,
            Exit::Failure => 1,
            Exit::Usage => 2,
            Exit::Model => 3,
            Exit::DoesNotFit => 4,
            Exit::NoAdapter => 5,
            Exit::PortBusy => 6,
            Exit::Interrupted => 130,
        }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub struct CliError {
    pub exit: Exit,
    pub message: String,
    /// What the user can do.
    pub fix: Option<String>,
}

impl CliError {
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        CliError { exit, message: message.into(), fix: None }
    }

    pub fn failure(message: impl Into<String>) -> Self {
        Self::new(Exit::Failure, message)
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    pub fn model(message: impl Into<String>) -> Self {
        Self::new(Exit::Model, message)
    }

    pub fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

pub type CliResult = Result<Exit, CliError>;

impl From<std::io::Error> for CliError {
    /// A reader that went away (`kvasir … | head`) is no fault: the command ends quietly.
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return CliError::new(Exit::Ok, "");
        }
        CliError::failure(error.to_string())
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        CliError::usage(error.to_string())
    }
}

impl From<RunError> for CliError {
    fn from(error: RunError) -> Self {
        let exit = match error {
            RunError::EmptyPrompt | RunError::InvalidParam(_) => Exit::Usage,
            _ => Exit::Failure,
        };
        let fix = match error {
            RunError::PromptTooLong { .. } | RunError::ContextExceeded { .. } => {
                Some("shorten the prompt, lower --max-tokens, or make room: --max-model-len, --num-gpu-blocks-override")
            }
            RunError::NeverFits { .. } => Some("lower --max-tokens or raise --num-gpu-blocks-override"),
            RunError::NotFinite { .. } => Some("try --precise; if that helps, please report the adapter and the model"),
            RunError::Corrupted { .. } => Some("try again; if it happens again, check the memory of the adapter"),
            _ => None,
        };
        CliError { exit, message: error.to_string(), fix: fix.map(String::from) }
    }
}

impl From<LoadFailure> for CliError {
    fn from(failure: LoadFailure) -> Self {
        failure.into_status().into()
    }
}

impl From<EngineStatus> for CliError {
    /// For a status in which no model is ready.
    fn from(status: EngineStatus) -> Self {
        match status {
            EngineStatus::Failed { kind, message, fix } => {
                let exit = match kind {
                    FailureKind::Model => Exit::Model,
                    FailureKind::DoesNotFit => Exit::DoesNotFit,
                    FailureKind::NoAdapter => Exit::NoAdapter,
                    FailureKind::Download | FailureKind::Engine => Exit::Failure,
                };
                CliError { exit, message, fix }
            }
            EngineStatus::NoModel | EngineStatus::Loading { .. } | EngineStatus::Ready(_) => {
                CliError::new(Exit::Interrupted, "loading was cancelled")
            }
        }
    }
}
