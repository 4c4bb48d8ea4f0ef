//! Norms of q and k over all heads, or with a gain for each.

use kvasir::gpu::Recording;
use kvasir::kernels::heads_norm::{HeadsNorm, Shape, reference};
use kvasir::kernels::stride;

use super::harness::{Random, assert_close, plain_batch, rigs, tolerance};

#[test]
fn q_and_k_are_normalised_in_place_and_the_rest_stays() {
    for rig in rigs() {
        for (num_heads, num_kv_heads, head_dim) in [(4, 2, 12), (5, 1, 80), (3, 3, 64)] {
            for is_layer_per_head in [false, true] {
                let shape = Shape { num_heads, num_kv_heads, head_dim, is_layer_per_head };
                let width = stride((num_heads + 2 * num_kv_heads) * head_dim) as usize;
                let mut random = Random(u64::from(head_dim));
                let rows = random.vector(5 * width, 3.0);
                let num = if is_layer_per_head { 2 } else { 1 };
                let gains = random.vector((num * (num_heads + num_kv_heads) * head_dim) as usize, 1.0);
                let mut want: Vec<f32> =
                    rows.chunks_exact(width).flat_map(|row| reference(&shape, &gains, row, 1e-5)).collect();
                // The fifth row is not part of the step.
                want[4 * width..].copy_from_slice(&rows[4 * width..]);
                let (qkv, gains) = (rig.upload("qkv", &rows), rig.upload("gains", &gains));
                let step_meta = rig.step_meta(1024);
                let norm = rig.build(&step_meta, false, |ctx| {
                    HeadsNorm::new(ctx, &shape, (width as u32, 1e-5), &gains.whole(), &qkv.whole())
                });
                rig.set_step(&step_meta, &plain_batch(4, 0));
                let mut recording = Recording::new("q and k norm");
                norm.record(&mut recording, 4);
                rig.replay(&recording);
                let got: Vec<f32> = rig.read(&qkv);
                assert_close(&got, &want, 4.0 * tolerance::ELEMENT, &format!("{} {shape:?}", rig.name));
            }
        }
    }
}
