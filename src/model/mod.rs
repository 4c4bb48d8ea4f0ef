//! Files on disk become facts: headers, specs, tensor bytes. Nothing here knows a GPU.
//!
//! [`Model::open`] is the door: it accepts a GGUF file or a Hugging Face folder, checks everything that can be checked
//! from headers (and the values of the small tensors), and hands out tensors by [`spec::WeightRole`]. Formats are read by
//! [`gguf`] and [`safetensors`], families are described in [`arch`], one small file each.
//!
//! Guarantees: no input file makes this panic, loop or allocate beyond a small multiple of its headers; what is not
//! supported is refused by name. It does not convert or copy weights.

pub mod alibi;
pub mod arch;
mod base;
pub mod catalog;
pub mod checkpoint;
pub mod coded;
pub mod dtype;
pub mod error;
pub mod experts;
pub mod files;
pub mod gguf;
pub mod gguf_types;
pub mod groups;
pub mod hub;
pub mod inspect;
pub mod latent;
pub(crate) mod location;
pub mod lora;
pub mod packed;
pub mod quant;
pub mod quantise;
pub mod rope;
pub mod safetensors;
pub mod sidecar;
pub mod spec;

pub use checkpoint::{Model, ModelFormat, ModelInfo, TensorFacts, TensorView, WeightForm};
pub use error::ModelError;
