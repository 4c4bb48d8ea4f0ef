//! Files on disk become facts: headers, specs, tensor bytes. Nothing here knows a GPU.

pub mod dtype;
pub mod spec;
