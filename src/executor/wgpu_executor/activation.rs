//! Activations between kernels: rows of f32, or rows of signed bytes with a scale for each 32, or both.

use crate::gpu::{BufferSlice, BufferUse, Gpu, GpuError};
use crate::kernels::context::{QuantisedRows, RowOutput};
use crate::kernels::{GROUP, stride};

/// In which forms a row is wanted by the matrices that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forms {
    pub f32: bool,
    pub i8: bool,
}

impl Forms {
    pub const F32: Forms = Forms { f32: true, i8: false };
    pub const I8: Forms = Forms { f32: false, i8: true };

    /// What serves both.
    pub fn union(self, other: Forms) -> Forms {
        Forms { f32: self.f32 || other.f32, i8: self.i8 || other.i8 }
    }
}

/// Of a group's scale and its product with the sum.
const SCALE_BYTES: u64 = 8;
/// Of a group's sum of squares, where rows may be folded.
pub const SQUARES_BYTES: u64 = 8;

/// Buffers of `[rows, size]` activations in the forms asked for.
#[derive(Clone, Debug)]
pub struct Activation {
    /// f32 `[rows, stride(size)]`
    pub f32: Option<BufferSlice>,
    pub i8: Option<QuantisedRows>,
}

impl Activation {
    pub fn alloc(gpu: &Gpu, label: &str, rows: u32, size: u32, forms: Forms) -> Result<Activation, GpuError> {
        Activation::alloc_rows(gpu, label, (rows, size), forms, SCALE_BYTES)
    }

    /// With room for sums of squares behind the scales, for rows whose norm may be folded.
    pub fn alloc_foldable(gpu: &Gpu, label: &str, rows: u32, size: u32, forms: Forms) -> Result<Activation, GpuError> {
        Activation::alloc_rows(gpu, label, (rows, size), forms, SCALE_BYTES + SQUARES_BYTES)
    }

    fn alloc_rows(
        gpu: &Gpu,
        label: &str,
        (rows, size): (u32, u32),
        forms: Forms,
        group_bytes: u64,
    ) -> Result<Activation, GpuError> {
        let elements = u64::from(rows) * u64::from(stride(size));
        let alloc = |suffix: &str, bytes| -> Result<BufferSlice, GpuError> {
            Ok(gpu.alloc(&format!("{label}{suffix}"), bytes, BufferUse::Storage)?.whole())
        };
        let f32 = if forms.f32 { Some(alloc("", elements * 4)?) } else { None };
        let i8 = if forms.i8 {
            let scales = alloc(" scales", elements / u64::from(GROUP) * group_bytes)?;
            Some(QuantisedRows { q: alloc(" i8", elements)?, scales })
        } else {
            None
        };
        Ok(Activation { f32, i8 })
    }

    /// What a producer has to write, a kernel for each.
    pub fn outputs(&self) -> impl Iterator<Item = RowOutput<'_>> {
        self.f32.iter().map(RowOutput::F32).chain(self.i8.iter().map(RowOutput::I8))
    }
}
