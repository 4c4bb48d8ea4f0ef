//! How K and V lie in the pool: per layer one buffer of keys and one of values, block after block, a block
//! `[num_kv_heads][block_size][padded head dim]` of f32, f16 in pairs (low half first) or i8 in fours; for i8 followed by
//! `[num_kv_heads][block_size]` f32 scales, so that a block's bytes are all there is to it. Each (token, head) owns whole
//! words, of values and of scales: whoever writes a token touches no other's.

use half::f16;

use crate::gpu::texels::MAX_LINE_BYTES;
use crate::gpu::{Buffer, BufferUse, Gpu, GpuError};

/// What a cached value is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Clamped to what f16 holds; two values per word.
    F16,
    /// For the precise mode.
    F32,
    /// Symmetric, with one scale for each token and head: scale = max |x| / 127, q = round(x / scale).
    I8,
}

impl KvFormat {
    /// Bytes of a value.
    pub fn value_bytes(self) -> u32 {
        match self {
            KvFormat::I8 => 1,
            KvFormat::F16 => 2,
            KvFormat::F32 => 4,
        }
    }

    /// Bytes beside the values, for each token and head.
    pub fn scale_bytes(self) -> u32 {
        match self {
            KvFormat::I8 => 4,
            KvFormat::F16 | KvFormat::F32 => 0,
        }
    }

    /// The define that kernels are compiled with.
    pub(super) fn flag(self) -> Option<&'static str> {
        match self {
            KvFormat::F16 => None,
            KvFormat::F32 => Some("KV_F32"),
            KvFormat::I8 => Some("KV_I8"),
        }
    }
}

/// Heads in the cache and in attention's q are padded to this many dims, with zeros.
pub const HEAD_DIM_STEP: u32 = 8;

/// The head dim as cached.
pub fn padded_head_dim(head_dim: u32) -> u32 {
    head_dim.next_multiple_of(HEAD_DIM_STEP)
}

/// The cache of one layer: sizes and indices. `block_size` is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub num_blocks: u32,
    pub block_size: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    pub format: KvFormat,
}

impl KvLayout {
    /// Values of one buffer, of K or of V.
    pub fn num_values(&self) -> u64 {
        u64::from(self.num_blocks)
            * u64::from(self.block_size)
            * u64::from(self.num_kv_heads)
            * u64::from(padded_head_dim(self.head_dim))
    }

    /// Heads of tokens in a block.
    fn rows(&self) -> u64 {
        u64::from(self.block_size) * u64::from(self.num_kv_heads)
    }

    /// Bytes of one block in one buffer, where it lies contiguously from `block * block_bytes` on. A multiple of 16.
    pub fn block_bytes(&self) -> u64 {
        let row = padded_head_dim(self.head_dim) * self.format.value_bytes() + self.format.scale_bytes();
        (self.rows() * u64::from(row)).next_multiple_of(16)
    }

    /// Bytes of one buffer, of K or of V.
    pub fn buffer_bytes(&self) -> u64 {
        u64::from(self.num_blocks) * self.block_bytes()
    }

    /// Memory of one buffer, of K or of V, zeroed: a line of texels where the adapter reads those faster, for f16.
    pub fn alloc(&self, gpu: &Gpu, label: &str) -> Result<Buffer, GpuError> {
        let bytes = self.buffer_bytes();
        match gpu.caps().prefers_texels && self.format == KvFormat::F16 && bytes <= MAX_LINE_BYTES {
            true => gpu.alloc_line(label, bytes),
            false => gpu.alloc(label, bytes, BufferUse::Storage),
        }
    }

    /// Index of a head's first value for a slot (block id * block_size + offset).
    pub fn value_idx(&self, slot: u32, kv_head: u32) -> usize {
        let (block, offset) = (slot / self.block_size, slot % self.block_size);
        let row = (block as usize * self.num_kv_heads as usize + kv_head as usize) * self.block_size as usize;
        (row + offset as usize) * padded_head_dim(self.head_dim) as usize
    }

    /// A buffer's bytes as values, without the scales.
    pub fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        match self.format {
            KvFormat::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            KvFormat::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            KvFormat::I8 => {
                let dims = padded_head_dim(self.head_dim) as usize;
                let scales_at = self.rows() as usize * dims;
                let block = |block: &[u8]| -> Vec<f32> {
                    let scales = block[scales_at..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                    let rows = block[..scales_at].chunks_exact(dims).zip(scales);
                    rows.flat_map(|(row, scale)| row.iter().map(move |&q| f32::from(q as i8) * scale)).collect()
                };
                bytes.chunks_exact(self.block_bytes() as usize).flat_map(block).collect()
            }
        }
    }

    /// Values as a buffer's bytes.
    pub fn encode(&self, values: &[f32]) -> Vec<u8> {
        match self.format {
            KvFormat::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            KvFormat::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            KvFormat::I8 => {
                let dims = padded_head_dim(self.head_dim) as usize;
                let mut bytes = Vec::with_capacity(self.buffer_bytes() as usize);
                for block in values.chunks_exact(self.rows() as usize * dims) {
                    let end = bytes.len() + self.block_bytes() as usize;
                    let rows: Vec<(Vec<u8>, f32)> = block.chunks_exact(dims).map(quantise).collect();
                    bytes.extend(rows.iter().flat_map(|(q, _)| q));
                    bytes.extend(rows.iter().flat_map(|(_, scale)| scale.to_le_bytes()));
                    bytes.resize(end, 0);
                }
                bytes
            }
        }
    }
}

/// A head as signed bytes and their scale.
fn quantise(row: &[f32]) -> (Vec<u8>, f32) {
    let largest = row.iter().fold(0f32, |m, x| m.max(x.abs()));
    let inverse = if largest > 1.2e-38 { 127.0 / largest } else { 0.0 };
    (row.iter().map(|x| (x * inverse).round_ties_even() as i8 as u8).collect(), largest / 127.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_block_by_block_then_head_by_head() {
        let layout = KvLayout { num_blocks: 3, block_size: 4, num_kv_heads: 2, head_dim: 12, format: KvFormat::F16 };
        assert_eq!(layout.buffer_bytes(), 3 * 4 * 2 * 16 * 2);
        assert_eq!(layout.value_idx(0, 0), 0);
        assert_eq!(layout.value_idx(1, 0), 16);
        assert_eq!(layout.value_idx(0, 1), 4 * 16);
        assert_eq!(layout.value_idx(4, 0), 2 * 4 * 16);
        assert_eq!(layout.value_idx(11, 1), layout.num_values() as usize - 16);
    }

    #[test]
    fn values_survive_encoding() {
        for format in [KvFormat::F16, KvFormat::F32] {
            let layout = KvLayout { num_blocks: 1, block_size: 1, num_kv_heads: 1, head_dim: 8, format };
            let values = [0.5, -2.0, 65504.0, 0.0];
            assert_eq!(layout.decode(&layout.encode(&values)), values);
        }
    }

    #[test]
    fn bytes_of_an_i8_block_end_with_its_scales() {
        let layout = KvLayout { num_blocks: 2, block_size: 2, num_kv_heads: 3, head_dim: 8, format: KvFormat::I8 };
        assert_eq!(layout.block_bytes(), (6 * 8 + 6 * 4u64).next_multiple_of(16));
        let values: Vec<f32> = (0..layout.num_values()).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let bytes = layout.encode(&values);
        assert_eq!(bytes.len() as u64, layout.buffer_bytes());
        let row = &values[8..16];
        let scale = row.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
        assert_eq!(bytes[6 * 8 + 4..][..4], scale.to_le_bytes());
        let decoded = layout.decode(&bytes);
        assert_eq!(decoded.len(), values.len());
        assert!(decoded.iter().zip(&values).all(|(a, b)| (a - b).abs() <= 0.51 / 127.0));
        assert_eq!(layout.decode(&layout.encode(&[0.0; 96])), [0.0; 96]);
    }
}
