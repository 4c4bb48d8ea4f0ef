//! How long attention takes over made-up pages: whole, split over workgroups, with shared prefixes.

use std::time::Duration;

use super::seconds_of;
use crate::batch::StepBatch;
use crate::gpu::{BufferUse, Gpu, GpuError};
use crate::kernels::attention::{Attention, Buffers, Shape};
use crate::kernels::attention_work::{AttentionWork, Take, WorkLimits};
use crate::kernels::context::{KernelContext, RowOutput};
use crate::kernels::kv_layout::KvLayout;
use crate::kernels::{Class, ParamArena, step_meta};

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
}

/// Time of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    pub us: f64,
    /// Keys and values that all rows together see, each row's read for itself.
    pub kv_gb_per_s: f64,
    pub dispatches: u32,
}

const BLOCK_SIZE: u32 = 16;

/// Measures one case for about `budget`.
pub fn attention(gpu: &Gpu, case: &Case, budget: Duration) -> Result<Measurement, GpuError> {
    with_flags(gpu, case, &[], budget)
}

/// The same case with one running softmax over all keys instead of partial results over fixed ranges, which are what
/// makes results independent of how the work is cut.
pub fn with_one_range(gpu: &Gpu, case: &Case, budget: Duration) -> Result<Measurement, GpuError> {
    with_flags(gpu, case, &["ONE_RANGE"], budget)
}

fn with_flags(gpu: &Gpu, case: &Case, flags: &[&str], budget: Duration) -> Result<Measurement, GpuError> {
    let (shape, class) = (case.shape, Class::of(gpu.caps()));
    let (batch, num_blocks) = batch(case);
    let layout = KvLayout {
        num_blocks,
        block_size: BLOCK_SIZE,
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
    let mut words = Vec::new();
    step_meta::encode(&batch, &work, &mut words);
    let alloc = |label, bytes: u64| -> Result<_, GpuError> { Ok(gpu.alloc(label, bytes, BufferUse::Storage)?.whole()) };
    let meta = alloc("step_meta", 4 * words.len() as u64)?;
    gpu.write(&meta, bytemuck::cast_slice(&words));
    let rows = u64::from(case.rows);
    let q = alloc("q", rows * u64::from(shape.q_stride()) * 4)?;
    let (k, v) = (alloc("keys", layout.buffer_bytes())?, alloc("values", layout.buffer_bytes())?);
    let partials = alloc("partials", slots * shape.partial_bytes())?;
    let y = alloc("y", rows * u64::from(shape.out_stride()) * 4)?;
    let mut ctx = KernelContext {
        gpu,
        class,
        params: &mut ParamArena::new(),
        step_meta: &meta,
        multiply_pairs: KernelContext::prefers_pairs(gpu),
    };
    let y = RowOutput::F32(&y);
    let buffers = Buffers { q: &q, k_cache: &k, v_cache: &v, sinks: None, partials: &partials, y };
    let bound = Attention::with_flags(&mut ctx, "attention", &shape, (None, 0), &buffers, flags)?;
    let seconds = seconds_of(gpu, &mut |recording| bound.record(recording, work.counts), budget)?;
    let bytes = 2 * layout.block_bytes() * u64::from((case.context + 1).div_ceil(BLOCK_SIZE)) * rows;
    let counts = [work.counts.single, work.counts.several, work.counts.merges];
    Ok(Measurement {
        us: seconds * 1e6,
        kv_gb_per_s: bytes as f64 / seconds / 1e9,
        dispatches: counts.iter().filter(|n| **n > 0).count() as u32,
    })
}

/// Tables that share their first blocks; and the blocks of the pool.
fn batch(case: &Case) -> (StepBatch, u32) {
    let mut batch = StepBatch { block_size: BLOCK_SIZE, ..StepBatch::default() };
    batch.row_start.push(0);
    batch.block_table_start.push(0);
    let shared = case.shared.min(case.context) / BLOCK_SIZE;
    let mut next = 1 + shared;
    for row in 0..case.rows {
        batch.input_ids.push(0);
        batch.positions.push(case.context);
        batch.kv_slots.push(0);
        batch.row_of_token.push(row);
        batch.row_start.push(row + 1);
        batch.slot_of_row.push(row);
        batch.block_tables.extend(1..=shared);
        let own = (case.context + 1).div_ceil(BLOCK_SIZE) - shared;
        batch.block_tables.extend(next..next + own);
        next += own;
        batch.block_table_start.push(batch.block_tables.len() as u32);
    }
    batch.find_groups();
    (batch, next)
}
