//! The Inspect workspace: what the engine does, block by block and step by step.
//! Tests: app.

pub mod grid;
pub mod history;
pub mod kpi;
pub mod map;
pub mod model;
pub mod requests;
pub mod words;
