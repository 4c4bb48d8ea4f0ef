//! Positions far out: K and V are written and read at 131,072 positions, through pages scattered over a large pool.

use kvasir::batch::StepBatch;
use kvasir::gpu::Recording;
use kvasir::kernels::RowOutput;
use kvasir::kernels::attention::{self, Attention};
use kvasir::kernels::attention_work::{AttentionWork, Take, WorkLimits};
use kvasir::kernels::kv_layout::{KvFormat, KvLayout};
use kvasir::kernels::rope_kv_write::{self, RopeKvWrite, rope_table, write_reference};
use kvasir::kernels::step_meta;
use kvasir::model::rope;
use kvasir::model::spec::{RopePairing, RopeScaling, RopeSpec};

use super::harness::{Random, Rig, assert_close, rigs};

const CONTEXT: u32 = 131_072;
/// Positions that are computed, the last ones.
const COMPUTED: u32 = 256;
const BLOCK_SIZE: u32 = 16;
const NUM_BLOCKS: u32 = 40_000;
const HEAD_DIM: u32 = 8;

/// One row of the last `count` positions.
fn batch_of(table: &[u32], count: u32) -> StepBatch {
    let positions = CONTEXT - count..CONTEXT;
    let slot = |p: u32| table[(p / BLOCK_SIZE) as usize] * BLOCK_SIZE + p % BLOCK_SIZE;
    StepBatch {
        block_size: BLOCK_SIZE,
        input_ids: vec![0; count as usize],
        kv_slots: positions.clone().map(slot).collect(),
        positions: positions.collect(),
        row_of_token: vec![0; count as usize],
        row_start: vec![0, count],
        slot_of_row: vec![0],
        block_tables: table.to_vec(),
        block_table_start: vec![0, table.len() as u32],
        ..StepBatch::default()
    }
}

fn attend(rig: &Rig, shape: &attention::Shape, batch: &StepBatch, buffers: [&kvasir::gpu::Buffer; 3]) -> Vec<f32> {
    let mut work = AttentionWork::default();
    let limits = WorkLimits {
        tokens_per_workgroup: shape.tokens_per_workgroup(rig.class),
        parts: shape.parts(),
        parallel: 2,
        max_slots: 4096,
        window: None,
        split: Take::WhenItPays,
        share: Take::Never,
    };
    work.plan(batch, &limits);
    let meta = rig.step_meta(step_meta::num_words(batch, &work));
    rig.set_work(&meta, batch, &work);
    let partials = rig.filled("partials", 4096 * shape.partial_bytes() as usize / 4, f32::NAN).whole();
    let out = rig.filled("out", batch.num_tokens() * shape.out_stride() as usize, 7e7);
    let [q, k_cache, v_cache] = buffers.map(|buffer| buffer.whole());
    let y = RowOutput::F32(&out.whole());
    let buffers =
        attention::Buffers { q: &q, k_cache: &k_cache, v_cache: &v_cache, sinks: None, partials: &partials, y };
    let kernel = rig.build(&meta, false, |ctx| Attention::new(ctx, "attention", shape, (None, 0), &buffers));
    let mut recording = Recording::new("attention");
    kernel.record(&mut recording, work.counts);
    rig.replay(&recording);
    rig.read(&out)
}

#[test]
fn the_last_positions_of_a_long_context_match_the_reference() {
    let Some(rig) = rigs().first() else { return };
    last_positions(rig, KvFormat::F32, 1, 5e-6);
}

#[test]
fn they_do_with_grouped_heads_and_pages_of_half_floats() {
    let Some(rig) = rigs().first() else { return };
    last_positions(rig, KvFormat::F16, 2, 1e-3);
}

/// `stored` is what a stored value may differ by, as a share of the largest.
fn last_positions(rig: &Rig, format: KvFormat, num_kv_heads: u32, stored: f32) {
    let num_heads = num_kv_heads * num_kv_heads; // one head alone, and two for each of two
    let layout = KvLayout { num_blocks: NUM_BLOCKS, block_size: BLOCK_SIZE, num_kv_heads, head_dim: HEAD_DIM, format };
    // Seeded pages: blocks in no order, and keys and values of every position but the last ones.
    let mut random = Random(7);
    let mut free: Vec<u32> = (1..NUM_BLOCKS).collect();
    let mut take = || free.swap_remove(random.below(free.len() as u32) as usize);
    let table: Vec<u32> = (0..CONTEXT / BLOCK_SIZE).map(|_| take()).collect();
    let mut random = Random(8);
    let mut k: Vec<f32> = (0..layout.num_values()).map(|_| 2.0 * random.unit()).collect();
    let mut v: Vec<f32> = (0..layout.num_values()).map(|_| random.unit()).collect();
    let batch = batch_of(&table, COMPUTED);

    // The last positions are rotated by the longest angles and written.
    let spec = RopeSpec { theta: 1e6, rotary_dim: HEAD_DIM, pairing: RopePairing::Half, scaling: RopeScaling::None };
    let (cos, sin) = rope::cos_sin_table(&spec, CONTEXT);
    let pairs = rope_table(&cos, &sin);
    let shape = rope_kv_write::Shape {
        num_heads,
        num_kv_heads,
        head_dim: HEAD_DIM,
        rotary_dim: HEAD_DIM,
        interleaved: false,
        qk_norm: false,
        kv: format,
    };
    let qkv: Vec<f32> = (0..COMPUTED * shape.qkv_stride()).map(|_| 2.0 * random.unit()).collect();
    let numbers = (1e-6, 1.0 / f64::from(HEAD_DIM).sqrt());
    let meta = rig.step_meta(step_meta::num_words(&batch, &AttentionWork::default()));
    rig.set_step(&meta, &batch);
    let (qkv_buffer, rope_buffer) = (rig.upload("qkv", &qkv), rig.upload("rope", &pairs));
    // Padding is not written.
    let q_buffer = rig.filled("q", (COMPUTED * shape.q_stride()) as usize, 0.0);
    let (k_buffer, v_buffer) = (rig.cache("k", &layout, &k), rig.cache("v", &layout, &v));
    let cached = |buffer| layout.decode(&rig.read::<u8>(buffer));
    let buffers = rope_kv_write::Buffers {
        qkv: &qkv_buffer.whole(),
        rope: &rope_buffer.whole(),
        gains: None,
        q: &q_buffer.whole(),
        k_cache: &k_buffer.whole(),
        v_cache: &v_buffer.whole(),
    };
    let write = rig.build(&meta, false, |ctx| RopeKvWrite::new(ctx, "rope", &shape, (numbers, 0), &buffers));
    let mut recording = Recording::new("rope");
    write.record(&mut recording, COMPUTED);
    rig.replay(&recording);
    let want = rope_kv_write::reference(&shape, &batch, &qkv, &pairs, &[], numbers);
    write_reference(&layout, &batch, &want, &mut k, &mut v);
    assert_close(&cached(&k_buffer), &k, stored, "keys");
    assert_close(&cached(&v_buffer), &v, stored, "values");
    let q = rig.read(&q_buffer);
    assert_close(&q, &want.q, 5e-6, "queries");

    // Attention over all of it.
    let shape =
        attention::Shape { num_heads, num_kv_heads, head_dim: HEAD_DIM, kv: format, has_sinks: false, softcap: None };
    let (k, v) = (cached(&k_buffer), cached(&v_buffer));
    let got = attend(rig, &shape, &batch, [&q_buffer, &k_buffer, &v_buffer]);
    let want = attention::reference(&shape, &layout, &batch, None, &q, (&k, &v), None);
    assert_close(&got, &want, 2e-5, "attention");
    let stride = shape.q_stride() as usize;
    let last = rig.upload("q of the last", &q[(COMPUTED as usize - 1) * stride..]);
    let alone = attend(rig, &shape, &batch_of(&table, 1), [&last, &k_buffer, &v_buffer]);
    assert_eq!(alone, got[got.len() - alone.len()..], "the last position alone gives other bits");
}
