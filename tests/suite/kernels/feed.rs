//! Tokens of the step before as input of the next.

use kvasir::gpu::Recording;
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::feed::{Feed, reference};
use kvasir::kernels::step_meta::{self, header};

use super::harness::{Random, plain_batch, rigs};

#[test]
fn fed_tokens_are_those_that_the_step_before_drew() {
    for rig in rigs() {
        for num_tokens in [1u32, 3, 64, 65, 200] {
            let mut random = Random(u64::from(num_tokens));
            let drawn: Vec<u32> = (0..230).map(|_| random.below(1000)).collect();
            let sampled: Vec<u32> = drawn.iter().flat_map(|token| [*token, 0]).collect();
            let sampled = rig.upload("sampled", &sampled);
            let sources: Vec<u32> = (0..num_tokens).map(|_| random.below(230)).collect();
            let mut batch = plain_batch(num_tokens, 0);
            batch.input_ids = (0..num_tokens).map(|i| 5000 + i).collect();
            for is_fed in [false, true] {
                let mut words = Vec::new();
                step_meta::encode(&batch, &AttentionWork::default(), &mut words);
                if is_fed {
                    step_meta::append_feed(&mut words, &sources);
                }
                let meta = rig.upload("step_meta", &words);
                let feed = Feed::new(&rig.gpu, &meta.whole(), &sampled.whole()).unwrap_or_else(|e| panic!("{e}"));
                let mut recording = Recording::new("feed");
                feed.record(&mut recording, num_tokens);
                rig.replay(&recording);
                let tokens = if is_fed { reference(&drawn, &sources) } else { batch.input_ids.clone() };
                let at = words[header::TOKEN_IDS] as usize;
                words[at..at + num_tokens as usize].copy_from_slice(&tokens);
                assert!(rig.read::<u32>(&meta) == words, "{}: {num_tokens} tokens, fed: {is_fed}", rig.name);
            }
        }
    }
}
