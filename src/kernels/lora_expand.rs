//! `lora_expand`: B h of LoRA adapters, added to what the tokens' projections gave.
//!
//! Guarantees: a token's bits depend on its rows of h and y and its adapter alone; rows of y of other tokens are neither
//! read nor written.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::KernelContext;
use super::lora_work::{LoraShape, TILE_TOKENS};
use super::{Class, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Most projections that share their inputs.
pub const MAX_PARTS: usize = 3;

/// Mirrors `Params` of lora_expand.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub quads: u32,
    pub quads1: u32,
    pub quads2: u32,
    pub size0: u32,
    pub size1: u32,
    pub size2: u32,
    pub at0: u32,
    pub at1: u32,
    pub at2: u32,
    pub rank: u32,
    pub rows: u32,
    pub y_stride: u32,
    pub first_part: u32,
}

/// A projection's outputs, and where they begin in a row of y.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub size: u32,
    pub at: u32,
}

/// Where the sums go.
#[derive(Clone, Copy, Debug)]
pub enum To<'a> {
    /// They are added to rows of so many elements.
    Added { y: &'a BufferSlice, stride: u32 },
    /// Those of gate and up are stored, in turns of 32, padded with zeros: what [`super::matmul::Target::Adapted`] reads.
    Interleaved { y: &'a BufferSlice },
}

/// The kernel with its buffers bound.
#[derive(Debug)]
pub struct LoraExpand {
    label: String,
    bound: [(u32, Arc<Bound>); 2],
    workgroups: u32,
}

fn defines(class: Class, is_interleaved: bool, columns: u32) -> Defines {
    let defines = class.defines().set("C", i64::from(columns));
    if is_interleaved { defines.flag("INTERLEAVED") } else { defines }
}

/// Every kernel of a class.
pub fn kernels(class: Class) -> Vec<(String, Defines)> {
    let of = |kind| [1, TILE_TOKENS].map(|columns| ("lora_expand".to_string(), defines(class, kind, columns)));
    [false, true].into_iter().flat_map(of).collect()
}

impl LoraExpand {
    /// `b` is f32 `[slots, rank, sum of stride(size)]`, `h` f32 `[tokens, rank * parts]`. At most [`MAX_PARTS`] parts,
    /// the first of which has the bit `first_part`; two of equal size where they are interleaved.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        parts: &[Part],
        (rank, first_part): (u32, u32),
        (b, h): (&BufferSlice, &BufferSlice),
        to: To<'_>,
    ) -> Result<LoraExpand, GpuError> {
        let quads = |parts: &[Part]| parts.iter().map(|part| stride(part.size) / 4).sum::<u32>();
        let part = |i: usize| parts.get(i).copied().unwrap_or(Part { size: 0, at: 0 });
        let (y, y_stride, is_interleaved) = match to {
            To::Added { y, stride } => (y, stride, false),
            To::Interleaved { y } => (y, 2 * stride(part(0).size), true),
        };
        let size = |i: usize| if is_interleaved { stride(part(i).size) } else { part(i).size };
        let at = |i: usize| if is_interleaved { 0 } else { part(i).at };
        let params = Params {
            quads: quads(parts),
            quads1: quads(&parts[..parts.len().min(1)]),
            quads2: quads(&parts[..parts.len().min(2)]),
            size0: size(0),
            size1: size(1),
            size2: size(2),
            at0: at(0),
            at1: at(1),
            at2: at(2),
            rank,
            rows: rank * parts.len() as u32,
            y_stride,
            first_part,
        };
        let workgroups = params.quads.div_ceil(ctx.class.lanes());
        let params = ctx.params.push(ctx.gpu, &params)?;
        let bindings = [("step_meta", ctx.step_meta), ("b", b), ("h", h), ("y", y), ("params", &params)];
        let bind = |columns| -> Result<(u32, Arc<Bound>), GpuError> {
            let kernel = ctx.gpu.kernel("lora_expand", &defines(ctx.class, is_interleaved, columns))?;
            Ok((columns, ctx.gpu.bind(&kernel, &bindings)?))
        };
        let bound = [bind(1)?, bind(TILE_TOKENS)?];
        Ok(LoraExpand { label: label.into(), bound, workgroups })
    }

    /// Records it for a step's tiles.
    pub fn record(&self, recording: &mut Recording, shape: LoraShape) {
        for (_, bound) in self.bound.iter().filter(|(columns, _)| *columns == shape.columns) {
            recording.dispatch(self.label.clone(), bound, self.workgroups * shape.num_tiles);
        }
    }
}

/// B h of one token, `b` `[rank, n]`, in f64.
pub fn reference(b: &[f32], h: &[f32]) -> Vec<f32> {
    let n = b.len() / h.len();
    let sum = |i: usize| h.iter().enumerate().map(|(j, h)| f64::from(*h) * f64::from(b[j * n + i])).sum::<f64>() as f32;
    (0..n).map(sum).collect()
}
