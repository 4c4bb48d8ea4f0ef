//! A product on made-up data, run in each of its ways.

use std::time::Instant;

use super::decide::Measured;
use crate::gpu::{BufferSlice, BufferUse, Gpu, Recording, Replayer, Uploader};
use crate::kernels::context::RmsFactor;
use crate::kernels::matmul::{Ends, Fusion, Matmul, Output, Precision, Target, reference};
use crate::kernels::tile::{Choices, ProductKey, Tile};
use crate::kernels::weights::{PackedMatrix, WeightError};
use crate::kernels::{
    Activations, Class, DeviceClass, GROUP, KernelContext, ParamArena, QuantisedRows, RowCount, quantise, step_meta,
    stride,
};
use crate::model::quant::dequantize;

/// Of larger matrices the first rows stand for all.
const MOST_WEIGHT_BYTES: u64 = 64 << 20;
/// Weights' rows that are computed on the CPU as well.
const CHECKED_ROWS: usize = 64;
/// Largest difference from the CPU's result, over its largest magnitude.
const TOLERANCE: f32 = 1e-4;
const REPEATS: usize = 3;

/// Small deterministic random words (xorshift).
pub(super) struct Random(pub u32);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// In -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Weights in the shape of a key, and their bytes as a file has them. Bytes are such that every field of every format is an
/// ordinary number, of either sign.
pub(super) fn made_up_weights(gpu: &Gpu, key: &ProductKey) -> Result<(PackedMatrix, Vec<u8>), WeightError> {
    let label = "made-up weights";
    let row_bytes = key.format.row_bytes(key.k).map_err(|source| WeightError::Pack { label: label.into(), source })?;
    let rows = (MOST_WEIGHT_BYTES / row_bytes.max(1) as u64).min(u64::from(key.n)).max(1) as usize;
    // Gate and up come in turns of 32.
    let rows = if rows < key.n as usize { rows / 64 * 64 } else { rows };
    let mut random = Random(0x2545_F491);
    let pattern: Vec<u8> = (0..65_537).map(|_| (random.word() >> 9) as u8 & 0x9f | 0x20).collect();
    let mut bytes = Vec::with_capacity(rows * row_bytes + pattern.len());
    while bytes.len() < rows * row_bytes {
        bytes.extend_from_slice(&pattern);
    }
    bytes.truncate(rows * row_bytes);
    let mut uploader = Uploader::new(gpu);
    let matrix = PackedMatrix::upload(gpu, &mut uploader, label, key.format.dtype, key.k, &[&bytes])?;
    uploader.flush()?;
    Ok((matrix, bytes))
}

/// A product with inputs and room for outputs.
pub(super) struct Trial<'a> {
    gpu: &'a Gpu,
    key: ProductKey,
    weights: &'a PackedMatrix,
    bytes: &'a [u8],
    step: BufferSlice,
    x: BufferSlice, // f32 [rows, stride(k)]
    quantised: QuantisedRows,
    /// What `x` or `quantised` stand for, `[rows, stride(k)]`.
    x_values: Vec<f32>,
    /// f32 `[rows, stride(n)]`: sums, or the hidden state.
    y: BufferSlice,
    gain: BufferSlice,
    folded: QuantisedRows,
    /// What the prior wrote.
    expected: Option<Vec<Vec<u8>>>,
}

/// A trial with its ways by number.
pub(super) struct Ways<'t, 'a> {
    trial: &'t mut Trial<'a>,
    bound: Vec<Result<Matmul, String>>,
}

impl<'a> Trial<'a> {
    pub fn new(gpu: &'a Gpu, key: ProductKey, weights: &'a PackedMatrix, bytes: &'a [u8]) -> Result<Self, WeightError> {
        let (rows, k, n) = (u64::from(timed_rows(&key)), u64::from(stride(key.k)), u64::from(stride(weights.n)));
        let alloc = |label: &str, bytes: u64| gpu.alloc(label, bytes, BufferUse::Storage).map(|b| b.whole());
        let quantised = |k: u64| -> Result<QuantisedRows, WeightError> {
            Ok(QuantisedRows { q: alloc("tuned q", rows * k)?, scales: alloc("tuned scales", rows * k / 2)? })
        };
        let trial = Trial {
            gpu,
            // Of larger matrices the first rows stand for all.
            key: ProductKey { n: weights.n, ..key },
            weights,
            bytes,
            step: alloc("tuned step", 4 * step_meta::HEADER_WORDS as u64)?,
            x: alloc("tuned x", rows * k * 4)?,
            quantised: quantised(k)?,
            x_values: Vec::new(),
            y: alloc("tuned y", rows * n * 4)?,
            gain: alloc("tuned gain", n * 4)?,
            folded: quantised(n)?,
            expected: None,
        };
        Ok(trial.filled((rows * k) as usize, n as usize))
    }

    /// Writes the inputs.
    fn filled(mut self, elements: usize, n: usize) -> Self {
        let mut random = Random(0x9E37_79B9);
        let k = self.key.k as usize;
        let row = stride(self.key.k) as usize;
        let x: Vec<f32> = (0..elements).map(|i| if i % row < k { 2.0 * random.unit() } else { 0.0 }).collect();
        let (q, scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) =
            x.chunks_exact(GROUP as usize).map(quantise::reference).unzip();
        let squares = x.chunks_exact(GROUP as usize).map(|g| [g.iter().map(|v| v * v).sum::<f32>(), 0.0]);
        let gain: Vec<f32> = (0..n).map(|_| random.unit()).collect();
        self.x_values = match self.key.precision {
            Precision::F32 => x.clone(),
            Precision::I8 => q.iter().zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect(),
        };
        let with_squares: Vec<[f32; 2]> = scales.iter().copied().chain(squares).collect();
        self.gpu.write(&self.x, bytemuck::cast_slice(&x));
        self.gpu.write(&self.quantised.q, bytemuck::cast_slice(&q.concat()));
        self.gpu.write(&self.quantised.scales, bytemuck::cast_slice(&with_squares));
        self.gpu.write(&self.gain, bytemuck::cast_slice(&gain));
        self
    }

    pub fn with(&mut self, tiles: &[Tile]) -> Ways<'_, 'a> {
        let bound = tiles.iter().map(|&tile| self.bind(&self.key, tile)).collect();
        Ways { trial: self, bound }
    }

    fn bind(&self, key: &ProductKey, tile: Tile) -> Result<Matmul, String> {
        let mut ctx = KernelContext {
            gpu: self.gpu,
            class: Class::of(self.gpu.caps()),
            params: &mut ParamArena::new(),
            choices: &mut Choices::only(key, tile),
            step_meta: &self.step,
            multiply_pairs: DeviceClass::of(self.gpu.caps()).multiplies_pairs,
            matrix_units: None,
        };
        let x = match (key.precision, key.fusion.is_normed) {
            (Precision::F32, _) => Activations::F32(&self.x),
            (Precision::I8, false) => Activations::I8(&self.quantised),
            (Precision::I8, true) => Activations::Folded(&self.quantised, RmsFactor { k: key.k, eps: 1e-5 }),
        };
        let target = match key.fusion.ends {
            Ends::Sums => Target::Sums(Output { slice: &self.y, stride: key.n, offset: 0, accumulate: false }),
            Ends::Hidden => Target::Hidden { x: &self.y, gain: &self.gain, folded: &self.folded },
            Ends::Gated(activation) => Target::Gated { activation, y: &self.folded },
            Ends::Adapted(_) => return Err("what LoRA adds is not tried".into()),
        };
        let bound = Matmul::to(&mut ctx, "tuned", self.weights, x, target, None, RowCount::Tokens);
        bound.map_err(|fault| fault.to_string())
    }

    fn set_rows(&self, rows: u32) {
        let mut words = [0u32; step_meta::HEADER_WORDS];
        words[step_meta::header::NUM_TOKENS] = rows;
        self.gpu.write(&self.step, bytemuck::cast_slice(&words));
    }

    fn run(
        &self,
        matmul: &Matmul,
        (rows, count): (u32, u32),
        readback: &[BufferSlice],
    ) -> Result<Vec<Vec<u8>>, String> {
        let mut recording = Recording::new("tuning");
        (0..count).for_each(|_| matmul.record(&mut recording, rows));
        let mut replayer = Replayer::new(self.gpu);
        let in_flight = replayer.submit(self.gpu, &recording, readback).map_err(|fault| fault.to_string())?;
        Ok(replayer.wait(self.gpu, in_flight).map_err(|fault| fault.to_string())?.readback)
    }

    /// All that a run writes, from outputs that were cleared before.
    fn output(&self, matmul: &Matmul) -> Result<Vec<Vec<u8>>, String> {
        let rows = checked_rows(&self.key);
        self.set_rows(rows);
        let outputs = [self.y.clone(), self.folded.q.clone(), self.folded.scales.clone()];
        for output in &outputs {
            self.gpu.write(output, &vec![0; output.size as usize]);
        }
        self.run(matmul, (rows, 1), &outputs)
    }

    /// The sums of the prior against the CPU's, for the first rows of the weights.
    fn check_sums(&self) -> Result<(), String> {
        let key = ProductKey { fusion: Fusion::default(), ..self.key };
        let class = Class::of(self.gpu.caps());
        let matmul = self.bind(&key, key.prior(class, DeviceClass::of(self.gpu.caps()).multiplies_pairs))?;
        let output = self.output(&matmul)?;
        let y: Vec<f32> = bytemuck::pod_collect_to_vec(&output[0]);
        let (n, k, row) = (key.n as usize, key.k as usize, stride(key.k) as usize);
        let checked = CHECKED_ROWS.min(n);
        let row_bytes = self.bytes.len() / n;
        let mut w = vec![0f32; checked * k];
        dequantize(key.format.dtype, &self.bytes[..checked * row_bytes], &mut w).map_err(|fault| fault.to_string())?;
        let tokens = checked_rows(&key) as usize;
        let x: Vec<f32> = self.x_values.chunks_exact(row).take(tokens).flat_map(|x| x[..k].to_vec()).collect();
        let want = reference(&w, &x, k);
        let got = (0..tokens).flat_map(|t| &y[t * n..][..checked]);
        near(got.copied(), &want)
    }
}

/// Output that is the same each time; those of these numbers are floats, and finite.
pub(super) fn steady(
    output: &mut dyn FnMut() -> Result<Vec<Vec<u8>>, String>,
    floats: &[usize],
) -> Result<Vec<Vec<u8>>, String> {
    let first = output()?;
    for _ in 1..REPEATS {
        if output()? != first {
            return Err("gives other bits when it is repeated".into());
        }
    }
    let is_finite = |bytes: &Vec<u8>| bytemuck::pod_collect_to_vec::<u8, f32>(bytes).iter().all(|v| v.is_finite());
    if !floats.iter().all(|&i| is_finite(&first[i])) {
        return Err("gives numbers that are not finite".into());
    }
    Ok(first)
}

/// Whether the prior gives what the CPU does.
pub(super) fn near(got: impl Iterator<Item = f32>, want: &[f32]) -> Result<(), String> {
    let largest = want.iter().fold(0f32, |most, v| most.max(v.abs())).max(f32::MIN_POSITIVE);
    let error = got.zip(want).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
    if error <= TOLERANCE { Ok(()) } else { Err(format!("differs from the CPU's result by {error:e} of the largest")) }
}

/// Whether a way gives what the prior gave.
pub(super) fn alike(expected: &[Vec<u8>], output: &[Vec<u8>]) -> Result<(), String> {
    if expected == output { Ok(()) } else { Err("gives other bits than the class's own way".into()) }
}

/// Tokens of a timed run.
fn timed_rows(key: &ProductKey) -> u32 {
    if key.tokens == 8 { 32 } else { key.tokens }
}

/// Tokens of a checked run: with a rest, where the way is used for any.
fn checked_rows(key: &ProductKey) -> u32 {
    if key.tokens > 2 { timed_rows(key) - 1 } else { key.tokens }
}

impl Measured for Ways<'_, '_> {
    fn check(&mut self, way: usize) -> Result<(), String> {
        let matmul = self.bound[way].as_ref().map_err(String::clone)?;
        // The second output is bytes.
        let output = steady(&mut || self.trial.output(matmul), &[0, 2])?;
        match &self.trial.expected {
            None => {
                self.trial.check_sums()?;
                self.trial.expected = Some(output);
                Ok(())
            }
            Some(expected) => alike(expected, &output),
        }
    }

    fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String> {
        let rows = timed_rows(&self.trial.key);
        self.trial.set_rows(rows);
        let matmul = self.bound[way].as_ref().map_err(String::clone)?;
        let started = Instant::now();
        self.trial.run(matmul, (rows, count), &[])?;
        Ok(started.elapsed().as_secs_f64())
    }
}
