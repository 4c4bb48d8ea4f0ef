//! Each kernel against its `reference()`, over odd shapes, on every adapter class that the machine can stand in for.

mod attention;
mod copy_blocks;
mod gpu;
pub mod harness;
mod mask;
mod matmul;
mod rope_kv_write;
mod rows;
mod sample;
