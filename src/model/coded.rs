//! Block types whose elements are codes: small integers that stand for signed bytes, scaled by 16 at a time.
//!
//! [`Coded::read`] gives the codes, scales and factor of a block, `w = d * scale * value(code)`; dequantisation and the
//! packing for the GPU are both made of it, so they cannot differ. The codebooks of the IQ types are those of ggml's
//! `ggml-common.h`: sets of four or eight magnitudes, of which a file stores the index.
//!
//! Guarantees: all products are exact in f32 or rounded once, so the results equal ggml's bit for bit. It does not read
//! Q2_K (a minimum for each scale) nor the types with one scale for 32.

use super::dtype::DType;
use half::f16;

/// A block of 256 elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Coded {
    pub codes: [u8; 256],
    /// One for each 16 elements.
    pub scales: [i8; 16],
    pub d: f32,
}

/// IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Doubled FP4 (E2M1): bit 3 is the sign.
const FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Bit 2 is the sign of one of three magnitudes, here and below.
const IQ2: [i8; 8] = [8, 25, 43, 0, -8, -25, -43, 0];
/// Eight times (-1, 0 or 1) plus or minus 1/8.
const IQ1: [i8; 8] = [1, 7, 9, 0, -1, -7, -9, 0];
/// Bit 3 is the sign.
const IQ3_XXS: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
const IQ3_S: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];
const Q3_K: [i8; 8] = [-4, -3, -2, -1, 0, 1, 2, 3];
const TERNARY: [i8; 4] = [-1, 0, 1, 2];

/// What the codes of a type stand for; `None` for types whose elements are plain integers or floats.
pub fn codebook(dtype: DType) -> Option<&'static [i8]> {
    Some(match dtype {
        DType::IQ4_NL | DType::IQ4_XS => &IQ4,
        DType::MXFP4 | DType::NVFP4 => &FP4,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => &IQ2,
        DType::IQ1_S | DType::IQ1_M => &IQ1,
        DType::IQ3_XXS => &IQ3_XXS,
        DType::IQ3_S => &IQ3_S,
        DType::Q3_K => &Q3_K,
        DType::Q1_0 | DType::Q2_0 | DType::TQ1_0 | DType::TQ2_0 => &TERNARY,
        _ => return None,
    })
}

/// The magnitudes of the IQ types: 2 bits for each element of IQ2_XXS (256 entries of 8), IQ2_XS (512), IQ2_S (1024) and
/// IQ1_S (2048), then 4 bits for each element of IQ3_XXS (256 entries of 4) and IQ3_S (512).
static CODEBOOKS: &[u8; 9216] = include_bytes!("../../assets/codebooks.bin");
const IQ2_XXS_AT: usize = 0;
const IQ2_XS_AT: usize = 512;
const IQ2_S_AT: usize = 1536;
const IQ1_AT: usize = 3584;
const IQ3_XXS_AT: usize = 7680;
const IQ3_S_AT: usize = 8192;

/// Eight magnitudes of 2 bits.
fn eight(table: usize, entry: usize) -> [u8; 8] {
    let at = table + 2 * entry;
    let bits = u16::from_le_bytes([CODEBOOKS[at], CODEBOOKS[at + 1]]);
    std::array::from_fn(|i| ((bits >> (2 * i)) & 3) as u8)
}

/// Four magnitudes of 3 bits.
fn four(table: usize, entry: usize) -> [u8; 4] {
    let at = table + 2 * entry;
    let bits = u16::from_le_bytes([CODEBOOKS[at], CODEBOOKS[at + 1]]);
    std::array::from_fn(|i| ((bits >> (4 * i)) & 7) as u8)
}

/// Signs of 8 elements from 7 bits: the number of negative ones is even.
fn even_signs(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | ((bits.count_ones() & 1) as u8) << 7
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn short(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn word(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Nibble i of a row of bytes, low ones first.
fn nibble(b: &[u8], i: usize) -> u8 {
    (b[i / 2] >> (4 * (i % 2))) & 15
}

/// The d of an IQ1_M block: four bits of it lie on top of each of four shorts.
pub fn iq1_m_factor(b: &[u8]) -> f32 {
    let bits = (0..4).fold(0u16, |bits, i| bits | (short(b, 48 + 2 * i) >> 12) << (4 * i));
    f16::from_bits(bits).to_f32()
}

impl Coded {
    /// Reads a block of 256 elements; `None` for types that are not stored so.
    pub fn read(dtype: DType, b: &[u8]) -> Option<Coded> {
        let mut block = Coded { codes: [0; 256], scales: [1; 16], d: half_at(b, 0) };
        match dtype {
            DType::Q3_K => block.q3_k(b),
            DType::IQ4_XS => block.iq4_xs(b),
            DType::IQ2_XXS => block.iq2_xxs(b),
            DType::IQ2_XS => block.iq2_xs(b),
            DType::IQ2_S => block.iq2_s(b),
            DType::IQ3_XXS => block.iq3_xxs(b),
            DType::IQ3_S => block.iq3_s(b),
            DType::IQ1_S => block.iq1_s(b),
            DType::IQ1_M => block.iq1_m(b),
            _ => return None,
        }
        Some(block)
    }

    /// Eight elements of magnitudes `m` with the signs of `signs`; the sign's place in a code is `1 << shift`.
    fn signed(&mut self, at: usize, m: &[u8], signs: u8, shift: u32) {
        for (i, &m) in m.iter().enumerate() {
            self.codes[at + i] = m | ((signs >> i) & 1) << shift;
        }
    }

    /// The odd scale 2s + 1 of 32 elements.
    fn odd_scale(&mut self, group: usize, s: u8) {
        self.scales[2 * group..2 * group + 2].fill((2 * s + 1) as i8);
    }

    // high bit mask [32], 2-bit [256], 6-bit scales [16] in 12 bytes, d
    fn q3_k(&mut self, b: &[u8]) {
        let (mask, qs, packed) = (&b[..32], &b[32..96], &b[96..108]);
        self.d = half_at(b, 108);
        for group in 0..16 {
            let low = if group < 8 { packed[group] & 15 } else { packed[group - 8] >> 4 };
            let high = (packed[8 + group % 4] >> (2 * (group / 4))) & 3;
            self.scales[group] = (low | (high << 4)) as i8 - 32;
            let (half, plane, sub) = (group / 8, group / 2 % 4, group % 2);
            for i in 0..16 {
                let column = sub * 16 + i;
                let low = (qs[half * 32 + column] >> (2 * plane)) & 3;
                let high = (mask[column] >> (half * 4 + plane)) & 1;
                self.codes[group * 16 + i] = low | high << 2;
            }
        }
    }

    // d, high 2 bits of 8 scales (u16), low 4 bits of 8 scales (4 bytes), nibble [256] in groups of 32
    fn iq4_xs(&mut self, b: &[u8]) {
        let high = short(b, 2);
        for group in 0..8 {
            let scale = nibble(&b[4..], group) | (((high >> (2 * group)) & 3) << 4) as u8;
            self.scales[2 * group..2 * group + 2].fill(scale as i8 - 32);
            for (i, &q) in b[8 + group * 16..][..16].iter().enumerate() {
                self.codes[group * 32 + i] = q & 15;
                self.codes[group * 32 + 16 + i] = q >> 4;
            }
        }
    }

    // d, for each 32: 4 entries (u8), then 4 x 7 signs and a 4-bit scale (u32)
    fn iq2_xxs(&mut self, b: &[u8]) {
        self.d *= 0.125;
        for group in 0..8 {
            let at = 2 + 8 * group;
            let signs = word(b, at + 4);
            self.odd_scale(group, (signs >> 28) as u8);
            for i in 0..4 {
                let m = eight(IQ2_XXS_AT, b[at + i].into());
                self.signed(group * 32 + i * 8, &m, even_signs(signs >> (7 * i)), 2);
            }
        }
    }

    // d, for each 8: 9 bits of entry and 7 signs (u16), 4-bit scales [16]
    fn iq2_xs(&mut self, b: &[u8]) {
        self.d *= 0.125;
        for i in 0..32 {
            let q = short(b, 2 + 2 * i);
            let m = eight(IQ2_XS_AT, (q & 511).into());
            self.signed(i * 8, &m, even_signs((q >> 9).into()), 2);
        }
        self.odd_scales(&b[66..]);
    }

    /// Sixteen odd scales from nibbles.
    fn odd_scales(&mut self, nibbles: &[u8]) {
        for i in 0..16 {
            self.scales[i] = (2 * nibble(nibbles, i) + 1) as i8;
        }
    }

    // d, low 8 bits of entries [32], signs [32], high 2 bits of entries [8], 4-bit scales [16]
    fn iq2_s(&mut self, b: &[u8]) {
        self.d *= 0.125;
        for i in 0..32 {
            let high = (b[66 + i / 4] >> (2 * (i % 4))) & 3;
            let m = eight(IQ2_S_AT, usize::from(b[2 + i]) | usize::from(high) << 8);
            self.signed(i * 8, &m, b[34 + i], 2);
        }
        self.odd_scales(&b[74..]);
    }

    // d, entries for 4 [64], for each 32: 4 x 7 signs and a 4-bit scale (u32)
    fn iq3_xxs(&mut self, b: &[u8]) {
        self.d *= 0.25;
        for group in 0..8 {
            let signs = word(b, 66 + 4 * group);
            self.odd_scale(group, (signs >> 28) as u8);
            for i in 0..8 {
                let m = four(IQ3_XXS_AT, b[2 + 8 * group + i].into());
                let eight = even_signs(signs >> (7 * (i / 2)));
                self.signed(group * 32 + i * 4, &m, eight >> (4 * (i % 2)), 3);
            }
        }
    }

    // d, low 8 bits of entries for 4 [64], their ninth bits [8], signs [32], 4-bit scales [8]
    fn iq3_s(&mut self, b: &[u8]) {
        for i in 0..64 {
            let ninth = (b[66 + i / 8] >> (i % 8)) & 1;
            let m = four(IQ3_S_AT, usize::from(b[2 + i]) | usize::from(ninth) << 8);
            let signs = b[74 + i / 2] >> (4 * (i % 2));
            for (j, m) in m.into_iter().enumerate() {
                self.codes[i * 4 + j] = if (signs >> j) & 1 == 0 { 8 + m } else { 7 - m };
            }
        }
        (0..8).for_each(|group| self.odd_scale(group, nibble(&b[106..], group)));
    }

    // d, low 8 bits of entries [32], for each 32: 4 x 3 high bits, 3-bit scale, sign of the shift (u16)
    fn iq1_s(&mut self, b: &[u8]) {
        self.d *= 0.125;
        for group in 0..8 {
            let high = short(b, 34 + 2 * group);
            self.odd_scale(group, ((high >> 12) & 7) as u8);
            for i in 0..4 {
                let entry = usize::from(b[2 + group * 4 + i]) | usize::from((high >> (3 * i)) & 7) << 8;
                self.shifted(group * 32 + i * 8, entry, high >> 15 == 1);
            }
        }
    }

    // low 8 bits of entries [32], nibbles of 3 high bits and the sign of the shift [32], 3-bit scales [16] and d in u16 [4]
    fn iq1_m(&mut self, b: &[u8]) {
        self.d = iq1_m_factor(b) * 0.125;
        for i in 0..32 {
            let high = nibble(&b[32..], i);
            self.shifted(i * 8, usize::from(b[i]) | usize::from(high & 7) << 8, high & 8 != 0);
        }
        for i in 0..16 {
            let s = (short(b, 48 + 2 * (i / 4)) >> (3 * (i % 4))) & 7;
            self.scales[i] = (2 * s + 1) as i8;
        }
    }

    /// Eight elements of IQ1: -1, 0 or 1 of the entry, plus or minus 1/8.
    fn shifted(&mut self, at: usize, entry: usize, is_down: bool) {
        for (i, m) in eight(IQ1_AT, entry).into_iter().enumerate() {
            // Eight times the value is 8 (m - 1) + 1 or - 1.
            self.codes[at + i] = match (m, is_down) {
                (0, false) => 5,
                (0, true) => 6,
                (1, false) => 0,
                (1, true) => 4,
                (_, false) => 2,
                (_, true) => 1,
            };
        }
    }
}

/// Ternary types: codes (0, 1 or 2; 3 is legal in 2-bit types) of a block, and its d.
pub fn ternary(dtype: DType, b: &[u8], codes: &mut [u8]) -> f32 {
    match dtype {
        DType::Q1_0 => {
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = 2 * ((b[2 + i / 8] >> (i % 8)) & 1));
            half_at(b, 0)
        }
        DType::Q2_0 => {
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = (b[2 + i / 4] >> (2 * (i % 4))) & 3);
            half_at(b, 0)
        }
        DType::TQ2_0 => {
            let at = |i: usize| (b[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4))) & 3;
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = at(i));
            half_at(b, 64)
        }
        _ => {
            codes.iter_mut().enumerate().for_each(|(i, code)| *code = base_three(b, i));
            half_at(b, 52)
        }
    }
}

/// Element i of TQ1_0: five digits to a byte, first digit highest; 32 bytes hold the first 160 elements, 16 the next 80,
/// and 4 (with four digits) the last 16.
fn base_three(b: &[u8], i: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (byte, digit) = match i {
        0..160 => (b[i % 32], i / 32),
        160..240 => (b[32 + i % 16], (i - 160) / 16),
        _ => (b[48 + i % 4], (i - 240) / 4),
    };
    ((u16::from(byte.wrapping_mul(POWERS[digit])) * 3) >> 8) as u8
}

/// The scale of MXFP4: half of 2^(e - 127), since the codes are doubled.
pub fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// Half of a scale of NVFP4, an unsigned E4M3; exact in f16. 127 is zero, as ggml reads it.
pub fn ue4m3_half(b: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(b >> 3 & 15), f32::from(b & 7));
    match (exponent, b) {
        (_, 127 | 255) => 0.0,
        (0, _) => mantissa * (1.0 / 1024.0),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 11),
    }
}

/// Dequantises a block of any type with a codebook.
pub fn dequantize(dtype: DType, b: &[u8], y: &mut [f32]) {
    let book = codebook(dtype).unwrap_or(&TERNARY);
    let value = |code: u8| f32::from(book[usize::from(code)]);
    match dtype {
        DType::IQ4_NL => nibbles(half_at(b, 0), &b[2..], y, value),
        DType::MXFP4 => nibbles(e8m0_half(b[0]), &b[1..], y, value),
        DType::NVFP4 => {
            for (group, y) in y.chunks_exact_mut(16).enumerate() {
                nibbles(ue4m3_half(b[group]), &b[4 + group * 8..][..8], y, value);
            }
        }
        _ => match Coded::read(dtype, b) {
            Some(block) => {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = block.d * f32::from(block.scales[i / 16]) * value(block.codes[i]);
                }
            }
            None => {
                let mut codes = [0; 256];
                let d = ternary(dtype, b, &mut codes[..y.len()]);
                y.iter_mut().zip(&codes).for_each(|(y, &code)| *y = d * value(code));
            }
        },
    }
}

/// The first half of `y` from low nibbles, the second from high ones.
fn nibbles(d: f32, codes: &[u8], y: &mut [f32], value: impl Fn(u8) -> f32) {
    for (i, &q) in codes.iter().enumerate() {
        y[i] = d * value(q & 15);
        y[codes.len() + i] = d * value(q >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_of_seven_bits_are_even() {
        assert_eq!([0, 1, 2, 3, 127].map(even_signs), [0, 0x81, 0x82, 3, 0xff]);
    }

    #[test]
    fn scales_of_four_bit_floats_are_powers_and_small_floats() {
        assert_eq!([0, 1, 2, 127, 128, 254].map(e8m0_half).map(|v| v.log2() as i32), [-128, -127, -126, -1, 0, 126]);
        assert_eq!(
            [0, 1, 8, 0x38, 0x39, 0x7e, 0x7f].map(ue4m3_half),
            [0.0, 1.0 / 1024.0, 1.0 / 128.0, 0.5, 0.5625, 224.0, 0.0]
        );
    }

    #[test]
    fn base_three_digits_come_back() {
        // 2 1 0 2 1 in base three, rounded up to 256ths of 243.
        let number = [2u32, 1, 0, 2, 1].iter().fold(0, |n, d| 3 * n + d);
        let mut block = [0u8; 54];
        block[0] = (number * 256).div_ceil(243) as u8;
        assert_eq!([0, 32, 64, 96, 128].map(|i| base_three(&block, i)), [2, 1, 0, 2, 1]);
    }
}
