//! Rotary frequencies and tables, as transformers computes them in f32.
//!
//! `inv_freq[i] = 1 / theta^(2i / rotary_dim)`, then the scaling; `cos[p][i] = cos(f32(p * inv_freq[i])) * attention`.
//! Products are rounded to f32 where transformers' tensors are f32, so that angles at far positions agree; powers and
//! cosines are correctly rounded f64 results, which differ from its vectorised ones by at most one unit in the last place.
//! Scalings: linear (positions divided), llama3 (Llama 3.1), YaRN (arXiv 2309.00071), dynamic (NTK-aware), LongRoPE
//! (arXiv 2402.13753), per-pair factors (GGUF).
//!
//! Dynamic and LongRoPE depend on how long the context is. Keys in the cache are turned once, so the length that counts is the
//! one that the engine is set up for, not that of a sequence.

use super::spec::{RopeScaling, RopeSpec};
use std::f64::consts::PI;

/// Frequency of each rotated pair in radians per position, for contexts of so many positions. [rotary_dim / 2]
pub fn inv_freq(spec: &RopeSpec, num_positions: u32) -> Vec<f32> {
    let base = default_inv_freq(spec);
    match &spec.scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base.into_iter().map(|f| f / *factor as f32).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            let original = f64::from(*original_max_position);
            base.into_iter().map(|f| llama3(f, *factor, *low_freq_factor, *high_freq_factor, original)).collect()
        }
        RopeScaling::Yarn { .. } => yarn(spec),
        RopeScaling::Dynamic { factor, original_max_position } if num_positions > *original_max_position => {
            let length = f64::from(num_positions) / f64::from(*original_max_position);
            let dim = f64::from(spec.rotary_dim);
            let theta = spec.theta * (factor * length - (factor - 1.0)).powf(dim / (dim - 2.0));
            default_inv_freq(&RopeSpec { theta, ..spec.clone() })
        }
        RopeScaling::Dynamic { .. } => base,
        RopeScaling::LongRope { short, long, original_max_position, .. } => {
            let factors = if num_positions > *original_max_position { long } else { short };
            powers(spec).zip(factors).map(|(power, factor)| 1.0 / (factor * power)).collect()
        }
        RopeScaling::FreqFactors { factors } => base.into_iter().zip(factors).map(|(f, factor)| f / factor).collect(),
    }
}

/// What cos and sin are multiplied with: 1 except for YaRN and LongRoPE.
pub fn attention_factor(spec: &RopeSpec) -> f32 {
    match spec.scaling {
        RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
            attention_factor as f32
        }
        _ => 1.0,
    }
}

/// LongRoPE's default for a context that was made `factor` times as long: `sqrt(1 + ln(factor) / ln(original))`.
pub fn longrope_attention(factor: f64, original_max_position: u32) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / f64::from(original_max_position).ln()).sqrt() }
}

/// YaRN's default: `0.1 * mscale * ln(factor) + 1` for factors above 1.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Cosines and sines of positions `0..num_positions`, the attention factor applied. [num_positions, rotary_dim / 2]
pub fn cos_sin_table(spec: &RopeSpec, num_positions: u32) -> (Vec<f32>, Vec<f32>) {
    let inv_freq = inv_freq(spec, num_positions);
    let attention = attention_factor(spec);
    let len = num_positions as usize * inv_freq.len();
    let (mut cos, mut sin) = (Vec::with_capacity(len), Vec::with_capacity(len));
    for position in 0..num_positions {
        for &freq in &inv_freq {
            let angle = f64::from(position as f32 * freq);
            cos.push(angle.cos() as f32 * attention);
            sin.push(angle.sin() as f32 * attention);
        }
    }
    (cos, sin)
}

/// `theta^(2i / dim)` per pair.
fn powers(spec: &RopeSpec) -> impl Iterator<Item = f32> {
    let (theta, dim) = (f64::from(spec.theta as f32), spec.rotary_dim as f32);
    (0..spec.rotary_dim / 2).map(move |i| theta.powf(f64::from((2 * i) as f32 / dim)) as f32)
}

fn default_inv_freq(spec: &RopeSpec) -> Vec<f32> {
    powers(spec).map(|p| 1.0 / p).collect()
}

fn llama3(freq: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / freq;
    if wavelength > (original / low) as f32 {
        return freq / factor as f32;
    }
    if wavelength < (original / high) as f32 {
        return freq;
    }
    let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * freq / factor as f32 + smooth * freq
}

fn yarn(spec: &RopeSpec) -> Vec<f32> {
    let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } = spec.scaling else {
        return default_inv_freq(spec);
    };
    let dim = f64::from(spec.rotary_dim);
    // The pair whose wavelength makes `rotations` turns over the original context.
    let pair_of_rotations = |rotations: f64| {
        dim * (f64::from(original_max_position) / (rotations * 2.0 * PI)).ln() / (2.0 * spec.theta.ln())
    };
    let (mut low, mut high) = (pair_of_rotations(beta_fast), pair_of_rotations(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, power): (usize, f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        (1.0 / (factor as f32 * power)) * (1.0 - keep) + (1.0 / power) * keep
    };
    powers(spec).enumerate().map(blend).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::RopePairing;

    fn spec(dim: u32, theta: f64, scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta, rotary_dim: dim, pairing: RopePairing::Half, scaling }
    }

    #[test]
    fn first_pair_turns_one_radian_per_position() {
        let freqs = inv_freq(&spec(8, 10000.0, RopeScaling::None), 1);
        assert_eq!(freqs, [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn linear_scaling_divides_all_frequencies() {
        let freqs = inv_freq(&spec(4, 10000.0, RopeScaling::Linear { factor: 4.0 }), 1);
        assert_eq!(freqs, [0.25, 0.0025]);
    }

    #[test]
    fn llama3_keeps_short_waves_and_divides_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let (plain, scaled) =
            (inv_freq(&spec(128, 500000.0, RopeScaling::None), 1), inv_freq(&spec(128, 500000.0, scaling), 1));
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]));
        let blended = scaled.iter().zip(&plain).filter(|(s, p)| **s != **p && **s != **p / 8.0).count();
        assert!(blended > 0, "the middle is interpolated");
    }

    #[test]
    fn yarn_interpolates_only_long_waves_and_scales_attention() {
        let attention_factor = yarn_mscale(8.0, 1.0);
        assert!((attention_factor - 1.207_944_154).abs() < 1e-9);
        let scaling = RopeScaling::Yarn {
            factor: 8.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096,
            attention_factor,
            truncate: true,
        };
        let yarned = spec(64, 10000.0, scaling);
        let (plain, scaled) = (inv_freq(&spec(64, 10000.0, RopeScaling::None), 1), inv_freq(&yarned, 1));
        assert_eq!(scaled[0], plain[0]);
        let last = scaled[31] / plain[31];
        assert!((last - 0.125).abs() < 1e-6, "{last}");
        let (cos, sin) = cos_sin_table(&yarned, 2);
        assert_eq!(cos[0], 1.207_944_2);
        assert_eq!(sin[0], 0.0);
    }

    /// Largest difference as a part of the reference's.
    fn error(got: &[f32], want: &[f64]) -> f64 {
        assert_eq!(got.len(), want.len());
        got.iter().zip(want).map(|(got, want)| (f64::from(*got) / want - 1.0).abs()).fold(0.0, f64::max)
    }

    // Made with transformers 5.24.
    #[test]
    fn dynamic_scaling_turns_to_another_base_beyond_the_trained_context() {
        let spec = spec(16, 10000.0, RopeScaling::Dynamic { factor: 2.0, original_max_position: 128 });
        let plain = [1.0, 0.316227764, 0.1, 0.0316227786, 0.00999999978, 0.00316227786, 0.00100000005, 0.000316227786];
        let longer = [
            1.0,
            0.2702961266040802,
            0.07305999845266342,
            0.019747832790017128,
            0.005337762646377087,
            0.0014427766436710954,
            0.00038997692172415555,
            0.00010540925723034889,
        ];
        for (num_positions, want) in [(1, &plain), (128, &plain), (256, &longer)] {
            let error = error(&inv_freq(&spec, num_positions), want);
            assert!(error < 3e-7, "{num_positions}: {error:e}");
        }
    }

    #[test]
    fn longrope_divides_by_the_factors_of_the_context_that_is_set_up() {
        let attention_factor = longrope_attention(4.0, 64);
        assert!((attention_factor - 1.1547005383792517).abs() < 1e-12);
        let scaling = RopeScaling::LongRope {
            short: (0..8).map(|i| 1.0 + 0.1 * i as f32).collect(),
            long: (1..=8).map(|i| i as f32).collect(),
            original_max_position: 64,
            attention_factor,
        };
        let spec = spec(16, 10000.0, scaling);
        let short = [
            1.0,
            0.2874797582626343,
            0.0833333358168602,
            0.024325214326381683,
            0.0071428571827709675,
            0.0021081853192299604,
            0.0006249999860301614,
            0.0001860163320088759,
        ];
        let long = [
            1.0,
            0.15811388194561005,
            0.03333333507180214,
            0.007905694656074047,
            0.0020000000949949026,
            0.0005270463298074901,
            0.0001428571413271129,
            3.9528473280370235e-05,
        ];
        for (num_positions, want) in [(64, &short), (65, &long)] {
            let error = error(&inv_freq(&spec, num_positions), want);
            assert!(error < 3e-7, "{num_positions}: {error:e}");
        }
        assert_eq!(cos_sin_table(&spec, 1).0[0], 1.154_700_5);
    }

    #[test]
    fn factors_divide_pair_by_pair() {
        let freqs = inv_freq(&spec(4, 10000.0, RopeScaling::FreqFactors { factors: vec![1.0, 8.0] }), 1);
        assert_eq!(freqs, [1.0, 0.01 / 8.0]);
    }
}
