//! Copies of blocks within their pools, bit for bit.

use kvasir::batch::{BlockCopy, StepBatch};
use kvasir::gpu::Recording;
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::copy_blocks::{CopyBlocks, reference};
use kvasir::kernels::step_meta;

use super::harness::{Random, rigs};

const NUM_BLOCKS: usize = 12;

fn copies(pairs: &[(u32, u32)]) -> Vec<BlockCopy> {
    pairs.iter().map(|&(from, to)| BlockCopy { from, to }).collect()
}

#[test]
fn copies_match_the_reference_in_every_pool() {
    let cases = [copies(&[]), copies(&[(3, 7)]), copies(&[(1, 11), (1, 2), (5, 9), (1, 4)])];
    for rig in rigs() {
        // One dispatch takes six pools: also fewer, and more.
        for (num_pools, words) in [(1usize, 1usize), (2, 63), (6, 64), (14, 257)] {
            for copies in &cases {
                let mut batch = StepBatch::default();
                batch.begin(0, 4);
                batch.copies.clone_from(copies);
                assert_eq!(batch.check(NUM_BLOCKS as u32, 1), Ok(()));
                let meta = rig.step_meta(step_meta::num_words(&batch, &AttentionWork::default()));
                rig.set_step(&meta, &batch);
                let mut random = Random(words as u64);
                let mut pools: Vec<Vec<u32>> =
                    (0..num_pools).map(|_| (0..NUM_BLOCKS * words).map(|_| random.bits() as u32).collect()).collect();
                let buffers: Vec<_> = pools.iter().map(|pool| rig.upload("pool", pool)).collect();
                let slices: Vec<_> = buffers.iter().map(|b| (b.whole(), words as u64 * 4)).collect();
                let kernel = rig.build(&meta, false, |ctx| CopyBlocks::new(ctx, &slices));
                let mut recording = Recording::new("copy blocks");
                kernel.record(&mut recording, copies);
                assert_eq!(recording.num_dispatches() > 0, !copies.is_empty(), "a step without copies has no dispatch");
                rig.replay(&recording);
                for (pool, buffer) in pools.iter_mut().zip(&buffers) {
                    reference(copies, words, pool);
                    assert!(
                        rig.read::<u32>(buffer) == *pool,
                        "{} {num_pools} pools {words} words {copies:?}",
                        rig.name
                    );
                }
            }
        }
    }
}
