//! Products that do more than multiply: the factor of a folded norm, the hidden state with what the next norm's readers
//! take, and gate and up with what stands between them and down.

use kvasir::gpu::{Buffer, Recording};
use kvasir::kernels::context::RmsFactor;
use kvasir::kernels::matmul::{Fusion, Matmul, Output, Target, reference};
use kvasir::kernels::norm::{self, Kind, Norm};
use kvasir::kernels::pack::Format;
use kvasir::kernels::{Activations, QuantisedRows, RowCount, mlp, quantise, stride};
use kvasir::model::dtype::DType;
use kvasir::model::quant::dequantize;
use kvasir::model::spec::Activation;

use super::harness::{Random, Rig, assert_close, padded, plain_batch, random_weights, rigs, tolerance};

const MAX_TOKENS: usize = 17;
const COUNTS: [usize; 5] = [17, 1, 2, 4, 9];
const EPS: f32 = 1e-5;

/// Quantised rows with room for sums of squares, and their buffers.
fn folded_rows(rig: &Rig, width: usize) -> (QuantisedRows, Buffer, Buffer) {
    let q = rig.upload("xq", &vec![0x7f7f_7f7fu32; MAX_TOKENS * width / 4]);
    let scales = rig.filled("xs", MAX_TOKENS * width / 8, f32::NAN);
    (QuantisedRows { q: q.whole(), scales: scales.whole() }, q, scales)
}

/// The values that quantised rows stand for, `[rows, width]`, and the sums of squares behind their scales.
fn values(rig: &Rig, q: &Buffer, scales: &Buffer) -> (Vec<f32>, Vec<f32>) {
    let (q, scales): (Vec<i8>, Vec<[f32; 2]>) = (rig.read(q), rig.read(scales));
    let groups = q.len() / 32;
    let values = q.chunks_exact(32).zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0]));
    for (q, s) in q.chunks_exact(32).zip(&scales).filter(|(_, s)| !s[0].is_nan()) {
        let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
        assert!((s[1] - s[0] * sum as f32).abs() <= 1e-6 * s[0].abs() * 4064.0, "{}: sum of a group", rig.name);
    }
    (values.collect(), scales[groups.min(scales.len())..].iter().map(|s| s[0]).collect())
}

fn rigs_that_fuse() -> impl Iterator<Item = &'static Rig> {
    rigs().iter().filter(|rig| Fusion::is_possible(rig.class))
}

fn dequantised(dtype: DType, bytes: &[u8], elements: usize) -> Vec<f32> {
    let mut w = vec![0f32; elements];
    dequantize(dtype, bytes, &mut w).unwrap();
    w
}

#[test]
fn a_folded_norm_and_its_product_make_a_norm_and_a_product() {
    for rig in rigs_that_fuse() {
        for (dtype, n, k) in [(DType::Q4_1, 130, 576), (DType::Q8_0, 70, 96), (DType::Q6_K, 65, 256)] {
            let mut random = Random(21);
            let bytes = random_weights(dtype, n, k, &mut random);
            let (w, weights) = (dequantised(dtype, &bytes, n * k), rig.weights(dtype, k, &bytes));
            let (x, gain, bias) = (random.vector(MAX_TOKENS * k, 3.0), random.vector(k, 1.0), random.vector(n, 0.5));
            let (rows, q, scales) = folded_rows(rig, k);
            let (x_rows, gain_row, bias_row) = (rig.upload("x", &x), rig.upload("gain", &gain), rig.upload("b", &bias));
            let y = rig.filled("y", MAX_TOKENS * n, 0.0);
            let step_meta = rig.step_meta(1024);
            let pairs = Format::of(dtype).is_four_bit();
            let (norm, product) = rig.build(&step_meta, pairs, |ctx| {
                let (x, gain, y) = (x_rows.whole(), gain_row.whole(), y.whole());
                let size = (k as u32, EPS);
                let kind = Kind::Rms { gain: &gain };
                let norm = Norm::new(ctx, "norm", &x, kind, norm::Target::Folded(&rows), size, RowCount::Tokens)?;
                let x = Activations::Folded(&rows, RmsFactor { k: k as u32, eps: EPS });
                let out = Target::Sums(Output { slice: &y, stride: n as u32, offset: 0, accumulate: false });
                Ok((norm, Matmul::to(ctx, "product", &weights, x, out, Some(&bias_row.whole()), RowCount::Tokens)?))
            });
            let mut first: Vec<f32> = Vec::new();
            for count in COUNTS {
                rig.set_step(&step_meta, &plain_batch(count as u32, 0));
                let mut recording = Recording::new("folded");
                norm.record(&mut recording, count as u32);
                product.record(&mut recording, count as u32);
                rig.replay(&recording);
                let got: Vec<f32> = rig.read(&y)[..count * n].to_vec();
                if first.is_empty() {
                    let (weighted, squares) = values(rig, &q, &scales);
                    let exact: Vec<f32> = x.iter().zip(gain.iter().cycle()).map(|(x, g)| x * g).collect();
                    assert_close(&weighted, &exact, 0.5 / 127.0 + 1e-5, rig.name);
                    let exact: Vec<f32> = x.chunks_exact(32).map(|g| g.iter().map(|v| v * v).sum()).collect();
                    assert_close(&squares, &exact, tolerance::SUM, rig.name);
                    let mut used = weighted;
                    for (row, x) in used.chunks_exact_mut(k).zip(x.chunks_exact(k)) {
                        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / k as f64;
                        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                        row.iter_mut().for_each(|v| *v = (f64::from(*v) * factor) as f32);
                    }
                    let mut want = reference(&w, &used, k);
                    want.chunks_exact_mut(n).for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
                    assert_close(&got, &want, tolerance::SUM, &format!("{} {dtype}", rig.name));
                    first = got;
                } else {
                    let same = got.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{} {dtype}: {count} tokens give other bits", rig.name);
                }
            }
        }
    }
}

#[test]
fn a_product_adds_to_the_hidden_state_and_writes_what_the_next_norm_reads() {
    for rig in rigs_that_fuse() {
        for (dtype, n, k) in [(DType::Q4_1, 576, 64), (DType::Q4_0, 88, 96), (DType::Q8_0, 130, 32)] {
            let width = stride(n as u32) as usize;
            let mut random = Random(22);
            let bytes = random_weights(dtype, n, k, &mut random);
            let (w, weights) = (dequantised(dtype, &bytes, n * k), rig.weights(dtype, k, &bytes));
            let x = random.vector(MAX_TOKENS * k, 2.0);
            let (before, gain) = (random.vector(MAX_TOKENS * n, 3.0), random.vector(n, 1.0));
            let (x_q, x_scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) = x.chunks_exact(32).map(quantise::reference).unzip();
            let used: Vec<f32> =
                x_q.iter().zip(&x_scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect();
            let x_rows =
                QuantisedRows { q: rig.upload("q", &x_q.concat()).whole(), scales: rig.upload("s", &x_scales).whole() };
            let (folded, q, scales) = folded_rows(rig, width);
            let (hidden, gain_row) =
                (rig.filled("h", MAX_TOKENS * width, 0.0), rig.upload("g", &padded(&gain, n, width)));
            let step_meta = rig.step_meta(1024);
            let product = rig.build(&step_meta, Format::of(dtype).is_four_bit(), |ctx| {
                let (x, gain) = (hidden.whole(), gain_row.whole());
                let target = Target::Hidden { x: &x, gain: &gain, folded: &folded };
                Matmul::to(ctx, "o", &weights, Activations::I8(&x_rows), target, None, RowCount::Tokens)
            });
            let mut want = reference(&w, &used, k);
            want.iter_mut().zip(&before).for_each(|(y, b)| *y += b);
            let mut first: Option<(Vec<u32>, Vec<u32>, Vec<u32>)> = None;
            for count in COUNTS {
                let before = padded(&before, n, width);
                rig.gpu.write(&hidden.whole(), bytemuck::cast_slice(&before));
                rig.gpu.write(&scales.whole(), bytemuck::cast_slice(&vec![f32::NAN; MAX_TOKENS * width / 8]));
                rig.set_step(&step_meta, &plain_batch(count as u32, 0));
                let mut recording = Recording::new("hidden");
                product.record(&mut recording, count as u32);
                rig.replay(&recording);
                let got: Vec<f32> = rig.read(&hidden);
                assert_eq!(got[count * width..], before[count * width..], "{}: wrote beyond its rows", rig.name);
                let got = got[..count * width].to_vec();
                let what = format!("{} {dtype} {n}x{k} count {count}", rig.name);
                assert_close(&got, &padded(&want[..count * n], n, width), tolerance::SUM, &what);
                let (weighted, squares) = values(rig, &q, &scales);
                assert!(weighted[count * width..].iter().all(|v| v.is_nan()), "{what}: wrote beyond its rows");
                for (row, got) in got.chunks_exact(width).enumerate() {
                    let exact: Vec<f32> =
                        got.iter().zip(gain.iter().chain([&0.0].into_iter().cycle())).map(|(x, g)| x * g).collect();
                    for (g, exact) in exact.chunks_exact(32).enumerate() {
                        let step = exact.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
                        let stored = &weighted[row * width + 32 * g..][..32];
                        assert!(
                            exact.iter().zip(stored).all(|(a, b)| (a - b).abs() <= 0.501 * step),
                            "{what} group {g}"
                        );
                        let sum: f32 = got[32 * g..][..32].iter().map(|v| v * v).sum();
                        assert!((squares[row * width / 32 + g] - sum).abs() <= 1e-5 * sum, "{what} squares {g}");
                    }
                }
                let bits = |v: &[f32], n: usize| v[..n].iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
                let now = (bits(&got, width), bits(&weighted, width), bits(&squares, width / 32));
                assert_eq!(*first.get_or_insert_with(|| now.clone()), now, "{what}: other bits");
            }
        }
    }
}

#[test]
fn gate_and_up_are_one_product_with_what_stands_behind_them() {
    for rig in rigs_that_fuse() {
        let all = [
            (DType::Q4_1, Activation::Silu, 96, 576),
            (DType::Q4_0, Activation::GeluTanh, 56, 64),
            (DType::Q4_K, Activation::ClampedSwiglu, 40, 256),
            (DType::Q4_1, Activation::Relu, 32, 96),
        ];
        for (dtype, activation, size, k) in all {
            let width = stride(size as u32) as usize;
            let mut random = Random(23);
            let bytes = random_weights(dtype, 2 * size, k, &mut random);
            let w = dequantised(dtype, &bytes, 2 * size * k);
            let row_bytes = bytes.len() / (2 * size);
            let bias = random.vector(2 * size, 0.5);
            let (mut turns, mut turned_bias) = (Vec::new(), Vec::new());
            for first in (0..width).step_by(32) {
                for half in [0, size] {
                    for i in first..first + 32 {
                        let row = (i < size).then_some(half + i);
                        turns.extend(row.map_or(vec![0; row_bytes], |r| bytes[r * row_bytes..][..row_bytes].to_vec()));
                        turned_bias.push(row.map_or(0.0, |r| bias[r]));
                    }
                }
            }
            let weights = rig.weights(dtype, k, &turns);
            if !Fusion::can_gate(weights.format, rig.class) {
                continue;
            }
            let x = random.vector(MAX_TOKENS * k, 1.0);
            let (x_q, x_scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) = x.chunks_exact(32).map(quantise::reference).unzip();
            let used: Vec<f32> =
                x_q.iter().zip(&x_scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect();
            let x_rows =
                QuantisedRows { q: rig.upload("q", &x_q.concat()).whole(), scales: rig.upload("s", &x_scales).whole() };
            let (out, q, scales) = rig.quantised_rows(MAX_TOKENS, width);
            let bias_row = rig.upload("bias", &turned_bias);
            let step_meta = rig.step_meta(1024);
            let product = rig.build(&step_meta, true, |ctx| {
                let target = Target::Gated { activation, y: &out };
                let x = Activations::I8(&x_rows);
                Matmul::to(ctx, "gate+up", &weights, x, target, Some(&bias_row.whole()), RowCount::Tokens)
            });
            let sums = reference(&w, &used, k);
            let gated = |t: usize, i: usize| {
                let sum = |row: usize| sums[t * 2 * size + row] + bias[row];
                mlp::gated_reference(activation, sum(i), sum(size + i))
            };
            let want: Vec<f32> = (0..MAX_TOKENS).flat_map(|t| (0..size).map(move |i| gated(t, i))).collect();
            let want = padded(&want, size, width);
            let mut first: Vec<f32> = Vec::new();
            for count in COUNTS {
                rig.set_step(&step_meta, &plain_batch(count as u32, 0));
                let mut recording = Recording::new("gated");
                product.record(&mut recording, count as u32);
                rig.replay(&recording);
                let got = values(rig, &q, &scales).0[..count * width].to_vec();
                let what = format!("{} {dtype} {activation:?} count {count}", rig.name);
                for (g, (got, want)) in got.chunks(32).zip(want.chunks(32)).enumerate() {
                    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
                    let near = got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 0.51 * largest / 127.0);
                    assert!(near, "{what} group {g}");
                }
                let same = got.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{what}: other bits");
                first = if first.is_empty() { got } else { first };
            }
        }
    }
}
