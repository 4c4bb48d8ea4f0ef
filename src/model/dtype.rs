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
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    Q1_0,
    Q2_0,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    /// Groups of checkpoints in folders, as they are handed out by [`super::Model::weight`]: an f32 scale and an f32
    /// minimum, then unsigned nibbles (element j of 32 low, j + 16 high), signed bytes, or E4M3 floats.
    Int4(Span),
    Int8(Span),
    Float8(Span),
}

/// How many groups of 32 elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Span {
    One,
    Two,
    Four,
}

impl Span {
    pub const fn groups(self) -> usize {
        match self {
            Span::One => 1,
            Span::Two => 2,
            Span::Four => 4,
        }
    }

    /// The widest one that rows of `k` elements with a scale for each `group` of them allow.
    pub fn widest(k: u64, group: u64) -> Option<Span> {
        [Span::Four, Span::Two, Span::One].into_iter().find(|span| {
            let elements = 32 * span.groups() as u64;
            k.is_multiple_of(elements) && group.is_multiple_of(elements)
        })
    }
}

/// Every type that a GGUF file can hold and that is read here.
pub const GGUF_TYPES: [DType; 28] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ1_S,
    DType::IQ1_M,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::Q1_0,
    DType::Q2_0,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::MXFP4,
    DType::NVFP4,
];

impl DType {
    /// Elements in a block; 1 for plain types.
    pub const fn block_elements(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::IQ4_NL | DType::MXFP4 => 32,
            DType::Q2_0 | DType::NVFP4 => 64,
            DType::Q1_0 => 128,
            DType::Int4(span) | DType::Int8(span) | DType::Float8(span) => 32 * span.groups(),
            _ => 256,
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
            DType::IQ1_S => 50,
            DType::IQ1_M => 56,
            DType::IQ2_XXS | DType::TQ2_0 => 66,
            DType::IQ2_XS => 74,
            DType::IQ2_S => 82,
            DType::IQ3_XXS => 98,
            DType::IQ3_S => 110,
            DType::IQ4_XS => 136,
            DType::Q1_0 | DType::Q2_0 => 18,
            DType::TQ1_0 => 54,
            DType::MXFP4 => 17,
            DType::NVFP4 => 36,
            DType::Int4(span) => 8 + 16 * span.groups(),
            DType::Int8(span) | DType::Float8(span) => 8 + 32 * span.groups(),
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
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DType::Int4(span) => write!(f, "INT4 in groups of {}", 32 * span.groups()),
            DType::Int8(span) => write!(f, "INT8 in groups of {}", 32 * span.groups()),
            DType::Float8(span) => write!(f, "FP8 in groups of {}", 32 * span.groups()),
            gguf => write!(f, "{gguf:?}"),
        }
    }
}
