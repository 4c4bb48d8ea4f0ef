//! Tests: shaders.
