//! `copy_blocks`: blocks of the paged cache copied within their pools, in all layers, before the forward pass.
//!
//! Pools that are buffers are copied by a kernel, those that are lines of texels through a scratch buffer.
//!
//! Guarantees: bit for bit; as if one copy followed the other, since no copy of a step touches what another one reads or
//! writes ([`crate::batch::StepBatch::check`]).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::KernelContext;
use crate::batch::BlockCopy;
use crate::gpu::{Bound, BufferSlice, BufferUse, Defines, GpuError, Recording};

/// Pools that one dispatch copies in: with the metadata they are within WebGPU's eight storage buffers.
pub const MAX_BUFFERS: u32 = 6;
const LANES: u32 = 64;

/// Mirrors `Params` of copy_blocks.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub words: u32,
}

/// The defines of one variant.
pub fn defines(num_buffers: u32) -> Defines {
    Defines::new().set("BUFFERS", i64::from(num_buffers))
}

/// The kernel with the pools of all layers bound: a dispatch for every [`MAX_BUFFERS`] of equal blocks.
#[derive(Debug)]
pub struct CopyBlocks {
    parts: Vec<Part>,
    /// Pools of texels, and the bytes of a block in each.
    lines: Vec<(BufferSlice, u64)>,
    /// Room for one block of a line.
    scratch: Option<BufferSlice>,
}

#[derive(Debug)]
struct Part {
    bound: Arc<Bound>,
    words: u32,
}

impl CopyBlocks {
    /// `pools` are different buffers, each with the bytes of one block in it, a multiple of 4: block b starts at b times
    /// as many.
    pub fn new(ctx: &mut KernelContext<'_>, pools: &[(BufferSlice, u64)]) -> Result<CopyBlocks, GpuError> {
        let (lines, pools): (Vec<_>, Vec<_>) = pools.iter().cloned().partition(|(pool, _)| pool.buffer.is_texels());
        let most = lines.iter().map(|(_, block_bytes)| *block_bytes).max();
        let scratch = |bytes| ctx.gpu.alloc("a copied block", bytes, BufferUse::Storage);
        let scratch = most.map(scratch).transpose()?.map(|scratch| scratch.whole());
        let mut sizes: Vec<u64> = pools.iter().map(|(_, block_bytes)| *block_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut parts = Vec::new();
        for block_bytes in sizes {
            assert!(block_bytes.is_multiple_of(4), "a block of {block_bytes} bytes is not whole words");
            let words = (block_bytes / 4) as u32;
            let params = ctx.params.push(ctx.gpu, &Params { words })?;
            let equal: Vec<&BufferSlice> = pools.iter().filter(|p| p.1 == block_bytes).map(|p| &p.0).collect();
            for pools in equal.chunks(MAX_BUFFERS as usize) {
                let kernel = ctx.gpu.kernel("copy_blocks", &defines(pools.len() as u32))?;
                let names: Vec<String> = (0..pools.len()).map(|b| format!("pool_{b}")).collect();
                let mut bindings = vec![("step_meta", ctx.step_meta), ("params", &params)];
                bindings.extend(names.iter().map(String::as_str).zip(pools.iter().copied()));
                parts.push(Part { bound: ctx.gpu.bind(&kernel, &bindings)?, words });
            }
        }
        Ok(CopyBlocks { parts, lines, scratch })
    }

    /// The step's copies, which its metadata holds as well.
    pub fn record(&self, recording: &mut Recording, copies: &[BlockCopy]) {
        for part in &self.parts {
            recording.dispatch("copy blocks", &part.bound, (copies.len() as u32 * part.words).div_ceil(LANES));
        }
        let Some(scratch) = &self.scratch else { return };
        for copy in copies {
            for (pool, block_bytes) in &self.lines {
                let block = |block: u32| pool.buffer.slice(u64::from(block) * block_bytes, *block_bytes);
                recording.copy(block(copy.from), scratch.clone());
                recording.copy(scratch.buffer.slice(0, *block_bytes), block(copy.to));
            }
        }
    }
}

/// What the kernel does, one copy after the other, in one pool of blocks of `words` words.
pub fn reference(copies: &[BlockCopy], words: usize, pool: &mut [u32]) {
    for copy in copies {
        let from = copy.from as usize * words;
        pool.copy_within(from..from + words, copy.to as usize * words);
    }
}
