//! Rope settings of `config.json`: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4.x).

use super::config::Config;
use crate::model::error::Fault;
use crate::model::rope::yarn_mscale;
use crate::model::spec::{RopePairing, RopeScaling, RopeSpec};

const DEFAULT_THETA: f64 = 10_000.0;

/// Reads either style; `rope_scaling`, where given, wins, as in transformers.
pub fn from_config(config: &Config, head_dim: u32, max_position: u32, pairing: RopePairing) -> Result<RopeSpec, Fault> {
    let parameters = config.object("rope_parameters")?;
    let legacy = config.object("rope_scaling")?;
    let rope = legacy.as_ref().or(parameters.as_ref());
    let theta = match (&legacy, &parameters) {
        (Some(rope), _) | (None, Some(rope)) if rope.get("rope_theta").is_some() => rope.number("rope_theta")?,
        _ => config.number("rope_theta")?,
    };
    for source in rope.into_iter().chain([config]) {
        if let Some(share) = source.number("partial_rotary_factor")?.filter(|&share| share != 1.0) {
            return Err(Fault::Unsupported(format!("partial_rotary_factor {share} is not supported for this family")));
        }
    }
    let scaling = match rope {
        None => RopeScaling::None,
        Some(rope) => scaling(rope, config, max_position)?,
    };
    Ok(RopeSpec { theta: theta.unwrap_or(DEFAULT_THETA), rotary_dim: head_dim, pairing, scaling })
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
        other => {
            let known = "default, linear, llama3, yarn";
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
