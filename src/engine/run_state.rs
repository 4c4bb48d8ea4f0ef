//! What the engine keeps of a live run beside the scheduler's sequence: its client, its text, its times.

use super::mailbox::EventSink;
use super::output::TextOutput;
use crate::ids::{RequestId, TokenId};
use crate::protocol::{EngineEvent, FinishReason, OwnerTag, RunTimings, TokenLogprobs};
use crate::scheduler::Sequence;
use crate::telemetry::{RequestInfo, RequestState, WaitReason};

/// A live run. Times are microseconds since the engine started.
pub struct LiveRun {
    pub owner: OwnerTag,
    pub events: EventSink,
    text: TextOutput,
    submitted_us: u64,
    admitted_us: Option<u64>,
    first_token_us: Option<u64>,
    last_token_us: Option<u64>,
    first_step: u64,
    last_step: u64,
    /// Output tokens turned to text so far.
    num_emitted: usize,
}

/// When a step was committed.
#[derive(Clone, Copy, Debug)]
pub struct StepTime {
    pub step: u64,
    pub now_us: u64,
}

impl LiveRun {
    pub fn new(owner: OwnerTag, events: EventSink, text: TextOutput, submitted_us: u64) -> Self {
        LiveRun {
            owner,
            events,
            text,
            submitted_us,
            admitted_us: None,
            first_token_us: None,
            last_token_us: None,
            first_step: 0,
            last_step: 0,
            num_emitted: 0,
        }
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

    /// Turns a committed token to text; the stop string that it completed, if any.
    pub fn token(
        &mut self,
        at: StepTime,
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        is_stop_token: bool,
    ) -> Option<String> {
        self.progress(at);
        self.num_emitted += 1;
        if is_stop_token {
            self.events.push(self.text.push_stop_token(token, logprobs));
            return None;
        }
        let piece = self.text.push(token, logprobs);
        self.events.push(piece.event);
        piece.stop
    }

    /// A step brought the run further, though no text is told yet.
    pub fn progress(&mut self, at: StepTime) {
        self.first_token_us.get_or_insert(at.now_us);
        self.last_token_us = Some(at.now_us);
        self.last_step = at.step;
    }

    /// Output tokens turned to text so far.
    pub fn num_emitted(&self) -> usize {
        self.num_emitted
    }

    /// Sends what was held back, unless a stop string or the client ended the run.
    pub fn flush(&mut self, reason: &FinishReason) {
        if !matches!(reason, FinishReason::StopString(_))
            && let Some(event) = self.text.flush()
        {
            self.events.push(event);
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

    /// The run as the app shows it, while its sequence lives.
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
            parent: seq.parent(),
            choice: seq.gang().map_or(0, |gang| (seq.id().0 - gang.0) as u32),
            priority: 0,
            swapped_blocks: 0,
            preemptions: seq.preemptions(),
            submitted_us: self.submitted_us,
            first_token_us: self.first_token_us,
            last_token_us: self.last_token_us,
            finish: None,
        }
    }

    /// The run as the app shows it after its end.
    pub fn finished_info(&self, id: RequestId, usage: crate::protocol::Usage, reason: FinishReason) -> RequestInfo {
        RequestInfo {
            id,
            owner: self.owner.clone(),
            state: RequestState::Finished,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            output_tokens: usage.output_tokens,
            num_computed: 0,
            blocks: Vec::new(),
            parent: None,
            choice: 0,
            priority: 0,
            swapped_blocks: 0,
            preemptions: usage.preemptions,
            submitted_us: self.submitted_us,
            first_token_us: self.first_token_us,
            last_token_us: self.last_token_us,
            finish: Some(reason),
        }
    }
}
