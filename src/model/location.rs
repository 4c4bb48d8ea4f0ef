//! What a path means: a GGUF file (with its other parts), or a folder with a `config.json` and safetensors.

use super::error::ModelError;
use super::gguf::GgufFile;
use super::safetensors::has_weights;
use std::path::{Path, PathBuf};

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
    let has_config = path.join("config.json").exists();
    if has_config && has_weights(path) {
        return Ok(Location::Folder(path.to_owned()));
    }
    let mut candidates = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|e| ModelError::io(path, e))? {
        let file = entry.map_err(|e| ModelError::io(path, e))?.path();
        if is_model_gguf(&file) {
            candidates.push(file);
        }
    }
    candidates.sort();
    match candidates.as_slice() {
        [one] => Ok(Location::Gguf(one.clone())),
        [] if has_config => Ok(Location::Folder(path.to_owned())),
        [] => Err(ModelError::not_found(path, "the folder has neither a config.json nor a .gguf file")),
        many => {
            let fault = format!("the folder has {} GGUF models; name one of them", many.len());
            Err(ModelError::not_found(path, fault))
        }
    }
}

/// A name ending in `.gguf` that stands for a language model: whole or the first part of one, not an image encoder beside it.
pub(crate) fn is_model_gguf(path: &Path) -> bool {
    let is_gguf = path.extension().is_some_and(|x| x.eq_ignore_ascii_case("gguf"));
    let is_projector = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("mmproj"));
    is_gguf && !is_projector && split_of_name(path).is_none_or(|(_, number, _)| number == 1)
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
