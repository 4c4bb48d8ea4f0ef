//! Folders of a family's base class, as embedding models are published: no output head, names without the prefix that
//! the class with a head puts before them.

use super::arch::Family;
use super::safetensors::SafetensorsSet;
use super::spec::{ModelSpec, WeightRole};
use serde_json::{Map, Value};

const PREFIXES: [&str; 3] = ["model.", "transformer.", "gpt_neox."];

/// What a folder's weights lack of those of the class with a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lacks {
    /// The prefix of their names.
    pub prefix: bool,
    /// The output head: there is none, and the embedding is not tied to it either.
    pub head: bool,
}

/// The name in a folder whose names have no prefix.
pub(super) fn bare(name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

impl Lacks {
    /// A head may be missing only where the config names the base class or the names have no prefix.
    pub fn of(weights: &SafetensorsSet, config: &Map<String, Value>, (family, spec): (&Family, &ModelSpec)) -> Lacks {
        let name = |role| (family.hf_tensor)(spec, role).name;
        let has = |name: &str| weights.tensor(name).is_some();
        let embedding = name(WeightRole::TokenEmbedding);
        let prefix = !has(&embedding) && has(bare(&embedding));
        let class = config.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
        let is_base = prefix || class.is_some_and(|class| family.is_base_class(class));
        let head = name(WeightRole::LmHead);
        let stem = head.strip_suffix("weight").unwrap_or(&head);
        // A quantised head is several tensors.
        let mut names = weights.files().iter().flat_map(|file| file.tensors()).map(|tensor| &tensor.name);
        let has_head = spec.tie_embeddings || names.any(|name| name.starts_with(stem));
        Lacks { prefix, head: is_base && !has_head }
    }
}
