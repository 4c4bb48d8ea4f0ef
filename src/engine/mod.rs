//! The engine thread: commands in, events out, one step after the other.
