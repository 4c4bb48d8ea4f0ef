//! DeepSeek V2 and V3: latent attention, a shared expert, dense layers first; V2 chooses experts by softmax and a group's best,
//! V3 by sigmoid with a bias for the choice and the two best of a group.

use super::config::{Config, Defaults};
use super::metadata::Metadata;
use super::source::{Part, Source};
use super::{Family, names};
use crate::model::error::{Fault, ModelError};
use crate::model::experts::{ExpertSpec, MixPart, Routing, Scoring};
use crate::model::latent::{LatentPart, LatentSpec};
use crate::model::rope::yarn_mscale;
use crate::model::spec::{BlockSpec, ModelSpec, RopePairing, RopeScaling, RopeSpec, WeightRole};

pub const V2: Family = Family {
    name: "deepseek_v2",
    hf_class: "DeepseekV2ForCausalLM",
    gguf_name: Some("deepseek2"),
    spec_of_config: v2_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

pub const V3: Family = Family {
    name: "deepseek_v3",
    hf_class: "DeepseekV3ForCausalLM",
    gguf_name: None,
    spec_of_config: v3_of_config,
    spec_of_gguf,
    hf_tensor,
    gguf_tensor: names::gguf,
};

/// GGUF files call both versions `deepseek2`; which one it is, the gating tells.
fn spec_of_gguf(metadata: &Metadata) -> Result<ModelSpec, ModelError> {
    let scoring = match metadata.whole_number("expert_gating_func")?.unwrap_or(1) {
        0 | 1 => Scoring::Softmax,
        2 => Scoring::Sigmoid,
        other => return metadata.unsupported(format!("expert_gating_func {other} is not supported")),
    };
    let name = if scoring == Scoring::Sigmoid { "deepseek_v3" } else { "deepseek_v2" };
    let spec = metadata.base_spec_with_experts(name, RopePairing::Interleaved)?;
    let rope_dim = spec.rope.rotary_dim;
    let q_dim = metadata.count("attention.key_length_mla")?.unwrap_or(spec.head_dim);
    let v_dim = match metadata.count("attention.value_length_mla")? {
        Some(v_dim) => v_dim,
        None => metadata.required_count("attention.value_length")?,
    };
    let latent = LatentSpec {
        q_rank: metadata.count("attention.q_lora_rank")?.unwrap_or(0),
        kv_rank: metadata.required_count("attention.kv_lora_rank")?,
        nope_dim: q_dim.saturating_sub(rope_dim),
        rope_dim,
        v_dim,
    };
    let mut scale = 1.0 / f64::from(q_dim).sqrt();
    if let RopeScaling::Yarn { factor, .. } = spec.rope.scaling {
        let multiplier = metadata.number("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        scale *= (1.0 + multiplier * factor.max(1.0).ln()).powi(2);
    }
    let experts = match metadata.has_experts()? {
        true => Some(experts_of_gguf(metadata, &spec, scoring)?),
        false => None,
    };
    let block = BlockSpec { attention_scale: Some(scale as f32), experts, latent: Some(latent), ..spec.block };
    Ok(ModelSpec { num_kv_heads: 1, head_dim: latent.row_dim(), block, ..spec })
}

fn experts_of_gguf(metadata: &Metadata, spec: &ModelSpec, scoring: Scoring) -> Result<ExpertSpec, ModelError> {
    let (num_experts, num_active) = metadata.experts()?;
    let size = metadata.required_count("expert_feed_forward_length")?;
    let num_dense = metadata.whole_number("leading_dense_block_count")?.unwrap_or(0).min(spec.num_layers);
    let num_shared = metadata.whole_number("expert_shared_count")?.unwrap_or(0);
    let has_selection_bias = metadata.has_tensor(&format!("blk.{num_dense}.exp_probs_b.bias"));
    let is_sigmoid = scoring == Scoring::Sigmoid;
    Ok(ExpertSpec {
        num_experts,
        num_active,
        intermediate_size: size,
        routing: Routing {
            scoring,
            is_normalised: metadata.flag("expert_weights_norm")?.unwrap_or(false),
            scale: metadata.number("expert_weights_scale")?.filter(|&s| s != 0.0).unwrap_or(1.0) as f32,
            has_selection_bias,
            // Older files do not tell of groups.
            num_groups: metadata.count("expert_group_count")?.unwrap_or(1),
            num_active_groups: metadata.count("expert_group_used_count")?.unwrap_or(1),
            group_by_two: is_sigmoid,
        },
        shared_size: num_shared.saturating_mul(size),
        has_shared_gate: false,
        dense_layers: (0..num_dense).collect(),
        router_bias: false,
        expert_bias: false,
    })
}

fn v2_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let has_groups = match config.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => false,
        "group_limited_greedy" => true,
        other => return Err(Fault::Unsupported(format!("topk_method `{other}` is not supported"))),
    };
    let routing = Routing { is_normalised: false, ..Routing::SOFTMAX };
    of_config(config, "deepseek_v2", routing, has_groups)
}

fn v3_of_config(config: &Config) -> Result<ModelSpec, Fault> {
    let routing = Routing {
        scoring: Scoring::Sigmoid,
        has_selection_bias: true,
        group_by_two: true,
        is_normalised: config.flag("norm_topk_prob", true)?,
        ..Routing::SOFTMAX
    };
    of_config(config, "deepseek_v3", routing, true)
}

fn of_config(config: &Config, family: &str, routing: Routing, has_groups: bool) -> Result<ModelSpec, Fault> {
    let latent = LatentSpec {
        q_rank: config.count("q_lora_rank")?.unwrap_or(0),
        kv_rank: config.count("kv_lora_rank")?.unwrap_or(512),
        nope_dim: config.count("qk_nope_head_dim")?.unwrap_or(128),
        rope_dim: config.count("qk_rope_head_dim")?.unwrap_or(64),
        v_dim: config.count("v_head_dim")?.unwrap_or(128),
    };
    // The rotary part is what `head_dim` says in these files.
    let renamed = config.renamed(&[("head_dim", "qk_rope_head_dim")]);
    let spec = Config::new(&renamed).base_spec(family, &Defaults { head_dim: Some(64), ..Defaults::llama(2048) })?;
    if config.flag("attention_bias", false)? || config.flag("mlp_bias", false)? {
        return Err(Fault::Unsupported("attention_bias and mlp_bias are not supported".into()));
    }
    let is_neighbours = config.flag("rope_interleave", true)?;
    let pairing = if is_neighbours { RopePairing::Interleaved } else { RopePairing::Half };
    let block = BlockSpec {
        attention_scale: Some(attention_scale(config, &latent)?),
        experts: experts(config, &spec, routing, has_groups)?,
        latent: Some(latent),
        ..spec.block
    };
    let rope = RopeSpec { pairing, ..spec.rope };
    Ok(ModelSpec { num_kv_heads: 1, head_dim: latent.row_dim(), rope, block, ..spec })
}

/// YaRN's factor counts twice here, once for the queries and once for the keys.
fn attention_scale(config: &Config, latent: &LatentSpec) -> Result<f32, Fault> {
    let rope = match config.object("rope_scaling")? {
        Some(rope) => Some(rope),
        None => config.object("rope_parameters")?,
    };
    let mut scale = 1.0 / f64::from(latent.q_dim()).sqrt();
    if let Some(rope) = rope
        && let Some(all_dim) = rope.number("mscale_all_dim")?.filter(|&m| m != 0.0)
        && let Some(factor) = rope.number("factor")?
    {
        scale *= yarn_mscale(factor, all_dim).powi(2);
    }
    Ok(scale as f32)
}

fn experts(config: &Config, spec: &ModelSpec, routing: Routing, has_groups: bool) -> Result<Option<ExpertSpec>, Fault> {
    let Some(num_experts) = config.count("n_routed_experts")? else { return Ok(None) };
    let size = config.required_count("moe_intermediate_size")?;
    let groups = |key: &str| Ok::<_, Fault>(if has_groups { config.count(key)?.unwrap_or(1) } else { 1 });
    let num_dense = config.whole_number("first_k_dense_replace")?.unwrap_or(0);
    let num_shared = config.whole_number("n_shared_experts")?.unwrap_or(0);
    Ok(Some(ExpertSpec {
        num_experts,
        num_active: config.required_count("num_experts_per_tok")?,
        intermediate_size: size,
        routing: Routing {
            scale: config.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            num_groups: groups("n_group")?,
            num_active_groups: groups("topk_group")?,
            ..routing
        },
        shared_size: num_shared.saturating_mul(size),
        has_shared_gate: false,
        dense_layers: (0..num_dense.min(spec.num_layers)).collect(),
        router_bias: false,
        expert_bias: false,
    }))
}

fn hf_tensor(spec: &ModelSpec, role: WeightRole) -> Source {
    let Some(latent) = spec.block.latent else { return names::hf(spec, role) };
    let [nope, v, heads] = [latent.nope_dim, latent.v_dim, spec.num_heads].map(u64::from);
    let (of, start) = (heads * (nope + v), |h: u32| u64::from(h) * (nope + v));
    let whole = |name: &str| (name.to_owned(), Part::Whole);
    let (layer, (name, part)) = match role {
        WeightRole::Mix(l, MixPart::SharedGate) => (l, whole("mlp.shared_experts.gate_proj.weight")),
        WeightRole::Mix(l, MixPart::SharedUp) => (l, whole("mlp.shared_experts.up_proj.weight")),
        WeightRole::Mix(l, MixPart::SharedDown) => (l, whole("mlp.shared_experts.down_proj.weight")),
        WeightRole::Latent(l, part) => {
            let source = match part {
                LatentPart::QDown => whole("self_attn.q_a_proj.weight"),
                LatentPart::QNorm => whole("self_attn.q_a_layernorm.weight"),
                LatentPart::QUp => whole("self_attn.q_b_proj.weight"),
                LatentPart::KvDown => whole("self_attn.kv_a_proj_with_mqa.weight"),
                LatentPart::KvNorm => whole("self_attn.kv_a_layernorm.weight"),
                LatentPart::KUp(h) => {
                    ("self_attn.kv_b_proj.weight".to_owned(), Part::TransposedRows { from: start(h), of })
                }
                LatentPart::VUp(h) => {
                    ("self_attn.kv_b_proj.weight".to_owned(), Part::Rows { from: start(h) + nope, of })
                }
            };
            (l, source)
        }
        other => return names::hf(spec, other),
    };
    Source::part(format!("model.layers.{layer}.{name}"), part)
}
