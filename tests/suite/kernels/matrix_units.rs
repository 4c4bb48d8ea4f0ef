//! Products by cooperative matrices, on adapters that have some: near the reference, with everything that a product does
//! beside multiplying; elsewhere they are refused by the adapter's name.

use kvasir::gpu::{Buffer, BufferSlice, Gpu, GpuError, GpuRequest, Recording};
use kvasir::kernels::context::RmsFactor;
use kvasir::kernels::matmul::{Fusion, Matmul, Output, Target, reference};
use kvasir::kernels::pack::Format;
use kvasir::kernels::{Activations, KernelContext, QuantisedRows, RowCount, matrix_units, quantise, step_meta, stride};
use kvasir::model::dtype::DType;
use kvasir::model::quant::dequantize;
use kvasir::model::spec::Activation;

use super::harness::{
    Random, Rig, assert_close, padded, plain_batch, random_weights, relative_error, tolerance, weight_types,
};
use crate::support::require_gpu;

/// More than a workgroup has.
const MAX_TOKENS: usize = 37;
/// Two workgroups of tokens, a whole one, and the fewest.
const COUNTS: [usize; 3] = [MAX_TOKENS, 32, matrix_units::MIN_TOKENS as usize];
const POISON: f32 = 12345.0;

fn request(checked_shaders: bool) -> GpuRequest {
    GpuRequest { backend: None, adapter: None, floor: false, checked_shaders, matrix_units: true }
}

/// Devices that were opened for matrix units, with and without checks; none, with a line printed, where the adapter has none.
fn rigs() -> Vec<Rig> {
    let mut rigs = Vec::new();
    for (name, checked) in [("units", false), ("checked", true)] {
        match Gpu::open(&request(checked)) {
            Ok(gpu) => rigs.push(Rig::new(name, gpu)),
            Err(GpuError::NoMatrixUnits(message)) => println!("skipped: {message}"),
            Err(GpuError::NoAdapter(message)) if !require_gpu() => println!("skipped: {message}"),
            Err(error) => panic!("{name}: {error}"),
        }
    }
    rigs
}

/// A matrix with its values.
struct Weights {
    dtype: DType,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl Weights {
    fn random(dtype: DType, n: usize, k: usize, random: &mut Random) -> Weights {
        let bytes = random_weights(dtype, n, k, random);
        let mut values = vec![0f32; n * k];
        dequantize(dtype, &bytes, &mut values).unwrap();
        Weights { dtype, n, k, bytes, values }
    }

    fn name(&self, rig: &Rig) -> String {
        format!("{} {} {}x{}", rig.name, self.dtype, self.n, self.k)
    }
}

/// Rows as f32 and as signed bytes with room for sums of squares, and what the bytes stand for.
struct Rows {
    f32: BufferSlice,
    i8: QuantisedRows,
    used: Vec<f32>,
}

impl Rows {
    /// `x` is `[MAX_TOKENS, k]`, a row's squares as they are.
    fn new(rig: &Rig, x: &[f32], k: usize) -> Rows {
        let width = stride(k as u32) as usize;
        let x = padded(x, k, width);
        let (q, scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) = x.chunks_exact(32).map(quantise::reference).unzip();
        let values = q.iter().zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0]));
        let used = values.collect::<Vec<f32>>().chunks_exact(width).flat_map(|row| row[..k].to_vec()).collect();
        let squares = x.chunks_exact(32).map(|group| [group.iter().map(|v| v * v).sum::<f32>(), 0.0]);
        let scales: Vec<[f32; 2]> = scales.iter().copied().chain(squares).collect();
        let i8 = QuantisedRows { q: rig.upload("q", &q.concat()).whole(), scales: rig.upload("s", &scales).whole() };
        Rows { f32: rig.upload("x", &x).whole(), i8, used }
    }
}

fn run(rig: &Rig, product: &Matmul, count: usize) {
    let mut recording = Recording::new("product");
    product.record(&mut recording, count as u32);
    let by_units = recording.to_string().contains("matmul_units");
    assert_eq!(by_units, count >= matrix_units::MIN_TOKENS as usize, "{recording}");
    rig.replay(&recording);
}

#[test]
fn products_of_many_tokens_match_the_reference_for_every_type_of_weights() {
    for rig in &rigs() {
        // What checks find knows nothing of types.
        let types = weight_types(rig).into_iter();
        for dtype in types.filter(|dtype| rig.name != "checked" || matches!(dtype, DType::Q4_1 | DType::F16)) {
            let k = match dtype.block_elements() {
                1 => 88,
                32 => 160,
                64 => 192,
                _ => 512,
            };
            let mut random = Random(31);
            let weights = Weights::random(dtype, 130, k, &mut random);
            let packed = rig.weights(dtype, k, &weights.bytes);
            let (x, bias) = (random.vector(MAX_TOKENS * k, 2.0), random.vector(weights.n, 0.5));
            let rows = Rows::new(rig, &x, k);
            let bias_row = rig.upload("bias", &bias);
            // As products are made; f32 rows are read alike whatever the weights.
            let kinds = match Format::of(dtype).takes_i8() {
                true if dtype == DType::Q4_1 => &[true, false][..],
                true => &[true],
                false => &[false],
            };
            for &is_i8 in kinds {
                let (offset, y_stride) = (3, weights.n + 5);
                let y = rig.filled("y", (MAX_TOKENS + 1) * y_stride, POISON);
                let step = rig.step_meta(1024);
                let product = rig.build(&step, true, |ctx| {
                    let x = if is_i8 { Activations::I8(&rows.i8) } else { Activations::F32(&rows.f32) };
                    let slice = &y.whole();
                    let out = Output { slice, stride: y_stride as u32, offset: offset as u32, accumulate: false };
                    Matmul::new(ctx, "product", &packed, x, out, Some(&bias_row.whole()), RowCount::Tokens)
                });
                let mut want = reference(&weights.values, if is_i8 { &rows.used } else { &x }, k);
                want.chunks_exact_mut(weights.n).for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));
                for count in COUNTS {
                    rig.gpu.write(&y.whole(), bytemuck::cast_slice(&vec![POISON; (MAX_TOKENS + 1) * y_stride]));
                    rig.set_step(&step, &plain_batch(count as u32, 0));
                    run(rig, &product, count);
                    let all: Vec<f32> = rig.read(&y);
                    let inside =
                        |i: usize| i / y_stride < count && (offset..offset + weights.n).contains(&(i % y_stride));
                    let what = format!("{} i8 {is_i8} {count} tokens", weights.name(rig));
                    assert!(all.iter().enumerate().all(|(i, v)| inside(i) || *v == POISON), "{what}: wrote outside");
                    let got: Vec<f32> = all.iter().enumerate().filter(|(i, _)| inside(*i)).map(|(_, v)| *v).collect();
                    assert_close(&got, &want[..count * weights.n], tolerance::HALF, &what);
                }
            }
        }
    }
}

/// What each output holds after `count` tokens, by cooperative matrices and without, each from the same start.
fn both(
    rig: &Rig,
    (step, count): (&Buffer, usize),
    outputs: &[&Buffer],
    build: &dyn Fn(&mut KernelContext<'_>) -> Result<Matmul, GpuError>,
) -> [Vec<Vec<f32>>; 2] {
    let start: Vec<Vec<u8>> = outputs.iter().map(|b| rig.read(b)).collect();
    [rig.gpu.matrix_units(), None].map(|units| {
        let product = rig.build(step, true, |ctx| {
            ctx.matrix_units = units;
            build(ctx)
        });
        let mut recording = Recording::new("product");
        product.record(&mut recording, count as u32);
        assert_eq!(recording.to_string().contains("matmul_units"), units.is_some(), "{recording}");
        rig.replay(&recording);
        let read = outputs.iter().map(|b| rig.read(b)).collect();
        outputs.iter().zip(&start).for_each(|(b, bytes)| rig.gpu.write(&b.whole(), bytes));
        read
    })
}

/// Signed bytes with their scales, `[rows, width]`, as the numbers that they stand for; NaN where nothing was written.
fn values(q: &[f32], scales: &[f32]) -> Vec<f32> {
    let bytes: &[i8] = bytemuck::cast_slice(q);
    let groups = bytes.chunks_exact(32).zip(scales.chunks_exact(2));
    groups.flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect()
}

/// Near, and written in the same places; values that were rounded to bytes may be one step apart.
#[track_caller]
fn assert_alike(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    assert!(got.iter().zip(want).all(|(a, b)| a.is_nan() == b.is_nan()), "{what}: written elsewhere");
    let written = |v: &[f32]| v.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<f32>>();
    assert_close(&written(got), &written(want), tolerance, what);
}

const STEP: f32 = 1.05 / 127.0;

#[test]
fn what_a_product_does_beside_multiplying_is_done_alike() {
    for rig in rigs().iter().filter(|rig| Fusion::is_possible(rig.class)) {
        let mut random = Random(32);
        let (size, k) = (88, 192);
        let weights = Weights::random(DType::Q4_1, size, k, &mut random);
        let packed = rig.weights(weights.dtype, k, &weights.bytes);
        let rows = Rows::new(rig, &random.vector(MAX_TOKENS * k, 3.0), k);
        let bias = rig.upload("bias", &random.vector(size, 0.5));
        let step = rig.step_meta(1024);
        let width = stride(size as u32) as usize;
        let (folded, q, scales) = foldable(rig, width);
        let gain = rig.upload("gain", &padded(&random.vector(size, 1.0), size, width));
        let hidden = rig.upload("hidden", &padded(&random.vector(MAX_TOKENS * size, 3.0), size, width));
        for count in COUNTS {
            rig.set_step(&step, &plain_batch(count as u32, 0));
            let what = format!("{} {count} tokens", weights.name(rig));
            let [got, want] = both(rig, (&step, count), &[&hidden], &|ctx| {
                let x = Activations::Folded(&rows.i8, RmsFactor { k: k as u32, eps: 1e-5 });
                let out = Output { slice: &hidden.whole(), stride: width as u32, offset: 0, accumulate: true };
                Matmul::new(ctx, "normed", &packed, x, out, Some(&bias.whole()), RowCount::Tokens)
            });
            assert_alike(&got[0], &want[0], tolerance::HALF, &what);
            let [got, want] = both(rig, (&step, count), &[&hidden, &q, &scales], &|ctx| {
                let (x, gain) = (hidden.whole(), gain.whole());
                let target = Target::Hidden { x: &x, gain: &gain, folded: &folded };
                Matmul::to(ctx, "hidden", &packed, Activations::I8(&rows.i8), target, None, RowCount::Tokens)
            });
            assert_alike(&got[0], &want[0], tolerance::HALF, &what);
            assert_alike(&values(&got[1], &got[2]), &values(&want[1], &want[2]), STEP, &what);
            let squares = |scales: &[f32]| scales[scales.len() / 2..].to_vec();
            assert_alike(&squares(&got[2]), &squares(&want[2]), tolerance::HALF, &what);
        }
    }
}

/// Rows that may be folded, poisoned.
fn foldable(rig: &Rig, width: usize) -> (QuantisedRows, Buffer, Buffer) {
    let q = rig.upload("yq", &vec![0x7f7f_7f7fu32; MAX_TOKENS * width / 4]);
    let scales = rig.filled("ys", MAX_TOKENS * width / 8, f32::NAN);
    (QuantisedRows { q: q.whole(), scales: scales.whole() }, q, scales)
}

#[test]
fn gate_and_up_end_alike_with_and_without_adapters() {
    for rig in &rigs() {
        let mut random = Random(33);
        // Gate and up in turns of 32 rows.
        let (size, k) = (96, 160);
        let weights = Weights::random(DType::Q4_1, 2 * size, k, &mut random);
        let packed = rig.weights(weights.dtype, k, &weights.bytes);
        if !Fusion::can_gate(packed.format, rig.class) {
            continue;
        }
        let rows = Rows::new(rig, &random.vector(MAX_TOKENS * k, 1.0), k);
        let bias = rig.upload("bias", &random.vector(2 * size, 0.5));
        let added = rig.upload("added", &random.vector(MAX_TOKENS * 2 * size, 1.0));
        let (out, q, scales) = rig.quantised_rows(MAX_TOKENS, size);
        let step = rig.step_meta(1024);
        for count in COUNTS {
            // Every third token's adapter changes gate or up.
            let mut words = Vec::new();
            step_meta::encode(&plain_batch(count as u32, 0), &Default::default(), &mut words);
            words[step_meta::header::LORA_PARTS] = words.len() as u32;
            words.extend((0..count).map(|t| if t % 3 == 0 { 0x10u32 << (t % 2) } else { 0 }));
            rig.gpu.write(&step.whole(), bytemuck::cast_slice(&words));
            let mut seen = Vec::new();
            for is_adapted in [false, true] {
                let [got, want] = both(rig, (&step, count), &[&q, &scales], &|ctx| {
                    let (activation, added) = (Activation::Silu, added.whole());
                    let target = match is_adapted {
                        true => Target::Adapted { activation, y: &out, added: &added },
                        false => Target::Gated { activation, y: &out },
                    };
                    let x = Activations::Folded(&rows.i8, RmsFactor { k: k as u32, eps: 1e-5 });
                    Matmul::to(ctx, "gate+up", &packed, x, target, Some(&bias.whole()), RowCount::Tokens)
                });
                let what = format!("{} {count} tokens adapted {is_adapted}", weights.name(rig));
                let got = values(&got[0], &got[1]);
                assert_alike(&got, &values(&want[0], &want[1]), STEP, &what);
                seen.push(got);
            }
            let differ = |t: usize| seen[0][t * size..][..size] != seen[1][t * size..][..size];
            assert!((0..count).all(|t| differ(t) == (t % 3 == 0)), "{count} tokens: adapters change their own rows");
        }
    }
}

#[test]
fn rows_of_any_magnitude_keep_their_precision() {
    for rig in &rigs() {
        let (n, k) = (70, 96);
        let mut random = Random(34);
        let weights = Weights::random(DType::F16, n, k, &mut random);
        let packed = rig.weights(weights.dtype, k, &weights.bytes);
        let mut x = random.vector(MAX_TOKENS * k, 1.0);
        // From far below to far above what f16 holds, and a row of zeros.
        let scale = |t: usize| if t == 3 { 0.0 } else { 10f32.powi(t as i32 - 18) };
        x.chunks_exact_mut(k).enumerate().for_each(|(t, row)| row.iter_mut().for_each(|v| *v *= scale(t)));
        let rows = Rows::new(rig, &x, k);
        let step = rig.step_meta(1024);
        let y = rig.filled("y", MAX_TOKENS * n, POISON);
        let product = rig.build(&step, true, |ctx| {
            let out = Output { slice: &y.whole(), stride: n as u32, offset: 0, accumulate: false };
            Matmul::new(ctx, "product", &packed, Activations::F32(&rows.f32), out, None, RowCount::Tokens)
        });
        rig.set_step(&step, &plain_batch(MAX_TOKENS as u32, 0));
        run(rig, &product, MAX_TOKENS);
        let got: Vec<f32> = rig.read(&y);
        let want = reference(&weights.values, &x, k);
        for (t, (got, want)) in got.chunks_exact(n).zip(want.chunks_exact(n)).enumerate() {
            let error = relative_error(got, want);
            assert!(error <= tolerance::HALF, "{} token {t}: {error:e}", rig.name);
        }
    }
}

#[test]
fn few_tokens_take_the_kernels_that_do_not_depend_on_company() {
    for rig in &rigs() {
        let (n, k) = (70, 96);
        let mut random = Random(35);
        let weights = Weights::random(DType::Q8_0, n, k, &mut random);
        let packed = rig.weights(weights.dtype, k, &weights.bytes);
        let rows = Rows::new(rig, &random.vector(MAX_TOKENS * k, 1.0), k);
        let step = rig.step_meta(1024);
        let bits = |count: usize| -> Vec<u32> {
            let y = rig.filled("y", MAX_TOKENS * n, POISON);
            let product = rig.build(&step, true, |ctx| {
                let out = Output { slice: &y.whole(), stride: n as u32, offset: 0, accumulate: false };
                Matmul::new(ctx, "product", &packed, Activations::I8(&rows.i8), out, None, RowCount::Tokens)
            });
            rig.set_step(&step, &plain_batch(count as u32, 0));
            run(rig, &product, count);
            rig.read(&y)[..n].to_vec()
        };
        assert_eq!(bits(1), bits(matrix_units::MIN_TOKENS as usize - 1), "{}", rig.name);
    }
}

#[test]
fn an_adapter_without_cooperative_matrices_is_refused_by_name() {
    let Some(gpu) = crate::support::open_gpu() else { return };
    let caps = gpu.caps();
    let has_units = caps.matrix_side.is_some() && caps.subgroup_size.is_some();
    match Gpu::open(&request(false)) {
        Ok(opened) => assert!(has_units && opened.matrix_units() == caps.matrix_side, "{caps:?}"),
        Err(error) => {
            assert!(matches!(error, GpuError::NoMatrixUnits(_)), "{error}");
            assert!(error.to_string().starts_with(&caps.name), "{error}");
        }
    }
    assert_eq!(gpu.matrix_units(), None, "who did not ask does not get any");
    let floor = Gpu::open(&GpuRequest { floor: true, ..request(false) }).expect_err("no optional feature, no matrices");
    assert!(floor.to_string().contains("no cooperative matrices"), "{floor}");
}
