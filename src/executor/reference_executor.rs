//! The whole model on the CPU in plain loops: what every kernel is held against.
