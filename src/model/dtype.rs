//! Storage types of checkpoint tensors: names, block sizes, GGUF ids.

use serde::{Deserialize, Serialize};

/// How a tensor's elements are stored. Quantised types come in blocks along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, reason = "the names users know from GGUF files")]
pub enum DType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

impl DType {
    /// Elements in a block; 1 for plain types.
    pub const fn block_elements(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::IQ4_NL => 32,
            DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K | DType::IQ4_XS => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q2_K => 84,
            DType::Q3_K => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
            DType::IQ4_XS => 136,
        }
    }

    /// Bytes of `num_elements` elements, or `None` when they do not fill whole blocks or overflow.
    pub fn bytes(self, num_elements: u64) -> Option<u64> {
        let be = self.block_elements() as u64;
        if !num_elements.is_multiple_of(be) {
            return None;
        }
        (num_elements / be).checked_mul(self.block_bytes() as u64)
    }

    /// True when kernels read this type; the others can be dequantised on the CPU only.
    pub const fn is_supported_on_gpu(self) -> bool {
        !matches!(self, DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}
