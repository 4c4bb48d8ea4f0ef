//! One step: decide, build, launch, wait, commit, tell, record. Over any executor; the plain synchronous loop.
//!
//! Guarantees: a step is a transaction, so a refused one leaves the state as before; a row whose logits are not numbers
//! ends that request alone; after [`EngineCore::rebuild`] every live request goes on from its tokens and no text is sent
//! twice. It does not catch panics: `thread.rs` does.

use super::beams::Searches;
use super::branches::RecentTokens;
use super::budget::{AdaptiveBudget, StepCost};
use super::handle::{LoadedModel, Shared};
use super::loader::{LoadFailure, Loaded, Rebuild};
use super::mailbox::EventSink;
use super::options::{CheckLevel, EngineOptions};
use super::output::TextOutput;
use super::preempt_meter::PreemptMeter;
use super::prefetch::Prefetch;
use super::run_state::{LiveRun, StepTime};
use super::{record, recorder};
use crate::batch::StepBatch;
use crate::executor::{ExecError, Executor, StepOutput, StepStats};
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig, KvGroups};
use crate::protocol::{Decoding, EngineEvent, FinishReason, OwnerTag, RunError};
use crate::recording::Recorder;
use crate::scheduler::{self, Committed, Ended, PlanInputs, RowKind, Scheduler, SchedulerConfig, StepPlan};
use crate::telemetry::kernels::KernelProfile;
use crate::telemetry::{BlockDelta, RequestInfo, StepRecord, WaitReason};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

mod failures;
mod masks;
mod snapshot;
mod tiers;

/// Snapshots of a busy engine are this far apart.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(33);
/// Ended requests that a snapshot still shows.
const MAX_FINISHED: usize = 64;
/// Failures of a step in a row before the requests of its plan are ended.
const MAX_FAILED_STEPS: u32 = 3;
/// A request preempted this often is protected from then on.
const MAX_PREEMPTIONS: u32 = 4;

/// Steps of waiting that make up for one level of priority, or for the longest cached prefix.
const AGING_STEPS: u32 = 256;

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    Done,
    /// It failed and left no trace; the next one tries again.
    Retry,
    /// The executor is unusable: [`EngineCore::rebuild`] comes next.
    Lost(String),
}

/// Scheduler, cache, executor and clients of one loaded model.
pub struct EngineCore {
    pub(super) shared: Arc<Shared>,
    pub(super) model: Arc<LoadedModel>,
    options: EngineOptions,
    /// `None` only while it is rebuilt.
    pub(super) executor: Option<Box<dyn Executor>>,
    rebuild: Rebuild,
    pub(super) scheduler: Scheduler,
    pub(super) batch: StepBatch,
    /// By the request of the first choice; the requests of the others follow it.
    pub(super) runs: BTreeMap<RequestId, LiveRun>,
    pub(super) recent: RecentTokens,
    pub(super) searches: Searches,
    budget: AdaptiveBudget,
    meter: PreemptMeter,
    /// The disk tier of the prefix cache, where there is one.
    prefetch: Option<Prefetch>,
    step: u64,
    num_failed_steps: u32,
    /// Token budget after a step ran out of memory.
    shrunk_budget: Option<u32>,
    /// Why requests waited in the last step.
    reasons: Vec<(RequestId, WaitReason)>,
    /// What stopped the last admission.
    binding: Option<WaitReason>,
    finished: VecDeque<RequestInfo>,
    /// Requests that ended since the last record.
    ended: Vec<(RequestId, FinishReason)>,
    /// Block changes that no step record has yet.
    deltas: Vec<BlockDelta>,
    /// The file that everything goes to, while one is asked for and the disk keeps up.
    recorder: Option<Recorder>,
    started: Instant,
    published: Option<Instant>,
}

impl EngineCore {
    pub(super) fn new(loaded: Loaded, shared: Arc<Shared>, started: Instant) -> Self {
        let Loaded { model, executor, options, rebuild, disk } = loaded;
        let max_tokens_per_step = options.max_num_batched_tokens.max(options.max_num_seqs);
        let config = SchedulerConfig {
            max_num_seqs: options.max_num_seqs,
            max_tokens_per_step,
            max_model_len: model.max_model_len,
            // Submit counts new requests only; preempted ones wait beside them.
            max_waiting: options.max_queue.saturating_add(options.max_num_seqs),
            long_prefill_cap: match options.long_prefill_token_threshold {
                0 => max_tokens_per_step,
                threshold => threshold.min(max_tokens_per_step),
            },
            watermark_blocks: scheduler::default_watermark(executor.num_blocks()),
            max_preemptions: MAX_PREEMPTIONS,
            queue_policy: record::queue_policy(options.scheduling_policy),
            aging_steps: AGING_STEPS,
            victim: record::victim_policy(options.victim_policy),
            preemption: options.preemption,
            check: match options.check {
                CheckLevel::WhenIdle => scheduler::CheckLevel::Cheap,
                CheckLevel::EveryStep => scheduler::CheckLevel::Full,
            },
        };
        let mut scheduler = Scheduler::new(config, new_cache(&*executor, &options));
        EngineCore {
            recorder: recorder::start(&model, &options, &mut scheduler),
            scheduler,
            prefetch: disk.map(Prefetch::new),
            meter: PreemptMeter::new(executor.kv_bytes_per_block()),
            // Numbers go on over loads: readers of the ring rely on ascending steps.
            step: shared.telemetry.snapshot().step,
            shared,
            model,
            options,
            executor: Some(executor),
            rebuild,
            batch: StepBatch::default(),
            runs: BTreeMap::new(),
            recent: RecentTokens::default(),
            searches: Searches::default(),
            budget: AdaptiveBudget::default(),
            num_failed_steps: 0,
            shrunk_budget: None,
            reasons: Vec::new(),
            binding: None,
            finished: VecDeque::new(),
            ended: Vec::new(),
            deltas: Vec::new(),
            started,
            published: None,
        }
    }

    /// A run whose first choice begins. `shows_logprobs`: the client asked for them.
    pub(super) fn new_run(
        &self,
        id: RequestId,
        owner: OwnerTag,
        events: EventSink,
        (decoding, shows_logprobs): (Decoding, bool),
        text: TextOutput,
    ) -> LiveRun {
        let submitted_us = micros64(events.created().saturating_duration_since(self.started));
        let mut run = LiveRun::new(id, owner, events, (decoding, shows_logprobs), submitted_us);
        run.begin_choice(text);
        run
    }

    /// Ends a run at its client's wish, all choices of it; the blocks are free when this returns.
    pub(super) fn abort(&mut self, id: RequestId) {
        let held = self.prefetch.as_mut().and_then(|prefetch| prefetch.release(id));
        self.add_held(held);
        let Some(run) = self.run_of(id).map(|(run, _)| run) else { return };
        run.drop_waiting();
        let sequences = run.sequences();
        // Each sequence must be asked: `any` would stop at the first that was live.
        let num_live = sequences.filter(|sequence| self.scheduler.abort(*sequence)).count();
        if num_live > 0 {
            self.settle_ended(&HashMap::new());
            self.record(None);
            self.shared.wake();
        }
    }

    /// Hands what happened to the recording, where there is one.
    pub(super) fn record(&mut self, record: Option<&StepRecord>) {
        let now_us = self.now_us();
        recorder::write(&mut self.recorder, &mut self.scheduler, now_us, record);
    }

    /// The run that a sequence belongs to, and which of its choices it is.
    pub(super) fn run_of(&mut self, sequence: RequestId) -> Option<(&mut LiveRun, usize)> {
        let (_, run) = self.runs.range_mut(..=sequence).next_back()?;
        let choice = run.choice_of(sequence)?;
        Some((run, choice))
    }

    pub(super) fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    /// Plans and runs one step.
    pub(super) fn step(&mut self) -> StepOutcome {
        self.abort_cancelled();
        if !self.scheduler.has_work() {
            return StepOutcome::Done;
        }
        let start = Instant::now();
        self.step += 1;
        let inputs = self.plan_inputs();
        let plan = self.scheduler.plan_step(inputs);
        if let (Some(prefetch), Some(executor)) = (&mut self.prefetch, &self.executor) {
            prefetch.keep_spilled(&mut self.scheduler, executor.as_ref());
        }
        StepBatch::build(&mut self.batch, &plan, &self.scheduler);
        if self.executor.as_ref().is_some_and(|executor| executor.has_canary()) {
            self.batch.add_chains(&plan, &self.scheduler);
        }
        let unfollowed = self.mask_rows(&plan);
        let pooled = self.pool_rows(&plan);
        let scored = self.score_rows(&plan);
        let sched_us = micros(start.elapsed());
        let t0_us = micros64(start.duration_since(self.started));
        self.enter_step(&plan, t0_us);
        let executed = self.execute(&plan);
        self.shared.telemetry.in_flight().leave();
        let output = match executed {
            Ok(output) => output,
            Err(outcome) => {
                self.record(None);
                return outcome;
            }
        };
        self.num_failed_steps = 0;
        let after_gpu = Instant::now();
        let mut faulty = self.taint(&plan, &output.corrupted);
        faulty.extend(unfollowed);
        let committed = self.commit(&plan, &output);
        self.tell_pins();
        let mut record = StepRecord {
            step: self.step,
            t0_us,
            sched_us,
            gpu_us: output.gpu_us,
            budget: plan.budget,
            max_prefill_tokens: inputs.max_prefill_tokens,
            recompute_token_ns: inputs.costs.recompute_token_ns,
            swap_block_ns: inputs.costs.swap_block_ns,
            rows: record::rows(&plan),
            admitted: plan.admitted.iter().map(|a| a.request).collect(),
            preempted: plan.preempted.iter().map(record::preemption).collect(),
            waiting: plan.waiting.iter().map(|&(id, reason)| (id, record::wait_reason(reason))).collect(),
            num_running: plan.num_running,
            num_waiting: plan.num_waiting,
            yielded_pins: plan.yielded.iter().map(|pin| (pin.request, pin.name.clone())).collect(),
            ..StepRecord::default()
        };
        self.binding = plan.binding.map(record::wait_reason);
        self.tell_plan(&plan, record.t0_us);
        // The first terminal event counts: text that follows it is not heard.
        faulty.iter().for_each(|(id, error)| self.tell_failure(*id, error));
        self.take_hidden(&pooled, &output.hidden);
        self.take_scores(&scored, output.scored);
        self.tell_tokens(&committed, output.logprobs, &mut record);
        self.meter.observe(plan.swap_out.len() + plan.swap_in.len(), output.swap_us);
        faulty.iter().for_each(|(id, error)| self.fail(*id, error));
        self.jump_forward(&mut record);
        record.finished = std::mem::take(&mut self.ended);
        self.count(output.stats, output.gpu_us);
        if !output.kernels.is_empty() {
            let (num_tokens, num_rows) = (record.num_tokens(), record.rows.len() as u32);
            let (step, gpu_us, kernels) = (self.step, output.gpu_us, output.kernels);
            self.shared.telemetry.publish_profile(KernelProfile { step, num_tokens, num_rows, gpu_us, kernels });
        }
        self.finish_record(record, start, after_gpu);
        StepOutcome::Done
    }

    fn plan_inputs(&self) -> PlanInputs {
        let config = self.scheduler.config();
        let all = config.max_tokens_per_step;
        let may_take = self.executor.as_ref().map_or(all, |executor| executor.most_tokens().max(config.max_num_seqs));
        let max_tokens = self.shrunk_budget.map_or(all, |shrunk| shrunk.min(all)).min(may_take);
        let num_decode = self.scheduler.num_decoding() as u32;
        let max_prefill_tokens =
            if self.options.adaptive_budget { self.budget.prefill_tokens(num_decode, max_tokens) } else { max_tokens };
        let costs = self.meter.costs(self.budget.prefill_token_us());
        PlanInputs { step: self.step, max_tokens, max_prefill_tokens, costs }
    }

    /// Launches and waits. A step without rows is not launched.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, StepOutcome> {
        if plan.is_empty() {
            return Ok(StepOutput::default());
        }
        let Some(executor) = self.executor.as_mut() else {
            self.scheduler.release(plan);
            return Err(StepOutcome::Lost("there is no executor".into()));
        };
        let telemetry = &self.shared.telemetry;
        executor.set_profiling(telemetry.is_profiling());
        executor.set_window_visible(telemetry.is_window_visible());
        let (error, was_launched) = match executor.launch(&self.batch) {
            Ok(handle) => match executor.wait(handle) {
                Ok(output) => return self.checked(plan, output),
                Err(error) => (error, true),
            },
            Err(error) => (error, false),
        };
        if was_launched {
            self.scheduler.abandon(plan)
        } else {
            self.scheduler.release(plan)
        }
        Err(self.failed(plan, error))
    }

    /// An output of the wrong shape would end in a panic of the scheduler: it is a refused step.
    fn checked(&mut self, plan: &StepPlan, output: StepOutput) -> Result<StepOutput, StepOutcome> {
        let wanted = plan.num_logits();
        let vocab = self.model.vocab_size;
        let in_range = output.tokens.iter().zip(&output.not_finite).all(|(&token, &bad)| bad || token < vocab);
        if output.tokens.len() == wanted && output.not_finite.len() == wanted && in_range {
            return Ok(output);
        }
        self.scheduler.abandon(plan);
        let fault =
            format!("{} tokens came back for {wanted} rows, or one outside the vocabulary", output.tokens.len());
        Err(self.failed(plan, ExecError::Rejected(fault)))
    }

    /// Classifies a failed step: try again, try less, end its requests, or give the executor up.
    fn failed(&mut self, plan: &StepPlan, error: ExecError) -> StepOutcome {
        tracing::warn!("step {} failed: {error}", plan.step);
        self.shared.add_totals(|t| t.failed_steps += 1);
        self.settle_ended(&HashMap::new());
        if let ExecError::DeviceLost(reason) = error {
            return StepOutcome::Lost(format!("the GPU was lost: {reason}"));
        }
        self.num_failed_steps += 1;
        if let ExecError::OutOfMemory(_) = error {
            let least = self.options.max_num_seqs;
            self.shrunk_budget = Some((plan.num_tokens() / 2).max(least));
        }
        if self.num_failed_steps >= MAX_FAILED_STEPS {
            self.num_failed_steps = 0;
            let error = RunError::Engine(error.to_string());
            plan.rows.iter().for_each(|row| self.fail(row.request, &error));
        }
        StepOutcome::Retry
    }

    /// Tells clients what the plan did with them, when the step started.
    fn tell_plan(&mut self, plan: &StepPlan, now_us: u64) {
        let at = StepTime { step: self.step, now_us };
        for preemption in &plan.preempted {
            let kept_tokens = self.scheduler.get(preemption.victim).map_or(0, |seq| seq.num_tokens());
            if let Some((run, _)) = self.run_of(preemption.victim) {
                run.events.push(EngineEvent::Preempted { kept_tokens });
            }
        }
        for admission in &plan.admitted {
            let Some((run, _)) = self.run_of(admission.request) else { continue };
            if run.is_new() {
                run.admitted(at, admission.num_tokens, admission.cached_tokens);
                self.leaves_queue();
            }
        }
        for row in plan.rows.iter().filter(|row| row.kind != RowKind::Decode) {
            let total =
                self.scheduler.get(row.request).map_or(row.to(), |seq| seq.num_computed() + seq.num_remaining());
            // Further choices start with a prompt that was read.
            let is_told = |choice: usize| choice == 0 || matches!(row.kind, RowKind::Recompute { .. });
            if let Some((run, choice)) = self.run_of(row.request)
                && is_told(choice)
            {
                run.events.push(EngineEvent::Reading { computed: row.to(), total: total.max(row.to()) });
            }
        }
    }

    /// Turns the step's tokens to text, ends runs at their stop strings, tells the ends.
    fn tell_tokens(
        &mut self,
        committed: &Committed,
        mut logprobs: Vec<Option<crate::protocol::TokenLogprobs>>,
        record: &mut StepRecord,
    ) {
        let at = self.step_time();
        let mut stops: HashMap<RequestId, String> = HashMap::new();
        for (row, shown) in committed.rows.iter().zip(&mut record.rows) {
            shown.sampled = row.token.or_else(|| self.beam_token(row));
            let Some(token) = row.token else { continue };
            let Some((run, choice)) = self.run_of(row.request) else { continue };
            let logprobs = row.logit_idx.and_then(|i| logprobs.get_mut(i as usize)).and_then(Option::take);
            let is_stop_token = matches!(row.finish, Some(FinishReason::StopToken(_)));
            let run_id = run.id;
            let stop = run.token(at, choice, token, logprobs, is_stop_token);
            // Before its first choice ends: the others share what it has.
            self.start_choices(run_id);
            if let Some(stop) = stop {
                self.scheduler.finish(row.request, FinishReason::StopString(stop.clone()));
                stops.insert(row.request, stop);
            }
        }
        self.settle_ended(&stops);
    }

    /// Tells the runs of the requests that the scheduler ended; a run whose choices have all ended gets its terminal event.
    /// A token that was the last and also completed a stop string counts as the stop string.
    fn settle_ended(&mut self, stops: &HashMap<RequestId, String>) {
        loop {
            let all = self.scheduler.take_ended();
            if all.is_empty() {
                return;
            }
            all.into_iter().for_each(|ended| self.settle(ended, stops));
        }
    }

    fn settle(&mut self, ended: Ended, stops: &HashMap<RequestId, String>) {
        let stop = stops.get(&ended.request).cloned().map(FinishReason::StopString);
        let Some((run, choice)) = self.run_of(ended.request) else { return };
        let reason = match &ended.outcome {
            Ok(_) if run.is_pin() => FinishReason::Pinned,
            Ok(reason) => stop.unwrap_or(reason.clone()),
            // Telemetry has no word for a failed run; it left the batch without finishing.
            Err(_) => FinishReason::Aborted,
        };
        let run_id = run.id;
        self.end_choice(run_id, choice, &reason, ended.usage);
        let Some((run, _)) = self.run_of(ended.request) else { return };
        let info = run.finished_info(&ended, reason.clone());
        if let Err(error) = &ended.outcome {
            // What the other choices have does not make up for the one that is missing.
            run.events.push(EngineEvent::Failed { error: error.clone() });
            run.drop_waiting();
            for sequence in run.sequences() {
                self.scheduler.abort(sequence);
            }
        }
        self.remember(info, ended, reason);
    }

    fn remember(&mut self, info: RequestInfo, ended: Ended, reason: FinishReason) {
        let request = ended.request;
        if self.finished.len() == MAX_FINISHED {
            self.finished.pop_front();
        }
        self.finished.push_back(info);
        self.ended.push((request, reason));
        self.recent.push(ended);
        let Some(run_id) = self.run_of(request).filter(|(run, _)| run.is_over()).map(|(run, _)| run.id) else { return };
        if let Some(mut run) = self.runs.remove(&run_id) {
            if run.is_new() {
                self.leaves_queue();
            }
            run.finish();
        }
    }

    /// A request that was counted as waiting at submit waits no more.
    pub(super) fn leaves_queue(&self) {
        self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
    }

    fn count(&self, stats: StepStats, gpu_us: u32) {
        self.shared.add_totals(|t| {
            t.steps += 1;
            t.submits += u64::from(stats.submits);
            t.passes += u64::from(stats.passes);
            t.dispatches += u64::from(stats.dispatches);
            t.readback_bytes += u64::from(stats.readback_bytes);
            t.gpu_us += u64::from(gpu_us);
            t.steps_ahead += u64::from(stats.ahead);
            t.steps_in_vain += u64::from(stats.in_vain);
        });
    }

    /// Closes the record with cache and time, learns from it, shows it.
    fn finish_record(&mut self, mut record: StepRecord, start: Instant, after_gpu: Instant) {
        record.kv = self.kv_totals();
        self.collect_deltas();
        record.deltas = std::mem::take(&mut self.deltas);
        self.reasons = record.waiting.clone();
        record.output_us = micros(after_gpu.elapsed());
        record.total_us = micros(start.elapsed());
        self.budget.observe(StepCost {
            num_decode: record.num_decode(),
            num_prefill_tokens: record.num_prefill_tokens(),
            total_us: u64::from(record.total_us),
        });
        self.record(Some(&record));
        let telemetry = self.shared.telemetry.clone();
        telemetry.push(record);
        if telemetry.is_recording() && self.published.is_none_or(|t| t.elapsed() >= SNAPSHOT_INTERVAL) {
            self.publish_snapshot();
        }
        self.shared.wake();
    }

    fn collect_deltas(&mut self) {
        let is_recording = self.shared.telemetry.is_recording();
        let events = self.scheduler.drain_block_events().map(record::delta);
        if is_recording {
            self.deltas.extend(events);
        } else {
            events.for_each(drop);
            self.deltas.clear();
        }
        self.tell_prefixes();
    }

    /// Work ran out: shows the final state and checks the books.
    pub(super) fn on_idle(&mut self) -> Result<(), String> {
        self.publish_snapshot();
        self.tell_prefixes();
        self.scheduler.check_integrity()
    }

    /// After a lost device or a fault inside a step: a new executor, an empty cache, and every live request back in the
    /// queue with its tokens.
    pub(super) fn rebuild(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LoadFailure> {
        // The old one goes first, so that the memory for the new one is free.
        self.executor = None;
        let mut executor = (self.rebuild)(&mut |_| go_on())?;
        self.model.loras.load_all(&mut *executor)?;
        let tables = self.scheduler.running().map(|seq| seq.table());
        self.deltas.extend(record::loss_of(self.scheduler.kv(), tables));
        self.scheduler.restart(new_cache(&*executor, &self.options));
        self.tell_room();
        self.executor = Some(executor);
        self.num_failed_steps = 0;
        self.fail_out_of_step();
        self.catch_up();
        self.settle_ended(&HashMap::new());
        self.record(None);
        self.shared.add_totals(|t| t.recoveries += 1);
        self.publish_snapshot();
        Ok(())
    }

    /// Sends tokens that a step committed before it fell over.
    fn catch_up(&mut self) {
        let at = self.step_time();
        let mut stopped = Vec::new();
        for run in self.runs.values_mut() {
            for (choice, id) in run.sequences().enumerate() {
                // A search tells its outputs at the end.
                let Some(seq) = self.scheduler.get(id).filter(|seq| seq.gang().is_none()) else { continue };
                let missing: Vec<TokenId> = seq.output().iter().skip(run.num_emitted(choice)).copied().collect();
                let stop = missing.into_iter().find_map(|token| run.token(at, choice, token, None, false));
                stopped.extend(stop.map(|stop| (id, stop)));
            }
        }
        let runs: Vec<RequestId> = self.runs.keys().copied().collect();
        runs.into_iter().for_each(|id| self.start_choices(id));
        for (id, stop) in stopped {
            self.scheduler.finish(id, FinishReason::StopString(stop));
        }
    }

    pub(super) fn step_time(&self) -> StepTime {
        StepTime { step: self.step, now_us: self.now_us() }
    }

    fn now_us(&self) -> u64 {
        micros64(self.started.elapsed())
    }
}

fn new_cache(executor: &dyn Executor, options: &EngineOptions) -> KvCache {
    KvCache::new(KvConfig {
        num_blocks: executor.num_blocks(),
        block_size: executor.block_size(),
        groups: KvGroups::new(&executor.windows()),
        enable_prefix_cache: options.prefix_caching,
    })
    .with_host_pool(executor.num_host_blocks(), options.prefix_cache_dir.is_some())
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

fn micros64(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
