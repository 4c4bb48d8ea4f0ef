//! Command R (cohere) and Command R7B (cohere2): attention and MLP side by side through one LayerNorm without bias, pairs of
//! neighbours rotate, logits are scaled. Cohere 2 has windows in most layers and rotates in those alone.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{BlockSpec, ModelSpec, NormKind, QkNorm, Residual, RopePairing, RopeSpec};

pub const COHERE: Family = Family {
    name: "cohere",
    hf_class: "CohereForCausalLM",
    gguf_name: Some("command-r"),
    spec_of_config: |config| of_config(config, "cohere"),
    spec_of_gguf: cohere_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

pub const COHERE2: Family = Family {
    name: "cohere2",
    hf_class: "Cohere2ForCausalLM",
    gguf_name: Some("cohere2"),
    spec_of_config: cohere2_of_config,
    spec_of_gguf: cohere2_of_gguf,
    hf_tensor: names::hf,
    gguf_tensor: names::gguf,
};

/// Every so many layers of cohere2 see all keys.
const PATTERN: u32 = 4;

fn block() -> BlockSpec {
    BlockSpec { norm: NormKind::Layer { bias: false }, residual: Residual::ParallelOneNorm, ..BlockSpec::LLAMA }
}

fn of_config(config: &Config, family: &str) -> Result<ModelSpec, Fault> {
    let renamed = config.renamed(&[("rms_norm_eps", "layer_norm_eps")]);
    let spec = Config::new(&renamed).base_spec(family, &Defaults { tie_embeddings: true, ..Defaults::llama(8192) })?;
    let has_norms = config.flag("use_qk_norm", false)?;
    let bias = config.flag("attention_bias", false)?;
    let block = BlockSpec {
        activation: spec.block.activation,
        logit_scale: config.number("logit_scale")?.unwrap_or(0.0625) as f32,
        ..block()
    };
    Ok(ModelSpec {
        q_bias: bias,
        k_bias: bias,
        v_bias: bias,
        o_bias: bias,
        qk_norm: if has_norms { QkNorm::LayerPerHead } else { QkNorm::None },
        rope: RopeSpec { pairing: RopePairing::Interleaved, ..spec.rope },
        block,
        ..spec
    })
}

fn cohere2_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let pattern = config.count("sliding_window_pattern")?.or(config.count("_sliding_window_pattern")?);
    let spec = of_config(config, "cohere2")?;
    let windows = config.pattern_windows(spec.num_layers, pattern.unwrap_or(PATTERN))?;
    Ok(windowed(spec, windows))
}

/// Layers that see all keys do not rotate.
fn windowed(spec: ModelSpec, windows: Vec<Option<u32>>) -> ModelSpec {
    let layers_without_rope = (0..spec.num_layers).filter(|&l| windows[l as usize].is_none()).collect();
    ModelSpec { windows, block: BlockSpec { layers_without_rope, ..spec.block }, ..spec }
}

fn cohere_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = metadata.base_spec("cohere", RopePairing::Interleaved)?;
    let has_norms = metadata.has_tensor("blk.0.attn_q_norm.weight");
    let logit_scale = metadata.number("logit_scale")?.unwrap_or(0.0625) as f32;
    let qk_norm = if has_norms { QkNorm::LayerPerHead } else { QkNorm::None };
    Ok(ModelSpec { qk_norm, block: BlockSpec { logit_scale, ..block() }, ..spec })
}

fn cohere2_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let spec = ModelSpec { arch: "cohere2".into(), ..cohere_of_gguf(metadata)? };
    let window = spec.windows.first().copied().flatten();
    let windows = (0..spec.num_layers).map(|l| window.filter(|_| !(l + 1).is_multiple_of(PATTERN))).collect();
    Ok(windowed(spec, windows))
}
