//! Tests: sim.
