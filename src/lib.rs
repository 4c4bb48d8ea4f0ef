//! Kvasir: a portable LLM inference engine and the app that shows it at work.
//!
//! The modules below are in reading order; plain data flows down the list. `ARCHITECTURE.md` has the whole picture.
//!
//! Three kinds of code are kept apart: *deciding* (CPU, pure: [`kv`], [`scheduler`], [`batch`], [`sampling`]),
//! *describing* ([`protocol`], [`telemetry`]) and *doing* ([`gpu`], [`kernels`], [`executor`], [`engine`], [`server`],
//! [`app`]).

pub mod app;
pub mod batch;
pub mod cli;
pub mod config;
pub mod constrain;
pub mod engine;
pub mod executor;
pub mod gpu;
pub mod ids;
pub mod kernels;
pub mod kv;
pub mod memory;
pub mod model;
pub mod protocol;
pub mod recording;
pub mod sampling;
pub mod scheduler;
pub mod server;
pub mod sim;
pub mod telemetry;
pub mod tokenizer;
