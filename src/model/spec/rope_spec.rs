//! What a checkpoint says of its rotary position embedding.

use serde::{Deserialize, Serialize};

/// Rotary position embedding (RoFormer, arXiv 2104.09864).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    pub theta: f64,
    /// Leading dims of each head that rotate; even, at most `head_dim`.
    pub rotary_dim: u32,
    pub pairing: RopePairing,
    pub scaling: RopeScaling,
}

/// Which two dims form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RopePairing {
    /// (i, i + rotary_dim/2): Hugging Face's order.
    Half,
    /// (2i, 2i + 1): the order of llama GGUFs, whose Q and K rows are permuted.
    Interleaved,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: u32,
    },
    /// YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_position: u32,
        attention_factor: f64,
        truncate: bool,
    },
    /// NTK-aware: another base where the context is longer than `original_max_position`.
    Dynamic {
        factor: f64,
        original_max_position: u32,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor per pair, `long` where the context is longer than `original_max_position`;
    /// `attention_factor` multiplies cos and sin. [rotary_dim / 2]
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_max_position: u32,
        attention_factor: f64,
    },
    /// A divisor per pair, as GGUF's `rope_freqs.weight` holds it. [rotary_dim / 2]
    FreqFactors {
        factors: Vec<f32>,
    },
}

impl RopeSpec {
    pub(super) fn validate(&self, head_dim: u32) -> Result<(), String> {
        let RopeSpec { theta, rotary_dim, scaling, .. } = self;
        if *rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || *rotary_dim > head_dim {
            return Err(format!("the rotary dimension must be even and at most {head_dim}, not {rotary_dim}"));
        }
        if !(theta.is_finite() && *theta > 1.0) {
            return Err(format!("rope_theta must be above 1, not {theta}"));
        }
        let positive = |what: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                Ok(())
            } else {
                Err(format!("rope {what} must be above 0, not {value}"))
            }
        };
        let factors_of = |what: &str, factors: &[f32]| {
            if factors.len() != *rotary_dim as usize / 2 {
                return Err(format!("rope {what} has {} numbers; it needs {}", factors.len(), rotary_dim / 2));
            }
            factors.iter().try_for_each(|&f| positive(what, f64::from(f)))
        };
        match scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive("factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("original_max_position_embeddings", f64::from(*original_max_position))?;
                if !(high_freq_factor.is_finite() && high_freq_factor > low_freq_factor) {
                    return Err(format!("rope high_freq_factor must be above low_freq_factor, not {high_freq_factor}"));
                }
                Ok(())
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, .. } => {
                positive("factor", *factor)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("attention_factor", *attention_factor)?;
                positive("original_max_position_embeddings", f64::from(*original_max_position))
            }
            RopeScaling::Dynamic { factor, original_max_position } => {
                if *rotary_dim < 4 {
                    return Err(format!("dynamic rope needs a rotary dimension above 2, not {rotary_dim}"));
                }
                if !(factor.is_finite() && *factor >= 1.0) {
                    return Err(format!("rope factor must be at least 1, not {factor}"));
                }
                positive("max_position_embeddings", f64::from(*original_max_position))
            }
            RopeScaling::LongRope { short, long, original_max_position, attention_factor } => {
                positive("attention_factor", *attention_factor)?;
                positive("original_max_position_embeddings", f64::from(*original_max_position))?;
                factors_of("short_factor", short)?;
                factors_of("long_factor", long)
            }
            RopeScaling::FreqFactors { factors } => factors_of("frequency factors", factors),
        }
    }
}
