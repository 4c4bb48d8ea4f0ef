//! Repacks matrices of every storage type into the planes that kernels read. Exact: no bit of a weight changes.
//!
//! Rows go in blocks of 64 and elements in groups of 32 along k. Within a block the row runs fastest, so that 64 lanes
//! read 64 rows side by side, and a block is one contiguous stream of each plane:
//!
//! ```text
//! q   [n / 64][granules][64] x 16 bytes   elements; a granule is 4 (F32), 8 (F16, BF16), 16 (bytes) or 32 (nibbles)
//!     [n / 64][groups][64] x 8 bytes      the lower two bits of 2- and 3-bit elements
//! h   [n / 64][groups][64] x 4 or 8 bytes upper bits of 3-, 5- and 6-bit elements
//! s   [n / 64][..][64] x 4, 8 or 16 bytes scales, see `Scales`
//! ```
//!
//! Rows beyond n and groups beyond k are zero. A nibble granule holds element j in the low and j + 16 in the high half of
//! byte j. Upper bits lie where one shift and mask give four bytes: bit 8b + i of `h` is bit 4 of element 4i + b (5-bit);
//! bits 8b + 2i of word i / 4 are bits 4 and 5 (6-bit), and so are two bits alone. Scales keep the file's own fields: f16 d;
//! f16 d and m; f16 d and dmin with the 12 bytes of 6-bit scales; i8 scales of 16 elements with f16 d.
//!
//! Types with a codebook ([`crate::model::coded`]) keep codes of 3 or 4 bits, of which the kernel makes signed bytes by
//! arithmetic (a table for IQ4); their entries of 4 or 8 elements are written out, so IQ1 and IQ2 take more room here than
//! in a file (3.4 and 3.6 bits for 1.6 to 2.6), IQ3 4.4 for 3.1 and 3.4.

mod block;
mod coded;
mod element;

use crate::gpu::Defines;
use crate::model::dtype::{DType, Span};
use block::Block;
pub use element::element;

use super::GROUP;

/// Rows of a block.
pub const BLOCK_ROWS: u32 = 64;
const ROWS: usize = BLOCK_ROWS as usize;
const GRANULE: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    #[error("rows of {k} elements do not fill the blocks of {dtype}")]
    PartialBlock { dtype: DType, k: u32 },
    #[error("{bytes} bytes are no whole number of {dtype} rows of {k} elements")]
    PartialRow { dtype: DType, k: u32, bytes: usize },
}

/// How the scales of a type lie. A quad is four groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    None,
    /// Four f16 for a quad.
    Half,
    /// Four (f16 scale, f16 minimum) for a quad.
    Pair,
    /// f16 d, f16 dmin, 12 bytes for two quads.
    K,
    /// 8 x i8, f16 d, padding for a quad.
    Sixths,
    /// For two quads: words of 16 x (4-bit scale, 4-bit minimum), a word of f16 d and dmin.
    Q2,
    /// For two quads: words of 16 x i8, a word of f32 d.
    Sixteens,
    /// For two quads: words of 8 x i8, a word of f32 d.
    ThirtyTwos,
    /// Four powers of two (e8m0) for a quad.
    Powers,
    /// Two f16 for a group.
    TwoHalves,
    /// f32 scale and minimum for some groups.
    Floats(Span),
}

impl Scales {
    /// Bytes for a row of so many groups.
    fn bytes(self, groups: u64) -> u64 {
        match self {
            Scales::None => 0,
            Scales::Half => groups.div_ceil(4) * 8,
            Scales::Pair | Scales::Sixths => groups.div_ceil(4) * 16,
            Scales::K => groups.div_ceil(8) * 16,
            Scales::Q2 | Scales::Sixteens => groups.div_ceil(8) * 20,
            Scales::ThirtyTwos => groups.div_ceil(8) * 12,
            Scales::Powers => groups.div_ceil(4) * 4,
            Scales::TwoHalves => groups * 4,
            Scales::Floats(span) => groups.div_ceil(span.groups() as u64) * 8,
        }
    }
}

/// The planes of a storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub dtype: DType,
    /// Bytes of a group in the first plane: 128, 64, 32, 16 or 8.
    q_bytes: usize,
    high_bytes: usize,
    scales: Scales,
}

/// Bytes of each plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes {
    pub q: u64,
    pub h: u64,
    pub s: u64,
}

/// Packed bytes of some blocks of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planes {
    pub q: Vec<u8>,
    pub h: Vec<u8>,
    pub s: Vec<u8>,
}

impl Planes {
    /// Empty, with the room kept.
    pub fn clear(&mut self) {
        self.q.clear();
        self.h.clear();
        self.s.clear();
    }
}

impl Format {
    pub fn of(dtype: DType) -> Format {
        use DType::*;
        let (q_bytes, high_bytes, scales) = match dtype {
            F32 => (128, 0, Scales::None),
            F16 | BF16 => (64, 0, Scales::None),
            Q8_0 => (32, 0, Scales::Half),
            Q4_0 | IQ4_NL => (16, 0, Scales::Half),
            Q4_1 => (16, 0, Scales::Pair),
            Q5_0 => (16, 4, Scales::Half),
            Q5_1 => (16, 4, Scales::Pair),
            Q2_K => (8, 0, Scales::Q2),
            Q3_K | IQ2_XXS | IQ2_XS | IQ2_S | IQ1_M => (8, 4, Scales::Sixteens),
            IQ1_S => (8, 4, Scales::ThirtyTwos),
            Q4_K => (16, 0, Scales::K),
            Q5_K => (16, 4, Scales::K),
            Q6_K => (16, 8, Scales::Sixths),
            IQ3_XXS | IQ3_S | IQ4_XS => (16, 0, Scales::ThirtyTwos),
            Q1_0 | Q2_0 | TQ1_0 | TQ2_0 => (8, 0, Scales::Half),
            MXFP4 => (16, 0, Scales::Powers),
            NVFP4 => (16, 0, Scales::TwoHalves),
            Int4(span) => (16, 0, Scales::Floats(span)),
            Int8(span) | Float8(span) => (32, 0, Scales::Floats(span)),
        };
        Format { dtype, q_bytes, high_bytes, scales }
    }

    /// Elements have scales; else they are floats in themselves.
    pub fn is_quantised(self) -> bool {
        self.scales != Scales::None
    }

    /// Elements are signed bytes in the kernel, so that i8 activations can be used.
    pub fn takes_i8(self) -> bool {
        self.is_quantised() && !matches!(self.dtype, DType::Float8(_))
    }

    /// Plain nibbles without upper bits: what the `PAIRS` kernels multiply.
    pub fn is_four_bit(self) -> bool {
        matches!(self.dtype, DType::Q4_0 | DType::Q4_1 | DType::Q4_K | DType::Int4(_))
    }

    /// What kernels are compiled with for this type.
    pub fn defines(self) -> Defines {
        use DType::*;
        let names: &[&str] = match self.dtype {
            F32 => &["FLOATS"],
            F16 => &["TWO_BYTES"],
            BF16 => &["TWO_BYTES", "BRAINS"],
            Q8_0 | Int8(_) => &["BYTES"],
            Float8(_) => &["BYTES", "EIGHTS"],
            Q4_0 | Q4_1 | Q4_K | Int4(_) => &[],
            Q5_0 | Q5_1 | Q5_K => &["HAS_HIGH", "FIFTHS"],
            Q6_K => &["HAS_HIGH", "SIXTHS"],
            Q2_K => &["TWOS"],
            Q3_K => &["TWOS", "HAS_HIGH", "THIRDS"],
            Q1_0 | Q2_0 | TQ1_0 | TQ2_0 => &["TWOS"],
            IQ4_NL | IQ4_XS => &["CODES", "CODES_IQ4"],
            MXFP4 | NVFP4 => &["CODES", "CODES_FP4"],
            IQ3_XXS => &["CODES", "CODES_IQ3_XXS"],
            IQ3_S => &["CODES", "CODES_IQ3_S"],
            IQ2_XXS | IQ2_XS | IQ2_S => &["TWOS", "HAS_HIGH", "THIRDS", "CODES", "CODES_IQ2"],
            IQ1_S | IQ1_M => &["TWOS", "HAS_HIGH", "THIRDS", "CODES", "CODES_IQ1"],
        };
        let scales: &[&str] = match self.scales {
            Scales::None => &[],
            Scales::Half => &["QUANTISED", "SCALE_HALF"],
            Scales::Pair => &["QUANTISED", "SCALE_PAIR", "HAS_MINIMUM"],
            Scales::K => &["QUANTISED", "SCALE_K", "HAS_MINIMUM"],
            Scales::Sixths => &["QUANTISED", "SCALE_SIXTHS", "TWO_SCALES"],
            Scales::Q2 => &["QUANTISED", "SCALE_Q2", "TWO_SCALES", "HAS_MINIMUM", "TWO_MINIMUMS"],
            Scales::Sixteens => &["QUANTISED", "SCALE_SIXTEENS", "TWO_SCALES"],
            Scales::ThirtyTwos => &["QUANTISED", "SCALE_THIRTY_TWOS"],
            Scales::Powers => &["QUANTISED", "SCALE_POWERS"],
            Scales::TwoHalves => &["QUANTISED", "SCALE_TWO_HALVES", "TWO_SCALES"],
            Scales::Floats(_) => &["QUANTISED", "HAS_MINIMUM"],
        };
        let defines = names.iter().chain(scales).fold(Defines::new(), |d, name| d.flag(name));
        match (self.dtype, self.scales) {
            (Q4_0, _) => defines.flag("HAS_MINIMUM").set("OFFSET", 8),
            (Q5_0, _) => defines.flag("HAS_MINIMUM").set("OFFSET", 16),
            (Q3_K, _) => defines.set("BIAS", 4),
            (Q1_0 | Q2_0 | TQ1_0 | TQ2_0, _) => defines.set("BIAS", 1),
            (_, Scales::Floats(span)) => defines.set("SCALE_FLOATS", span.groups() as i64),
            _ => defines,
        }
    }

    /// Bytes of a block of 64 rows with k elements.
    pub fn block_bytes(self, k: u32) -> PlaneBytes {
        let groups = u64::from(k.div_ceil(GROUP));
        let rows = u64::from(BLOCK_ROWS);
        PlaneBytes {
            q: groups * self.q_bytes as u64 * rows,
            h: groups * self.high_bytes as u64 * rows,
            s: self.scales.bytes(groups) * rows,
        }
    }

    /// Bytes of all planes of a matrix, without the alignment between them.
    pub fn matrix_bytes(self, n: u64, k: u32) -> u64 {
        let block = self.block_bytes(k);
        n.div_ceil(u64::from(BLOCK_ROWS)) * (block.q + block.h + block.s)
    }

    /// Bytes of a row in the file.
    pub fn row_bytes(self, k: u32) -> Result<usize, PackError> {
        let bytes = self.dtype.bytes(u64::from(k)).ok_or(PackError::PartialBlock { dtype: self.dtype, k })?;
        Ok(bytes as usize)
    }

    /// Appends a block of up to 64 rows, each [`Format::row_bytes`] long, to the planes.
    pub fn pack_block(self, k: u32, rows: &[&[u8]], out: &mut Planes) {
        assert!(rows.len() <= ROWS, "a block has {ROWS} rows");
        let bytes = self.block_bytes(k);
        let mut block =
            Block { q: grow(&mut out.q, bytes.q), h: grow(&mut out.h, bytes.h), s: grow(&mut out.s, bytes.s) };
        for (r, row) in rows.iter().enumerate() {
            match self.dtype {
                DType::F32 | DType::F16 | DType::BF16 => block.dense(r, row),
                DType::Q8_0 => block.q8_0(r, row),
                DType::Q4_0 => block.q4_0(r, row),
                DType::Q4_1 => block.q4_1(r, row),
                DType::Q5_0 => block.q5_0(r, row),
                DType::Q5_1 => block.q5_1(r, row),
                DType::Q4_K => block.q4_k(r, row),
                DType::Q5_K => block.q5_k(r, row),
                DType::Q6_K => block.q6_k(r, row),
                _ => block.codes_row(self, r, row),
            }
        }
    }
}

/// Appends zeros and gives them.
fn grow(plane: &mut Vec<u8>, bytes: u64) -> &mut [u8] {
    let start = plane.len();
    plane.resize(start + bytes as usize, 0);
    &mut plane[start..]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::quant::dequantize;

    use crate::kernels::variants::WEIGHT_TYPES as PACKED_TYPES;

    /// Random bytes whose scales are finite: every f16 exponent that a scale can have is below the maximum.
    fn random_matrix(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut bytes: Vec<u8> = (0..dtype.bytes((n * k) as u64).unwrap())
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        // Clearing bit 6 of each byte keeps f16, bf16 and f32 exponents away from infinity, whatever the layout.
        bytes.iter_mut().for_each(|b| *b &= 0xbf);
        bytes
    }

    fn pack(format: Format, k: u32, bytes: &[u8]) -> Planes {
        let rows: Vec<&[u8]> = bytes.chunks_exact(format.row_bytes(k).unwrap()).collect();
        let mut planes = Planes::default();
        rows.chunks(ROWS).for_each(|block| format.pack_block(k, block, &mut planes));
        planes
    }

    #[test]
    fn packing_changes_no_weight() {
        for dtype in PACKED_TYPES {
            let format = Format::of(dtype);
            for (n, k) in [(1, 256), (64, 512), (70, 768), (3, 96), (65, 88)] {
                if k % dtype.block_elements() != 0 {
                    continue;
                }
                let bytes = random_matrix(dtype, n, k, 7);
                let planes = pack(format, k as u32, &bytes);
                let mut want = vec![0f32; n * k];
                dequantize(dtype, &bytes, &mut want).unwrap();
                for (i, want) in want.iter().enumerate() {
                    let got = element(format, &planes, k as u32, (i / k) as u32, (i % k) as u32);
                    assert!(got == *want, "{dtype} {n}x{k} element {i}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn planes_have_the_stated_sizes_and_zero_padding() {
        for dtype in PACKED_TYPES {
            let format = Format::of(dtype);
            let k = 256;
            let bytes = vec![0xbfu8; dtype.bytes(65 * k).unwrap() as usize];
            let planes = pack(format, k as u32, &bytes);
            let block = format.block_bytes(k as u32);
            let sizes = [planes.q.len(), planes.h.len(), planes.s.len()];
            assert_eq!(sizes, [block.q, block.h, block.s].map(|b| 2 * b as usize), "{dtype}");
            assert_eq!(format.matrix_bytes(65, k as u32), 2 * (block.q + block.h + block.s), "{dtype}");
            assert_eq!(element(format, &planes, k as u32, 127, 255), 0.0, "{dtype}: rows beyond n");
        }
    }

    #[test]
    fn packing_costs_little_over_the_files_own_bytes() {
        for dtype in PACKED_TYPES {
            let ratio = Format::of(dtype).matrix_bytes(64, 1024) as f64 / dtype.bytes(64 * 1024).unwrap() as f64;
            let most = match dtype {
                // Entries of codebooks are written out.
                DType::IQ1_S | DType::IQ1_M => 2.2,
                DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 1.8,
                DType::IQ3_XXS | DType::IQ3_S => 1.5,
                // Digits of five to a byte become two bits each, a bit becomes two.
                DType::TQ1_0 | DType::TQ2_0 | DType::Q2_0 => 1.5,
                DType::Q1_0 => 2.3,
                DType::NVFP4 => 1.12,
                _ => 1.07,
            };
            assert!((1.0..most).contains(&ratio), "{dtype}: {ratio}");
        }
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let format = Format::of(DType::Q4_K);
        assert_eq!(format.row_bytes(288), Err(PackError::PartialBlock { dtype: DType::Q4_K, k: 288 }));
    }
}
