//! The client's side of one run.

use super::Command;
use crate::engine::mailbox::EventStream;
use crate::ids::RequestId;
use crate::protocol::{EngineCommand, EngineEvent};
use std::sync::mpsc::SyncSender;
use std::task::{Context, Poll};
use std::time::Duration;

/// A run under way. Dropping it aborts the request; its blocks are free within one step.
pub struct Run {
    id: RequestId,
    stream: EventStream,
    commands: SyncSender<Command>,
}

impl Run {
    pub(super) fn new(id: RequestId, stream: EventStream, commands: SyncSender<Command>) -> Self {
        Run { id, stream, commands }
    }

    /// The request of its first choice in telemetry. On a remote engine it is known once the run has started.
    pub fn id(&self) -> RequestId {
        self.stream.known_as().unwrap_or(self.id)
    }

    /// The next event, if one is there.
    pub fn try_recv(&self) -> Option<EngineEvent> {
        self.stream.try_recv()
    }

    /// Waits for the next event; `None` after the terminal event.
    pub fn recv(&self) -> Option<EngineEvent> {
        self.stream.recv()
    }

    /// Waits at most this long for the next event; `None` also after the terminal event.
    pub fn recv_timeout(&self, timeout: Duration) -> Option<EngineEvent> {
        self.stream.recv_timeout(timeout)
    }

    /// The next event for a task, which is woken once there is one; `None` after the terminal event.
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        self.stream.poll_recv(cx)
    }

    /// True when the terminal event was taken.
    pub fn is_finished(&self) -> bool {
        self.stream.is_finished()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stream.cancel();
        if !self.stream.is_finished() {
            // A paused engine is woken by the command; a busy one also sees the cancelled stream at its next step.
            let _ = self.commands.try_send(EngineCommand::Abort { id: self.id });
        }
    }
}
