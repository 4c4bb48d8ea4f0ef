//! Each kernel against its `reference()`, over odd shapes, on every adapter class that the machine can stand in for.

mod attention;
mod copy_blocks;
mod experts;
mod feed;
mod fused;
mod gpu;
pub mod harness;
mod heads_norm;
mod latent_write;
mod long_context;
mod lora;
mod mask;
mod matmul;
mod matrix_units;
mod rope_kv_write;
mod rows;
mod sample;
mod tune;
