//! How fast products run on an adapter, for `bench kernels`.
//!
//! Each figure is the difference between a long and a short recording of the same dispatch, so that submit and wait cancel
//! out; the best of several rounds, since other work on the machine only ever adds. Weights are larger than a core's cache only if the shape makes them so: repeating
//! one dispatch shows arithmetic and loads from the last level of cache, not memory bandwidth.

use std::time::{Duration, Instant};

use super::context::{Activations, KernelContext, QuantisedRows, RowCount};
use super::matmul::{Matmul, Output, Precision};
use super::tune::decide::difference;
use super::weights::{PackedMatrix, WeightError};
use super::{Choices, Class, ParamArena, step_meta, stride};
use crate::gpu::{Buffer, BufferUse, Gpu, GpuError, Recording, Replayer, Uploader};
use crate::model::dtype::DType;

pub mod attention;
pub mod peaks;

/// A product to measure: `m` tokens, `n` rows of `k` weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub dtype: DType,
    pub precision: Precision,
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// Time of one dispatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    pub shape: Shape,
    pub us: f64,
    /// 2 * m * n * k operations.
    pub gflops: f64,
    /// Packed weights read once.
    pub weight_gb_per_s: f64,
}

/// The products of SmolLM2-135M as its Q4_1 file has them: fused Q, K, V; output; fused gate and up; down; head.
pub fn smollm2_shapes(m: u32) -> Vec<Shape> {
    let shape = |dtype, n, k| Shape { dtype, precision: Precision::I8, m, n, k };
    vec![
        shape(DType::Q4_1, 960, 576),
        shape(DType::Q4_1, 576, 576),
        shape(DType::Q4_1, 3072, 576),
        shape(DType::Q4_1, 576, 1536),
        shape(DType::Q8_0, 49152, 576),
    ]
}

/// Measures one product for about `budget`.
pub fn product(gpu: &Gpu, shape: Shape, budget: Duration) -> Result<Measurement, WeightError> {
    let weights = filled_weights(gpu, shape)?;
    let bound = bind(gpu, shape, &weights)?;
    let seconds = seconds_of(gpu, &mut |recording| bound.record(recording, shape.m), budget)?;
    let operations = 2.0 * f64::from(shape.m) * f64::from(shape.n) * f64::from(shape.k);
    Ok(Measurement {
        shape,
        us: seconds * 1e6,
        gflops: operations / seconds / 1e9,
        weight_gb_per_s: weights.bytes() as f64 / seconds / 1e9,
    })
}

/// Seconds that one `record` takes on the GPU.
fn seconds_of(gpu: &Gpu, record: &mut dyn FnMut(&mut Recording), budget: Duration) -> Result<f64, GpuError> {
    let mut replayer = Replayer::new(gpu);
    let mut run = |count: u32| -> Result<f64, GpuError> {
        let mut recording = Recording::new("measure");
        (0..count).for_each(|_| record(&mut recording));
        let started = Instant::now();
        let ticket = replayer.submit(gpu, &recording, &[])?;
        replayer.wait(gpu, ticket)?;
        Ok(started.elapsed().as_secs_f64())
    };
    // The first run compiles on some drivers; the second sizes the rounds.
    run(1)?;
    let one = run(1)?.max(1e-6);
    let rounds = 5;
    let count = (budget.as_secs_f64() / (3.0 * f64::from(rounds)) / one).clamp(1.0, 1000.0) as u32;
    let (mut short, mut long) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        short = short.min(run(count)?);
        long = long.min(run(2 * count)?);
    }
    Ok(difference(short, long) / f64::from(count))
}

/// Weights whose every field is a harmless number in every format.
fn filled_weights(gpu: &Gpu, shape: Shape) -> Result<PackedMatrix, WeightError> {
    let elements = u64::from(shape.n) * u64::from(shape.k);
    let bytes = vec![0x2f; shape.dtype.bytes(elements).unwrap_or(0) as usize];
    let mut uploader = Uploader::new(gpu);
    let weights = PackedMatrix::upload(gpu, &mut uploader, "measured", shape.dtype, shape.k, &[&bytes])?;
    uploader.flush()?;
    Ok(weights)
}

fn bind(gpu: &Gpu, shape: Shape, weights: &PackedMatrix) -> Result<Matmul, GpuError> {
    let row = u64::from(stride(shape.k));
    let rows = u64::from(shape.m);
    let alloc = |label, bytes| -> Result<Buffer, GpuError> { gpu.alloc(label, bytes, BufferUse::Storage) };
    let x = alloc("x", rows * row * 4)?;
    let quantised = QuantisedRows { q: alloc("xq", rows * row)?.whole(), scales: alloc("xs", rows * row / 4)?.whole() };
    let y = alloc("y", rows * u64::from(shape.n) * 4)?;
    let step = alloc("step_meta", 4 * step_meta::HEADER_WORDS as u64)?;
    let mut words = [0u32; step_meta::HEADER_WORDS];
    words[step_meta::header::NUM_TOKENS] = shape.m;
    gpu.write(&step.whole(), bytemuck::cast_slice(&words));
    let (x, y, step) = (x.whole(), y.whole(), step.whole());
    let mut ctx = KernelContext {
        gpu,
        class: Class::of(gpu.caps()),
        params: &mut ParamArena::new(),
        choices: &mut Choices::default(),
        step_meta: &step,
        multiply_pairs: KernelContext::prefers_pairs(gpu),
        matrix_units: gpu.matrix_units(),
    };
    let activations = match shape.precision {
        Precision::F32 => Activations::F32(&x),
        Precision::I8 => Activations::I8(&quantised),
    };
    let output = Output { slice: &y, stride: shape.n, offset: 0, accumulate: false };
    Matmul::new(&mut ctx, "product", weights, activations, output, None, RowCount::Tokens)
}
