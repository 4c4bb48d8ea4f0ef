//! The types on the wire. Requests know every field that has a meaning here; others are accepted and left alone.

pub mod chat;
pub mod completion;
pub mod messages;
pub mod responses;
mod sampling;
mod usage;

pub use sampling::{EarlyStoppingField, EarlyStoppingWord, SamplingFields, StopField, StreamOptions};
pub use usage::{
    CompletionTokensDetails, PromptLogprob, PromptLogprobs, PromptTokensDetails, RenderedPrompt, StopCause, UsageBody,
};
