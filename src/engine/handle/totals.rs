//! What steps add up to over the life of an engine.

/// What the steps did since the engine started: counters that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    pub steps: u64,
    pub submits: u64,
    pub passes: u64,
    pub dispatches: u64,
    pub readback_bytes: u64,
    pub gpu_us: u64,
    /// Steps that had been submitted before they were asked for.
    pub steps_ahead: u64,
    /// Steps that had been, and were not asked for: they are no part of the other counts.
    pub steps_in_vain: u64,
    /// Output tokens that a grammar forced: no step sampled them.
    pub forced_tokens: u64,
    /// Steps that failed and were tried again.
    pub failed_steps: u64,
    /// Times that the executor and the cache were rebuilt.
    pub recoveries: u64,
}

impl StepTotals {
    /// What was added after `before`.
    pub fn since(&self, before: &StepTotals) -> StepTotals {
        StepTotals {
            steps: self.steps - before.steps,
            submits: self.submits - before.submits,
            passes: self.passes - before.passes,
            dispatches: self.dispatches - before.dispatches,
            readback_bytes: self.readback_bytes - before.readback_bytes,
            gpu_us: self.gpu_us - before.gpu_us,
            steps_ahead: self.steps_ahead - before.steps_ahead,
            steps_in_vain: self.steps_in_vain - before.steps_in_vain,
            forced_tokens: self.forced_tokens - before.forced_tokens,
            failed_steps: self.failed_steps - before.failed_steps,
            recoveries: self.recoveries - before.recoveries,
        }
    }
}
