//! Engine events to the deltas of an answer, one reducer for streams and whole bodies.
//!
//! Guarantees: the deltas of a choice concatenate to its whole answer, whatever the events they came in; each choice
//! gets exactly one [`Finish`], last; what was held back is flushed through the same path before it.

use super::answer::AnswerParser;
use super::error::{ApiError, ApiResult};
use super::generation::Generation;
use crate::ids::TokenId;
use crate::protocol::{EngineEvent, FinishReason, RunError, TokenLogprobs, Usage};
use crate::server::wire::{CompletionTokensDetails, PromptTokensDetails, StopCause, UsageBody};
use std::sync::Arc;

/// What is new of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    pub choice: usize,
    /// The first delta of this choice.
    pub is_first: bool,
    pub parts: Vec<Part>,
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<TokenLogprobs>,
    /// With the first delta of a choice whose prompt was scored.
    pub prompt_logprobs: Option<Arc<Vec<TokenLogprobs>>>,
    pub finish: Option<Finish>,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Content(String),
    Reasoning(String),
    /// A tool call begins; its arguments follow.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A piece of a call's arguments.
    Arguments {
        index: usize,
        text: String,
    },
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// OpenAI's word.
    pub reason: &'static str,
    /// What ended it, where that was a stop string or a token.
    pub stop: Option<StopCause>,
}

/// What the request has used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    /// Of these, tokens of reasoning and of its marks.
    pub reasoning_tokens: u32,
}

impl Tally {
    pub fn usage(&self) -> UsageBody {
        UsageBody {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.output_tokens,
            total_tokens: self.prompt_tokens + self.output_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: self.cached_tokens },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens: self.reasoning_tokens },
        }
    }
}

/// The state of an answer. Choice `c` of run `r` is choice `r * n + c`.
pub struct Reducer {
    n: usize,
    choices: Vec<Choice>,
    /// Of each run: counted so far, and the engine's own account at its end.
    usage: Vec<(Tally, Option<Usage>)>,
    /// What each run's choices begin with.
    prefixes: Vec<String>,
    /// Of each run, where its prompt is scored.
    prompt_logprobs: Vec<Option<Arc<Vec<TokenLogprobs>>>>,
    shows_stop: bool,
}

#[derive(Clone, Default)]
struct Choice {
    parser: Option<AnswerParser>,
    has_begun: bool,
    has_calls: bool,
    is_over: bool,
}

impl Reducer {
    /// For runs of `n` choices each; `prefixes` (one for each run) come before the text; `shows_stop` appends the stop
    /// string that ended a choice.
    pub fn new(n: usize, prefixes: Vec<String>, shows_stop: bool) -> Self {
        let num_runs = prefixes.len();
        Reducer {
            n,
            choices: vec![Choice::default(); n * num_runs],
            usage: vec![(Tally::default(), None); num_runs],
            prefixes,
            prompt_logprobs: vec![None; num_runs],
            shows_stop,
        }
    }

    /// Every choice's text is read by a clone of `parser`.
    pub fn with_parser(mut self, parser: Option<AnswerParser>) -> Self {
        self.choices.iter_mut().for_each(|choice| choice.parser = parser.clone());
        self
    }

    /// Reads an answer that is not streamed to its end; what it used. Errors name `prompt_field` as the prompt.
    pub async fn drain(
        mut self,
        mut generation: Generation,
        prompt_field: &'static str,
        mut take: impl FnMut(Delta),
    ) -> ApiResult<Tally> {
        while let Some((run, event)) = generation.recv().await {
            let deltas = self.push(run, event).map_err(|e| ApiError::of_run(&e, prompt_field))?;
            deltas.into_iter().for_each(&mut take);
        }
        Ok(self.tally())
    }

    /// Takes the next event of a run.
    pub fn push(&mut self, run: usize, event: EngineEvent) -> Result<Vec<Delta>, RunError> {
        match event {
            EngineEvent::Started { prompt_tokens, cached_tokens } => {
                let tally = &mut self.usage[run].0;
                (tally.prompt_tokens, tally.cached_tokens) = (prompt_tokens, cached_tokens);
                Ok(Vec::new())
            }
            EngineEvent::PromptLogprobs { rows } => {
                self.prompt_logprobs[run] = Some(Arc::new(rows));
                Ok(Vec::new())
            }
            EngineEvent::Reading { .. } | EngineEvent::Preempted { .. } | EngineEvent::Embedding { .. } => {
                Ok(Vec::new())
            }
            EngineEvent::Text { choice, delta, tokens, logprobs } => {
                self.usage[run].0.output_tokens += tokens.len() as u32;
                Ok(self.text(run * self.n + choice as usize, delta, tokens, logprobs).into_iter().collect())
            }
            EngineEvent::Choice { choice, reason, .. } => Ok(vec![self.end(run * self.n + choice as usize, &reason)]),
            EngineEvent::Finished { reason, usage, .. } => {
                self.usage[run].1 = Some(usage);
                let open = (run * self.n..(run + 1) * self.n).filter(|&c| !self.choices[c].is_over);
                Ok(open.collect::<Vec<_>>().into_iter().map(|c| self.end(c, &reason)).collect())
            }
            EngineEvent::Failed { error } => Err(error),
        }
    }

    /// What was used so far.
    pub fn tally(&self) -> Tally {
        let mut all = Tally::default();
        for (counted, told) in &self.usage {
            let run = told.map_or(*counted, |usage| Tally {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                output_tokens: usage.output_tokens,
                reasoning_tokens: counted.reasoning_tokens,
            });
            all.prompt_tokens += run.prompt_tokens;
            all.cached_tokens += run.cached_tokens;
            all.output_tokens += run.output_tokens;
            all.reasoning_tokens += run.reasoning_tokens;
        }
        all
    }

    pub fn num_choices(&self) -> usize {
        self.choices.len()
    }

    fn text(
        &mut self,
        choice: usize,
        text: String,
        tokens: Vec<TokenId>,
        logprobs: Vec<TokenLogprobs>,
    ) -> Option<Delta> {
        let mut delta = self.begin(choice);
        let was_reasoning = self.choices[choice].is_reasoning();
        self.choices[choice].read(&text, &mut delta.parts);
        if was_reasoning || self.choices[choice].is_reasoning() {
            self.usage[choice / self.n].0.reasoning_tokens += tokens.len() as u32;
        }
        (delta.tokens, delta.logprobs) = (tokens, logprobs);
        let is_empty = delta.parts.is_empty() && delta.tokens.is_empty() && !delta.is_first;
        (!is_empty).then_some(delta)
    }

    fn begin(&mut self, choice: usize) -> Delta {
        let is_first = !std::mem::replace(&mut self.choices[choice].has_begun, true);
        let mut delta = Delta { choice, is_first, ..Delta::default() };
        if is_first {
            push_text(&mut delta.parts, self.prefixes[choice / self.n].clone());
            delta.prompt_logprobs = self.prompt_logprobs[choice / self.n].clone();
        }
        delta
    }

    fn end(&mut self, choice: usize, reason: &FinishReason) -> Delta {
        let mut delta = self.begin(choice);
        self.choices[choice].is_over = true;
        if let FinishReason::StopString(stop) = reason
            && self.shows_stop
        {
            self.choices[choice].read(stop, &mut delta.parts);
        }
        self.choices[choice].finish(&mut delta.parts);
        let stop = match reason {
            FinishReason::StopString(stop) => Some(StopCause::Text(stop.clone())),
            FinishReason::StopToken(token) => Some(StopCause::Token(*token)),
            _ => None,
        };
        // An answer that was cut off has no whole calls.
        let word = match reason.api_word() {
            "stop" if self.choices[choice].has_calls => "tool_calls",
            word => word,
        };
        delta.finish = Some(Finish { reason: word, stop });
        delta
    }
}

impl Choice {
    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(AnswerParser::is_reasoning)
    }

    fn read(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.parser {
            Some(parser) => parser.push(text, parts),
            None => push_text(parts, text.to_owned()),
        }
        self.has_calls |= parts.iter().any(|part| matches!(part, Part::ToolCall { .. }));
    }

    fn finish(&mut self, parts: &mut Vec<Part>) {
        if let Some(parser) = &mut self.parser {
            parser.finish(parts);
        }
        self.has_calls |= parts.iter().any(|part| matches!(part, Part::ToolCall { .. }));
    }
}

fn push_text(parts: &mut Vec<Part>, text: String) {
    if !text.is_empty() {
        parts.push(Part::Content(text));
    }
}
