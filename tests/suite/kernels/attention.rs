//! PagedAttention against its reference, and its promise: bits that depend on a row's keys alone.

use std::collections::BTreeMap;

use kvasir::batch::StepBatch;
use kvasir::gpu::Recording;
use kvasir::kernels::RowOutput;
use kvasir::kernels::attention::{Attention, Buffers, Shape, reference};
use kvasir::kernels::attention_work::{AttentionWork, Take, WorkCounts, WorkLimits};
use kvasir::kernels::kv_layout::{KvFormat, KvLayout, padded_head_dim};
use kvasir::kernels::measure::attention::Case;
use kvasir::kernels::{measure, step_meta};

use super::harness::{Random, Rig, assert_close, relative_error, rigs};

/// Tokens `start..start + count` of sequence `seq` in one step; earlier ones are in the cache already.
#[derive(Clone, Copy, Debug)]
struct Row {
    seq: u32,
    start: u32,
    count: u32,
    /// Its first `prefix` tokens are those of this family of rows, in the same blocks.
    family: u32,
    prefix: u32,
}

const fn row(seq: u32, start: u32, count: u32) -> Row {
    Row { seq, start, count, family: 0, prefix: 0 }
}

const fn on_prefix(family: u32, prefix: u32, row: Row) -> Row {
    Row { family, prefix, ..row }
}

/// A step over pages, with content that depends on (sequence, position, head, dim) only.
struct World {
    batch: StepBatch,
    layout: KvLayout,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Read where the shape has sinks. [num_heads]
    sinks: Vec<f32>,
}

/// A value in -1..1 that depends on its coordinates only.
fn value(what: u64, seq: u32, position: u32, head: u32, dim: usize) -> f32 {
    let seed = what << 60 ^ u64::from(seq) << 50 ^ u64::from(position) << 24 ^ u64::from(head) << 12 ^ dim as u64;
    Random(seed.wrapping_mul(0x2545_F491_4F6C_DD1D)).unit()
}

fn world(shape: &Shape, rows: &[Row], block_size: u32, seed: u64) -> World {
    let blocks_of = |r: &Row| (r.start + r.count).div_ceil(block_size);
    let needed: u32 = rows.iter().map(blocks_of).sum();
    let layout = KvLayout {
        num_blocks: needed + 3,
        block_size,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        format: shape.kv,
    };
    let mut random = Random(seed);
    let mut free: Vec<u32> = (1..layout.num_blocks).collect();
    let mut batch = StepBatch { block_size, row_start: vec![0], block_table_start: vec![0], ..StepBatch::default() };
    // What no row owns is poison: finite, but far from every real value.
    let mut k = vec![300.0; layout.num_values() as usize];
    let mut v = vec![-300.0; layout.num_values() as usize];
    let mut q = Vec::new();
    let (dim, padded) = (shape.head_dim as usize, padded_head_dim(shape.head_dim) as usize);
    let mut families: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for (idx, r) in rows.iter().enumerate() {
        let mut fresh = || free.swap_remove(random.below(free.len() as u32) as usize);
        let table: Vec<u32> = (0..blocks_of(r))
            .map(|b| match (b + 1) * block_size <= r.prefix {
                true => *families.entry((r.family, b)).or_insert_with(&mut fresh),
                false => fresh(),
            })
            .collect();
        for position in 0..r.start + r.count {
            let seq = if position < r.prefix { 100 + r.family } else { r.seq };
            let slot = table[(position / block_size) as usize] * block_size + position % block_size;
            for head in 0..shape.num_kv_heads {
                let at = layout.value_idx(slot, head);
                for d in 0..padded {
                    k[at + d] = if d < dim { 2.0 * value(1, seq, position, head, d) } else { 0.0 };
                    v[at + d] = if d < dim { value(2, seq, position, head, d) } else { 0.0 };
                }
            }
        }
        for position in r.start..r.start + r.count {
            batch.positions.push(position);
            batch.input_ids.push(0);
            batch.kv_slots.push(0);
            batch.row_of_token.push(idx as u32);
            let from = q.len();
            for head in 0..shape.num_heads {
                q.extend((0..padded).map(|d| if d < dim { value(3, r.seq, position, head, d) } else { 0.0 }));
            }
            q.resize(from + shape.q_stride() as usize, 0.0);
        }
        batch.row_start.push(batch.positions.len() as u32);
        batch.slot_of_row.push(idx as u32);
        batch.block_tables.extend(table);
        batch.block_table_start.push(batch.block_tables.len() as u32);
    }
    batch.find_groups();
    // The reference sees what the cache holds.
    let (k, v) = (layout.decode(&layout.encode(&k)), layout.decode(&layout.encode(&v)));
    let sinks = (0..shape.num_heads).map(|head| 4.0 * value(4, 0, 0, head, 0)).collect();
    World { batch, layout, q, k, v, sinks }
}

fn expected(shape: &Shape, world: &World, window: Option<u32>) -> Vec<f32> {
    let sinks = shape.has_sinks.then_some(world.sinks.as_slice());
    reference(shape, &world.layout, &world.batch, window, &world.q, (&world.k, &world.v), sinks)
}

/// How a test has the work cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    split: Take,
    share: Take,
    parallel: u32,
}

const WHOLE: Cut = Cut { split: Take::Never, share: Take::Never, parallel: 2 };

fn work(rig: &Rig, shape: &Shape, world: &World, window: Option<u32>, cut: Cut) -> AttentionWork {
    let mut work = AttentionWork::default();
    let limits = WorkLimits {
        tokens_per_workgroup: shape.tokens_per_workgroup(rig.class),
        parts: shape.parts(),
        parallel: cut.parallel,
        max_slots: 2000,
        window,
        split: cut.split,
        share: cut.share,
    };
    work.plan(&world.batch, &limits);
    work
}

fn launch(rig: &Rig, shape: &Shape, world: &World, window: Option<u32>, cut: Cut, y: RowOutput<'_>) {
    let work = work(rig, shape, world, window, cut);
    let meta = rig.step_meta(step_meta::num_words(&world.batch, &work));
    rig.set_work(&meta, &world.batch, &work);
    let q = rig.upload("q", &world.q);
    let k = rig.cache("k_cache", &world.layout, &world.k);
    let v = rig.cache("v_cache", &world.layout, &world.v);
    // What is not written must not be read.
    let partials = rig.filled("partials", 2000 * shape.partial_bytes() as usize / 4, f32::NAN);
    let (q, k, v, partials) = (q.whole(), k.whole(), v.whole(), partials.whole());
    let sinks = shape.has_sinks.then(|| rig.upload("sinks", &world.sinks).whole());
    let buffers = Buffers { q: &q, k_cache: &k, v_cache: &v, sinks: sinks.as_ref(), partials: &partials, y };
    let attention = rig.build(&meta, false, |ctx| Attention::new(ctx, "attention", shape, (window, 0), &buffers));
    let mut recording = Recording::new("attention");
    attention.record(&mut recording, work.counts);
    rig.replay(&recording);
}

/// The kernel's f32 output.
fn run_cut(rig: &Rig, shape: &Shape, world: &World, window: Option<u32>, cut: Cut) -> Vec<f32> {
    let out = rig.filled("out", world.batch.num_tokens() * shape.out_stride() as usize, 7e7);
    launch(rig, shape, world, window, cut, RowOutput::F32(&out.whole()));
    rig.read(&out)
}

fn run(rig: &Rig, shape: &Shape, world: &World, window: Option<u32>) -> Vec<f32> {
    run_cut(rig, shape, world, window, WHOLE)
}

fn shape(num_heads: u32, num_kv_heads: u32, head_dim: u32, kv: KvFormat) -> Shape {
    Shape { num_heads, num_kv_heads, head_dim, kv, softcap: None, has_sinks: false }
}

/// Prompts, chunks and single tokens, with contexts on and around the edges of tiles, pages and ranges.
const RAGGED: [Row; 8] = [
    row(0, 0, 1),
    row(1, 30, 5),
    row(2, 31, 1),
    row(3, 0, 13),
    row(4, 255, 2),
    row(5, 256, 1),
    row(6, 600, 1),
    row(7, 500, 19),
];

fn check(shape: &Shape, rows: &[Row], block_size: u32, window: Option<u32>) {
    check_within(shape, rows, block_size, window, 5e-6);
}

fn check_within(shape: &Shape, rows: &[Row], block_size: u32, window: Option<u32>, tolerance: f32) {
    for rig in rigs() {
        let world = world(shape, rows, block_size, 1);
        let got = run(rig, shape, &world, window);
        let want = expected(shape, &world, window);
        assert_close(&got, &want, tolerance, &format!("{} {shape:?} window {window:?}", rig.name));
    }
}

#[test]
fn grouped_heads_match_the_reference() {
    for (heads, kv_heads) in [(2, 2), (4, 2), (9, 3), (7, 1), (16, 1), (5, 5)] {
        check(&shape(heads, kv_heads, 64, KvFormat::F16), &RAGGED, 16, None);
    }
}

#[test]
fn head_dims_match_the_reference() {
    for dim in [16, 24, 32, 80, 96, 128, 256] {
        check(&shape(2, 1, dim, KvFormat::F16), &RAGGED, 16, None);
    }
}

#[test]
fn rows_as_wide_as_latent_ones_match_the_reference() {
    // Longer sums carry larger errors.
    check_within(&shape(2, 1, 576, KvFormat::F16), &RAGGED, 16, None, 3e-5);
}

#[test]
fn head_dims_that_need_padding_match_the_reference() {
    check(&shape(3, 1, 20, KvFormat::F16), &RAGGED, 16, None);
}

#[test]
fn an_f32_cache_matches_the_reference() {
    for dim in [64, 24] {
        check(&shape(6, 2, dim, KvFormat::F32), &RAGGED, 8, None);
    }
}

#[test]
fn an_int8_cache_matches_the_reference() {
    for (dim, block_size) in [(64, 16), (24, 1), (128, 8), (20, 2)] {
        check(&shape(6, 2, dim, KvFormat::I8), &RAGGED, block_size, None);
    }
}

#[test]
fn sliding_windows_match_the_reference() {
    for window in [1, 5, 32, 100, 300, 5000] {
        check(&shape(4, 2, 32, KvFormat::F16), &RAGGED, 16, Some(window));
    }
}

#[test]
fn soft_caps_and_sinks_match_the_reference() {
    // Caps that bend scores of about 10 much and hardly.
    for (softcap, has_sinks, kv) in [
        (Some(3.0), false, KvFormat::F16),
        (Some(50.0), false, KvFormat::F32),
        (None, true, KvFormat::F16),
        (Some(3.0), true, KvFormat::I8),
    ] {
        check(&Shape { softcap, has_sinks, ..shape(3, 1, 20, kv) }, &RAGGED, 16, Some(100));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for rig in rigs() {
        let shape = shape(2, 1, 32, KvFormat::F32);
        let mut world = world(&shape, &RAGGED, 16, 1);
        world.q.iter_mut().for_each(|q| *q *= 1e4);
        let got = run(rig, &shape, &world, None);
        let want = expected(&shape, &world, None);
        // Scores of 1e5 carry f32 errors of 1e-2, so the weights of near ties may differ by a few percent.
        let error = relative_error(&got, &want);
        assert!(error < 5e-2, "{}: {error}", rig.name);
    }
}

/// The output rows of one sequence, by position.
fn rows_of(shape: &Shape, world: &World, out: &[f32], rows: &[Row], seq: u32) -> Vec<(u32, Vec<u32>)> {
    let stride = shape.out_stride() as usize;
    (0..world.batch.num_tokens())
        .filter(|&t| rows[world.batch.row_of_token[t] as usize].seq == seq)
        .map(|t| (world.batch.positions[t], out[t * stride..][..stride].iter().map(|x| x.to_bits()).collect()))
        .collect()
}

#[test]
fn bits_do_not_depend_on_chunks_batch_mates_block_size_or_block_ids() {
    let prompt = 290;
    for rig in rigs() {
        for (shape, window) in [
            (shape(9, 3, 64, KvFormat::F16), None),
            (shape(4, 2, 24, KvFormat::F16), Some(70)),
            (shape(7, 1, 32, KvFormat::F32), None),
            (shape(3, 3, 32, KvFormat::I8), None),
        ] {
            let whole = [row(0, 0, prompt)];
            let first = world(&shape, &whole, 16, 1);
            let out = run(rig, &shape, &first, window);
            assert!(out.iter().all(|x| x.is_finite()), "{}: equal bits of a NaN prove nothing", rig.name);
            let expect = rows_of(&shape, &first, &out, &whole, 0);
            for (chunk, block_size, mates) in [(1, 16, false), (7, 8, true), (64, 32, false), (101, 16, true)] {
                let mut got = Vec::new();
                // Every chunk for large ones, a sample of them for small ones: around each edge.
                let starts = (0..prompt).step_by(chunk as usize);
                for start in starts.filter(|s| chunk > 7 || s % 32 < 8 || *s > 250) {
                    let mut rows = vec![row(0, start, chunk.min(prompt - start))];
                    if mates {
                        rows.insert(0, row(5, 40, 3));
                        rows.push(row(6, 11, 1));
                    }
                    let world = world(&shape, &rows, block_size, u64::from(start) + 77);
                    let out = run(rig, &shape, &world, window);
                    got.extend(rows_of(&shape, &world, &out, &rows, 0));
                }
                for (position, bits) in got {
                    assert!(
                        bits == expect[position as usize].1,
                        "{}: position {position} differs with chunks of {chunk}, blocks of {block_size}",
                        rig.name
                    );
                }
            }
        }
    }
}

/// Two families of rows on common prefixes, ragged rows besides, prompts in chunks, and a row inside its own prefix's
/// first range.
const FAMILIES: [Row; 11] = [
    on_prefix(1, 768, row(0, 900, 1)),
    on_prefix(2, 512, row(1, 512, 5)),
    row(2, 31, 1),
    on_prefix(1, 768, row(3, 768, 1)),
    on_prefix(1, 768, row(4, 1023, 3)),
    on_prefix(2, 512, row(5, 700, 1)),
    row(6, 600, 1),
    on_prefix(1, 256, row(7, 530, 1)),
    on_prefix(1, 768, row(8, 1300, 1)),
    row(9, 500, 19),
    on_prefix(1, 768, row(10, 1029, 1)),
];

/// Every way of cutting the work.
const CUTS: [Cut; 4] = [
    Cut { split: Take::Always, share: Take::Never, parallel: 2 },
    Cut { split: Take::Never, share: Take::Always, parallel: 2 },
    Cut { split: Take::Always, share: Take::Always, parallel: 2 },
    Cut { split: Take::WhenItPays, share: Take::WhenItPays, parallel: 64 },
];

#[test]
fn work_that_is_split_or_shared_gives_the_same_bits() {
    let shapes = [
        (shape(9, 3, 64, KvFormat::F16), None),
        (shape(9, 3, 64, KvFormat::F16), Some(700)),
        (shape(2, 2, 32, KvFormat::F32), Some(40)),
        (shape(7, 1, 24, KvFormat::F16), None),
        (shape(8, 2, 128, KvFormat::F16), None),
        (shape(3, 1, 20, KvFormat::F16), Some(300)),
        (shape(2, 1, 256, KvFormat::F16), None),
        (shape(9, 3, 64, KvFormat::I8), None),
        (Shape { softcap: Some(3.0), has_sinks: true, ..shape(9, 3, 64, KvFormat::F16) }, Some(700)),
    ];
    for rig in rigs() {
        for (idx, (shape, window)) in shapes.iter().enumerate() {
            let block_size = [16, 64][idx % 2];
            let world = world(shape, &FAMILIES, block_size, 5);
            assert_eq!(world.batch.groups.len(), 2);
            let expect = run(rig, shape, &world, *window);
            assert!(expect.iter().all(|x| x.is_finite()), "{}: equal bits of a NaN prove nothing", rig.name);
            for cut in CUTS {
                let got = run_cut(rig, shape, &world, *window, cut);
                let is_same = got.iter().zip(&expect).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(is_same, "{} {shape:?} window {window:?}: {cut:?} changes bits", rig.name);
                assert!(
                    cut.split == Take::WhenItPays
                        || work(rig, shape, &world, *window, cut).counts.merges > 0
                        || shape.tokens_per_workgroup(rig.class) == 1,
                    "{cut:?} cut nothing"
                );
            }
        }
    }
}

#[test]
fn quantised_output_of_cut_work_is_the_same_bits() {
    for rig in rigs() {
        let shape = shape(9, 3, 64, KvFormat::F16);
        if !shape.can_quantise(rig.class) {
            continue;
        }
        let world = world(&shape, &FAMILIES, 16, 5);
        let run = |cut: Cut| -> (Vec<u32>, Vec<u32>) {
            let (y, q, scales) = rig.quantised_rows(world.batch.num_tokens(), shape.out_stride() as usize);
            launch(rig, &shape, &world, None, cut, RowOutput::I8(&y));
            (rig.read(&q), rig.read(&scales))
        };
        let expect = run(WHOLE);
        for cut in CUTS {
            assert!(run(cut) == expect, "{}: {cut:?} changes bits", rig.name);
        }
    }
}

#[test]
fn quantised_output_is_the_f32_output_in_groups_of_32() {
    for rig in rigs() {
        for (heads, kv_heads, dim) in [(9, 3, 64), (2, 1, 32), (2, 2, 128)] {
            let plain = shape(heads, kv_heads, dim, KvFormat::F16);
            if !plain.can_quantise(rig.class) {
                continue;
            }
            let world = world(&plain, &RAGGED, 16, 1);
            let want = run(rig, &plain, &world, None);
            let (output, q, scales) = rig.quantised_rows(world.batch.num_tokens(), plain.out_stride() as usize);
            launch(rig, &plain, &world, None, WHOLE, RowOutput::I8(&output));
            let (got_q, got_s): (Vec<i8>, Vec<[f32; 2]>) = (rig.read(&q), rig.read(&scales));
            for (i, group) in want.chunks(32).enumerate() {
                let largest = group.iter().fold(0f32, |m, x| m.max(x.abs()));
                let [scale, scaled_sum] = got_s[i];
                assert!((scale - largest / 127.0).abs() <= 1e-6 * largest, "{} group {i}: {scale}", rig.name);
                let q = &got_q[i * 32..][..32];
                for (x, q) in group.iter().zip(q) {
                    assert!((x - scale * f32::from(*q)).abs() <= 0.5001 * scale, "{} group {i}: {x} {q}", rig.name);
                }
                let sum = scale * q.iter().map(|q| f32::from(*q)).sum::<f32>();
                assert!((scaled_sum - sum).abs() <= 1e-5 * largest.max(1e-9), "{} group {i}", rig.name);
            }
        }
    }
}

#[test]
fn zeroed_metadata_writes_nothing() {
    for rig in rigs() {
        let shape = shape(2, 1, 32, KvFormat::F16);
        let world = world(&shape, &[row(0, 3, 2)], 16, 1);
        let meta = rig.step_meta(64);
        let out = rig.filled("out", 2 * shape.out_stride() as usize, 7.0);
        let q = rig.upload("q", &world.q);
        let k = rig.cache("k_cache", &world.layout, &world.k);
        let v = rig.cache("v_cache", &world.layout, &world.v);
        let y = out.whole();
        let partials = rig.filled("partials", 64, 0.0).whole();
        let (q, k, v, y) = (q.whole(), k.whole(), v.whole(), RowOutput::F32(&y));
        let buffers = Buffers { q: &q, k_cache: &k, v_cache: &v, sinks: None, partials: &partials, y };
        let attention = rig.build(&meta, false, |ctx| Attention::new(ctx, "attention", &shape, (None, 0), &buffers));
        let mut recording = Recording::new("attention");
        attention.record(&mut recording, WorkCounts::some(2));
        rig.replay(&recording);
        assert!(rig.read::<f32>(&out).iter().all(|x| *x == 7.0), "{}", rig.name);
    }
}

#[test]
fn a_contiguous_cache_gives_the_bits_of_pages() {
    for rig in rigs() {
        let shape =
            Shape { num_heads: 9, num_kv_heads: 3, head_dim: 64, kv: KvFormat::F16, softcap: None, has_sinks: false };
        let case = |is_contiguous| Case {
            shape,
            rows: 3,
            context: 300,
            shared: 0,
            split: Take::Never,
            share: Take::Never,
            parallel: 2,
            block_size: 512,
            is_contiguous,
        };
        let run = |is_contiguous| {
            measure::attention::output(&rig.gpu, &case(is_contiguous)).unwrap_or_else(|e| panic!("{}: {e}", rig.name))
        };
        let pages = run(false);
        assert!(pages.iter().all(|v| v.is_finite()) && pages[0] != pages[pages.len() - 1], "{}", rig.name);
        assert!(run(true).iter().zip(&pages).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", rig.name);
    }
}
