//! A model on disk: its facts, and its tensors by role.
//!
//! Guarantees: after [`Model::open`] every tensor that the forward pass needs exists with the right shape and a type that
//! can be dequantised, and norms and biases are finite. [`Model::verify_finite`] extends the last to all weights.
//! Tensor bytes lie in a memory map and have no alignment; nothing is copied.

use super::arch::source::Source;
use super::arch::{self, Family};
use super::dtype::DType;
use super::error::ModelError;
use super::files::read_json_object;
use super::gguf::GgufFile;
use super::gguf_types::file_type_label;
use super::quant::{QuantError, dequantize, first_non_finite_block};
use super::safetensors::SafetensorsSet;
use super::sidecar::{self, GenerationDefaults, NamedTemplate};
use super::spec::{ModelSpec, WeightRole};
use serde::Serialize;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// A tensor of a checkpoint, in place.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorView<'a> {
    /// As the file names it.
    pub name: Cow<'a, str>,
    pub dtype: DType,
    /// Outermost first: `[rows, cols]`; vectors have one entry.
    pub shape: Vec<u64>,
    /// `dtype.bytes(rows * cols)` bytes, unaligned; in place, unless the file holds them in another order.
    pub bytes: Cow<'a, [u8]>,
    /// Added to each element when it is read as floats.
    pub add: f32,
}

impl TensorView<'_> {
    /// All elements as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>, QuantError> {
        let mut out = vec![0.0; self.shape.iter().product::<u64>() as usize];
        dequantize(self.dtype, &self.bytes, &mut out)?;
        if self.add != 0.0 {
            out.iter_mut().for_each(|v| *v += self.add);
        }
        Ok(out)
    }
}

/// A tensor as `inspect` shows it; its type may be one that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorFacts {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFormat {
    Gguf,
    Safetensors,
}

/// What a person wants to know of a model before loading it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelInfo {
    pub name: String,
    pub path: PathBuf,
    pub format: ModelFormat,
    /// Family: `llama`, `mistral`, …
    pub arch: String,
    /// Storage of most weights: `Q4_1`, `BF16`, `Q4_K_M`, `mixed`.
    pub quant: String,
    pub num_params: u64,
    /// Bytes of the weight files.
    pub file_bytes: u64,
    /// Longest context in tokens.
    pub context: u32,
}

/// An opened model. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Model {
    store: Store,
    family: &'static Family,
    spec: ModelSpec,
    info: ModelInfo,
    defaults: GenerationDefaults,
    warnings: Vec<String>,
}

/// Where the tensors lie.
#[derive(Debug)]
pub(crate) enum Store {
    /// The parts of a GGUF; the first holds the metadata.
    Gguf(Vec<GgufFile>),
    Folder {
        folder: PathBuf,
        weights: SafetensorsSet,
    },
}

impl Model {
    /// Opens a `.gguf` file, a folder with `config.json`, or a folder that holds exactly one GGUF model.
    pub fn open(path: &Path) -> Result<Model, ModelError> {
        match locate(path)? {
            Location::Gguf(file) => Model::open_gguf(&file),
            Location::Folder(folder) => Model::open_folder(&folder),
        }
    }

    fn open_gguf(path: &Path) -> Result<Model, ModelError> {
        let parts = open_parts(path)?;
        let (family, mut spec) = arch::from_gguf(&parts)?;
        spec.validate().map_err(|fault| ModelError::malformed(path, fault))?;
        let mut warnings = Vec::new();
        drop_foreign_tokens(&mut spec, &mut warnings);
        let file_type = parts[0].u32("general.file_type")?.and_then(file_type_label);
        let name = parts[0].string("general.name")?.map(str::to_owned).unwrap_or_else(|| file_stem(path));
        let store = Store::Gguf(parts);
        let info = make_info(name, path, ModelFormat::Gguf, &store, &spec, file_type);
        Model { store, family, spec, info, defaults: GenerationDefaults::default(), warnings }.checked()
    }

    fn open_folder(folder: &Path) -> Result<Model, ModelError> {
        let config_path = folder.join("config.json");
        let Some(config) = read_json_object(&config_path)? else {
            return Err(ModelError::not_found(folder, "the folder has no config.json"));
        };
        let (family, mut spec) = arch::from_config(&config).map_err(|fault| fault.at(&config_path))?;
        spec.validate().map_err(|fault| ModelError::malformed(&config_path, fault))?;
        let mut warnings = Vec::new();
        let defaults = sidecar::generation_defaults(folder, &mut warnings)?;
        for &id in &defaults.eos_token_ids {
            if !spec.eos_token_ids.contains(&id) {
                spec.eos_token_ids.push(id);
            }
        }
        drop_foreign_tokens(&mut spec, &mut warnings);
        let weights = SafetensorsSet::open(folder)?;
        let store = Store::Folder { folder: folder.to_owned(), weights };
        let info = make_info(folder_name(folder), folder, ModelFormat::Safetensors, &store, &spec, None);
        Model { store, family, spec, info, defaults, warnings }.checked()
    }

    fn checked(self) -> Result<Model, ModelError> {
        self.check()?;
        for role in self.spec.roles().filter(|role| role.is_vector()) {
            self.verify_role(role)?;
        }
        Ok(self)
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Faults that do not stop the model from running, for a person to read.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The tensor for `role`; `None` when the model has no such tensor (the head of a tied model, a bias).
    pub fn weight(&self, role: WeightRole) -> Result<Option<TensorView<'_>>, ModelError> {
        let Some(located) = self.locate_role(role)? else { return Ok(None) };
        let Located { source, dtype, shape, file, bytes } = located;
        let name = source.name.clone();
        let bytes = source.cut(dtype, bytes, &shape).map_err(|fault| fault.in_tensor(&name).at(file))?;
        Ok(Some(TensorView { name: Cow::Owned(name), dtype, shape, bytes, add: source.add }))
    }

    /// The tensor for `role`, checked but not read.
    fn locate_role(&self, role: WeightRole) -> Result<Option<Located<'_>>, ModelError> {
        let Some(shape) = role.shape(&self.spec) else { return Ok(None) };
        let source = self.source(role);
        let name = source.name.clone();
        let Some(tensor) = self.store.find(&name) else {
            return Err(ModelError::malformed(&self.info.path, format!("tensor {name} is missing")));
        };
        let stored_shape = source.stored_shape(&shape);
        // A matrix of one row may be stored as a vector.
        let is_row = stored_shape[0] == 1 && tensor.shape[..] == stored_shape[1..];
        if tensor.shape != stored_shape && !is_row {
            let fault = format!("tensor {name} has the shape {:?}; the model needs {stored_shape:?}", tensor.shape);
            return Err(ModelError::malformed(tensor.file, fault));
        }
        let plain = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        match tensor.dtype {
            Some(dtype) if plain(dtype) || !role.is_vector() => {
                Ok(Some(Located { source, dtype, shape, file: tensor.file, bytes: tensor.bytes }))
            }
            _ => {
                let fault = format!("tensor {name} has type {}, which is not supported", tensor.type_name);
                Err(ModelError::unsupported(tensor.file, fault))
            }
        }
    }

    /// Checks that every needed tensor is there with the right shape and a supported type. Done by [`Model::open`].
    pub fn check(&self) -> Result<(), ModelError> {
        self.spec.roles().try_for_each(|role| self.locate_role(role).map(|_| ()))
    }

    /// Refuses weights that are NaN or infinite, naming the tensor. Reads all scales (all elements of plain types): as
    /// fast as the files can be read.
    pub fn verify_finite(&self) -> Result<(), ModelError> {
        self.spec.roles().try_for_each(|role| self.verify_role(role))
    }

    fn verify_role(&self, role: WeightRole) -> Result<(), ModelError> {
        let Some(view) = self.weight(role)? else { return Ok(()) };
        match first_non_finite_block(view.dtype, &view.bytes) {
            None => Ok(()),
            Some(block) => {
                let element = block * view.dtype.block_elements();
                let fault = format!("tensor {} holds a value that is not a number at element {element}", view.name);
                Err(ModelError::malformed(&self.info.path, fault))
            }
        }
    }

    /// The name that the tensor for `role` has in this model's files; several roles may share one.
    pub fn tensor_name(&self, role: WeightRole) -> String {
        self.source(role).name
    }

    fn source(&self, role: WeightRole) -> Source {
        match &self.store {
            Store::Gguf(_) => (self.family.gguf_tensor)(&self.spec, role),
            Store::Folder { .. } => (self.family.hf_tensor)(&self.spec, role),
        }
    }

    /// Metadata of a GGUF model, for its tokenizer.
    pub fn gguf(&self) -> Option<&GgufFile> {
        match &self.store {
            Store::Gguf(parts) => parts.first(),
            Store::Folder { .. } => None,
        }
    }

    /// The folder of a Hugging Face model, for its tokenizer.
    pub fn folder(&self) -> Option<&Path> {
        match &self.store {
            Store::Gguf(_) => None,
            Store::Folder { folder, .. } => Some(folder),
        }
    }

    /// Sampling defaults that the model's author recommends.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// All chat templates of the model; the one named `default` first. Empty when it has none.
    pub fn chat_templates(&self) -> Result<Vec<NamedTemplate>, ModelError> {
        match &self.store {
            Store::Gguf(parts) => sidecar::gguf_chat_templates(&parts[0]),
            Store::Folder { folder, .. } => sidecar::folder_chat_templates(folder),
        }
    }

    /// The text of the default chat template.
    pub fn chat_template(&self) -> Result<Option<String>, ModelError> {
        Ok(self.chat_templates()?.into_iter().next().map(|t| t.text))
    }

    /// Every tensor in the files, also those that the forward pass does not read.
    pub fn tensors(&self) -> Vec<TensorFacts> {
        self.store.tensors()
    }
}

impl Store {
    fn find(&self, name: &str) -> Option<Found<'_>> {
        match self {
            Store::Gguf(parts) => parts.iter().find_map(|part| {
                let tensor = part.tensor(name)?;
                Some(Found {
                    file: part.path(),
                    dtype: tensor.ty.dtype,
                    type_name: tensor.ty.name,
                    shape: &tensor.shape,
                    bytes: part.bytes(tensor),
                })
            }),
            Store::Folder { weights, .. } => weights.tensor(name).map(|(file, tensor)| Found {
                file: file.path(),
                dtype: tensor.dtype(),
                type_name: &tensor.type_name,
                shape: &tensor.shape,
                bytes: file.bytes(tensor),
            }),
        }
    }

    pub(crate) fn tensors(&self) -> Vec<TensorFacts> {
        match self {
            Store::Gguf(parts) => parts.iter().flat_map(|part| part.tensors()).map(TensorFacts::of_gguf).collect(),
            Store::Folder { weights, .. } => {
                weights.files().iter().flat_map(|file| file.tensors()).map(TensorFacts::of_safetensors).collect()
            }
        }
    }

    fn num_bytes(&self) -> u64 {
        match self {
            Store::Gguf(parts) => parts.iter().map(GgufFile::num_bytes).sum(),
            Store::Folder { weights, .. } => weights.num_bytes(),
        }
    }
}

impl TensorFacts {
    pub(crate) fn of_gguf(tensor: &super::gguf::GgufTensor) -> TensorFacts {
        TensorFacts {
            name: tensor.name.clone(),
            dtype: tensor.ty.name.to_owned(),
            shape: tensor.shape.clone(),
            bytes: tensor.num_bytes(),
        }
    }

    pub(crate) fn of_safetensors(tensor: &super::safetensors::SafeTensor) -> TensorFacts {
        TensorFacts {
            name: tensor.name.clone(),
            dtype: tensor.type_name.clone(),
            shape: tensor.shape.clone(),
            bytes: tensor.num_bytes(),
        }
    }

    fn num_elements(&self) -> u64 {
        self.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d))
    }
}

/// A role's tensor in its file.
struct Located<'a> {
    source: Source,
    dtype: DType,
    /// Of the role; the stored tensor may hold more.
    shape: Vec<u64>,
    file: &'a Path,
    /// Of the stored tensor.
    bytes: &'a [u8],
}

struct Found<'a> {
    file: &'a Path,
    dtype: Option<DType>,
    type_name: &'a str,
    shape: &'a [u64],
    bytes: &'a [u8],
}

/// What a path turned out to be.
pub(crate) enum Location {
    Gguf(PathBuf),
    Folder(PathBuf),
}

/// Finds the model that `path` means, without reading it.
pub(crate) fn locate(path: &Path) -> Result<Location, ModelError> {
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(ModelError::not_found(path, "there is no such file or folder"));
        }
        Err(e) => return Err(ModelError::io(path, e)),
    };
    if !meta.is_dir() {
        return Ok(Location::Gguf(path.to_owned()));
    }
    if path.join("config.json").exists() {
        return Ok(Location::Folder(path.to_owned()));
    }
    let mut candidates = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|e| ModelError::io(path, e))? {
        let file = entry.map_err(|e| ModelError::io(path, e))?.path();
        let is_gguf = file.extension().is_some_and(|x| x.eq_ignore_ascii_case("gguf"));
        if is_gguf && split_of_name(&file).is_none_or(|(_, no, _)| no == 1) {
            candidates.push(file);
        }
    }
    candidates.sort();
    match candidates.as_slice() {
        [one] => Ok(Location::Gguf(one.clone())),
        [] => Err(ModelError::not_found(path, "the folder has neither a config.json nor a .gguf file")),
        many => {
            let fault = format!("the folder has {} GGUF models; name one of them", many.len());
            Err(ModelError::not_found(path, fault))
        }
    }
}

/// Splits `PREFIX-00001-of-00003.gguf` into prefix, number and count.
pub(crate) fn split_of_name(path: &Path) -> Option<(String, u32, u32)> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".GGUF"))?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let five_digits = |s: &str| (s.len() == 5).then(|| s.parse::<u32>().ok()).flatten();
    Some((prefix.to_owned(), five_digits(number)?, five_digits(count)?))
}

/// Opens a GGUF file and, when it is the first of a split model, the other parts beside it.
pub(crate) fn open_parts(path: &Path) -> Result<Vec<GgufFile>, ModelError> {
    let first = GgufFile::open(path)?;
    let count = first.u32("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![first]);
    }
    let number = first.u32("split.no")?.unwrap_or(0);
    if number != 0 {
        let fault = format!("this is part {} of {count} of a split model; open the first part", number + 1);
        return Err(ModelError::malformed(path, fault));
    }
    let Some((prefix, 1, named_count)) = split_of_name(path).filter(|(_, _, n)| *n == count) else {
        let fault = format!("split.count is {count}, but the file name does not end in -00001-of-{count:05}.gguf");
        return Err(ModelError::malformed(path, fault));
    };
    let mut parts = vec![first];
    for number in 2..=named_count {
        let name = format!("{prefix}-{number:05}-of-{count:05}.gguf");
        let part_path = path.with_file_name(&name);
        if !part_path.exists() {
            return Err(ModelError::malformed(
                path,
                format!("part {number} of {count} of the model is missing: {name}"),
            ));
        }
        let part = GgufFile::open(&part_path)?;
        if part.u32("split.no")? != Some(number - 1) || part.u32("split.count")? != Some(count) {
            return Err(ModelError::malformed(&part_path, format!("the file is not part {number} of {count}")));
        }
        parts.push(part);
    }
    check_parts(path, &parts)?;
    Ok(parts)
}

fn check_parts(path: &Path, parts: &[GgufFile]) -> Result<(), ModelError> {
    let mut names = std::collections::HashSet::new();
    for part in parts {
        if let Some(twice) = part.tensors().iter().find(|t| !names.insert(t.name.as_str())) {
            return Err(ModelError::malformed(part.path(), format!("tensor {} is in another part too", twice.name)));
        }
    }
    match parts[0].u32("split.tensors.count")? {
        Some(count) if count as usize != names.len() => {
            let fault = format!("split.tensors.count is {count}, but the parts hold {} tensors", names.len());
            Err(ModelError::malformed(path, fault))
        }
        _ => Ok(()),
    }
}

/// Removes token ids that the vocabulary does not have: such a token can never be drawn, so the model still runs.
fn drop_foreign_tokens(spec: &mut ModelSpec, warnings: &mut Vec<String>) {
    let vocab = spec.vocab_size;
    spec.eos_token_ids.retain(|&id| {
        if id >= vocab {
            warnings.push(format!("the end-of-sequence token {id} is outside the vocabulary of {vocab} tokens"));
        }
        id < vocab
    });
    if let Some(id) = spec.bos_token_id.filter(|&id| id >= vocab) {
        warnings.push(format!("the begin-of-sequence token {id} is outside the vocabulary of {vocab} tokens"));
        spec.bos_token_id = None;
    }
}

fn make_info(
    name: String,
    path: &Path,
    format: ModelFormat,
    store: &Store,
    spec: &ModelSpec,
    label: Option<&str>,
) -> ModelInfo {
    let tensors = store.tensors();
    ModelInfo {
        name,
        path: path.to_owned(),
        format,
        arch: spec.arch.clone(),
        quant: label.map(str::to_owned).unwrap_or_else(|| quant_label(&tensors)),
        num_params: tensors.iter().fold(0u64, |n, t| n.saturating_add(t.num_elements())),
        file_bytes: store.num_bytes(),
        context: spec.max_position,
    }
}

/// The type that holds more than half of the elements of all matrices, else `mixed`.
pub(crate) fn quant_label(tensors: &[TensorFacts]) -> String {
    let mut by_type: Vec<(&str, u64)> = Vec::new();
    for tensor in tensors.iter().filter(|t| t.shape.len() > 1) {
        let elements = tensor.num_elements();
        match by_type.iter_mut().find(|(name, _)| *name == tensor.dtype) {
            Some((_, n)) => *n = n.saturating_add(elements),
            None => by_type.push((&tensor.dtype, elements)),
        }
    }
    let total = by_type.iter().fold(0u64, |n, (_, e)| n.saturating_add(*e));
    match by_type.iter().max_by_key(|(_, n)| *n) {
        Some((name, n)) if *n > total / 2 => (*name).to_owned(),
        _ => "mixed".to_owned(),
    }
}

fn file_stem(path: &Path) -> String {
    path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The folder's own name; for a snapshot in the Hugging Face cache, `org/name`.
pub(crate) fn folder_name(folder: &Path) -> String {
    let cached = folder.parent().filter(|p| p.file_name().is_some_and(|n| n == "snapshots"));
    let repo = cached.and_then(|p| p.parent()?.file_name()?.to_str()?.strip_prefix("models--"));
    match repo {
        Some(repo) => repo.replacen("--", "/", 1),
        None => folder.file_name().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
    }
}
