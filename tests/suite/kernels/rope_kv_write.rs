//! QKV to q, K and V against the reference.

use kvasir::batch::StepBatch;
use kvasir::gpu::Recording;
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::kv_layout::{KvFormat, KvLayout};
use kvasir::kernels::rope_kv_write::{Buffers, RopeKvWrite, Shape, reference, rope_table, write_reference};
use kvasir::kernels::step_meta;

use super::harness::{Random, Rig, assert_close, rigs};

/// What multiplies q·k.
const SCALE: f64 = 0.3;
const RMS_EPS: f32 = 1e-5;
const MAX_POSITION: u32 = 50;

fn shape(head_dim: u32, rotary_dim: u32, interleaved: bool, qk_norm: bool, kv: KvFormat) -> Shape {
    Shape { num_heads: 3, num_kv_heads: 2, head_dim, rotary_dim, interleaved, qk_norm, kv }
}

fn batch(positions: &[u32], kv_slots: &[u32], block_size: u32) -> StepBatch {
    StepBatch {
        block_size,
        input_ids: vec![0; positions.len()],
        positions: positions.to_vec(),
        kv_slots: kv_slots.to_vec(),
        row_of_token: vec![0; positions.len()],
        row_start: vec![0, positions.len() as u32],
        slot_of_row: vec![0],
        block_tables: vec![0],
        block_table_start: vec![0, 1],
        ..StepBatch::default()
    }
}

fn table(rotary_dim: u32) -> Vec<[f32; 2]> {
    let angles: Vec<f32> = (0..MAX_POSITION)
        .flat_map(|p| (0..rotary_dim / 2).map(move |i| p as f32 / 10f32.powf(i as f32 / rotary_dim as f32)))
        .collect();
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    rope_table(&cos, &sin)
}

/// Runs the kernel over caches that hold 7 everywhere; gives q and both caches.
fn run(
    rig: &Rig,
    shape: &Shape,
    layout: &KvLayout,
    batch: &StepBatch,
    qkv: &[f32],
    gains: &[f32],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let meta = rig.step_meta(step_meta::num_words(batch, &AttentionWork::default()));
    rig.set_step(&meta, batch);
    let qkv = rig.upload("qkv", qkv);
    let rope = rig.upload("rope", &table(shape.rotary_dim));
    let gains = rig.upload("gains", gains);
    let q = rig.filled("q", batch.num_tokens() * shape.q_stride() as usize, 0.0);
    let sevens = vec![7.0; layout.num_values() as usize];
    let (k, v) = (rig.cache("k_cache", layout, &sevens), rig.cache("v_cache", layout, &sevens));
    let gains = gains.whole();
    let buffers = Buffers {
        qkv: &qkv.whole(),
        rope: &rope.whole(),
        gains: shape.qk_norm.then_some(&gains),
        q: &q.whole(),
        k_cache: &k.whole(),
        v_cache: &v.whole(),
    };
    let kernel = rig.build(&meta, false, |ctx| RopeKvWrite::new(ctx, "rope", shape, ((RMS_EPS, SCALE), 0), &buffers));
    let mut recording = Recording::new("rope");
    kernel.record(&mut recording, batch.num_tokens() as u32);
    rig.replay(&recording);
    let read = |b: &kvasir::gpu::Buffer| layout.decode(&rig.read::<u8>(b));
    (rig.read(&q), read(&k), read(&v))
}

fn layout(shape: &Shape, block_size: u32) -> KvLayout {
    KvLayout { num_blocks: 6, block_size, num_kv_heads: shape.num_kv_heads, head_dim: shape.head_dim, format: shape.kv }
}

fn check(shape: &Shape, block_size: u32) {
    let layout = layout(shape, block_size);
    let slots: Vec<u32> = [17, 5, 0, 23, 9].iter().map(|s| s + block_size).collect();
    let batch = batch(&[3, 49, 0, 7, 8], &slots, block_size);
    let mut random = Random(3);
    let qkv = random.vector(batch.num_tokens() * shape.qkv_stride() as usize, 3.0);
    let gains = random.vector(2 * shape.head_dim as usize, 1.5);
    let expect = reference(shape, &batch, &qkv, &table(shape.rotary_dim), &gains, (RMS_EPS, SCALE));
    let mut k = vec![7.0; layout.num_values() as usize];
    let mut v = k.clone();
    // Padding of the heads that are written is zero.
    for &slot in &batch.kv_slots {
        for head in 0..shape.num_kv_heads {
            let at = layout.value_idx(slot, head);
            let padded = kvasir::kernels::kv_layout::padded_head_dim(shape.head_dim) as usize;
            k[at..at + padded].fill(0.0);
            v[at..at + padded].fill(0.0);
        }
    }
    write_reference(&layout, &batch, &expect, &mut k, &mut v);
    let tolerance = match shape.kv {
        KvFormat::F16 => 5e-4,
        KvFormat::F32 => 1e-6,
        // Half a step of the largest value.
        KvFormat::I8 => 0.51 / 127.0,
    };
    for rig in rigs() {
        let (got_q, got_k, got_v) = run(rig, shape, &layout, &batch, &qkv, &gains);
        let what = format!("{} {shape:?}", rig.name);
        assert_close(&got_q, &expect.q, 1e-6, &format!("q {what}"));
        assert_close(&got_k, &k, tolerance, &format!("k {what}"));
        assert_close(&got_v, &v, tolerance, &format!("v {what}"));
    }
}

#[test]
fn pairs_in_halves_match_the_reference() {
    for (dim, rotary) in [(64, 64), (24, 24), (80, 32), (20, 12), (128, 128)] {
        check(&shape(dim, rotary, false, false, KvFormat::F16), 16);
    }
}

#[test]
fn interleaved_pairs_match_the_reference() {
    for (dim, rotary) in [(64, 64), (24, 24), (80, 32), (18, 10)] {
        check(&shape(dim, rotary, true, false, KvFormat::F16), 8);
    }
}

#[test]
fn norms_of_q_and_k_heads_match_the_reference() {
    check(&shape(32, 32, false, true, KvFormat::F32), 32);
    check(&shape(32, 32, true, true, KvFormat::F16), 16);
}

#[test]
fn an_f32_cache_matches_the_reference() {
    check(&shape(64, 64, false, false, KvFormat::F32), 16);
}

#[test]
fn an_int8_cache_matches_the_reference() {
    check(&shape(64, 64, false, false, KvFormat::I8), 16);
    check(&shape(20, 12, false, false, KvFormat::I8), 8);
    check(&shape(24, 24, true, true, KvFormat::I8), 8);
}

#[test]
fn int8_bytes_are_those_of_the_formula_and_neighbours_stay() {
    let shape = shape(16, 16, false, false, KvFormat::I8);
    let layout = layout(&shape, 2);
    for rig in rigs() {
        // Values alone do not turn, so they are known exactly.
        let batch = batch(&[3], &[5], 2);
        let mut random = Random(9);
        let qkv = random.vector(shape.qkv_stride() as usize, 3.0);
        let (_, _, v) = run(rig, &shape, &layout, &batch, &qkv, &[]);
        let sevens = layout.decode(&layout.encode(&vec![7.0; layout.num_values() as usize]));
        let mut expect = sevens.clone();
        for head in 0..2 {
            let at = layout.value_idx(5, head);
            let from = (shape.num_heads + shape.num_kv_heads + head) as usize * 16;
            expect[at..at + 16].copy_from_slice(&qkv[from..from + 16]);
        }
        let expect = layout.decode(&layout.encode(&expect));
        assert_close(&v, &expect, 1e-6, rig.name);
        let (written, rest): (Vec<_>, Vec<_>) = (0..v.len()).partition(|&i| expect[i] != sevens[i]);
        assert_eq!(written.len(), 32);
        assert!(rest.iter().all(|&i| v[i] == sevens[i]), "{}: a neighbour changed", rig.name);
    }
}

#[test]
fn broken_and_large_values_enter_the_cache_as_finite_ones() {
    let shape = shape(16, 16, false, false, KvFormat::F16);
    let layout = layout(&shape, 16);
    let batch = batch(&[0], &[20], 16);
    let mut qkv = vec![1.0; shape.qkv_stride() as usize];
    let v_from = (shape.num_heads + shape.num_kv_heads) as usize * 16;
    qkv[v_from] = f32::NAN;
    qkv[v_from + 1] = f32::INFINITY;
    qkv[v_from + 2] = 1e6;
    qkv[v_from + 3] = -1e6;
    for rig in rigs() {
        let (_, k, v) = run(rig, &shape, &layout, &batch, &qkv, &[]);
        let at = layout.value_idx(20, 0);
        assert_eq!(v[at..at + 5], [0.0, 0.0, 65504.0, -65504.0, 1.0], "{}", rig.name);
        assert!(k.iter().chain(&v).all(|x| x.is_finite()), "{}", rig.name);
    }
}
