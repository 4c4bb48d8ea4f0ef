//! One step: decide, build, launch, wait, commit, tell, record. Over any executor; the plain synchronous loop.
//!
//! Guarantees: a step is a transaction, so a refused one leaves the state as before; a row whose logits are not numbers
//! ends that request alone; after [`EngineCore::rebuild`] every live request goes on from its tokens and no text is sent
//! twice. It does not catch panics: `thread.rs` does.

use super::beams::Searches;
use super::budget::{AdaptiveBudget, StepCost};
use super::handle::{LoadedModel, Shared};
use super::loader::{LoadFailure, Loaded, Rebuild};
use super::mailbox::EventSink;
use super::options::{CheckLevel, EngineOptions};
use super::output::TextOutput;
use super::record;
use super::run_state::{LiveRun, StepTime};
use crate::batch::StepBatch;
use crate::executor::{ExecError, Executor, StepOutput, StepStats};
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig};
use crate::protocol::{EngineEvent, FinishReason, GenerateRequest, RunError, Usage};
use crate::scheduler::{self, Committed, NewSequence, PlanInputs, RowKind, Scheduler, SchedulerConfig, StepPlan};
use crate::telemetry::{BlockDelta, EngineSnapshot, RequestInfo, StepRecord, WaitReason};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Snapshots of a busy engine are this far apart.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(33);
/// Ended requests that a snapshot still shows.
const MAX_FINISHED: usize = 64;
/// Failures of a step in a row before the requests of its plan are ended.
const MAX_FAILED_STEPS: u32 = 3;
/// A request preempted this often is protected from then on.
const MAX_PREEMPTIONS: u32 = 4;

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
    shared: Arc<Shared>,
    model: Arc<LoadedModel>,
    options: EngineOptions,
    /// `None` only while it is rebuilt.
    executor: Option<Box<dyn Executor>>,
    rebuild: Rebuild,
    scheduler: Scheduler,
    batch: StepBatch,
    runs: HashMap<RequestId, LiveRun>,
    searches: Searches,
    budget: AdaptiveBudget,
    step: u64,
    num_failed_steps: u32,
    /// Token budget after a step ran out of memory.
    shrunk_budget: Option<u32>,
    /// Why requests waited in the last step.
    reasons: Vec<(RequestId, WaitReason)>,
    finished: VecDeque<RequestInfo>,
    /// Requests that ended since the last record.
    ended: Vec<(RequestId, FinishReason)>,
    /// Block changes that no step record has yet.
    deltas: Vec<BlockDelta>,
    started: Instant,
    published: Option<Instant>,
}

impl EngineCore {
    pub(super) fn new(loaded: Loaded, shared: Arc<Shared>, started: Instant) -> Self {
        let Loaded { model, executor, options, rebuild } = loaded;
        let max_tokens_per_step = options.max_num_batched_tokens.max(options.max_num_seqs);
        let config = SchedulerConfig {
            max_num_seqs: options.max_num_seqs,
            max_tokens_per_step,
            max_model_len: model.max_model_len,
            // Submit counts new requests only; preempted ones wait beside them.
            max_waiting: options.max_queue.saturating_add(options.max_num_seqs),
            long_prefill_cap: max_tokens_per_step,
            watermark_blocks: executor.num_blocks() / 100,
            max_preemptions: MAX_PREEMPTIONS,
            victim: record::victim_policy(options.victim_policy),
            check: match options.check {
                CheckLevel::WhenIdle => scheduler::CheckLevel::Cheap,
                CheckLevel::EveryStep => scheduler::CheckLevel::Full,
            },
        };
        EngineCore {
            scheduler: Scheduler::new(config, new_cache(&*executor, &options)),
            // Numbers go on over loads: readers of the ring rely on ascending steps.
            step: shared.telemetry.snapshot().step,
            shared,
            model,
            options,
            executor: Some(executor),
            rebuild,
            batch: StepBatch::default(),
            runs: HashMap::new(),
            searches: Searches::default(),
            budget: AdaptiveBudget::default(),
            num_failed_steps: 0,
            shrunk_budget: None,
            reasons: Vec::new(),
            finished: VecDeque::new(),
            ended: Vec::new(),
            deltas: Vec::new(),
            started,
            published: None,
        }
    }

    /// Queues a request; a refusal is its terminal event.
    pub(super) fn add(&mut self, id: RequestId, mut request: GenerateRequest, events: EventSink) {
        let search = self.searches.prepare(&mut request, &self.model);
        let text = TextOutput::new(self.model.tokenizer.clone(), &request.stop.stop_strings);
        let submitted_us = micros64(events.created().saturating_duration_since(self.started));
        let run = LiveRun::new(request.owner, events, text, submitted_us);
        let new = NewSequence {
            id,
            prompt: request.prompt,
            seed: request.sampling.seed.unwrap_or(id.0),
            sampling: request.sampling,
            stop: request.stop,
            eos_ids: self.model.eos_token_ids.clone(),
            priority: request.priority,
            cache_salt: request.cache_salt,
        };
        let added = match search {
            None => self.scheduler.add(new),
            Some(search) => self.searches.start(search, new, &mut self.scheduler),
        };
        match added {
            Ok(()) => drop(self.runs.insert(id, run)),
            Err(error) => {
                self.leaves_queue();
                run.events.push(EngineEvent::Failed { error });
                self.shared.wake();
            }
        }
    }

    /// Ends a request at its client's wish; the blocks are free when this returns.
    pub(super) fn abort(&mut self, id: RequestId) {
        if self.scheduler.abort(id) {
            self.settle_ended(&HashMap::new());
            self.shared.wake();
        }
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
        StepBatch::build(&mut self.batch, &plan, &self.scheduler);
        let sched_us = micros(start.elapsed());
        let output = match self.execute(&plan) {
            Ok(output) => output,
            Err(outcome) => return outcome,
        };
        self.num_failed_steps = 0;
        let after_gpu = Instant::now();
        let advances = self.searches.advance(&self.scheduler.gang_rows(&plan), &output);
        let committed = self.scheduler.commit_gangs(&plan, &output.tokens, &output.not_finite, &advances);
        let at = self.step_time();
        for advance in &advances {
            if let Some(run) = self.runs.get_mut(&advance.gang) {
                run.progress(at);
            }
        }
        let mut record = StepRecord {
            step: self.step,
            t0_us: micros64(start.duration_since(self.started)),
            sched_us,
            gpu_us: output.gpu_us,
            budget: plan.budget,
            max_prefill_tokens: inputs.max_prefill_tokens,
            rows: record::rows(&plan),
            admitted: plan.admitted.iter().map(|a| a.request).collect(),
            preempted: plan.preempted.iter().map(record::preemption).collect(),
            waiting: plan.waiting.iter().map(|&(id, reason)| (id, record::wait_reason(reason))).collect(),
            num_running: plan.num_running,
            num_waiting: plan.num_waiting,
            ..StepRecord::default()
        };
        self.tell_plan(&plan, record.t0_us);
        self.tell_tokens(&committed, output.logprobs, &mut record);
        self.count(output.stats, output.gpu_us);
        self.finish_record(record, start, after_gpu);
        StepOutcome::Done
    }

    fn plan_inputs(&self) -> PlanInputs {
        let all = self.scheduler.config().max_tokens_per_step;
        let max_tokens = self.shrunk_budget.map_or(all, |shrunk| shrunk.min(all));
        let num_decode = self.scheduler.num_decoding() as u32;
        let max_prefill_tokens =
            if self.options.adaptive_budget { self.budget.prefill_tokens(num_decode, max_tokens) } else { max_tokens };
        PlanInputs { step: self.step, max_tokens, max_prefill_tokens }
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

    /// Ends one request with an error.
    fn fail(&mut self, id: RequestId, error: &RunError) {
        if let Some(run) = self.runs.get(&id) {
            run.events.push(EngineEvent::Failed { error: error.clone() });
        }
        // The sink has its terminal event: what the scheduler's end adds is not heard.
        self.scheduler.abort(id);
        self.settle_ended(&HashMap::new());
    }

    /// Ends every request with an error.
    pub(super) fn fail_all(&mut self, error: &RunError) {
        let ids: Vec<RequestId> = self.runs.keys().copied().collect();
        ids.into_iter().for_each(|id| self.fail(id, error));
        self.shared.wake();
    }

    fn abort_cancelled(&mut self) {
        let cancelled = self.runs.iter().filter(|(_, run)| run.events.is_cancelled()).map(|(&id, _)| id);
        let ids: Vec<RequestId> = cancelled.collect();
        ids.into_iter().for_each(|id| self.abort(id));
    }

    /// Tells clients what the plan did with them, when the step started.
    fn tell_plan(&mut self, plan: &StepPlan, now_us: u64) {
        let at = StepTime { step: self.step, now_us };
        for preemption in &plan.preempted {
            let kept_tokens = self.scheduler.get(preemption.victim).map_or(0, |seq| seq.num_tokens());
            if let Some(run) = self.runs.get(&preemption.victim) {
                run.events.push(EngineEvent::Preempted { kept_tokens });
            }
        }
        for admission in &plan.admitted {
            let Some(run) = self.runs.get_mut(&admission.request) else { continue };
            if run.is_new() {
                self.shared.num_waiting.fetch_sub(1, Ordering::Relaxed);
                run.admitted(at, admission.num_tokens, admission.cached_tokens);
            }
        }
        for row in plan.rows.iter().filter(|row| row.kind != RowKind::Decode) {
            let total =
                self.scheduler.get(row.request).map_or(row.to(), |seq| seq.num_computed() + seq.num_remaining());
            if let Some(run) = self.runs.get(&row.request) {
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
            shown.sampled = row.token;
            let (Some(token), Some(run)) = (row.token, self.runs.get_mut(&row.request)) else { continue };
            let logprobs = row.logit_idx.and_then(|i| logprobs.get_mut(i as usize)).and_then(Option::take);
            let is_stop_token = matches!(row.finish, Some(FinishReason::StopToken(_)));
            if let Some(stop) = run.token(at, token, logprobs, is_stop_token) {
                self.scheduler.finish(row.request, FinishReason::StopString(stop.clone()));
                stops.insert(row.request, stop);
            }
        }
        self.settle_ended(&stops);
        record.finished = std::mem::take(&mut self.ended);
    }

    /// Gives every request that the scheduler ended its terminal event. A token that was the last and also completed a
    /// stop string counts as the stop string.
    fn settle_ended(&mut self, stops: &HashMap<RequestId, String>) {
        for ended in self.scheduler.take_ended() {
            let Some(mut run) = self.runs.remove(&ended.request) else { continue };
            if run.is_new() {
                self.leaves_queue();
            }
            let stop = stops.get(&ended.request).cloned().map(FinishReason::StopString);
            match ended.outcome {
                Ok(reason) => self.settle(run, ended.request, stop.unwrap_or(reason), ended.usage),
                Err(error) => {
                    self.searches.take(ended.request);
                    run.flush(&FinishReason::Aborted);
                    run.events.push(EngineEvent::Failed { error });
                    // Telemetry has no word for a failed run; it left the batch without finishing.
                    self.remember(&run, ended.request, FinishReason::Aborted, ended.usage);
                }
            }
        }
    }

    fn settle(&mut self, mut run: LiveRun, id: RequestId, reason: FinishReason, mut usage: Usage) {
        run.flush(&reason);
        if let Some(search) = self.searches.take(id).filter(|_| reason != FinishReason::Aborted) {
            usage.output_tokens = search.num_output_tokens();
            search.outputs().into_iter().for_each(|event| run.events.push(event));
        }
        let timings = run.timings();
        self.remember(&run, id, reason.clone(), usage);
        run.events.push(EngineEvent::Finished { reason, usage, timings });
    }

    fn remember(&mut self, run: &LiveRun, id: RequestId, reason: FinishReason, usage: Usage) {
        if self.finished.len() == MAX_FINISHED {
            self.finished.pop_front();
        }
        self.finished.push_back(run.finished_info(id, usage, reason.clone()));
        self.ended.push((id, reason));
    }

    /// A request that was counted as waiting at submit waits no more.
    fn leaves_queue(&self) {
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
        });
    }

    /// Closes the record with cache and time, learns from it, shows it.
    fn finish_record(&mut self, mut record: StepRecord, start: Instant, after_gpu: Instant) {
        record.kv = record::totals(self.scheduler.kv());
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
    }

    /// Replaces the snapshot by the state as it is now.
    pub(super) fn publish_snapshot(&mut self) {
        self.published = Some(Instant::now());
        let (config, totals) = (self.scheduler.config(), self.scheduler.totals());
        let snapshot = EngineSnapshot {
            step: self.step,
            t_us: self.now_us(),
            block_size: self.scheduler.kv().block_size(),
            kv_bytes_per_block: self.model.kv_bytes_per_block,
            kv: record::totals(self.scheduler.kv()),
            blocks: record::blocks(self.scheduler.kv()),
            eviction_order: self.scheduler.kv().eviction_order().collect(),
            watermark_blocks: config.watermark_blocks,
            requests: self.request_infos(),
            max_num_seqs: config.max_num_seqs,
            max_tokens_per_step: config.max_tokens_per_step,
            preemptions_total: totals.preemptions,
            recomputed_tokens_total: totals.recomputed_tokens,
            computed_tokens_total: totals.computed_tokens,
            ..EngineSnapshot::default()
        };
        self.shared.telemetry.publish(snapshot);
    }

    /// Running in batch order, waiting in queue order, the last ended.
    fn request_infos(&self) -> Vec<RequestInfo> {
        let mut infos = Vec::new();
        for seq in self.scheduler.running() {
            infos.extend(self.run_of(seq).map(|run| run.info(seq, None)));
        }
        for (i, seq) in self.scheduler.waiting().enumerate() {
            let told = self.reasons.iter().find(|(id, _)| *id == seq.id()).map(|(_, reason)| *reason);
            let reason = told.unwrap_or(WaitReason::Behind { position: i as u32 });
            infos.extend(self.run_of(seq).map(|run| run.info(seq, Some(reason))));
        }
        infos.extend(self.finished.iter().cloned());
        infos
    }

    /// The run that a sequence works for.
    fn run_of(&self, seq: &scheduler::Sequence) -> Option<&LiveRun> {
        self.runs.get(&seq.gang().unwrap_or(seq.id()))
    }

    /// Work ran out: shows the final state and checks the books.
    pub(super) fn on_idle(&mut self) -> Result<(), String> {
        self.publish_snapshot();
        self.scheduler.check_integrity()
    }

    /// After a lost device or a fault inside a step: a new executor, an empty cache, and every live request back in the
    /// queue with its tokens.
    pub(super) fn rebuild(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LoadFailure> {
        // The old one goes first, so that the memory for the new one is free.
        self.executor = None;
        let executor = (self.rebuild)(&mut |_| go_on())?;
        let tables = self.scheduler.running().map(|seq| seq.table());
        self.deltas.extend(record::loss_of(self.scheduler.kv(), tables));
        self.scheduler.restart(new_cache(&*executor, &self.options));
        self.executor = Some(executor);
        self.num_failed_steps = 0;
        for id in self.searches.out_of_step(&self.scheduler) {
            self.fail(id, &RunError::Engine("a step of the beam search fell over half-way".into()));
        }
        self.catch_up();
        self.settle_ended(&HashMap::new());
        self.shared.add_totals(|t| t.recoveries += 1);
        self.publish_snapshot();
        Ok(())
    }

    /// Sends tokens that a step committed before it fell over.
    fn catch_up(&mut self) {
        let at = self.step_time();
        let mut stopped = Vec::new();
        for (&id, run) in &mut self.runs {
            let Some(seq) = self.scheduler.get(id).filter(|seq| seq.gang().is_none()) else { continue };
            let missing: Vec<TokenId> = seq.output().iter().skip(run.num_emitted()).copied().collect();
            for token in missing {
                if let Some(stop) = run.token(at, token, None, false) {
                    stopped.push((id, stop));
                    break;
                }
            }
        }
        for (id, stop) in stopped {
            self.scheduler.finish(id, FinishReason::StopString(stop));
        }
    }

    fn step_time(&self) -> StepTime {
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
        enable_prefix_cache: options.prefix_caching,
    })
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

fn micros64(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
