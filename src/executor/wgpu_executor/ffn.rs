//! What follows attention in a layer: an MLP, or a mixture of experts with the expert that all tokens pass.

use super::super::LoadError;
use super::activation::{Activation, Forms};
use super::folding::{Link, Sum};
use super::forward::Builder;
use super::loras::{Site, SiteKernels};
use super::product::Product;
use super::weights::{DenseWeights, ExpertPartWeights, ExpertWeights, FfnWeights, ModelWeights, Part};
use crate::gpu::{Buffer, BufferSlice, BufferUse, GpuError, Recording};
use crate::kernels::combine::{self, Combine};
use crate::kernels::expert_matmul::{self, ExpertMatmul};
use crate::kernels::expert_pairs::{ExpertPairs, Layout};
use crate::kernels::lora_work::LoraShape;
use crate::kernels::matmul::Target;
use crate::kernels::mlp::Mlp;
use crate::kernels::route::{self, Route};
use crate::kernels::stride;
use crate::model::experts::ExpertSpec;
use crate::model::spec::MlpKind;

/// Bound kernels of one layer.
pub(super) enum Ffn {
    Dense(Box<Dense>),
    Experts(Box<Experts>),
}

pub(super) struct Dense {
    gate_up: Vec<Product>,
    mlp: Vec<Mlp>,
    down: Product,
    /// Where there is room for adapters.
    lora: Option<DenseLora>,
}

struct DenseLora {
    gate_up: SiteKernels,
    /// In place of the products that do what stands between them and down: these add what adapters give first.
    adapted: Vec<Product>,
    down: SiteKernels,
}

pub(super) struct Experts {
    /// Also what mixes the shared expert in.
    router: Vec<Product>,
    route: Route,
    pairs: ExpertPairs,
    gate_up: Vec<ExpertMatmul>,
    mlp: Vec<Mlp>,
    down: ExpertMatmul,
    shared: Option<Dense>,
    combine: Combine,
}

/// Activations that all layers share.
pub(super) struct FfnScratch {
    /// `None` where all layers have experts.
    dense: Option<DenseScratch>,
    experts: Option<ExpertScratch>,
}

struct DenseScratch {
    size: u32,
    gate_up: BufferSlice, // f32 [tokens, 2, stride(size)]
    gated: Activation,
}

struct ExpertScratch {
    layout: Layout,
    logits: BufferSlice, // f32 [tokens, logits_stride]
    logits_stride: u32,
    chosen: BufferSlice,                         // u32 [tokens, active]
    shares: BufferSlice,                         // f32 [tokens, active]
    work: BufferSlice,                           // see expert_pairs
    gate_up: BufferSlice,                        // f32 [tokens, active, 2, stride(intermediate)]
    gated: Activation,                           // [tokens, active, intermediate]
    parts: BufferSlice,                          // f32 [tokens, active, stride(hidden)]
    shared: Option<(DenseScratch, BufferSlice)>, // with f32 [tokens, stride(hidden)]
}

impl Ffn {
    pub(super) fn record(&self, recording: &mut Recording, n: u32, lora: LoraShape) {
        match self {
            Ffn::Dense(dense) => dense.record(recording, n, lora),
            Ffn::Experts(experts) => experts.record(recording, n),
        }
    }
}

impl Dense {
    fn record(&self, recording: &mut Recording, n: u32, shape: LoraShape) {
        let lora = self.lora.as_ref();
        lora.iter().for_each(|lora| lora.gate_up.record_before(recording, shape));
        let adapted = lora.filter(|lora| lora.gate_up.is_needed(shape) && !lora.adapted.is_empty());
        adapted.map_or(&self.gate_up, |lora| &lora.adapted).iter().for_each(|m| m.record(recording, n));
        lora.iter().for_each(|lora| lora.gate_up.record_after(recording, shape));
        self.mlp.iter().for_each(|k| k.record(recording, n));
        lora.iter().for_each(|lora| lora.down.record_before(recording, shape));
        self.down.record(recording, n);
        lora.iter().for_each(|lora| lora.down.record_after(recording, shape));
    }
}

impl Experts {
    fn record(&self, recording: &mut Recording, n: u32) {
        self.router.iter().for_each(|m| m.record(recording, n));
        self.route.record(recording, n);
        self.pairs.record(recording, n);
        self.gate_up.iter().for_each(|m| m.record(recording, n));
        self.mlp.iter().for_each(|k| k.record(recording, n));
        self.down.record(recording, n);
        self.shared.iter().for_each(|shared| shared.record(recording, n, LoraShape::default()));
        self.combine.record(recording, n);
    }
}

impl FfnWeights {
    /// The matrices that read the normed hidden state.
    pub(super) fn input_forms(&self, b: &Builder<'_>) -> Vec<Forms> {
        match self {
            FfnWeights::Dense(dense) => dense.gate_up.iter().map(|p| b.input_forms(&p.matrix)).collect(),
            FfnWeights::Experts(experts) => {
                let shared = experts.shared.iter().flat_map(|shared| &shared.gate_up);
                let plain = experts.router.iter().chain(shared).map(|p| b.input_forms(&p.matrix));
                plain.chain(experts.gate_up.iter().map(|p| b.forms(p.matrix.format))).collect()
            }
        }
    }
}

impl FfnScratch {
    /// The rows of gate and up, their elements, and where what stands between them and down goes.
    pub(super) fn gate_up_rows(&self, b: &Builder<'_>) -> Option<(&BufferSlice, u32, &Activation)> {
        self.dense.as_ref().map(|dense| (&dense.gate_up, b.gate_up_stride(dense.size), &dense.gated))
    }
}

impl Builder<'_> {
    pub(super) fn ffn_scratch(&self, weights: &ModelWeights) -> Result<FfnScratch, LoadError> {
        let dense = weights.layers.iter().filter_map(|l| match &l.ffn {
            FfnWeights::Dense(dense) => Some(dense),
            FfnWeights::Experts(_) => None,
        });
        let experts: Vec<&ExpertWeights> = weights.layers.iter().filter_map(|l| l.ffn.experts()).collect();
        let spec = self.spec.block.experts.as_ref().filter(|_| !experts.is_empty());
        Ok(FfnScratch {
            dense: self.dense_scratch("", self.spec.intermediate_size, dense)?,
            experts: spec.map(|spec| self.expert_scratch(spec, &experts)).transpose()?,
        })
    }

    /// `None` for no layers.
    fn dense_scratch<'w>(
        &self,
        label: &str,
        size: u32,
        layers: impl Iterator<Item = &'w DenseWeights>,
    ) -> Result<Option<DenseScratch>, LoadError> {
        let Some(forms) = layers.map(|l| self.input_forms(&l.down.matrix)).reduce(Forms::union) else {
            return Ok(None);
        };
        let rows = self.cfg.max_tokens_per_step;
        Ok(Some(DenseScratch {
            size,
            gate_up: self.f32_rows(&format!("{label}gate+up"), rows, self.gate_up_stride(size))?,
            gated: Activation::alloc(self.gpu, &format!("{label}gated"), rows, size, forms)?,
        }))
    }

    fn expert_scratch(&self, spec: &ExpertSpec, layers: &[&ExpertWeights]) -> Result<ExpertScratch, LoadError> {
        let (rows, inner) = (self.cfg.max_tokens_per_step, spec.intermediate_size);
        let layout = Layout::new(spec, rows);
        let pairs = rows * spec.num_active;
        let alloc = |label: &str, bytes: u64| -> Result<BufferSlice, GpuError> {
            Ok(self.gpu.alloc(label, bytes, BufferUse::Storage)?.whole())
        };
        let logits_stride = stride(spec.num_experts + u32::from(spec.has_shared_gate));
        let forms = self.forms_of(layers.iter().map(|l| self.forms(l.down.matrix.format)));
        let shared = layers.iter().filter_map(|l| l.shared.as_ref());
        let shared = match self.dense_scratch("shared expert ", spec.shared_size, shared)? {
            Some(scratch) => Some((scratch, self.f32_rows("shared expert", rows, stride(self.spec.hidden_size))?)),
            None => None,
        };
        Ok(ExpertScratch {
            layout,
            logits: self.f32_rows("router logits", rows, logits_stride)?,
            logits_stride,
            chosen: alloc("chosen experts", u64::from(pairs) * 4)?,
            shares: alloc("shares of experts", u64::from(pairs) * 4)?,
            work: alloc("expert pairs", layout.bytes())?,
            gate_up: self.f32_rows("experts' gate+up", pairs, self.gate_up_stride(inner))?,
            gated: Activation::alloc(self.gpu, "experts' gated", pairs, inner, forms)?,
            parts: self.f32_rows("experts' parts", pairs, stride(self.spec.hidden_size))?,
            shared,
        })
    }

    /// `rows` is what it reads and the link that it stands behind; mixtures add to the hidden state `x` themselves.
    pub(super) fn ffn(
        &mut self,
        (l, weights): (usize, &FfnWeights),
        rows: (&Activation, Link),
        scratch: &FfnScratch,
        to: Sum<'_>,
        x: &BufferSlice,
    ) -> Result<Ffn, LoadError> {
        let normed = rows.0;
        let gate_up = self.lora_of_gate_up(l, weights, rows, scratch)?;
        match (weights, &scratch.dense, &scratch.experts, &self.spec.block.experts) {
            (FfnWeights::Dense(weights), Some(scratch), ..) => {
                let dense = self.dense(weights, rows, scratch, to)?;
                let lora = match gate_up {
                    Some(gate_up) => self.dense_lora((l, weights), gate_up, rows, scratch, to)?,
                    None => None,
                };
                Ok(Ffn::Dense(Box::new(Dense { lora, ..dense })))
            }
            (FfnWeights::Experts(weights), _, Some(scratch), Some(spec)) => {
                Ok(Ffn::Experts(Box::new(self.experts(weights, spec, normed, scratch, x)?)))
            }
            _ => Err(LoadError::Unsupported("a layer has weights of another kind than the model".into())),
        }
    }

    fn dense(
        &mut self,
        weights: &DenseWeights,
        (rows, link): (&Activation, Link),
        scratch: &DenseScratch,
        to: Sum<'_>,
    ) -> Result<Dense, LoadError> {
        let (gate_up, mlp): (Result<Vec<_>, _>, _) = match &scratch.gated.i8 {
            Some(gated) if weights.is_interleaved => {
                let to_gated = |p| {
                    let rows = self.rows_behind(link, p, rows)?;
                    self.gated_product(p, rows, self.spec.block.activation, gated)
                };
                (weights.gate_up.iter().map(to_gated).collect(), Vec::new())
            }
            _ => {
                let (out, y_stride) = (&scratch.gate_up, self.gate_up_stride(scratch.size));
                let gate_up = weights.gate_up.iter().map(|p| self.product(p, (rows, link), (out, y_stride)));
                (gate_up.collect(), self.mlp(out, scratch.size, 1, &scratch.gated)?)
            }
        };
        let gate_up = gate_up?;
        Ok(Dense { gate_up, mlp, down: self.sum(&weights.down, &scratch.gated, to)?, lora: None })
    }

    fn dense_lora(
        &mut self,
        (l, weights): (usize, &DenseWeights),
        gate_up: SiteKernels,
        (rows, link): (&Activation, Link),
        scratch: &DenseScratch,
        to: Sum<'_>,
    ) -> Result<Option<DenseLora>, LoadError> {
        let adapted: Result<Vec<Product>, LoadError> = match &scratch.gated.i8 {
            Some(gated) if weights.is_interleaved => {
                let parts = weights.gate_up.iter();
                let added = &scratch.gate_up;
                let adapted = |part| {
                    let rows = self.rows_behind(link, part, rows)?;
                    let target = Target::Adapted { activation: self.spec.block.activation, y: gated, added };
                    self.fused(part, rows, target)
                };
                parts.map(adapted).collect()
            }
            _ => Ok(Vec::new()),
        };
        let down = self.lora_of_sum((l, Site::Down), &scratch.gated, to)?;
        let adapted = adapted?;
        Ok(down.map(|down| DenseLora { gate_up, adapted, down }))
    }

    /// What stands between the products.
    fn mlp(&mut self, x: &BufferSlice, size: u32, rows: u32, out: &Activation) -> Result<Vec<Mlp>, LoadError> {
        let block = &self.spec.block;
        let up_at = if block.mlp == MlpKind::Gated { stride(size) } else { 0 };
        let (kind, shape) = ((block.mlp, block.activation), (size, up_at, self.gate_up_stride(size), rows));
        let mlp = |y| Mlp::new(&mut self.context(), "mlp", kind, x, shape, y).map_err(LoadError::from);
        out.outputs().map(mlp).collect()
    }

    fn experts(
        &mut self,
        weights: &ExpertWeights,
        spec: &ExpertSpec,
        normed: &Activation,
        scratch: &ExpertScratch,
        x: &BufferSlice,
    ) -> Result<Experts, LoadError> {
        let (layout, inner, hidden) = (scratch.layout, spec.intermediate_size, stride(self.spec.hidden_size));
        let logits = (&scratch.logits, scratch.logits_stride);
        let selection_bias = weights.selection_bias.as_ref().map(Buffer::whole);
        let (chosen, shares) = (&scratch.chosen, &scratch.shares);
        let routing = route::Buffers { logits: logits.0, selection_bias: selection_bias.as_ref(), chosen, shares };
        let rows = |y, y_stride, pairs_per_row| expert_matmul::Rows {
            layout,
            work: &scratch.work,
            pairs_per_row,
            x_stride: None,
            y,
            y_stride,
            y_offset: 0,
        };
        let (to_gate_up, to_parts) =
            (rows(&scratch.gate_up, self.gate_up_stride(inner), spec.num_active), rows(&scratch.parts, hidden, 1));
        let shared = match (&weights.shared, &scratch.shared) {
            (Some(weights), Some((scratch, out))) => {
                let to = Sum::Plain { y: out, accumulate: false };
                Some((self.dense(weights, (normed, Link::Normed), scratch, to)?, out))
            }
            _ => None,
        };
        let sum = combine::Params {
            num_active: spec.num_active,
            stride: hidden,
            scale: self.spec.block.residual_scale,
            logits_stride: scratch.logits_stride,
            mix_at: spec.num_experts,
        };
        let parts = combine::Buffers {
            shares,
            parts: &scratch.parts,
            shared: shared.as_ref().map(|(_, out)| *out),
            mix_logits: spec.has_shared_gate.then_some(logits.0),
            y: x,
        };
        let router: Vec<&Part> = weights.router.iter().collect();
        Ok(Experts {
            router: router.into_iter().map(|p| self.matmul(p, normed, logits, false)).collect::<Result<_, _>>()?,
            route: Route::new(&mut self.context(), spec, scratch.logits_stride, &routing)?,
            pairs: ExpertPairs::new(&mut self.context(), layout, chosen, &scratch.work)?,
            gate_up: weights
                .gate_up
                .iter()
                .map(|p| self.expert_matmul(p, normed, to_gate_up))
                .collect::<Result<_, _>>()?,
            mlp: self.mlp(&scratch.gate_up, inner, spec.num_active, &scratch.gated)?,
            down: self.expert_matmul(&weights.down, &scratch.gated, to_parts)?,
            combine: Combine::new(&mut self.context(), sum, &parts)?,
            shared: shared.map(|(dense, _)| dense),
        })
    }

    fn expert_matmul(
        &mut self,
        part: &ExpertPartWeights,
        x: &Activation,
        rows: expert_matmul::Rows<'_>,
    ) -> Result<ExpertMatmul, LoadError> {
        let bias = part.bias.as_ref().map(Buffer::whole);
        let x = self.activations(part.matrix.format, x, &part.matrix.label)?;
        let rows = expert_matmul::Rows { y_offset: part.y_offset, ..rows };
        Ok(ExpertMatmul::new(&mut self.context(), &part.matrix, x, rows, bias.as_ref())?)
    }
}
