//! Writes rows of codes into the planes of a block of 64 rows: types with codebooks, 2-bit types, and the groups that
//! checkpoints of other makers are read as.

use crate::model::coded::{self, Coded};
use crate::model::dtype::{DType, Span};

use super::block::{Block, spread_fifths};
use super::{Format, ROWS, Scales};

impl Block<'_> {
    /// A row of a type that [`super::block`] does not know.
    pub fn codes_row(&mut self, format: Format, row: usize, bytes: &[u8]) {
        let dtype = format.dtype;
        let elements = dtype.block_elements();
        for (i, b) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
            let first = i * elements / 32;
            match dtype {
                DType::IQ4_NL => self.iq4_nl(first, row, b),
                DType::MXFP4 => self.mxfp4(first, row, b),
                DType::NVFP4 => self.nvfp4(first, row, b),
                DType::Q2_K => self.q2_k(i, row, b),
                DType::Int4(span) | DType::Int8(span) | DType::Float8(span) => self.span(first, row, b, span),
                _ => match Coded::read(dtype, b) {
                    Some(block) => self.coded(format, i, row, &block),
                    None => self.ternary(dtype, first, row, b),
                },
            }
        }
    }

    // f16 d, nibbles [32]
    fn iq4_nl(&mut self, group: usize, row: usize, b: &[u8]) {
        self.half_scale(group, row, &b[..2]);
        self.granule(group, row).copy_from_slice(&b[2..]);
    }

    // e8m0, nibbles [32]
    fn mxfp4(&mut self, group: usize, row: usize, b: &[u8]) {
        self.s[((group / 4) * ROWS + row) * 4 + group % 4] = b[0];
        self.granule(group, row).copy_from_slice(&b[1..]);
    }

    // 4 x ue4m3, for each 16: nibbles, the first eight low
    fn nvfp4(&mut self, first: usize, row: usize, b: &[u8]) {
        for g in 0..2 {
            let scales = [b[2 * g], b[2 * g + 1]].map(|s| half::f16::from_f32(coded::ue4m3_half(s)).to_bits());
            let pair = u32::from(scales[0]) | u32::from(scales[1]) << 16;
            self.s[((first + g) * ROWS + row) * 4..][..4].copy_from_slice(&pair.to_le_bytes());
            let mut codes = [0; 32];
            for (i, code) in codes.iter_mut().enumerate() {
                *code = (b[4 + g * 16 + i / 16 * 8 + i % 8] >> (4 * (i / 8 % 2))) & 15;
            }
            self.nibbles(first + g, row, &codes);
        }
    }

    // (scale, minimum) nibbles [16], 2-bit [256], d, dmin: 32 bytes hold four planes of 32
    fn q2_k(&mut self, block: usize, row: usize, b: &[u8]) {
        for (w, word) in b[..16].chunks_exact(4).chain(std::iter::once(&b[80..84])).enumerate() {
            self.scale_word(block * 5 + w, row, word);
        }
        for g in 0..8 {
            let codes = std::array::from_fn(|i| (b[16 + g / 4 * 32 + i] >> (2 * (g % 4))) & 3);
            self.twos(block * 8 + g, row, &codes);
        }
    }

    /// Signed scales of 16 or 32 elements, then the factor.
    fn coded(&mut self, format: Format, block: usize, row: usize, coded: &Coded) {
        let step = if format.scales == Scales::Sixteens { 1 } else { 2 };
        let scales: Vec<u8> = coded.scales.iter().step_by(step).map(|&s| s as u8).collect();
        let words = scales.len() / 4 + 1;
        for (w, four) in scales.chunks_exact(4).enumerate() {
            self.scale_word(block * words + w, row, four);
        }
        self.scale_word(block * words + words - 1, row, &coded.d.to_le_bytes());
        for (g, codes) in coded.codes.chunks_exact(32).enumerate() {
            let codes = codes.try_into().expect("groups have 32 elements");
            let group = block * 8 + g;
            if format.q_bytes == 8 { self.threes(group, row, codes) } else { self.nibbles(group, row, codes) }
        }
    }

    fn ternary(&mut self, dtype: DType, first: usize, row: usize, b: &[u8]) {
        let mut codes = [0; 256];
        let codes = &mut codes[..dtype.block_elements()];
        // An f16 for each group, as it is in the file.
        let d = half::f16::from_f32(coded::ternary(dtype, b, codes)).to_le_bytes();
        for (g, codes) in codes.chunks_exact(32).enumerate() {
            self.half_scale(first + g, row, &d);
            self.twos(first + g, row, codes.try_into().expect("groups have 32 elements"));
        }
    }

    // f32 scale and minimum, then nibbles or bytes of the groups that share them
    fn span(&mut self, first: usize, row: usize, b: &[u8], span: Span) {
        self.s[((first / span.groups()) * ROWS + row) * 8..][..8].copy_from_slice(&b[..8]);
        let granules = (b.len() - 8) / 16;
        let first = first * granules / span.groups();
        for (i, granule) in b[8..].chunks_exact(16).enumerate() {
            self.granule(first + i, row).copy_from_slice(granule);
        }
    }

    fn scale_word(&mut self, index: usize, row: usize, word: &[u8]) {
        self.s[(index * ROWS + row) * 4..][..4].copy_from_slice(word);
    }

    fn nibbles(&mut self, group: usize, row: usize, codes: &[u8; 32]) {
        for (j, byte) in self.granule(group, row).iter_mut().enumerate() {
            *byte = codes[j] | codes[j + 16] << 4;
        }
    }

    /// Two bits of each element: bits 8b + 2i of word i / 4 are element 4i + b.
    fn twos(&mut self, group: usize, row: usize, codes: &[u8; 32]) {
        let mut words = [0u32; 2];
        for (j, &code) in codes.iter().enumerate() {
            words[j / 16] |= u32::from(code & 3) << (8 * (j % 4) + 2 * (j % 16 / 4));
        }
        let q = &mut self.q[(group * ROWS + row) * 8..][..8];
        q[..4].copy_from_slice(&words[0].to_le_bytes());
        q[4..].copy_from_slice(&words[1].to_le_bytes());
    }

    /// Three bits: two as in [`Block::twos`], the third in the plane of upper bits.
    fn threes(&mut self, group: usize, row: usize, codes: &[u8; 32]) {
        self.twos(group, row, codes);
        let upper = codes.iter().enumerate().fold(0u32, |bits, (j, code)| bits | u32::from(code >> 2) << j);
        self.high_word(group, row, spread_fifths(upper));
    }
}
