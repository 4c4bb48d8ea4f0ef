//! The plain data that crosses between the engine and those who use it: requests in, events out.
//!
//! Guarantees: every type here is `Send`, owns its data and names no engine internals. Exactly one terminal event
//! ([`EngineEvent::Finished`] or [`EngineEvent::Failed`]) ends each run.

mod output_rules;

pub use output_rules::{OutputRules, Pooling, TokenConstraint};

use crate::ids::{BlockId, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::mpsc::SyncSender;

/// Who a request belongs to: the chat or API client that colour, name and fairness come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OwnerTag {
    /// Stable identity: a chat id or an API client key.
    pub id: u64,
    /// What a person reads: the chat's title or the request's id.
    pub label: String,
}

/// How the next token is drawn. The stages run in this order: penalties, bias, temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 means greedy: the largest logit, the lowest id on ties.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides (multiplies) positive (negative) logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Draws are a function of (seed, position); `None` lets the engine draw a seed at submit and record it.
    pub seed: Option<u64>,
    /// How many alternatives to report per token (0 reports the chosen token only); `None` reports nothing.
    pub logprobs: Option<u8>,
}

impl SamplingParams {
    /// The most likely token, always.
    pub fn greedy() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
        }
    }

    /// True when some stage changes logits by what came before or by a bias list.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks ranges; the error names the field and the value.
    pub fn validate(&self) -> Result<(), InvalidParam> {
        let checks: [(&'static str, bool, f32, &'static str); 6] = [
            (
                "temperature",
                self.temperature.is_finite() && (0.0..=100.0).contains(&self.temperature),
                self.temperature,
                "must be between 0 and 100",
            ),
            ("top_p", self.top_p > 0.0 && self.top_p <= 1.0, self.top_p, "must be above 0 and at most 1"),
            ("min_p", (0.0..=1.0).contains(&self.min_p), self.min_p, "must be between 0 and 1"),
            (
                "repetition_penalty",
                self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
                self.repetition_penalty,
                "must be above 0",
            ),
            (
                "presence_penalty",
                (-2.0..=2.0).contains(&self.presence_penalty),
                self.presence_penalty,
                "must be between -2 and 2",
            ),
            (
                "frequency_penalty",
                (-2.0..=2.0).contains(&self.frequency_penalty),
                self.frequency_penalty,
                "must be between -2 and 2",
            ),
        ];
        for (field, ok, value, rule) in checks {
            if !ok {
                return Err(InvalidParam { field, message: format!("{rule}, not {value}") });
            }
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, b)| !b.is_finite()) {
            return Err(InvalidParam {
                field: "logit_bias",
                message: format!("must be finite, not {bias} (token {token})"),
            });
        }
        Ok(())
    }
}

/// A parameter out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {message}")]
pub struct InvalidParam {
    pub field: &'static str,
    pub message: String,
}

/// When a generation ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopRules {
    /// At most this many output tokens; `None` means up to the context.
    pub max_tokens: Option<u32>,
    /// End-of-sequence tokens and `stop_token_ids` do not count before this many output tokens.
    pub min_tokens: u32,
    /// Further tokens that end the output, besides the model's end-of-sequence tokens. The token is not part of the text.
    pub stop_token_ids: Vec<TokenId>,
    /// Strings that end the output; the text stops before the string.
    pub stop_strings: Vec<String>,
    /// Go on after the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

impl StopRules {
    /// Stop at the model's end of sequence or after `max_tokens`.
    pub fn max_tokens(max_tokens: u32) -> Self {
        StopRules {
            max_tokens: Some(max_tokens),
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            stop_strings: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// How the outputs of a request come to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decoding {
    /// `best_of` outputs are drawn, each from its own stream of random numbers; the `n` most likely (mean
    /// log-probability) are the choices. `1 <= n <= best_of`.
    Sample { n: u32, best_of: u32 },
    /// Beam search, as transformers' `generate(num_beams = …, do_sample = False)` defines it.
    Beam(BeamParams),
}

impl Decoding {
    /// One output.
    pub const ONE: Decoding = Decoding::Sample { n: 1, best_of: 1 };

    /// Sequences that run at once.
    pub fn num_sequences(&self) -> u32 {
        match self {
            Decoding::Sample { best_of, .. } => *best_of,
            Decoding::Beam(beam) => beam.width,
        }
    }

    /// Choices that the client gets.
    pub fn num_choices(&self) -> u32 {
        match self {
            Decoding::Sample { n, .. } => *n,
            Decoding::Beam(beam) => beam.num_return,
        }
    }
}

/// Beam search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BeamParams {
    /// Beams, at least 1.
    pub width: u32,
    /// Best sequences to return, at most `width`.
    pub num_return: u32,
    /// A finished sequence's score is its summed log-probability / length ^ `length_penalty`.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
}

/// When a beam search with `width` finished sequences ends (transformers' `early_stopping`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EarlyStopping {
    /// `true`: at once.
    AtOnce,
    /// `false`: when the best running beam, at its present length, cannot beat the worst finished one.
    Heuristic,
    /// `"never"`: only when no running beam can beat the worst finished one at any length.
    Never,
}

/// One generation. Text is already tokens here: templates and encoding run on the caller's thread.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub owner: OwnerTag,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub stop: StopRules,
    pub decoding: Decoding,
    /// Under the priority policy the lowest runs first.
    pub priority: i32,
    /// Prefix blocks are shared only between requests of equal salt and adapter.
    pub cache_salt: u64,
    /// The weights' adapter (LoRA); 0 is none.
    pub adapter: u64,
}

impl GenerateRequest {
    /// A prompt that is read for its pooled hidden state ([`OutputRules::pooling`]); the one token that is drawn means nothing.
    pub fn embedding(owner: OwnerTag, prompt: Vec<TokenId>) -> Self {
        GenerateRequest {
            owner,
            prompt,
            sampling: SamplingParams { seed: Some(0), ..SamplingParams::greedy() },
            stop: StopRules::max_tokens(1),
            decoding: Decoding::ONE,
            priority: 0,
            cache_salt: 0,
            adapter: 0,
        }
    }
}

/// Why the output ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model's end of sequence or a stop token.
    StopToken(TokenId),
    /// A stop string; the text ends before it.
    StopString(String),
    /// `max_tokens` reached.
    MaxTokens,
    /// The context (`max_model_len`) is full.
    ContextFull,
    /// The client asked for the end or went away.
    Aborted,
    /// It was the request of a prefix, which is computed and pinned.
    Pinned,
}

impl FinishReason {
    /// The word that OpenAI's API uses.
    pub fn api_word(&self) -> &'static str {
        match self {
            FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Pinned => "stop",
            FinishReason::MaxTokens | FinishReason::ContextFull => "length",
            FinishReason::Aborted => "abort",
        }
    }
}

/// What a run used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the prefix cache at first admission.
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub preemptions: u32,
}

/// When things happened, in microseconds since submit; steps as numbered by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunTimings {
    /// Submit to first admission.
    pub queue_us: u64,
    /// Submit to first output token; 0 when there was none.
    pub ttft_us: u64,
    /// First output token to last.
    pub decode_us: u64,
    pub first_step: u64,
    pub last_step: u64,
}

/// Log-probability of a chosen token and of its alternatives, natural logarithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub token: TokenId,
    pub logprob: f32,
    /// Most likely first.
    pub top: Vec<(TokenId, f32)>,
}

/// What the engine tells the one client of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// First admitted to the batch.
    Started { prompt_tokens: u32, cached_tokens: u32 },
    /// The prompt is being read; also after a preemption, when text was already sent.
    Reading { computed: u32, total: u32 },
    /// Paused for memory; it resumes by itself.
    Preempted { kept_tokens: u32 },
    /// New text of a choice. `tokens` are the ids committed since the last event; `delta` may be empty while a character
    /// or a possible stop string is incomplete. Of `best_of` and beam search the choices come whole, at the end.
    Text { choice: u32, delta: String, tokens: Vec<TokenId>, logprobs: Vec<TokenLogprobs> },
    /// One of several choices, or an output of a beam search, ended; a request for one sampled choice sends none.
    Choice {
        choice: u32,
        reason: FinishReason,
        /// Summed log-probability of the output's tokens, where it was computed.
        cumulative_logprob: Option<f32>,
        /// What a beam search ranks by.
        score: Option<f32>,
    },
    /// The log-probabilities of the prompt's tokens but the first, given those before, of a run that asked for them; it
    /// comes before any text.
    PromptLogprobs { rows: Vec<TokenLogprobs> },
    /// The prompt's pooled hidden state, after the model's last norm, of a run that asked for it. [hidden_size]
    Embedding { values: Vec<f32> },
    /// The one terminal event of a run that ended well.
    Finished { reason: FinishReason, usage: Usage, timings: RunTimings },
    /// The one terminal event of a run that did not.
    Failed { error: RunError },
}

impl EngineEvent {
    /// True for the last event of a run.
    pub fn is_terminal(&self) -> bool {
        matches!(self, EngineEvent::Finished { .. } | EngineEvent::Failed { .. })
    }
}

/// Why a run could not start or go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    #[error("no model is loaded")]
    NoModel,
    #[error("this checkpoint has no output head; it can be used with kvasir embed and /v1/embeddings")]
    NoHead,
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("token id {token} of the prompt is outside the vocabulary of {vocab} tokens")]
    TokenOutOfRange { token: TokenId, vocab: u32 },
    #[error("the prompt has {prompt} tokens, the context holds {max_model_len}")]
    PromptTooLong { prompt: u32, max_model_len: u32 },
    #[error("prompt and max_tokens need {needed} tokens, the context holds {max_model_len}")]
    ContextExceeded { needed: u32, max_model_len: u32 },
    #[error("the request needs {needed} KV blocks, the pool has {total}")]
    NeverFits { needed: u32, total: u32 },
    #[error("the prefix needs {needed} KV blocks; {pinned} are pinned, at most {limit} can be")]
    PinLimit { needed: u32, pinned: u32, limit: u32 },
    #[error("the prefix could not be kept: one of its blocks cannot be found by what it holds")]
    PrefixLost,
    #[error(transparent)]
    InvalidParam(#[from] InvalidParam),
    #[error("the queue is full ({limit} requests wait)")]
    QueueFull { limit: u32 },
    #[error("the model produced a logit that is not a number at position {position}")]
    NotFinite { position: u32 },
    #[error("the KV cache of request {request} is damaged at position {position} (block {block})")]
    Corrupted { request: RequestId, position: u32, block: BlockId },
    #[error("the engine failed: {0}")]
    Engine(String),
    #[error("the engine has shut down")]
    ShutDown,
}

/// A prefix to be computed now and kept until it is unpinned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRequest {
    pub owner: OwnerTag,
    /// What a person calls it.
    pub name: Option<String>,
    /// Its whole blocks are kept; it must fill at least one.
    pub tokens: Vec<TokenId>,
    pub cache_salt: u64,
    pub adapter: u64,
}

/// What can be done with prefixes. Ids are those of telemetry's `PrefixInfo`.
#[derive(Debug)]
pub enum PrefixCommand<Sink> {
    Pin {
        id: RequestId,
        request: Box<PinRequest>,
        events: Sink,
    },
    /// Pins (or names anew) a prefix that the cache has.
    Keep {
        id: RequestId,
        prefix: u64,
        name: Option<String>,
        owner: OwnerTag,
        events: Sink,
    },
    /// Tells whether there was such a pin.
    Unpin {
        id: u64,
        told: SyncSender<bool>,
    },
    /// Tells whether anything was evicted.
    Evict {
        id: u64,
        told: SyncSender<bool>,
    },
    /// Forgets every prefix that is not pinned.
    Reset,
}

/// What a handle may ask of the engine thread.
#[derive(Debug)]
pub enum EngineCommand<Load, Sink> {
    Submit {
        id: RequestId,
        request: Box<GenerateRequest>,
        rules: OutputRules,
        events: Sink,
    },
    /// A run whose prompt is the first `keep_tokens` tokens of `parent`, then the request's own.
    Fork {
        id: RequestId,
        parent: RequestId,
        keep_tokens: u32,
        request: Box<GenerateRequest>,
        events: Sink,
    },
    Abort {
        id: RequestId,
    },
    Prefix(PrefixCommand<Sink>),
    Load(Load),
    Unload,
    Pause,
    Resume,
    /// Damages a block of the KV cache, to show that the canary notices.
    CorruptBlock {
        block: BlockId,
    },
    Shutdown,
}
