//! Elements of packed planes as kernels compute them, for references and tests.

use crate::kernels::GROUP;
use crate::model::coded;
use crate::model::dtype::DType;

use super::block::word;
use super::{BLOCK_ROWS, Format, GRANULE, Planes, ROWS, Scales};

/// Element (row, k) of packed planes as kernels compute it, for references and tests. `k_total` is the row's length.
pub fn element(format: Format, planes: &Planes, k_total: u32, row: u32, k: u32) -> f32 {
    let at = ElementPlace::new(format, planes, k_total, row, k);
    match format.scales {
        Scales::None => at.float(),
        Scales::Half => {
            let d = half_at(planes.s.as_slice(), at.s(8) + at.quarter * 2);
            let offset = match format.dtype {
                DType::Q4_0 => 8.0,
                DType::Q5_0 => 16.0,
                _ => 0.0,
            };
            d * (at.integer() - offset)
        }
        Scales::Pair => {
            let s = at.s(16) + at.quarter * 4;
            half_at(&planes.s, s) * at.integer() + half_at(&planes.s, s + 2)
        }
        Scales::K => {
            let s = &planes.s[at.s(16)..][..16];
            let (scale, min) = crate::model::quant::scale_min_k4(&s[4..], at.group % 8);
            half_at(s, 0) * f32::from(scale) * at.integer() - half_at(s, 2) * f32::from(min)
        }
        Scales::Sixths => {
            let s = &planes.s[at.s(16)..][..16];
            let scale = s[at.quarter * 2 + at.in_group / 16] as i8;
            half_at(s, 8) * f32::from(scale) * (at.integer() - 32.0)
        }
        Scales::Q2 => {
            let pair = planes.s[at.word(5, at.group % 8 / 2) + at.group % 2 * 2 + at.in_group / 16];
            let d = at.word(5, 4);
            half_at(&planes.s, d) * f32::from(pair & 15) * at.integer()
                - half_at(&planes.s, d + 2) * f32::from(pair >> 4)
        }
        Scales::Sixteens => {
            let scale = planes.s[at.word(5, at.group % 8 / 2) + at.group % 2 * 2 + at.in_group / 16] as i8;
            float_at(&planes.s, at.word(5, 4)) * f32::from(scale) * at.integer()
        }
        Scales::ThirtyTwos => {
            let scale = planes.s[at.word(3, at.group % 8 / 4) + at.group % 4] as i8;
            float_at(&planes.s, at.word(3, 2)) * f32::from(scale) * at.integer()
        }
        Scales::Powers => coded::e8m0_half(planes.s[at.s(4) + at.quarter]) * at.integer(),
        Scales::TwoHalves => {
            let s = ((at.block * at.groups + at.group) * ROWS + at.row) * 4 + at.in_group / 16 * 2;
            half_at(&planes.s, s) * at.integer()
        }
        Scales::Floats(span) => {
            let s = (at.block * at.groups.div_ceil(span.groups()) + at.group / span.groups()) * ROWS + at.row;
            float_at(&planes.s, 8 * s) * at.integer() + float_at(&planes.s, 8 * s + 4)
        }
    }
}

/// Where an element lies.
struct ElementPlace<'a> {
    format: Format,
    planes: &'a Planes,
    block: usize,
    row: usize,
    groups: usize,
    group: usize,
    in_group: usize,
    quarter: usize,
}

impl<'a> ElementPlace<'a> {
    fn new(format: Format, planes: &'a Planes, k_total: u32, row: u32, k: u32) -> ElementPlace<'a> {
        let (group, in_group) = ((k / GROUP) as usize, (k % GROUP) as usize);
        let (block, row) = ((row / BLOCK_ROWS) as usize, (row % BLOCK_ROWS) as usize);
        let groups = k_total.div_ceil(GROUP) as usize;
        ElementPlace { format, planes, block, row, groups, group, in_group, quarter: group % 4 }
    }

    /// Byte of the scales, `bytes` for each row of a quad (of two for K-quants).
    fn s(&self, bytes: usize) -> usize {
        let per = if self.format.scales == Scales::K { 8 } else { 4 };
        ((self.block * self.groups.div_ceil(per) + self.group / per) * ROWS + self.row) * bytes
    }

    /// Byte of word w of the scales of eight groups, which have so many words.
    fn word(&self, words: usize, w: usize) -> usize {
        (((self.block * self.groups.div_ceil(8) + self.group / 8) * words + w) * ROWS + self.row) * 4
    }

    fn q(&self, granule_in_group: usize) -> &'a [u8] {
        let granules = self.format.q_bytes / GRANULE;
        let granule = self.group * granules + granule_in_group;
        let start = (self.block * self.groups * granules + granule) * ROWS + self.row;
        &self.planes.q[start * GRANULE..][..GRANULE]
    }

    fn float(&self) -> f32 {
        let per_granule = GROUP as usize * GRANULE / self.format.q_bytes;
        let q = self.q(self.in_group / per_granule);
        let i = self.in_group % per_granule;
        match self.format.dtype {
            DType::F32 => f32::from_bits(word(&q[4 * i..])),
            DType::F16 => half_at(q, 2 * i),
            _ => f32::from_bits(u32::from(u16::from_le_bytes([q[2 * i], q[2 * i + 1]])) << 16),
        }
    }

    /// The stored integer: signed for bytes and codes, else 0..4, 0..16, 0..32 or 0..64.
    fn integer(&self) -> f32 {
        if self.format.q_bytes == 32 {
            let byte = self.q(self.in_group / 16)[self.in_group % 16];
            return match self.format.dtype {
                DType::Float8(_) => crate::model::quant::e4m3(byte),
                _ => f32::from(byte as i8),
            };
        }
        let (four, byte) = (self.in_group / 4, self.in_group % 4);
        let place = (self.block * self.groups + self.group) * ROWS + self.row;
        let low_bits = self.format.q_bytes / 4;
        let low = match low_bits {
            2 => ((word(&self.planes.q[place * 8 + four / 4 * 4..]) >> (8 * byte + 2 * (four % 4))) & 3) as u8,
            _ => (self.q(0)[self.in_group % 16] >> (4 * (self.in_group / 16))) & 15,
        };
        let h = place * self.format.high_bytes;
        let upper = match self.format.high_bytes {
            0 => 0,
            4 => (word(&self.planes.h[h..]) >> (8 * byte + four)) & 1,
            _ => (word(&self.planes.h[h + four / 4 * 4..]) >> (8 * byte + 2 * (four % 4))) & 3,
        };
        let code = low | (upper as u8) << low_bits;
        match coded::codebook(self.format.dtype) {
            Some(book) => f32::from(book[usize::from(code)]),
            None => f32::from(code),
        }
    }
}

fn float_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(word(&bytes[at..]))
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}
