//! Who computes what in the next step.
