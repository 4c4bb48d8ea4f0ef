//! The engine thread: commands in, events out, one step after the other.
//!
//! Guarantees: exactly one terminal event ends each run, also when the engine stops or panics; a slow or vanished client
//! never blocks a step; a failed step leaves every request able to go on from its tokens. It does not attempt to share
//! the GPU with a window: the engine owns its own device.
//!
//! Reading order: [`options`], [`handle`] (what everyone else sees), [`mailbox`], [`thread`], [`core`], [`output`],
//! [`budget`], [`loader`], [`fake`].

pub mod budget;
pub mod handle;
pub mod mailbox;
pub mod options;
pub mod stop_strings;

pub use handle::{EngineHandle, Run};
