//! Masks on the GPU against their reference.

use super::harness::rigs;
use kvasir::batch::{RowSampling, StepBatch};
use kvasir::gpu::Recording;
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::mask::{self, Mask};
use kvasir::kernels::sample::Params;
use kvasir::kernels::step_meta;
use kvasir::protocol::SamplingParams;

#[test]
fn masked_logits_fall_and_rows_without_a_mask_stay() {
    for rig in rigs() {
        for (vocab, stride) in [(1u32, 4u32), (33, 36), (1000, 1000), (257, 260)] {
            let words = vocab.div_ceil(32) as usize;
            let mut batch = StepBatch { penalty_start: vec![0; 4], bias_start: vec![0; 4], ..StepBatch::default() };
            for token in 0..3 {
                batch.logit_tokens.push(token);
                batch.sampling.push(RowSampling::new(&SamplingParams::greedy(), 1));
            }
            let bits =
                |seed: u32| (0..words as u32).map(move |i| (i + seed).wrapping_mul(0x9e37_79b9)).collect::<Vec<_>>();
            batch.mask_row(0, &bits(1));
            batch.mask_row(2, &bits(7));
            let meta = rig.step_meta(step_meta::num_words(&batch, &AttentionWork::default()));
            rig.set_step(&meta, &batch);
            let before: Vec<f32> = (0..3 * stride).map(|i| i as f32 - 50.0).collect();
            let logits = rig.upload("logits", &before);
            let all = logits.whole();
            let kernel = rig.build(&meta, false, |ctx| Mask::new(ctx, Params { vocab, stride }, &all));
            let mut recording = Recording::new("mask");
            kernel.record(&mut recording, 3);
            rig.replay(&recording);
            let got: Vec<f32> = rig.read(&logits);
            let mut want = before;
            for (l, row) in want.chunks_mut(stride as usize).enumerate() {
                mask::reference(&mut row[..vocab as usize], |token| batch.may_draw(l, token));
            }
            assert_eq!(got, want, "{vocab} of {stride}");
        }
    }
}
