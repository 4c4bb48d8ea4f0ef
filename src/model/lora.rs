//! LoRA adapters (arXiv 2106.09685) in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` in a folder.
//!
//! Guarantees: after [`Adapter::open`] each adapted projection has both of its matrices, finite, in the shapes that the
//! model needs, cut and ordered as the model's own rows are (fused projections, Q and K of GGUF files), and B multiplied
//! by the adapter's scale. What would change the result and is not read is refused by name. Adapters of the attention's
//! projections and of dense MLPs are read; those of experts, embeddings, heads and latent attention are not.

mod config;

use super::arch::source::{Part, Source};
use super::checkpoint::Model;
use super::dtype::DType;
use super::error::{Fault, ModelError};
use super::files::read_json_object;
use super::quant::{dequantize, first_non_finite_block};
use super::safetensors::{SafeTensor, SafetensorsFile};
use super::spec::{ModelSpec, WeightRole};
use config::LoraConfig;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub use config::MAX_RANK;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Before the base model's own name of a module.
const PREFIX: &str = "base_model.model.";

/// An adapter on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Of its content: two folders with the same files are one adapter. Never 0, which stands for none.
    pub id: u64,
    pub path: PathBuf,
    /// The largest of its matrices' ranks.
    pub rank: u32,
    deltas: HashMap<WeightRole, Delta>,
}

/// What is added to a projection: B A x, of which B has been multiplied by the scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    pub rank: u32,
    pub a: Vec<f32>, // [rank, inputs]
    pub b: Vec<f32>, // [outputs, rank]
}

/// The projections of a layer that an adapter may change, in the order of the forward pass.
pub const PROJECTIONS: [fn(u32) -> WeightRole; 7] =
    [WeightRole::Q, WeightRole::K, WeightRole::V, WeightRole::O, WeightRole::Gate, WeightRole::Up, WeightRole::Down];

impl Adapter {
    /// Reads an adapter's folder for this model.
    pub fn open(folder: &Path, model: &Model) -> Result<Adapter, ModelError> {
        let (config_path, path) = (folder.join(CONFIG), folder.join(WEIGHTS));
        let Some(json) = read_json_object(&config_path)? else {
            return Err(ModelError::not_found(folder, format!("the folder has no {CONFIG}")));
        };
        let config = LoraConfig::read(&json).map_err(|fault| fault.at(&config_path))?;
        if !path.exists() {
            let fault = match folder.join("adapter_model.bin").exists() {
                true => format!("adapter_model.bin is not read; save the adapter as {WEIGHTS}"),
                false => format!("the folder has no {WEIGHTS}"),
            };
            return Err(ModelError::not_found(folder, fault));
        }
        let file = SafetensorsFile::open(&path)?;
        let modules = Modules::of(model).map_err(|fault| fault.at(&path))?;
        let deltas = modules.read(&config, &file).map_err(|fault| fault.at(&path))?;
        check_targets(&config, &file).map_err(|fault| fault.at(&config_path))?;
        let rank = deltas.values().map(|delta| delta.rank).max().unwrap_or(0);
        Ok(Adapter { id: id_of(&json, &file), path: folder.to_owned(), rank, deltas })
    }

    /// What it adds to a projection.
    pub fn delta(&self, role: WeightRole) -> Option<&Delta> {
        self.deltas.get(&role)
    }

    /// Whether it changes this projection in any layer.
    pub fn changes(&self, projection: fn(u32) -> WeightRole, spec: &ModelSpec) -> bool {
        (0..spec.num_layers).any(|l| self.deltas.contains_key(&projection(l)))
    }
}

/// Of the config and all tensors' names, shapes and bytes.
fn id_of(config: &serde_json::Map<String, serde_json::Value>, file: &SafetensorsFile) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(serde_json::Value::Object(config.clone()).to_string().as_bytes());
    for tensor in file.tensors() {
        hash.update(format!("{} {} {:?}", tensor.name, tensor.type_name, tensor.shape).as_bytes());
        hash.update(&xxh3_64(file.bytes(tensor)).to_le_bytes());
    }
    hash.digest().max(1)
}

/// Refuses a list of targets of which one is nowhere in the file: half of such an adapter would be missing.
fn check_targets(config: &LoraConfig, file: &SafetensorsFile) -> Result<(), Fault> {
    let has = |target: &String| {
        let ending = format!(".{target}.lora_");
        file.tensors().iter().any(|t| t.name.contains(&ending) || t.name.starts_with(&ending[1..]))
    };
    match config.target_modules.iter().find(|target| !has(target)) {
        Some(target) => {
            Err(Fault::Malformed(format!("target_modules names {target}, of which the file has no tensor")))
        }
        None => Ok(()),
    }
}

/// The base model's modules that an adapter can change, by their Hugging Face names.
struct Modules<'a> {
    spec: &'a ModelSpec,
    roles: BTreeMap<String, Vec<(WeightRole, Source)>>,
    /// Q and K have their rows in another order than Hugging Face's files.
    has_neighbour_pairs: bool,
}

/// Both matrices of a module.
#[derive(Default)]
struct Pair<'a> {
    a: Option<&'a SafeTensor>,
    b: Option<&'a SafeTensor>,
}

impl<'a> Modules<'a> {
    fn of(model: &'a Model) -> Result<Modules<'a>, Fault> {
        let spec = model.spec();
        if spec.block.latent.is_some() {
            return Err(Fault::Unsupported("adapters of models with latent attention are not supported".into()));
        }
        let mut roles: BTreeMap<String, Vec<(WeightRole, Source)>> = BTreeMap::new();
        for role in (0..spec.num_layers).flat_map(|l| PROJECTIONS.map(|of| of(l))) {
            if role.shape(spec).is_some() {
                let source = model.hf_source(role);
                let module = source.name.strip_suffix(".weight").unwrap_or(&source.name).to_owned();
                roles.entry(module).or_default().push((role, source));
            }
        }
        Ok(Modules { spec, roles, has_neighbour_pairs: model.has_reordered_heads() })
    }

    fn read(&self, config: &LoraConfig, file: &SafetensorsFile) -> Result<HashMap<WeightRole, Delta>, Fault> {
        let mut pairs: BTreeMap<&str, Pair<'_>> = BTreeMap::new();
        for tensor in file.tensors() {
            let (module, is_b) = split_name(&tensor.name)?;
            if !self.roles.contains_key(module) {
                let fault = format!("tensor {}: {module} of this model cannot be adapted", tensor.name);
                return Err(Fault::Unsupported(fault));
            }
            let pair = pairs.entry(module).or_default();
            let place = if is_b { &mut pair.b } else { &mut pair.a };
            if place.replace(tensor).is_some() {
                return Err(Fault::Malformed(format!("tensor {} is there twice, for two adapters", tensor.name)));
            }
        }
        if pairs.is_empty() {
            return Err(Fault::Malformed("the file has no tensors".into()));
        }
        let mut deltas = HashMap::new();
        for (module, pair) in pairs {
            let (Some(a), Some(b)) = (pair.a, pair.b) else {
                let (there, missing) = if pair.a.is_some() { ("lora_A", "lora_B") } else { ("lora_B", "lora_A") };
                return Err(Fault::Malformed(format!("module {module} has a {there}, but no {missing}")));
            };
            self.read_module(config, file, (module, a, b), &mut deltas)?;
        }
        Ok(deltas)
    }

    fn read_module(
        &self,
        config: &LoraConfig,
        file: &SafetensorsFile,
        (module, a, b): (&str, &SafeTensor, &SafeTensor),
        deltas: &mut HashMap<WeightRole, Delta>,
    ) -> Result<(), Fault> {
        let rank = config.rank_of(module)?;
        let roles = &self.roles[module];
        let shape = |role: &WeightRole| role.shape(self.spec).unwrap_or_default();
        let (first, source) = &roles[0];
        let inputs = shape(first)[1];
        expect_shape(a, &[rank.into(), inputs])?;
        expect_shape(b, &[outputs_of(source, shape(first)[0]), rank.into()])?;
        let scale = config.scale_of(module, rank)?;
        let values_of_a = floats(file, a)?;
        let mut values_of_b = floats(file, b)?;
        values_of_b.iter_mut().for_each(|v| *v *= scale);
        if let Some(at) = values_of_b.iter().position(|v| !v.is_finite()) {
            let fault = format!("element {at} times the adapter's scale {scale} is too large");
            return Err(Fault::Malformed(fault).in_tensor(&b.name));
        }
        let bytes: Vec<u8> = values_of_b.iter().flat_map(|v| v.to_le_bytes()).collect();
        for (role, source) in roles {
            let rows = Source { part: rows_of(source.part), ..source.clone() };
            let own = rows.cut(DType::F32, &bytes, &[shape(role)[0], rank.into()])?;
            let b = self.in_order(*role, bytemuck::pod_collect_to_vec(&own), rank as usize);
            deltas.insert(*role, Delta { rank, a: values_of_a.clone(), b });
        }
        Ok(())
    }

    /// The rows of B in the order of the model's own.
    fn in_order(&self, role: WeightRole, b: Vec<f32>, rank: usize) -> Vec<f32> {
        if !self.has_neighbour_pairs || !matches!(role, WeightRole::Q(_) | WeightRole::K(_)) {
            return b;
        }
        let dim = self.spec.head_dim as usize;
        let rotary = self.spec.rope.rotary_dim as usize;
        let mut out = Vec::with_capacity(b.len());
        for head in b.chunks_exact(dim * rank) {
            for row in 0..dim {
                // Rows i and i + rotary / 2 become neighbours.
                let from = if row < rotary { row / 2 + row % 2 * (rotary / 2) } else { row };
                out.extend_from_slice(&head[from * rank..(from + 1) * rank]);
            }
        }
        out
    }
}

/// The base model's module and whether it is its B.
fn split_name(name: &str) -> Result<(&str, bool), Fault> {
    let unknown = |what: &str| Fault::Unsupported(format!("tensor {name}: {what} is not supported"));
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    if name.contains(".lora_magnitude_vector") {
        return Err(unknown("DoRA"));
    }
    if name.contains(".lora_embedding_") {
        return Err(unknown("an adapted embedding"));
    }
    for (mark, is_b) in [(".lora_A.", false), (".lora_B.", true)] {
        if let Some((module, end)) = rest.split_once(mark) {
            // With or without the name that the adapter had in its training.
            return match end.rsplit('.').next() {
                Some("weight") => Ok((module, is_b)),
                _ => Err(unknown("a bias of the adapter's own matrices")),
            };
        }
    }
    Err(unknown("a whole tensor beside the adapter (modules_to_save, bias)"))
}

/// Which rows of B are those of the role: what the weight has as rows, whatever way it is stored.
fn rows_of(part: Part) -> Part {
    match part {
        Part::Columns { from, of } => Part::Rows { from, of },
        other => other,
    }
}

/// Outputs of the stored module, of which a role has `rows`.
fn outputs_of(source: &Source, rows: u64) -> u64 {
    match source.part {
        Part::Rows { of, .. } | Part::Columns { of, .. } => of,
        Part::Every { period, take, .. } => rows / take * period,
        Part::Whole | Part::RowEach | Part::TransposedRows { .. } | Part::Expert { .. } => rows,
    }
}

fn expect_shape(tensor: &SafeTensor, want: &[u64]) -> Result<(), Fault> {
    if tensor.shape != want {
        let fault = format!("tensor {} has the shape {:?}; the model and r need {want:?}", tensor.name, tensor.shape);
        return Err(Fault::Malformed(fault));
    }
    Ok(())
}

fn floats(file: &SafetensorsFile, tensor: &SafeTensor) -> Result<Vec<f32>, Fault> {
    let Some(dtype) = tensor.dtype() else {
        let fault = format!("type {} is not supported", tensor.type_name);
        return Err(Fault::Unsupported(fault).in_tensor(&tensor.name));
    };
    let bytes = file.bytes(tensor);
    if let Some(block) = first_non_finite_block(dtype, bytes) {
        let fault = format!("the value of element {} is not a number", block * dtype.block_elements());
        return Err(Fault::Malformed(fault).in_tensor(&tensor.name));
    }
    let mut out = vec![0.0; tensor.num_elements() as usize];
    dequantize(dtype, bytes, &mut out).map_err(|e| Fault::Malformed(e.to_string()).in_tensor(&tensor.name))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_module_and_matrix() {
        let q = "model.layers.3.self_attn.q_proj";
        assert_eq!(split_name(&format!("base_model.model.{q}.lora_A.weight")), Ok((q, false)));
        assert_eq!(split_name(&format!("base_model.model.{q}.lora_B.default.weight")), Ok((q, true)));
        assert_eq!(split_name(&format!("{q}.lora_B.weight")), Ok((q, true)));
        for (name, what) in [
            ("base_model.model.lm_head.weight", "modules_to_save"),
            ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "DoRA"),
            ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
            ("base_model.model.model.layers.0.mlp.up_proj.lora_B.bias", "bias"),
        ] {
            assert!(matches!(split_name(name), Err(Fault::Unsupported(text)) if text.contains(what)), "{name}");
        }
    }

    #[test]
    fn transposed_weights_have_their_outputs_as_rows_of_b() {
        let source = Source::part("c_attn.weight".into(), Part::Columns { from: 4, of: 12 });
        assert_eq!(outputs_of(&source, 4), 12);
        assert_eq!(rows_of(source.part), Part::Rows { from: 4, of: 12 });
    }
}
