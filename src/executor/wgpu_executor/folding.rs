//! Which norms and activations become part of the products beside them.
//!
//! An RMS norm's factor commutes with a product: who writes the hidden state also writes `gain * x` quantised and the sums
//! of squares, and who reads it multiplies the factor at the end. So a norm needs no kernel of its own where the product
//! before it can write so and all products behind it can read so; likewise what stands between gate and up and the
//! product down. A dense layer of a llama's kind then is six dispatches: Q K V, rope, attention, O, gate and up, down.

use super::super::LoadError;
use super::activation::{Activation, Forms};
use super::forward::{Builder, Scratch};
use super::product::Product;
use super::weights::{FfnWeights, LayerWeights, ModelWeights, NormWeights, Part};
use crate::gpu::{Buffer, BufferSlice, Gpu};
use crate::kernels::context::{Activations, RmsFactor, RowCount};
use crate::kernels::matmul::{Fusion, Matmul, Output, Target};
use crate::kernels::norm::{self, Kind, Norm};
use crate::kernels::pack::Format;
use crate::kernels::{Class, QuantisedRows, stride};
use crate::model::spec::{self, NormKind, Residual};

/// How the rows behind a norm come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// A norm writes them, complete.
    Normed,
    /// A kernel writes them without their factor.
    Folded,
    /// The product before the norm does.
    Fused,
}

/// Where a product that closes a part of a layer adds it.
#[derive(Clone, Copy)]
pub(super) enum Sum<'a> {
    /// To rows of `stride(hidden)`.
    Plain { y: &'a BufferSlice, accumulate: bool },
    /// To the hidden state, with what stands behind the norm that follows.
    Folded { x: &'a BufferSlice, norm: &'a NormWeights, rows: &'a QuantisedRows },
}

/// Whether this device's kernels can do more than multiply.
pub fn can_fuse(gpu: &Gpu, precise: bool) -> bool {
    !precise && Fusion::is_possible(Class::of(gpu.caps())) && gpu.caps().max_storage_buffers >= Fusion::BUFFERS
}

/// Whether a product of gate and up of this type can write what down reads.
pub fn can_gate(gpu: &Gpu, precise: bool, format: Format) -> bool {
    can_fuse(gpu, precise) && Fusion::can_gate(format, Class::of(gpu.caps()))
}

impl Scratch {
    /// Where a product goes that stands before a link.
    pub(super) fn sum<'a>(&'a self, link: Link, norm: Option<&'a NormWeights>) -> Sum<'a> {
        match (link, norm, &self.normed.i8, &self.branch) {
            (Link::Fused, Some(norm), Some(rows), _) => Sum::Folded { x: &self.x, norm, rows },
            (.., Some(branch)) => Sum::Plain { y: branch, accumulate: false },
            _ => Sum::Plain { y: &self.x, accumulate: true },
        }
    }
}

impl Builder<'_> {
    fn takes_quantised(&self, part: &Part) -> bool {
        self.forms(part.matrix.format) == Forms::I8 && part.matrix.order.is_none()
    }

    /// Whether rows behind this norm can lack their factor.
    fn reads_folded(&self, norm: Option<&NormWeights>, parts: &[Part]) -> bool {
        let is_rms = self.spec.block.norm == NormKind::Rms && norm.is_some_and(|norm| norm.bias.is_none());
        can_fuse(self.gpu, self.cfg.precise)
            && self.spec.block.residual == Residual::Sequential
            && is_rms
            && !parts.is_empty()
            && parts.iter().all(|part| self.takes_quantised(part))
    }

    /// Whether a product can write the hidden state and what the readers behind a norm take.
    fn writes_folded(&self, part: &Part) -> bool {
        self.adds_as_is() && self.takes_quantised(part) && part.bias.is_none()
    }

    /// Before the attention of layer `l`.
    pub(super) fn link_to_attention(&self, weights: &ModelWeights, l: usize) -> Link {
        let layer = &weights.layers[l];
        let before = l.checked_sub(1).map(|l| &weights.layers[l].ffn);
        match before {
            _ if !self.reads_folded(layer.attn_norm.as_ref(), &layer.qkv) => Link::Normed,
            Some(FfnWeights::Dense(dense)) if self.writes_folded(&dense.down) => Link::Fused,
            _ => Link::Folded,
        }
    }

    /// Before the MLP of a layer.
    pub(super) fn link_to_ffn(&self, layer: &LayerWeights) -> Link {
        match &layer.ffn {
            FfnWeights::Dense(dense) if self.reads_folded(layer.ffn_norm.as_ref(), &dense.gate_up) => {
                if self.writes_folded(&layer.o) { Link::Fused } else { Link::Folded }
            }
            _ => Link::Normed,
        }
    }

    /// The norm behind layer `l` whose readers are served by its last product. What stands behind the last layer is read
    /// by nobody, but one kernel serves all layers.
    pub(super) fn norm_after<'w>(&self, weights: &'w ModelWeights, l: usize) -> Option<&'w NormWeights> {
        if l + 1 < weights.layers.len() {
            let is_fused = self.link_to_attention(weights, l + 1) == Link::Fused;
            return weights.layers[l + 1].attn_norm.as_ref().filter(|_| is_fused);
        }
        let is_fused = l > 0 && self.link_to_attention(weights, l) == Link::Fused;
        let can_write = matches!(&weights.layers[l].ffn, FfnWeights::Dense(dense) if self.writes_folded(&dense.down));
        Some(&weights.output_norm).filter(|_| is_fused && can_write)
    }

    /// What products read that stand behind a link.
    pub(super) fn rows_behind<'x>(
        &self,
        link: Link,
        part: &Part,
        rows: &'x Activation,
    ) -> Result<Activations<'x>, LoadError> {
        match (link, &rows.i8) {
            (Link::Folded | Link::Fused, Some(rows)) => {
                Ok(Activations::Folded(rows, RmsFactor { k: self.spec.hidden_size, eps: self.spec.rms_eps }))
            }
            _ => self.activations(part.matrix.format, rows, &part.matrix.label),
        }
    }

    /// A product of normed rows.
    pub(super) fn product(
        &mut self,
        part: &Part,
        (rows, link): (&Activation, Link),
        (y, y_stride): (&BufferSlice, u32),
    ) -> Result<Product, LoadError> {
        if link == Link::Normed {
            return self.matmul(part, rows, (y, y_stride), false);
        }
        let rows = self.rows_behind(link, part, rows)?;
        let out = Output { slice: y, stride: y_stride, offset: part.y_offset, accumulate: false };
        self.fused(part, rows, Target::Sums(out))
    }

    /// A product that closes a part of a layer.
    pub(super) fn sum(&mut self, part: &Part, rows: &Activation, to: Sum<'_>) -> Result<Product, LoadError> {
        match to {
            Sum::Plain { y, accumulate } => self.matmul(part, rows, (y, stride(self.spec.hidden_size)), accumulate),
            Sum::Folded { x, norm, rows: folded } => self.hidden_product(part, rows, x, (norm, folded)),
        }
    }

    /// The norm before attention or an MLP, unless the product before it does its work.
    pub(super) fn norm_of_link(
        &mut self,
        link: Link,
        norm: Option<&NormWeights>,
        scratch: &Scratch,
    ) -> Result<Vec<Norm>, LoadError> {
        match (link, norm, &scratch.normed.i8) {
            (Link::Fused, ..) => Ok(Vec::new()),
            (Link::Folded, Some(norm), Some(rows)) => {
                let (gain, size) = (norm.gain.whole(), (self.spec.hidden_size, self.spec.rms_eps));
                let (kind, target) = (Kind::Rms { gain: &gain }, norm::Target::Folded(rows));
                let norm = Norm::new(&mut self.context(), "norm", &scratch.x, kind, target, size, RowCount::Tokens)?;
                Ok(vec![norm])
            }
            _ => self.norm(norm, scratch, &scratch.normed, RowCount::Tokens),
        }
    }

    /// A product that adds to the hidden state `x` and writes what stands behind the norm that follows.
    pub(super) fn hidden_product(
        &mut self,
        part: &Part,
        rows: &Activation,
        x: &BufferSlice,
        (norm, folded): (&NormWeights, &QuantisedRows),
    ) -> Result<Product, LoadError> {
        let rows = self.activations(part.matrix.format, rows, &part.matrix.label)?;
        let target = Target::Hidden { x, gain: &norm.gain.whole(), folded };
        self.fused(part, rows, target)
    }

    /// Gate and up, and what stands between them and down.
    pub(super) fn gated_product(
        &mut self,
        part: &Part,
        rows: Activations<'_>,
        activation: spec::Activation,
        y: &QuantisedRows,
    ) -> Result<Product, LoadError> {
        self.fused(part, rows, Target::Gated { activation, y })
    }

    pub(super) fn fused(
        &mut self,
        part: &Part,
        rows: Activations<'_>,
        target: Target<'_>,
    ) -> Result<Product, LoadError> {
        let (matrix, bias) = (&part.matrix, part.bias.as_ref().map(Buffer::whole));
        let matmul =
            Matmul::to(&mut self.context(), &matrix.label, matrix, rows, target, bias.as_ref(), RowCount::Tokens)?;
        Ok(Product { gather: None, matmul })
    }
}
