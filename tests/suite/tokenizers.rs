//! Tests: tokenizers.
