//! What came to a scheduler from outside, in order, and what it decided: enough to run another one to the same state.
//!
//! Guarantees: with the journal on, every call that changes the scheduler is noted, also one that is refused; the same
//! operations on a new scheduler of the same configuration give the same plans, block for block. Off, it costs nothing.

use super::{GangAdvance, NewFork, NewPin, NewSequence, PlanInputs, RowResult, Scheduler, StepPlan};
use crate::ids::{RequestId, TokenId};
use crate::kv::{BlockEvent, CachedContent, ContentId, KvConfig};
use crate::protocol::FinishReason;
use serde::{Deserialize, Serialize};

/// A call of one of the scheduler's methods, with what came back where it is a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Add(NewSequence),
    AddBeside(NewSequence),
    Fork {
        parent: RequestId,
        fork: Box<NewFork>,
    },
    AddGang {
        new: Box<NewSequence>,
        width: u32,
    },
    AddPin(NewPin),
    Unpin {
        prefix: u64,
    },
    EvictPrefix {
        prefix: u64,
    },
    ResetPrefixes,
    Finish {
        request: RequestId,
        reason: FinishReason,
    },
    Plan {
        inputs: PlanInputs,
        plan: StepPlan,
    },
    /// A step that copies these contents to host memory and computes nothing.
    Save {
        step: u64,
        contents: Vec<ContentId>,
    },
    /// Content came to host memory from outside.
    Adopt(CachedContent),
    /// Its bytes did not come.
    DropAdopted(ContentId),
    /// The step in flight found a request's blocks damaged from a position on.
    Taint {
        request: RequestId,
        position: u32,
    },
    /// A token came without being sampled. `finish` is what the scheduler made of it.
    Force {
        request: RequestId,
        token: TokenId,
        finish: Option<FinishReason>,
    },
    /// The step ran. `rows` is what the scheduler made of it.
    Commit {
        sampled: Vec<TokenId>,
        not_finite: Vec<bool>,
        /// What the searches made of it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        advances: Vec<GangAdvance>,
        rows: Vec<RowResult>,
    },
    /// The step did not run.
    Release,
    /// The step failed while it ran.
    Abandon,
    /// The block changes that were read.
    Blocks(Vec<BlockEvent>),
    /// The cache was lost and begins anew.
    Restart(KvConfig),
}

impl Scheduler {
    /// Notes operations from now on, to be read with [`Scheduler::take_ops`] after each step, or stops noting.
    pub fn set_journal(&mut self, is_on: bool) {
        self.journal = is_on.then(Vec::new);
    }

    /// The operations since the last call, in order; none when the journal is off.
    pub fn take_ops(&mut self) -> Vec<Op> {
        self.journal.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn note(&mut self, op: impl FnOnce(&Scheduler) -> Op) {
        if self.journal.is_none() {
            return;
        }
        let op = op(self);
        self.journal.get_or_insert_default().push(op);
    }
}
