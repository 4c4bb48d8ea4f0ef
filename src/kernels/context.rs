//! What every kernel needs to be built.

use super::{Choices, Class, DeviceClass, ParamArena};
use crate::gpu::{BufferSlice, Gpu};

/// Borrowed by constructors of kernels while a model is loaded.
pub struct KernelContext<'a> {
    pub gpu: &'a Gpu,
    pub class: Class,
    pub params: &'a mut ParamArena,
    /// Which way each product takes.
    pub choices: &'a mut Choices,
    /// The buffer that [`super::step_meta::encode`]'s words are written to.
    pub step_meta: &'a BufferSlice,
    /// Multiply 4-bit weights in pairs: for adapters whose packed dot product is many instructions. The results are the
    /// same bits; see [`KernelContext::prefers_pairs`].
    pub multiply_pairs: bool,
    /// Side of the cooperative matrices by which products of many tokens are computed; see [`super::matrix_units`].
    pub matrix_units: Option<u32>,
}

impl KernelContext<'_> {
    /// What the adapter's class begins with.
    pub fn prefers_pairs(gpu: &Gpu) -> bool {
        DeviceClass::of(gpu.caps()).multiplies_pairs
    }
}

/// Which count a kernel's rows follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCount {
    /// One row for each token of the step.
    Tokens,
    /// One row for each logit row.
    Logits,
}

impl RowCount {
    pub(super) fn flag(self) -> u32 {
        u32::from(self == RowCount::Logits)
    }
}

/// Activations as a kernel reads them; see the conventions in [`super`].
#[derive(Clone, Copy, Debug)]
pub enum Activations<'a> {
    F32(&'a BufferSlice),
    I8(&'a QuantisedRows),
    /// Rows whose RMS norm lacks its factor, which the product makes of their sums of squares.
    Folded(&'a QuantisedRows, RmsFactor),
}

/// What the factor of an RMS norm is made of, beside a row's sums of squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsFactor {
    /// Elements of a row, without padding.
    pub k: u32,
    pub eps: f32,
}

/// Buffers of quantised activations.
#[derive(Clone, Debug)]
pub struct QuantisedRows {
    /// `vec4<u32>` of 16 x i8, `[rows, stride / 16]`.
    pub q: BufferSlice,
    /// `vec2<f32>` (scale, scale * sum of q), `[rows, stride / 32]`. Rows that may be folded have as many again:
    /// (sum of squares of a group before the gain, 0).
    pub scales: BufferSlice,
}

impl QuantisedRows {
    /// Where the sums of squares begin in `scales`, in pairs.
    pub(super) fn squares_at(&self) -> u32 {
        (self.scales.size / 16) as u32
    }
}

/// Where a kernel that ends a chain of element-wise work writes.
#[derive(Clone, Copy, Debug)]
pub enum RowOutput<'a> {
    F32(&'a BufferSlice),
    I8(&'a QuantisedRows),
}

impl<'a> RowOutput<'a> {
    /// The names that kernels give their output.
    pub(super) fn bindings(self) -> Vec<(&'static str, &'a BufferSlice)> {
        match self {
            RowOutput::F32(y) => vec![("y", y)],
            RowOutput::I8(y) => vec![("yq", &y.q), ("ys", &y.scales)],
        }
    }
}
