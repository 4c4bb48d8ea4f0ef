//! Tests: golden.
