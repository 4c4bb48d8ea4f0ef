//! Tests: layers.
