//! Adapters and merged checkpoints made by a seed, in the formats of PEFT and transformers.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Elements and shape of a tensor as f32.
pub type Tensors = BTreeMap<String, (Vec<f32>, Vec<usize>)>;

/// What an adapter is like.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub seed: u64,
    pub rank: usize,
    pub alpha: f64,
    pub use_rslora: bool,
    /// Ends of the names of adapted modules, and the rank of those that have another.
    pub targets: Vec<&'static str>,
    pub other_rank: Option<(&'static str, usize)>,
    /// Weights are stored as `[inputs, outputs]` (gpt2).
    pub is_transposed: bool,
}

pub const ALL: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

impl Recipe {
    pub fn new(seed: u64, rank: usize, targets: &[&'static str]) -> Recipe {
        let targets = targets.to_vec();
        Recipe { seed, rank, alpha: 16.0, use_rslora: false, targets, other_rank: None, is_transposed: false }
    }

    fn rank_of(&self, module: &str) -> usize {
        self.other_rank.filter(|(end, _)| module.ends_with(end)).map_or(self.rank, |(_, rank)| rank)
    }

    fn scale_of(&self, module: &str) -> f32 {
        let rank = self.rank_of(module) as f64;
        (self.alpha / if self.use_rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// Uniform in [-1, 1): splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.next() * scale).collect()
    }
}

/// All tensors of a folder as f32.
pub fn read_folder(folder: &Path) -> Tensors {
    let mut all = Tensors::new();
    for path in crate::support::files_with_extension(folder, "safetensors") {
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("reference")) {
            continue;
        }
        let bytes = std::fs::read(&path).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        for (name, view) in file.tensors() {
            all.insert(name, (floats(view.dtype(), view.data()), view.shape().to_vec()));
        }
    }
    all
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let words = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        Dtype::F32 => bytemuck::pod_collect_to_vec(bytes),
        Dtype::F16 => words().map(|w| half::f16::from_bits(w).to_f32()).collect(),
        Dtype::BF16 => words().map(|w| half::bf16::from_bits(w).to_f32()).collect(),
        other => panic!("{other:?}"),
    }
}

pub fn write_tensors(path: &Path, tensors: &Tensors) {
    let bytes: Vec<(&String, Vec<u8>, &Vec<usize>)> =
        tensors.iter().map(|(name, (v, shape))| (name, bytemuck::cast_slice(v).to_vec(), shape)).collect();
    let views = bytes.iter().map(|(name, bytes, shape)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("a tensor"))
    });
    let file = safetensors::serialize(views, None).expect("safetensors");
    std::fs::write(path, file).expect("writable");
}

/// The adapter's own tensors, under PEFT's names, for a base model's.
pub fn adapter_tensors(recipe: &Recipe, base: &Tensors) -> Tensors {
    let mut random = Random(recipe.seed);
    let mut own = Tensors::new();
    for (name, (_, shape)) in base {
        let Some(module) = name.strip_suffix(".weight").filter(|m| recipe.targets.iter().any(|t| m.ends_with(t)))
        else {
            continue;
        };
        let [outputs, inputs] = if recipe.is_transposed { [shape[1], shape[0]] } else { [shape[0], shape[1]] };
        let rank = recipe.rank_of(module);
        // So large that a wrong row shows, so small that logits stay in the range of the fixtures.
        let (a, b) = (random.floats(rank * inputs, 0.1), random.floats(outputs * rank, 0.05));
        own.insert(format!("base_model.model.{module}.lora_A.weight"), (a, vec![rank, inputs]));
        own.insert(format!("base_model.model.{module}.lora_B.weight"), (b, vec![outputs, rank]));
    }
    assert!(!own.is_empty(), "{recipe:?} fits no module");
    own
}

pub fn config(recipe: &Recipe) -> serde_json::Value {
    let pattern = recipe.other_rank.map(|(module, rank)| serde_json::json!({ module: rank }));
    serde_json::json!({
        "peft_type": "LORA",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "use_rslora": recipe.use_rslora,
        "target_modules": recipe.targets,
        "rank_pattern": pattern.unwrap_or_else(|| serde_json::json!({})),
        "bias": "none",
        "fan_in_fan_out": recipe.is_transposed,
    })
}

/// Writes an adapter's folder.
pub fn write_adapter(folder: &Path, recipe: &Recipe, base: &Tensors) -> PathBuf {
    std::fs::create_dir_all(folder).expect("writable");
    std::fs::write(folder.join("adapter_config.json"), config(recipe).to_string()).expect("writable");
    write_tensors(&folder.join("adapter_model.safetensors"), &adapter_tensors(recipe, base));
    folder.to_owned()
}

/// Writes the base model's folder with the adapter's products added to its weights.
pub fn write_merged(folder: &Path, base_folder: &Path, recipe: &Recipe, base: &Tensors) -> PathBuf {
    std::fs::create_dir_all(folder).expect("writable");
    for file in crate::support::files_with_extension(base_folder, "json") {
        let name = file.file_name().expect("a file");
        if !name.to_string_lossy().contains("safetensors") {
            std::fs::copy(&file, folder.join(name)).expect("writable");
        }
    }
    let own = adapter_tensors(recipe, base);
    let mut merged = base.clone();
    for (name, (a, shape_of_a)) in own.iter().filter(|(name, _)| name.ends_with("lora_A.weight")) {
        let module = name.trim_start_matches("base_model.model.").trim_end_matches(".lora_A.weight");
        let (b, _) = &own[&format!("base_model.model.{module}.lora_B.weight")];
        let (weight, shape) = merged.get_mut(&format!("{module}.weight")).expect("a weight");
        let (rank, inputs) = (shape_of_a[0], shape_of_a[1]);
        let scale = f64::from(recipe.scale_of(module));
        for (i, value) in weight.iter_mut().enumerate() {
            let (row, col) = if recipe.is_transposed { (i % shape[1], i / shape[1]) } else { (i / inputs, i % inputs) };
            let sum: f64 =
                (0..rank).map(|j| f64::from(b[row * rank + j]) * f64::from(a[j * inputs + col])).sum::<f64>();
            *value = (f64::from(*value) + scale * sum) as f32;
        }
    }
    write_tensors(&folder.join("model.safetensors"), &merged);
    folder.to_owned()
}
