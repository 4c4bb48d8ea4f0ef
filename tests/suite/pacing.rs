//! How steps are given to the adapter changes no bit of them.

use crate::support::{core_fixtures, open_gpu};
use kvasir::batch::{BatchRow, RowLogits, StepBatch, Want};
use kvasir::executor::wgpu_executor::work_caps::WorkCaps;
use kvasir::executor::wgpu_executor::{ExecutorConfig, KvFormat, LoraLimits, WgpuExecutor};
use kvasir::executor::{Executor, StepStats};
use kvasir::ids::{BlockId, SeqSlot};
use kvasir::model::Model;

/// The tiny llama in Q4_1; `None`, with a line printed, where there is no adapter.
fn open() -> Option<WgpuExecutor> {
    let config = ExecutorConfig {
        num_blocks: 12,
        block_size: 16,
        max_tokens_per_step: 64,
        max_num_seqs: 4,
        max_model_len: 128,
        precise: false,
        kv: KvFormat::F16,
        canary: false,
        lora: LoraLimits::NONE,
    };
    let gpu = open_gpu()?;
    let model = Model::open(&core_fixtures().join("gguf/q4_1")).unwrap_or_else(|e| panic!("{e}"));
    Some(WgpuExecutor::new(gpu, &model, config, &mut |_| true).unwrap_or_else(|e| panic!("{e}")))
}

/// One step of a sequence in blocks 1 to 4.
fn step(executor: &mut WgpuExecutor, number: u64, first: u32, tokens: &[u32]) -> (Vec<u32>, StepStats) {
    let mut batch = StepBatch::default();
    batch.begin(number, 16);
    batch.want = Want::Logits;
    batch.push_row(BatchRow {
        slot: SeqSlot(0),
        first_position: first,
        write_from: first,
        tokens,
        blocks: &[1, 2, 3, 4].map(BlockId),
        logits: RowLogits::All,
    });
    let handle = executor.launch(&batch).unwrap_or_else(|e| panic!("{e}"));
    let output = executor.wait(handle).unwrap_or_else(|e| panic!("{e}"));
    (output.logits.expect("asked for").iter().map(|v| v.to_bits()).collect(), output.stats)
}

/// A prompt of 20 tokens, then 30 tokens one by one: past the ends of two blocks.
fn run(executor: &mut WgpuExecutor) -> Vec<(Vec<u32>, StepStats)> {
    let tokens: Vec<u32> = (0..50).map(|i| 3 + i * 37 % 200).collect();
    let mut steps = vec![step(executor, 1, 0, &tokens[..20])];
    for position in 20..50 {
        let token = tokens[position as usize];
        steps.push(step(executor, u64::from(position), position, &[token]));
    }
    steps
}

#[test]
fn steps_that_are_encoded_ahead_have_the_same_bits() {
    let Some(mut executor) = open() else { return };
    executor.set_preparing(false);
    let want = run(&mut executor);
    assert_eq!(executor.num_prepared(), 0);
    executor.set_preparing(true);
    assert!(run(&mut executor) == want, "other bits, or other counts");
    assert!(executor.num_prepared() >= 20, "{} of 30 steps were prepared", executor.num_prepared());
}

#[test]
fn steps_that_are_cut_in_small_submits_have_the_same_bits() {
    let Some(mut executor) = open() else { return };
    let want = run(&mut executor);
    assert!(want.iter().all(|(_, stats)| stats.submits == 1));
    executor.set_work_caps(Some(WorkCaps::with_limits(100.0, 1e6)));
    assert_eq!(executor.most_tokens(), 64, "before anything was measured");
    let cut = run(&mut executor);
    for (number, ((got, cut), (want, whole))) in cut.iter().zip(&want).enumerate() {
        assert!(got == want, "step {number} has other bits");
        assert_eq!(cut.dispatches, whole.dispatches, "step {number}");
        // The first of each size is not known yet.
        assert!(number < 2 || cut.submits > 1, "step {number}: {cut:?}");
    }
    assert!(executor.most_tokens() >= 64, "the limit for dispatches is far");
}
