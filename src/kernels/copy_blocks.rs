//! `copy_blocks`: blocks of the paged cache copied within their pools, in all layers, before the forward pass.
//!
//! Guarantees: bit for bit; as if one copy followed the other, since no copy of a step touches what another one reads or
//! writes ([`crate::batch::StepBatch::check`]).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::KernelContext;
use crate::batch::BlockCopy;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

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

/// The kernel with the pools of all layers bound: a dispatch for every [`MAX_BUFFERS`] of them.
#[derive(Debug)]
pub struct CopyBlocks {
    parts: Vec<Arc<Bound>>,
    words: u32,
}

impl CopyBlocks {
    /// `pools` are different buffers, each `[num_blocks, block_bytes]`; `block_bytes` is a multiple of 4.
    pub fn new(ctx: &mut KernelContext<'_>, pools: &[BufferSlice], block_bytes: u64) -> Result<CopyBlocks, GpuError> {
        assert!(block_bytes.is_multiple_of(4), "a block of {block_bytes} bytes is not whole words");
        let words = (block_bytes / 4) as u32;
        let params = ctx.params.push(ctx.gpu, &Params { words })?;
        let mut parts = Vec::new();
        for pools in pools.chunks(MAX_BUFFERS as usize) {
            let kernel = ctx.gpu.kernel("copy_blocks", &defines(pools.len() as u32))?;
            let names: Vec<String> = (0..pools.len()).map(|b| format!("pool_{b}")).collect();
            let mut bindings = vec![("step_meta", ctx.step_meta), ("params", &params)];
            bindings.extend(names.iter().map(String::as_str).zip(pools));
            parts.push(ctx.gpu.bind(&kernel, &bindings)?);
        }
        Ok(CopyBlocks { parts, words })
    }

    pub fn record(&self, recording: &mut Recording, num_copies: u32) {
        for bound in &self.parts {
            recording.dispatch("copy blocks", bound, (num_copies * self.words).div_ceil(LANES));
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
