//! All tests that need more than one module, in one binary: one link, one process that shares a GPU device.
//! `cargo test --release sim` filters as usual.

mod advice;
mod app;
mod base_models;
mod beam;
mod canary;
mod cli;
mod fuzz;
mod gguf_forms;
mod golden;
mod jump_forward;
mod kernels;
mod layers;
mod long_context;
mod lora;
mod malformed;
mod metamorphic;
mod models;
mod noop_device;
mod pacing;
mod quantised;
mod quantize;
mod queue_sim;
mod recording;
mod sampling;
mod server;
mod shaders;
mod sim;
mod steps_ahead;
mod support;
mod tidy;
mod tokenizers;
mod windows;
