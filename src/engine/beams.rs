//! The searches of live runs: what came back from a step becomes the next beams, and at the end the outputs become text.
//!
//! Guarantees: a search sees the rows of one committed step at a time, in the order of its beams; stop tokens and stop
//! strings end a beam as the end-of-sequence token does in transformers' `generate`, with all its tokens in the score,
//! and the text stops before them; the outputs are told whole, best first, when the search is over. A stop string is
//! looked for in the text of each beam's output.

use super::core::EngineCore;
use super::handle::LoadedModel;
use super::output::TextOutput;
use super::run_state::LiveRun;
use crate::executor::{MAX_LOGPROBS, StepOutput};
use crate::ids::{RequestId, TokenId};
use crate::protocol::{
    BeamParams, Decoding, EngineEvent, FinishReason, GenerateRequest, InvalidParam, RunError, StopRules, TokenLogprobs,
    Usage,
};
use crate::sampling::beam::{BeamSearch, Hypothesis};
use crate::scheduler::{
    Committed, GangAdvance, GangChild, GangNext, GangRows, NewSequence, RowResult, Scheduler, StepPlan, gang_bound,
};
use crate::tokenizer::Tokenizer;
use std::collections::HashMap;
use std::sync::Arc;

/// A summed log-probability over a length to this power is a finite number of 32 bits that is not 0, at any length.
const MAX_LENGTH_PENALTY: f32 = 5.0;

/// The searches of an engine.
#[derive(Default)]
pub struct Searches {
    live: HashMap<RequestId, Search>,
}

/// One run's search.
pub struct Search {
    beams: BeamSearch,
    stop: StopRules,
    stop_ids: Vec<TokenId>,
    tokenizer: Arc<Tokenizer>,
    /// The text of each live beam so far; empty when the request has no stop strings.
    texts: Vec<TextOutput>,
}

/// The tokens that end an output.
fn stop_ids(stop: &StopRules, eos: &[TokenId]) -> Vec<TokenId> {
    let mut ids = stop.stop_token_ids.clone();
    if !stop.ignore_eos {
        ids.extend_from_slice(eos);
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Continuations that each beam's row must name.
fn num_continuations(params: &BeamParams, stop: &StopRules, eos: &[TokenId]) -> u32 {
    BeamSearch::num_candidates(params.width, stop_ids(stop, eos).len() as u32)
}

/// Checks a beam search's parameters; the error names the field and the limit.
pub fn check(request: &GenerateRequest, model: &LoadedModel) -> Result<(), RunError> {
    let Decoding::Beam(params) = &request.decoding else { return Ok(()) };
    let invalid = |field, message| Err(InvalidParam { field, message }.into());
    let (width, slots) = (params.width, model.max_num_seqs);
    if width == 0 || width > slots {
        return invalid("beam_width", format!("must be between 1 and {slots}, which run at once, not {width}"));
    }
    let wanted = num_continuations(params, &request.stop, &model.eos_token_ids);
    if wanted > MAX_LOGPROBS {
        let message =
            format!("needs {wanted} continuations of a beam with its stop tokens, the limit is {MAX_LOGPROBS}");
        return invalid("beam_width", message);
    }
    if params.num_return == 0 || params.num_return > width {
        return invalid("n", format!("must be between 1 and the beam width of {width}, not {}", params.num_return));
    }
    if !(-MAX_LENGTH_PENALTY..=MAX_LENGTH_PENALTY).contains(&params.length_penalty) {
        let (max, given) = (MAX_LENGTH_PENALTY, params.length_penalty);
        return invalid("length_penalty", format!("must be between -{max} and {max}, not {given}"));
    }
    if request.sampling.logprobs.is_some() {
        return invalid("logprobs", "are not reported for beam search".into());
    }
    Ok(())
}

/// A search that waits for the scheduler to take its gang.
pub struct NewSearch {
    params: BeamParams,
    stop: StopRules,
    stop_ids: Vec<TokenId>,
    tokenizer: Arc<Tokenizer>,
}

impl Searches {
    /// Makes a beam search's request ask for continuations; `None` for any other request. Temperature and cuts play no
    /// part in a search.
    pub fn prepare(&self, request: &mut GenerateRequest, model: &LoadedModel) -> Option<NewSearch> {
        let Decoding::Beam(params) = &request.decoding else { return None };
        let wanted = num_continuations(params, &request.stop, &model.eos_token_ids).min(MAX_LOGPROBS);
        request.sampling.temperature = 0.0;
        request.sampling.logprobs = Some(wanted as u8);
        Some(NewSearch {
            params: params.clone(),
            stop: request.stop.clone(),
            stop_ids: stop_ids(&request.stop, &model.eos_token_ids),
            tokenizer: model.tokenizer.clone(),
        })
    }

    /// Queues the gang and starts its search.
    pub fn start(&mut self, new: NewSearch, gang: NewSequence, scheduler: &mut Scheduler) -> Result<(), RunError> {
        let NewSearch { params, stop, stop_ids, tokenizer } = new;
        let id = gang.id;
        scheduler.add_gang(gang, params.width)?;
        let seq = scheduler.get(id).expect("the gang was just taken");
        let at_limit = if stop.max_tokens.is_some() { FinishReason::MaxTokens } else { FinishReason::ContextFull };
        let texts = match stop.stop_strings.iter().any(|s| !s.is_empty()) {
            true => vec![TextOutput::new(tokenizer.clone(), &stop.stop_strings, 0)],
            false => Vec::new(),
        };
        let beams = BeamSearch::new(params, seq.max_total() - seq.num_prompt(), at_limit);
        self.live.insert(id, Search { beams, stop, stop_ids, tokenizer, texts });
        Ok(())
    }

    /// What the searches make of a step that ran. A gang with a row that is not finite is left to the scheduler.
    pub fn advance(&mut self, rows: &[GangRows], output: &StepOutput) -> Vec<GangAdvance> {
        let mut advances = Vec::with_capacity(rows.len());
        for gang in rows {
            let is_finite = gang.logits.iter().all(|&l| !output.not_finite[l]);
            if let (true, Some(search)) = (is_finite, self.live.get_mut(&gang.gang)) {
                let of_row = |&l: &usize| output.logprobs.get(l).and_then(Option::as_ref);
                let next = search.advance(gang.logits.iter().map(of_row));
                advances.push(GangAdvance { gang: gang.gang, next });
            }
        }
        advances
    }

    /// The search of a run that ended.
    pub fn take(&mut self, id: RequestId) -> Option<Search> {
        self.live.remove(&id)
    }

    /// After a rebuild: the searches whose beams are not those of the scheduler any more, because a step fell over between
    /// the two. Those that go on are told how long they may become.
    pub fn out_of_step(&mut self, scheduler: &Scheduler) -> Vec<RequestId> {
        let mut lost = Vec::new();
        for (&id, search) in &mut self.live {
            let outputs = scheduler.gang_members(id).map(|seq| seq.output());
            let live = (0..search.beams.num_live()).map(|beam| search.beams.live_tokens(beam));
            match scheduler.get(id) {
                Some(seq) if outputs.eq(live) => search.beams.limit(seq.max_total() - seq.num_prompt()),
                _ => lost.push(id),
            }
        }
        lost.sort_unstable();
        lost
    }
}

impl EngineCore {
    /// The step ran: the searches say how their beams go on.
    pub(super) fn commit(&mut self, plan: &StepPlan, output: &StepOutput) -> Committed {
        let advances = self.searches.advance(&self.scheduler.gang_rows(plan), output);
        let committed = self.scheduler.commit_gangs(plan, &output.tokens, &output.not_finite, &advances);
        let at = self.step_time();
        for advance in &advances {
            if let Some(run) = self.runs.get_mut(&advance.gang) {
                run.progress(at);
            }
        }
        committed
    }

    /// The run that a sequence belongs to; of a search's beams the leader stands for all.
    pub(super) fn run_by(&self, sequence: RequestId) -> Option<&LiveRun> {
        let (_, run) = self.runs.range(..=sequence).next_back()?;
        run.choice_of(sequence).map(|_| run)
    }

    /// The token that a beam goes on with after this row, whichever beam's children they are.
    pub(super) fn beam_token(&self, row: &RowResult) -> Option<TokenId> {
        let beam = self.scheduler.get(row.request).filter(|seq| seq.gang().is_some() && row.logit_idx.is_some())?;
        beam.output().last().copied()
    }

    /// A choice of a run ended; a search tells all its outputs.
    pub(super) fn end_choice(&mut self, id: RequestId, choice: usize, reason: &FinishReason, mut usage: Usage) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        if let Some(search) = self.searches.take(id).filter(|_| *reason != FinishReason::Aborted) {
            usage.output_tokens = search.num_output_tokens();
            search.outputs().into_iter().for_each(|event| run.events.push(event));
        }
        run.end_choice(choice, reason.clone(), usage);
    }

    /// After a rebuild: ends the searches that cannot go on.
    pub(super) fn fail_out_of_step(&mut self) {
        for id in self.searches.out_of_step(&self.scheduler) {
            self.fail(id, &RunError::Engine("a step of the beam search fell over half-way".into()));
        }
    }
}

/// Blocks that a request of `needed` tokens may come to need; with windows the scheduler alone can say.
pub fn most_blocks(request: &GenerateRequest, prompt: u32, needed: u32, model: &LoadedModel) -> Option<u32> {
    let width = if let Decoding::Beam(params) = &request.decoding { params.width } else { 1 };
    (!model.has_windows).then(|| gang_bound(model.block_size, prompt, needed, width))
}

impl Search {
    fn advance<'a>(&mut self, rows: impl Iterator<Item = Option<&'a TokenLogprobs>>) -> GangNext {
        let lists: Vec<Vec<(TokenId, f32)>> =
            rows.map(|row| row.map(|row| row.top.clone()).unwrap_or_default()).collect();
        let Search { beams, stop, stop_ids, texts, .. } = self;
        let is_counted = beams.num_tokens() >= stop.min_tokens;
        let ends = |beam: usize, token: TokenId| {
            if is_counted && stop_ids.contains(&token) {
                return Some(FinishReason::StopToken(token));
            }
            let mut text = texts.get(beam)?.clone();
            text.push(token, None).stop.map(FinishReason::StopString)
        };
        let Some(children) = beams.advance(&lists, ends) else {
            let reason = beams.outputs().first().map(|best| best.reason.clone());
            return GangNext::End(reason.unwrap_or(FinishReason::MaxTokens));
        };
        if !texts.is_empty() {
            let text = |child: &crate::sampling::beam::BeamChild| {
                let mut text = texts[child.parent].clone();
                text.push(child.token, None);
                text
            };
            *texts = children.iter().map(text).collect();
        }
        GangNext::Beams(children.iter().map(|c| GangChild { parent: c.parent, token: c.token }).collect())
    }

    /// Output tokens of all that is returned.
    pub fn num_output_tokens(&self) -> u32 {
        self.beams.outputs().iter().map(|output| output.tokens.len() as u32).sum()
    }

    /// The outputs as a client sees them: of each choice its text and how it ended.
    pub fn outputs(&self) -> Vec<EngineEvent> {
        let choices = self.beams.outputs().iter().enumerate();
        choices.flat_map(|(choice, output)| self.output(choice as u32, output)).collect()
    }

    fn output(&self, choice: u32, output: &Hypothesis) -> [EngineEvent; 2] {
        let mut text = TextOutput::new(self.tokenizer.clone(), &self.stop.stop_strings, choice);
        let mut delta = String::new();
        let is_stop_token = matches!(output.reason, FinishReason::StopToken(_));
        let shown = output.tokens.len() - usize::from(is_stop_token);
        let pieces = output.tokens[..shown].iter().map(|&token| text.push(token, None).event).collect::<Vec<_>>();
        let rest = if matches!(output.reason, FinishReason::StopString(_)) { None } else { text.flush() };
        for event in pieces.into_iter().chain(rest) {
            if let EngineEvent::Text { delta: piece, .. } = event {
                delta.push_str(&piece);
            }
        }
        let text = EngineEvent::Text { choice, delta, tokens: output.tokens.clone(), logprobs: Vec::new() };
        let end = EngineEvent::Choice {
            choice,
            reason: output.reason.clone(),
            cumulative_logprob: Some(output.cumulative_logprob as f32),
            score: Some(output.score as f32),
        };
        [text, end]
    }
}
