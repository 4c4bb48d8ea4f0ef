//! Randomness without state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011), a counter-based generator. Word j of the block (seed, position, token / 4) belongs to token 4i + j, so any
//! lane of any kernel finds a token's number by itself and four neighbours share one block.

use super::Draw;
use crate::ids::TokenId;

const ROUNDS: u32 = 10;
const MUL_0: u32 = 0xD251_1F53;
const MUL_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;

/// Ten rounds of Philox4x32.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let p0 = u64::from(MUL_0) * u64::from(c0);
        let p1 = u64::from(MUL_1) * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL_0);
        k1 = k1.wrapping_add(WEYL_1);
    }
    [c0, c1, c2, c3]
}

/// The 32 random bits of (draw, token).
pub fn token_bits(draw: Draw, token: TokenId) -> u32 {
    let key = [draw.seed as u32, (draw.seed >> 32) as u32];
    philox4x32_10([token / 4, draw.position, 0, 0], key)[token as usize % 4]
}

/// A standard Gumbel variate from 32 random bits: `-ln(-ln(1 - v))` with `v = (bits + 1/2) / 2^32`.
///
/// The exponential inside is small where `v` is small, which is where the winners of an argmax lie: there f32 (on the
/// GPU) resolves it best.
pub fn gumbel(bits: u32) -> f64 {
    let v = (f64::from(bits) + 0.5) / 4_294_967_296.0;
    -(-(-v).ln_1p()).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        let check = |counter, key, expect| assert_eq!(philox4x32_10(counter, key), expect);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn neighbouring_tokens_seeds_and_positions_get_different_bits() {
        let mut seen = std::collections::HashSet::new();
        for seed in [0, 1, 1 << 32] {
            for position in 0..8 {
                for token in 0..64 {
                    assert!(seen.insert(token_bits(Draw { seed, position }, token)));
                }
            }
        }
    }

    #[test]
    fn gumbel_is_finite_at_both_ends_and_has_its_mean_and_variance() {
        assert!(gumbel(0).is_finite() && gumbel(u32::MAX).is_finite());
        assert!(gumbel(0) > 22.0 && gumbel(u32::MAX) < -3.0);
        let n = 200_000u32;
        let draws: Vec<f64> = (0..n).map(|i| gumbel(token_bits(Draw { seed: 9, position: 3 }, i))).collect();
        let mean = draws.iter().sum::<f64>() / f64::from(n);
        let variance = draws.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 0.577_215_66).abs() < 0.01, "mean {mean}");
        assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.03, "variance {variance}");
    }
}
