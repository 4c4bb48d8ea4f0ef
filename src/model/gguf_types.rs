//! Type ids of GGUF: metadata values and tensor storage. All ids that ggml has ever written are known by name, so that
//! a refusal can say what it met.

use super::dtype::DType;

/// Storage of a GGUF tensor as its file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    pub id: u32,
    pub name: &'static str,
    /// Elements and bytes of a block; 0 bytes for types that ggml has removed.
    pub block_elements: u32,
    pub block_bytes: u32,
    /// The type here, when it is supported.
    pub dtype: Option<DType>,
}

impl GgmlType {
    pub fn from_id(id: u32) -> Option<GgmlType> {
        TYPES.iter().find(|t| t.id == id).copied()
    }

    /// True for ids whose layout ggml no longer defines.
    pub fn is_removed(&self) -> bool {
        self.block_bytes == 0
    }

    /// Bytes of `num_elements` elements; `None` when they do not fill whole blocks or overflow.
    pub fn bytes(&self, num_elements: u64) -> Option<u64> {
        let per_block = u64::from(self.block_elements);
        if !num_elements.is_multiple_of(per_block) {
            return None;
        }
        (num_elements / per_block).checked_mul(u64::from(self.block_bytes))
    }
}

const fn ours(id: u32, name: &'static str, dtype: DType) -> GgmlType {
    GgmlType {
        id,
        name,
        block_elements: dtype.block_elements() as u32,
        block_bytes: dtype.block_bytes() as u32,
        dtype: Some(dtype),
    }
}

const fn other(id: u32, name: &'static str, block_elements: u32, block_bytes: u32) -> GgmlType {
    GgmlType { id, name, block_elements, block_bytes, dtype: None }
}

const fn removed(id: u32, name: &'static str) -> GgmlType {
    other(id, name, 1, 0)
}

/// `enum ggml_type` of ggml's `ggml.h`.
const TYPES: [GgmlType; 43] = [
    ours(0, "F32", DType::F32),
    ours(1, "F16", DType::F16),
    ours(2, "Q4_0", DType::Q4_0),
    ours(3, "Q4_1", DType::Q4_1),
    removed(4, "Q4_2"),
    removed(5, "Q4_3"),
    ours(6, "Q5_0", DType::Q5_0),
    ours(7, "Q5_1", DType::Q5_1),
    ours(8, "Q8_0", DType::Q8_0),
    other(9, "Q8_1", 32, 36),
    ours(10, "Q2_K", DType::Q2_K),
    ours(11, "Q3_K", DType::Q3_K),
    ours(12, "Q4_K", DType::Q4_K),
    ours(13, "Q5_K", DType::Q5_K),
    ours(14, "Q6_K", DType::Q6_K),
    other(15, "Q8_K", 256, 292),
    ours(16, "IQ2_XXS", DType::IQ2_XXS),
    ours(17, "IQ2_XS", DType::IQ2_XS),
    ours(18, "IQ3_XXS", DType::IQ3_XXS),
    ours(19, "IQ1_S", DType::IQ1_S),
    ours(20, "IQ4_NL", DType::IQ4_NL),
    ours(21, "IQ3_S", DType::IQ3_S),
    ours(22, "IQ2_S", DType::IQ2_S),
    ours(23, "IQ4_XS", DType::IQ4_XS),
    other(24, "I8", 1, 1),
    other(25, "I16", 1, 2),
    other(26, "I32", 1, 4),
    other(27, "I64", 1, 8),
    other(28, "F64", 1, 8),
    ours(29, "IQ1_M", DType::IQ1_M),
    ours(30, "BF16", DType::BF16),
    removed(31, "Q4_0_4_4"),
    removed(32, "Q4_0_4_8"),
    removed(33, "Q4_0_8_8"),
    ours(34, "TQ1_0", DType::TQ1_0),
    ours(35, "TQ2_0", DType::TQ2_0),
    removed(36, "IQ4_NL_4_4"),
    removed(37, "IQ4_NL_4_8"),
    removed(38, "IQ4_NL_8_8"),
    ours(39, "MXFP4", DType::MXFP4),
    ours(40, "NVFP4", DType::NVFP4),
    ours(41, "Q1_0", DType::Q1_0),
    ours(42, "Q2_0", DType::Q2_0),
];

/// Type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes of a value of fixed size; `None` for strings and arrays.
    pub fn fixed_bytes(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }
}

/// `general.file_type` as users know it (`enum llama_ftype`); `None` for values without a common name.
pub fn file_type_label(file_type: u32) -> Option<&'static str> {
    Some(match file_type {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_ids_are_their_places_in_the_table() {
        for (id, ty) in TYPES.iter().enumerate() {
            assert_eq!(ty.id as usize, id);
        }
        assert_eq!(GgmlType::from_id(43), None);
        assert_eq!(GgmlType::from_id(16).map(|t| t.name), Some("IQ2_XXS"));
    }

    #[test]
    fn bytes_need_whole_blocks_and_no_overflow() {
        let q4_k = GgmlType::from_id(12).expect("known");
        assert_eq!(q4_k.bytes(512), Some(288));
        assert_eq!(q4_k.bytes(255), None);
        assert_eq!(GgmlType::from_id(28).expect("known").bytes(u64::MAX), None);
    }
}
