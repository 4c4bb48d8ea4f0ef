//! `docs/models.md`: the errors of every checkpoint of the fixtures, as measured. The golden tests hold their own errors
//! against it; with `UPDATE_MODELS=1` the test here measures all of them and writes the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvasir::model::arch::supported;
use kvasir::model::{Model, ModelFormat};

use super::{Case, DEFAULT_MODE, PRECISE_MODE, cases, check_logits};
use crate::support::full_fixtures;

/// What a column states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Precise,
    Default,
    DefaultKl,
}

/// Stated errors may be exceeded so many times on another adapter before the table counts as wrong.
const SLACK: f64 = 4.0;
/// Below this, errors are the noise of another order of sums.
const NOISE: f64 = 3e-6;

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md")
}

/// The columns of a checkpoint's row; `None` where there is no such row.
fn stated(text: &str, name: &str) -> Option<[f64; 3]> {
    let row = text.lines().find(|line| line.starts_with('|') && line.contains(&format!("| `{name}` |")))?;
    let cells: Vec<&str> = row.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
    let numbers: Vec<f64> = cells.iter().skip(3).filter_map(|cell| cell.parse().ok()).collect();
    numbers.try_into().ok()
}

/// Holds a measured error against the table.
#[track_caller]
pub fn check(case: &Case, column: Column, measured: f64) {
    let text = std::fs::read_to_string(path()).expect("docs/models.md is there");
    let Some(row) = stated(&text, &case.name) else {
        println!("docs/models.md has no row for {}: UPDATE_MODELS=1 writes it", case.name);
        return;
    };
    let limit = (row[column as usize] * SLACK).max(NOISE);
    assert!(
        measured <= limit || case.has_experts && column == Column::Default,
        "{}: {column:?} {measured:.1e}, docs/models.md states {:.1e}",
        case.name,
        row[column as usize]
    );
}

/// (family, row)
fn measured_row(case: &Case) -> Option<(String, String)> {
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let (precise, _) = check_logits(case, PRECISE_MODE, super::PRECISE)?;
    let (default, kl) = check_logits(case, DEFAULT_MODE, super::DEFAULT)?;
    let (family, quant) = (model.spec().arch.clone(), model.info().quant.clone());
    let format = match model.info().format {
        ModelFormat::Gguf => "GGUF",
        ModelFormat::Safetensors => "folder",
    };
    let row =
        format!("| {family} | `{}` | {format}, {quant} | {precise:.1e} | {default:.1e} | {kl:.1e} |\n", case.name);
    Some((family, row))
}

fn page(rows: &BTreeMap<String, Vec<String>>) -> String {
    let families = supported().split(", ").map(|name| format!("`{name}`")).collect::<Vec<String>>().join(", ");
    let mut text = format!(
        "# Models\n\n\
         Families that load, by `model_type` (GGUF files use llama.cpp's names for them): {families}.\n\n\
         The table is measured: for each checkpoint of the test fixtures, over all positions of its prompts, the largest\n\
         difference of a logit from transformers' (computed in f32 from the same or the dequantised weights) as a part of the\n\
         largest logit. *Precise* is `--precise` (f32 activations and KV), *default* i8 activations for quantised weights\n\
         and an f16 KV cache, with the mean KL divergence in nats. A mixture of experts may choose another expert for a token\n\
         near the border between two: judge it by the mean. The golden tests fail where an error exceeds what stands here;\n\
         `UPDATE_MODELS=1 cargo test --release golden::table` writes the page.\n\n\
         | family | checkpoint | format | precise | default | mean KL |\n|---|---|---|---|---|---|\n"
    );
    rows.values().flatten().for_each(|row| text.push_str(row));
    text
}

#[test]
fn the_table_has_every_family_and_is_written_on_request() {
    if std::env::var_os("UPDATE_MODELS").is_some() {
        assert!(full_fixtures().is_some(), "the table needs the full fixture set");
        let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for case in cases() {
            let Some((family, row)) = measured_row(&case) else { return };
            rows.entry(family).or_default().push(row);
        }
        std::fs::create_dir_all(path().parent().expect("a folder")).expect("docs can be made");
        std::fs::write(path(), page(&rows)).expect("docs/models.md can be written");
    }
    let text = std::fs::read_to_string(path()).expect("docs/models.md is there");
    for family in supported().split(", ") {
        assert!(text.contains(&format!("\n| {family} | ")), "docs/models.md has no row of {family}");
    }
}

#[test]
fn rows_are_read_by_their_checkpoint() {
    let text = "| llama | `tiny/llama` | folder, F32 | 6.1e-7 | 2.0e-4 | 1.0e-8 |\n";
    assert_eq!(stated(text, "tiny/llama"), Some([6.1e-7, 2.0e-4, 1.0e-8]));
    assert_eq!(stated(text, "tiny/llam"), None);
}
