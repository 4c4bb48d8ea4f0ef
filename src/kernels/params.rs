//! Parameters of every (kernel, layer): 256-byte slots of uniform buffers, written at load and never again.

use bytemuck::Pod;

use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, GpuError};

/// Offset alignment that every adapter accepts for a uniform binding.
const SLOT_BYTES: u64 = 256;
const SLOTS_PER_BUFFER: u64 = 256;

/// Hands out slots, a buffer of 256 at a time.
#[derive(Debug, Default)]
pub struct ParamArena {
    buffers: Vec<Buffer>,
    used: u64,
}

impl ParamArena {
    pub fn new() -> ParamArena {
        ParamArena::default()
    }

    /// Writes `value` into a fresh slot. `T` mirrors a WGSL struct of 4-byte scalars.
    pub fn push<T: Pod>(&mut self, gpu: &Gpu, value: &T) -> Result<BufferSlice, GpuError> {
        let bytes = bytemuck::bytes_of(value);
        assert!(bytes.len() as u64 <= SLOT_BYTES, "parameters of {} bytes do not fit a slot", bytes.len());
        let idx = self.used % SLOTS_PER_BUFFER;
        if idx == 0 {
            self.buffers.push(gpu.alloc("params", SLOT_BYTES * SLOTS_PER_BUFFER, BufferUse::Uniform)?);
        }
        self.used += 1;
        let buffer = self.buffers.last().expect("one was just pushed, or is not full");
        let slice = buffer.slice(idx * SLOT_BYTES, bytes.len() as u64);
        gpu.write(&slice, bytes);
        Ok(slice)
    }
}
