//! The one place that reads the environment for tests: fixtures, `REQUIRE_GPU`, the shared adapter.

use std::path::{Path, PathBuf};

/// The fixtures that every clone has.
pub fn core_fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fixtures")
}

/// The full set: `KVASIR_FIXTURES`, else `../shared/fixtures`. Prints a line and returns `None` where it is absent;
/// with `REQUIRE_FIXTURES=1` (set in CI where the set exists) absence is a failure.
pub fn full_fixtures() -> Option<PathBuf> {
    let root = match std::env::var_os("KVASIR_FIXTURES") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
    };
    if root.join("manifest.json").is_file() {
        return Some(root);
    }
    assert!(
        std::env::var_os("REQUIRE_FIXTURES").is_none(),
        "REQUIRE_FIXTURES is set, but there is no {}",
        root.display()
    );
    println!("skipped: the full fixture set is not at {}", root.display());
    None
}

/// The full set where it exists, else the core set.
pub fn fixtures() -> PathBuf {
    full_fixtures().unwrap_or_else(core_fixtures)
}

/// True when a missing adapter is a failure and not a skip.
pub fn require_gpu() -> bool {
    std::env::var("REQUIRE_GPU").is_ok_and(|v| v == "1")
}

/// Files in `dir` with this extension, sorted; panics with the path if the folder cannot be read.
pub fn files_with_extension(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("readable entry").path())
        .filter(|p| p.extension().is_some_and(|x| x == extension))
        .collect();
    found.sort();
    found
}

/// Folders in `dir`, sorted.
pub fn folders(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.expect("readable entry").path())
        .filter(|p| p.is_dir())
        .collect();
    found.sort();
    found
}

/// Parses a JSON file, panicking with its path.
pub fn read_json(path: &Path) -> serde_json::Value {
    let text = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
