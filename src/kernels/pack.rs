//! Repacks matrices of every storage type into the planes that kernels read. Exact: no bit of a weight changes.
//!
//! Rows go in blocks of 64 and elements in groups of 32 along k. Within a block the row runs fastest, so that 64 lanes
//! read 64 rows side by side, and a block is one contiguous stream of each plane:
//!
//! ```text
//! q   [n / 64][granules][64] x 16 bytes   elements; a granule is 4 (F32), 8 (F16, BF16), 16 (bytes) or 32 (nibbles)
//! h   [n / 64][groups][64] x 4 or 8 bytes upper bits of 5- and 6-bit elements
//! s   [n / 64][quads][64] x 8 or 16 bytes scales of four groups (of eight for K-quants)
//! ```
//!
//! Rows beyond n and groups beyond k are zero. A nibble granule holds element j in the low and j + 16 in the high half of
//! byte j. Upper bits lie where one shift and mask give four bytes: bit 8b + i of `h` is bit 4 of element 4i + b (5-bit);
//! bits 8b + 2i of word i / 4 are bits 4 and 5 (6-bit). Scales keep the file's own fields: f16 d; f16 d and m; f16 d and
//! dmin with the 12 bytes of 6-bit scales; i8 scales of 16 elements with f16 d.
//!
//! Not attempted: Q2_K, Q3_K and the IQ types.

use crate::gpu::Defines;
use crate::model::dtype::DType;

use super::GROUP;

/// Rows of a block.
pub const BLOCK_ROWS: u32 = 64;
const ROWS: usize = BLOCK_ROWS as usize;
const GRANULE: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    #[error("{0} weights are not supported on the GPU")]
    Unsupported(DType),
    #[error("rows of {k} elements do not fill the blocks of {dtype}")]
    PartialBlock { dtype: DType, k: u32 },
    #[error("{bytes} bytes are no whole number of {dtype} rows of {k} elements")]
    PartialRow { dtype: DType, k: u32, bytes: usize },
}

/// How the scales of a type lie.
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
}

/// The planes of a storage type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    pub dtype: DType,
    granules_per_group: usize,
    high_bytes: usize,
    scales: Scales,
    /// Planes are texels instead of buffers; see [`Format::as_texels`].
    is_texels: bool,
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

impl Format {
    pub fn of(dtype: DType) -> Result<Format, PackError> {
        let (granules_per_group, high_bytes, scales) = match dtype {
            DType::F32 => (8, 0, Scales::None),
            DType::F16 | DType::BF16 => (4, 0, Scales::None),
            DType::Q8_0 => (2, 0, Scales::Half),
            DType::Q4_0 => (1, 0, Scales::Half),
            DType::Q4_1 => (1, 0, Scales::Pair),
            DType::Q5_0 => (1, 4, Scales::Half),
            DType::Q5_1 => (1, 4, Scales::Pair),
            DType::Q4_K => (1, 0, Scales::K),
            DType::Q5_K => (1, 4, Scales::K),
            DType::Q6_K => (1, 8, Scales::Sixths),
            DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS => return Err(PackError::Unsupported(dtype)),
        };
        Ok(Format { dtype, granules_per_group, high_bytes, scales, is_texels: false })
    }

    /// The same planes as texels: granules of 16 bytes, upper bits of a group and scales of a quad each in one texel. Blocks
    /// lie side by side, each 64 texels wide: texel (64 * (b % w) + r, (b / w) * h + i) is item i of row r of block b, for
    /// planes of w blocks in a row and h items in a block.
    pub fn as_texels(self) -> Format {
        Format { is_texels: true, ..self }
    }

    pub fn is_texels(self) -> bool {
        self.is_texels
    }

    /// Bytes of a texel of each plane; 0 where there is no such plane.
    pub fn texel_bytes(self) -> PlaneBytes {
        let s = match self.scales {
            Scales::None => 0,
            Scales::Half => 8,
            Scales::Pair | Scales::K | Scales::Sixths => 16,
        };
        PlaneBytes { q: GRANULE as u64, h: self.high_bytes as u64, s }
    }

    /// Elements are integers with scales; else they are floats.
    pub fn is_quantised(self) -> bool {
        self.scales != Scales::None
    }

    pub fn has_high_bits(self) -> bool {
        self.high_bytes > 0
    }

    /// Nibbles without upper bits: what the `PAIRS` kernels multiply.
    pub fn is_four_bit(self) -> bool {
        self.is_quantised() && self.granules_per_group == 1 && self.high_bytes == 0
    }

    /// Kernels must walk k by quads of groups.
    pub fn needs_quads(self) -> bool {
        matches!(self.scales, Scales::K | Scales::Sixths)
    }

    /// What kernels are compiled with for this type.
    pub fn defines(self) -> Defines {
        let names: &[&str] = match self.dtype {
            DType::F16 => &["TWO_BYTES"],
            DType::BF16 => &["TWO_BYTES", "BRAINS"],
            DType::Q8_0 => &["QUANTISED", "BYTES", "SCALE_HALF"],
            DType::Q4_0 => &["QUANTISED", "SCALE_HALF", "HAS_MINIMUM"],
            DType::Q4_1 => &["QUANTISED", "SCALE_PAIR", "HAS_MINIMUM"],
            DType::Q5_0 => &["QUANTISED", "HAS_HIGH", "FIFTHS", "SCALE_HALF", "HAS_MINIMUM"],
            DType::Q5_1 => &["QUANTISED", "HAS_HIGH", "FIFTHS", "SCALE_PAIR", "HAS_MINIMUM"],
            DType::Q4_K => &["QUANTISED", "SCALE_K", "HAS_MINIMUM"],
            DType::Q5_K => &["QUANTISED", "HAS_HIGH", "FIFTHS", "SCALE_K", "HAS_MINIMUM"],
            DType::Q6_K => &["QUANTISED", "HAS_HIGH", "SIXTHS"],
            _ => &["FLOATS"],
        };
        let defines = names.iter().fold(Defines::new(), |d, name| d.flag(name));
        let defines = if self.is_texels { defines.flag("TEXELS") } else { defines };
        match self.dtype {
            DType::Q4_0 => defines.set("OFFSET", 8),
            DType::Q5_0 => defines.set("OFFSET", 16),
            _ => defines,
        }
    }

    /// Bytes of a block of 64 rows with k elements.
    pub fn block_bytes(self, k: u32) -> PlaneBytes {
        let groups = u64::from(k.div_ceil(GROUP));
        let rows = u64::from(BLOCK_ROWS);
        let s = match self.scales {
            Scales::None => 0,
            Scales::Half => groups.div_ceil(4) * 8,
            Scales::Pair | Scales::Sixths => groups.div_ceil(4) * 16,
            Scales::K => groups.div_ceil(8) * 16,
        };
        PlaneBytes {
            q: groups * self.granules_per_group as u64 * GRANULE as u64 * rows,
            h: groups * self.high_bytes as u64 * rows,
            s: s * rows,
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
                DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS => {
                    unreachable!("Format::of refuses this type")
                }
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

/// One block's part of each plane.
struct Block<'a> {
    q: &'a mut [u8],
    h: &'a mut [u8],
    s: &'a mut [u8],
}

impl Block<'_> {
    fn granule(&mut self, granule: usize, row: usize) -> &mut [u8] {
        &mut self.q[(granule * ROWS + row) * GRANULE..][..GRANULE]
    }

    fn high_word(&mut self, group: usize, row: usize, word: u32) {
        self.h[(group * ROWS + row) * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }

    /// The f16 scale of a group, for types with nothing else.
    fn half_scale(&mut self, group: usize, row: usize, d: &[u8]) {
        self.s[((group / 4) * ROWS + row) * 8 + group % 4 * 2..][..2].copy_from_slice(d);
    }

    fn pair_scale(&mut self, group: usize, row: usize, d_m: &[u8]) {
        self.s[((group / 4) * ROWS + row) * 16 + group % 4 * 4..][..4].copy_from_slice(d_m);
    }

    fn dense(&mut self, row: usize, bytes: &[u8]) {
        for (g, piece) in bytes.chunks(GRANULE).enumerate() {
            self.granule(g, row)[..piece.len()].copy_from_slice(piece);
        }
    }

    // f16 d, i8 q[32]
    fn q8_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(34).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.granule(2 * g, row).copy_from_slice(&b[2..18]);
            self.granule(2 * g + 1, row).copy_from_slice(&b[18..]);
        }
    }

    // f16 d, nibbles[32]
    fn q4_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(18).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.granule(g, row).copy_from_slice(&b[2..]);
        }
    }

    // f16 d, f16 m, nibbles[32]
    fn q4_1(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(20).enumerate() {
            self.pair_scale(g, row, &b[..4]);
            self.granule(g, row).copy_from_slice(&b[4..]);
        }
    }

    // f16 d, u32 of fifth bits, nibbles[32]
    fn q5_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(22).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.high_word(g, row, spread_fifths(word(&b[2..6])));
            self.granule(g, row).copy_from_slice(&b[6..]);
        }
    }

    // f16 d, f16 m, u32 of fifth bits, nibbles[32]
    fn q5_1(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(24).enumerate() {
            self.pair_scale(g, row, &b[..4]);
            self.high_word(g, row, spread_fifths(word(&b[4..8])));
            self.granule(g, row).copy_from_slice(&b[8..]);
        }
    }

    // f16 d, f16 dmin, scales[12], then 4 x 32 bytes of nibbles for two groups each
    fn q4_k(&mut self, row: usize, bytes: &[u8]) {
        for (block, b) in bytes.chunks_exact(144).enumerate() {
            self.s[(block * ROWS + row) * 16..][..16].copy_from_slice(&b[..16]);
            self.k_nibbles(block, row, &b[16..]);
        }
    }

    // as Q4_K, with 32 bytes of fifth bits (bit g of byte l is element l of group g) before the nibbles
    fn q5_k(&mut self, row: usize, bytes: &[u8]) {
        for (block, b) in bytes.chunks_exact(176).enumerate() {
            self.s[(block * ROWS + row) * 16..][..16].copy_from_slice(&b[..16]);
            self.k_nibbles(block, row, &b[48..]);
            for g in 0..8 {
                let bits = (0..32).fold(0u32, |bits, l| bits | u32::from((b[16 + l] >> g) & 1) << l);
                self.high_word(block * 8 + g, row, spread_fifths(bits));
            }
        }
    }

    /// Nibbles of a K-quant block: byte l of part p holds element l of groups 2p (low) and 2p + 1 (high).
    fn k_nibbles(&mut self, block: usize, row: usize, nibbles: &[u8]) {
        for (part, b) in nibbles.chunks_exact(32).enumerate() {
            let low = self.granule(block * 8 + 2 * part, row);
            for (j, byte) in low.iter_mut().enumerate() {
                *byte = (b[j] & 15) | (b[j + 16] << 4);
            }
            let high = self.granule(block * 8 + 2 * part + 1, row);
            for (j, byte) in high.iter_mut().enumerate() {
                *byte = (b[j] >> 4) | (b[j + 16] & 0xf0);
            }
        }
    }

    // 2 x 64 bytes of nibbles, 2 x 32 bytes of upper bits, i8 scales[16], f16 d; see `sixth`.
    fn q6_k(&mut self, row: usize, bytes: &[u8]) {
        for (block, b) in bytes.chunks_exact(210).enumerate() {
            for quad in 0..2 {
                let s = &mut self.s[((block * 2 + quad) * ROWS + row) * 16..][..10];
                s[..8].copy_from_slice(&b[192 + 8 * quad..][..8]);
                s[8..].copy_from_slice(&b[208..]);
            }
            for g in 0..8 {
                let mut upper = [0u32; 2];
                let granule = self.granule(block * 8 + g, row);
                for (j, byte) in granule.iter_mut().enumerate() {
                    let (low, high) = (sixth(b, g, j), sixth(b, g, j + 16));
                    *byte = (low & 15) | (high & 15) << 4;
                    let shift = 8 * (j % 4) + 2 * (j / 4);
                    upper[0] |= u32::from(low >> 4) << shift;
                    upper[1] |= u32::from(high >> 4) << shift;
                }
                let h = &mut self.h[((block * 8 + g) * ROWS + row) * 8..][..8];
                h[..4].copy_from_slice(&upper[0].to_le_bytes());
                h[4..].copy_from_slice(&upper[1].to_le_bytes());
            }
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Moves bit 4i + b (element 4i + b) to bit 8b + i.
fn spread_fifths(bits: u32) -> u32 {
    (0..8).fold(0, |word, i| {
        let four = (bits >> (4 * i)) & 15;
        // Bits 0..4 of `four` go to bits 0, 8, 16, 24.
        word | ((four.wrapping_mul(0x0020_4081) & 0x0101_0101) << i)
    })
}

/// Element l of group g of a Q6_K block, 0..64. Half p = g / 4 has its nibbles in bytes 64p.. (groups 0 and 1 low, 2 and
/// 3 high, odd groups 32 bytes further) and its upper bits in bytes 128 + 32p.., two for each group.
fn sixth(b: &[u8], g: usize, l: usize) -> u8 {
    let (half, part) = (g / 4, g % 4);
    let nibble = (b[64 * half + 32 * (part % 2) + l] >> (4 * (part / 2))) & 15;
    let upper = (b[128 + 32 * half + l] >> (2 * part)) & 3;
    nibble | upper << 4
}

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

    fn q(&self, granule_in_group: usize) -> &'a [u8] {
        let granule = self.group * self.format.granules_per_group + granule_in_group;
        let start = (self.block * self.groups * self.format.granules_per_group + granule) * ROWS + self.row;
        &self.planes.q[start * GRANULE..][..GRANULE]
    }

    fn float(&self) -> f32 {
        let per_granule = GROUP as usize / self.format.granules_per_group;
        let q = self.q(self.in_group / per_granule);
        let i = self.in_group % per_granule;
        match self.format.dtype {
            DType::F32 => f32::from_bits(word(&q[4 * i..])),
            DType::F16 => half_at(q, 2 * i),
            _ => f32::from_bits(u32::from(u16::from_le_bytes([q[2 * i], q[2 * i + 1]])) << 16),
        }
    }

    /// The stored integer: signed for bytes, else 0..16, 0..32 or 0..64.
    fn integer(&self) -> f32 {
        if self.format.dtype == DType::Q8_0 {
            return f32::from(self.q(self.in_group / 16)[self.in_group % 16] as i8);
        }
        let nibble = (self.q(0)[self.in_group % 16] >> (4 * (self.in_group / 16))) & 15;
        let h = ((self.block * self.groups + self.group) * ROWS + self.row) * self.format.high_bytes;
        let (four, byte) = (self.in_group / 4, self.in_group % 4);
        let upper = match self.format.high_bytes {
            0 => 0,
            4 => (word(&self.planes.h[h..]) >> (8 * byte + four)) & 1,
            _ => (word(&self.planes.h[h + four / 4 * 4..]) >> (8 * byte + 2 * (four % 4))) & 3,
        };
        f32::from(nibble) + 16.0 * upper as f32
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::quant::dequantize;

    pub const PACKED_TYPES: [DType; 11] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

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
            let format = Format::of(dtype).unwrap();
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
            let format = Format::of(dtype).unwrap();
            let k = 256;
            let bytes = vec![0xbfu8; dtype.bytes(65 * k).unwrap() as usize];
            let planes = pack(format, k as u32, &bytes);
            let block = format.block_bytes(k as u32);
            let sizes = [planes.q.len(), planes.h.len(), planes.s.len()];
            assert_eq!(sizes, [block.q, block.h, block.s].map(|b| 2 * b as usize), "{dtype}");
            assert_eq!(format.matrix_bytes(65, k as u32), 2 * (block.q + block.h + block.s), "{dtype}");
            assert_eq!(element(format, &planes, k as u32, 127, 255), 0.0, "{dtype}: rows beyond n");
        }
        // Packing costs at most 7 % over the file's own bytes.
        for dtype in PACKED_TYPES {
            let format = Format::of(dtype).unwrap();
            let ratio = format.matrix_bytes(64, 1024) as f64 / dtype.bytes(64 * 1024).unwrap() as f64;
            assert!((1.0..1.07).contains(&ratio), "{dtype}: {ratio}");
        }
    }

    #[test]
    fn types_and_rows_that_do_not_fit_are_refused() {
        assert_eq!(Format::of(DType::Q2_K), Err(PackError::Unsupported(DType::Q2_K)));
        let format = Format::of(DType::Q4_K).unwrap();
        assert_eq!(format.row_bytes(288), Err(PackError::PartialBlock { dtype: DType::Q4_K, k: 288 }));
    }
}
