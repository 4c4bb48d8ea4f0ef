//! Reading files of models: memory maps for weights, bounded reads for the small JSON files beside them.
//!
//! Guarantees: only regular files are opened (a pipe or device is refused, so nothing blocks), and a small file is never
//! read beyond its limit. It does not guard against another process that shortens a mapped file while it is in use: the
//! operating system ends the process then, as for any mapped file.

use super::error::ModelError;
use memmap2::Mmap;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest `config.json`, `generation_config.json`, index or template file that is read.
pub const MAX_SMALL_FILE_BYTES: u64 = 16 << 20;

/// Maps a regular, non-empty file read-only.
pub fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = open_regular(path)?;
    let len = file.metadata().map_err(|e| ModelError::io(path, e))?.len();
    if len == 0 {
        return Err(ModelError::malformed(path, "the file is empty"));
    }
    // SAFETY: the map is read-only and private to this process; the module documentation states what happens when
    // another process shortens the file, which no check here could rule out.
    unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))
}

/// Largest tokenizer file that is read: those of vocabularies of 262,144 tokens have 33 MB.
pub const MAX_TOKENIZER_BYTES: u64 = 96 << 20;

/// Reads a file of at most `limit` bytes; `None` when there is no such file.
pub fn read_bytes(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    if !path.exists() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    let file = open_regular(path)?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| ModelError::io(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(ModelError::malformed(path, format!("the file is larger than {limit} bytes")));
    }
    Ok(Some(bytes))
}

/// Reads a text file of at most [`MAX_SMALL_FILE_BYTES`]; `None` when there is no such file.
pub fn read_text(path: &Path) -> Result<Option<String>, ModelError> {
    let Some(bytes) = read_bytes(path, MAX_SMALL_FILE_BYTES)? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(ModelError::malformed(path, "the file is not UTF-8 text")),
    }
}

/// Reads a JSON object; `None` when there is no such file.
pub fn read_json_object(path: &Path) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(ModelError::malformed(path, "the file is JSON, but not an object")),
        Err(e) => Err(ModelError::malformed(path, format!("the file is not valid JSON: {e}"))),
    }
}

fn open_regular(path: &Path) -> Result<File, ModelError> {
    let meta = std::fs::metadata(path).map_err(|e| ModelError::io(path, e))?;
    if !meta.is_file() {
        return Err(ModelError::not_found(path, "this is not a regular file"));
    }
    File::open(path).map_err(|e| ModelError::io(path, e))
}
