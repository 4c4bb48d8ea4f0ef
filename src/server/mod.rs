//! `kvasir serve`: the HTTP front end, for clients of OpenAI's API and for routers and dashboards made for vLLM.
//!
//! Guarantees: it talks to the engine through [`EngineHandle`] alone; streamed and whole answers come from one reducer;
//! a client that goes away frees its blocks within a step, and a slow one is merged, then cut off, and slows nobody;
//! known fields that are not supported are refused, never ignored; answers name no paths and no internals. It does not
//! attempt TLS or routing between replicas.
//!
//! Reading order: [`options`], [`fleet`] (the models), [`app`] (shared state), [`run`] (the process's side), [`routes`], [`openapi`] (their description), [`guard`] (keys, hosts,
//! request ids), [`error`], [`parse`], [`wire`] (the types on the wire), [`prepare`] (fields to engine requests),
//! [`prompt`] (messages to tokens), [`generation`] (engine events to deltas), [`structured`] (grammars), [`tools`], [`reasoning`], [`answer`] (text to parts), [`reducer`], [`sse`], [`metrics`], [`traces`], [`kv_events`], [`stall`], then a file per
//! endpoint.

mod adapters;
mod answer;
pub mod app;
mod blocks;
mod chat;
mod completions;
mod embeddings;
mod error;
mod fleet;
mod generation;
mod guard;
mod health;
mod infer;
mod inference;
#[cfg_attr(not(feature = "kv-events"), path = "no_kv_events.rs")]
mod kv_events;
pub mod local;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod observe;
mod openapi;
pub mod options;
mod parse;
mod prefixes;
mod prepare;
mod prompt;
mod reasoning;
mod reducer;
mod responses;
mod routes;
mod run;
mod sse;
mod stall;
mod structured;
mod tls;
mod tokens;
pub mod tools;
mod traces;
mod wire;

pub use fleet::{Fleet, FleetLimits, OnDemand};
pub use openapi::document as openapi_document;
pub use options::{KvEventFormat, KvEventOptions, ServerOptions};
pub use run::{ServeError, Server};
pub use tls::TlsFiles;
