//! Writes a folder's matrices in 4 or 8 bits: what `kvasir quantize` does.
//!
//! Guarantees: the projections of attention, MLPs and experts become `pack-quantized` tensors of the compressed-tensors
//! format, in groups along their inputs; embeddings, heads, routers, norms, biases, and what does not fill its groups stay
//! as they are and are named in the config's `ignore`. 8 bits are symmetric, 4 bits have a zero point. Without importances
//! each group is rounded to nearest over its whole range; with them, narrower ranges and a least-squares scale are tried
//! and the one with the least error is taken, each input's error weighted by its mean square (the diagonal of the layer's
//! second moments). Memory: one tensor at a time. Not attempted: matrices stored transposed or all experts in one tensor,
//! scales folded into neighbours, and error feedback between columns.

mod fit;
mod writer;

use super::checkpoint::Model;
use super::error::ModelError;
use super::experts::{ExpertPart, MixPart};
use super::latent::LatentPart;
use super::spec::WeightRole;
use crate::model::arch::source::Part;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// What becomes of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// 4 or 8.
    pub bits: u32,
    /// Inputs that share a scale: 32, 64 or 128.
    pub group: u32,
}

/// Mean squares of the inputs of projections; empty for rounding to nearest.
pub type Importances = HashMap<WeightRole, Vec<f32>>;

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub num_quantised: usize,
    /// Modules with a matrix that stayed as it is.
    pub kept: Vec<String>,
    /// Of all tensors, and below.
    pub bytes_before: u64,
    pub bytes_after: u64,
}

/// Writes the model to `out`, a folder that does not exist yet. `progress` is told the tensors done and their number;
/// `false` cancels.
pub fn quantise_folder(
    model: &Model,
    out: &Path,
    recipe: Recipe,
    importances: &Importances,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Written, ModelError> {
    let path = &model.info().path;
    let (Some(files), Some(folder)) = (model.plain_files(), model.folder()) else {
        let fault = "only folders with unquantised weights can be quantised";
        return Err(ModelError::unsupported(path, fault));
    };
    if out.exists() {
        return Err(ModelError::malformed(out, "the output folder exists already"));
    }
    let chosen = choose(model, recipe, importances);
    if chosen.is_empty() {
        let fault = format!("no matrix of this model can be stored in groups of {}", recipe.group);
        return Err(ModelError::unsupported(path, fault));
    }
    // Nobody takes half a folder for a model: it gets its name at the end.
    let mut partial = out.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let write = || {
        std::fs::create_dir_all(partial).map_err(|e| ModelError::write(partial, e))?;
        let written = writer::write(files, (folder, partial), recipe, &chosen, progress)?;
        std::fs::rename(partial, out).map_err(|e| ModelError::write(out, e))?;
        Ok(written)
    };
    let result = { write }();
    if result.is_err() {
        let _ = std::fs::remove_dir_all(partial);
    }
    result
}

/// Stored tensors that are quantised, with the importance of each input where it is known.
type Chosen = BTreeMap<String, Option<Vec<f32>>>;

fn choose(model: &Model, recipe: Recipe, importances: &Importances) -> Chosen {
    let mut chosen = Chosen::new();
    for role in model.spec().roles().filter(|&role| is_projection(role)) {
        let source = model.source(role);
        let is_as_used = matches!(source.part, Part::Whole | Part::Rows { .. } | Part::Every { .. });
        let k = role.shape(model.spec()).and_then(|shape| shape.get(1).copied()).unwrap_or(0);
        if is_as_used && k > 0 && k.is_multiple_of(recipe.group.into()) && source.name.ends_with(".weight") {
            // Parts of a fused tensor read the same inputs.
            chosen.entry(source.name).or_insert_with(|| importances.get(&role).cloned());
        }
    }
    chosen
}

fn is_projection(role: WeightRole) -> bool {
    use WeightRole::*;
    match role {
        Q(_) | K(_) | V(_) | O(_) | Gate(_) | Up(_) | Down(_) => true,
        Expert(_, _, part) => matches!(part, ExpertPart::Gate | ExpertPart::Up | ExpertPart::Down),
        Mix(_, part) => matches!(part, MixPart::SharedGate | MixPart::SharedUp | MixPart::SharedDown),
        Latent(_, part) => matches!(part, LatentPart::QDown | LatentPart::QUp | LatentPart::KvDown),
        _ => false,
    }
}
