//! A handle whose engine is elsewhere, and the description that it asks for.

use super::{COMMAND_QUEUE, EngineHandle, EngineStatus, Inner, Shared};
use crate::engine::describe::Description;
use crate::engine::options::EngineOptions;
use crate::engine::remote::{self, RemoteOptions};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};

/// Runs are submitted under ids from here on, which no server gives its requests.
const FIRST_ID: u64 = 1 << 40;

impl EngineHandle {
    /// The engine of a `kvasir serve`: runs go there, and what it tells of its steps and its state comes to this handle's
    /// telemetry. It is tried again while the server is not there. The server's model stays what it is: loading, unloading
    /// and pausing do nothing. Not attempted: beam searches, and rules for outputs.
    pub fn connect(options: EngineOptions, remote: RemoteOptions) -> EngineHandle {
        let shared = Arc::new(Shared::new(options.max_queue));
        shared.set_status(EngineStatus::Loading {
            phase: format!("Connecting to {}", remote.host()),
            done: 0,
            total: 0,
        });
        let (commands, queue) = sync_channel(COMMAND_QUEUE);
        let remote_host = Some(remote.host().to_owned());
        let thread = Mutex::new(Some(remote::spawn(shared.clone(), queue, remote)));
        let next_id = AtomicU64::new(FIRST_ID);
        EngineHandle { inner: Arc::new(Inner { shared, commands, thread, options, next_id, remote_host }) }
    }

    /// Host and port of the server whose engine this is; `None` for an engine of this process.
    pub fn remote_host(&self) -> Option<&str> {
        self.inner.remote_host.as_deref()
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
