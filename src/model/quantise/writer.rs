//! The new folder's files.

use super::fit::{Grid, ScaleType, fit};
use super::{Chosen, Recipe, Written};
use crate::model::dtype::DType;
use crate::model::error::ModelError;
use crate::model::files::read_json_object;
use crate::model::quant::dequantize;
use crate::model::safetensors::{SafeTensor, SafetensorsFile, SafetensorsSet};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const INDEX: &str = "model.safetensors.index.json";
/// Files beside the weights that a model may have; larger ones are no part of it.
const BESIDE: [&str; 5] = ["json", "jinja", "model", "txt", "tiktoken"];
const MAX_BESIDE_BYTES: u64 = 256 << 20;

/// A tensor to be written.
struct Out<'a> {
    name: String,
    type_name: &'a str,
    shape: Vec<u64>,
    num_bytes: u64,
}

pub fn write(
    files: &SafetensorsSet,
    (from, to): (&Path, &Path),
    recipe: Recipe,
    chosen: &Chosen,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Written, ModelError> {
    let tensors = || files.files().iter().flat_map(|file| file.tensors());
    let bytes_before = tensors().map(SafeTensor::num_bytes).sum();
    let mut written = Written { bytes_before, ..Written::default() };
    let mut weight_map = Map::new();
    let total = tensors().count() as u64;
    let mut done = 0;
    for file in files.files() {
        let name = file.path().file_name().unwrap_or_default();
        let mut shard = Shard { file, recipe, chosen, path: &to.join(name), kept: &mut written.kept };
        let outs = shard.write(&mut || {
            done += 1;
            progress(done, total)
        })?;
        written.num_quantised += outs.iter().filter(|out| out.name.ends_with(".weight_packed")).count();
        written.bytes_after += outs.iter().map(|out| out.num_bytes).sum::<u64>();
        weight_map.extend(outs.into_iter().map(|out| (out.name, json!(name.to_string_lossy()))));
    }
    written.kept.sort();
    if files.files().len() > 1 {
        let index = json!({ "metadata": { "total_size": written.bytes_after }, "weight_map": weight_map });
        write_json(&to.join(INDEX), &index)?;
    }
    copy_beside(from, to)?;
    let config_path = from.join("config.json");
    let mut config = read_json_object(&config_path)?
        .ok_or_else(|| ModelError::not_found(&config_path, "the folder has no config.json"))?;
    config.insert("quantization_config".into(), quantization_config(recipe, &written.kept));
    write_json(&to.join("config.json"), &Value::Object(config))?;
    Ok(written)
}

fn quantization_config(recipe: Recipe, kept: &[String]) -> Value {
    let weights = json!({
        "dynamic": false, "group_size": recipe.group, "num_bits": recipe.bits, "observer": "minmax",
        "strategy": "group", "symmetric": recipe.bits == 8, "type": "int",
    });
    let group = json!({
        "format": "pack-quantized", "input_activations": null, "output_activations": null, "targets": ["Linear"],
        "weights": weights,
    });
    json!({
        "config_groups": { "group_0": group }, "format": "pack-quantized", "ignore": kept,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    })
}

fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let text = serde_json::to_string_pretty(value).expect("a value is JSON");
    std::fs::write(path, text + "\n").map_err(|e| ModelError::write(path, e))
}

/// Tokenizer, template, defaults of generation.
fn copy_beside(from: &Path, to: &Path) -> Result<(), ModelError> {
    let fault = |e| ModelError::io(from, e);
    for entry in std::fs::read_dir(from).map_err(fault)? {
        let path = entry.map_err(fault)?.path();
        let meta = std::fs::metadata(&path).map_err(|e| ModelError::io(&path, e))?;
        let is_known = path.extension().is_some_and(|x| BESIDE.iter().any(|known| x == *known));
        let name = path.file_name().unwrap_or_default();
        if meta.is_file() && is_known && meta.len() <= MAX_BESIDE_BYTES && name != INDEX {
            let copy = to.join(name);
            std::fs::copy(&path, &copy).map_err(|e| ModelError::write(&copy, e))?;
        }
    }
    Ok(())
}

/// A file of weights and what it becomes.
struct Shard<'a> {
    file: &'a SafetensorsFile,
    recipe: Recipe,
    chosen: &'a Chosen,
    path: &'a Path,
    kept: &'a mut Vec<String>,
}

impl<'a> Shard<'a> {
    fn write(&mut self, progress: &mut dyn FnMut() -> bool) -> Result<Vec<Out<'a>>, ModelError> {
        let tensors: Vec<(&SafeTensor, Option<Matrix<'a>>)> =
            self.file.tensors().iter().map(|tensor| (tensor, self.matrix(tensor))).collect();
        let outs: Vec<Out<'a>> =
            tensors.iter().flat_map(|(tensor, matrix)| self.outs(tensor, matrix.as_ref())).collect();
        let fault = |e| ModelError::write(self.path, e);
        let mut sink = BufWriter::new(File::create(self.path).map_err(fault)?);
        sink.write_all(&header(&outs)).map_err(fault)?;
        for (tensor, matrix) in &tensors {
            match matrix {
                None => sink.write_all(self.file.bytes(tensor)).map_err(fault)?,
                Some(matrix) => {
                    for bytes in matrix.quantised(self.recipe) {
                        sink.write_all(&bytes).map_err(fault)?;
                    }
                }
            }
            if !progress() {
                return Err(fault(std::io::Error::new(std::io::ErrorKind::Interrupted, "cancelled")));
            }
        }
        sink.into_inner().map_err(|e| fault(e.into_error()))?.sync_all().map_err(fault)?;
        for (tensor, matrix) in &tensors {
            if let (None, [_, _], Some(module)) = (matrix, &tensor.shape[..], tensor.name.strip_suffix(".weight")) {
                self.kept.push(module.to_owned());
            }
        }
        Ok(outs)
    }

    /// The tensor as a matrix, if it is to be quantised.
    fn matrix(&self, tensor: &SafeTensor) -> Option<Matrix<'a>> {
        let importance = self.chosen.get(&tensor.name)?.as_deref();
        let (dtype, scales, type_name) = match tensor.dtype()? {
            DType::F16 => (DType::F16, ScaleType::F16, "F16"),
            DType::BF16 => (DType::BF16, ScaleType::BF16, "BF16"),
            _ => (DType::F32, ScaleType::F32, "F32"),
        };
        let [n, k] = tensor.shape[..] else { return None };
        let (n, k) = (n as usize, k as usize);
        let importance = importance.filter(|importance| importance.len() == k);
        Some(Matrix { n, k, dtype, scales, type_name, bytes: self.file.bytes(tensor), importance })
    }

    fn outs(&self, tensor: &'a SafeTensor, matrix: Option<&Matrix<'a>>) -> Vec<Out<'a>> {
        let Some(matrix) = matrix else {
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            return vec![Out { name, type_name: &tensor.type_name, shape, num_bytes: tensor.num_bytes() }];
        };
        let (bits, groups) = (self.recipe.bits as usize, matrix.k / self.recipe.group as usize);
        let out = |suffix: &str, type_name, size: usize, shape: [usize; 2]| Out {
            name: format!("{}_{suffix}", tensor.name),
            type_name,
            num_bytes: (size * shape[0] * shape[1]) as u64,
            shape: shape.map(|n| n as u64).to_vec(),
        };
        let mut outs = vec![out("shape", "I64", 8, [1, 2]), out("packed", "I32", 4, [matrix.n, matrix.k * bits / 32])];
        outs[0].shape.remove(0);
        outs.push(out("scale", matrix.type_name, matrix.dtype.bytes(1).unwrap_or(4) as usize, [matrix.n, groups]));
        if bits == 4 {
            outs.push(out("zero_point", "I32", 4, [matrix.n.div_ceil(8), groups]));
        }
        outs
    }
}

fn header(outs: &[Out<'_>]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for out in outs {
        let range = [at, at + out.num_bytes];
        entries.insert(out.name.clone(), json!({ "dtype": out.type_name, "shape": out.shape, "data_offsets": range }));
        at += out.num_bytes;
    }
    let mut text = serde_json::to_vec(&entries).expect("a value is JSON");
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// A matrix `[n, k]` of floats in the file.
struct Matrix<'a> {
    n: usize,
    k: usize,
    dtype: DType,
    scales: ScaleType,
    type_name: &'a str,
    bytes: &'a [u8],
    importance: Option<&'a [f32]>,
}

/// Some rows of it, quantised.
struct Rows {
    packed: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>, // [rows, groups]
}

impl Matrix<'_> {
    /// The bytes of its tensors, in the order of [`Shard::outs`].
    fn quantised(&self, recipe: Recipe) -> Vec<Vec<u8>> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let per_thread = self.n.div_ceil(threads).max(1);
        let parts: Vec<Rows> = std::thread::scope(|scope| {
            let starts = (0..self.n).step_by(per_thread);
            let part = |first: usize| scope.spawn(move || self.rows(first..(first + per_thread).min(self.n), recipe));
            let threads: Vec<_> = starts.map(part).collect();
            threads.into_iter().map(|thread| thread.join().expect("rounding does not panic")).collect()
        });
        let mut all = Rows { packed: Vec::new(), scales: Vec::new(), zeros: Vec::new() };
        for part in parts {
            all.packed.extend(part.packed);
            all.scales.extend(part.scales);
            all.zeros.extend(part.zeros);
        }
        let shape = [self.n as i64, self.k as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut tensors = vec![shape, all.packed, all.scales];
        if recipe.bits == 4 {
            tensors.push(pack_down(&all.zeros, self.n));
        }
        tensors
    }

    fn rows(&self, range: std::ops::Range<usize>, recipe: Recipe) -> Rows {
        let (group, bits) = (recipe.group as usize, recipe.bits);
        let mut out = Rows { packed: Vec::new(), scales: Vec::new(), zeros: Vec::new() };
        let (mut row, mut codes) = (vec![0.0; self.k], vec![0u8; group]);
        let row_bytes = self.bytes.len() / self.n;
        for r in range {
            dequantize(self.dtype, &self.bytes[r * row_bytes..(r + 1) * row_bytes], &mut row)
                .expect("a row of floats is as long as its shape says");
            for (g, w) in row.chunks_exact(group).enumerate() {
                let importance = self.importance.map(|all| &all[g * group..(g + 1) * group]);
                let Grid { scale, zero } = fit(w, importance, bits, self.scales, &mut codes);
                self.scales.push(scale, &mut out.scales);
                out.zeros.push(zero);
                match bits {
                    8 => out.packed.extend(&codes),
                    _ => out.packed.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4)),
                }
            }
        }
        out
    }
}

/// Nibbles `[rows, groups]` in words of eight rows: `[words, groups]`.
fn pack_down(zeros: &[u8], num_rows: usize) -> Vec<u8> {
    let groups = zeros.len() / num_rows.max(1);
    let mut words = vec![0u32; num_rows.div_ceil(8) * groups];
    for (i, &zero) in zeros.iter().enumerate() {
        let (row, group) = (i / groups, i % groups);
        words[row / 8 * groups + group] |= u32::from(zero) << (4 * (row % 8));
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
