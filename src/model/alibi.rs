//! Linear position biases (Press et al., arXiv 2108.12409) as falcon's models were trained with them: slopes and what they
//! add are bf16.

use half::bf16;

/// What a position adds to the scores of a head.
pub fn slope(head: u32, num_heads: u32) -> f32 {
    let whole = 1u32 << num_heads.max(1).ilog2();
    // Powers of one base for as many heads as a power of two has, then odd powers of its root.
    let base = |heads: u32| 2f32.powf(-(2f32.powf(3.0 - heads.ilog2() as f32)));
    let slope = match head.checked_sub(whole) {
        None => base(whole).powi(head as i32 + 1),
        Some(more) => base(2 * whole).powi(2 * more as i32 + 1),
    };
    bf16::from_f32(slope).to_f32()
}

/// What a key's position adds to the score, before scores are scaled.
pub fn bias(slope: f32, position: u32) -> f32 {
    bf16::from_f32(slope * position as f32).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_powers_that_more_heads_interleave() {
        let of = |heads: u32| (0..heads).map(|head| slope(head, heads)).collect::<Vec<_>>();
        assert_eq!(of(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(of(8)[..3], [0.5, 0.25, 0.125]);
        assert_eq!(of(12)[8..], [1.0, 0.5, 0.25, 0.125].map(|part| part * 0.70703125));
        assert_eq!(bias(0.70703125, 40), 28.25);
    }
}
