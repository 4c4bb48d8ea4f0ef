//! Runs a recording again on the real scheduler and cache: the same operations must lead to the same plans, rows and
//! block changes, and with an executor to the same tokens.

use super::difference::{Difference, first};
use super::{Header, Recording};
use crate::batch::StepBatch;
use crate::executor::Executor;
use crate::kv::KvCache;
use crate::scheduler::{NewFork, NewSequence, Op, Scheduler, StepPlan};
use serde::Serialize;
use std::panic::AssertUnwindSafe;

/// What a replay came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ReplayReport {
    /// Steps that were planned, those that failed included.
    pub steps: u64,
    /// Sampled tokens that were compared with an executor's; 0 without one.
    pub compared_tokens: u64,
    pub identical: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<Difference>,
}

/// Why a recording could not be run again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("step {step} of the recording asks for what cannot be: {fault}")]
    Impossible { step: u64, fault: String },
    #[error("no request of the recording can be run with other settings: {why}")]
    NothingToRun { why: String },
    #[error("step {step} did not run: {fault}")]
    Failed { step: u64, fault: String },
    #[error(
        "the run found blocks in a prefix cache on disk, which a recording does not hold: it can be replayed without a \
         model only"
    )]
    NeedsDisk,
    #[error(
        "the run used the LoRA adapter {id:016x}, which was loaded after its start: it can be replayed without a model only"
    )]
    NeedsAdapter { id: u64 },
}

/// Without an executor the recorded tokens are fed back.
pub fn replay(recording: &Recording, executor: Option<&mut dyn Executor>) -> Result<ReplayReport, ReplayError> {
    let mut steps = 0;
    if executor.is_some() && recording.ops.iter().any(|timed| matches!(timed.op, Op::Adopt(_))) {
        return Err(ReplayError::NeedsDisk);
    }
    let is_known = |id: u64| id == 0 || recording.header.loras.iter().any(|lora| lora.id == id);
    if let Some(id) = recording.ops.iter().filter_map(|timed| adapter_of(&timed.op)).find(|id| !is_known(*id))
        && executor.is_some()
    {
        return Err(ReplayError::NeedsAdapter { id });
    }
    // A recording that was tampered with meets the scheduler's assertions.
    std::panic::catch_unwind(AssertUnwindSafe(|| run(recording, executor, &mut steps))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(ReplayError::Impossible { step: steps, fault: text.unwrap_or_else(|| "no message".into()) })
    })
}

/// The LoRA adapter of what an operation brings.
fn adapter_of(op: &Op) -> Option<u64> {
    match op {
        Op::Add(new) | Op::AddBeside(new) => Some(new.adapter),
        Op::AddGang { new, .. } => Some(new.adapter),
        Op::AddPin(pin) => Some(pin.adapter),
        _ => None,
    }
}

/// A scheduler as the recorded one was at the start, with its journal on.
pub fn new_scheduler(header: &Header) -> Scheduler {
    let mut scheduler =
        Scheduler::new(header.scheduler, KvCache::new(header.kv).with_host_pool(header.num_host_blocks, false));
    scheduler.set_journal(true);
    scheduler
}

fn run(
    recording: &Recording,
    mut executor: Option<&mut dyn Executor>,
    steps: &mut u64,
) -> Result<ReplayReport, ReplayError> {
    let mut scheduler = new_scheduler(&recording.header);
    let mut batch = StepBatch::default();
    let mut planned: Option<StepPlan> = None;
    let mut report = ReplayReport::default();
    for timed in &recording.ops {
        if let Op::Plan { inputs, .. } = &timed.op {
            *steps = inputs.step;
            report.steps += 1;
        }
        let mut tokens = None;
        if let (Op::Commit { sampled, .. }, Some(executor), Some(plan)) = (&timed.op, &mut executor, &planned)
            && !plan.is_empty()
        {
            batch.build(plan, &scheduler);
            let ran = executor.launch(&batch).and_then(|handle| executor.wait(handle));
            let output = ran.map_err(|error| ReplayError::Failed { step: *steps, fault: error.to_string() })?;
            report.compared_tokens += sampled.len() as u64;
            report.first_difference = first(*steps, "sampled", sampled, &output.tokens);
            tokens = Some(output);
        }
        if report.first_difference.is_none() {
            if let (Some(output), Op::Commit { not_finite, .. }) = (&tokens, &timed.op) {
                report.first_difference = first(*steps, "not_finite", not_finite, &output.not_finite);
            }
            apply(&mut scheduler, &timed.op, &mut planned);
            let again = scheduler.take_ops();
            let is_cut = again.len() != 1;
            let difference = again.first().and_then(|again| compare(*steps, &timed.op, again));
            let missing = || first(*steps, "operations", &1, &again.len());
            report.first_difference = report.first_difference.or(difference).or_else(|| is_cut.then(missing).flatten());
        }
        if report.first_difference.is_some() {
            return Ok(report);
        }
        scheduler.take_ended();
    }
    report.identical = true;
    Ok(report)
}

/// Does to the scheduler what was done to the recorded one.
fn apply(scheduler: &mut Scheduler, op: &Op, planned: &mut Option<StepPlan>) {
    let mut take = || planned.take().expect("a step ends after it was planned");
    match op {
        // What was refused then is refused now, and changes nothing.
        Op::Add(new) => drop(scheduler.add(new.clone())),
        Op::AddBeside(new) => drop(scheduler.add_beside(new.clone())),
        Op::Fork { parent, fork } => drop(scheduler.fork(*parent, NewFork::clone(fork))),
        Op::AddGang { new, width } => drop(scheduler.add_gang(NewSequence::clone(new), *width)),
        Op::AddPin(pin) => drop(scheduler.add_pin(pin.clone())),
        Op::Unpin { prefix } => drop(scheduler.unpin(*prefix)),
        Op::EvictPrefix { prefix } => drop(scheduler.evict_prefix(*prefix)),
        Op::ResetPrefixes => drop(scheduler.reset_prefixes()),
        Op::Finish { request, reason } => drop(scheduler.finish(*request, reason.clone())),
        Op::Plan { inputs, .. } => *planned = Some(scheduler.plan_step(*inputs)),
        Op::Save { step, contents } => {
            *planned = Some(scheduler.plan_save(*step, u32::MAX, &|id| !contents.contains(id)));
        }
        Op::Adopt(content) => drop(scheduler.adopt(content)),
        Op::DropAdopted(id) => scheduler.drop_adopted(id),
        Op::Commit { sampled, not_finite, advances, .. } => {
            drop(scheduler.commit_gangs(&take(), sampled, not_finite, advances));
        }
        Op::Force { request, token, .. } => drop(scheduler.force(*request, *token)),
        Op::Taint { request, position } => scheduler.taint_from(*request, *position),
        Op::Release => scheduler.release(&take()),
        Op::Abandon => scheduler.abandon(&take()),
        Op::Blocks(_) => drop(scheduler.drain_block_events()),
        Op::Restart(kv) => {
            *planned = None;
            let num_host_blocks = scheduler.kv().counts().host.total;
            scheduler.restart(KvCache::new(*kv).with_host_pool(num_host_blocks, false));
        }
    }
}

fn compare(step: u64, recorded: &Op, replayed: &Op) -> Option<Difference> {
    match (recorded, replayed) {
        (Op::Plan { plan: a, .. }, Op::Plan { plan: b, .. }) => first(step, "plan", a, b),
        (Op::Commit { rows: a, .. }, Op::Commit { rows: b, .. }) => first(step, "rows", a, b),
        (Op::Force { finish: a, .. }, Op::Force { finish: b, .. }) => first(step, "forced", a, b),
        (Op::Blocks(a), Op::Blocks(b)) => first(step, "blocks", a, b),
        (a, b) => first(step, "operation", a, b),
    }
}
