//! How long attention takes over made-up pages: whole, split over workgroups, with shared prefixes.

use std::time::Duration;

use super::seconds_of;
use crate::batch::StepBatch;
use crate::gpu::{BufferSlice, BufferUse, Gpu, GpuError, Recording, Replayer};
use crate::kernels::attention::{Attention, Buffers, Shape};
use crate::kernels::attention_work::{AttentionWork, Take, WorkCounts, WorkLimits};
use crate::kernels::context::{KernelContext, RowOutput};
use crate::kernels::kv_layout::KvLayout;
use crate::kernels::{Choices, Class, ParamArena, step_meta};

/// Rows that each decode one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    pub shape: Shape,
    pub rows: u32,
    /// Tokens before the one that is computed.
    pub context: u32,
    /// Tokens at the start that all rows have in the same blocks.
    pub shared: u32,
    pub split: Take,
    pub share: Take,
    /// Workgroups at once, as the rule for splitting sees it.
    pub parallel: u32,
    /// A power of two. With blocks that hold a whole row, row r lies in block r.
    pub block_size: u32,
    /// Of such blocks: addressed without a table.
    pub is_contiguous: bool,
}

impl Case {
    /// Every row has a block to itself.
    fn has_long_blocks(&self) -> bool {
        self.block_size > self.context
    }
}

/// Time of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    pub us: f64,
    /// Keys and values that all rows together see, each row's read for itself.
    pub kv_gb_per_s: f64,
    pub dispatches: u32,
}

/// Keys and values of all layers, unless those are [`MOST_LAYERS`]: more than a core's caches hold, as in a step.
const STREAM_BYTES: u64 = 96 << 20;
const MOST_LAYERS: u64 = 30;

/// A case on the GPU.
struct Ready {
    /// One for each layer, each with keys and values of its own.
    layers: Vec<Attention>,
    counts: WorkCounts,
    y: BufferSlice,
    kv_bytes: u64,
}

/// Measures one case for about `budget`.
pub fn attention(gpu: &Gpu, case: &Case, budget: Duration) -> Result<Measurement, GpuError> {
    measured(gpu, ready(gpu, case, &[], MOST_LAYERS)?, budget)
}

/// The same case with one running softmax over all keys instead of partial results over fixed ranges, which are what
/// makes results independent of how the work is cut.
pub fn with_one_range(gpu: &Gpu, case: &Case, budget: Duration) -> Result<Measurement, GpuError> {
    measured(gpu, ready(gpu, case, &["ONE_RANGE"], MOST_LAYERS)?, budget)
}

fn measured(gpu: &Gpu, ready: Ready, budget: Duration) -> Result<Measurement, GpuError> {
    let Ready { layers, counts, kv_bytes, .. } = ready;
    let record = &mut |recording: &mut Recording| layers.iter().for_each(|layer| layer.record(recording, counts));
    let seconds = seconds_of(gpu, record, budget)? / layers.len() as f64;
    let counts = [counts.single, counts.several, counts.merges];
    Ok(Measurement {
        us: seconds * 1e6,
        kv_gb_per_s: kv_bytes as f64 / seconds / 1e9,
        dispatches: counts.iter().filter(|n| **n > 0).count() as u32,
    })
}

/// What a case gives, f32 `[rows, out_stride]`: the content of slots depends on where they lie alone.
pub fn output(gpu: &Gpu, case: &Case) -> Result<Vec<f32>, GpuError> {
    let Ready { layers, counts, y, .. } = ready(gpu, case, &[], 1)?;
    let mut recording = Recording::new("attention");
    layers.iter().for_each(|layer| layer.record(&mut recording, counts));
    let mut replayer = Replayer::new(gpu);
    let in_flight = replayer.submit(gpu, &recording, &[y])?;
    let finished = replayer.wait(gpu, in_flight)?;
    Ok(finished.readback.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec::<u8, f32>(bytes)).collect())
}

/// Words whose halves are positive f16 below 1.
fn words(bytes: u64, seed: u32) -> Vec<u32> {
    let word = |i: u32| (i.wrapping_add(seed).wrapping_mul(0x9E37_79B1) >> 3) & 0x3bff_3bff;
    (0..(bytes / 4) as u32).map(word).collect()
}

/// Queries of about the size that real ones have. Denormal numbers cost a CPU a hundred times as much as others.
fn numbers(bytes: u64) -> Vec<f32> {
    let number = |i: u32| (i.wrapping_mul(0x9E37_79B1) >> 8) as f32 / (1 << 24) as f32 - 0.5;
    (0..(bytes / 4) as u32).map(number).collect()
}

fn ready(gpu: &Gpu, case: &Case, flags: &[&str], most_layers: u64) -> Result<Ready, GpuError> {
    let (shape, class) = (case.shape, Class::of(gpu.caps()));
    let (batch, num_blocks) = batch(case);
    let layout = KvLayout {
        num_blocks,
        block_size: case.block_size,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        format: shape.kv,
    };
    let ranges = u64::from(case.context / 256 + 1);
    let slots = ranges * u64::from(case.rows);
    let mut work = AttentionWork::default();
    work.plan(
        &batch,
        &WorkLimits {
            tokens_per_workgroup: shape.tokens_per_workgroup(class),
            parts: shape.parts(),
            parallel: case.parallel,
            max_slots: slots as u32,
            window: None,
            split: case.split,
            share: case.share,
        },
    );
    let mut step = Vec::new();
    step_meta::encode(&batch, &work, &mut step);
    let alloc = |label, bytes: u64| -> Result<_, GpuError> { Ok(gpu.alloc(label, bytes, BufferUse::Storage)?.whole()) };
    let meta = alloc("step_meta", 4 * step.len() as u64)?;
    gpu.write(&meta, bytemuck::cast_slice(&step));
    let rows = u64::from(case.rows);
    let q = alloc("q", rows * u64::from(shape.q_stride()) * 4)?;
    let partials = alloc("partials", slots * shape.partial_bytes())?;
    let y = alloc("y", rows * u64::from(shape.out_stride()) * 4)?;
    gpu.write(&q, bytemuck::cast_slice(&numbers(q.size)));
    let mut ctx = KernelContext {
        gpu,
        class,
        params: &mut ParamArena::new(),
        choices: &mut Choices::default(),
        step_meta: &meta,
        multiply_pairs: KernelContext::prefers_pairs(gpu),
        matrix_units: None,
    };
    let out = RowOutput::F32(&y);
    let addressing: &[&str] = if case.is_contiguous { &["CONTIGUOUS"] } else { &[] };
    let flags = [flags, addressing].concat();
    let token_bytes = layout.block_bytes() / u64::from(case.block_size);
    let kv_bytes = 2 * token_bytes * u64::from(case.context + 1) * rows;
    let content = [2, 3].map(|seed| words(layout.buffer_bytes(), seed));
    let mut layers = Vec::new();
    for _ in 0..(STREAM_BYTES / kv_bytes).clamp(1, most_layers) {
        let cache = |content: &[u32]| -> Result<_, GpuError> {
            let to = layout.alloc(gpu, "cache")?.whole();
            gpu.write(&to, bytemuck::cast_slice(content));
            Ok(to)
        };
        let (k, v) = (cache(&content[0])?, cache(&content[1])?);
        let buffers =
            Buffers { q: &q, k_cache: &k, v_cache: &v, sinks: None, slopes: None, partials: &partials, y: out };
        layers.push(Attention::with_flags(&mut ctx, "attention", &shape, (None, 0), &buffers, &flags)?);
    }
    Ok(Ready { layers, counts: work.counts, y, kv_bytes })
}

/// Tables that share their first blocks; and the blocks of the pool.
fn batch(case: &Case) -> (StepBatch, u32) {
    let mut batch = StepBatch { block_size: case.block_size, ..StepBatch::default() };
    batch.row_start.push(0);
    batch.block_table_start.push(0);
    let shared = case.shared.min(case.context) / case.block_size;
    let mut next = if case.has_long_blocks() { 0 } else { 1 + shared };
    for row in 0..case.rows {
        batch.input_ids.push(0);
        batch.positions.push(case.context);
        batch.kv_slots.push(0);
        batch.row_of_token.push(row);
        batch.row_start.push(row + 1);
        batch.slot_of_row.push(row);
        batch.block_tables.extend(1..=shared);
        let own = (case.context + 1).div_ceil(case.block_size) - shared;
        batch.block_tables.extend(next..next + own);
        next += own;
        batch.block_table_start.push(batch.block_tables.len() as u32);
    }
    batch.find_groups();
    (batch, next)
}
