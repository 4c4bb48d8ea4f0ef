//! Products of every weight type against a plain f64 sum, and the same bits whatever the number of tokens.

use std::time::Duration;

use kvasir::gpu::{GpuError, Recording};
use kvasir::kernels::matmul::{Matmul, Output, Precision, reference};
use kvasir::kernels::measure::{self, Shape};
use kvasir::kernels::pack::Format;
use kvasir::kernels::{Activations, PackedMatrix, RowCount, quantise, stride};
use kvasir::model::dtype::DType;
use kvasir::model::quant::dequantize;

use super::harness::{Random, Rig, assert_close, padded, plain_batch, random_weights, rigs, tolerance, weight_types};

const MAX_TOKENS: usize = 17;
/// Every tile, full and with a rest.
const COUNTS: &[usize] = &[17, 1, 2, 4, 5, 8, 9, 16];
/// The widest tile with a rest, and the narrowest: how weights are read knows nothing of tiles.
const FEW_COUNTS: &[usize] = &[17, 1];
const POISON: f32 = 12345.0;

/// One matrix and its activations on one device.
struct Case<'a> {
    rig: &'a Rig,
    dtype: DType,
    n: usize,
    k: usize,
    is_i8: bool,
    multiply_pairs: bool,
    counts: &'static [usize],
}

impl Case<'_> {
    fn name(&self) -> String {
        let Case { rig, dtype, n, k, is_i8, multiply_pairs, .. } = self;
        format!("{} {dtype} {n}x{k} i8 {is_i8} pairs {multiply_pairs}", rig.name)
    }

    /// Runs every token count; results must be near the reference and equal between counts.
    fn check(&self) {
        let mut random = Random(self.n as u64 * 31 + self.k as u64);
        let bytes = random_weights(self.dtype, self.n, self.k, &mut random);
        let mut w = vec![0f32; self.n * self.k];
        dequantize(self.dtype, &bytes, &mut w).unwrap();
        let weights = self.rig.weights(self.dtype, self.k, &bytes);
        let x = random.vector(MAX_TOKENS * self.k, 2.0);
        let bias = random.vector(self.n, 0.5);
        let (results, x_used) = self.run(&weights, &x, &bias);
        let mut want = reference(&w, &x_used, self.k);
        for row in want.chunks_exact_mut(self.n) {
            row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b);
        }
        assert_close(&results[0], &want, tolerance::SUM, &self.name());
        for (count, result) in self.counts.iter().zip(&results) {
            let same = result.iter().zip(&results[0]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{}: {count} tokens give other bits than {MAX_TOKENS}", self.name());
        }
    }

    /// y `[count, n]` for each of its counts, and the activations as the kernel sees them.
    fn run(&self, weights: &PackedMatrix, x: &[f32], bias: &[f32]) -> (Vec<Vec<f32>>, Vec<f32>) {
        let rig = self.rig;
        let x_stride = stride(self.k as u32) as usize;
        let x_padded = padded(x, self.k, x_stride);
        let (q_bytes, scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) =
            x_padded.chunks_exact(32).map(quantise::reference).unzip();
        let f32_rows = rig.upload("x", &x_padded);
        let (i8_rows, q, s) = rig.quantised_rows(MAX_TOKENS, x_stride);
        rig.gpu.write(&q.whole(), bytemuck::cast_slice(&q_bytes.concat()));
        rig.gpu.write(&s.whole(), bytemuck::cast_slice(&scales));
        let bias = rig.upload("bias", bias);
        let (offset, y_stride) = (3, self.n + 5);
        let y = rig.filled("y", (MAX_TOKENS + 1) * y_stride, POISON);
        let step_meta = rig.step_meta(1024);
        let x = if self.is_i8 { Activations::I8(&i8_rows) } else { Activations::F32(&f32_rows.whole()) };
        let y_whole = y.whole();
        let output = Output { slice: &y_whole, stride: y_stride as u32, offset: offset as u32, accumulate: false };
        let matmul = rig.build(&step_meta, self.multiply_pairs, |ctx| {
            Matmul::new(ctx, "product", weights, x, output, Some(&bias.whole()), RowCount::Tokens)
        });
        let results = self.counts.iter().map(|&count| {
            rig.gpu.write(&y.whole(), bytemuck::cast_slice(&vec![POISON; (MAX_TOKENS + 1) * y_stride]));
            rig.set_step(&step_meta, &plain_batch(count as u32, 0));
            let mut recording = Recording::new("product");
            matmul.record(&mut recording, count as u32);
            rig.replay(&recording);
            let all: Vec<f32> = rig.read(&y);
            for (i, value) in all.iter().enumerate() {
                let inside = i / y_stride < count && (offset..offset + self.n).contains(&(i % y_stride));
                assert!(inside || *value == POISON, "{}: wrote outside at {i}", self.name());
            }
            (0..count).flat_map(|t| all[t * y_stride + offset..][..self.n].to_vec()).collect()
        });
        let results: Vec<Vec<f32>> = results.collect();
        let x_used = if self.is_i8 {
            let dequantised = q_bytes.iter().zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0]));
            dequantised.collect::<Vec<f32>>().chunks_exact(x_stride).flat_map(|row| row[..self.k].to_vec()).collect()
        } else {
            x_padded.chunks_exact(x_stride).flat_map(|row| row[..self.k].to_vec()).collect()
        };
        (results, x_used)
    }
}

/// Partial blocks of rows, partial passes over k, padding; the last alone has several workgroups.
fn shapes(dtype: DType) -> &'static [(usize, usize)] {
    match dtype.block_elements() {
        1 => &[(65, 88), (1, 32)],
        32 => &[(200, 160), (3, 32), (64, 96)],
        64 => &[(130, 192), (3, 64)],
        _ => &[(130, 768), (70, 256)],
    }
}

/// Types that are read in ways of their own and are met often: these see all tiles and shapes.
fn is_common(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Q8_0 | DType::Q4_1 | DType::Q4_K | DType::Q6_K)
}

#[test]
fn products_match_the_reference_and_do_not_depend_on_the_number_of_tokens() {
    for rig in rigs() {
        for dtype in weight_types(rig) {
            let format = Format::of(dtype);
            let all = is_common(dtype) && rig.name.ends_with("trusted");
            let (shapes, counts) = if all { (shapes(dtype), COUNTS) } else { (&shapes(dtype)[..1], FEW_COUNTS) };
            for &(n, k) in shapes {
                let case = |is_i8, multiply_pairs| Case { rig, dtype, n, k, is_i8, multiply_pairs, counts }.check();
                case(false, false);
                if format.takes_i8() {
                    case(true, false);
                }
                if format.is_four_bit() {
                    case(true, true);
                }
            }
        }
    }
}

#[test]
fn multiplying_in_pairs_changes_no_bit() {
    for rig in rigs() {
        for dtype in [DType::Q4_0, DType::Q4_1, DType::Q4_K] {
            let counts = COUNTS;
            let case = |multiply_pairs| Case { rig, dtype, n: 100, k: 512, is_i8: true, multiply_pairs, counts };
            let mut random = Random(5);
            // Extreme integers of both signs: where a sum could leave its half of the word.
            let mut bytes = random_weights(dtype, 100, 512, &mut random);
            bytes.chunks_exact_mut(dtype.block_bytes()).step_by(2).for_each(|b| {
                let nibbles = b.len() - dtype.block_elements() / 2;
                b[nibbles..].fill(0xff);
            });
            let weights = rig.weights(dtype, 512, &bytes);
            let x: Vec<f32> = (0..MAX_TOKENS * 512).map(|i| if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
            let bias = vec![0.0; 100];
            let plain = case(false).run(&weights, &x, &bias).0;
            let pairs = case(true).run(&weights, &x, &bias).0;
            assert!(plain == pairs, "{} {dtype}", rig.name);
        }
    }
}

#[test]
fn slices_of_a_matrix_and_parts_of_a_fused_one_join_without_a_seam() {
    for rig in rigs() {
        let (n, k) = (300usize, 96usize);
        let mut random = Random(3);
        let bytes = random_weights(DType::Q8_0, n, k, &mut random);
        let row_bytes = bytes.len() / n;
        let (first, second) = bytes.split_at(37 * row_bytes);
        let mut uploader = kvasir::gpu::Uploader::new(&rig.gpu);
        // 64 rows of 96 elements have 6144 bytes: two blocks to a slice.
        let sliced = PackedMatrix::upload_sliced(
            &rig.gpu,
            &mut uploader,
            "sliced",
            DType::Q8_0,
            k as u32,
            &[first, second],
            2 * 6144 + 100,
        )
        .unwrap();
        let rows: Vec<(u32, u32)> = sliced.slices.iter().map(|s| (s.first_row, s.num_rows)).collect();
        assert_eq!(rows, [(0, 128), (128, 128), (256, 44)]);
        assert_eq!(sliced.n, 300);
        let case = Case { rig, dtype: DType::Q8_0, n, k, is_i8: false, multiply_pairs: false, counts: FEW_COUNTS };
        let (x, bias) = (random.vector(MAX_TOKENS * k, 1.0), random.vector(n, 1.0));
        let whole = case.run(&rig.weights(DType::Q8_0, k, &bytes), &x, &bias).0;
        assert!(case.run(&sliced, &x, &bias).0 == whole, "{}", rig.name);
    }
}

#[test]
fn accumulation_adds_to_the_residual_and_logit_rows_are_counted_apart() {
    for rig in rigs() {
        let (n, k) = (40usize, 64usize);
        let mut random = Random(11);
        let bytes = random_weights(DType::Q4_1, n, k, &mut random);
        let weights = rig.weights(DType::Q4_1, k, &bytes);
        let mut w = vec![0f32; n * k];
        dequantize(DType::Q4_1, &bytes, &mut w).unwrap();
        let x = random.vector(3 * k, 1.0);
        let residual = random.vector(3 * n, 1.0);
        let (x_buffer, y) = (rig.upload("x", &x), rig.upload("y", &residual));
        let step_meta = rig.step_meta(256);
        let y_whole = y.whole();
        let output = Output { slice: &y_whole, stride: n as u32, offset: 0, accumulate: true };
        let matmul = rig.build(&step_meta, false, |ctx| {
            let x = x_buffer.whole();
            Matmul::new(ctx, "head", &weights, Activations::F32(&x), output, None, RowCount::Logits)
        });
        rig.set_step(&step_meta, &plain_batch(3, 2));
        let mut recording = Recording::new("head");
        matmul.record(&mut recording, 2);
        rig.replay(&recording);
        let mut want = reference(&w, &x, k);
        want.iter_mut().zip(&residual).for_each(|(y, r)| *y += r);
        want[2 * n..].copy_from_slice(&residual[2 * n..]);
        assert_close(&rig.read::<f32>(&y), &want, tolerance::SUM, rig.name);
    }
}

#[test]
fn a_step_without_tokens_writes_nothing() {
    for rig in rigs() {
        let weights = rig.weights(DType::F32, 32, bytemuck::cast_slice(&[1f32; 64 * 32]));
        let (x, y) = (rig.filled("x", 32, 1.0), rig.filled("y", 64, POISON));
        let step_meta = rig.step_meta(64);
        let y_whole = y.whole();
        let output = Output { slice: &y_whole, stride: 64, offset: 0, accumulate: false };
        let matmul = rig.build(&step_meta, false, |ctx| -> Result<Matmul, GpuError> {
            Matmul::new(ctx, "warm up", &weights, Activations::F32(&x.whole()), output, None, RowCount::Tokens)
        });
        let mut recording = Recording::new("warm up");
        matmul.record(&mut recording, 1);
        rig.replay(&recording);
        assert!(rig.read::<f32>(&y).iter().all(|v| *v == POISON), "{}", rig.name);
    }
}

#[test]
fn measuring_a_product_gives_a_time() {
    let Some(rig) = rigs().first() else { return };
    let shape = Shape { dtype: DType::Q4_1, precision: Precision::I8, m: 4, n: 576, k: 576 };
    let measured = measure::product(&rig.gpu, shape, Duration::from_millis(100)).unwrap();
    assert!(measured.us > 0.0 && measured.gflops.is_finite(), "{measured:?}");
}

#[test]
fn the_peaks_of_an_adapter_are_measured() {
    let Some(rig) = rigs().first() else { return };
    let peaks = measure::peaks::peaks(&rig.gpu, Duration::from_millis(30)).unwrap();
    assert!(peaks.stream_gb_per_s > 0.01 && peaks.fma_gflops > 0.01, "{peaks:?}");
}
