//! What the engine keeps of a live run beside the scheduler's sequences: its client, its outputs, its times.

use super::choices::{self, Choice};
use super::mailbox::EventSink;
use super::output::TextOutput;
use super::pooling::Pool;
use super::scores::Scores;
use crate::ids::{RequestId, TokenId};
use crate::protocol::{
    Decoding, EngineEvent, FinishReason, OutputRules, OwnerTag, RunTimings, TokenConstraint, TokenLogprobs, Usage,
};
use crate::scheduler::{Ended, NewSequence, Sequence};
use crate::telemetry::{RequestInfo, RequestState, WaitReason};

/// A live run. Its sequence for choice c is request `id + c`. Times are microseconds since the engine started.
pub struct LiveRun {
    pub id: RequestId,
    pub owner: OwnerTag,
    pub events: EventSink,
    submitted_us: u64,
    admitted_us: Option<u64>,
    first_token_us: Option<u64>,
    last_token_us: Option<u64>,
    first_step: u64,
    last_step: u64,
    /// The choices that have begun.
    choices: Vec<Choice>,
    decoding: Decoding,
    /// What the further choices start from, until they do.
    waiting: Option<Box<NewSequence>>,
    shows_logprobs: bool,
    usage: Usage,
    /// It computes a prefix to be pinned: its token means nothing and is not sent.
    is_pin: bool,
    /// The request that its prompt was taken from. The scheduler knows a parent only if it lived then.
    parent: Option<RequestId>,
    rules: OutputRules,
    /// The constraint of each choice that has drawn a token.
    constraints: Vec<Option<Box<dyn TokenConstraint>>>,
    /// Of a run for an embedding.
    pub pool: Option<Pool>,
    /// Of a run whose prompt is scored.
    pub scores: Option<Scores>,
}

/// When a step was committed.
#[derive(Clone, Copy, Debug)]
pub struct StepTime {
    pub step: u64,
    pub now_us: u64,
}

impl LiveRun {
    /// A run whose first choice begins. `shows_logprobs`: the client asked for them.
    pub fn new(
        id: RequestId,
        owner: OwnerTag,
        events: EventSink,
        (decoding, shows_logprobs): (Decoding, bool),
        submitted_us: u64,
    ) -> Self {
        LiveRun {
            id,
            owner,
            events,
            submitted_us,
            admitted_us: None,
            first_token_us: None,
            last_token_us: None,
            first_step: 0,
            last_step: 0,
            choices: Vec::new(),
            decoding,
            waiting: None,
            shows_logprobs,
            usage: Usage::default(),
            parent: None,
            is_pin: false,
            rules: OutputRules::default(),
            constraints: Vec::new(),
            pool: None,
            scores: None,
        }
    }

    pub fn with_rules(mut self, rules: OutputRules) -> Self {
        self.pool = rules.pooling.map(Pool::new);
        self.scores = rules.prompt_logprobs.map(Scores::new);
        self.rules = rules;
        self
    }

    /// Special tokens are part of the text.
    pub fn shows_special(&self) -> bool {
        self.rules.shows_special
    }

    pub fn is_constrained(&self) -> bool {
        self.rules.constraint.is_some()
    }

    /// What a choice's next token must follow.
    pub fn constraint(&mut self, choice: usize) -> Option<&mut dyn TokenConstraint> {
        let first = self.rules.constraint.as_ref()?;
        if self.constraints.len() <= choice {
            self.constraints.resize_with(choice + 1, || None);
        }
        let state = self.constraints[choice].get_or_insert_with(|| first.fork());
        Some(&mut **state)
    }

    /// The run of a prefix that is to be pinned.
    pub fn for_pin(mut self) -> Self {
        self.is_pin = true;
        self
    }

    pub fn is_pin(&self) -> bool {
        self.is_pin
    }

    /// The next choice begins.
    pub fn begin_choice(&mut self, text: TextOutput) {
        let holds = self.ranks();
        self.choices.push(Choice::new(text, holds));
    }

    fn is_search(&self) -> bool {
        matches!(self.decoding, Decoding::Beam(_))
    }

    /// True when the log-probabilities of all outputs decide which are sent.
    pub fn ranks(&self) -> bool {
        !self.is_search() && self.decoding.num_sequences() > self.decoding.num_choices()
    }

    /// Keeps what further choices start from, if there are to be any.
    pub fn keep_for_choices(&mut self, new: &NewSequence) {
        self.waiting = (!self.is_search() && self.decoding.num_sequences() > 1).then(|| Box::new(new.clone()));
    }

    /// What further choices start from, and how many there will be in all; given once, when the first has a token.
    pub fn take_for_choices(&mut self) -> Option<(NewSequence, u32)> {
        let has_token = self.choices.first().is_some_and(|first| first.num_emitted() > 0);
        let new = if has_token { self.waiting.take() } else { None }?;
        Some((*new, self.decoding.num_sequences()))
    }

    /// The requests of the choices that have begun.
    pub fn sequences(&self) -> impl Iterator<Item = RequestId> + use<> {
        let first = self.id.0;
        (first..first + self.choices.len() as u64).map(RequestId)
    }

    /// Which choice this request is.
    pub fn choice_of(&self, sequence: RequestId) -> Option<usize> {
        let choice = sequence.0.checked_sub(self.id.0)? as usize;
        (choice < self.choices.len()).then_some(choice)
    }

    /// True until the first admission.
    pub fn is_new(&self) -> bool {
        self.admitted_us.is_none()
    }

    /// Joined the batch; only the first time is told.
    pub fn admitted(&mut self, at: StepTime, prompt_tokens: u32, cached_tokens: u32) {
        if self.is_new() {
            self.admitted_us = Some(at.now_us);
            self.first_step = at.step;
            self.events.push(EngineEvent::Started { prompt_tokens, cached_tokens });
        }
    }

    /// Turns a committed token of a choice to text; the stop string that it completed, if any.
    pub fn token(
        &mut self,
        at: StepTime,
        choice: usize,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        is_stop_token: bool,
    ) -> Option<String> {
        self.progress(at);
        if self.is_pin {
            self.choices[choice].count();
            return None;
        }
        let (event, stop) = self.choices[choice].push(token, logprobs, is_stop_token, self.shows_logprobs);
        event.into_iter().for_each(|event| self.events.push(event));
        stop
    }

    /// A step brought the run further, though no text may be told yet.
    pub fn progress(&mut self, at: StepTime) {
        self.first_token_us.get_or_insert(at.now_us);
        self.last_token_us = Some(at.now_us);
        self.last_step = at.step;
    }

    /// Output tokens of a choice turned to text so far.
    pub fn num_emitted(&self, choice: usize) -> usize {
        self.choices[choice].num_emitted()
    }

    /// A choice ended. The prompt is counted once, with the first.
    pub fn end_choice(&mut self, choice: usize, reason: FinishReason, usage: Usage) {
        if choice == 0 {
            self.usage.prompt_tokens = usage.prompt_tokens;
            self.usage.cached_tokens = usage.cached_tokens;
        }
        self.usage.output_tokens += usage.output_tokens;
        self.usage.preemptions += usage.preemptions;
        let ended = &mut self.choices[choice];
        ended.end(reason.clone()).into_iter().for_each(|event| self.events.push(event));
        if !self.ranks() {
            self.tell_choice(choice as u32, choice, reason);
        }
    }

    /// No further choice begins.
    pub fn drop_waiting(&mut self) {
        self.waiting = None;
    }

    /// True when every choice has ended and none is to begin.
    pub fn is_over(&self) -> bool {
        self.waiting.is_none() && self.choices.iter().all(|choice| choice.reason().is_some())
    }

    /// Sends the best where they were to be chosen, and the terminal event: with the reason of the first choice, or
    /// `Aborted` when the client ended any.
    pub fn finish(&mut self) {
        let mut reasons: Vec<FinishReason> =
            self.choices.iter().filter_map(|choice| choice.reason().cloned()).collect();
        if self.ranks() {
            let best = choices::best(&self.choices, self.decoding.num_choices() as usize);
            for (rank, &choice) in best.iter().enumerate() {
                let text = self.choices[choice].release(rank as u32);
                text.into_iter().for_each(|event| self.events.push(event));
                self.tell_choice(rank as u32, choice, reasons[choice].clone());
            }
            reasons = best.iter().map(|&choice| reasons[choice].clone()).collect();
        }
        let aborted = reasons.iter().position(|reason| *reason == FinishReason::Aborted);
        let reason = reasons.swap_remove(aborted.unwrap_or(0));
        self.events.push(EngineEvent::Finished { reason, usage: self.usage, timings: self.timings() });
    }

    /// A request for one choice is told by the terminal event alone.
    fn tell_choice(&self, number: u32, choice: usize, reason: FinishReason) {
        // A search has told its outputs itself.
        if !self.is_search() && self.decoding.num_choices() > 1 {
            let cumulative_logprob = self.choices[choice].cumulative_logprob();
            self.events.push(EngineEvent::Choice { choice: number, reason, cumulative_logprob, score: None });
        }
    }

    pub fn timings(&self) -> RunTimings {
        let since = |us: Option<u64>| us.map_or(0, |us| us.saturating_sub(self.submitted_us));
        RunTimings {
            queue_us: since(self.admitted_us),
            ttft_us: since(self.first_token_us),
            decode_us: since(self.last_token_us).saturating_sub(since(self.first_token_us)),
            first_step: self.first_step,
            last_step: self.last_step,
        }
    }

    /// Notes that its prompt begins with another request's tokens.
    pub fn fork_of(mut self, parent: RequestId) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Where a sequence of the run goes on from, if that is not of the run.
    fn parent_of(&self, id: RequestId) -> Option<RequestId> {
        self.parent.filter(|_| id == self.id)
    }

    /// A sequence of the run as the app shows it, while it lives.
    pub fn info(&self, seq: &Sequence, waits: Option<WaitReason>) -> RequestInfo {
        let state = match waits {
            Some(reason) => RequestState::Waiting { reason, preempted: seq.preemptions() > 0 },
            None if seq.num_output() > 0 && seq.num_remaining() == 1 => RequestState::Decoding,
            None => RequestState::Reading { computed: seq.num_computed(), total: seq.num_tokens() },
        };
        RequestInfo {
            id: seq.id(),
            owner: self.owner.clone(),
            state,
            prompt_tokens: seq.num_prompt(),
            cached_tokens: seq.cached_tokens().unwrap_or(0),
            output_tokens: seq.num_output(),
            num_computed: seq.num_computed(),
            blocks: seq.table().ids().to_vec(),
            parent: seq.parent().or(self.parent_of(seq.id())),
            choice: match seq.gang() {
                Some(leader) => (seq.id().0 - leader.0) as u32,
                None => self.choice_of(seq.id()).unwrap_or(0) as u32,
            },
            is_beam: seq.gang().is_some(),
            priority: seq.priority(),
            adapter: seq.adapter(),
            swapped_blocks: 0,
            preemptions: seq.preemptions(),
            submitted_us: self.submitted_us,
            first_token_us: self.first_token_us,
            last_token_us: self.last_token_us,
            finish: None,
        }
    }

    /// A sequence of the run as the app shows it after its end.
    pub fn finished_info(&self, ended: &Ended, reason: FinishReason) -> RequestInfo {
        let usage = ended.usage;
        RequestInfo {
            id: ended.request,
            owner: self.owner.clone(),
            state: RequestState::Finished,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            output_tokens: usage.output_tokens,
            num_computed: 0,
            blocks: Vec::new(),
            parent: ended.parent.or(self.parent_of(ended.request)),
            choice: self.choice_of(ended.request).unwrap_or(0) as u32,
            is_beam: self.is_search(),
            priority: 0,
            adapter: ended.key.adapter,
            swapped_blocks: 0,
            preemptions: usage.preemptions,
            submitted_us: self.submitted_us,
            first_token_us: self.first_token_us,
            last_token_us: self.last_token_us,
            finish: Some(reason),
        }
    }
}
