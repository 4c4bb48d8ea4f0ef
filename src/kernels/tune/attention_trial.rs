//! Attention on made-up pages, run in each of its ways.

use std::time::Instant;

use super::decide::Measured;
use super::trial::{Random, alike, near, steady};
use crate::batch::StepBatch;
use crate::gpu::{BufferSlice, BufferUse, Gpu, GpuError, Recording, Replayer};
use crate::kernels::attention::{Attention, Buffers, Variant, reference};
use crate::kernels::attention_way::{AttentionKey, Way};
use crate::kernels::attention_work::{AttentionWork, Take, WorkLimits};
use crate::kernels::kv_layout::KvLayout;
use crate::kernels::{Choices, Class, KernelContext, ParamArena, QuantisedRows, RowOutput, step_meta};

const BLOCK_SIZE: u32 = 16;
/// Rows that decode, and the tokens before each: three ranges of keys.
const DECODE: (u32, u32) = (4, 600);
/// Tokens of a prompt, and those before them: over the end of a range, and with a rest for each number of tokens.
const PROMPT: (u32, u32) = (61, 230);

/// Inputs and room for outputs.
pub(super) struct AttentionTrial<'a> {
    gpu: &'a Gpu,
    key: AttentionKey,
    batch: StepBatch,
    layout: KvLayout,
    step: BufferSlice,
    /// q, keys, values and sinks as numbers, the caches as they were decoded.
    numbers: [Vec<f32>; 4],
    inputs: [BufferSlice; 4],
    partials: BufferSlice,
    y: BufferSlice,
    quantised: QuantisedRows,
    /// What the prior wrote.
    expected: Option<Vec<Vec<u8>>>,
}

/// A way with its kernels and the step's work as it is cut for it.
struct Bound {
    attention: Attention,
    work: AttentionWork,
}

/// A trial with its ways by number.
pub(super) struct AttentionWays<'t, 'a> {
    trial: &'t mut AttentionTrial<'a>,
    bound: Vec<Result<Bound, String>>,
}

/// Rows that each have `count` tokens after `before` earlier ones, in blocks one after the other from 1 on.
fn batch(rows: u32, (count, before): (u32, u32)) -> StepBatch {
    let blocks = (before + count).div_ceil(BLOCK_SIZE);
    let starts = |step: u32| (0..=rows).map(|row| row * step).collect();
    let tokens = || (0..rows).flat_map(|row| (0..count).map(move |t| (row, before + t)));
    StepBatch {
        block_size: BLOCK_SIZE,
        input_ids: vec![0; (rows * count) as usize],
        positions: tokens().map(|(_, position)| position).collect(),
        kv_slots: vec![0; (rows * count) as usize],
        row_of_token: tokens().map(|(row, _)| row).collect(),
        row_start: starts(count),
        slot_of_row: (0..rows).collect(),
        block_tables: (1..=rows * blocks).collect(),
        block_table_start: starts(blocks),
        ..StepBatch::default()
    }
}

impl<'a> AttentionTrial<'a> {
    pub fn new(gpu: &'a Gpu, key: AttentionKey) -> Result<Self, GpuError> {
        let batch = match key.variant {
            Variant::Several => batch(1, PROMPT),
            Variant::Single | Variant::Merge => batch(DECODE.0, (1, DECODE.1)),
        };
        let shape = key.shape;
        let layout = KvLayout {
            num_blocks: batch.block_tables.len() as u32 + 1,
            block_size: BLOCK_SIZE,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            format: shape.kv,
        };
        let mut random = Random(0x9E37_79B9);
        let mut units = |num: usize| (0..num).map(|_| random.unit()).collect::<Vec<f32>>();
        let tokens = batch.num_tokens();
        let q = units(tokens * shape.q_stride() as usize);
        let caches = [(); 2].map(|()| layout.encode(&units(layout.num_values() as usize)));
        let sinks = units(shape.num_heads as usize);
        let alloc = |label: &str, bytes: u64| gpu.alloc(label, bytes, BufferUse::Storage).map(|b| b.whole());
        let filled = |label: &str, bytes: &[u8]| -> Result<BufferSlice, GpuError> {
            let to = alloc(label, bytes.len() as u64)?;
            gpu.write(&to, bytes);
            Ok(to)
        };
        let cache = |label: &str, bytes: &[u8]| -> Result<BufferSlice, GpuError> {
            let to = layout.alloc(gpu, label)?.whole();
            gpu.write(&to, bytes);
            Ok(to)
        };
        let elements = tokens as u64 * u64::from(shape.out_stride());
        Ok(AttentionTrial {
            gpu,
            key,
            layout,
            step: alloc(
                "tuned step",
                4 * (step_meta::num_words(&batch, &AttentionWork::default()) as u64 + 16 * tokens as u64),
            )?,
            inputs: [
                filled("tuned q", bytemuck::cast_slice(&q))?,
                cache("tuned keys", &caches[0])?,
                cache("tuned values", &caches[1])?,
                filled("tuned sinks", bytemuck::cast_slice(&sinks))?,
            ],
            numbers: [q, layout.decode(&caches[0]), layout.decode(&caches[1]), sinks],
            partials: alloc("tuned partials", shape.partial_bytes())?,
            y: alloc("tuned y", elements * 4)?,
            quantised: QuantisedRows { q: alloc("tuned q", elements)?, scales: alloc("tuned scales", elements / 4)? },
            batch,
            expected: None,
        })
    }

    pub fn with(&mut self, ways: &[Way]) -> AttentionWays<'_, 'a> {
        let bound = ways.iter().map(|&way| self.bind(&self.key, way).map_err(|fault| fault.to_string())).collect();
        AttentionWays { trial: self, bound }
    }

    fn bind(&self, key: &AttentionKey, way: Way) -> Result<Bound, GpuError> {
        let class = Class::of(self.gpu.caps());
        let mut ctx = KernelContext {
            gpu: self.gpu,
            class,
            params: &mut ParamArena::new(),
            choices: &mut Choices::only(key, way),
            step_meta: &self.step,
            multiply_pairs: false,
            matrix_units: None,
        };
        let [q, k_cache, v_cache, sinks] = &self.inputs;
        let y = if key.is_quantised { RowOutput::I8(&self.quantised) } else { RowOutput::F32(&self.y) };
        let sinks = key.shape.has_sinks.then_some(sinks);
        let buffers = Buffers { q, k_cache, v_cache, sinks, slopes: None, partials: &self.partials, y };
        let attention = Attention::new(&mut ctx, "tuned", &key.shape, (None, 0), &buffers)?;
        let (cut, mut work) = (attention.cut(), AttentionWork::default());
        work.plan(
            &self.batch,
            &WorkLimits {
                tokens_per_workgroup: cut.tokens_per_workgroup,
                parts: cut.parts,
                parallel: 1,
                max_slots: 1,
                window: None,
                split: Take::Never,
                share: Take::Never,
            },
        );
        Ok(Bound { attention, work })
    }

    fn run(&self, bound: &Bound, count: u32, readback: &[BufferSlice]) -> Result<Vec<Vec<u8>>, GpuError> {
        let mut words = Vec::new();
        step_meta::encode(&self.batch, &bound.work, &mut words);
        self.gpu.write(&self.step.buffer.slice(self.step.offset, 4 * words.len() as u64), bytemuck::cast_slice(&words));
        let mut recording = Recording::new("tuning");
        (0..count).for_each(|_| bound.attention.record(&mut recording, bound.work.counts));
        let mut replayer = Replayer::new(self.gpu);
        let in_flight = replayer.submit(self.gpu, &recording, readback)?;
        Ok(replayer.wait(self.gpu, in_flight)?.readback)
    }

    /// All that a run writes, from outputs that were cleared before.
    fn output(&self, bound: &Bound) -> Result<Vec<Vec<u8>>, String> {
        let outputs = [self.y.clone(), self.quantised.scales.clone(), self.quantised.q.clone()];
        outputs.iter().for_each(|output| self.gpu.write(output, &vec![0; output.size as usize]));
        self.run(bound, 1, &outputs).map_err(|fault| fault.to_string())
    }

    /// The prior against the CPU's result.
    fn check_prior(&self) -> Result<(), String> {
        let key = AttentionKey { is_quantised: false, ..self.key };
        let way = key.prior(Class::of(self.gpu.caps()));
        let output = self.output(&self.bind(&key, way).map_err(|fault| fault.to_string())?)?;
        let got: Vec<f32> = bytemuck::pod_collect_to_vec(&output[0]);
        let [q, k, v, sinks] = &self.numbers;
        let sinks = key.shape.has_sinks.then_some(sinks.as_slice());
        let want = reference(&key.shape, &self.layout, &self.batch, None, q, (k, v), sinks);
        near(got.into_iter(), &want)
    }
}

impl Measured for AttentionWays<'_, '_> {
    fn check(&mut self, way: usize) -> Result<(), String> {
        let bound = self.bound[way].as_ref().map_err(String::clone)?;
        // The last output is bytes.
        let output = steady(&mut || self.trial.output(bound), &[0, 1])?;
        match &self.trial.expected {
            None => {
                self.trial.check_prior()?;
                self.trial.expected = Some(output);
                Ok(())
            }
            Some(expected) => alike(expected, &output),
        }
    }

    fn seconds(&mut self, way: usize, count: u32) -> Result<f64, String> {
        let bound = self.bound[way].as_ref().map_err(String::clone)?;
        let started = Instant::now();
        self.trial.run(bound, count, &[]).map_err(|fault| fault.to_string())?;
        Ok(started.elapsed().as_secs_f64())
    }
}
