//! The recorded arrivals on the real scheduler and cache with other settings, without a GPU.
//!
//! Guarantees: each request has the recorded prompt and gets the recorded output, token for token, whatever the
//! settings; the same settings twice give the same figures. Requests arrive at their recorded times on a clock that each
//! step moves by its modelled cost, since with other settings another number of steps has passed by then. The model is
//! fitted to the recording's own steps: a constant, a cost per row that decodes and a cost per prompt token.
//! It does not attempt to replay searches with beams, pins, blocks that came from disk, nor requests that ended without a
//! token: those are left out and counted ([`LeftOut`]). Choices of one request count as requests of their own.

use super::replay::ReplayError;
use super::{Recording, check_settings};
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig};
use crate::protocol::StopRules;
use crate::scheduler::{NewSequence, Op, PlanInputs, Scheduler, SchedulerConfig, StepPlan};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// A prompt chunk beside decoding rows may make a step as long as the larger of this and two decode-only steps.
const LIMIT_US: f64 = 50_000.0;
/// The shortest such chunk.
const MIN_CHUNK: u32 = 16;
/// No replay needs as many steps per token and arrival.
const MAX_STEPS_PER_TOKEN: u64 = 16;

/// The settings of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub kv: KvConfig,
    pub scheduler: SchedulerConfig,
}

/// Microseconds of a step, fitted by least squares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostModel {
    pub step_us: f64,
    pub decode_row_us: f64,
    pub prefill_token_us: f64,
}

/// How a run went. Times are modelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    pub requests: u64,
    /// Requests that can never fit with these settings.
    pub refused: u64,
    pub steps: u64,
    pub mean_batch: f64,
    /// Mean share of the pool's blocks that requests hold, and the largest.
    pub kv_use: f64,
    pub kv_use_max: f64,
    pub preemptions: u64,
    pub recompute_tax: f64,
    pub hit_tokens: u64,
    /// Steps between arrival and the first admission, mean.
    pub queue_steps: f64,
    pub ttft_ms: f64,
    pub itl_ms: f64,
    pub itl_p99_ms: f64,
    pub total_ms: f64,
}

/// What of a recording is not run with other settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Whose beams hang on every step's logits.
    pub beam_searches: u64,
    pub pins: u64,
    pub blocks_from_disk: u64,
    /// Requests that ended before their first token.
    pub without_output: u64,
}

impl LeftOut {
    /// "2 searches with beams, 1 pin"; nothing where all is run.
    pub fn words(&self) -> Option<String> {
        let parts = [
            (self.beam_searches, "search with beams", "searches with beams"),
            (self.pins, "pin", "pins"),
            (self.blocks_from_disk, "block from disk", "blocks from disk"),
            (self.without_output, "request without output", "requests without output"),
        ];
        let words = parts.into_iter().filter(|(n, ..)| *n > 0);
        let words: Vec<String> =
            words.map(|(n, one, many)| format!("{n} {}", if n == 1 { one } else { many })).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// What [`what_if`] leaves out of a recording.
pub fn left_out(recording: &Recording) -> LeftOut {
    let count = |is_one: fn(&Op) -> bool| recording.ops.iter().filter(|timed| is_one(&timed.op)).count() as u64;
    let requests = count(|op| matches!(op, Op::Add(_) | Op::AddBeside(_) | Op::Fork { .. }));
    LeftOut {
        beam_searches: count(|op| matches!(op, Op::AddGang { .. })),
        pins: count(|op| matches!(op, Op::AddPin(_))),
        blocks_from_disk: count(|op| matches!(op, Op::Adopt(_))),
        without_output: requests - arrivals(recording).len() as u64,
    }
}

struct Arrival {
    at_us: f64,
    new: NewSequence,
    output: Vec<TokenId>,
    /// Which of them were not sampled.
    forced: HashSet<usize>,
}

/// Runs the recorded arrivals with these settings.
pub fn what_if(recording: &Recording, settings: Settings) -> Result<Figures, ReplayError> {
    let fault = |fault: &str| ReplayError::Impossible { step: 0, fault: fault.into() };
    check_settings(&settings.kv, &settings.scheduler).map_err(|text| fault(&text))?;
    if arrivals(recording).is_empty() {
        let why = left_out(recording).words().map_or("it has none".into(), |words| format!("it has {words} only"));
        return Err(ReplayError::NothingToRun { why });
    }
    let run = || Run::new(recording, settings).map(|run| run.finish()).ok_or_else(|| fault("it has no steps"));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err(fault("these settings and these arrivals do not go together")))?
        .ok_or_else(|| fault("work is left after more steps than it can need"))
}

/// Fits the cost of the recorded steps that computed something.
pub fn fit(recording: &Recording) -> CostModel {
    let steps = recording.records.iter().filter(|r| !r.rows.is_empty());
    let samples: Vec<([f64; 3], f64)> = steps
        .map(|r| ([1.0, f64::from(r.num_decode()), f64::from(r.num_prefill_tokens())], f64::from(r.total_us)))
        .collect();
    let [step_us, decode_row_us, prefill_token_us] = least_squares(&samples);
    CostModel { step_us, decode_row_us, prefill_token_us }
}

impl CostModel {
    fn step(&self, num_decode: u32, num_prefill: u32) -> f64 {
        let cost =
            self.step_us + self.decode_row_us * f64::from(num_decode) + self.prefill_token_us * f64::from(num_prefill);
        cost.max(1.0)
    }

    /// Prompt tokens beside `num_decode` decoding rows, by the engine's rule.
    fn chunk(&self, num_decode: u32, max_tokens: u32) -> u32 {
        if num_decode == 0 {
            return max_tokens;
        }
        let decode_us = self.step(num_decode, 0);
        let room = f64::max(LIMIT_US, 2.0 * decode_us) - decode_us;
        let chunk = (room / self.prefill_token_us.max(0.01)).min(f64::from(max_tokens)) as u32;
        chunk.max(MIN_CHUNK).min(max_tokens.saturating_sub(num_decode))
    }
}

/// Three coefficients, none below 0: one that would be is left out and the others fitted again.
fn least_squares(samples: &[([f64; 3], f64)]) -> [f64; 3] {
    let mut used = [true; 3];
    loop {
        let solved = solve(samples, used);
        match (0..3).filter(|i| used[*i]).min_by(|a, b| solved[*a].total_cmp(&solved[*b])) {
            Some(least) if solved[least] < 0.0 => used[least] = false,
            _ => return solved,
        }
    }
}

/// The normal equations of the used columns, by elimination; a column that says nothing new gets 0.
fn solve(samples: &[([f64; 3], f64)], used: [bool; 3]) -> [f64; 3] {
    let mut rows = [[0.0; 4]; 3];
    for (x, y) in samples {
        for i in 0..3 {
            for j in 0..3 {
                rows[i][j] += x[i] * x[j];
            }
            rows[i][3] += x[i] * y;
        }
    }
    let mut pivots = [false; 3];
    for i in (0..3).filter(|i| used[*i]) {
        if rows[i][i].abs() < 1e-6 {
            continue;
        }
        pivots[i] = true;
        for other in (0..3).filter(|other| *other != i && used[*other]) {
            let factor = rows[other][i] / rows[i][i];
            let pivot = rows[i];
            rows[other].iter_mut().zip(pivot).for_each(|(value, pivot)| *value -= factor * pivot);
        }
    }
    [0, 1, 2].map(|i| if pivots[i] { rows[i][3] / rows[i][i] } else { 0.0 })
}

struct Run<'a> {
    recording: &'a Recording,
    settings: Settings,
    cost: CostModel,
    /// By arrival, the first last.
    arrivals: Vec<Arrival>,
    outputs: HashMap<RequestId, Vec<TokenId>>,
    forced: HashMap<RequestId, HashSet<usize>>,
    arrived: HashMap<RequestId, (f64, u64)>,
    last_token: HashMap<RequestId, f64>,
    inputs: PlanInputs,
    now_us: f64,
    figures: Figures,
    gaps_us: Vec<f64>,
    ttfts_us: Vec<f64>,
    queue_steps: Vec<u64>,
}

impl<'a> Run<'a> {
    fn new(recording: &'a Recording, settings: Settings) -> Option<Self> {
        let inputs = recording.ops.iter().find_map(|timed| match &timed.op {
            Op::Plan { inputs, .. } => Some(*inputs),
            _ => None,
        })?;
        Some(Run {
            recording,
            settings,
            cost: fit(recording),
            arrivals: arrivals(recording),
            outputs: HashMap::new(),
            forced: HashMap::new(),
            arrived: HashMap::new(),
            last_token: HashMap::new(),
            inputs,
            now_us: 0.0,
            figures: Figures::default(),
            gaps_us: Vec::new(),
            ttfts_us: Vec::new(),
            queue_steps: Vec::new(),
        })
    }

    /// `None` when the steps do not come to an end.
    fn finish(mut self) -> Option<Figures> {
        let mut scheduler = Scheduler::new(
            self.settings.scheduler,
            KvCache::new(self.settings.kv).with_host_pool(self.recording.header.num_host_blocks, false),
        );
        let tokens: usize = self.arrivals.iter().map(|a| a.new.prompt.len() + a.output.len() + 1).sum();
        let start = self.arrivals.last().map_or(0.0, |a| a.at_us);
        self.now_us = start;
        loop {
            if !scheduler.has_work() {
                let Some(next) = self.arrivals.last() else { break };
                self.now_us = self.now_us.max(next.at_us);
            }
            self.arrive(&mut scheduler);
            if scheduler.has_work() {
                self.step(&mut scheduler);
            }
            if self.figures.steps > MAX_STEPS_PER_TOKEN * tokens as u64 {
                return None;
            }
        }
        let totals = scheduler.totals();
        let steps = self.figures.steps.max(1) as f64;
        let mut figures = self.figures;
        figures.mean_batch /= steps;
        figures.kv_use /= steps;
        figures.preemptions = totals.preemptions;
        figures.recompute_tax = totals.recomputed_tokens as f64 / totals.computed_tokens.max(1) as f64;
        figures.hit_tokens = scheduler.kv().counts().hit_tokens;
        figures.queue_steps = self.queue_steps.iter().sum::<u64>() as f64 / self.queue_steps.len().max(1) as f64;
        figures.ttft_ms = mean(&self.ttfts_us) / 1e3;
        figures.itl_ms = mean(&self.gaps_us) / 1e3;
        self.gaps_us.sort_by(f64::total_cmp);
        let rank = (0.99 * self.gaps_us.len() as f64).ceil() as usize;
        figures.itl_p99_ms = self.gaps_us.get(rank.saturating_sub(1)).copied().unwrap_or(0.0) / 1e3;
        figures.total_ms = (self.now_us - start) / 1e3;
        Some(figures)
    }

    fn arrive(&mut self, scheduler: &mut Scheduler) {
        while self.arrivals.last().is_some_and(|next| next.at_us <= self.now_us) {
            let Arrival { at_us, new, output, forced } = self.arrivals.pop().expect("asked above");
            let id = new.id;
            self.figures.requests += 1;
            match scheduler.add(new) {
                Ok(()) => {
                    self.outputs.insert(id, output);
                    self.forced.insert(id, forced);
                    self.arrived.insert(id, (at_us, self.figures.steps));
                }
                Err(_) => self.figures.refused += 1,
            }
        }
    }

    fn step(&mut self, scheduler: &mut Scheduler) {
        self.figures.steps += 1;
        let max_tokens = self.settings.scheduler.max_tokens_per_step;
        let max_prefill_tokens = match self.recording.header.adaptive_budget {
            true => self.cost.chunk(scheduler.num_decoding() as u32, max_tokens),
            false => max_tokens,
        };
        let mut inputs = self.inputs;
        (inputs.step, inputs.max_tokens, inputs.max_prefill_tokens) =
            (self.figures.steps, max_tokens, max_prefill_tokens);
        let plan = scheduler.plan_step(inputs);
        let sampled: Vec<TokenId> =
            plan.rows.iter().filter(|row| row.wants_logits).map(|row| self.token(scheduler, row.request)).collect();
        self.count(scheduler, &plan);
        let committed = scheduler.commit(&plan, &sampled, &vec![false; sampled.len()]);
        for row in committed.rows.iter().filter(|row| row.token.is_some()) {
            match self.last_token.insert(row.request, self.now_us) {
                Some(before) => self.gaps_us.push(self.now_us - before),
                None => self.ttfts_us.push(self.now_us - self.arrived[&row.request].0),
            }
            self.force(scheduler, row.request);
        }
        scheduler.take_ended();
        scheduler.drain_block_events();
    }

    /// Appends what was forced behind the last token.
    fn force(&self, scheduler: &mut Scheduler, request: RequestId) {
        while let Some(at) = scheduler.get(request).map(|seq| seq.num_output() as usize)
            && self.forced[&request].contains(&at)
            && scheduler.can_force(request)
        {
            scheduler.force(request, self.outputs[&request][at]);
        }
    }

    fn token(&self, scheduler: &Scheduler, request: RequestId) -> TokenId {
        let at = scheduler.get(request).map_or(0, |seq| seq.num_output()) as usize;
        self.outputs[&request].get(at).copied().expect("an output ends at its recorded length")
    }

    fn count(&mut self, scheduler: &Scheduler, plan: &StepPlan) {
        let is_decode = |row: &&crate::scheduler::PlanRow| row.kind == crate::scheduler::RowKind::Decode;
        let num_decode = plan.rows.iter().filter(is_decode).count() as u32;
        self.now_us += self.cost.step(num_decode, plan.num_tokens() - num_decode);
        self.figures.mean_batch += plan.rows.len() as f64;
        let counts = scheduler.kv().counts();
        let used = f64::from(counts.used) / f64::from(counts.total.max(1));
        self.figures.kv_use += used;
        self.figures.kv_use_max = self.figures.kv_use_max.max(used);
        for admission in plan.admitted.iter().filter(|a| !a.is_resumed) {
            self.queue_steps.push(self.figures.steps - 1 - self.arrived[&admission.request].1);
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The recorded requests that got a token, with their outputs as the one thing that ends them; latest first. Beam
/// searches are left out: what they would rank is not recorded.
fn arrivals(recording: &Recording) -> Vec<Arrival> {
    let mut outputs: HashMap<RequestId, Vec<TokenId>> = HashMap::new();
    let mut forced: HashMap<RequestId, HashSet<usize>> = HashMap::new();
    let mut prompts: HashMap<RequestId, Vec<TokenId>> = HashMap::new();
    let mut arrivals = Vec::new();
    for timed in &recording.ops {
        let at_us = timed.at_us as f64;
        match &timed.op {
            Op::Add(new) | Op::AddBeside(new) => {
                prompts.insert(new.id, new.prompt.clone());
                arrivals.push(Arrival { at_us, new: new.clone(), output: Vec::new(), forced: HashSet::new() });
            }
            // A fork comes as a request of all its tokens.
            Op::Fork { parent, fork } => {
                let known = |of: &HashMap<RequestId, Vec<TokenId>>| of.get(parent).cloned().unwrap_or_default();
                let mut prompt = [known(&prompts), known(&outputs)].concat();
                prompt.truncate(fork.keep_tokens as usize);
                prompt.extend_from_slice(&fork.sequence.prompt);
                prompts.insert(fork.sequence.id, prompt.clone());
                let new = NewSequence { prompt, ..fork.sequence.clone() };
                arrivals.push(Arrival { at_us, new, output: Vec::new(), forced: HashSet::new() });
            }
            Op::Force { request, token, .. } => {
                let output = outputs.entry(*request).or_default();
                forced.entry(*request).or_default().insert(output.len());
                output.push(*token);
            }
            Op::Commit { rows, .. } => {
                for row in rows {
                    outputs.entry(row.request).or_default().extend(row.token);
                }
            }
            _ => {}
        }
    }
    for arrival in &mut arrivals {
        arrival.output = outputs.remove(&arrival.new.id).unwrap_or_default();
        arrival.forced = forced.remove(&arrival.new.id).unwrap_or_default();
        let length = arrival.output.len() as u32;
        arrival.new.stop = StopRules { ignore_eos: true, ..StopRules::max_tokens(length) };
    }
    arrivals.retain(|arrival| !arrival.output.is_empty());
    arrivals.reverse();
    arrivals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_of_steps_is_found_again() {
        let samples: Vec<([f64; 3], f64)> = (0..50)
            .map(|i| {
                let x = [1.0, f64::from(i % 7), f64::from(i % 3 * 40)];
                (x, 900.0 + 30.0 * x[1] + 7.0 * x[2])
            })
            .collect();
        let found = least_squares(&samples);
        assert!(found.iter().zip([900.0, 30.0, 7.0]).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
        let only_decode: Vec<([f64; 3], f64)> = samples.iter().map(|(x, _)| ([1.0, x[1], 0.0], 5.0)).collect();
        assert_eq!(least_squares(&only_decode)[2], 0.0, "what never varied costs nothing");
    }
}
