//! `lora_shrink`: A x of LoRA adapters, for the tokens that have one.
//!
//! Guarantees: a token's bits depend on its row of x and its adapter alone.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{Activations, KernelContext};
use super::lora_work::{LoraShape, TILE_TOKENS};
use super::{Class, GROUP, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Rows of a workgroup.
const ROWS: u32 = 4;

/// Mirrors `Params` of lora_shrink.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub groups: u32,
    pub rows: u32,
    pub rank: u32,
    pub first_part: u32,
    pub squares_at: u32,
    pub norm_k: u32,
    pub eps: f32,
}

/// How the matrices of some projections lie that read the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Inputs.
    pub k: u32,
    /// Rows of a projection in a slot, a multiple of 4.
    pub rank: u32,
    pub num_parts: u32,
    /// Bit of the first projection in [`super::lora_work::Place::parts`].
    pub first_part: u32,
}

impl Rows {
    /// Rows of a slot.
    pub fn rows(&self) -> u32 {
        self.rank * self.num_parts
    }
}

/// The kernel with its buffers bound.
#[derive(Debug)]
pub struct LoraShrink {
    label: String,
    bound: [(u32, Arc<Bound>); 2],
    workgroups: u32,
}

fn defines(class: Class, (is_quantised, is_normed): (bool, bool), columns: u32) -> Defines {
    let defines = class.defines().set("C", i64::from(columns));
    let defines = if is_quantised { defines.flag("I8") } else { defines };
    if is_normed { defines.flag("NORMED") } else { defines }
}

/// Every kernel of a class.
pub fn kernels(class: Class) -> Vec<(String, Defines)> {
    let normed = matches!(class, Class::Subgroup(_)).then_some((true, true));
    let forms = [(false, false), (true, false)].into_iter().chain(normed);
    let of = |form| [1, TILE_TOKENS].map(|columns| ("lora_shrink".to_string(), defines(class, form, columns)));
    forms.flat_map(of).collect()
}

impl LoraShrink {
    /// `a` is f32 `[slots, rows, stride(k)]`; writes f32 `[tokens, rows]`.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        rows: Rows,
        (x, a): (Activations<'_>, &BufferSlice),
        h: &BufferSlice,
    ) -> Result<LoraShrink, GpuError> {
        let Rows { k, rank, first_part, .. } = rows;
        let mut params = Params { groups: stride(k) / GROUP, rows: rows.rows(), rank, first_part, ..Params::default() };
        if let Activations::Folded(x, factor) = x {
            (params.squares_at, params.norm_k, params.eps) = (x.squares_at(), factor.k, factor.eps);
        }
        let params = ctx.params.push(ctx.gpu, &params)?;
        let form = (!matches!(x, Activations::F32(_)), matches!(x, Activations::Folded(..)));
        let mut bindings = vec![("step_meta", ctx.step_meta), ("a", a), ("h", h), ("params", &params)];
        match x {
            Activations::F32(x) => bindings.push(("x", x)),
            Activations::I8(x) | Activations::Folded(x, _) => bindings.extend([("xq", &x.q), ("xs", &x.scales)]),
        }
        let bind = |columns| -> Result<(u32, Arc<Bound>), GpuError> {
            let kernel = ctx.gpu.kernel("lora_shrink", &defines(ctx.class, form, columns))?;
            Ok((columns, ctx.gpu.bind(&kernel, &bindings)?))
        };
        let bound = [bind(1)?, bind(TILE_TOKENS)?];
        Ok(LoraShrink { label: label.into(), bound, workgroups: rows.rows() / ROWS })
    }

    /// Records it for a step's tiles.
    pub fn record(&self, recording: &mut Recording, shape: LoraShape) {
        for (_, bound) in self.bound.iter().filter(|(columns, _)| *columns == shape.columns) {
            recording.dispatch(self.label.clone(), bound, self.workgroups * shape.num_tiles);
        }
    }
}

/// A x of one token, `a` `[rows, k]`, in f64.
pub fn reference(a: &[f32], x: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(a, x)| f64::from(*a) * f64::from(*x)).sum::<f64>() as f32;
    a.chunks_exact(x.len()).map(dot).collect()
}
