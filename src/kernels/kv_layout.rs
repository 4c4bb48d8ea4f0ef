//! How K and V lie in the pool: per layer one buffer of keys and one of values,
//! `[num_blocks][num_kv_heads][block_size][padded head dim]`, f16 in pairs (low half first) or f32.

use half::f16;

/// What a cached value is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Clamped to what f16 holds; two values per word.
    F16,
    /// For the precise mode.
    F32,
}

impl KvFormat {
    pub fn bytes(self) -> u64 {
        match self {
            KvFormat::F16 => 2,
            KvFormat::F32 => 4,
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

    /// Bytes of one buffer, of K or of V.
    pub fn buffer_bytes(&self) -> u64 {
        self.num_values() * self.format.bytes()
    }

    /// Bytes of one block in one buffer, where it lies contiguously from `block * block_bytes` on.
    pub fn block_bytes(&self) -> u64 {
        self.buffer_bytes() / u64::from(self.num_blocks.max(1))
    }

    /// Index of a head's first value for a slot (block id * block_size + offset).
    pub fn value_idx(&self, slot: u32, kv_head: u32) -> usize {
        let (block, offset) = (slot / self.block_size, slot % self.block_size);
        let row = (block as usize * self.num_kv_heads as usize + kv_head as usize) * self.block_size as usize;
        (row + offset as usize) * padded_head_dim(self.head_dim) as usize
    }

    /// A buffer's bytes as values.
    pub fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        match self.format {
            KvFormat::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            KvFormat::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    }

    /// Values as a buffer's bytes.
    pub fn encode(&self, values: &[f32]) -> Vec<u8> {
        match self.format {
            KvFormat::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            KvFormat::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }
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
}
