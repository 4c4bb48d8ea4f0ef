//! The Inspect workspace: what the engine does, block by block and step by step.
//! Tests: app.
