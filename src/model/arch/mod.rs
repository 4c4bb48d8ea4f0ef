//! Model families: one small file each, and one row in [`FAMILIES`].
//!
//! A family says how its config keys become a [`ModelSpec`] and how its tensors are named; it has no forward code.
//! Shared readers are [`config`] (`config.json`), [`metadata`] (GGUF) and [`names`] (tensor names).

mod cohere;
mod config;
mod deepseek;
mod falcon;
mod gemma;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod llama;
mod metadata;
mod mistral;
mod mixtral;
mod names;
pub use names::older_gguf;
mod olmo2;
mod phi;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen_moe;
mod rope_config;
mod smollm3;
pub mod source;
mod stablelm;
mod starcoder2;

use super::error::{Fault, ModelError};
use super::gguf::GgufFile;
use super::spec::{ModelSpec, WeightRole};
use config::Config;
use metadata::Metadata;
use serde_json::{Map, Value};
use source::Source;

/// A family of decoders.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in `config.json`, and the name in [`ModelSpec::arch`].
    pub name: &'static str,
    /// The causal language model class in `architectures`.
    hf_class: &'static str,
    /// `general.architecture` of GGUF files; `None` when those carry another family's name.
    gguf_name: Option<&'static str>,
    spec_of_config: fn(&Config) -> Result<ModelSpec, Fault>,
    spec_of_gguf: fn(&Metadata) -> Result<ModelSpec, ModelError>,
    /// The tensor's name in a Hugging Face checkpoint.
    pub hf_tensor: fn(&ModelSpec, WeightRole) -> Source,
    /// The tensor's name in a GGUF.
    pub gguf_tensor: fn(&ModelSpec, WeightRole) -> Source,
}

impl Family {
    /// Whether a class of `architectures` is the family's model without an output head (`LlamaModel`).
    pub fn is_base_class(&self, class: &str) -> bool {
        let stem = HEADED.iter().find_map(|end| self.hf_class.strip_suffix(end));
        stem.is_some_and(|stem| class.strip_suffix("Model") == Some(stem))
    }

    /// Whether a model of this family's type may be of this class: forks give their language models names of their own.
    fn takes_class(&self, class: &str) -> bool {
        HEADED.iter().any(|end| class.ends_with(end)) || self.is_base_class(class)
    }
}

/// How the names of language model classes end.
const HEADED: [&str; 2] = ["ForCausalLM", "LMHeadModel"];

static FAMILIES: [Family; 25] = [
    llama::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    smollm3::FAMILY,
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    phi3::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    stablelm::FAMILY,
    starcoder2::FAMILY,
    olmo2::FAMILY,
    granite::FAMILY,
    falcon::FAMILY,
    phi::FAMILY,
    cohere::COHERE,
    cohere::COHERE2,
    mixtral::FAMILY,
    qwen_moe::QWEN2,
    qwen_moe::QWEN3,
    gpt_oss::FAMILY,
    deepseek::V2,
    deepseek::V3,
];

/// The families that can be loaded, for messages.
pub fn supported() -> String {
    FAMILIES.each_ref().map(|f| f.name).join(", ")
}

/// The spec that a `config.json` describes. The caller validates it and adds the file to a fault.
pub fn from_config(config: &Map<String, Value>) -> Result<(&'static Family, ModelSpec), Fault> {
    let config = Config::new(config);
    let model_type = config.text("model_type")?;
    let class = config.first_architecture()?;
    let Some(asked) = model_type.or(class) else {
        return Err(Fault::Malformed("model_type and architectures are missing".into()));
    };
    let family = FAMILIES.iter().find(|f| match (model_type, class) {
        (Some(name), Some(class)) => f.name == name && f.takes_class(class),
        (Some(name), None) => f.name == name,
        (None, class) => class.is_some_and(|class| f.hf_class == class || f.is_base_class(class)),
    });
    let Some(family) = family else {
        let class = class.filter(|c| *c != asked).map(|c| format!(" ({c})")).unwrap_or_default();
        let supported = supported();
        return Err(Fault::Unsupported(format!(
            "architecture `{asked}`{class} is not supported; supported: {supported}"
        )));
    };
    for (key, causal) in [("is_causal", true), ("use_bidirectional_attention", false)] {
        if config.flag(key, causal)? != causal {
            return Err(Fault::Unsupported(format!("{key} = {} is not supported", !causal)));
        }
    }
    Ok((family, (family.spec_of_config)(&config)?))
}

/// The spec that a GGUF's metadata describes. `parts[0]` holds the metadata; tensors may lie in any part.
pub fn from_gguf(parts: &[GgufFile]) -> Result<(&'static Family, ModelSpec), ModelError> {
    let path = parts[0].path();
    if let Some(kind) = parts[0].string("general.type")?.filter(|kind| *kind != "model") {
        return Err(ModelError::unsupported(path, format!("the file holds a {kind}, not a model")));
    }
    let Some(name) = parts[0].string("general.architecture")? else {
        return Err(ModelError::malformed(path, "general.architecture is missing"));
    };
    let metadata = Metadata::new(parts, name);
    let named = match name {
        // Mixtral calls itself so.
        "llama" if metadata.has_experts()? => Some(&mixtral::FAMILY),
        _ => FAMILIES.iter().find(|f| f.gguf_name == Some(name)),
    };
    let Some(family) = named else {
        let supported = supported();
        let fault = format!("architecture `{name}` is not supported; supported: {supported}");
        return Err(ModelError::unsupported(path, fault));
    };
    metadata.check_vocabulary()?;
    Ok((family, (family.spec_of_gguf)(&metadata)?))
}
