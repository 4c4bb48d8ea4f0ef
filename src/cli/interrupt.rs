//! Ctrl-C and SIGTERM as a counter that commands look at between events.

use super::error::{CliError, Exit};
use std::sync::atomic::{AtomicU32, Ordering};

static PRESSES: AtomicU32 = AtomicU32::new(0);

/// Starts to count instead of dying. From the third press on `force_exit` is called, where a command does not look.
pub fn install(force_exit: fn()) {
    let installed = ctrlc::set_handler(move || {
        if PRESSES.fetch_add(1, Ordering::SeqCst) >= 2 {
            force_exit();
        }
    });
    if let Err(error) = installed {
        tracing::warn!("Ctrl-C ends the process at once: {error}");
    }
}

/// How often it was pressed since the last [`reset`].
pub fn presses() -> u32 {
    PRESSES.load(Ordering::SeqCst)
}

pub fn reset() {
    PRESSES.store(0, Ordering::SeqCst);
}

/// An error with exit code 130 once Ctrl-C was pressed.
pub fn check() -> Result<(), CliError> {
    if presses() > 0 { Err(CliError::new(Exit::Interrupted, "interrupted")) } else { Ok(()) }
}
