//! A recording as a trace for Perfetto (ui.perfetto.dev) or Chrome's about:tracing: JSON in the trace event format.
//!
//! Guarantees: slices of one track never overlap; both ends of every arrow lie in a slice; times ascend with the steps.
//! Tracks: one per request (queued, prompt chunks, decode, preempted), one per slot of the batch, the engine's phases,
//! and counters. Arrows go from who gave way to whom it made room for, and from who computed a prefix to who shares it.

use super::Recording;
use crate::ids::{BlockId, RequestId};
use crate::scheduler::Op;
use crate::telemetry::{BlockDelta, RowKind, SeqStep, StepRecord};
use serde_json::{Value, json};
use std::collections::HashMap;

/// The processes of the trace: groups of tracks.
const REQUESTS: u32 = 1;
const SLOTS: u32 = 2;
const ENGINE: u32 = 3;
/// The engine's tracks.
const PHASES: [(u32, &str); 3] = [(1, "schedule"), (2, "compute"), (3, "output")];
/// Steps over which tokens per second are counted.
const RATE_STEPS: usize = 16;

/// The whole trace.
pub fn export(recording: &Recording) -> Value {
    let mut trace = Trace::default();
    trace.name_tracks(recording);
    for timed in &recording.ops {
        let id = match &timed.op {
            Op::Add(new) | Op::AddBeside(new) => new.id,
            Op::AddGang { new, .. } => new.id,
            Op::Fork { fork, .. } => fork.sequence.id,
            Op::AddPin(pin) => pin.id,
            _ => continue,
        };
        trace.waits.insert(id, Wait { since: timed.at_us, what: "queued" });
    }
    for (i, record) in recording.records.iter().enumerate() {
        trace.step(record);
        trace.counters(record, &recording.records[i.saturating_sub(RATE_STEPS)..=i]);
    }
    let end = recording.records.last().map_or(0, |record| record.t0_us + u64::from(record.total_us));
    let mut waits: Vec<(RequestId, Wait)> = trace.waits.drain().collect();
    waits.sort_by_key(|(request, _)| *request);
    waits.iter().for_each(|(request, wait)| trace.wait(*request, wait, end));
    json!({
        "traceEvents": trace.events,
        "displayTimeUnit": "ms",
        "otherData": { "model": recording.header.model.name, "adapter": recording.header.adapter.name },
    })
}

/// A request that is not in the batch, and since when.
struct Wait {
    since: u64,
    what: &'static str,
}

#[derive(Default)]
struct Trace {
    events: Vec<Value>,
    waits: HashMap<RequestId, Wait>,
    /// Who wrote a block last, and the middle of the step in which it did.
    writers: HashMap<BlockId, (RequestId, u64)>,
    num_arrows: u64,
}

impl Trace {
    fn name_tracks(&mut self, recording: &Recording) {
        let mut name = |pid: u32, tid: Option<u64>, text: String| {
            let what = if tid.is_some() { "thread_name" } else { "process_name" };
            self.events.push(
                json!({ "ph": "M", "name": what, "pid": pid, "tid": tid.unwrap_or(0), "ts": 0, "args": { "name": text } }),
            );
        };
        name(REQUESTS, None, "Requests".into());
        name(SLOTS, None, "Slots of the batch".into());
        name(ENGINE, None, "Engine".into());
        PHASES.iter().for_each(|(tid, text)| name(ENGINE, Some(u64::from(*tid)), (*text).into()));
        let slots = recording.header.scheduler.max_num_seqs;
        (0..slots).for_each(|slot| name(SLOTS, Some(u64::from(slot)), format!("slot {slot}")));
        for timed in &recording.ops {
            let id = match &timed.op {
                Op::Add(new) | Op::AddBeside(new) => new.id,
                Op::AddGang { new, .. } => new.id,
                Op::Fork { fork, .. } => fork.sequence.id,
                Op::AddPin(pin) => pin.id,
                _ => continue,
            };
            name(REQUESTS, Some(id.0), format!("request {id}"));
        }
    }

    fn step(&mut self, record: &StepRecord) {
        let (start, end) = (record.t0_us, record.t0_us + u64::from(record.total_us));
        self.phases(record);
        for preemption in &record.preempted {
            self.waits.insert(preemption.victim, Wait { since: start, what: "preempted" });
            if record.rows.iter().any(|row| row.request == preemption.beneficiary) {
                // The victim's track has a slice from here on: it is written when the victim comes back, or at its end.
                self.arrow("preemption", (preemption.victim, start), (preemption.beneficiary, start));
            }
        }
        for row in &record.rows {
            if let Some(wait) = self.waits.remove(&row.request) {
                self.wait(row.request, &wait, start);
            }
            self.row(row, start, u64::from(record.total_us));
        }
        self.shares(record, start.midpoint(end));
        for (request, _) in &record.finished {
            if let Some(wait) = self.waits.remove(request) {
                self.wait(*request, &wait, end);
            }
        }
    }

    fn wait(&mut self, request: RequestId, wait: &Wait, until: u64) {
        self.slice(REQUESTS, request.0, wait.what, wait.since, until.saturating_sub(wait.since), json!({}));
    }

    fn row(&mut self, row: &SeqStep, start: u64, duration: u64) {
        let what = match row.kind {
            RowKind::Prefill { .. } => "prefill",
            RowKind::Decode => "decode",
            RowKind::Recompute { .. } => "recompute",
        };
        let mut args = json!({ "from": row.from, "tokens": row.num_tokens, "sampled": row.sampled });
        if !row.forced.is_empty() {
            args["forced"] = json!(row.forced);
        }
        self.slice(REQUESTS, row.request.0, what, start, duration, args.clone());
        self.slice(SLOTS, u64::from(row.slot.0), &format!("request {} {what}", row.request), start, duration, args);
    }

    fn phases(&mut self, record: &StepRecord) {
        let (sched, output) = (u64::from(record.sched_us), u64::from(record.output_us));
        let compute = u64::from(record.total_us).saturating_sub(sched + output);
        let starts = [record.t0_us, record.t0_us + sched, record.t0_us + sched + compute];
        let args = json!({ "step": record.step, "tokens": record.num_tokens(), "gpu_us": record.gpu_us });
        for (((tid, what), start), duration) in PHASES.iter().zip(starts).zip([sched, compute, output]) {
            self.slice(ENGINE, u64::from(*tid), what, start, duration, args.clone());
        }
    }

    /// Arrows from those who wrote a block to those who share it from this step on.
    fn shares(&mut self, record: &StepRecord, middle: u64) {
        let computes = |request: RequestId| record.rows.iter().any(|row| row.request == request);
        let mut shown: Vec<(RequestId, RequestId)> = Vec::new();
        for delta in &record.deltas {
            match *delta {
                BlockDelta::Alloc { block, request, .. } if computes(request) => {
                    self.writers.insert(block, (request, middle));
                }
                BlockDelta::Share { block, request, .. } => {
                    let Some(&(writer, at)) = self.writers.get(&block) else { continue };
                    if computes(request) && !shown.contains(&(writer, request)) {
                        shown.push((writer, request));
                        self.arrow("shared prefix", (writer, at), (request, middle));
                    }
                }
                _ => {}
            }
        }
    }

    fn slice(&mut self, pid: u32, tid: u64, name: &str, start: u64, duration: u64, args: Value) {
        self.events.push(json!({
            "ph": "X", "name": name, "cat": "step", "pid": pid, "tid": tid, "ts": start, "dur": duration, "args": args,
        }));
    }

    /// Between the slices of two requests' tracks at these times.
    fn arrow(&mut self, what: &str, from: (RequestId, u64), to: (RequestId, u64)) {
        self.num_arrows += 1;
        let end = |ph: &str, (request, at): (RequestId, u64)| {
            json!({
                "ph": ph, "name": what, "cat": "flow", "id": self.num_arrows, "pid": REQUESTS, "tid": request.0,
                "ts": at, "bp": "e",
            })
        };
        let ends = [end("s", from), end("f", to)];
        self.events.extend(ends);
    }

    fn counters(&mut self, record: &StepRecord, latest: &[StepRecord]) {
        let span = record.t0_us + u64::from(record.total_us) - latest[0].t0_us;
        let tokens: usize = latest.iter().flat_map(|r| &r.rows).filter(|row| row.sampled.is_some()).count();
        let tokens_s = if span == 0 { 0.0 } else { tokens as f64 * 1e6 / span as f64 };
        for (name, value) in [
            ("KV blocks used", json!(record.kv.used)),
            ("batch size", json!(record.rows.len())),
            ("queue length", json!(record.num_waiting)),
            ("tokens/s", json!(tokens_s)),
        ] {
            self.events.push(json!({
                "ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": record.t0_us, "args": { "value": value },
            }));
        }
    }
}
