//! Writes rows of the affine GGUF types into the planes of a block of 64 rows.

use super::{GRANULE, ROWS};

/// One block's part of each plane.
pub(super) struct Block<'a> {
    pub q: &'a mut [u8],
    pub h: &'a mut [u8],
    pub s: &'a mut [u8],
}

impl Block<'_> {
    pub fn granule(&mut self, granule: usize, row: usize) -> &mut [u8] {
        &mut self.q[(granule * ROWS + row) * GRANULE..][..GRANULE]
    }

    pub fn high_word(&mut self, group: usize, row: usize, word: u32) {
        self.h[(group * ROWS + row) * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }

    /// The f16 scale of a group, for types with nothing else.
    pub fn half_scale(&mut self, group: usize, row: usize, d: &[u8]) {
        self.s[((group / 4) * ROWS + row) * 8 + group % 4 * 2..][..2].copy_from_slice(d);
    }

    fn pair_scale(&mut self, group: usize, row: usize, d_m: &[u8]) {
        self.s[((group / 4) * ROWS + row) * 16 + group % 4 * 4..][..4].copy_from_slice(d_m);
    }

    pub fn dense(&mut self, row: usize, bytes: &[u8]) {
        for (g, piece) in bytes.chunks(GRANULE).enumerate() {
            self.granule(g, row)[..piece.len()].copy_from_slice(piece);
        }
    }

    // f16 d, i8 q[32]
    pub fn q8_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(34).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.granule(2 * g, row).copy_from_slice(&b[2..18]);
            self.granule(2 * g + 1, row).copy_from_slice(&b[18..]);
        }
    }

    // f16 d, nibbles[32]
    pub fn q4_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(18).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.granule(g, row).copy_from_slice(&b[2..]);
        }
    }

    // f16 d, f16 m, nibbles[32]
    pub fn q4_1(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(20).enumerate() {
            self.pair_scale(g, row, &b[..4]);
            self.granule(g, row).copy_from_slice(&b[4..]);
        }
    }

    // f16 d, u32 of fifth bits, nibbles[32]
    pub fn q5_0(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(22).enumerate() {
            self.half_scale(g, row, &b[..2]);
            self.high_word(g, row, spread_fifths(word(&b[2..6])));
            self.granule(g, row).copy_from_slice(&b[6..]);
        }
    }

    // f16 d, f16 m, u32 of fifth bits, nibbles[32]
    pub fn q5_1(&mut self, row: usize, bytes: &[u8]) {
        for (g, b) in bytes.chunks_exact(24).enumerate() {
            self.pair_scale(g, row, &b[..4]);
            self.high_word(g, row, spread_fifths(word(&b[4..8])));
            self.granule(g, row).copy_from_slice(&b[8..]);
        }
    }

    // f16 d, f16 dmin, scales[12], then 4 x 32 bytes of nibbles for two groups each
    pub fn q4_k(&mut self, row: usize, bytes: &[u8]) {
        for (block, b) in bytes.chunks_exact(144).enumerate() {
            self.s[(block * ROWS + row) * 16..][..16].copy_from_slice(&b[..16]);
            self.k_nibbles(block, row, &b[16..]);
        }
    }

    // as Q4_K, with 32 bytes of fifth bits (bit g of byte l is element l of group g) before the nibbles
    pub fn q5_k(&mut self, row: usize, bytes: &[u8]) {
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
    pub fn q6_k(&mut self, row: usize, bytes: &[u8]) {
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

pub(super) fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Moves bit 4i + b (element 4i + b) to bit 8b + i.
pub(super) fn spread_fifths(bits: u32) -> u32 {
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
