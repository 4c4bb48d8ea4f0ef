//! What an id means, and which files of a repository make up a model. Pure.

use super::FetchError;
use crate::model::location::is_model_gguf;
use crate::model::safetensors::is_weights_name;
use serde_json::Value;
use std::path::Path;

/// `org/name`, `org/name@revision`, `org/name:file-or-quantisation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    pub org: String,
    pub name: String,
    pub revision: String,
    /// Part of the name of the GGUF that is wanted.
    pub selection: Option<String>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Path inside the repository, parts divided by `/`.
    pub path: String,
    pub num_bytes: u64,
    /// Name of the blob in the cache: SHA-256 for large files, the git id for small ones.
    pub blob: String,
    /// Known for large files.
    pub sha256: Option<String>,
}

/// What the hub says of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repo {
    pub commit: String,
    pub files: Vec<RepoFile>,
}

/// Small files that belong to a checkpoint in the Hugging Face format.
const SIDE_FILES: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Quantisations that are taken when an id does not choose, best first.
const PREFERRED: [&str; 11] =
    ["Q4_K_M", "Q4_1", "Q4_0", "Q4_K_S", "Q5_K_M", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16", "F16"];

impl RepoId {
    pub fn parse(id: &str) -> Result<RepoId, FetchError> {
        let invalid = || FetchError::InvalidId { id: id.to_owned() };
        let (rest, selection) = match id.split_once(':') {
            Some((rest, selection)) => (rest, Some(selection.to_owned())),
            None => (id, None),
        };
        let (rest, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (org, name) = rest.split_once('/').ok_or_else(invalid)?;
        let parts = [org, name, revision].into_iter().chain(selection.as_deref());
        if parts.into_iter().any(|part| !is_plain_name(part)) {
            return Err(invalid());
        }
        Ok(RepoId { org: org.into(), name: name.into(), revision: revision.into(), selection })
    }

    pub fn full_name(&self) -> String {
        format!("{}/{}", self.org, self.name)
    }
}

/// Letters, digits, `.`, `_`, `-` and no leading dot: safe as one part of a path and of an address.
pub fn is_plain_name(part: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !part.is_empty() && part.len() <= 200 && !part.starts_with('.') && part.chars().all(legal)
}

/// Reads the hub's description of a repository. Files whose names are not plain are left out.
pub fn parse_repo(json: &Value) -> Result<Repo, FetchError> {
    let answer = |fault: &str| FetchError::Answer(fault.to_owned());
    let commit = json["sha"].as_str().filter(|s| is_plain_name(s)).ok_or_else(|| answer("there is no commit id"))?;
    let siblings = json["siblings"].as_array().ok_or_else(|| answer("there is no list of files"))?;
    let file_of = |entry: &Value| -> Option<RepoFile> {
        let path = entry["rfilename"].as_str().filter(|p| p.split('/').all(is_plain_name))?;
        let sha256 = entry["lfs"]["sha256"].as_str().filter(|s| is_plain_name(s)).map(str::to_owned);
        let num_bytes = entry["size"].as_u64().or(entry["lfs"]["size"].as_u64())?;
        let blob = sha256.clone().or_else(|| entry["blobId"].as_str().map(str::to_owned))?;
        is_plain_name(&blob).then(|| RepoFile { path: path.to_owned(), num_bytes, blob, sha256 })
    };
    Ok(Repo { commit: commit.to_owned(), files: siblings.iter().filter_map(file_of).collect() })
}

/// The files to fetch; the first is what [`super::download`] points at when it is a GGUF.
pub fn choose_files(id: &RepoId, repo: &Repo) -> Result<Vec<RepoFile>, FetchError> {
    let has = |name: &str| repo.files.iter().any(|f| f.path == name);
    let is_checkpoint = has("config.json") && repo.files.iter().any(|f| is_weights_name(&f.path));
    if is_checkpoint && id.selection.is_none() {
        return Ok(checkpoint_files(repo));
    }
    let nothing = |fault: String| FetchError::NothingUsable { id: id.full_name(), fault };
    let mut ggufs: Vec<&RepoFile> = repo.files.iter().filter(|f| is_first_gguf(&f.path)).collect();
    ggufs.sort_by(|a, b| a.path.cmp(&b.path));
    let contains = |file: &RepoFile, word: &str| file.path.to_lowercase().contains(&word.to_lowercase());
    let chosen = match &id.selection {
        Some(word) => ggufs.iter().find(|f| f.path == *word).or_else(|| ggufs.iter().find(|f| contains(f, word))),
        None if ggufs.len() == 1 => ggufs.first(),
        None => PREFERRED.iter().find_map(|word| ggufs.iter().find(|f| contains(f, word))),
    };
    match chosen {
        Some(first) => Ok(with_parts(repo, first)),
        None if ggufs.is_empty() => Err(nothing("it holds neither safetensors nor GGUF files".into())),
        None => {
            let names: Vec<&str> = ggufs.iter().map(|f| f.path.as_str()).collect();
            Err(nothing(format!("choose one with {}:FILE: {}", id.full_name(), names.join(", "))))
        }
    }
}

fn checkpoint_files(repo: &Repo) -> Vec<RepoFile> {
    let has = |name: &str| repo.files.iter().any(|f| f.path == name);
    let (has_single, has_index) = (has("model.safetensors"), has("model.safetensors.index.json"));
    let is_weight = |path: &str| match (has_single, has_index) {
        (true, _) => path == "model.safetensors",
        (false, true) => path == "model.safetensors.index.json" || (is_weights_name(path) && path.contains("-of-")),
        (false, false) => is_weights_name(path),
    };
    let wanted = |f: &&RepoFile| SIDE_FILES.contains(&f.path.as_str()) || is_weight(&f.path);
    repo.files.iter().filter(wanted).cloned().collect()
}

/// `(prefix, number, count)` of `PREFIX-00001-of-00003.gguf`.
fn split_of(path: &str) -> Option<(&str, u32, u32)> {
    let stem = path.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    Some((prefix, number.parse().ok()?, count.parse().ok()?))
}

fn is_first_gguf(path: &str) -> bool {
    is_model_gguf(Path::new(path))
}

/// The file and, when it is the first of several parts, the others.
fn with_parts(repo: &Repo, first: &RepoFile) -> Vec<RepoFile> {
    let Some((prefix, _, count)) = split_of(&first.path) else { return vec![first.clone()] };
    let is_part = |f: &&RepoFile| split_of(&f.path).is_some_and(|(p, _, c)| p == prefix && c == count);
    let mut parts: Vec<RepoFile> = repo.files.iter().filter(is_part).cloned().collect();
    parts.sort_by(|a, b| a.path.cmp(&b.path));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repo(paths: &[&str]) -> Repo {
        let file = |p: &&str| RepoFile { path: p.to_string(), num_bytes: 1, blob: "b".into(), sha256: None };
        Repo { commit: "c".into(), files: paths.iter().map(file).collect() }
    }

    fn chosen(id: &str, paths: &[&str]) -> Result<Vec<String>, FetchError> {
        let id = RepoId::parse(id).expect("a legal id");
        Ok(choose_files(&id, &repo(paths))?.into_iter().map(|f| f.path).collect())
    }

    #[test]
    fn ids_are_parsed_and_nothing_escapes() {
        let id = RepoId::parse("org/name@v1:Q8_0").expect("legal");
        assert_eq!((id.full_name().as_str(), id.revision.as_str()), ("org/name", "v1"));
        assert_eq!(id.selection.as_deref(), Some("Q8_0"));
        assert_eq!(RepoId::parse("org/name").expect("legal").revision, "main");
        for bad in ["name", "a/b/c", "../x", "a/..", "a/b@../x", "a/b:../x", "a b/c", "a/b:", "/", ""] {
            assert!(RepoId::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_checkpoint_brings_its_weights_and_tokenizer_and_nothing_else() {
        let paths =
            ["README.md", "config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "onnx/model.onnx"];
        assert_eq!(chosen("o/n", &paths).expect("usable"), ["config.json", "model.safetensors", "tokenizer.json"]);
        let sharded =
            ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.safetensors"];
        assert_eq!(chosen("o/n", &sharded).expect("usable").len(), 3);
        let loose = ["config.json", "weights.safetensors", "consolidated.safetensors", "adapter_model.safetensors"];
        assert_eq!(chosen("o/n", &loose).expect("usable"), ["config.json", "weights.safetensors"]);
    }

    #[test]
    fn a_gguf_is_chosen_by_word_else_by_preference() {
        let paths = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m.gguf"];
        assert_eq!(chosen("o/n:q8_0", &paths).expect("usable"), ["m-Q8_0.gguf"]);
        assert_eq!(chosen("o/n", &paths).expect("usable"), ["m-Q4_K_M.gguf"]);
        let text = chosen("o/n", &["a-IQ1.gguf", "b-IQ2.gguf"]).expect_err("ambiguous").to_string();
        assert!(text.contains("a-IQ1.gguf, b-IQ2.gguf"), "{text}");
        assert!(chosen("o/n", &["pytorch_model.bin"]).is_err());
    }

    #[test]
    fn all_parts_of_a_split_file_are_taken() {
        let paths = ["q/m-Q8_0-00002-of-00002.gguf", "q/m-Q8_0-00001-of-00002.gguf", "q/m-Q4_0.gguf"];
        let parts = chosen("o/n:Q8_0", &paths).expect("usable");
        assert_eq!(parts, ["q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"]);
    }

    #[test]
    fn an_answer_with_unsafe_names_is_cut_down() {
        let json = serde_json::json!({"sha": "abc", "siblings": [
            {"rfilename": "../../x.gguf", "size": 1, "blobId": "b"},
            {"rfilename": "ok.gguf", "size": 2, "blobId": "../b"},
            {"rfilename": "fine.gguf", "size": 3, "blobId": "b", "lfs": {"sha256": "ff", "size": 3}}]});
        let repo = parse_repo(&json).expect("an answer");
        assert_eq!(repo.files.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["fine.gguf"]);
        assert_eq!(repo.files[0].blob, "ff");
        assert!(parse_repo(&serde_json::json!({"sha": "../x", "siblings": []})).is_err());
    }
}
