//! safetensors files, single or sharded, read in place over memory maps.
//!
//! Guarantees: the header is at most 100 MB and inside the file, names are unique, every tensor's bytes are exactly what
//! its shape and type need, and the tensors cover the data without gap or overlap. The header is read here rather than
//! by the `safetensors` crate, which lets a later entry of the same name win. Format:
//! <https://github.com/huggingface/safetensors>. A shard named by an index may not leave the folder.

use super::dtype::DType;
use super::error::ModelError;
use super::files::{map_file, read_json_object};
use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

const MAX_HEADER_BYTES: u64 = 100_000_000;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafeTensor {
    pub name: String,
    /// As the file spells it: `F32`, `BF16`, `F8_E4M3`, …
    pub type_name: String,
    /// Outermost first.
    pub shape: Vec<u64>,
    range: Range<usize>,
}

impl SafeTensor {
    /// The type here, when it is supported.
    pub fn dtype(&self) -> Option<DType> {
        match self.type_name.as_str() {
            "F32" => Some(DType::F32),
            "F16" => Some(DType::F16),
            "BF16" => Some(DType::BF16),
            _ => None,
        }
    }

    pub fn num_bytes(&self) -> u64 {
        self.range.len() as u64
    }

    pub fn num_elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// One file.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    tensors: Vec<SafeTensor>,
}

impl SafetensorsFile {
    /// Maps the file and checks its whole header.
    pub fn open(path: &Path) -> Result<SafetensorsFile, ModelError> {
        let map = map_file(path)?;
        let tensors = read_header(path, &map)?;
        Ok(SafetensorsFile { path: path.to_owned(), map, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tensors(&self) -> &[SafeTensor] {
        &self.tensors
    }

    /// The data of a tensor of this file.
    pub fn bytes(&self, tensor: &SafeTensor) -> &[u8] {
        &self.map[tensor.range.clone()]
    }
}

/// The weights of a Hugging Face folder.
#[derive(Debug)]
pub struct SafetensorsSet {
    files: Vec<SafetensorsFile>,
    place_of_name: HashMap<String, (usize, usize)>,
}

impl SafetensorsSet {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, or, without either, all that
    /// [`loose_files`] finds.
    pub fn open(folder: &Path) -> Result<SafetensorsSet, ModelError> {
        let single = folder.join(SINGLE);
        if single.exists() {
            return SafetensorsSet::of_files(vec![SafetensorsFile::open(&single)?]);
        }
        let index = folder.join(INDEX);
        let Some(json) = read_json_object(&index)? else {
            let loose = loose_files(folder);
            if loose.is_empty() {
                return Err(no_weights(folder));
            }
            return SafetensorsSet::of_files(
                loose.iter().map(|path| SafetensorsFile::open(path)).collect::<Result<_, _>>()?,
            );
        };
        let Some(Value::Object(weight_map)) = json.get("weight_map") else {
            return Err(ModelError::malformed(&index, "weight_map is missing or not an object"));
        };
        let mut shard_names: Vec<&str> = Vec::new();
        for (tensor, shard) in weight_map {
            let name = shard.as_str().filter(|name| is_plain_file_name(name));
            let Some(name) = name else {
                let fault = format!("weight_map places {tensor} in {shard}, which is not a file name in this folder");
                return Err(ModelError::malformed(&index, fault));
            };
            shard_names.push(name);
        }
        shard_names.sort_unstable();
        shard_names.dedup();
        let mut files = Vec::with_capacity(shard_names.len());
        for name in &shard_names {
            let path = folder.join(name);
            if !path.exists() {
                return Err(ModelError::malformed(&index, format!("the shard {name} is missing from the folder")));
            }
            files.push(SafetensorsFile::open(&path)?);
        }
        let set = SafetensorsSet::of_files(files)?;
        for (tensor, shard) in weight_map {
            let found = set.place_of_name.get(tensor).map(|&(file, _)| shard_names[file]);
            if found != shard.as_str() {
                return Err(ModelError::malformed(&index, format!("tensor {tensor} is not in the shard {shard}")));
            }
        }
        Ok(set)
    }

    fn of_files(files: Vec<SafetensorsFile>) -> Result<SafetensorsSet, ModelError> {
        let mut place_of_name = HashMap::new();
        for (f, file) in files.iter().enumerate() {
            for (t, tensor) in file.tensors.iter().enumerate() {
                if place_of_name.insert(tensor.name.clone(), (f, t)).is_some() {
                    let fault = format!("tensor {} is in another shard too", tensor.name);
                    return Err(ModelError::malformed(&file.path, fault));
                }
            }
        }
        Ok(SafetensorsSet { files, place_of_name })
    }

    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// A tensor and the file that holds it.
    pub fn tensor(&self, name: &str) -> Option<(&SafetensorsFile, &SafeTensor)> {
        let &(file, tensor) = self.place_of_name.get(name)?;
        Some((&self.files[file], &self.files[file].tensors[tensor]))
    }

    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.map.len() as u64).sum()
    }
}

/// True when a folder's weights are safetensors files.
pub(crate) fn has_weights(folder: &Path) -> bool {
    folder.join(SINGLE).is_file() || folder.join(INDEX).is_file() || !loose_files(folder).is_empty()
}

/// The files of weights, sorted, where no index names them.
fn loose_files(folder: &Path) -> Vec<PathBuf> {
    files_named(folder, is_weights_name)
}

/// A file name of weights: not of an adapter, nor of a copy under its maker's names.
pub(crate) fn is_weights_name(name: &str) -> bool {
    let is_other = name.starts_with("adapter_") || name.starts_with("consolidated") || name.contains('/');
    name.ends_with(".safetensors") && !is_other
}

/// True when a folder's weights are pickled files of PyTorch, which nothing here reads.
pub(crate) fn has_pickled_weights(folder: &Path) -> bool {
    !files_named(folder, |name| name.starts_with("pytorch_model") && name.ends_with(".bin")).is_empty()
}

fn files_named(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_wanted = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(&is_wanted);
    let mut found: Vec<PathBuf> = entries.filter(is_wanted).collect();
    found.sort();
    found
}

fn no_weights(folder: &Path) -> ModelError {
    let fault = match has_pickled_weights(folder) {
        true => {
            "its weights are pickled (pytorch_model*.bin), which can run code and are not read; convert them to safetensors"
        }
        false => "the folder has neither model.safetensors nor model.safetensors.index.json",
    };
    ModelError::not_found(folder, fault)
}

fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

fn read_header(path: &Path, bytes: &[u8]) -> Result<Vec<SafeTensor>, ModelError> {
    let fail = |fault: String| Err(ModelError::malformed(path, fault));
    let Some(prefix) = bytes.first_chunk::<8>() else {
        return fail("the file is shorter than a safetensors header length".into());
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > MAX_HEADER_BYTES || header_bytes > bytes.len() as u64 - 8 {
        return fail(format!(
            "the file is not a safetensors file: its header would have {header_bytes} bytes ({} are there, {MAX_HEADER_BYTES} are legal)",
            bytes.len() - 8
        ));
    }
    let data_start = 8 + header_bytes as usize;
    let Ok(text) = std::str::from_utf8(&bytes[8..data_start]) else {
        return fail("the header is not UTF-8".into());
    };
    let mut parser = serde_json::Deserializer::from_str(text);
    let visitor = HeaderVisitor { data_start, file_bytes: bytes.len() };
    let tensors = parser.deserialize_map(visitor).and_then(|tensors| parser.end().map(|()| tensors));
    let tensors = match tensors {
        Ok(tensors) => tensors,
        Err(e) => return fail(format!("the header is not valid: {e}")),
    };
    check_coverage(path, &tensors, data_start, bytes.len())?;
    Ok(tensors)
}

/// A tensor as the header describes it.
#[derive(Deserialize)]
struct Record {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Reads the header's object in order and refuses a name that comes twice.
struct HeaderVisitor {
    data_start: usize,
    file_bytes: usize,
}

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Vec<SafeTensor>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = Vec::new();
        let mut seen = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format!("tensor {name} appears twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let named = |fault: String| A::Error::custom(format!("tensor {name}: {fault}"));
            let record: Record = map.next_value().map_err(|e| named(e.to_string()))?;
            let place = self.place(&record).map_err(named)?;
            tensors.push(SafeTensor { name, type_name: record.dtype, shape: record.shape, range: place });
        }
        Ok(tensors)
    }
}

impl HeaderVisitor {
    /// Where the tensor lies in the file; its bytes are exactly what its shape and type need.
    fn place(&self, record: &Record) -> Result<Range<usize>, String> {
        let Record { dtype, shape, data_offsets: [begin, end] } = record;
        let data_bytes = (self.file_bytes - self.data_start) as u64;
        if begin > end || *end > data_bytes {
            return Err(format!("it reaches from {begin} to {end}, but the file has {data_bytes} bytes of data"));
        }
        let Some(bits) = bits_of_type(dtype) else { return Err(format!("its type {dtype} is unknown")) };
        let num_bits = shape.iter().try_fold(bits, |n, &d| n.checked_mul(d));
        if num_bits != (end - begin).checked_mul(8) {
            return Err(format!("{dtype} {shape:?} does not have the {} bytes of its data_offsets", end - begin));
        }
        Ok(self.data_start + *begin as usize..self.data_start + *end as usize)
    }
}

/// Bits of an element of each type that the format knows.
fn bits_of_type(type_name: &str) -> Option<u64> {
    Some(match type_name {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "C64" | "F64" | "I64" | "U64" => 64,
        _ => return None,
    })
}

fn check_coverage(path: &Path, tensors: &[SafeTensor], data_start: usize, file_bytes: usize) -> Result<(), ModelError> {
    let mut by_place: Vec<&SafeTensor> = tensors.iter().collect();
    by_place.sort_by_key(|t| (t.range.start, t.range.end));
    let mut at = data_start;
    for tensor in by_place {
        if tensor.range.start < at {
            let fault = format!("tensor {} overlaps the tensor before it", tensor.name);
            return Err(ModelError::malformed(path, fault));
        }
        if tensor.range.start > at {
            let gap = tensor.range.start - at;
            return Err(ModelError::malformed(
                path,
                format!("{gap} bytes before tensor {} belong to none", tensor.name),
            ));
        }
        at = tensor.range.end;
    }
    if at != file_bytes {
        return Err(ModelError::malformed(
            path,
            format!("{} bytes after the last tensor belong to none", file_bytes - at),
        ));
    }
    Ok(())
}
