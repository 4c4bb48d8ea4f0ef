//! `mlp`: what stands between the products of an MLP: act(gate) * up from the fused product of both (SwiGLU and GeGLU:
//! Shazeer, 2020, arXiv 2002.05202), or act(up) alone; as f32 or quantised.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{KernelContext, RowOutput};
use super::{Class, GROUP, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};
use crate::model::spec::{Activation, MlpKind};

/// Mirrors `Params` of mlp.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub k: u32,
    pub x_stride: u32,
    pub up_offset: u32,
    pub y_stride: u32,
    pub rows_per_token: u32,
}

/// The kernel with its buffers bound.
#[derive(Debug)]
pub struct Mlp {
    label: String,
    bound: Arc<Bound>,
    /// Of all rows of a token.
    groups: u32,
    lanes: u32,
}

/// The name of an activation in shared/activation.wgsl.
pub(super) fn activation_flag(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "SILU",
        Activation::Gelu => "GELU",
        Activation::GeluTanh => "GELU_TANH",
        Activation::Relu => "RELU",
        Activation::ClampedSwiglu => "CLAMPED_SWIGLU",
    }
}

/// The defines of one variant.
pub fn defines(class: Class, kind: MlpKind, activation: Activation, is_quantised: bool) -> Defines {
    let activation = activation_flag(activation);
    let flags = [("PLAIN", kind == MlpKind::Plain), ("I8", is_quantised)];
    let defines = class.defines().flag(activation);
    flags.iter().filter(|f| f.1).fold(defines, |defines, flag| defines.flag(flag.0))
}

impl Mlp {
    /// Reads gate at element 0 and up at `up_offset` of rows of `x_stride` elements (a plain MLP reads up alone); both
    /// have `k` elements. `k`, `up_offset` and `x_stride` must be multiples of 4. Writes rows of `stride(k)`. A token has
    /// `rows_per_token` rows: one, or one for each of its experts.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        (kind, activation): (MlpKind, Activation),
        x: &BufferSlice,
        (k, up_offset, x_stride, rows_per_token): (u32, u32, u32, u32),
        y: RowOutput<'_>,
    ) -> Result<Mlp, GpuError> {
        if !(k | up_offset | x_stride).is_multiple_of(4) {
            let message = format!("{k}, {up_offset} and {x_stride} are not all multiples of 4");
            return Err(GpuError::Validation { what: label.into(), message });
        }
        let params = Params { k, x_stride, up_offset, y_stride: stride(k), rows_per_token };
        let params = ctx.params.push(ctx.gpu, &params)?;
        let is_quantised = matches!(y, RowOutput::I8(_));
        let kernel = ctx.gpu.kernel("mlp", &defines(ctx.class, kind, activation, is_quantised))?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("params", &params)];
        bindings.extend(y.bindings());
        let bound = ctx.gpu.bind(&kernel, &bindings)?;
        Ok(Mlp { label: label.into(), bound, groups: rows_per_token * stride(k) / GROUP, lanes: ctx.class.lanes() })
    }

    /// Records it for `m` tokens.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, (m * self.groups).div_ceil(self.lanes));
    }
}

/// act(gate) * up of one element, in f64.
pub fn gated_reference(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::ClampedSwiglu => reference(activation, gate) * (up.clamp(-7.0, 7.0) + 1.0),
        _ => reference(activation, gate) * up,
    }
}

/// The activation of one element, in f64.
pub fn reference(activation: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let y = match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::ClampedSwiglu => x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()),
    };
    y as f32
}

/// The complementary error function: its power series where that converges well, Lentz's continued fraction beyond
/// (Abramowitz and Stegun 7.1.6 and 7.1.14).
fn erfc(x: f64) -> f64 {
    let z = x.abs();
    let root_pi = std::f64::consts::PI.sqrt();
    let tail = if z < 2.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..80 {
            term *= 2.0 * z * z / f64::from(2 * n + 1);
            sum += term;
        }
        1.0 - 2.0 / root_pi * (-z * z).exp() * sum
    } else {
        let fraction = (1..=60).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        (-z * z).exp() / (root_pi * fraction)
    };
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erfc_agrees_with_tabulated_values() {
        // Abramowitz and Stegun, tables 7.1 and 7.3.
        let known = [
            (0.0, 1.0),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (2.0, 0.004_677_734_981_047_266),
            (3.0, 2.209_049_699_858_544e-5),
            (-1.0, 1.842_700_792_949_715),
        ];
        for (x, want) in known {
            assert!((erfc(x) - want).abs() <= 1e-12, "erfc({x}) = {}", erfc(x));
        }
    }
}
