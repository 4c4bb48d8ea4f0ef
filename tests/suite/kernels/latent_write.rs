//! Compressed rows of latent attention and their queries against the reference.

use kvasir::gpu::Recording;
use kvasir::kernels::kv_layout::{KvFormat, KvLayout, padded_head_dim};
use kvasir::kernels::latent_write::{Buffers, LatentWrite, Shape, reference, turned};
use kvasir::kernels::rope_kv_write::q_scale;

use super::harness::{Random, assert_close, plain_batch, rigs};

#[test]
fn latent_rows_reach_their_slots_and_queries_are_turned_and_scaled() {
    let (tokens, block_size, eps, scale) = (5usize, 4u32, 1e-5f32, 0.2f64);
    for rig in rigs() {
        for (kv, tolerance) in [(KvFormat::F32, 4e-6), (KvFormat::F16, 6e-4), (KvFormat::I8, 5e-3)] {
            for interleaved in [true, false] {
                let shape = Shape { num_heads: 3, rank: 64, rope_dim: 8, nope_dim: 32, interleaved, kv };
                let row = shape.row_dim() as usize;
                let layout =
                    KvLayout { num_blocks: 4, block_size, num_kv_heads: 1, head_dim: shape.row_dim(), format: kv };
                let mut random = Random(9);
                let raw_q = random.vector(tokens * shape.raw_q_stride() as usize, 1.0);
                let raw_kv = random.vector(tokens * shape.raw_kv_stride() as usize, 1.0);
                let latent_q = random.vector(tokens * shape.q_stride() as usize, 1.0);
                let gain = random.vector(64, 1.0);
                let angles: Vec<[f32; 2]> = (0..16 * 4).map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
                let mut batch = plain_batch(tokens as u32, 0);
                batch.block_size = block_size;
                batch.positions = vec![0, 3, 7, 2, 15];
                batch.kv_slots = vec![5, 4, 15, 10, 6];
                let (q, k_cache) =
                    (rig.upload("q", &latent_q), rig.filled("k", layout.buffer_bytes() as usize / 4, 0.0));
                let step_meta = rig.step_meta(1024);
                let [raw_q_all, raw_kv_all] = [&raw_q, &raw_kv].map(|v| rig.upload("raw", v).whole());
                let (rope, gain_all) = (rig.upload("rope", &angles).whole(), rig.upload("gain", &gain).whole());
                let kernel = rig.build(&step_meta, false, |ctx| {
                    let (q, k_cache) = (q.whole(), k_cache.whole());
                    let buffers = Buffers {
                        raw_q: &raw_q_all,
                        raw_kv: &raw_kv_all,
                        rope: &rope,
                        gain: &gain_all,
                        q: &q,
                        k_cache: &k_cache,
                    };
                    LatentWrite::new(ctx, &shape, (eps, scale), &buffers)
                });
                rig.set_step(&step_meta, &batch);
                let mut recording = Recording::new("latent write");
                kernel.record(&mut recording, tokens as u32);
                rig.replay(&recording);
                let what = format!("{} {shape:?}", rig.name);
                let cache = layout.decode(&rig.read::<u8>(&k_cache));
                let got_q: Vec<f32> = rig.read(&q);
                for t in 0..tokens {
                    let angles = &angles[batch.positions[t] as usize * 4..][..4];
                    let own = &raw_kv[t * shape.raw_kv_stride() as usize..][..row];
                    let want = reference(&shape, &gain, own, angles, eps);
                    assert_close(&cache[layout.value_idx(batch.kv_slots[t], 0)..][..row], &want, tolerance, &what);
                    for h in 0..3 {
                        let at = t * shape.q_stride() as usize + h * padded_head_dim(shape.row_dim()) as usize;
                        let rotary = &raw_q[t * shape.raw_q_stride() as usize + h * 40 + 32..][..8];
                        let mut want = latent_q[at..at + 64].to_vec();
                        want.extend(turned(rotary, angles, interleaved));
                        want.iter_mut().for_each(|v| *v *= q_scale(scale));
                        assert_close(&got_q[at..at + row], &want, 4e-6, &what);
                    }
                }
            }
        }
    }
}
