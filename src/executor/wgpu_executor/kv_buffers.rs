//! Everything on the GPU that is indexed by a block id.
//!
//! Guarantees: a block is one contiguous run of bytes in each plane, and the planes together are all that a block holds.
//! What copies or swaps blocks walks [`KvBuffers::planes`] and needs to know nothing else about formats.

use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, GpuError};
use crate::kernels::canary;
use crate::kernels::kv_layout::KvLayout;
use crate::model::spec::ModelSpec;

/// The KV pool: keys and values of each layer, and the canary's marks.
#[derive(Clone, Debug)]
pub struct KvBuffers {
    pub layout: KvLayout,
    /// One entry for each layer of a group: layer j of every group lives in entry j.
    pub layers: Vec<LayerKv>, // [layers of a group]
    /// Marks of the slots, when the canary is on.
    pub marks: Option<Buffer>,
    /// Values are read from the rows of keys (latent attention).
    is_one: bool,
}

/// One layer's keys and values.
#[derive(Clone, Debug)]
pub struct LayerKv {
    pub k: Buffer,
    pub v: Buffer,
}

/// One buffer in which block `b` is bytes `b * block_bytes..(b + 1) * block_bytes`; a multiple of 4.
#[derive(Clone, Copy, Debug)]
pub struct Plane<'a> {
    pub buffer: &'a Buffer,
    pub block_bytes: u64,
}

impl Plane<'_> {
    pub fn block(&self, block: u32) -> BufferSlice {
        self.buffer.slice(u64::from(block) * self.block_bytes, self.block_bytes)
    }
}

impl KvBuffers {
    /// Buffers for so many layers of this model: those of one group.
    pub fn alloc(
        gpu: &Gpu,
        layout: KvLayout,
        (spec, num_layers): (&ModelSpec, u32),
        has_canary: bool,
    ) -> Result<KvBuffers, GpuError> {
        let is_one = spec.block.latent.is_some();
        let alloc = |label: String| match is_one {
            // `latent_write` writes words.
            true => gpu.alloc(&label, layout.buffer_bytes(), BufferUse::Storage),
            false => layout.alloc(gpu, &label),
        };
        let layer = |l| {
            let k = alloc(format!("layer {l} keys"))?;
            let v = if is_one { k.clone() } else { alloc(format!("layer {l} values"))? };
            Ok(LayerKv { k, v })
        };
        let layers = (0..num_layers).map(layer).collect::<Result<_, GpuError>>()?;
        let mark_bytes = u64::from(layout.num_blocks) * mark_bytes(&layout);
        let marks = has_canary.then(|| gpu.alloc("canary marks", mark_bytes, BufferUse::Storage)).transpose()?;
        Ok(KvBuffers { layout, layers, marks, is_one })
    }

    /// All planes, in a fixed order.
    pub fn planes(&self) -> impl Iterator<Item = Plane<'_>> {
        let block_bytes = self.layout.block_bytes();
        let num = if self.is_one { 1 } else { 2 };
        let values = self
            .layers
            .iter()
            .flat_map(move |l| [&l.k, &l.v].into_iter().take(num))
            .map(move |buffer| Plane { buffer, block_bytes });
        values.chain(self.marks.iter().map(|buffer| Plane { buffer, block_bytes: mark_bytes(&self.layout) }))
    }

    /// Bytes of one block over all planes.
    pub fn block_bytes(&self) -> u64 {
        self.planes().map(|p| p.block_bytes).sum()
    }
}

/// Bytes of a block's marks.
fn mark_bytes(layout: &KvLayout) -> u64 {
    u64::from(layout.block_size) * u64::from(canary::MARK_BYTES)
}
