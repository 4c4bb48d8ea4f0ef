//! Rope settings of `config.json`: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4.x).

use super::config::Config;
use crate::model::error::Fault;
use crate::model::rope::{longrope_attention, yarn_mscale};
use crate::model::spec::{RopePairing, RopeScaling, RopeSpec};

const DEFAULT_THETA: f64 = 10_000.0;

/// Reads either style; `rope_scaling`, where given, wins, as in transformers. `partial` is the family's share of each
/// head that rotates, `None` where it has no such key. Parameters by layer type count as those of full attention.
pub fn from_config(config: &Config, head_dim: u32, max_position: u32, partial: Option<f64>) -> Result<RopeSpec, Fault> {
    let parameters = config.object("rope_parameters")?;
    let parameters = match parameters {
        Some(parameters) => parameters.object("full_attention")?.or(Some(parameters)),
        None => None,
    };
    let legacy = config.object("rope_scaling")?;
    let rope = legacy.as_ref().or(parameters.as_ref());
    let theta = match (&legacy, &parameters) {
        (Some(rope), _) | (None, Some(rope)) if rope.get("rope_theta").is_some() => rope.number("rope_theta")?,
        _ => config.number("rope_theta")?,
    };
    let mut share = partial.unwrap_or(1.0);
    for source in [Some(config), rope].into_iter().flatten() {
        match (source.number("partial_rotary_factor")?, partial) {
            (Some(given), Some(_)) => share = given,
            (Some(given), None) if given != 1.0 => {
                let fault = format!("partial_rotary_factor {given} is not supported for this family");
                return Err(Fault::Unsupported(fault));
            }
            _ => {}
        }
    }
    let rotary_dim = (f64::from(head_dim) * share) as u32;
    let scaling = match rope {
        None => RopeScaling::None,
        Some(rope) => scaling(rope, config, max_position)?,
    };
    let theta = theta.unwrap_or(DEFAULT_THETA);
    Ok(RopeSpec { theta, rotary_dim, pairing: RopePairing::Half, scaling })
}

/// The rope of windowed layers where it differs from that of the others (gemma3): `rope_parameters.sliding_attention`,
/// else `rope_local_base_freq`.
pub fn windowed(config: &Config, full: &RopeSpec, max_position: u32) -> Result<RopeSpec, Fault> {
    let parameters = config.object("rope_parameters")?;
    let own = match &parameters {
        Some(parameters) => parameters.object("sliding_attention")?,
        None => None,
    };
    let (theta, scaling) = match &own {
        Some(own) => (own.number("rope_theta")?, scaling(own, config, max_position)?),
        None => (config.number("rope_local_base_freq")?, RopeScaling::None),
    };
    Ok(RopeSpec { theta: theta.unwrap_or(DEFAULT_THETA), scaling, ..full.clone() })
}

fn scaling(rope: &Config, config: &Config, max_position: u32) -> Result<RopeScaling, Fault> {
    let kind = match rope.text("rope_type")? {
        Some(kind) => kind,
        None => rope.text("type")?.unwrap_or("default"),
    };
    let nonzero = |key: &str| Ok::<_, Fault>(rope.number(key)?.filter(|&v| v != 0.0));
    let original = || -> Result<u32, Fault> {
        let own = rope.count("original_max_position_embeddings")?;
        Ok(own.or(config.count("original_max_position_embeddings")?).unwrap_or(max_position))
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: rope.required_number("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: rope.required_number("factor")?,
            low_freq_factor: rope.required_number("low_freq_factor")?,
            high_freq_factor: rope.required_number("high_freq_factor")?,
            original_max_position: original()?,
        }),
        "yarn" => {
            let factor = rope.required_number("factor")?;
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
                beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
                original_max_position: original()?,
                attention_factor: yarn_attention(rope, factor)?,
                truncate: rope.flag("truncate", true)?,
            })
        }
        "dynamic" => {
            Ok(RopeScaling::Dynamic { factor: rope.required_number("factor")?, original_max_position: max_position })
        }
        // The older name is that of the first Phi-3 files.
        "longrope" | "su" => {
            let original = original()?;
            // Where both lengths are known, their ratio is the factor.
            let factor = match rope.number("factor")? {
                Some(factor) if original == max_position => factor,
                _ => f64::from(max_position) / f64::from(original.max(1)),
            };
            Ok(RopeScaling::LongRope {
                short: rope.required_numbers("short_factor")?,
                long: rope.required_numbers("long_factor")?,
                original_max_position: original,
                attention_factor: match rope.number("attention_factor")? {
                    Some(given) => given,
                    None => longrope_attention(factor, original),
                },
            })
        }
        other => {
            let known = "default, linear, dynamic, llama3, longrope, yarn";
            Err(Fault::Unsupported(format!("rope scaling `{other}` is not supported; supported: {known}")))
        }
    }
}

/// `attention_factor` where given, else by `mscale` and `mscale_all_dim`, else the paper's `0.1 ln(factor) + 1`.
fn yarn_attention(rope: &Config, factor: f64) -> Result<f64, Fault> {
    if let Some(given) = rope.number("attention_factor")? {
        return Ok(given);
    }
    let nonzero = |key: &str| Ok::<_, Fault>(rope.number(key)?.filter(|&v| v != 0.0));
    Ok(match (nonzero("mscale")?, nonzero("mscale_all_dim")?) {
        (Some(mscale), Some(all_dim)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        _ => yarn_mscale(factor, 1.0),
    })
}
