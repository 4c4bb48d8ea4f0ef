//! What the engine was doing when it made no progress, written to a file: the step in flight, the latest snapshot, the last
//! records, the adapter.
//!
//! Guarantees: no text and no token of any request is written; old files go, so that at most [`MAX_FILES`] are there.

use super::app::unix_seconds;
use super::fleet::Model;
use crate::telemetry::{EngineSnapshot, StepRecord};
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};

/// Files of this kind in the folder.
const MAX_FILES: usize = 16;
/// Steps before the one that does not end.
const MAX_RECORDS: usize = 50;
const PREFIX: &str = "stall-";

/// Writes the file and gives its path.
pub fn dump(folder: &Path, model: &Model, stalled_ms: u64) -> io::Result<PathBuf> {
    let telemetry = model.engine.telemetry();
    let (records, _) = telemetry.records_after(None);
    let last = &records[records.len().saturating_sub(MAX_RECORDS)..];
    let loaded = model.engine.model();
    let totals = model.engine.step_totals();
    let content = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "unix_seconds": unix_seconds(),
        "stalled_ms": stalled_ms,
        "model": model.label(),
        "adapter": loaded.map(|model| model.adapter.clone()),
        "status": format!("{:?}", model.engine.status()),
        "is_paused": model.engine.is_paused(),
        "steps": totals.steps,
        "failed_steps": totals.failed_steps,
        "recoveries": totals.recoveries,
        "in_flight": telemetry.in_flight().now(),
        "snapshot": without_text(&telemetry.snapshot()),
        "records": last.iter().map(|record| without_tokens(record)).collect::<Vec<_>>(),
    });
    std::fs::create_dir_all(folder)?;
    remove_oldest(folder)?;
    let path = folder.join(format!("{PREFIX}{}.json", unix_seconds()));
    std::fs::write(&path, serde_json::to_vec_pretty(&content)?)?;
    Ok(path)
}

fn without_text(snapshot: &EngineSnapshot) -> EngineSnapshot {
    let mut snapshot = snapshot.clone();
    snapshot.prefixes.iter_mut().for_each(|prefix| prefix.head.clear());
    snapshot
}

fn without_tokens(record: &StepRecord) -> StepRecord {
    let mut record = record.clone();
    for row in &mut record.rows {
        row.sampled = None;
        row.forced.clear();
    }
    record
}

/// Makes room for one more file.
fn remove_oldest(folder: &Path) -> io::Result<()> {
    let is_own = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(PREFIX) && name.ends_with(".json")
    };
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path())).filter(is_own).collect();
    files.sort();
    let num_excess = (files.len() + 1).saturating_sub(MAX_FILES);
    files.iter().take(num_excess).try_for_each(std::fs::remove_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_files_go_and_others_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("kvasir.log"), "x").expect("a file");
        for second in 100..130 {
            std::fs::write(at(&format!("{PREFIX}{second}.json")), "{}").expect("a file");
        }
        remove_oldest(folder.path()).expect("a folder that can be read");
        assert!(at("kvasir.log").exists() && at("stall-115.json").exists() && !at("stall-114.json").exists());
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), MAX_FILES);
    }
}
