//! `kvasir quantize`: what it writes is read back as the same weights, nearly.

use kvasir::model::quantise::{Importances, Recipe, Written, quantise_folder};
use kvasir::model::spec::WeightRole;
use kvasir::model::{Model, ModelError};
use std::path::Path;

use crate::support::{core_fixtures, fixtures, folders};

fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn quantise(model: &Model, out: &Path, bits: u32, importances: &Importances) -> Result<Written, ModelError> {
    quantise_folder(model, out, Recipe { bits, group: 32 }, importances, &mut |_, _| true)
}

fn floats(model: &Model, role: WeightRole) -> Vec<f32> {
    let view = model.weight(role).unwrap_or_else(|e| panic!("{e}")).expect("there");
    view.to_f32().unwrap_or_else(|e| panic!("{e}"))
}

/// Root of the weighted mean square of the difference, as a part of that of the weights.
fn error(model: &Model, other: &Model, role: WeightRole, importance: &[f32]) -> f64 {
    let (want, got) = (floats(model, role), floats(other, role));
    assert_eq!(want.len(), got.len());
    let weighted = |(i, x): (usize, f32)| f64::from(importance[i % importance.len()]) * f64::from(x).powi(2);
    let all: f64 = want.iter().copied().enumerate().map(weighted).sum();
    let off: f64 = want.iter().zip(&got).map(|(a, b)| a - b).enumerate().map(weighted).sum();
    if all == 0.0 { off } else { (off / all).sqrt() }
}

#[test]
fn every_family_reads_back_as_nearly_the_same_weights() {
    let families = folders(&core_fixtures().join("families"));
    let (mut written, mut refused) = (0, Vec::new());
    for folder in folders(&fixtures().join("tiny")).iter().chain(&families) {
        let model = open(folder);
        for (bits, most) in [(4, 0.12), (8, 0.008)] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let out = dir.path().join("q");
            let result = match quantise(&model, &out, bits, &Importances::new()) {
                Ok(result) => result,
                Err(e) => {
                    assert!(e.to_string().contains("groups of 32") && !out.exists(), "{}: {e}", folder.display());
                    refused.push(folder.display().to_string());
                    continue;
                }
            };
            let other = open(&out);
            assert_eq!(model.spec(), other.spec());
            assert!(result.bytes_after < result.bytes_before, "{}: {result:?}", folder.display());
            for role in model.spec().roles() {
                let off = error(&model, &other, role, &[1.0]);
                assert!(off <= most, "{}: {role:?} in {bits} bits: {off}", folder.display());
            }
            written += 1;
        }
    }
    assert!(written >= 20, "{written} written; refused: {refused:?}");
}

#[test]
fn known_inputs_lessen_the_error_that_they_see() {
    let model = open(&core_fixtures().join("tiny/llama"));
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (role, k) = (WeightRole::Q(0), model.spec().hidden_size as usize);
    let importance: Vec<f32> = (0..k).map(|i| if i % 7 == 0 { 50.0 } else { 0.2 }).collect();
    let importances = Importances::from([(role, importance.clone())]);
    let [nearest, searched] = [("a", Importances::new()), ("b", importances)].map(|(name, importances)| {
        let out = dir.path().join(name);
        quantise(&model, &out, 4, &importances).unwrap_or_else(|e| panic!("{e}"));
        error(&model, &open(&out), role, &importance)
    });
    assert!(searched < 0.9 * nearest, "{searched} after a search, {nearest} without");
}

#[test]
fn what_is_quantised_or_there_already_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (model, out) = (open(&core_fixtures().join("tiny/llama")), dir.path().join("q"));
    quantise(&model, &out, 8, &Importances::new()).unwrap_or_else(|e| panic!("{e}"));
    let refusal =
        |model: &Model, out: &Path| quantise(model, out, 4, &Importances::new()).expect_err("refused").to_string();
    assert!(refusal(&model, &out).contains("exists already"));
    assert!(refusal(&open(&out), &dir.path().join("r")).contains("unquantised weights"));
    let cancelled = quantise_folder(
        &model,
        &dir.path().join("s"),
        Recipe { bits: 4, group: 32 },
        &Importances::new(),
        &mut |_, _| false,
    );
    assert!(cancelled.is_err());
    let left: Vec<_> = folders(dir.path()).into_iter().filter(|folder| *folder != out).collect();
    assert!(left.is_empty(), "{left:?}");
}
