//! From packed codes to the rows that are handed out.

use super::{Codes, Packed, Zeros};
use crate::model::dtype::DType;
use crate::model::quant::e4m3;

/// Rows that are read together, so that words which hold a column's code of many rows are read once.
const ROWS: usize = 16;
/// AWQ: nibble i of a word is column `ORDER[i]` of eight.
const AWQ_SHIFT: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

fn word(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

impl Packed<'_> {
    /// All rows, as [`Packed::dtype`] stores them.
    pub fn bytes(&self) -> Vec<u8> {
        let row_bytes = self.dtype.bytes(self.k as u64).expect("rows were checked to fill blocks") as usize;
        let mut out = Vec::with_capacity(self.n * row_bytes);
        let mut codes = vec![0u8; ROWS * self.k];
        let mut sorted = vec![0u8; self.k];
        for first in (0..self.n).step_by(ROWS) {
            let rows = ROWS.min(self.n - first);
            self.read_codes(first, rows, &mut codes);
            for (r, codes) in codes.chunks_exact(self.k).take(rows).enumerate() {
                let codes = match &self.order {
                    Some(order) => {
                        sorted.iter_mut().zip(order.iter()).for_each(|(c, &from)| *c = codes[from as usize]);
                        &sorted
                    }
                    None => codes,
                };
                self.write_row(first + r, codes, &mut out);
            }
        }
        out
    }

    /// Codes of some rows, `[rows, k]`.
    fn read_codes(&self, first: usize, rows: usize, out: &mut [u8]) {
        let (n, k) = (self.n, self.k);
        match self.codes {
            // Four and eight bits: whole codes in a word.
            Codes::Down(bits) if 32 % bits.bits == 0 => {
                let (per_word, mask) = (32 / bits.bits, ((1u64 << bits.bits) - 1) as u32);
                for w in 0..k / per_word {
                    for r in 0..rows {
                        let mut word = word(bits.bytes, w * n + first + r);
                        for code in &mut out[r * k + w * per_word..][..per_word] {
                            *code = (word & mask) as u8;
                            word >>= bits.bits;
                        }
                    }
                }
            }
            Codes::Down(bits) => {
                for r in 0..rows {
                    for i in 0..k {
                        let (w, shift) = (i * bits.bits / 32, i * bits.bits % 32);
                        let low = u64::from(word(bits.bytes, w * n + first + r));
                        let both = match shift + bits.bits > 32 {
                            true => low | u64::from(word(bits.bytes, (w + 1) * n + first + r)) << 32,
                            false => low,
                        };
                        out[r * k + i] = ((both >> shift) & ((1 << bits.bits) - 1)) as u8;
                    }
                }
            }
            Codes::Along(bits) => {
                let row_bytes = (k * bits.bits).div_ceil(32) * 4;
                for r in 0..rows {
                    let from = (first + r) * row_bytes;
                    (0..k).for_each(|i| out[r * k + i] = bits.at(from, i) as u8);
                }
            }
            Codes::Awq(bytes) => {
                for i in 0..k {
                    for r in 0..rows {
                        let row = first + r;
                        out[r * k + i] = ((word(bytes, i * (n / 8) + row / 8) >> AWQ_SHIFT[row % 8]) & 15) as u8;
                    }
                }
            }
            Codes::Bytes(bytes) => out[..rows * k].copy_from_slice(&bytes[first * k..][..rows * k]),
        }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        let row = row / self.group.0;
        self.scales.at(match self.scales_down {
            true => group * (self.n / self.group.0) + row,
            false => row * self.groups + group,
        })
    }

    /// What is added to `scale * code`, where the stored code is `code + shift`.
    fn minimum(&self, row: usize, group: usize, shift: i32) -> f32 {
        let scale = self.scale(row, group);
        let zero = match self.zeros {
            Zeros::Is(zero) => zero,
            Zeros::Down(bits, offset) => {
                let row_bytes = (self.n * bits.bits).div_ceil(32) * 4;
                bits.at(group * row_bytes, row) as i32 + offset
            }
            Zeros::Up(bits) => {
                let (w, place) = (row * bits.bits / 32, row * bits.bits % 32);
                ((word(bits.bytes, w * self.groups + group) >> place) & ((1 << bits.bits) - 1)) as i32
            }
            Zeros::Awq(bytes) => ((word(bytes, group * (self.n / 8) + row / 8) >> AWQ_SHIFT[row % 8]) & 15) as i32,
            Zeros::Bytes(bytes) => i32::from(bytes[row * self.groups + group] as i8),
            Zeros::Biases(biases) => return biases.at(row * self.groups + group) + shift as f32 * scale,
        };
        (shift - zero) as f32 * scale
    }

    fn group_of(&self, j: usize) -> usize {
        let input = self.order.as_ref().map_or(j, |order| order[j] as usize);
        match &self.group_of {
            Some(group_of) => group_of[input] as usize,
            None => input / self.group.1,
        }
    }

    fn write_row(&self, row: usize, codes: &[u8], out: &mut Vec<u8>) {
        let is_signed = matches!(self.codes, Codes::Bytes(_));
        if self.dtype == DType::F32 {
            return self.write_floats(row, codes, out);
        }
        let span = self.dtype.block_elements();
        for (b, codes) in codes.chunks_exact(span).enumerate() {
            let group = self.group_of(b * span);
            // Unsigned bytes are moved to where signed ones are.
            let is_moved = matches!(self.dtype, DType::Int8(_)) && !is_signed;
            out.extend(self.scale(row, group).to_le_bytes());
            out.extend(self.minimum(row, group, if is_moved { 128 } else { 0 }).to_le_bytes());
            match self.dtype {
                DType::Int4(_) => {
                    for group in codes.chunks_exact(32) {
                        out.extend((0..16).map(|j| group[j] | group[j + 16] << 4));
                    }
                }
                _ if is_moved => out.extend(codes.iter().map(|c| c ^ 0x80)),
                _ => out.extend(codes),
            }
        }
    }

    fn write_floats(&self, row: usize, codes: &[u8], out: &mut Vec<u8>) {
        for (j, &code) in codes.iter().enumerate() {
            let group = self.group_of(j);
            let code = match (self.codes, self.is_float) {
                (_, true) => e4m3(code),
                (Codes::Bytes(_), false) => f32::from(code as i8),
                _ => f32::from(code),
            };
            out.extend((self.scale(row, group) * code + self.minimum(row, group, 0)).to_le_bytes());
        }
    }
}
