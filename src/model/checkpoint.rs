//! A model on disk: its facts, and its tensors by role.
//!
//! Guarantees: after [`Model::open`] every tensor that the forward pass needs exists with the right shape and a type that
//! can be dequantised, and norms and biases are finite. [`Model::verify_finite`] extends the last to all weights.
//! Tensor bytes lie in a memory map and have no alignment; nothing is copied.

use super::arch::source::{Part, Source};
use super::arch::{self, Family};
use super::base::{Lacks, bare};
use super::dtype::DType;
use super::error::{Fault, ModelError};
use super::files::read_json_object;
use super::gguf::GgufFile;
use super::gguf_types::file_type_label;
use super::location::{Location, locate, open_parts};
use super::packed::{self, Mxfp4, Packed, Scheme};
use super::quant::{QuantError, dequantize, first_non_finite_block};
use super::safetensors::SafetensorsSet;
use super::sidecar::{self, GenerationDefaults, NamedTemplate};
use super::spec::{ModelSpec, RopePairing, WeightRole};
use serde::Serialize;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    /// Column j of `bytes` belongs to input `order[j]`; `None` where they are in order.
    pub order: Option<Arc<[u32]>>,
}

impl TensorView<'_> {
    /// All elements as f32.
    pub fn to_f32(&self) -> Result<Vec<f32>, QuantError> {
        let mut out = vec![0.0; self.shape.iter().product::<u64>() as usize];
        dequantize(self.dtype, &self.bytes, &mut out)?;
        if let Some(order) = &self.order {
            let mut row = vec![0.0; order.len()];
            for out in out.chunks_exact_mut(order.len()) {
                out.iter().zip(order.iter()).for_each(|(v, &input)| row[input as usize] = *v);
                out.copy_from_slice(&row);
            }
        }
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
    has_head: bool,
}

/// Where the tensors lie.
#[derive(Debug)]
pub(crate) enum Store {
    /// The parts of a GGUF; the first holds the metadata.
    Gguf(Vec<GgufFile>),
    Folder {
        folder: PathBuf,
        weights: SafetensorsSet,
        scheme: Option<Scheme>,
        /// Names lack the prefix that the family gives them.
        is_bare: bool,
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
        Model { store, family, spec, info, defaults: GenerationDefaults::default(), warnings, has_head: true }.checked()
    }

    fn open_folder(folder: &Path) -> Result<Model, ModelError> {
        let config_path = folder.join("config.json");
        let Some(config) = read_json_object(&config_path)? else {
            return Err(ModelError::not_found(folder, "the folder has no config.json"));
        };
        let (family, mut spec) = arch::from_config(&config).map_err(|fault| fault.at(&config_path))?;
        let scheme = Scheme::read(&config).map_err(|fault| fault.at(&config_path))?;
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
        let lacks = Lacks::of(&weights, &config, (family, &spec));
        // The engine draws a token from any prompt, also from one that is read for its hidden states.
        spec.tie_embeddings |= lacks.head;
        let label = scheme.as_ref().map(Scheme::label);
        let store = Store::Folder { folder: folder.to_owned(), weights, scheme, is_bare: lacks.prefix };
        let mut info =
            make_info(folder_name(folder), folder, ModelFormat::Safetensors, &store, &spec, label.as_deref());
        if label.is_some() {
            // Elements of packed tensors are words, not weights.
            let shapes = spec.roles().filter_map(|role| role.shape(&spec));
            info.num_params = shapes.map(|shape| shape.iter().product::<u64>()).fold(0, u64::saturating_add);
        }
        let model = Model { store, family, spec, info, defaults, warnings, has_head: !lacks.head }.checked()?;
        model.check_scheme(&config_path)?;
        Ok(model)
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

    /// False when what the head computes means nothing: the files have none, and only hidden states can be used.
    pub fn has_head(&self) -> bool {
        self.has_head
    }

    /// Faults that do not stop the model from running, for a person to read.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The tensor for `role`; `None` when the model has no such tensor (the head of a tied model, a bias).
    pub fn weight(&self, role: WeightRole) -> Result<Option<TensorView<'_>>, ModelError> {
        let Some(located) = self.locate_role(role)? else { return Ok(None) };
        let Located { source, dtype, shape, file, data } = located;
        let name = source.name.clone();
        let at = |fault: Fault| fault.in_tensor(&name).at(file);
        let (bytes, order) = match data {
            Data::Plain(bytes) => (source.cut(dtype, bytes, &shape).map_err(at)?, None),
            Data::Rows(bytes) => (Cow::Owned(bytes), None),
            Data::Mxfp4(matrix) => (Cow::Owned(matrix.bytes()), None),
            Data::Packed(packed) => {
                let bytes = packed.bytes();
                let cut = source.cut(dtype, &bytes, &shape).map_err(at)?.into_owned();
                (Cow::Owned(cut), packed.order)
            }
        };
        Ok(Some(TensorView { name: Cow::Owned(name), dtype, shape, bytes, add: source.add, order }))
    }

    /// As [`Model::weight`], without the bytes: what they will be.
    pub fn weight_form(&self, role: WeightRole) -> Result<Option<WeightForm>, ModelError> {
        let located = self.locate_role(role)?;
        Ok(located.map(|l| WeightForm {
            dtype: l.dtype,
            shape: l.shape,
            order: if let Data::Packed(packed) = l.data { packed.order } else { None },
        }))
    }

    /// A tensor for each row; they must be of one type.
    fn locate_rows(&self, source: Source, shape: Vec<u64>) -> Result<Located<'_>, ModelError> {
        let (mut bytes, mut first) = (Vec::new(), None);
        for row in 0..shape[0] {
            let name = source.name.replace("{}", &row.to_string());
            let Some(tensor) = self.store.find(&name) else {
                return Err(ModelError::malformed(&self.info.path, format!("tensor {name} is missing")));
            };
            let dtype = tensor.dtype.filter(|dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16));
            let (found, file) = *first.get_or_insert((dtype, tensor.file));
            if tensor.shape != source.stored_shape(&shape) || dtype.is_none() || dtype != found {
                let fault = format!("tensor {name} has the type {} and the shape {:?}", tensor.type_name, tensor.shape);
                return Err(ModelError::malformed(file, fault));
            }
            bytes.extend_from_slice(tensor.bytes);
        }
        let Some((Some(dtype), file)) = first else {
            return Err(ModelError::malformed(&self.info.path, format!("tensor {} has no rows", source.name)));
        };
        Ok(Located { source, dtype, shape, file, data: Data::Rows(bytes) })
    }

    /// The tensor for `role`, checked but not read.
    fn locate_role(&self, role: WeightRole) -> Result<Option<Located<'_>>, ModelError> {
        let Some(shape) = role.shape(&self.spec) else { return Ok(None) };
        let source = self.source(role);
        let name = source.name.clone();
        if source.part == Part::RowEach {
            return self.locate_rows(source, shape).map(Some);
        }
        let stored_shape = source.stored_shape(&shape);
        if let Some((file, packed)) = self.store.find_packed(&name, &stored_shape)? {
            let dtype = packed.dtype;
            return Ok(Some(Located { source, dtype, shape, file, data: Data::Packed(packed) }));
        }
        if let Store::Folder { weights, scheme: Some(Scheme::Mxfp4), .. } = &self.store
            && let Some(matrix) = packed::find_mxfp4(weights, &source, &shape)?
        {
            let (dtype, file) = (DType::MXFP4, matrix.file);
            return Ok(Some(Located { source, dtype, shape, file, data: Data::Mxfp4(matrix) }));
        }
        let Some(tensor) = self.store.find(&name) else {
            return Err(ModelError::malformed(&self.info.path, format!("tensor {name} is missing")));
        };
        // A matrix of one row may be stored as a vector.
        let is_row = stored_shape[0] == 1 && tensor.shape[..] == stored_shape[1..];
        if tensor.shape != stored_shape && !is_row {
            let fault = format!("tensor {name} has the shape {:?}; the model needs {stored_shape:?}", tensor.shape);
            return Err(ModelError::malformed(tensor.file, fault));
        }
        let plain = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        match tensor.dtype {
            Some(dtype) if plain(dtype) || !role.is_vector() => {
                Ok(Some(Located { source, dtype, shape, file: tensor.file, data: Data::Plain(tensor.bytes) }))
            }
            _ => {
                let fault = format!("tensor {name} has type {}, which is not supported", tensor.type_name);
                Err(ModelError::unsupported(tensor.file, fault))
            }
        }
    }

    /// Refuses a folder that names a quantisation and has no tensor of it.
    fn check_scheme(&self, config_path: &Path) -> Result<(), ModelError> {
        let Store::Folder { scheme: Some(scheme), .. } = &self.store else { return Ok(()) };
        for role in self.spec.roles().filter(|role| !role.is_vector()) {
            if let Some(Located { data: Data::Packed(_) | Data::Mxfp4(_), .. }) = self.locate_role(role)? {
                return Ok(());
            }
        }
        if !scheme.must_quantise() {
            return Ok(());
        }
        let name = self.source(WeightRole::O(0)).name;
        let tensor = packed::expected_tensor(scheme, name.strip_suffix(".weight").unwrap_or(&name));
        let label = scheme.label();
        let fault = format!("the config says {label}, but the folder has no such weights (tensor {tensor} is missing)");
        Err(ModelError::malformed(config_path, fault))
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

    /// The files of a folder whose weights are stored plainly.
    pub(super) fn plain_files(&self) -> Option<&SafetensorsSet> {
        match &self.store {
            Store::Folder { weights, scheme: None, .. } => Some(weights),
            _ => None,
        }
    }

    pub(super) fn source(&self, role: WeightRole) -> Source {
        match &self.store {
            Store::Gguf(_) => {
                let source = (self.family.gguf_tensor)(&self.spec, role);
                let is_missing = |source: &Source| self.store.find(&source.name).is_none();
                match arch::older_gguf(&self.spec, role).filter(|_| is_missing(&source)) {
                    Some(older) if !is_missing(&older) => older,
                    _ => source,
                }
            }
            Store::Folder { is_bare, .. } => {
                let source = self.hf_source(role);
                if *is_bare { Source { name: bare(&source.name).to_owned(), ..source } } else { source }
            }
        }
    }

    /// Where a Hugging Face checkpoint of this model holds the role.
    pub(super) fn hf_source(&self, role: WeightRole) -> Source {
        (self.family.hf_tensor)(&self.spec, role)
    }

    /// Whether rows of Q and K lie in another order than in a Hugging Face checkpoint: GGUF files put the two dims of a
    /// rotated pair side by side, but for families whose pairs are neighbours by themselves.
    pub(super) fn has_reordered_heads(&self) -> bool {
        let is_gguf = matches!(self.store, Store::Gguf(_));
        let is_so_anyway = self.spec.arch.starts_with("cohere");
        is_gguf && self.spec.rope.pairing == RopePairing::Interleaved && !is_so_anyway
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
    /// The quantised matrix that stands for the tensor `name` of this shape, with its file.
    fn find_packed<'a>(&'a self, name: &str, shape: &[u64]) -> Result<Option<(&'a Path, Packed<'a>)>, ModelError> {
        let Store::Folder { folder, weights, scheme: Some(scheme), .. } = self else { return Ok(None) };
        let (Some(stem), [n, k]) = (name.strip_suffix(".weight"), shape) else { return Ok(None) };
        Ok(packed::find(scheme, weights, stem, [*n, *k])?.map(|packed| (folder.as_path(), packed)))
    }

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
    data: Data<'a>,
}

enum Data<'a> {
    Plain(&'a [u8]),
    /// Of several tensors, one after the other.
    Rows(Vec<u8>),
    Packed(Packed<'a>),
    Mxfp4(Mxfp4<'a>),
}

/// A tensor without its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightForm {
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub order: Option<Arc<[u32]>>,
}

struct Found<'a> {
    file: &'a Path,
    dtype: Option<DType>,
    type_name: &'a str,
    shape: &'a [u64],
    bytes: &'a [u8],
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
