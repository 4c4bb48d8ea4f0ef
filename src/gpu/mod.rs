//! wgpu without language models: devices, shaders, pipelines, buffers, recordings.
//!
//! Guarantees:
//! - Nothing here panics on a missing adapter, a refused allocation, a broken shader or a lost device: each becomes a
//!   [`GpuError`]. Faults that wgpu reports late are kept and returned by [`Gpu::check`].
//! - Work is described first ([`Recording`], plain data) and done later ([`Replayer::submit`]: one encoder, one compute
//!   pass for each run of dispatches, one submit).
//! - Bindings and workgroup sizes come from the shader itself (naga reflection) and are never typed twice.
//!
//! Not attempted: sharing a device with a window, several devices at once, images other than memory read as texels.

pub mod buffer;
mod compiler;
pub mod device;
pub mod error;
mod expr;
pub mod pipeline;
mod probe;
pub mod recording;
pub mod replay;
pub mod shader;
pub mod sources;
pub mod streamed;
pub mod texels;

pub use buffer::{Buffer, BufferSlice, BufferUse, Uploader};
pub use device::{AdapterReport, Gpu, GpuBackend, GpuCaps, GpuRequest};
pub use error::GpuError;
pub use pipeline::{Bound, Kernel};
pub use recording::{Command, Recording};
pub use replay::{Finished, InFlight, Replayer, SubmitStats};
pub use shader::{Defines, ShaderError, Stitched};
pub use streamed::Streamed;
