//! Tests: sampling.
