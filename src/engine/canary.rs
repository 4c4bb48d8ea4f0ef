//! What the engine does where the KV canary found damage, and how damage is done on purpose.

use super::core::EngineCore;
use super::handle::{Command, EngineHandle};
use crate::executor::Corruption;
use crate::ids::{BlockId, RequestId};
use crate::protocol::{EngineCommand, EngineEvent, RunError};
use crate::scheduler::StepPlan;

impl EngineHandle {
    /// Damages a block of the KV cache between two steps. With the canary on, whoever reads the block next ends with
    /// [`RunError::Corrupted`], and nobody else notices.
    pub fn corrupt_block(&self, block: BlockId) {
        let command: Command = EngineCommand::CorruptBlock { block };
        self.send(command);
    }
}

impl EngineCore {
    /// Takes damaged blocks, and what was computed from them, out of what can be shared; gives the requests to end.
    pub(super) fn taint(&mut self, plan: &StepPlan, corrupted: &[Corruption]) -> Vec<(RequestId, RunError)> {
        let mut failed = Vec::new();
        for found in corrupted {
            let request = plan.rows[found.row as usize].request;
            let (position, block) = (found.position, BlockId(found.block));
            let error = RunError::Corrupted { request, position, block };
            tracing::error!("{error}");
            self.scheduler.taint_from(request, position);
            // A beam's run is its search's.
            let leader = self.scheduler.get(request).and_then(|seq| seq.gang());
            failed.push((leader.unwrap_or(request), error));
        }
        failed
    }

    /// Damages a block, for the canary to find.
    pub(super) fn corrupt_block(&mut self, block: BlockId) {
        let Some(executor) = &mut self.executor else { return };
        match executor.corrupt_block(block.0) {
            Ok(()) => tracing::warn!("block {block} was damaged as asked"),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    pub(super) fn tell_failure(&mut self, id: RequestId, error: &RunError) {
        if let Some((run, _)) = self.run_of(id) {
            run.events.push(EngineEvent::Failed { error: error.clone() });
        }
    }
}
