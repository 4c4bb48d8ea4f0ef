//! Whole models whose products of many tokens are computed by cooperative matrices, on adapters that have some.

use super::*;

/// Products of 4-, 6- and 8-bit weights by signed bytes, of floats, and layers that fold nothing.
const CASES: [(&str, &str); 6] =
    [("gguf", "q4_1"), ("gguf", "q6_k"), ("gguf", "q8_0"), ("tiny", "llama"), ("tiny", "phi3_f16"), ("tiny", "gpt2")];

/// An executor on a device with matrix units; `None`, with a line printed, where there is none.
fn open(model: &Model) -> Option<WgpuExecutor> {
    let request = GpuRequest { backend: None, adapter: None, floor: false, checked_shaders: false, matrix_units: true };
    let gpu = match Gpu::open(&request) {
        Ok(gpu) => gpu,
        Err(GpuError::NoMatrixUnits(message)) => {
            println!("skipped: {message}");
            return None;
        }
        Err(GpuError::NoAdapter(message)) if !require_gpu() => {
            println!("skipped: {message}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let executor = WgpuExecutor::new(gpu, model, config(DEFAULT_MODE, 50, 256), &mut |_| true);
    Some(executor.unwrap_or_else(|e| panic!("{}: {e}", model.info().path.display())))
}

#[test]
fn logits_by_cooperative_matrices_are_close_to_the_reference() {
    for (kind, name) in CASES {
        let Some(case) = case(&fixtures(), kind, name) else { continue };
        let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
        let Some(mut executor) = open(&model) else { return };
        let vocab = executor.vocab_size() as usize;
        let mut most = 0;
        let alone = LogitsPlan { chunk: Some(1), ..WHOLE };
        for prompt in &case.prompts {
            let ids = std::slice::from_ref(&prompt.ids);
            let got = logits(&mut executor, ids, WHOLE).remove(0);
            let (error, kl) = (relative_error(&got, &prompt.logits), mean_kl(&got, &prompt.logits, vocab));
            println!("{}: {} tokens, {error:.1e}, mean KL {kl:.1e}", case.name, prompt.ids.len());
            assert!(error <= DEFAULT && kl <= DEFAULT_KL, "{}: error {error:e}, mean KL {kl:e}", case.name);
            let one_by_one = logits(&mut executor, ids, alone).remove(0);
            let is_same = got.iter().zip(&one_by_one).all(|(a, b)| a.to_bits() == b.to_bits());
            // What this flag costs: a prompt read at once has other bits than one that is read token by token.
            let takes_units = prompt.ids.len() >= kvasir::kernels::matrix_units::MIN_TOKENS as usize;
            assert_eq!(is_same, !takes_units, "{}: {} tokens", case.name, prompt.ids.len());
            most = most.max(prompt.ids.len());
        }
        assert!(most >= 32, "{}: no prompt fills a workgroup", case.name);
    }
}
