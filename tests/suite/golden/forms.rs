//! Logits on the GPU of forms that the fixtures have no file of: GGUF files and MXFP4 folders, written by the tests.

use super::*;
use crate::gguf_forms::{Gguf, deepseek, plain};
use crate::quantised::mxfp4_and_plain;

/// The file's logits against those that transformers computed of the folder that it was made from.
fn check_file(name: &str, make: impl Fn(&Model) -> Gguf) -> Option<()> {
    let folder = case(&core_fixtures(), "families", name)?;
    let model = Model::open(&folder.model).unwrap_or_else(|e| panic!("{e}"));
    let (dir, file) = make(&model).open();
    let case = Case { name: format!("{name} as GGUF"), model: file.info().path.clone(), ..folder };
    check_logits(&case, PRECISE_MODE, PRECISE)?;
    let (_, kl) = check_logits(&case, DEFAULT_MODE, DEFAULT)?;
    assert!(kl <= DEFAULT_KL, "{}: mean KL {kl:e}", case.name);
    drop(dir);
    Some(())
}

#[test]
fn files_of_families_with_norms_of_q_and_k_compute_what_their_folders_do() {
    let _ = check_file("olmo2", |model| plain(model, "olmo2"));
    let _ = check_file("stablelm_qk_norm", |model| plain(model, "stablelm"));
}

#[test]
fn deepseek_files_of_either_form_compute_what_their_folders_do() {
    for is_old in [false, true] {
        let _ = check_file("deepseek_v2", |model| deepseek(model, is_old));
        // Files do not say how far this one's factors of YaRN are apart, so the folder's logits are not theirs.
        let folder = Model::open(&core_fixtures().join("families/deepseek_v3")).unwrap_or_else(|e| panic!("{e}"));
        let (_dir, file) = deepseek(&folder, is_old).open();
        check_beside_the_reference(&file);
    }
}

/// The GPU against the plain CPU executor, which agrees with transformers on the fixtures.
fn check_beside_the_reference(model: &Model) {
    let path = &model.info().path;
    let cfg = ReferenceConfig { num_blocks: 16, block_size: 8 };
    let mut reference = ReferenceExecutor::new(model, cfg).unwrap_or_else(|e| panic!("{e}"));
    let vocab = model.spec().vocab_size;
    let prompts: Vec<Vec<u32>> =
        [1usize, 9, 40].iter().map(|&n| (0..n as u32).map(|i| (i * 37 + 5) % vocab).collect()).collect();
    let want = logits(&mut reference, &prompts, WHOLE);
    for mode in [PRECISE_MODE, DEFAULT_MODE, Mode { floor: true, ..PRECISE_MODE }] {
        let Some(mut executor) = open(path, mode, 64, 128) else { return };
        let got = logits(&mut executor, &prompts, LogitsPlan { chunk: Some(11), ..WHOLE });
        for (got, want) in got.iter().zip(&want) {
            let (error, kl) = (relative_error(got, want), mean_kl(got, want, vocab as usize));
            // A token near the border between two experts is judged by the mean.
            assert!(error <= PRECISE || !mode.precise, "{} {mode:?}: {error:e}", path.display());
            assert!(kl <= DEFAULT_KL, "{} {mode:?}: mean KL {kl:e}", path.display());
        }
    }
}

#[test]
fn experts_in_mxfp4_compute_what_the_plain_executor_does() {
    let [packed, _] = mxfp4_and_plain();
    check_beside_the_reference(&Model::open(packed.path()).unwrap_or_else(|e| panic!("{e}")));
}
