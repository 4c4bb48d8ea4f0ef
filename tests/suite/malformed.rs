//! Tests: malformed.
