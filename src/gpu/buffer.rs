//! GPU memory: allocation that reports when there is none left, slices, and uploads of bounded staging. What is read as
//! texels ([`super::texels`]) is memory of the same kind, with another way in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Gpu;
use super::error::GpuError;
use super::streamed::Capture;
use super::texels::Texels;

/// What a buffer is bound as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferUse {
    Storage,
    Uniform,
}

/// Bytes on the GPU. Clones share them; the last one frees.
///
/// wgpu tracks hazards by whole buffers: one buffer must not be bound read-only and read-write in the same dispatch.
#[derive(Clone)]
pub struct Buffer(Arc<Allocation>);

struct Allocation {
    raw: Raw,
    size: u64,
    label: String,
    allocated_bytes: Arc<AtomicU64>,
}

enum Raw {
    Buffer(wgpu::Buffer),
    Texels(Texels),
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.allocated_bytes.fetch_sub(self.size, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes)", self.0.label, self.size())
    }
}

impl Buffer {
    pub fn label(&self) -> &str {
        &self.0.label
    }

    pub fn size(&self) -> u64 {
        self.0.size
    }

    /// True for memory that kernels read as texels.
    pub fn is_texels(&self) -> bool {
        self.texels().is_some()
    }

    /// Panics on texels, which have their own ways in and out.
    pub(super) fn raw(&self) -> &wgpu::Buffer {
        match &self.0.raw {
            Raw::Buffer(raw) => raw,
            Raw::Texels(_) => panic!("{} is read as texels", self.0.label),
        }
    }

    /// The texture behind it, where it was allocated as one.
    pub(super) fn texels(&self) -> Option<&Texels> {
        match &self.0.raw {
            Raw::Buffer(_) => None,
            Raw::Texels(texels) => Some(texels),
        }
    }

    pub(super) fn of_texels(gpu: &Gpu, label: &str, size: u64, texels: Texels) -> Buffer {
        gpu.allocated_bytes.fetch_add(size, Ordering::Relaxed);
        let allocated_bytes = gpu.allocated_bytes.clone();
        Buffer(Arc::new(Allocation { raw: Raw::Texels(texels), size, label: label.into(), allocated_bytes }))
    }

    pub fn whole(&self) -> BufferSlice {
        BufferSlice { buffer: self.clone(), offset: 0, size: self.size() }
    }

    /// Bytes `offset..offset + size`; they must lie within the buffer.
    pub fn slice(&self, offset: u64, size: u64) -> BufferSlice {
        let end = offset.checked_add(size);
        assert!(end.is_some_and(|end| end <= self.size()), "slice {offset}+{size} of {self:?}");
        BufferSlice { buffer: self.clone(), offset, size }
    }

    /// True for clones of one allocation.
    pub fn is_same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A range of a buffer.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    pub buffer: Buffer,
    pub offset: u64,
    pub size: u64,
}

impl BufferSlice {
    /// Whether both are the same bytes of the same buffer.
    pub fn is_same(&self, other: &BufferSlice) -> bool {
        Arc::ptr_eq(&self.buffer.0, &other.buffer.0) && (self.offset, self.size) == (other.offset, other.size)
    }
}

/// Staging of one piece of an upload.
const UPLOAD_PIECE: usize = 4 << 20;
/// Bytes that may be staged before the GPU has taken them over.
pub(super) const UPLOAD_IN_FLIGHT: usize = 16 << 20;

impl Gpu {
    /// Allocates `size` bytes (rounded up to 4), zeroed at first use.
    pub fn alloc(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer, GpuError> {
        let size = size.max(4).next_multiple_of(4);
        let out_of_memory = |reason: String| GpuError::OutOfMemory { what: label.into(), bytes: size, reason };
        if size > self.caps.max_buffer_bytes {
            return Err(out_of_memory(format!("this adapter's buffers hold {} bytes", self.caps.max_buffer_bytes)));
        }
        let usage = match usage {
            BufferUse::Storage => wgpu::BufferUsages::STORAGE,
            BufferUse::Uniform => wgpu::BufferUsages::UNIFORM,
        };
        let desc = wgpu::BufferDescriptor {
            label: Some(label),
            size,
            usage: usage | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        };
        let raw = self.scoped(label, size, || self.device.create_buffer(&desc))?;
        self.allocated_bytes.fetch_add(size, Ordering::Relaxed);
        let (raw, allocated_bytes) = (Raw::Buffer(raw), self.allocated_bytes.clone());
        Ok(Buffer(Arc::new(Allocation { raw, size, label: label.into(), allocated_bytes })))
    }

    /// Writes to the start of a slice before the next submit. Once per step for metadata; see [`Uploader`] for weights.
    /// The length must be a multiple of 4 (of 16 in a line of texels) and fit.
    pub fn write(&self, to: &BufferSlice, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= to.size, "{} bytes into {to:?}", bytes.len());
        assert!(bytes.len().is_multiple_of(4), "writes are whole words");
        match to.buffer.texels() {
            Some(line) => line.write_line(self, to.offset, bytes),
            None => self.queue.write_buffer(to.buffer.raw(), to.offset, bytes),
        }
    }

    /// Copies a slice back, waiting for everything submitted so far. For tests and loading, not for the step loop.
    pub fn read(&self, from: &BufferSlice) -> Result<Vec<u8>, GpuError> {
        let mut replayer = super::replay::Replayer::new(self);
        let ticket = replayer.submit(self, &super::Recording::new("read"), std::slice::from_ref(from))?;
        let finished = replayer.wait(self, ticket)?;
        Ok(finished.readback.into_iter().next().unwrap_or_default())
    }

    /// Waits until the GPU has done all that was submitted.
    pub fn wait_idle(&self) -> Result<(), GpuError> {
        super::replay::wait_for(self, None)
    }
}

/// Uploads much data with little staging: pieces of 4 MiB, at most 16 MiB on their way.
pub struct Uploader<'g> {
    pub(super) gpu: &'g Gpu,
    pub(super) pending: usize,
    pub(super) capture: Option<Capture>,
}

impl<'g> Uploader<'g> {
    pub fn new(gpu: &'g Gpu) -> Uploader<'g> {
        Uploader { gpu, pending: 0, capture: None }
    }

    /// Writes to the start of a slice; the length must be a multiple of 4 and fit.
    pub fn write(&mut self, to: &BufferSlice, bytes: &[u8]) -> Result<(), GpuError> {
        assert!(bytes.len() as u64 <= to.size, "{} bytes into {to:?}", bytes.len());
        assert!(bytes.len().is_multiple_of(4), "writes are whole words");
        if self.capture.as_mut().is_some_and(|capture| capture.keep_bytes(to, bytes)) {
            return Ok(());
        }
        let mut offset = to.offset;
        for piece in bytes.chunks(UPLOAD_PIECE) {
            if self.pending + piece.len() > UPLOAD_IN_FLIGHT {
                self.flush()?;
            }
            self.gpu.queue.write_buffer(to.buffer.raw(), offset, piece);
            self.pending += piece.len();
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Waits until all writes have arrived, and reports what failed.
    pub fn flush(&mut self) -> Result<(), GpuError> {
        {
            let _turn = self.gpu.take_turn();
            self.gpu.queue.submit([]);
        }
        self.pending = 0;
        self.gpu.wait_idle()
    }
}
