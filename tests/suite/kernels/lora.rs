//! The two products of LoRA adapters, for tiles of tokens with and without one.

use kvasir::gpu::{Buffer, Recording};
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::lora_expand::{self, LoraExpand, Part, To};
use kvasir::kernels::lora_shrink::{self, LoraShrink, Rows};
use kvasir::kernels::lora_work::{LoraWork, Place};
use kvasir::kernels::{Activations, QuantisedRows, quantise, step_meta, stride};

use super::harness::{Random, Rig, assert_close, padded, plain_batch, rigs, tolerance};

const SLOTS: u32 = 3;
/// Rows of a projection in a slot, and the adapters' ranks by slot.
const RANK: u32 = 12;
const RANKS: [u32; 3] = [12, 5, 1];
const POISON: f32 = 12345.0;
/// Of each token: 1 more than the slot, or 0.
const STEPS: [&[u64]; 4] = [&[2], &[0, 1, 1, 1, 1, 1, 0, 3, 2, 2, 3], &[1, 2, 3], &[3, 3, 3]];

fn place(id: u64, parts: u32) -> Place {
    Place { slot: id as u32 - 1, rank: RANKS[id as usize - 1], parts }
}

/// Writes a step whose token t has the adapter `ids[t]`; the parts of each slot are `parts`.
fn set_step(rig: &Rig, meta: &Buffer, ids: &[u64], parts: [u32; 3]) -> LoraWork {
    let mut batch = plain_batch(ids.len() as u32, 0);
    batch.adapter_of_row = ids.to_vec();
    let mut work = LoraWork::default();
    work.plan(&batch, |id| Some(place(id, parts[id as usize - 1]))).expect("all lie somewhere");
    let mut words = Vec::new();
    step_meta::encode(&batch, &AttentionWork::default(), &mut words);
    work.append(&mut words);
    rig.gpu.write(&meta.whole(), bytemuck::cast_slice(&words));
    work
}

#[test]
fn the_first_product_matches_the_reference_for_tokens_with_an_adapter_alone() {
    for rig in rigs() {
        for (k, is_quantised) in [(32usize, false), (88, true), (576, false), (1000, true)] {
            let rows = Rows { k: k as u32, rank: RANK, num_parts: 2, first_part: 4 };
            let (width, per_slot, max_tokens) = (stride(k as u32) as usize, rows.rows() as usize, 11);
            let mut random = Random(k as u64);
            let a = random.vector(SLOTS as usize * per_slot * k, 0.3);
            let x = padded(&random.vector(max_tokens * k, 2.0), k, width);
            let (q, scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) = x.chunks_exact(32).map(quantise::reference).unzip();
            let used: Vec<f32> = match is_quantised {
                true => q.iter().zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect(),
                false => x.clone(),
            };
            let a_rows = rig.upload("a", &padded(&a, k, width));
            let (x_rows, h) = (rig.upload("x", &x), rig.filled("h", max_tokens * per_slot, POISON));
            let quantised =
                QuantisedRows { q: rig.upload("q", &q.concat()).whole(), scales: rig.upload("s", &scales).whole() };
            let meta = rig.step_meta(1024);
            let kernel = rig.build(&meta, false, |ctx| {
                let x_rows = x_rows.whole();
                let x = if is_quantised { Activations::I8(&quantised) } else { Activations::F32(&x_rows) };
                LoraShrink::new(ctx, "shrink", rows, (x, &a_rows.whole()), &h.whole())
            });
            for ids in STEPS {
                rig.gpu.write(&h.whole(), bytemuck::cast_slice(&vec![POISON; max_tokens * per_slot]));
                // The second slot changes the second projection only.
                let work = set_step(rig, &meta, ids, [0x30, 0x20, 0x30]);
                let mut recording = Recording::new("shrink");
                kernel.record(&mut recording, work.shape());
                rig.replay(&recording);
                let got: Vec<f32> = rig.read(&h);
                // One value may be small by cancellation: all are judged by the largest.
                let (mut found, mut want) = (Vec::new(), Vec::new());
                for (t, &id) in ids.iter().enumerate() {
                    let row = &got[t * per_slot..(t + 1) * per_slot];
                    for part in 0..2 {
                        let own = &row[part * RANK as usize..(part + 1) * RANK as usize];
                        if id == 0 || id == 2 && part == 0 {
                            assert!(own.iter().all(|v| *v == POISON), "{}: token {t} was written", rig.name);
                            continue;
                        }
                        let rank = RANKS[id as usize - 1] as usize;
                        let first = (id as usize - 1) * per_slot + part * RANK as usize;
                        let x: Vec<f32> = used[t * width..t * width + k].to_vec();
                        want.extend(lora_shrink::reference(&a[first * k..(first + rank) * k], &x));
                        found.extend_from_slice(&own[..rank]);
                    }
                }
                assert_close(&found, &want, tolerance::SUM, &format!("{} k {k}", rig.name));
            }
        }
    }
}

#[test]
fn the_second_product_is_added_where_the_adapter_has_one() {
    let sizes = [70u32, 32, 18];
    let parts = [Part { size: 70, at: 0 }, Part { size: 32, at: 70 }, Part { size: 18, at: 102 }];
    let (width, y_stride, max_tokens) = (sizes.map(stride).iter().sum::<u32>() as usize, 128usize, 11);
    for rig in rigs() {
        let mut random = Random(5);
        let b = random.vector(SLOTS as usize * RANK as usize * width, 0.5);
        let h = random.vector(max_tokens * 3 * RANK as usize, 1.0);
        let before = random.vector(max_tokens * y_stride, 1.0);
        let (b_rows, h_rows, y) = (rig.upload("b", &b), rig.upload("h", &h), rig.upload("y", &before));
        let meta = rig.step_meta(1024);
        let kernel = rig.build(&meta, false, |ctx| {
            let (y, rows) = (y.whole(), (&b_rows.whole(), &h_rows.whole()));
            let to = To::Added { y: &y, stride: y_stride as u32 };
            LoraExpand::new(ctx, "expand", &parts, (RANK, 0), rows, to)
        });
        for ids in STEPS {
            rig.gpu.write(&y.whole(), bytemuck::cast_slice(&before));
            let work = set_step(rig, &meta, ids, [7, 5, 2]);
            let mut recording = Recording::new("expand");
            kernel.record(&mut recording, work.shape());
            rig.replay(&recording);
            let got: Vec<f32> = rig.read(&y);
            let mut want = before.clone();
            for (t, &id) in ids.iter().enumerate().filter(|(_, id)| **id != 0) {
                let (slot, rank) = (id as usize - 1, RANKS[id as usize - 1] as usize);
                let mut first = 0;
                for (p, part) in parts.iter().enumerate() {
                    let column = |n: usize| -> f32 {
                        let b: Vec<f32> =
                            (0..rank).map(|j| b[(slot * RANK as usize + j) * width + first + n]).collect();
                        let from = (t * 3 + p) * RANK as usize;
                        lora_expand::reference(&b, &h[from..from + rank])[0]
                    };
                    if [7, 5, 2][slot] >> p & 1 == 1 {
                        (0..part.size as usize).for_each(|n| want[t * y_stride + part.at as usize + n] += column(n));
                    }
                    first += stride(part.size) as usize;
                }
            }
            assert_close(&got, &want, tolerance::SUM, rig.name);
            let others =
                ids.iter().enumerate().filter(|(_, id)| **id == 0).map(|(t, _)| t).chain(ids.len()..max_tokens);
            for t in others {
                let row = t * y_stride..(t + 1) * y_stride;
                assert!(got[row.clone()] == before[row], "{}: token {t} without an adapter was changed", rig.name);
            }
        }
    }
}

#[test]
fn deltas_of_gate_and_up_are_stored_in_turns_and_padded_with_zeros() {
    let (size, rank) = (45u32, 1usize);
    let parts = [Part { size, at: 0 }, Part { size, at: 64 }];
    for rig in rigs() {
        let mut random = Random(6);
        // As the executor packs it: nothing behind an output's last row.
        let own = random.vector(2 * size as usize, 0.5);
        let b = padded(&own, size as usize, 64);
        let mut slots = vec![0f32; SLOTS as usize * RANK as usize * 128];
        slots[2 * RANK as usize * 128..][..128].copy_from_slice(&b);
        let h = random.vector(2 * 2 * RANK as usize, 1.0);
        let (b_rows, h_rows, y) = (rig.upload("b", &slots), rig.upload("h", &h), rig.filled("y", 2 * 128, POISON));
        let meta = rig.step_meta(1024);
        let kernel = rig.build(&meta, false, |ctx| {
            let rows = (&b_rows.whole(), &h_rows.whole());
            LoraExpand::new(ctx, "expand", &parts, (RANK, 4), rows, To::Interleaved { y: &y.whole() })
        });
        // Up alone is changed.
        let work = set_step(rig, &meta, &[0, 3], [0x30, 0x30, 0x20]);
        let mut recording = Recording::new("expand");
        kernel.record(&mut recording, work.shape());
        rig.replay(&recording);
        let got: Vec<f32> = rig.read(&y);
        assert!(got[..128].iter().all(|v| *v == POISON), "{}: a token without an adapter was written", rig.name);
        let want: Vec<f32> = (0..128usize)
            .map(|at| match (at / 32 % 2, at / 64 * 32 + at % 32) {
                (1, n) if n < size as usize => own[size as usize + n] * h[(2 + 1) * RANK as usize],
                _ => 0.0,
            })
            .collect();
        assert_close(&got[128..], &want, tolerance::ELEMENT, rig.name);
        assert_eq!(rank, RANKS[2] as usize);
    }
}
