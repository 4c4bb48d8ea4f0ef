//! CPU dequantisation: the reference for every block format.
//!
//! Guarantees: the results equal ggml's and gguf-py's bit for bit (the same products in the same order, without fused
//! multiply-add). Formats: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md> and ggml's `ggml-common.h`.
//! Layout of a block: `d` and `m` (or `dmin`) are f16 scales, low nibbles come before high nibbles. Types with a codebook
//! are read by [`super::coded`].
//! It does not attempt speed: kernels do that, and are tested against this.

use super::coded;
use super::dtype::DType;
use half::{bf16, f16};

/// Bytes or output of the wrong length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{dtype} needs {expected_bytes} bytes for {elements} elements, not {bytes}")]
pub struct QuantError {
    pub dtype: DType,
    pub elements: usize,
    /// `whole blocks only` when the elements do not fill blocks.
    pub expected_bytes: String,
    pub bytes: usize,
}

/// Dequantises whole blocks into `out`. `bytes` must hold exactly `out.len()` elements of `dtype`.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let expected = dtype.bytes(out.len() as u64);
    if expected != Some(bytes.len() as u64) {
        return Err(QuantError {
            dtype,
            elements: out.len(),
            expected_bytes: expected.map_or("whole blocks of".to_string(), |b| b.to_string()),
            bytes: bytes.len(),
        });
    }
    let block: fn(DType, &[u8], &mut [f32]) = match dtype {
        DType::F32 => |_, b, y| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => |_, b, y| y[0] = half_at(b, 0),
        DType::BF16 => |_, b, y| y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q8_0 => |_, b, y| q8_0(b, y),
        DType::Q4_0 => |_, b, y| q4_0(b, y),
        DType::Q4_1 => |_, b, y| q4_1(b, y),
        DType::Q5_0 => |_, b, y| q5_0(b, y),
        DType::Q5_1 => |_, b, y| q5_1(b, y),
        DType::Q2_K => |_, b, y| q2_k(b, y),
        DType::Q4_K => |_, b, y| q4_k(b, y),
        DType::Q5_K => |_, b, y| q5_k(b, y),
        DType::Q6_K => |_, b, y| q6_k(b, y),
        DType::Int4(_) => {
            |_, b, y| spanned(b, y, |codes, i| f32::from((codes[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4)) & 15))
        }
        DType::Int8(_) => |_, b, y| spanned(b, y, |codes, i| f32::from(codes[i] as i8)),
        DType::Float8(_) => |_, b, y| spanned(b, y, |codes, i| e4m3(codes[i])),
        _ => coded::dequantize,
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (b, y) in blocks.zip(out.chunks_exact_mut(dtype.block_elements())) {
        block(dtype, b, y);
    }
    Ok(())
}

/// Dequantises row `row` of a matrix with rows of `out.len()` elements.
pub fn dequantize_row(dtype: DType, bytes: &[u8], row: usize, out: &mut [f32]) -> Result<(), QuantError> {
    let row_bytes = dtype.bytes(out.len() as u64).unwrap_or(0) as usize;
    let range = row.checked_mul(row_bytes).and_then(|start| bytes.get(start..start.checked_add(row_bytes)?));
    dequantize(dtype, range.unwrap_or(&[]), out)
}

/// Index of the first block whose scale (or, for plain types, element) is NaN or infinite.
/// Reads scales only, so it costs little more than walking the bytes.
pub fn first_non_finite_block(dtype: DType, bytes: &[u8]) -> Option<usize> {
    let finite: fn(&[u8]) -> bool = match dtype {
        DType::F32 => |b| b[3] & 0x7f != 0x7f || b[2] & 0x80 == 0,
        DType::BF16 => |b| b[1] & 0x7f != 0x7f || b[0] & 0x80 == 0,
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => |b| half_finite(b, 0) && half_finite(b, 2),
        DType::Q2_K => |b| half_finite(b, 80) && half_finite(b, 82),
        DType::Q3_K => |b| half_finite(b, 108),
        DType::Q6_K => |b| half_finite(b, 208),
        DType::TQ1_0 => |b| half_finite(b, 52),
        DType::TQ2_0 => |b| half_finite(b, 64),
        DType::IQ1_M => |b| coded::iq1_m_factor(b).is_finite(),
        // Twelve times 2^(253 - 128) leaves the range of f32.
        DType::MXFP4 => |b| b[0] < 253,
        DType::NVFP4 => |_| true,
        DType::Int4(_) | DType::Int8(_) => |b| float_at(b, 0).is_finite() && float_at(b, 4).is_finite(),
        DType::Float8(_) => {
            |b| float_at(b, 0).is_finite() && float_at(b, 4).is_finite() && b[8..].iter().all(|c| c & 127 != 127)
        }
        _ => |b| half_finite(b, 0),
    };
    bytes.chunks_exact(dtype.block_bytes()).position(|b| !finite(b))
}

fn half_finite(b: &[u8], at: usize) -> bool {
    b[at + 1] & 0x7c != 0x7c
}

fn float_at(b: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// An 8-bit float with 4 bits of exponent (bias 7) and 3 of mantissa, without infinities; 127 and 255 are no numbers.
pub fn e4m3(b: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(b >> 3 & 15), f32::from(b & 7));
    let magnitude = match (exponent, b & 127) {
        (_, 127) => f32::NAN,
        (0, _) => mantissa * (1.0 / 512.0),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if b < 128 { magnitude } else { -magnitude }
}

// f32 scale, f32 minimum, codes
fn spanned(b: &[u8], y: &mut [f32], code: impl Fn(&[u8], usize) -> f32) {
    let (scale, minimum) = (float_at(b, 0), float_at(b, 4));
    y.iter_mut().enumerate().for_each(|(i, y)| *y = scale * code(&b[8..], i) + minimum);
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

// d, int8[32]
fn q8_0(b: &[u8], y: &mut [f32]) {
    let d = half_at(b, 0);
    for (y, &q) in y.iter_mut().zip(&b[2..34]) {
        *y = d * f32::from(q as i8);
    }
}

// d, nibble[32]
fn q4_0(b: &[u8], y: &mut [f32]) {
    let d = half_at(b, 0);
    for (i, &q) in b[2..18].iter().enumerate() {
        y[i] = d * (f32::from(q & 15) - 8.0);
        y[i + 16] = d * (f32::from(q >> 4) - 8.0);
    }
}

// d, m, nibble[32]
fn q4_1(b: &[u8], y: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, &q) in b[4..20].iter().enumerate() {
        y[i] = d * f32::from(q & 15) + m;
        y[i + 16] = d * f32::from(q >> 4) + m;
    }
}

/// The fifth bits of a 32-block: bit i belongs to element i.
fn fifth_bits(b: &[u8]) -> u32 {
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

fn five_bit(nibble: u8, high: u32, i: usize) -> f32 {
    f32::from(nibble | (((high >> i) & 1) << 4) as u8)
}

// d, high bits u32, nibble[32]
fn q5_0(b: &[u8], y: &mut [f32]) {
    let (d, high) = (half_at(b, 0), fifth_bits(&b[2..6]));
    for (i, &q) in b[6..22].iter().enumerate() {
        y[i] = d * (five_bit(q & 15, high, i) - 16.0);
        y[i + 16] = d * (five_bit(q >> 4, high, i + 16) - 16.0);
    }
}

// d, m, high bits u32, nibble[32]
fn q5_1(b: &[u8], y: &mut [f32]) {
    let (d, m, high) = (half_at(b, 0), half_at(b, 2), fifth_bits(&b[4..8]));
    for (i, &q) in b[8..24].iter().enumerate() {
        y[i] = d * five_bit(q & 15, high, i) + m;
        y[i + 16] = d * five_bit(q >> 4, high, i + 16) + m;
    }
}

// (scale, min) nibbles [16], 2-bit[256], d, dmin. Each group of 16 has one scale; 32 bytes hold four planes of 32.
fn q2_k(b: &[u8], y: &mut [f32]) {
    let (scales, qs) = (&b[..16], &b[16..80]);
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for (group, y) in y.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[group] & 15);
        let min = dmin * f32::from(scales[group] >> 4);
        let (half, plane, sub) = (group / 8, group / 2 % 4, group % 2);
        let codes = &qs[half * 32 + sub * 16..][..16];
        for (y, &q) in y.iter_mut().zip(codes) {
            *y = scale * f32::from((q >> (2 * plane)) & 3) - min;
        }
    }
}

/// The 6-bit scale and min of 32-group `group`, as Q4_K and Q5_K pack eight of each into 12 bytes.
pub fn scale_min_k4(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        (
            (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4),
            (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4),
        )
    }
}

// d, dmin, 6-bit scales and mins in 12 bytes, nibble[256]: 32 bytes hold two groups of 32.
fn q4_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (group, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min_k4(&b[4..16], group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let codes = &b[16 + group / 2 * 32..][..32];
        for (y, &q) in y.iter_mut().zip(codes) {
            *y = scale * f32::from((q >> (4 * (group % 2))) & 15) - min;
        }
    }
}

// As Q4_K with 32 bytes of fifth bits before the nibbles: bit `group` of byte i belongs to element i of the group.
fn q5_k(b: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let high = &b[16..48];
    for (group, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min_k4(&b[4..16], group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let codes = &b[48 + group / 2 * 32..][..32];
        for (i, y) in y.iter_mut().enumerate() {
            let q = ((codes[i] >> (4 * (group % 2))) & 15) | (((high[i] >> group) & 1) << 4);
            *y = scale * f32::from(q) - min;
        }
    }
}

// low nibbles [128 bytes], high 2 bits [64 bytes], int8 scales[16], d
fn q6_k(b: &[u8], y: &mut [f32]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = half_at(b, 208);
    for (i, y) in y.iter_mut().enumerate() {
        let (half, quarter, column) = (i / 128, i % 128 / 32, i % 32);
        let nibble = (low[half * 64 + quarter % 2 * 32 + column] >> (4 * (quarter / 2))) & 15;
        let bits = (high[half * 32 + column] >> (2 * quarter)) & 3;
        let code = f32::from(nibble | (bits << 4)) - 32.0;
        *y = d * f32::from(scales[i / 16] as i8) * code;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::model::dtype::GGUF_TYPES as ALL;

    #[test]
    fn wrong_lengths_are_refused() {
        for dtype in ALL {
            let mut out = vec![0.0; dtype.block_elements()];
            let bytes = vec![0u8; dtype.block_bytes()];
            assert!(dequantize(dtype, &bytes, &mut out).is_ok(), "{dtype}");
            assert!(dequantize(dtype, &bytes[1..], &mut out).is_err(), "{dtype}");
            assert!(dequantize_row(dtype, &bytes, 1, &mut out).is_err(), "{dtype}");
            assert!(dequantize_row(dtype, &bytes, usize::MAX, &mut out).is_err(), "{dtype}");
        }
        assert!(dequantize(DType::Q4_0, &[0; 18], &mut [0.0; 31]).is_err());
    }

    #[test]
    fn non_finite_scales_are_found_where_dequantisation_gives_no_number() {
        for dtype in ALL {
            let size = dtype.block_bytes();
            for at in 0..size {
                // Codes of all ones with one byte pair that may be a scale set to NaN.
                let mut bytes = vec![0x11u8; 3 * size];
                bytes[size + at] = 0xff;
                if at + 1 < size {
                    bytes[size + at + 1] = 0x7f;
                }
                let mut out = vec![0.0; 3 * dtype.block_elements()];
                dequantize(dtype, &bytes, &mut out).expect("lengths fit");
                let bad = out.iter().position(|v| !v.is_finite()).map(|i| i / dtype.block_elements());
                assert_eq!(first_non_finite_block(dtype, &bytes), bad, "{dtype} byte {at}");
            }
        }
    }

    #[test]
    fn a_row_is_the_slice_of_the_whole() {
        let bytes: Vec<u8> = (0..4 * 18u32).map(|i| (i * 37 % 120) as u8).collect();
        let mut whole = vec![0.0; 4 * 32];
        dequantize(DType::Q4_0, &bytes, &mut whole).expect("lengths fit");
        let mut row = vec![0.0; 64];
        dequantize_row(DType::Q4_0, &bytes, 1, &mut row).expect("lengths fit");
        assert_eq!(row, whole[64..]);
    }
}
