//! How runs start: from a prompt, from the first tokens of another request, and as further choices of one.
//!
//! Guarantees: a prompt with several choices is computed once; a fork of a request that has ended goes on from the same
//! tokens, as long as that is one of the last to have ended ([`RecentTokens`]): what the prefix cache still has of them
//! is not computed again.

use super::beams::NewSearch;
use super::choices::choice_seed;
use super::core::EngineCore;
use super::mailbox::EventSink;
use super::output::TextOutput;
use super::run_state::LiveRun;
use crate::ids::{RequestId, TokenId};
use crate::kv::CacheKey;
use crate::protocol::{FinishReason, GenerateRequest, InvalidParam, OutputRules, RunError, Usage};
use crate::scheduler::{Ended, NewFork, NewSequence, QueuePlace};
use std::collections::VecDeque;

/// Ended requests whose tokens are kept to be forked, and tokens of them all.
const MAX_RECENT: usize = 256;
const MAX_RECENT_TOKENS: usize = 1 << 20;

/// The tokens of the last requests that ended.
#[derive(Debug, Default)]
pub struct RecentTokens {
    requests: VecDeque<Recent>,
    num_tokens: usize,
}

#[derive(Debug)]
struct Recent {
    request: RequestId,
    tokens: Vec<TokenId>,
    key: CacheKey,
}

impl RecentTokens {
    pub fn push(&mut self, ended: Ended) {
        self.num_tokens += ended.tokens.len();
        let Ended { request, tokens, key, .. } = ended;
        self.requests.push_back(Recent { request, tokens, key });
        while self.requests.len() > MAX_RECENT || self.num_tokens > MAX_RECENT_TOKENS {
            let oldest = self.requests.pop_front().expect("it holds more than it may");
            self.num_tokens -= oldest.tokens.len();
        }
    }

    fn get(&self, request: RequestId) -> Option<&Recent> {
        self.requests.iter().rev().find(|recent| recent.request == request)
    }
}

/// How a run begins.
pub(super) enum Start {
    Prompt,
    /// With the first tokens of another request, then with its own prompt.
    Fork {
        parent: RequestId,
        keep_tokens: u32,
    },
}

impl EngineCore {
    /// Queues a run; a refusal is its terminal event.
    pub(super) fn add(
        &mut self,
        id: RequestId,
        (mut request, rules): (GenerateRequest, OutputRules),
        start: Start,
        events: EventSink,
    ) {
        let search = self.searches.prepare(&mut request, &self.model);
        let asked = (request.decoding.clone(), request.sampling.logprobs.is_some());
        let text = self.text_output(&request.stop.stop_strings, 0, rules.shows_special);
        let mut run = self.new_run(id, request.owner.clone(), events, asked, text).with_rules(rules);
        if let Start::Fork { parent, .. } = start {
            run = run.fork_of(parent);
        }
        let mut new = self.new_sequence(id, request);
        if run.ranks() && new.sampling.logprobs.is_none() {
            new.sampling.logprobs = Some(0);
        }
        let queued = self.queue(new, start, search).map(|new| run.keep_for_choices(&new));
        self.queued(id, run, queued);
    }

    fn new_sequence(&self, id: RequestId, request: GenerateRequest) -> NewSequence {
        NewSequence {
            id,
            prompt: request.prompt,
            seed: request.sampling.seed.unwrap_or(id.0),
            sampling: request.sampling,
            stop: request.stop,
            eos_ids: self.model.eos_token_ids.clone(),
            priority: request.priority,
            cache_salt: request.cache_salt,
            adapter: request.adapter,
            client: request.owner.id,
        }
    }

    pub(super) fn text_output(&self, stop_strings: &[String], choice: u32, shows_special: bool) -> TextOutput {
        TextOutput::new(self.model.tokenizer.clone(), stop_strings, choice).showing_special(shows_special)
    }

    /// Hands a sequence to the scheduler; gives it back with all of its prompt.
    fn queue(
        &mut self,
        mut new: NewSequence,
        start: Start,
        search: Option<NewSearch>,
    ) -> Result<NewSequence, RunError> {
        let Start::Fork { parent, keep_tokens } = start else {
            self.model.loras.check(new.adapter)?;
            self.add_whole(new.clone(), search)?;
            return Ok(new);
        };
        let (tokens, key, is_live) = match (self.scheduler.get(parent), self.recent.get(parent)) {
            (Some(seq), _) => (seq.tokens(), seq.cache_key(), true),
            (None, Some(recent)) => (&recent.tokens[..], recent.key, false),
            (None, None) => {
                let message = format!("must be a live request or one that ended a short while ago, not {parent}");
                return Err(InvalidParam { field: "parent", message }.into());
            }
        };
        if keep_tokens as usize > tokens.len() {
            let message =
                format!("must be at most {}, the tokens of request {parent}, not {keep_tokens}", tokens.len());
            return Err(InvalidParam { field: "keep_tokens", message }.into());
        }
        let own = std::mem::take(&mut new.prompt);
        let whole = [&tokens[..keep_tokens as usize], &own].concat();
        self.model.loras.check(key.adapter)?;
        (new.cache_salt, new.adapter) = (key.salt, key.adapter);
        if is_live && search.is_none() {
            let sequence = NewSequence { prompt: own, ..new.clone() };
            self.scheduler.fork(parent, NewFork { keep_tokens, sequence, place: QueuePlace::AsNew })?;
        } else {
            self.add_whole(NewSequence { prompt: whole.clone(), ..new.clone() }, search)?;
        }
        Ok(NewSequence { prompt: whole, ..new })
    }

    /// A search finds what it shares with others by prefix.
    fn add_whole(&mut self, new: NewSequence, search: Option<NewSearch>) -> Result<(), RunError> {
        match search {
            None => self.scheduler.add(new),
            Some(search) => self.searches.start(search, new, &mut self.scheduler),
        }
    }

    /// Once the first choice of a run has a token, its prompt is computed: the other choices share it.
    pub(super) fn start_choices(&mut self, id: RequestId) {
        let Some((new, num_sequences)) = self.runs.get_mut(&id).and_then(LiveRun::take_for_choices) else { return };
        let keep_tokens = new.prompt.len() as u32;
        let mut refused = Vec::new();
        for choice in 1..num_sequences {
            let id_of_choice = RequestId(id.0 + u64::from(choice));
            let mut sequence = NewSequence { id: id_of_choice, seed: choice_seed(new.seed, choice), ..new.clone() };
            let queued = if self.scheduler.get(id).is_some() {
                sequence.prompt.clear();
                self.scheduler.fork(id, NewFork { keep_tokens, sequence, place: QueuePlace::WithParent })
            } else {
                self.scheduler.add_beside(sequence)
            };
            refused.extend(queued.err().map(|error| (choice, error)));
        }
        for choice in 1..num_sequences {
            let shows_special = self.runs.get(&id).is_some_and(LiveRun::shows_special);
            let text = self.text_output(&new.stop.stop_strings, choice, shows_special);
            if let Some(run) = self.runs.get_mut(&id) {
                run.begin_choice(text);
            }
        }
        for (choice, error) in refused {
            if let Some(run) = self.runs.get_mut(&id) {
                run.end_choice(choice as usize, FinishReason::Aborted, Usage::default());
            }
            self.fail(id, &error);
        }
    }
}
