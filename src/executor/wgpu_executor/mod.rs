//! The model on the GPU.
