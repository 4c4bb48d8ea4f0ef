//! Models found on this machine, read in place: the folders that other programs keep models in, and the user's own.
//!
//! Guarantees: only headers are read, nothing is written, walks are bounded in depth and number and follow no loop. A
//! model that cannot run is listed with the reason. The environment comes in as [`CatalogEnv`]: nothing is looked up here.

use super::checkpoint::{Model, folder_name};
use super::error::ModelError;
use super::files::{read_json_object, read_text};
use super::hub::DEFAULT_MODEL;
use super::location::{is_model_gguf, split_of_name};
use super::safetensors::{has_pickled_weights, has_weights};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const MAX_DEPTH: u32 = 6;
const MAX_CANDIDATES: usize = 10_000;
const MAX_ENTRIES_PER_WALK: usize = 200_000;

/// Places as the environment names them; `None` where a variable is unset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CatalogEnv {
    /// The user's home.
    pub home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`
    pub xdg_cache_home: Option<PathBuf>,
    /// `HF_HUB_CACHE`
    pub hf_hub_cache: Option<PathBuf>,
    /// `HUGGINGFACE_HUB_CACHE`
    pub huggingface_hub_cache: Option<PathBuf>,
    /// `HF_HOME`
    pub hf_home: Option<PathBuf>,
    /// `OLLAMA_MODELS`
    pub ollama_models: Option<PathBuf>,
    /// `LLAMA_CACHE`
    pub llama_cache: Option<PathBuf>,
}

/// Whose layout a folder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CatalogSource {
    /// Models that Kvasir fetched itself.
    Kvasir,
    /// A folder that the user named.
    User,
    HuggingFace,
    LmStudio,
    Ollama,
    LlamaCpp,
}

/// A folder to look in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogRoot {
    pub source: CatalogSource,
    pub path: PathBuf,
}

/// Something that looks like a model; not read yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub id: String,
    pub path: PathBuf,
    pub source: CatalogSource,
    /// Why there is nothing to open.
    pub fault: Option<String>,
}

impl Candidate {
    fn new(id: String, path: PathBuf, source: CatalogSource) -> Candidate {
        Candidate { id, path, source, fault: None }
    }
}

/// A model of the catalogue. Facts are missing where the file could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CatalogEntry {
    pub id: String,
    pub path: PathBuf,
    pub source: CatalogSource,
    pub format: Option<super::ModelFormat>,
    pub arch: Option<String>,
    pub params: Option<u64>,
    pub quant: Option<String>,
    pub bytes: Option<u64>,
    pub context: Option<u32>,
    /// Why it cannot be run; `None` when it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The Hugging Face cache, in the order in which the Python client looks.
pub fn hugging_face_cache(env: &CatalogEnv) -> Option<PathBuf> {
    let direct = env.hf_hub_cache.clone().or_else(|| env.huggingface_hub_cache.clone());
    direct.or_else(|| Some(hugging_face_home(env)?.join("hub")))
}

/// Where the Python client keeps its cache and the user's token unless it is told otherwise.
pub fn hugging_face_home(env: &CatalogEnv) -> Option<PathBuf> {
    env.hf_home.clone().or_else(|| Some(cache_home(env)?.join("huggingface")))
}

fn cache_home(env: &CatalogEnv) -> Option<PathBuf> {
    env.xdg_cache_home.clone().or_else(|| Some(env.home.as_ref()?.join(".cache")))
}

/// All places to look in, Kvasir's own first.
pub fn roots(env: &CatalogEnv, own_models: &Path, user_dirs: &[PathBuf]) -> Vec<CatalogRoot> {
    let mut roots = vec![CatalogRoot { source: CatalogSource::Kvasir, path: own_models.to_owned() }];
    let mut add = |source, path: Option<PathBuf>| roots.extend(path.map(|path| CatalogRoot { source, path }));
    user_dirs.iter().for_each(|dir| add(CatalogSource::User, Some(dir.clone())));
    add(CatalogSource::HuggingFace, hugging_face_cache(env));
    let in_home = |rest: &str| env.home.as_ref().map(|home| home.join(rest));
    add(CatalogSource::LmStudio, in_home(".lmstudio/models"));
    add(CatalogSource::LmStudio, cache_home(env).map(|c| c.join("lm-studio/models")));
    add(CatalogSource::Ollama, env.ollama_models.clone().or_else(|| in_home(".ollama/models")));
    if env.ollama_models.is_none() {
        add(CatalogSource::Ollama, Some(PathBuf::from("/usr/share/ollama/.ollama/models")));
    }
    add(CatalogSource::LlamaCpp, env.llama_cache.clone().or_else(|| Some(cache_home(env)?.join("llama.cpp"))));
    roots
}

/// Everything that looks like a model, each place once, ids sorted within a source. Folders that do not exist are empty;
/// one that cannot be read is a candidate with a fault.
pub fn list(roots: &[CatalogRoot]) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    for root in roots {
        let mut candidates = match root.source {
            CatalogSource::HuggingFace => hugging_face_models(&root.path),
            CatalogSource::Ollama => ollama_models(&root.path),
            source => walked_models(&root.path, source),
        };
        candidates.extend(unreadable(root));
        // Where links lead to one place by several ways, the shortest stands for it.
        candidates.sort_by(|a, b| (depth(&a.path), &a.id).cmp(&(depth(&b.path), &b.id)));
        let first = found.len();
        for candidate in candidates {
            let place = std::fs::canonicalize(&candidate.path).unwrap_or_else(|_| candidate.path.clone());
            if found.len() < MAX_CANDIDATES && seen.insert(place) {
                found.push(candidate);
            }
        }
        found[first..].sort_by(|a, b| a.id.cmp(&b.id));
    }
    found
}

/// A folder to look in that is there and cannot be read.
fn unreadable(root: &CatalogRoot) -> Option<Candidate> {
    let error = std::fs::read_dir(&root.path).err().filter(|e| e.kind() != std::io::ErrorKind::NotFound)?;
    let fault = Some(format!("the folder cannot be read: {error}"));
    Some(Candidate { fault, ..Candidate::new(root.path.display().to_string(), root.path.clone(), root.source) })
}

fn depth(path: &Path) -> usize {
    path.components().count()
}

/// [`list`], with the headers of each model read.
pub fn scan(roots: &[CatalogRoot]) -> Vec<CatalogEntry> {
    list(roots).into_iter().map(CatalogEntry::read).collect()
}

impl CatalogEntry {
    /// Opens the model as loading would and keeps its facts or the reason why not.
    pub fn read(candidate: Candidate) -> CatalogEntry {
        let Candidate { id, path, source, fault } = candidate;
        let opened = fault.map_or_else(|| Model::open(&path).map_err(|e| e.to_string()), Err);
        match opened {
            Ok(model) => {
                let info = model.info().clone();
                CatalogEntry {
                    id,
                    path,
                    source,
                    format: Some(info.format),
                    arch: Some(info.arch),
                    params: Some(info.num_params),
                    quant: Some(info.quant),
                    bytes: Some(info.file_bytes),
                    context: Some(info.context),
                    problem: None,
                }
            }
            Err(problem) => CatalogEntry {
                id,
                bytes: std::fs::metadata(&path).ok().filter(|m| m.is_file()).map(|m| m.len()),
                path,
                source,
                format: None,
                arch: None,
                params: None,
                quant: None,
                context: None,
                problem: Some(problem),
            },
        }
    }
}

/// The path that a user means by a path or by an id of the catalogue (case does not matter; a unique ending after a
/// slash is enough).
pub fn resolve(wanted: &str, roots: &[CatalogRoot]) -> Result<PathBuf, ModelError> {
    let as_path = Path::new(wanted);
    if as_path.exists() {
        return Ok(as_path.to_owned());
    }
    let candidates = list(roots);
    let path_of = |c: &Candidate| match &c.fault {
        None => Ok(c.path.clone()),
        Some(fault) => Err(ModelError::not_found(&c.path, fault.clone())),
    };
    if let Some(exact) = candidates.iter().find(|c| c.id.eq_ignore_ascii_case(wanted)) {
        return path_of(exact);
    }
    let wanted_lower = wanted.to_lowercase();
    let ending = format!("/{wanted_lower}");
    let matches: Vec<&Candidate> = candidates.iter().filter(|c| c.id.to_lowercase().ends_with(&ending)).collect();
    match matches.as_slice() {
        [one] => path_of(one),
        [] => {
            let near = candidates.iter().find(|c| c.id.to_lowercase().contains(&wanted_lower));
            let hint = near.map(|c| format!("; did you mean {}?", c.id)).unwrap_or_default();
            Err(ModelError::not_found(as_path, format!("no model of this name is on this machine{hint}")))
        }
        many => {
            let ids: Vec<&str> = many.iter().map(|c| c.id.as_str()).collect();
            Err(ModelError::not_found(as_path, format!("several models have this name: {}", ids.join(", "))))
        }
    }
}

/// Sorted entries of a folder; empty when it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().take(MAX_ENTRIES_PER_WALK).map(|e| e.path()).collect();
    paths.sort();
    paths
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
}

/// A configuration beside weights, pickled ones too: whoever opens it says why those are not read.
fn is_model_folder(folder: &Path) -> bool {
    folder.join("config.json").is_file() && (has_weights(folder) || has_pickled_weights(folder))
}

fn gguf_stem(path: &Path) -> String {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    split_of_name(path).map_or(stem, |(prefix, _, _)| prefix)
}

/// Walks any tree: GGUF files and model folders, named by their place under `root`.
fn walked_models(root: &Path, source: CatalogSource) -> Vec<Candidate> {
    let mut found = Vec::new();
    let mut num_entries = 0;
    let mut open = vec![(root.to_owned(), String::new(), 0u32)];
    while let Some((folder, prefix, depth)) = open.pop() {
        if is_model_folder(&folder) {
            let id = if prefix.is_empty() { folder_name(&folder) } else { prefix.trim_end_matches('/').to_owned() };
            found.push(Candidate::new(id, folder.clone(), source));
        }
        for path in children(&folder) {
            num_entries += 1;
            if num_entries > MAX_ENTRIES_PER_WALK || found.len() > MAX_CANDIDATES {
                return found;
            }
            if is_model_gguf(&path) && path.is_file() {
                let is_default = name_of(&path) == DEFAULT_MODEL.file;
                let stem = if is_default { DEFAULT_MODEL.name.to_owned() } else { gguf_stem(&path) };
                found.push(Candidate::new(format!("{prefix}{stem}"), path, source));
            } else if depth < MAX_DEPTH && path.is_dir() && !name_of(&path).starts_with('.') {
                let below = format!("{prefix}{}/", name_of(&path));
                open.push((path, below, depth + 1));
            }
        }
    }
    found
}

/// `models--org--name/{refs/main, snapshots/<commit>/…}`.
fn hugging_face_models(root: &Path) -> Vec<Candidate> {
    let mut found = Vec::new();
    for repo in children(root) {
        let Some(id) = name_of(&repo).strip_prefix("models--").map(|name| name.replacen("--", "/", 1)) else {
            continue;
        };
        let Some(snapshot) = current_snapshot(&repo) else { continue };
        if is_model_folder(&snapshot) {
            found.push(Candidate::new(id.clone(), snapshot.clone(), CatalogSource::HuggingFace));
        }
        let mut files: Vec<PathBuf> = Vec::new();
        for path in children(&snapshot) {
            if path.is_dir() {
                files.extend(children(&path));
            } else {
                files.push(path);
            }
        }
        files.retain(|path| is_model_gguf(path) && path.is_file());
        let alone = files.len() == 1 && !is_model_folder(&snapshot);
        for path in files {
            let id = if alone { id.clone() } else { format!("{id}:{}", gguf_stem(&path)) };
            found.push(Candidate::new(id, path, CatalogSource::HuggingFace));
        }
    }
    found
}

/// The snapshot that `refs/main` names, else the last by name.
fn current_snapshot(repo: &Path) -> Option<PathBuf> {
    let snapshots = repo.join("snapshots");
    let named = read_text(&repo.join("refs/main")).ok().flatten();
    let named = named.map(|commit| commit.trim().to_owned()).filter(|c| c.chars().all(|c| c.is_ascii_alphanumeric()));
    let by_ref = named.filter(|c| !c.is_empty()).map(|commit| snapshots.join(commit)).filter(|path| path.is_dir());
    by_ref.or_else(|| children(&snapshots).pop())
}

/// `manifests/<host>/<namespace>/<name>/<tag>`, whose model layer is a blob.
fn ollama_models(root: &Path) -> Vec<Candidate> {
    let mut found = Vec::new();
    for host in children(&root.join("manifests")) {
        for namespace in children(&host) {
            for name in children(&namespace) {
                for tag in children(&name) {
                    let (path, fault) = match ollama_blob(root, &tag) {
                        Ok(blob) => (blob, None),
                        Err(fault) => (tag.clone(), Some(fault)),
                    };
                    let short = format!("{}:{}", name_of(&name), name_of(&tag));
                    let is_library = name_of(&namespace) == "library";
                    let id = if is_library { short } else { format!("{}/{short}", name_of(&namespace)) };
                    found.push(Candidate { id, path, source: CatalogSource::Ollama, fault });
                }
            }
        }
    }
    found
}

/// The file that holds the model of a manifest.
fn ollama_blob(root: &Path, manifest: &Path) -> Result<PathBuf, String> {
    let json = read_json_object(manifest).map_err(|e| e.to_string())?.ok_or("the manifest is gone")?;
    let layers = json.get("layers").and_then(Value::as_array).ok_or("layers: missing from the manifest")?;
    let is_model = |layer: &&Value| layer["mediaType"] == "application/vnd.ollama.image.model";
    let layer = layers.iter().find(is_model).ok_or("layers: none of the manifest is a model")?;
    let hex = layer["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    let hex = hex.filter(|hex| hex.chars().all(|c| c.is_ascii_hexdigit()));
    let hex = hex.ok_or("digest: the manifest names no sha256")?;
    let blob = root.join("blobs").join(format!("sha256-{hex}"));
    if blob.is_file() { Ok(blob) } else { Err(format!("its blob {} is missing; pull it again", blob.display())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(path, text).expect("written");
    }

    fn ids(candidates: &[Candidate]) -> Vec<&str> {
        candidates.iter().map(|c| c.id.as_str()).collect()
    }

    #[test]
    fn the_cache_of_hugging_face_is_found_as_its_client_finds_it() {
        let path = |p: &str| Some(PathBuf::from(p));
        let mut env = CatalogEnv { home: path("/home/a"), ..CatalogEnv::default() };
        assert_eq!(hugging_face_cache(&env), path("/home/a/.cache/huggingface/hub"));
        env.xdg_cache_home = path("/c");
        assert_eq!(hugging_face_cache(&env), path("/c/huggingface/hub"));
        env.hf_home = path("/h");
        assert_eq!(hugging_face_cache(&env), path("/h/hub"));
        env.huggingface_hub_cache = path("/old");
        assert_eq!(hugging_face_cache(&env), path("/old"));
        env.hf_hub_cache = path("/new");
        assert_eq!(hugging_face_cache(&env), path("/new"));
    }

    #[test]
    fn every_layout_is_listed_once_with_its_ids() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let root = dir.path();
        let hub = root.join("hub/models--org--some--model");
        touch(&hub.join("refs/main"), "abc");
        for file in ["config.json", "model.safetensors"] {
            touch(&hub.join("snapshots/abc").join(file), "x");
        }
        touch(&root.join("hub/models--org--quants/snapshots/d/a-Q4_K_M.gguf"), "x");
        touch(&root.join("lm/pub/model/mmproj-x.gguf"), "x");
        touch(&root.join("lm/pub/model/x-Q8_0-00001-of-00002.gguf"), "x");
        touch(&root.join("lm/pub/model/x-Q8_0-00002-of-00002.gguf"), "x");
        let manifest = r#"{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab12"}]}"#;
        touch(&root.join("ollama/manifests/registry.ollama.ai/library/smol/135m"), manifest);
        touch(&root.join("ollama/blobs/sha256-ab12"), "x");
        touch(&root.join("own").join(DEFAULT_MODEL.file), "x");
        let at = |source, path: &str| CatalogRoot { source, path: root.join(path) };
        let roots = [
            at(CatalogSource::Kvasir, "own"),
            at(CatalogSource::User, "own"),
            at(CatalogSource::HuggingFace, "hub"),
            at(CatalogSource::LmStudio, "lm"),
            at(CatalogSource::Ollama, "ollama"),
            at(CatalogSource::LlamaCpp, "nowhere"),
        ];
        let found = list(&roots);
        let expected = ["SmolLM2-135M-Instruct", "org/quants", "org/some--model", "pub/model/x-Q8_0", "smol:135m"];
        assert_eq!(ids(&found), expected);
        assert_eq!(resolve("smollm2-135m-instruct", &roots).expect("found"), root.join("own").join(DEFAULT_MODEL.file));
        assert_eq!(resolve("x-q8_0", &roots).expect("found"), found[3].path);
        let text = resolve("quant", &roots).expect_err("no such model").to_string();
        assert!(text.contains("did you mean org/quants?"), "{text}");
    }

    #[test]
    fn a_broken_model_is_listed_with_its_problem() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        touch(&dir.path().join("broken.gguf"), "GGUF");
        let roots = [CatalogRoot { source: CatalogSource::User, path: dir.path().to_owned() }];
        let entries = scan(&roots);
        assert_eq!(entries.len(), 1);
        assert_eq!((entries[0].id.as_str(), entries[0].bytes), ("broken", Some(4)));
        assert!(entries[0].problem.as_deref().is_some_and(|p| p.contains("the file ends inside")), "{entries:?}");
    }

    #[test]
    fn what_another_program_left_unfinished_is_listed_with_the_reason() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let root = dir.path();
        let manifest = r#"{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab12"}]}"#;
        touch(&root.join("ollama/manifests/host/library/gone/1b"), manifest);
        touch(&root.join("ollama/manifests/host/library/odd/1b"), "{}");
        touch(&root.join("own/old/config.json"), "{}");
        touch(&root.join("own/old/pytorch_model.bin"), "x");
        touch(&root.join("file"), "x");
        let at = |source, path: &str| CatalogRoot { source, path: root.join(path) };
        let roots = [
            at(CatalogSource::User, "own"),
            at(CatalogSource::User, "file"),
            at(CatalogSource::Ollama, "ollama"),
            at(CatalogSource::Ollama, "nowhere"),
        ];
        let entries = scan(&roots);
        let problems: Vec<(&str, &str)> =
            entries.iter().map(|e| (e.id.as_str(), e.problem.as_deref().expect("a reason"))).collect();
        let expected =
            [("old", "model_type"), ("file", "cannot be read"), ("gone:1b", "sha256-ab12"), ("odd:1b", "layers")];
        assert_eq!(problems.len(), expected.len(), "{problems:?}");
        for ((id, problem), (wanted, word)) in problems.iter().zip(expected) {
            assert!(id.ends_with(wanted) && problem.contains(word), "{problems:?}");
        }
        let error = resolve("gone:1b", &roots).expect_err("its blob is missing").to_string();
        assert!(error.contains("pull it again"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_contains_itself_does_not_hang() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("again")).expect("linked");
        touch(&dir.path().join("pub/m.gguf"), "x");
        std::os::unix::fs::symlink(dir.path().join("pub"), dir.path().join("pub/loop")).expect("linked");
        let roots = [CatalogRoot { source: CatalogSource::LmStudio, path: dir.path().to_owned() }];
        assert_eq!(ids(&list(&roots)), ["pub/m"], "the same file by another way is the same model");
    }
}
