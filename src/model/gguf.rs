//! GGUF v2 and v3, little-endian, read in place over a memory map.
//!
//! Guarantees: every offset and length is checked before it is followed; memory is bounded by the number of keys and
//! tensors that the file really holds (counts are never trusted), array values stay in the map until asked for; keys and
//! tensor names are unique; tensors are aligned, lie inside the file and do not overlap.
//! It does not attempt v1, big-endian files or writing. Format: ggml's `docs/gguf.md`.

use super::error::ModelError;
use super::files::map_file;
use super::gguf_types::{GgmlType, ValueType};
use memmap2::Mmap;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 16;
const MAX_NAME_BYTES: u64 = 65_535;
const MAX_ARRAY_DEPTH: u32 = 4;
/// Beyond every real file; they bound what the records here take.
const MAX_PAIRS: u64 = 65_536;
const MAX_TENSORS: u64 = 262_144;
/// Longest array that is handed out as a list.
const MAX_LIST: usize = 1 << 24;
/// Least bytes of a metadata pair: key length, value type, one byte.
const MIN_PAIR_BYTES: u64 = 13;
/// Least bytes of a tensor record: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 32;

/// One GGUF file: its metadata and its tensors.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    version: u32,
    pairs: Vec<(String, Stored)>,
    pair_of_key: HashMap<String, usize>,
    tensors: Vec<GgufTensor>,
    tensor_of_name: HashMap<String, usize>,
}

/// A tensor's record.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    pub name: String,
    pub ty: GgmlType,
    /// Outermost first: `[rows, cols]` (the file holds them reversed).
    pub shape: Vec<u64>,
    /// Place of the data in the file.
    range: Range<usize>,
}

impl GgufTensor {
    pub fn num_bytes(&self) -> u64 {
        self.range.len() as u64
    }

    pub fn num_elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// A value as kept: scalars by value, text and arrays by place.
#[derive(Clone, Debug)]
enum Stored {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array { element: ValueType, count: usize, range: Range<usize> },
}

/// A metadata value, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GgufValue<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    Array { element: ValueType, count: usize },
}

impl GgufValue<'_> {
    fn kind(&self) -> &'static str {
        match self {
            GgufValue::Unsigned(_) | GgufValue::Signed(_) => "a whole number",
            GgufValue::Float(_) => "a float",
            GgufValue::Bool(_) => "a bool",
            GgufValue::Text(_) => "a string",
            GgufValue::Array { .. } => "an array",
        }
    }
}

impl GgufFile {
    /// Maps the file and checks its whole header. Tensor types may be unsupported here: the model decides.
    pub fn open(path: &Path) -> Result<GgufFile, ModelError> {
        let map = map_file(path)?;
        let mut reader = Reader { path, bytes: &map, at: 0 };
        let version = reader.version()?;
        let num_tensors = reader.u64("tensor count")?;
        let num_pairs = reader.u64("metadata count")?;
        reader.plausible(num_pairs, MIN_PAIR_BYTES, "metadata pairs")?;
        reader.plausible(num_tensors, MIN_TENSOR_BYTES, "tensors")?;
        if num_pairs > MAX_PAIRS || num_tensors > MAX_TENSORS {
            return reader.fail(format!(
                "{num_pairs} metadata pairs and {num_tensors} tensors are more than the limits {MAX_PAIRS} and {MAX_TENSORS}"
            ));
        }
        let (pairs, pair_of_key) = reader.pairs(num_pairs)?;
        let alignment = alignment(path, pair_of_key.get("general.alignment").map(|&i| &pairs[i].1))?;
        let records = reader.tensor_records(num_tensors)?;
        let data_start = (reader.at as u64).next_multiple_of(alignment);
        let mut tensors = Vec::with_capacity(records.len());
        for record in records {
            tensors.push(place_tensor(path, record, data_start, alignment, map.len() as u64)?);
        }
        check_overlaps(path, &tensors)?;
        let mut tensor_of_name = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            if tensor_of_name.insert(tensor.name.clone(), i).is_some() {
                return Err(ModelError::malformed(path, format!("tensor {} appears twice", tensor.name)));
            }
        }
        Ok(GgufFile { path: path.to_owned(), map, version, pairs, pair_of_key, tensors, tensor_of_name })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn version(&self) -> u32 {
        self.version
    }

    pub fn num_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Metadata in the file's order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, GgufValue<'_>)> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), self.borrow(value)))
    }

    pub fn value(&self, key: &str) -> Option<GgufValue<'_>> {
        self.pair_of_key.get(key).map(|&i| self.borrow(&self.pairs[i].1))
    }

    /// A string; `None` when there is no such key, an error when it holds something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, "a string", other.kind())),
        }
    }

    /// A whole number of any width that fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, ModelError> {
        let number = match self.value(key) {
            None => return Ok(None),
            Some(GgufValue::Unsigned(v)) => u32::try_from(v).ok(),
            Some(GgufValue::Signed(v)) => u32::try_from(v).ok(),
            Some(other) => return Err(self.wrong_type(key, "a whole number", other.kind())),
        };
        match number {
            Some(v) => Ok(Some(v)),
            None => Err(ModelError::malformed(&self.path, format!("{key} does not fit in 32 bits"))),
        }
    }

    /// A number of either float width.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(GgufValue::Float(v)) => Ok(Some(v)),
            Some(GgufValue::Unsigned(v)) => Ok(Some(v as f64)),
            Some(GgufValue::Signed(v)) => Ok(Some(v as f64)),
            Some(other) => Err(self.wrong_type(key, "a number", other.kind())),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(GgufValue::Bool(v)) => Ok(Some(v)),
            Some(other) => Err(self.wrong_type(key, "a bool", other.kind())),
        }
    }

    /// An array of strings, borrowed from the map.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        let Some((count, range)) = self.array(key, |e| e == ValueType::String, "an array of strings")? else {
            return Ok(None);
        };
        let mut reader = Reader { path: &self.path, bytes: &self.map[..range.end], at: range.start };
        let mut texts = Vec::with_capacity(count);
        for _ in 0..count {
            let range = reader.string(key)?;
            texts.push(self.text(range));
        }
        Ok(Some(texts))
    }

    /// An array of f32.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some((_, range)) = self.array(key, |e| e == ValueType::F32, "an array of f32")? else { return Ok(None) };
        let words = self.map[range].chunks_exact(4);
        Ok(Some(words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
    }

    /// An array of i32 or u32; u32 values must fit in i32.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, ModelError> {
        let is_word = |e| e == ValueType::I32 || e == ValueType::U32;
        let Some((_, range)) = self.array(key, is_word, "an array of i32")? else { return Ok(None) };
        let unsigned = matches!(self.value(key), Some(GgufValue::Array { element: ValueType::U32, .. }));
        let words = self.map[range].chunks_exact(4);
        let numbers: Vec<i32> = words.map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if unsigned && numbers.iter().any(|&n| n < 0) {
            return Err(ModelError::malformed(&self.path, format!("{key} holds a number that does not fit in i32")));
        }
        Ok(Some(numbers))
    }

    /// An array of bytes, borrowed from the map.
    pub fn bytes_of(&self, key: &str) -> Result<Option<&[u8]>, ModelError> {
        let is_byte = |e| e == ValueType::U8 || e == ValueType::I8;
        let found = self.array(key, is_byte, "an array of bytes")?;
        Ok(found.map(|(_, range)| &self.map[range]))
    }

    /// Elements of an array of any type; `None` when there is no such key.
    pub fn array_len(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.array(key, |_| true, "an array")?.map(|(count, _)| count))
    }

    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensor_of_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The data of a tensor of this file.
    pub fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        &self.map[tensor.range.clone()]
    }

    fn borrow<'a>(&'a self, stored: &Stored) -> GgufValue<'a> {
        match stored {
            Stored::Unsigned(v) => GgufValue::Unsigned(*v),
            Stored::Signed(v) => GgufValue::Signed(*v),
            Stored::Float(v) => GgufValue::Float(*v),
            Stored::Bool(v) => GgufValue::Bool(*v),
            Stored::Text(range) => GgufValue::Text(self.text(range.clone())),
            Stored::Array { element, count, .. } => GgufValue::Array { element: *element, count: *count },
        }
    }

    fn text(&self, range: Range<usize>) -> &str {
        // The map could only differ from what was checked if another process rewrote the file; then the text is empty.
        std::str::from_utf8(&self.map[range]).unwrap_or_default()
    }

    fn array(
        &self,
        key: &str,
        accept: impl Fn(ValueType) -> bool,
        wanted: &str,
    ) -> Result<Option<(usize, Range<usize>)>, ModelError> {
        let Some(&i) = self.pair_of_key.get(key) else { return Ok(None) };
        match &self.pairs[i].1 {
            Stored::Array { count, .. } if *count > MAX_LIST => {
                Err(ModelError::malformed(&self.path, format!("{key} has {count} elements, more than {MAX_LIST}")))
            }
            Stored::Array { element, count, range } if accept(*element) => Ok(Some((*count, range.clone()))),
            Stored::Array { element, .. } => {
                Err(self.wrong_type(key, wanted, &format!("an array of {}", element.name())))
            }
            other => Err(self.wrong_type(key, wanted, self.borrow(other).kind())),
        }
    }

    fn wrong_type(&self, key: &str, wanted: &str, found: &str) -> ModelError {
        ModelError::malformed(&self.path, format!("{key} must be {wanted}, not {found}"))
    }
}

fn alignment(path: &Path, stored: Option<&Stored>) -> Result<u64, ModelError> {
    match stored {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Stored::Unsigned(a)) if a.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(a) => Ok(*a),
        Some(Stored::Unsigned(a)) => Err(ModelError::malformed(
            path,
            format!("general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, not {a}"),
        )),
        Some(_) => Err(ModelError::malformed(path, "general.alignment must be a u32")),
    }
}

struct TensorRecord {
    name: String,
    ty: GgmlType,
    shape: Vec<u64>,
    offset: u64,
}

fn place_tensor(
    path: &Path,
    record: TensorRecord,
    data_start: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<GgufTensor, ModelError> {
    let TensorRecord { name, ty, shape, offset } = record;
    let fail = |fault: String| Err(ModelError::malformed(path, fault));
    let Some(num_elements) = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)) else {
        return fail(format!("tensor {name} has more elements than 64 bits can count"));
    };
    let cols = shape.last().copied().unwrap_or(0);
    if num_elements == 0 {
        return fail(format!("tensor {name} has a dimension of 0"));
    }
    if !cols.is_multiple_of(u64::from(ty.block_elements)) {
        let block = ty.block_elements;
        return fail(format!(
            "tensor {name} has rows of {cols} elements, which is no multiple of {block} ({})",
            ty.name
        ));
    }
    if !offset.is_multiple_of(alignment) {
        return fail(format!("tensor {name} begins at {offset}, which is no multiple of the alignment {alignment}"));
    }
    let start = data_start.checked_add(offset);
    let end = ty.bytes(num_elements).and_then(|n| start?.checked_add(n));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_bytes => {
            Ok(GgufTensor { name, ty, shape, range: start as usize..end as usize })
        }
        _ => fail(format!("tensor {name} reaches beyond the end of the file ({file_bytes} bytes)")),
    }
}

fn check_overlaps(path: &Path, tensors: &[GgufTensor]) -> Result<(), ModelError> {
    let mut by_place: Vec<&GgufTensor> = tensors.iter().collect();
    by_place.sort_by_key(|t| t.range.start);
    for pair in by_place.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let fault = format!("tensor {} overlaps tensor {}", pair[1].name, pair[0].name);
            return Err(ModelError::malformed(path, fault));
        }
    }
    Ok(())
}

/// A cursor over the header.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

type Pairs = (Vec<(String, Stored)>, HashMap<String, usize>);

impl Reader<'_> {
    fn fail<T>(&self, fault: impl Into<String>) -> Result<T, ModelError> {
        Err(ModelError::malformed(self.path, fault))
    }

    fn take(&mut self, len: u64, what: &str) -> Result<Range<usize>, ModelError> {
        let left = (self.bytes.len() - self.at) as u64;
        if len > left {
            return self.fail(format!("the file ends inside {what} (needs {len} bytes, {left} are left)"));
        }
        let range = self.at..self.at + len as usize;
        self.at = range.end;
        Ok(range)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let range = self.take(N as u64, what)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes[range]);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn version(&mut self) -> Result<u32, ModelError> {
        if self.array::<4>("the magic")? != *b"GGUF" {
            return self.fail("the file is not a GGUF file (its first bytes are not \"GGUF\")");
        }
        let version = self.u32("the version")?;
        let unsupported = |fault: String| Err(ModelError::unsupported(self.path, fault));
        match version {
            2 | 3 => Ok(version),
            1 => unsupported("GGUF version 1 is not supported; supported: 2, 3".into()),
            v if (1..=3).contains(&v.swap_bytes()) => unsupported("big-endian GGUF files are not supported".into()),
            v => self.fail(format!("GGUF version {v} is unknown; supported: 2, 3")),
        }
    }

    /// Refuses a count that the rest of the file cannot hold.
    fn plausible(&self, count: u64, min_bytes: u64, what: &str) -> Result<(), ModelError> {
        let left = (self.bytes.len() - self.at) as u64;
        if count > left / min_bytes {
            return self.fail(format!("the header counts {count} {what}, more than the file could hold"));
        }
        Ok(())
    }

    /// The place of a length-prefixed UTF-8 string.
    fn string(&mut self, what: &str) -> Result<Range<usize>, ModelError> {
        let len = self.u64(what)?;
        let range = self.take(len, what)?;
        if std::str::from_utf8(&self.bytes[range.clone()]).is_err() {
            return self.fail(format!("{what} is not UTF-8"));
        }
        Ok(range)
    }

    fn name(&mut self, what: &str) -> Result<String, ModelError> {
        let range = self.string(what)?;
        if range.len() as u64 > MAX_NAME_BYTES {
            return self.fail(format!("{what} is longer than {MAX_NAME_BYTES} bytes"));
        }
        Ok(String::from_utf8_lossy(&self.bytes[range]).into_owned())
    }

    fn pairs(&mut self, count: u64) -> Result<Pairs, ModelError> {
        let mut pairs = Vec::new();
        let mut pair_of_key = HashMap::new();
        for i in 0..count {
            let key = self.name(&format!("metadata key {i}"))?;
            let ty = self.value_type(&key)?;
            let value = self.value(ty, &key)?;
            if pair_of_key.insert(key.clone(), pairs.len()).is_some() {
                return self.fail(format!("metadata key {key} appears twice"));
            }
            pairs.push((key, value));
        }
        Ok((pairs, pair_of_key))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, ModelError> {
        let id = self.u32(key)?;
        match ValueType::from_id(id) {
            Some(ty) => Ok(ty),
            None => self.fail(format!("{key} has the unknown value type {id}")),
        }
    }

    fn value(&mut self, ty: ValueType, key: &str) -> Result<Stored, ModelError> {
        Ok(match ty {
            ValueType::U8 => Stored::Unsigned(u8::from_le_bytes(self.array(key)?).into()),
            ValueType::I8 => Stored::Signed(i8::from_le_bytes(self.array(key)?).into()),
            ValueType::U16 => Stored::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            ValueType::I16 => Stored::Signed(i16::from_le_bytes(self.array(key)?).into()),
            ValueType::U32 => Stored::Unsigned(self.u32(key)?.into()),
            ValueType::I32 => Stored::Signed(i32::from_le_bytes(self.array(key)?).into()),
            ValueType::U64 => Stored::Unsigned(self.u64(key)?),
            ValueType::I64 => Stored::Signed(i64::from_le_bytes(self.array(key)?)),
            ValueType::F32 => Stored::Float(f32::from_le_bytes(self.array(key)?).into()),
            ValueType::F64 => Stored::Float(f64::from_le_bytes(self.array(key)?)),
            ValueType::Bool => match self.array::<1>(key)? {
                [0] => Stored::Bool(false),
                [1] => Stored::Bool(true),
                [b] => return self.fail(format!("{key} is a bool with the value {b}")),
            },
            ValueType::String => Stored::Text(self.string(key)?),
            ValueType::Array => {
                let (element, count, range) = self.skip_array(key, 1)?;
                Stored::Array { element, count, range }
            }
        })
    }

    /// Walks over an array, checking every length in it. The place is that of its elements.
    fn skip_array(&mut self, key: &str, depth: u32) -> Result<(ValueType, usize, Range<usize>), ModelError> {
        if depth > MAX_ARRAY_DEPTH {
            return self.fail(format!("{key} nests arrays more than {MAX_ARRAY_DEPTH} deep"));
        }
        let element = self.value_type(key)?;
        let count = self.u64(key)?;
        let least_bytes = element.fixed_bytes().unwrap_or(8) as u64;
        self.plausible(count, least_bytes, &format!("elements of {key}"))?;
        let start = self.at;
        if element.fixed_bytes().is_some() {
            self.take(count * least_bytes, key)?;
        } else {
            for _ in 0..count {
                if element == ValueType::String {
                    self.string(key)?;
                } else {
                    self.skip_array(key, depth + 1)?;
                }
            }
        }
        Ok((element, count as usize, start..self.at))
    }

    fn tensor_records(&mut self, count: u64) -> Result<Vec<TensorRecord>, ModelError> {
        let mut records = Vec::new();
        for i in 0..count {
            let name = self.name(&format!("the name of tensor {i}"))?;
            let num_dims = self.u32(&name)?;
            if !(1..=4).contains(&num_dims) {
                return self.fail(format!("tensor {name} has {num_dims} dimensions; 1 to 4 are legal"));
            }
            let mut shape = Vec::with_capacity(4);
            for _ in 0..num_dims {
                shape.push(self.u64(&name)?);
            }
            shape.reverse();
            let ty = self.tensor_type(&name)?;
            let offset = self.u64(&name)?;
            records.push(TensorRecord { name, ty, shape, offset });
        }
        Ok(records)
    }

    fn tensor_type(&mut self, name: &str) -> Result<GgmlType, ModelError> {
        let id = self.u32(name)?;
        match GgmlType::from_id(id) {
            Some(ty) if ty.is_removed() => {
                let fault = format!("tensor {name} has type {}, which has been removed from the format", ty.name);
                Err(ModelError::unsupported(self.path, fault))
            }
            Some(ty) => Ok(ty),
            None => self.fail(format!("tensor {name} has the unknown type {id}")),
        }
    }
}
