//! The step that the engine is in: what a step that never ends was to do.
//!
//! Guarantees: the engine writes it once a step, into memory that is used again.

use super::SeqStep;
use crate::ids::RequestId;
use serde::Serialize;
use std::sync::Mutex;

/// A step that was planned and has not ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepInFlight {
    pub step: u64,
    /// Microseconds since the engine started.
    pub t0_us: u64,
    /// Token budget of the step.
    pub budget: u32,
    pub rows: Vec<SeqStep>,
    pub admitted: Vec<RequestId>,
    pub preempted: Vec<RequestId>,
    /// Blocks that are copied within the pool, to host memory and from there.
    pub num_copies: u32,
    pub num_swapped_out: u32,
    pub num_swapped_in: u32,
    pub num_running: u32,
    pub num_waiting: u32,
}

/// Holds the step in flight.
#[derive(Default)]
pub struct InFlight {
    step: Mutex<(bool, StepInFlight)>,
}

impl InFlight {
    /// A step begins: `write` fills in what it is to do, over what the one before it did. Engine thread only.
    pub fn enter(&self, write: impl FnOnce(&mut StepInFlight)) {
        let (is_in, step) = &mut *super::lock(&self.step);
        *is_in = true;
        write(step);
    }

    /// The step has ended, well or not. Engine thread only.
    pub fn leave(&self) {
        super::lock(&self.step).0 = false;
    }

    /// The step that the engine is in; `None` between steps.
    pub fn now(&self) -> Option<StepInFlight> {
        let step = super::lock(&self.step);
        step.0.then(|| step.1.clone())
    }
}
