//! `norm`: RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467) or LayerNorm (Ba et al., 2016, arXiv 1607.06450) as f32
//! or quantised, or added to the hidden state; also of the gathered logit rows.
//!
//! Guarantees: a row's result depends on that row alone. Padding of x, gain and bias must be zero; that of the result
//! then is.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::context::{KernelContext, QuantisedRows, RowCount, RowOutput};
use super::{Class, stride};
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of norm.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub k: u32,
    pub stride: u32,
    pub eps: f32,
    pub scale: f32,
    pub squares_at: u32,
}

/// What is computed. Gains and biases have `stride(k)` elements, zero beyond k.
#[derive(Clone, Copy, Debug)]
pub enum Kind<'a> {
    Rms {
        gain: &'a BufferSlice,
    },
    Layer {
        gain: &'a BufferSlice,
        bias: Option<&'a BufferSlice>,
    },
    /// The row as it is.
    Copy,
}

/// Where the result goes.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    Row(RowOutput<'a>),
    /// Of an RMS norm: `gain * x` quantised, and the sums of squares of which products make the rest.
    Folded(&'a QuantisedRows),
    /// `y += scale * result`, f32 `[num_tokens, stride(k)]`.
    Add {
        y: &'a BufferSlice,
        scale: f32,
    },
}

/// A variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Rms,
    Layer { bias: bool },
    Copy,
}

/// How a variant writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    F32,
    I8,
    Folded,
    Add,
}

/// A norm with its buffers bound.
#[derive(Debug)]
pub struct Norm {
    label: String,
    bound: Arc<Bound>,
}

/// The defines of one variant.
pub fn defines(class: Class, form: Form, writes: Writes, rows: RowCount) -> Defines {
    let flags = [
        ("NORMS", form != Form::Copy),
        ("RMS", form == Form::Rms),
        ("LAYER", matches!(form, Form::Layer { .. })),
        ("BIAS", form == Form::Layer { bias: true }),
        ("I8", matches!(writes, Writes::I8 | Writes::Folded)),
        ("FOLDED", writes == Writes::Folded),
        ("ADD", writes == Writes::Add),
        ("GATHER", rows == RowCount::Logits),
    ];
    flags.iter().filter(|f| f.1).fold(class.defines(), |defines, flag| defines.flag(flag.0))
}

impl Norm {
    /// Normalises rows of `k` elements of `x` (f32 `[num_tokens, stride(k)]`). `RowCount::Logits` reads the tokens whose
    /// logits are wanted and writes one row for each.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        x: &BufferSlice,
        kind: Kind<'_>,
        target: Target<'_>,
        (k, eps): (u32, f32),
        rows: RowCount,
    ) -> Result<Norm, GpuError> {
        let (form, writes) = (kind.form(), target.writes());
        let scale = if let Target::Add { scale, .. } = target { scale } else { 1.0 };
        let squares_at = if let Target::Folded(y) = target { y.squares_at() } else { 0 };
        let params = ctx.params.push(ctx.gpu, &Params { k, stride: stride(k), eps, scale, squares_at })?;
        let kernel = ctx.gpu.kernel("norm", &defines(ctx.class, form, writes, rows))?;
        let mut bindings = vec![("step_meta", ctx.step_meta), ("x", x), ("params", &params)];
        match kind {
            Kind::Rms { gain } => bindings.push(("gain", gain)),
            Kind::Layer { gain, bias } => {
                bindings.push(("gain", gain));
                bindings.extend(bias.map(|bias| ("shift", bias)));
            }
            Kind::Copy => {}
        }
        match target {
            Target::Row(y) => bindings.extend(y.bindings()),
            Target::Folded(y) => bindings.extend(RowOutput::I8(y).bindings()),
            Target::Add { y, .. } => bindings.push(("y", y)),
        }
        Ok(Norm { label: label.into(), bound: ctx.gpu.bind(&kernel, &bindings)? })
    }

    /// Records it for `m` rows.
    pub fn record(&self, recording: &mut Recording, m: u32) {
        recording.dispatch(self.label.clone(), &self.bound, m);
    }
}

impl Kind<'_> {
    fn form(&self) -> Form {
        match self {
            Kind::Rms { .. } => Form::Rms,
            Kind::Layer { bias, .. } => Form::Layer { bias: bias.is_some() },
            Kind::Copy => Form::Copy,
        }
    }
}

impl Target<'_> {
    fn writes(&self) -> Writes {
        match self {
            Target::Row(RowOutput::F32(_)) => Writes::F32,
            Target::Row(RowOutput::I8(_)) => Writes::I8,
            Target::Folded(_) => Writes::Folded,
            Target::Add { .. } => Writes::Add,
        }
    }
}

/// RMSNorm of one row, in f64. `gain` has as many elements as `x`.
pub fn reference(x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(gain).map(|(x, g)| (f64::from(*x) * scale * f64::from(*g)) as f32).collect()
}

/// LayerNorm of one row, in f64. `gain` and `bias` have as many elements as `x`.
pub fn layer_reference(x: &[f32], gain: &[f32], bias: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    let one =
        |(x, (g, b)): (&f32, (&f32, &f32))| ((f64::from(*x) - mean) * scale * f64::from(*g) + f64::from(*b)) as f32;
    x.iter().zip(gain.iter().zip(bias)).map(one).collect()
}
