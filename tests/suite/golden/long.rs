//! A whole model at the end of a long context: pages of 131,072 positions are filled by a seeded writer, and the last
//! positions are computed by the GPU and by the plain CPU executor.

use std::path::Path;

use kvasir::batch::{HostTransfer, RowSampling, StepBatch, Want};
use kvasir::executor::Executor;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::executor::wgpu_executor::{ExecutorConfig, WgpuExecutor};
use kvasir::ids::{BlockId, HostSlot};
use kvasir::kernels::kv_layout::KvLayout;
use kvasir::model::Model;
use kvasir::model::spec::ModelSpec;
use kvasir::protocol::SamplingParams;

use super::{DEFAULT, DEFAULT_MODE, Mode, PRECISE, PRECISE_MODE, config, open_with, relative_error};
use crate::kernels::harness::Random;
use crate::support::core_fixtures;

const CONTEXT: u32 = 131_072;
/// Positions that are computed, the last ones.
const COMPUTED: u32 = 256;
const BLOCK_SIZE: u32 = 16;
const NUM_BLOCKS: u32 = 8400;
const FILLED_BLOCKS: u32 = (CONTEXT - COMPUTED) / BLOCK_SIZE;

/// The scaled rope of a small llama, with room for the context.
fn model_with_room(folder: &Path) {
    let source = core_fixtures().join("tiny/llama_tied_llama3rope");
    for entry in std::fs::read_dir(source).expect("the fixture is there") {
        let path = entry.expect("a readable entry").path();
        let name = path.file_name().expect("a file has a name").to_owned();
        let bytes = std::fs::read(&path).expect("a readable file");
        let bytes = if name == "config.json" {
            let mut json: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
            json["max_position_embeddings"] = CONTEXT.into();
            json.to_string().into_bytes()
        } else {
            bytes
        };
        std::fs::write(folder.join(name), bytes).expect("a copy");
    }
}

/// Where each logical block lies: in no order.
fn scattered_table() -> Vec<u32> {
    let mut random = Random(7);
    let mut free: Vec<u32> = (1..NUM_BLOCKS).collect();
    (0..CONTEXT / BLOCK_SIZE).map(|_| free.swap_remove(random.below(free.len() as u32) as usize)).collect()
}

/// K or V of one layer in one logical block. `[block_size, num_kv_heads * head_dim]`, exact in 16 bits.
fn values(spec: &ModelSpec, block: u32, plane: u32) -> Vec<f32> {
    let mut random = Random(u64::from(block) << 8 | u64::from(plane));
    let scale = if plane.is_multiple_of(2) { 8.0 } else { 2.0 };
    let count = BLOCK_SIZE * spec.num_kv_heads * spec.head_dim;
    (0..count).map(|_| (random.unit() * 64.0).round() / 64.0 * scale).collect()
}

/// Tokens `CONTEXT - COMPUTED + from..` of the one row, with the logits of each.
fn batch_of(table: &[u32], from: u32) -> StepBatch {
    let positions = CONTEXT - COMPUTED + from..CONTEXT;
    let count = positions.len();
    let slot = |p: u32| table[(p / BLOCK_SIZE) as usize] * BLOCK_SIZE + p % BLOCK_SIZE;
    StepBatch {
        block_size: BLOCK_SIZE,
        input_ids: positions.clone().map(|p| p * 7 % 509).collect(),
        kv_slots: positions.clone().map(slot).collect(),
        row_of_token: vec![0; count],
        row_start: vec![0, count as u32],
        slot_of_row: vec![0],
        block_tables: table.to_vec(),
        block_table_start: vec![0, table.len() as u32],
        logit_tokens: (0..count as u32).collect(),
        sampling: vec![RowSampling::new(&SamplingParams::greedy(), 0); count],
        penalty_start: vec![0; count + 1],
        bias_start: vec![0; count + 1],
        want: Want::Logits,
        positions: positions.collect(),
        ..StepBatch::default()
    }
}

fn logits_of(executor: &mut dyn Executor, batch: &StepBatch) -> Vec<f32> {
    let handle = executor.launch(batch).expect("a valid batch");
    executor.wait(handle).expect("it runs").logits.expect("logits were wanted")
}

/// Runs the last positions over seeded pages; `encode` gives the bytes of a plane's block.
fn last_logits(
    executor: &mut dyn Executor,
    (spec, table): (&ModelSpec, &[u32]),
    encode: &dyn Fn(&[f32]) -> Vec<u8>,
) -> Vec<f32> {
    let mut batch = batch_of(table, 0);
    for block in 0..FILLED_BLOCKS {
        let planes = 2 * spec.num_layers;
        let bytes: Vec<u8> = (0..planes).flat_map(|plane| encode(&values(spec, block, plane))).collect();
        executor.write_host(HostSlot(block), &bytes).expect("a place for the block");
        batch.swap_in.push(HostTransfer { block: BlockId(table[block as usize]), host: HostSlot(block) });
    }
    logits_of(executor, &batch)
}

fn on_the_gpu(model: &Path, mode: Mode) -> Option<(WgpuExecutor, impl Fn(&[f32]) -> Vec<u8>)> {
    let cfg: ExecutorConfig = config(mode, NUM_BLOCKS, CONTEXT);
    let executor = open_with(model, mode.floor, cfg)?.with_host_blocks(FILLED_BLOCKS);
    let spec = Model::open(model).expect("it opens").spec().clone();
    let layout = KvLayout {
        num_blocks: 1,
        block_size: BLOCK_SIZE,
        num_kv_heads: spec.num_kv_heads,
        head_dim: spec.head_dim,
        format: mode.kv,
    };
    assert_eq!(spec.num_kv_heads, 1, "the writer lays out one head");
    Some((executor, move |values: &[f32]| layout.encode(values)))
}

#[test]
fn the_last_positions_of_a_long_context_give_the_logits_of_the_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    model_with_room(folder.path());
    let model = Model::open(folder.path()).expect("it opens");
    let (spec, table) = (model.spec(), scattered_table());
    let Some((mut gpu, encode)) = on_the_gpu(folder.path(), PRECISE_MODE) else { return };
    let got = last_logits(&mut gpu, (spec, &table), &encode);

    let cfg = ReferenceConfig { num_blocks: NUM_BLOCKS, block_size: BLOCK_SIZE };
    let mut reference = ReferenceExecutor::new(&model, cfg).expect("it loads").with_host_blocks(FILLED_BLOCKS);
    let as_is = |values: &[f32]| bytemuck::cast_slice(values).to_vec();
    let want = last_logits(&mut reference, (spec, &table), &as_is);
    let error = relative_error(&got, &want);
    println!("precise: {error:.1e}");
    assert!(error <= PRECISE, "error {error:e}");

    // The last position by itself: the same bits.
    let alone = logits_of(&mut gpu, &batch_of(&table, COMPUTED - 1));
    assert_eq!(alone, got[got.len() - alone.len()..]);
    // Were positions cut to 16 bits, this would be read.
    let half = table.len() / 2;
    let mut wrapped = table.clone();
    wrapped.copy_within(0..half - (COMPUTED / BLOCK_SIZE) as usize, half);
    let other = relative_error(&logits_of(&mut gpu, &batch_of(&wrapped, 0)), &want);
    assert!(other > 100.0 * PRECISE, "pages of other positions change logits by {other:e} only");
    drop(gpu);

    let Some((mut gpu, encode)) = on_the_gpu(folder.path(), DEFAULT_MODE) else { return };
    let error = relative_error(&last_logits(&mut gpu, (spec, &table), &encode), &want);
    println!("default: {error:.1e}");
    assert!(error <= DEFAULT && other > 2.0 * error, "error {error:e}, of other positions {other:e}");
}
