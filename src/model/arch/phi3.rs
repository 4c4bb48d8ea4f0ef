//! Phi-3: llama with fused projections, a part of each head that rotates, and a sliding window.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::spec::{ModelSpec, RopePairing, WeightRole};

pub const FAMILY: Family = Family {
    name: "phi3",
    hf_class: "Phi3ForCausalLM",
    gguf_name: Some("phi3"),
    spec_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf_fused_qkv_and_up,
};

fn spec_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let spec = config.base_spec("phi3", &Defaults { partial_rotary: Some(1.0), ..Defaults::llama(4096) })?;
    let window = config.count("sliding_window")?;
    Ok(ModelSpec { windows: vec![window; spec.windows.len()], ..spec })
}

fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    metadata.base_spec("phi3", RopePairing::Half)
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    use WeightRole::*;
    let dim = u64::from(spec.head_dim);
    let (q, kv, ffn) =
        (u64::from(spec.num_heads) * dim, u64::from(spec.num_kv_heads) * dim, u64::from(spec.intermediate_size));
    let (layer, name, from, of) = match role {
        Q(l) => (l, "self_attn.qkv_proj", 0, q + 2 * kv),
        K(l) => (l, "self_attn.qkv_proj", q, q + 2 * kv),
        V(l) => (l, "self_attn.qkv_proj", q + kv, q + 2 * kv),
        Gate(l) => (l, "mlp.gate_up_proj", 0, 2 * ffn),
        Up(l) => (l, "mlp.gate_up_proj", ffn, 2 * ffn),
        other => return names::hf(spec, other),
    };
    Source::part(format!("model.layers.{layer}.{name}.weight"), Part::Rows { from, of })
}
