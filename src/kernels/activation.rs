//! Activations between kernels: rows of f32, or rows of signed bytes with a scale for each 32, or both.

use super::{GROUP, stride};
use crate::gpu::{Buffer, BufferSlice, BufferUse, Defines, Gpu, GpuError};

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

    pub(super) fn defines(self, defines: Defines) -> Defines {
        let defines = if self.f32 { defines.flag("OUT_F32") } else { defines };
        if self.i8 { defines.flag("OUT_I8") } else { defines }
    }
}

/// Buffers of `[rows, size]` activations in the forms asked for.
#[derive(Clone, Debug)]
pub struct Activation {
    /// f32 `[rows, stride(size)]`
    pub f32: Option<Buffer>,
    /// i8 `[rows, stride(size)]` and (scale, scale * sum) `[rows, stride(size) / 32]`
    pub i8: Option<(Buffer, Buffer)>,
}

impl Activation {
    pub fn alloc(gpu: &Gpu, label: &str, rows: u32, size: u32, forms: Forms) -> Result<Activation, GpuError> {
        let elements = u64::from(rows) * u64::from(stride(size));
        let alloc = |suffix: &str, bytes| gpu.alloc(&format!("{label}{suffix}"), bytes, BufferUse::Storage);
        let f32 = if forms.f32 { Some(alloc("", elements * 4)?) } else { None };
        let i8 = if forms.i8 {
            Some((alloc(" i8", elements)?, alloc(" scales", elements / u64::from(GROUP) * 8)?))
        } else {
            None
        };
        Ok(Activation { f32, i8 })
    }

    pub fn forms(&self) -> Forms {
        Forms { f32: self.f32.is_some(), i8: self.i8.is_some() }
    }

    /// The output bindings of a kernel that writes `y`, `yq` and `ys`.
    pub(super) fn outputs(&self) -> Vec<(&'static str, BufferSlice)> {
        let mut bindings = Vec::new();
        bindings.extend(self.f32.iter().map(|y| ("y", y.whole())));
        if let Some((q, s)) = &self.i8 {
            bindings.extend([("yq", q.whole()), ("ys", s.whole())]);
        }
        bindings
    }
}

/// Quantises `[rows, stride]` values as the kernels do: bytes `[rows, stride]` and (scale, scale * sum) per 32.
///
/// Panics when the length is not a multiple of 32.
pub fn quantise_reference(x: &[f32]) -> (Vec<i8>, Vec<[f32; 2]>) {
    assert!(x.len().is_multiple_of(GROUP as usize), "{} values are not whole groups", x.len());
    let mut q = Vec::with_capacity(x.len());
    let mut scales = Vec::with_capacity(x.len() / GROUP as usize);
    for group in x.chunks_exact(GROUP as usize) {
        let largest = group.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let scale = largest / 127.0;
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let bytes = group.iter().map(|v| (v * inverse).round_ties_even() as i8);
        let sum: i32 = bytes.clone().map(i32::from).sum();
        q.extend(bytes);
        scales.push([scale, scale * sum as f32]);
    }
    (q, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantised_groups_keep_their_largest_value_and_zeros_stay_zero() {
        let mut x = vec![0.0; 64];
        x[3] = -2.0;
        x[5] = 1.0;
        let (q, s) = quantise_reference(&x);
        assert_eq!((q[3], q[5], q[4], q[40]), (-127, 64, 0, 0));
        assert_eq!(s[1], [0.0, 0.0]);
        assert!((s[0][0] * 127.0 - 2.0).abs() < 1e-6);
        assert_eq!(s[0][1], s[0][0] * -63.0);
    }
}
