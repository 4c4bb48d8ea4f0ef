//! Kernels that work on rows of activations: embedding, norms, what stands between an MLP's products, quantisation.

use kvasir::gpu::{Recording, Uploader};
use kvasir::kernels::embed::Embed;
use kvasir::kernels::logit_cap::{self, LogitCap};
use kvasir::kernels::mlp::{self, Mlp};
use kvasir::kernels::norm::{self, Kind, Norm, Target};
use kvasir::kernels::quantise::{self, Quantise};
use kvasir::kernels::{PackedMatrix, RowCount, RowOutput, stride};
use kvasir::model::dtype::DType;
use kvasir::model::quant::dequantize;
use kvasir::model::spec::{Activation, MlpKind};

use super::harness::{Random, Rig, assert_close, padded, plain_batch, random_weights, rigs, tolerance, weight_types};

const COUNTS: [usize; 4] = [1, 2, 7, 17];
const POISON: f32 = 12345.0;

/// What a kernel with either output wrote, `[rows, stride]`, dequantised; and the raw bytes where quantised.
fn run_rows(
    rig: &Rig,
    rows: usize,
    width: usize,
    is_quantised: bool,
    run: impl FnOnce(RowOutput<'_>),
) -> (Vec<f32>, Vec<i8>) {
    if !is_quantised {
        let y = rig.filled("y", rows * width, POISON);
        run(RowOutput::F32(&y.whole()));
        return (rig.read(&y), Vec::new());
    }
    let (output, q, scales) = rig.quantised_rows(rows, width);
    run(RowOutput::I8(&output));
    let (q, scales): (Vec<i8>, Vec<[f32; 2]>) = (rig.read(&q), rig.read(&scales));
    let values = q.chunks_exact(32).zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0]));
    let values: Vec<f32> = values.collect();
    for (q, s) in q.chunks_exact(32).zip(&scales).filter(|(_, s)| !s[0].is_nan()) {
        let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
        assert!((s[1] - s[0] * sum as f32).abs() <= 1e-6 * s[0].abs() * 4064.0, "{}: sum of a group", rig.name);
    }
    (values, q)
}

/// Quantised results: within half a step of each group's scale, with room for the rounding of the scale.
#[track_caller]
fn assert_quantised_close(got: &[f32], want: &[f32], what: &str) {
    for (g, (got, want)) in got.chunks(32).zip(want.chunks(32)).enumerate() {
        let scale = want.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 0.501 * scale + 1e-30, "{what} group {g}: {got} {want} scale {scale}");
        }
    }
}

#[test]
fn norms_match_the_reference_as_floats_and_quantised() {
    for rig in rigs() {
        for k in [32usize, 88, 576, 1000] {
            let width = stride(k as u32) as usize;
            let mut random = Random(k as u64);
            let x = random.vector(17 * k, 3.0);
            let gain = random.vector(k, 1.0);
            let want: Vec<f32> = x.chunks_exact(k).flat_map(|x| norm::reference(x, &gain, 1e-5)).collect();
            let want = padded(&want, k, width);
            let x = rig.upload("x", &padded(&x, k, width));
            let gain = rig.upload("gain", &padded(&gain, k, width));
            let step_meta = rig.step_meta(1024);
            for is_quantised in [false, true] {
                let mut first: Vec<f32> = Vec::new();
                for count in COUNTS {
                    let (got, _) = run_rows(rig, 17, width, is_quantised, |y| {
                        let norm = rig.build(&step_meta, false, |ctx| {
                            let (x, gain, y) = (x.whole(), gain.whole(), Target::Row(y));
                            Norm::new(ctx, "norm", &x, Kind::Rms { gain: &gain }, y, (k as u32, 1e-5), RowCount::Tokens)
                        });
                        rig.set_step(&step_meta, &plain_batch(count as u32, 0));
                        let mut recording = Recording::new("norm");
                        norm.record(&mut recording, count as u32);
                        rig.replay(&recording);
                    });
                    let what = format!("{} k {k} count {count}", rig.name);
                    let (got, rest) = got.split_at(count * width);
                    let want = &want[..count * width];
                    if is_quantised {
                        assert_quantised_close(got, want, &what);
                        assert!(rest.iter().all(|v| v.is_nan()), "{what}: wrote beyond its rows");
                    } else {
                        assert_close(got, want, 4.0 * tolerance::ELEMENT, &what);
                        assert!(rest.iter().all(|v| *v == POISON), "{what}: wrote beyond its rows");
                    }
                    assert!(first.iter().zip(got).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: other bits");
                    first = got.to_vec();
                }
            }
        }
    }
}

#[test]
fn the_final_norm_gathers_the_rows_that_want_logits() {
    for rig in rigs() {
        let (k, eps) = (64usize, 1e-6);
        let mut random = Random(2);
        let x = random.vector(9 * k, 3.0);
        let gain = random.vector(k, 1.0);
        let mut batch = plain_batch(9, 0);
        batch.logit_tokens = vec![1, 4, 8];
        let want: Vec<f32> =
            batch.logit_tokens.iter().flat_map(|&t| norm::reference(&x[t as usize * k..][..k], &gain, eps)).collect();
        let (x, gain) = (rig.upload("x", &x), rig.upload("gain", &gain));
        let step_meta = rig.step_meta(1024);
        for is_quantised in [false, true] {
            let (got, _) = run_rows(rig, 3, k, is_quantised, |y| {
                let norm = rig.build(&step_meta, false, |ctx| {
                    let (x, gain, y) = (x.whole(), gain.whole(), Target::Row(y));
                    Norm::new(ctx, "final norm", &x, Kind::Rms { gain: &gain }, y, (k as u32, eps), RowCount::Logits)
                });
                rig.set_step(&step_meta, &batch);
                let mut recording = Recording::new("norm");
                norm.record(&mut recording, 3);
                rig.replay(&recording);
            });
            match is_quantised {
                true => assert_quantised_close(&got, &want, rig.name),
                false => assert_close(&got, &want, 4.0 * tolerance::ELEMENT, rig.name),
            }
        }
    }
}

#[test]
fn layer_norms_match_the_reference_with_and_without_bias() {
    for rig in rigs() {
        for (k, has_bias) in [(32usize, true), (88, true), (88, false), (576, true), (1002, true)] {
            let width = stride(k as u32) as usize;
            let mut random = Random(k as u64);
            // A mean far from zero is what tells it from RMSNorm.
            let x: Vec<f32> = random.vector(5 * k, 3.0).iter().map(|v| v + 4.0).collect();
            let gain = random.vector(k, 1.0);
            let bias = if has_bias { random.vector(k, 1.0) } else { vec![0.0; k] };
            let want: Vec<f32> = x.chunks_exact(k).flat_map(|x| norm::layer_reference(x, &gain, &bias, 1e-5)).collect();
            let want = padded(&want, k, width);
            let x = rig.upload("x", &padded(&x, k, width));
            let (gain, bias) =
                (rig.upload("gain", &padded(&gain, k, width)), rig.upload("bias", &padded(&bias, k, width)));
            let step_meta = rig.step_meta(1024);
            rig.set_step(&step_meta, &plain_batch(5, 0));
            for is_quantised in [false, true] {
                let (got, _) = run_rows(rig, 5, width, is_quantised, |y| {
                    let norm = rig.build(&step_meta, false, |ctx| {
                        let (x, gain, bias) = (x.whole(), gain.whole(), bias.whole());
                        let kind = Kind::Layer { gain: &gain, bias: has_bias.then_some(&bias) };
                        Norm::new(ctx, "norm", &x, kind, Target::Row(y), (k as u32, 1e-5), RowCount::Tokens)
                    });
                    let mut recording = Recording::new("norm");
                    norm.record(&mut recording, 5);
                    rig.replay(&recording);
                });
                let what = format!("{} k {k} bias {has_bias}", rig.name);
                match is_quantised {
                    true => assert_quantised_close(&got, &want, &what),
                    false => assert_close(&got, &want, 8.0 * tolerance::ELEMENT, &what),
                }
            }
        }
    }
}

#[test]
fn a_norm_adds_to_the_hidden_state_and_a_copy_copies() {
    for rig in rigs() {
        let (k, width) = (88usize, stride(88) as usize);
        let mut random = Random(8);
        let (x, before, gain) = (random.vector(3 * k, 3.0), random.vector(3 * k, 3.0), random.vector(k, 1.0));
        let normed: Vec<f32> = x.chunks_exact(k).flat_map(|x| norm::reference(x, &gain, 1e-5)).collect();
        let (x_rows, gain) = (rig.upload("x", &padded(&x, k, width)), rig.upload("gain", &padded(&gain, k, width)));
        let step_meta = rig.step_meta(1024);
        rig.set_step(&step_meta, &plain_batch(3, 0));
        for is_norm in [true, false] {
            let y = rig.upload("y", &padded(&before, k, width));
            let norm = rig.build(&step_meta, false, |ctx| {
                let (x, gain, y) = (x_rows.whole(), gain.whole(), y.whole());
                let kind = if is_norm { Kind::Rms { gain: &gain } } else { Kind::Copy };
                let target = Target::Add { y: &y, scale: 0.25 };
                Norm::new(ctx, "add", &x, kind, target, (k as u32, 1e-5), RowCount::Tokens)
            });
            let mut recording = Recording::new("add");
            norm.record(&mut recording, 3);
            rig.replay(&recording);
            let added = if is_norm { &normed } else { &x };
            let want: Vec<f32> = before.iter().zip(added).map(|(y, x)| y + 0.25 * x).collect();
            let got: Vec<f32> = rig.read(&y);
            assert_close(&got, &padded(&want, k, width), 4.0 * tolerance::ELEMENT, rig.name);
        }
        let (got, _) = run_rows(rig, 3, width, true, |y| {
            let norm = rig.build(&step_meta, false, |ctx| {
                let (x, y) = (x_rows.whole(), Target::Row(y));
                Norm::new(ctx, "copy", &x, Kind::Copy, y, (k as u32, 1e-5), RowCount::Tokens)
            });
            let mut recording = Recording::new("copy");
            norm.record(&mut recording, 3);
            rig.replay(&recording);
        });
        assert_quantised_close(&got, &padded(&x, k, width), rig.name);
    }
}

#[test]
fn activations_match_the_reference_also_where_exp_would_overflow() {
    for rig in rigs() {
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
            for kind in [MlpKind::Gated, MlpKind::Plain] {
                for k in [88usize, 344] {
                    check_activation(rig, activation, kind, k);
                }
            }
        }
        check_activation(rig, Activation::Silu, MlpKind::Gated, 1536);
        check_activation(rig, Activation::ClampedSwiglu, MlpKind::Gated, 88);
    }
}

fn check_activation(rig: &Rig, activation: Activation, kind: MlpKind, k: usize) {
    let (width, x_stride, up_at) = (stride(k as u32) as usize, 2 * k + 8, k + 4);
    let mut random = Random(k as u64);
    let mut x = random.vector(17 * x_stride, 4.0);
    (x[0], x[1], x[2], x[3]) = (-1000.0, 1000.0, -87.5, 1e-4);
    (x[up_at + 4], x[up_at + 5], x[up_at + 6]) = (-1000.0, 900.0, -5.5);
    let one = |row: &[f32], i: usize| match kind {
        MlpKind::Gated => mlp::gated_reference(activation, row[i], row[up_at + i]),
        MlpKind::Plain => mlp::reference(activation, row[up_at + i]),
    };
    let want: Vec<f32> =
        x.chunks_exact(x_stride).flat_map(|row| (0..k).map(|i| one(row, i)).collect::<Vec<f32>>()).collect();
    let want = padded(&want, k, width);
    let x = rig.upload("x", &x);
    let step_meta = rig.step_meta(1024);
    for is_quantised in [false, true] {
        for count in COUNTS {
            let (got, _) = run_rows(rig, 17, width, is_quantised, |y| {
                let mlp = rig.build(&step_meta, false, |ctx| {
                    let shape = (k as u32, up_at as u32, x_stride as u32, 1);
                    Mlp::new(ctx, "mlp", (kind, activation), &x.whole(), shape, y)
                });
                rig.set_step(&step_meta, &plain_batch(count as u32, 0));
                let mut recording = Recording::new("mlp");
                mlp.record(&mut recording, count as u32);
                rig.replay(&recording);
            });
            let what = format!("{} {activation:?} {kind:?} k {k} count {count}", rig.name);
            let (got, rest) = got.split_at(count * width);
            match is_quantised {
                true => assert_quantised_close(got, &want[..count * width], &what),
                false => assert_close(got, &want[..count * width], 4.0 * tolerance::ELEMENT, &what),
            }
            assert!(rest.iter().all(|v| v.is_nan() || *v == POISON), "{what}: wrote beyond its rows");
        }
    }
}

#[test]
fn logits_are_scaled_and_capped_in_place() {
    for rig in rigs() {
        for (scale, cap) in [(1.0, Some(8.0)), (0.0625, None), (2.0, Some(30.0))] {
            let mut logits = Random(6).vector(5 * 44, 40.0);
            (logits[0], logits[1]) = (1e6, -1e6);
            let buffer = rig.upload("logits", &logits);
            let step_meta = rig.step_meta(1024);
            let mut batch = plain_batch(9, 0);
            batch.logit_tokens = vec![1, 4, 5, 8];
            rig.set_step(&step_meta, &batch);
            let params = logit_cap::Params { stride: 44, scale, cap: cap.unwrap_or(0.0) };
            let kernel = rig.build(&step_meta, false, |ctx| LogitCap::new(ctx, params, &buffer.whole()));
            let mut recording = Recording::new("cap");
            kernel.record(&mut recording, 4);
            rig.replay(&recording);
            let got: Vec<f32> = rig.read(&buffer);
            let want: Vec<f32> = logits[..4 * 44].iter().map(|&x| logit_cap::reference(x, scale, cap)).collect();
            assert_close(&got[..4 * 44], &want, 2.0 * tolerance::ELEMENT, rig.name);
            assert_eq!(got[4 * 44..], logits[4 * 44..], "{}: wrote beyond its rows", rig.name);
        }
    }
}

#[test]
fn quantised_groups_equal_the_reference_and_zeros_stay_zero() {
    for rig in rigs() {
        let width = 96;
        let mut random = Random(4);
        let mut x = random.vector(17 * width, 5.0);
        x[32..64].fill(0.0);
        x[64..96].fill(1e-39);
        x[96..128].fill(-3e38);
        let buffer = rig.upload("x", &x);
        let step_meta = rig.step_meta(1024);
        let (rows, q, scales) = rig.quantised_rows(17, width);
        let quantise =
            rig.build(&step_meta, false, |ctx| Quantise::new(ctx, "q", &buffer.whole(), width as u32, &rows));
        rig.set_step(&step_meta, &plain_batch(17, 0));
        let mut recording = Recording::new("quantise");
        quantise.record(&mut recording, 17);
        rig.replay(&recording);
        let (q, scales): (Vec<i8>, Vec<[f32; 2]>) = (rig.read(&q), rig.read(&scales));
        for (g, x) in x.chunks_exact(32).enumerate() {
            let (want_q, want_scales) = quantise::reference(x);
            let got_q = &q[32 * g..][..32];
            let furthest = got_q.iter().zip(&want_q).map(|(a, b)| (i16::from(*a) - i16::from(*b)).abs()).max().unwrap();
            // A division that is off by one unit may tip a value that lies half way.
            assert!(furthest <= 1, "{} group {g}", rig.name);
            if g != 2 {
                assert!((scales[g][0] - want_scales[0]).abs() <= 1e-6 * want_scales[0].abs(), "{} group {g}", rig.name);
            }
        }
        assert!(q[32..96].iter().all(|q| *q == 0), "{}", rig.name);
        assert_eq!(scales[1], [0.0, 0.0]);
    }
}

#[test]
fn embedded_rows_equal_the_dequantised_table_also_when_it_is_sliced() {
    for rig in rigs() {
        for dtype in weight_types(rig) {
            let k = match dtype.block_elements() {
                1 => 88,
                32 => 96,
                _ => 512,
            };
            let (n, width) = (200usize, stride(k as u32) as usize);
            let mut random = Random(9);
            let bytes = random_weights(dtype, n, k, &mut random);
            let mut table = vec![0f32; n * k];
            dequantize(dtype, &bytes, &mut table).unwrap();
            let mut batch = plain_batch(9, 0);
            batch.input_ids = vec![0, 199, 63, 64, 127, 128, 5, 5, 70];
            let want: Vec<f32> =
                batch.input_ids.iter().flat_map(|&id| table[id as usize * k..][..k].to_vec()).collect();
            let step_meta = rig.step_meta(1024);
            rig.set_step(&step_meta, &batch);
            for max_plane_bytes in [u64::MAX, 64 * 4 * 96 + 64 * 4 * 512] {
                let mut uploader = Uploader::new(&rig.gpu);
                let packed = PackedMatrix::upload_sliced(
                    &rig.gpu,
                    &mut uploader,
                    "table",
                    dtype,
                    k as u32,
                    &[&bytes],
                    max_plane_bytes,
                )
                .unwrap();
                let x = rig.filled("x", 10 * width, POISON);
                let embed = rig.build(&step_meta, false, |ctx| Embed::new(ctx, &packed, &x.whole(), 1.0));
                let mut recording = Recording::new("embed");
                embed.record(&mut recording, 9);
                rig.replay(&recording);
                let got: Vec<f32> = rig.read(&x);
                let (got, rest) = got.split_at(9 * width);
                let slices = packed.slices.len();
                assert_close(got, &padded(&want, k, width), 2e-7, &format!("{} {dtype} {slices} slices", rig.name));
                assert!(rest.iter().all(|v| *v == POISON));
            }
        }
    }
}

#[test]
fn embeddings_are_scaled_and_positions_are_added() {
    for rig in rigs() {
        let (n, k, width) = (70usize, 88usize, stride(88) as usize);
        let mut random = Random(21);
        let (table, places) = (random.vector(n * k, 1.0), random.vector(n * k, 1.0));
        let mut batch = plain_batch(3, 0);
        (batch.input_ids, batch.positions) = (vec![69, 0, 5], vec![4, 66, 5]);
        let step_meta = rig.step_meta(1024);
        rig.set_step(&step_meta, &batch);
        let mut uploader = Uploader::new(&rig.gpu);
        let pack = |uploader: &mut Uploader<'_>, values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            PackedMatrix::upload(&rig.gpu, uploader, "table", DType::F32, k as u32, &[&bytes]).expect("packs")
        };
        let (packed, packed_places) = (pack(&mut uploader, &table), pack(&mut uploader, &places));
        let x = rig.filled("x", 3 * width, POISON);
        let mut recording = Recording::new("embed");
        let embed = rig.build(&step_meta, false, |ctx| Embed::new(ctx, &packed, &x.whole(), 8.5));
        let add = rig.build(&step_meta, false, |ctx| Embed::positions(ctx, &packed_places, &x.whole()));
        embed.record(&mut recording, 3);
        add.record(&mut recording, 3);
        rig.replay(&recording);
        let ids = batch.input_ids.iter().zip(&batch.positions);
        let row = |values: &[f32], i: u32| values[i as usize * k..][..k].to_vec();
        let want: Vec<f32> = ids
            .flat_map(|(&id, &p)| row(&table, id).into_iter().zip(row(&places, p)).map(|(a, b)| 8.5 * a + b))
            .collect();
        let got: Vec<f32> = rig.read(&x);
        assert_close(&got, &padded(&want, k, width), tolerance::ELEMENT, rig.name);
    }
}
