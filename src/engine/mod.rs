//! The engine thread: commands in, events out, one step after the other.
//!
//! Guarantees: exactly one terminal event ends each run, also when the engine stops or panics; a slow or vanished client
//! never blocks a step; a failed step leaves every request able to go on from its tokens. It does not attempt to share
//! the GPU with a window: the engine owns its own device.
//!
//! Reading order: [`options`], [`handle`] (what everyone else sees), [`admission`], [`mailbox`], [`thread`], [`core`], [`run_state`],
//! [`choices`], [`branches`], [`output`], [`pooling`], [`scores`], [`beams`], [`stop_strings`], [`budget`], [`preempt_meter`], [`disk`],
//! [`prefetch`], [`record`], [`prefixes`], [`describe`], [`remote`] (an engine elsewhere), [`loader`], [`survey`], [`text_side`], [`memory_plan`], [`logits`], [`loras`], [`fake`].

mod admission;
pub mod beams;
pub mod branches;
pub mod budget;
pub mod canary;
pub mod choices;
pub mod core;
pub mod describe;
pub mod disk;
pub mod fake;
pub mod handle;
pub mod loader;
pub mod logits;
pub mod loras;
pub mod mailbox;
pub mod memory_plan;
pub mod options;
pub mod output;
mod placing;
pub mod pooling;
pub mod preempt_meter;
mod prefetch;
mod prefixes;
pub mod record;
mod recorder;
pub mod remote;
pub mod run_state;
mod scores;
pub mod stop_strings;
pub mod survey;
pub mod text_side;
pub mod thread;

pub use handle::{EngineHandle, Run};

#[cfg(test)]
mod tests;
