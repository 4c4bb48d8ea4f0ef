//! Tests: noop_device.
