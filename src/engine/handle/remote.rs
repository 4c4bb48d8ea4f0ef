//! A handle whose engine is elsewhere, and the description that it asks for.

use super::{COMMAND_QUEUE, EngineHandle, EngineStatus, Shared};
use crate::engine::describe::Description;
use crate::engine::options::EngineOptions;
use crate::engine::remote::{self, RemoteOptions};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

/// Runs are submitted under ids from here on, which no server gives its requests.
const FIRST_ID: u64 = 1 << 40;

impl EngineHandle {
    /// The engine of a `kvasir serve`: runs go there, and what it tells of its steps and its state comes to this handle's
    /// telemetry. It is tried again while the server is not there. The server's model stays what it is: loading, unloading
    /// and pausing do nothing. Not attempted: beam searches, and rules for outputs.
    pub fn connect(options: EngineOptions, remote: RemoteOptions) -> EngineHandle {
        let shared = Arc::new(Shared::new(options.max_queue));
        shared.set_status(EngineStatus::Loading { phase: format!("Connecting to {}", remote.url), done: 0, total: 0 });
        let (commands, queue) = sync_channel(COMMAND_QUEUE);
        let thread = remote::spawn(shared.clone(), queue, remote);
        EngineHandle::of(shared, commands, thread, options, FIRST_ID)
    }

    /// The model as an app elsewhere needs it; `None` where there is none, or its files are gone. Reads files.
    pub fn describe(&self) -> Option<Description> {
        let model = self.model()?;
        match Description::of(&model) {
            Ok(description) => Some(description),
            Err(failure) => {
                tracing::warn!("the model cannot be described: {}", failure.message);
                None
            }
        }
    }
}
