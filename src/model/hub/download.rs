//! Downloads from a Hugging Face hub into its cache layout, so that every other program finds the files too:
//! `models--org--name/{blobs/<id>, snapshots/<commit>/<file> -> ../../blobs/<id>, refs/<revision>}`.
//!
//! A file grows as `blobs/<id>.incomplete` and is renamed when its size (and SHA-256, where the hub knows it) is right.
//! Files of git itself have no SHA-256: their size is checked here, their content when the model opens.
//! The asynchronous runtime lives inside one call.

use super::select::{Repo, RepoFile, RepoId, choose_files, is_plain_name, parse_repo};
use super::{FetchError, FetchProgress, FetchStage, OnProgress, check_cancel, sha256_of_file};
use reqwest::header::{CONTENT_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const MAX_ANSWER_BYTES: usize = 32 << 20;
const MAX_TRIES: u32 = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a silent connection looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(200);
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// How to reach the hub, from `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the place of the cache.
#[derive(Clone, PartialEq, Eq)]
pub struct HubAccess {
    /// Without a slash at the end; [`super::DEFAULT_ENDPOINT`] unless the user chose another.
    pub endpoint: String,
    pub token: Option<String>,
    pub offline: bool,
    /// The `hub` folder of the cache.
    pub cache: PathBuf,
}

impl std::fmt::Debug for HubAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = self.token.as_ref().map(|_| "(set)");
        let HubAccess { endpoint, offline, cache, .. } = self;
        write!(
            f,
            "HubAccess {{ endpoint: {endpoint}, token: {token:?}, offline: {offline}, cache: {} }}",
            cache.display()
        )
    }
}

/// Fetches a model by id (`org/name`, `org/name:file-or-quantisation`, `org/name@revision`) and returns the path to open:
/// a GGUF file or a folder. Files that are in the cache are not fetched again.
pub fn download(
    id: &str,
    access: &HubAccess,
    on_progress: &mut OnProgress,
    cancel: &AtomicBool,
) -> Result<PathBuf, FetchError> {
    let repo_id = RepoId::parse(id)?;
    if access.offline {
        return from_cache(&repo_id, access).ok_or_else(|| FetchError::Offline { id: id.to_owned() });
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| FetchError::Network(e.to_string()))?;
    let client = client(access)?;
    let mut session = Session { client, access, id: &repo_id, on_progress, cancel };
    runtime.block_on(session.fetch_model())
}

/// The place of a model that was fetched before, as a whole.
fn from_cache(id: &RepoId, access: &HubAccess) -> Option<PathBuf> {
    let folder = folder_of(id, access);
    // A commit is named there once all of its files were fetched.
    let refs = folder.join("refs");
    let commit_at = |path: PathBuf| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let by_itself =
        || std::fs::read_dir(&refs).ok()?.flatten().find_map(|e| commit_at(e.path()).filter(|c| *c == id.revision));
    let commit = commit_at(refs.join(&id.revision)).or_else(by_itself).filter(|commit| is_plain_name(commit))?;
    let snapshot = folder.join("snapshots").join(&commit);
    let entries = std::fs::read_dir(&snapshot).ok()?;
    let file = |entry: std::fs::DirEntry| {
        let num_bytes = std::fs::metadata(entry.path()).ok()?.len();
        let path = entry.file_name().into_string().ok()?;
        Some(RepoFile { path, num_bytes, blob: String::new(), sha256: None })
    };
    let repo = Repo { commit, files: entries.flatten().filter_map(file).collect() };
    let first = choose_files(id, &repo).ok()?.swap_remove(0).path;
    Some(opened_at(&snapshot, &first))
}

/// The place of a repository in the cache.
fn folder_of(id: &RepoId, access: &HubAccess) -> PathBuf {
    access.cache.join(format!("models--{}--{}", id.org, id.name))
}

/// What to open of a snapshot whose first file is this one.
fn opened_at(snapshot: &Path, first: &str) -> PathBuf {
    if first.ends_with(".gguf") { join_path(snapshot, first) } else { snapshot.to_owned() }
}

fn client(access: &HubAccess) -> Result<Client, FetchError> {
    // Another part of the program may have chosen its provider already; either serves.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = Client::builder()
        .user_agent(concat!("kvasir/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT);
    if is_loopback(&access.endpoint) {
        builder = builder.no_proxy();
    }
    builder.build().map_err(|e| FetchError::Network(with_causes(&e)))
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.split("://").nth(1).unwrap_or(endpoint);
    ["127.0.0.1", "localhost", "[::1]"].iter().any(|name| host.starts_with(name))
}

struct Session<'a, 'p> {
    client: Client,
    access: &'a HubAccess,
    id: &'a RepoId,
    on_progress: &'a mut OnProgress<'p>,
    cancel: &'a AtomicBool,
}

impl Session<'_, '_> {
    async fn fetch_model(&mut self) -> Result<PathBuf, FetchError> {
        let repo = self.describe().await?;
        let files = choose_files(self.id, &repo)?;
        let folder = folder_of(self.id, self.access);
        let snapshot = folder.join("snapshots").join(&repo.commit);
        for file in &files {
            let blob = folder.join("blobs").join(&file.blob);
            self.fetch_blob(&repo, file, &blob).await?;
            place(&blob, &snapshot, file)?;
        }
        write_ref(&folder, &self.id.revision, &repo.commit)?;
        Ok(opened_at(&snapshot, &files[0].path))
    }

    async fn describe(&mut self) -> Result<Repo, FetchError> {
        let (endpoint, name, revision) = (&self.access.endpoint, self.id.full_name(), &self.id.revision);
        let url = format!("{endpoint}/api/models/{name}/revision/{revision}?blobs=true");
        let mut response = self.get(&url, 0).await?;
        self.check_status(&response, &name)?;
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk(&mut response).await? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(FetchError::Answer(format!("the list of files is longer than {MAX_ANSWER_BYTES} bytes")));
            }
        }
        parse_repo(&serde_json::from_slice(&body).map_err(|e| FetchError::Answer(e.to_string()))?)
    }

    /// Brings one blob to its final name, over several connections if need be.
    async fn fetch_blob(&mut self, repo: &Repo, file: &RepoFile, blob: &Path) -> Result<(), FetchError> {
        if std::fs::metadata(blob).is_ok_and(|m| m.len() == file.num_bytes) {
            return Ok(());
        }
        let folder = blob.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(FetchError::io("making the folder", folder))?;
        let partial = folder.join(format!("{}.incomplete", file.blob));
        let url = format!("{}/{}/resolve/{}/{}", self.access.endpoint, self.id.full_name(), repo.commit, file.path);
        let mut tries = 0;
        loop {
            let before = std::fs::metadata(&partial).map_or(0, |m| m.len());
            let fault = match self.append(&url, file, &partial).await {
                Ok(()) => break,
                Err(FetchError::Network(fault)) => fault,
                Err(other) => return Err(other),
            };
            let grew = std::fs::metadata(&partial).map_or(0, |m| m.len()) > before;
            tries = if grew { 1 } else { tries + 1 };
            if tries >= MAX_TRIES {
                return Err(FetchError::Network(fault));
            }
            check_cancel(self.cancel)?;
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        if let Some(expected) = &file.sha256 {
            let found = sha256_of_file(&partial, self.cancel, self.on_progress)?;
            if found != *expected {
                // Nothing of it can be trusted: the next try begins anew.
                std::fs::remove_file(&partial).map_err(FetchError::io("removing", &partial))?;
                return Err(FetchError::Checksum { file: file.path.clone(), expected: expected.clone(), found });
            }
        }
        std::fs::rename(&partial, blob).map_err(FetchError::io("moving", blob))
    }

    /// Appends to the partial file what it still lacks. A server that ignores the range starts it anew.
    async fn append(&mut self, url: &str, file: &RepoFile, partial: &Path) -> Result<(), FetchError> {
        let mut have = std::fs::metadata(partial).map_or(0, |m| m.len());
        if have > file.num_bytes {
            std::fs::remove_file(partial).map_err(FetchError::io("removing", partial))?;
            have = 0;
        }
        if have == file.num_bytes && have > 0 {
            return Ok(());
        }
        let mut response = self.get(url, have).await?;
        self.check_status(&response, &file.path)?;
        let continues = response.status() == StatusCode::PARTIAL_CONTENT && range_start(&response) == Some(have);
        if !continues {
            have = 0;
        }
        let mut options = OpenOptions::new();
        let mut out: File = if continues { options.append(true) } else { options.write(true).truncate(true) }
            .create(true)
            .open(partial)
            .map_err(FetchError::io("writing", partial))?;
        while let Some(chunk) = self.chunk(&mut response).await? {
            have += chunk.len() as u64;
            if have > file.num_bytes {
                return Err(FetchError::Answer(format!("{} is longer than {} bytes", file.path, file.num_bytes)));
            }
            out.write_all(&chunk).map_err(FetchError::io("writing", partial))?;
            self.report(file, have);
        }
        if have < file.num_bytes {
            let missing = file.num_bytes - have;
            return Err(FetchError::Network(format!(
                "the connection ended {missing} bytes before the end of {}",
                file.path
            )));
        }
        out.sync_all().map_err(FetchError::io("writing", partial))
    }

    fn report(&mut self, file: &RepoFile, done_bytes: u64) {
        let (name, total_bytes) = (file.path.clone(), file.num_bytes);
        (self.on_progress)(FetchProgress { stage: FetchStage::Downloading, file: name, done_bytes, total_bytes });
    }

    async fn get(&self, url: &str, from: u64) -> Result<Response, FetchError> {
        let mut request = self.client.get(url);
        if let Some(token) = &self.access.token {
            request = request.bearer_auth(token);
        }
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        let mut sending = std::pin::pin!(request.send());
        loop {
            check_cancel(self.cancel)?;
            if let Ok(result) = tokio::time::timeout(CANCEL_POLL, sending.as_mut()).await {
                return result.map_err(|e| FetchError::Network(with_causes(&e.without_url())));
            }
        }
    }

    fn check_status(&self, response: &Response, what: &str) -> Result<(), FetchError> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            return Err(FetchError::Network(format!("the hub answered {} for {what}", status.as_u16())));
        }
        let hint = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.access.token.is_some() => {
                " (the token is not accepted, or may not read it: accept the model's licence on the hub, or make a new token)"
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                " (there is no such model, or it is gated: accept its licence on the hub and set HF_TOKEN)"
            }
            StatusCode::NOT_FOUND => " (there is no such model, revision or file)",
            _ => "",
        };
        Err(FetchError::Status { status: status.as_u16(), what: what.to_owned(), hint })
    }

    /// The next piece of a body; `None` at its end.
    async fn chunk(
        &self,
        response: &mut Response,
    ) -> Result<Option<impl std::ops::Deref<Target = [u8]> + use<>>, FetchError> {
        loop {
            check_cancel(self.cancel)?;
            if let Ok(result) = tokio::time::timeout(CANCEL_POLL, response.chunk()).await {
                return result.map_err(|e| FetchError::Network(with_causes(&e.without_url())));
            }
        }
    }
}

/// An error with its causes: the outermost alone says little.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// First byte of a `Content-Range: bytes A-B/C`.
fn range_start(response: &Response) -> Option<u64> {
    let value = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    value.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

fn join_path(folder: &Path, path: &str) -> PathBuf {
    path.split('/').fold(folder.to_owned(), |at, part| at.join(part))
}

/// Makes the snapshot's entry for a blob: a relative link, or a copy where the system has no links.
fn place(blob: &Path, snapshot: &Path, file: &RepoFile) -> Result<(), FetchError> {
    let entry = join_path(snapshot, &file.path);
    let folder = entry.parent().unwrap_or(snapshot);
    std::fs::create_dir_all(folder).map_err(FetchError::io("making the folder", folder))?;
    if entry.symlink_metadata().is_ok() {
        std::fs::remove_file(&entry).map_err(FetchError::io("replacing", &entry))?;
    }
    #[cfg(unix)]
    {
        let up = "../".repeat(2 + file.path.matches('/').count());
        let target = format!("{up}blobs/{}", file.blob);
        debug_assert!(blob.ends_with(Path::new("blobs").join(&file.blob)));
        std::os::unix::fs::symlink(target, &entry).map_err(FetchError::io("linking", &entry))
    }
    #[cfg(not(unix))]
    {
        std::fs::copy(blob, &entry).map(|_| ()).map_err(FetchError::io("copying", &entry))
    }
}

fn write_ref(folder: &Path, revision: &str, commit: &str) -> Result<(), FetchError> {
    let refs = folder.join("refs");
    std::fs::create_dir_all(&refs).map_err(FetchError::io("making the folder", &refs))?;
    let path = refs.join(revision);
    std::fs::write(&path, commit).map_err(FetchError::io("writing", &path))
}

#[cfg(test)]
mod tests;
