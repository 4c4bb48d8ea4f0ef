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
    for name in ["deepseek_v2", "deepseek_v3"] {
        for is_old in [false, true] {
            let _ = check_file(name, |model| deepseek(model, is_old));
        }
    }
}

#[test]
fn experts_in_mxfp4_compute_what_the_plain_executor_does() {
    let dirs = mxfp4_and_plain();
    let [packed, _] = [dirs[0].path(), dirs[1].path()];
    let model = Model::open(packed).unwrap_or_else(|e| panic!("{e}"));
    let cfg = ReferenceConfig { num_blocks: 16, block_size: 8 };
    let mut reference = ReferenceExecutor::new(&model, cfg).unwrap_or_else(|e| panic!("{e}"));
    let vocab = model.spec().vocab_size;
    let prompts: Vec<Vec<u32>> =
        [1usize, 9, 40].iter().map(|&n| (0..n as u32).map(|i| (i * 37 + 5) % vocab).collect()).collect();
    let want = logits(&mut reference, &prompts, WHOLE);
    for mode in [PRECISE_MODE, DEFAULT_MODE, Mode { floor: true, ..PRECISE_MODE }] {
        let Some(mut executor) = open(packed, mode, 64, 128) else { return };
        let got = logits(&mut executor, &prompts, LogitsPlan { chunk: Some(11), ..WHOLE });
        for (got, want) in got.iter().zip(&want) {
            let (error, kl) = (relative_error(got, want), mean_kl(got, want, vocab as usize));
            // A token near the border between two experts is judged by the mean.
            assert!(error <= PRECISE || !mode.precise, "{mode:?}: {error:e}");
            assert!(kl <= DEFAULT_KL, "{mode:?}: mean KL {kl:e}");
        }
    }
}
