//! Memory on the GPU that several owners take turns with: each owner's content lies in host memory, and is written to the
//! GPU anew before it is read ([`super::Command::Load`]).
//!
//! Guarantees: memory of one size and kind within a slot is shared by all owners of the slot; what is written is what the
//! owner uploaded, in the same pieces. Not attempted: transfers on a queue of their own, which wgpu does not have.

use super::buffer::{Buffer, BufferSlice, BufferUse, Uploader};
use super::device::Gpu;
use super::error::GpuError;

/// Memory that owners share, one at a time.
#[derive(Debug, Default)]
pub struct Slot {
    memory: Vec<(Kind, Buffer)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bytes(u64),
    Texels((u32, u32), u32),
}

/// An upload to a slot under way.
#[derive(Debug, Default)]
pub(super) struct Capture {
    slot: Slot,
    /// Of each memory of the slot, whether the owner has it.
    is_taken: Vec<bool>,
    writes: Vec<Write>,
}

/// An owner's content.
#[derive(Debug)]
pub struct Streamed {
    writes: Vec<Write>,
}

#[derive(Debug)]
enum Write {
    Bytes { to: BufferSlice, bytes: Vec<u8> },
    Texels { to: Buffer, at: (u32, u32), extent: (u32, u32), bytes: Vec<u8> },
}

impl Streamed {
    /// Bytes in host memory.
    pub fn num_bytes(&self) -> u64 {
        let len = |write: &Write| match write {
            Write::Bytes { bytes, .. } | Write::Texels { bytes, .. } => bytes.len() as u64,
        };
        self.writes.iter().map(len).sum()
    }

    /// Stages all of it behind what was submitted so far.
    pub(super) fn stage(&self, gpu: &Gpu) {
        for write in &self.writes {
            match write {
                Write::Bytes { to, bytes } => gpu.write(to, bytes),
                Write::Texels { to, at, extent, bytes } => gpu.write_texels(to, *at, *extent, bytes),
            }
        }
    }
}

impl Capture {
    fn take(&mut self, kind: Kind, make: impl FnOnce() -> Result<Buffer, GpuError>) -> Result<Buffer, GpuError> {
        let is_free = |i: &usize| self.slot.memory[*i].0 == kind && !self.is_taken[*i];
        if let Some(i) = (0..self.slot.memory.len()).find(is_free) {
            self.is_taken[i] = true;
            return Ok(self.slot.memory[i].1.clone());
        }
        let buffer = make()?;
        self.slot.memory.push((kind, buffer.clone()));
        self.is_taken.push(true);
        Ok(buffer)
    }

    fn owns(&self, buffer: &Buffer) -> bool {
        self.slot.memory.iter().any(|(_, own)| own.is_same(buffer))
    }

    /// Keeps a write to the slot; false for one to other memory.
    pub(super) fn keep_bytes(&mut self, to: &BufferSlice, bytes: &[u8]) -> bool {
        let is_own = self.owns(&to.buffer);
        if is_own {
            self.writes.push(Write::Bytes { to: to.clone(), bytes: bytes.to_vec() });
        }
        is_own
    }

    /// As [`Capture::keep_bytes`].
    pub(super) fn keep_texels(&mut self, to: &Buffer, at: (u32, u32), extent: (u32, u32), bytes: &[u8]) -> bool {
        let is_own = self.owns(to);
        if is_own {
            self.writes.push(Write::Texels { to: to.clone(), at, extent, bytes: bytes.to_vec() });
        }
        is_own
    }
}

impl Uploader<'_> {
    /// From now on [`Uploader::alloc`] takes memory of the slot, and what is written there stays in host memory.
    pub fn begin_streamed(&mut self, slot: Slot) {
        let is_taken = vec![false; slot.memory.len()];
        self.capture = Some(Capture { slot, is_taken, writes: Vec::new() });
    }

    /// The slot for the next owner, and the content of this one.
    pub fn end_streamed(&mut self) -> (Slot, Streamed) {
        let Capture { slot, writes, .. } = self.capture.take().unwrap_or_default();
        (slot, Streamed { writes })
    }

    /// Memory for what is uploaded: of its own, or shared in a slot.
    pub fn alloc(&mut self, label: &str, size: u64) -> Result<Buffer, GpuError> {
        let gpu = self.gpu;
        let make = || gpu.alloc(label, size, BufferUse::Storage);
        match &mut self.capture {
            Some(capture) => capture.take(Kind::Bytes(size), make),
            None => make(),
        }
    }

    /// As [`Uploader::alloc`], of texels.
    pub fn alloc_texels(&mut self, label: &str, extent: (u32, u32), texel_bytes: u32) -> Result<Buffer, GpuError> {
        let gpu = self.gpu;
        let make = || gpu.alloc_texels(label, extent, texel_bytes);
        match &mut self.capture {
            Some(capture) => capture.take(Kind::Texels(extent, texel_bytes), make),
            None => make(),
        }
    }
}
