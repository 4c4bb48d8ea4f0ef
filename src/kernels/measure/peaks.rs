//! What an adapter can do at best: copy memory, and multiply and add. Kernels are held against these.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};

use super::seconds_of;
use crate::gpu::{BufferUse, Gpu, GpuError};
use crate::kernels::{Class, ParamArena};

/// Mirrors `Params` of peak.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub rounds: u32,
    pub factor: f32,
}

/// Measured limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Bytes read and bytes written of a large copy.
    pub stream_gb_per_s: f64,
    /// f32 multiply-adds in registers, two operations each.
    pub fma_gflops: f64,
}

/// Larger than caches, where the adapter lets buffers be.
const COPY_BYTES: u64 = 128 << 20;
const WORKGROUPS: u32 = 2048;
const ROUNDS: u32 = 128;
const FMA_OF_ROUND: u32 = 32;

/// Measures each for about `budget`.
pub fn peaks(gpu: &Gpu, budget: Duration) -> Result<Peaks, GpuError> {
    let bytes = COPY_BYTES.min(gpu.caps().max_buffer_bytes);
    let alloc = |label| gpu.alloc(label, bytes, BufferUse::Storage);
    let (from, to) = (alloc("copied from")?, alloc("copied to")?);
    let copy = seconds_of(gpu, &mut |recording| recording.copy(from.whole(), to.whole()), budget)?;

    let class = Class::of(gpu.caps());
    let lanes = u64::from(WORKGROUPS) * u64::from(class.lanes());
    let y = gpu.alloc("peak", 4 * lanes, BufferUse::Storage)?;
    let params = ParamArena::new().push(gpu, &Params { rounds: ROUNDS, factor: 0.999 })?;
    let kernel = gpu.kernel("peak", &class.defines())?;
    let bound = gpu.bind(&kernel, &[("y", &y.whole()), ("params", &params)])?;
    let fma = seconds_of(gpu, &mut |recording| recording.dispatch("peak", &bound, WORKGROUPS), budget)?;
    let operations = 2 * lanes * u64::from(ROUNDS * FMA_OF_ROUND);
    Ok(Peaks { stream_gb_per_s: 2.0 * bytes as f64 / copy / 1e9, fma_gflops: operations as f64 / fma / 1e9 })
}
