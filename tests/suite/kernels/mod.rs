//! Each kernel against its `reference()`, over odd shapes, on every adapter class that the machine can stand in for.

mod gpu;
pub mod harness;
