//! LoRA adapters on the GPU: slots of one size, and the kernels that add an adapter's part to each projection.
//!
//! Guarantees: nothing is recorded in a step in which no row has an adapter; a row without one has the bits that it has in
//! such a step, and a row with one those that it has alone. So deltas of Q, K and V join after the product; those of O and
//! down join the hidden state *before* the product that adds to it, since that one also writes what the next norm's readers
//! take; those of gate and up are added by the product before the activation. Matrices are f32, exactly as read.
//! It does not keep adapters in host memory: what is loaded is in a slot.

use super::super::{ExecError, LoadError};
use super::activation::Activation;
use super::ffn::FfnScratch;
use super::folding::{Link, Sum};
use super::forward::{Builder, Scratch};
use super::weights::{FfnWeights, LayerWeights, Part};
use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, Recording};
use crate::kernels::context::Activations;
use crate::kernels::lora_expand::{self, LoraExpand, To};
use crate::kernels::lora_shrink::{LoraShrink, Rows};
use crate::kernels::lora_work::{LoraShape, Place};
use crate::kernels::stride;
use crate::model::lora::{Adapter, PROJECTIONS};
use crate::model::spec::{MlpKind, ModelSpec};

/// How many adapters there is room for, and of which rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraLimits {
    pub max_adapters: u32,
    pub max_rank: u32,
}

impl LoraLimits {
    /// No adapter can be loaded, and nothing is allocated for them.
    pub const NONE: LoraLimits = LoraLimits { max_adapters: 0, max_rank: 0 };

    fn is_none(self) -> bool {
        self.max_adapters == 0
    }

    /// Rows of a projection in a slot.
    fn rank(self) -> u32 {
        self.max_rank.max(1).next_multiple_of(4)
    }
}

/// Projections that read the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Site {
    Qkv,
    O,
    GateUp,
    Down,
}

const SITES: [Site; 4] = [Site::Qkv, Site::O, Site::GateUp, Site::Down];

/// How a site's matrices lie in a slot, the same in every layer that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    k: u32,
    /// Of the first projection in [`PROJECTIONS`], and its bit.
    first_part: u32,
    parts: Vec<lora_expand::Part>,
    rank: u32,
}

impl Layout {
    /// `None` where the layer has no such projections.
    fn of(site: Site, spec: &ModelSpec, layer: u32, limits: LoraLimits) -> Option<Layout> {
        let has_experts = spec.experts_of(layer).is_some();
        let is_gated = spec.block.mlp == MlpKind::Gated;
        let range = match site {
            Site::Qkv => 0..3,
            Site::O => 3..4,
            Site::GateUp | Site::Down if has_experts => return None,
            Site::GateUp => {
                if is_gated {
                    4..6
                } else {
                    5..6
                }
            }
            Site::Down => 6..7,
        };
        let first_part = range.start;
        let shapes: Vec<Vec<u64>> =
            PROJECTIONS[range].iter().map(|role| role(layer).shape(spec)).collect::<Option<_>>()?;
        let mut at = 0;
        let mut parts = Vec::new();
        for shape in &shapes {
            let size = shape[0] as u32;
            parts.push(lora_expand::Part { size, at });
            // Q, K and V touch; gate and up begin at whole groups.
            at += if site == Site::Qkv { size } else { stride(size) };
        }
        Some(Layout { k: shapes[0][1] as u32, first_part: first_part as u32, parts, rank: limits.rank() })
    }

    fn rows(&self) -> Rows {
        let (num_parts, first_part) = (self.parts.len() as u32, self.first_part);
        Rows { k: self.k, rank: self.rank, num_parts, first_part }
    }

    /// Outputs of all parts with their padding.
    fn width(&self) -> u32 {
        self.parts.iter().map(|part| stride(part.size)).sum()
    }

    fn floats_of_a(&self) -> u64 {
        u64::from(self.rows().rows()) * u64::from(stride(self.k))
    }

    fn floats_of_b(&self) -> u64 {
        u64::from(self.rank) * u64::from(self.width())
    }

    fn bits(&self) -> u32 {
        ((1 << self.parts.len()) - 1) << self.first_part
    }
}

/// All sites of all layers.
fn layouts(spec: &ModelSpec, limits: LoraLimits) -> impl Iterator<Item = (u32, Site, Layout)> + '_ {
    let layers = if limits.is_none() || spec.block.latent.is_some() { 0 } else { spec.num_layers };
    let of_layer =
        move |l| SITES.into_iter().filter_map(move |site| Some((l, site, Layout::of(site, spec, l, limits)?)));
    (0..layers).flat_map(of_layer)
}

/// Bytes of all slots.
pub fn slot_bytes(spec: &ModelSpec, limits: LoraLimits) -> u64 {
    let floats = layouts(spec, limits).map(|(_, _, layout)| layout.floats_of_a() + layout.floats_of_b());
    floats.fold(0, u64::saturating_add).saturating_mul(4).saturating_mul(limits.max_adapters.into())
}

/// Bytes between the two products, for a token.
pub fn row_bytes(spec: &ModelSpec, limits: LoraLimits) -> u64 {
    4 * u64::from(layouts(spec, limits).map(|(_, _, layout)| layout.rows().rows()).max().unwrap_or(0))
}

/// A site's matrices in all slots.
struct SiteBuffers {
    layer: u32,
    site: Site,
    layout: Layout,
    a: Buffer, // f32 [slots, rows, stride(k)]
    b: Buffer, // f32 [slots, rank, width], times the scale
}

/// The adapters that are loaded, and where.
pub(super) struct LoraSlots {
    limits: LoraLimits,
    sites: Vec<SiteBuffers>,
    h: Option<BufferSlice>, // f32 [tokens, rows]
    slots: Vec<Option<(u64, Place)>>,
}

impl LoraSlots {
    pub(super) fn alloc(
        gpu: &Gpu,
        spec: &ModelSpec,
        limits: LoraLimits,
        max_tokens: u32,
    ) -> Result<LoraSlots, LoadError> {
        let mut sites = Vec::new();
        for (layer, site, layout) in layouts(spec, limits) {
            let alloc = |name: &str, floats: u64| -> Result<Buffer, LoadError> {
                let bytes = floats.saturating_mul(4).saturating_mul(limits.max_adapters.into());
                if bytes > gpu.caps().max_binding_bytes {
                    let LoraLimits { max_adapters, max_rank } = limits;
                    return Err(LoadError::Unsupported(format!(
                        "{max_adapters} LoRA adapters of rank {max_rank} need {bytes} bytes for one projection, this \
                         adapter's limit is {}; lower --max-loras or --max-lora-rank",
                        gpu.caps().max_binding_bytes
                    )));
                }
                Ok(gpu.alloc(&format!("layer {layer} {site:?} LoRA {name}"), bytes, BufferUse::Storage)?)
            };
            let (a, b) = (alloc("A", layout.floats_of_a())?, alloc("B", layout.floats_of_b())?);
            sites.push(SiteBuffers { layer, site, layout, a, b });
        }
        let bytes = row_bytes(spec, limits) * u64::from(max_tokens);
        let h = match sites.is_empty() {
            true => None,
            false => Some(gpu.alloc("LoRA between", bytes, BufferUse::Storage)?.whole()),
        };
        let num_slots = if sites.is_empty() { 0 } else { limits.max_adapters as usize };
        Ok(LoraSlots { limits, sites, h, slots: vec![None; num_slots] })
    }

    /// Whether adapters can be loaded at all.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub(super) fn place(&self, id: u64) -> Option<Place> {
        self.slots.iter().flatten().find(|(there, _)| *there == id).map(|(_, place)| *place)
    }

    pub(super) fn load(&mut self, gpu: &Gpu, spec: &ModelSpec, adapter: &Adapter) -> Result<(), ExecError> {
        if self.place(adapter.id).is_some() {
            return Ok(());
        }
        let LoraLimits { max_adapters, max_rank } = self.limits;
        if self.slots.is_empty() {
            return Err(ExecError::Rejected("no room was made for adapters (--enable-lora, --max-loras)".into()));
        }
        if adapter.rank > max_rank {
            let fault = format!("the adapter's rank is {}, --max-lora-rank is {max_rank}", adapter.rank);
            return Err(ExecError::Rejected(fault));
        }
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            let fault = format!("there is room for {max_adapters} adapters (--max-loras), all of which is taken");
            return Err(ExecError::Rejected(fault));
        };
        for site in &self.sites {
            site.write(gpu, slot as u64, adapter);
        }
        gpu.check().map_err(super::exec_error)?;
        let bits = (0..PROJECTIONS.len()).filter(|&p| adapter.changes(PROJECTIONS[p], spec)).map(|p| 1 << p);
        let place = Place { slot: slot as u32, rank: adapter.rank, parts: bits.sum() };
        self.slots[slot] = Some((adapter.id, place));
        Ok(())
    }

    pub(super) fn unload(&mut self, id: u64) {
        self.slots.iter_mut().filter(|slot| slot.is_some_and(|(there, _)| there == id)).for_each(|slot| *slot = None);
    }

    fn site(&self, layer: u32, site: Site) -> Option<(&SiteBuffers, &BufferSlice)> {
        let found = self.sites.iter().find(|s| (s.layer, s.site) == (layer, site))?;
        Some((found, self.h.as_ref()?))
    }
}

impl SiteBuffers {
    /// All of a slot, zeros where the adapter has nothing.
    fn write(&self, gpu: &Gpu, slot: u64, adapter: &Adapter) {
        let layout = &self.layout;
        let (rank, k, width) = (layout.rank as usize, stride(layout.k) as usize, layout.width() as usize);
        let mut a = vec![0f32; layout.floats_of_a() as usize];
        let mut b = vec![0f32; layout.floats_of_b() as usize];
        let mut first = 0;
        for (p, part) in layout.parts.iter().enumerate() {
            if let Some(delta) = adapter.delta(PROJECTIONS[layout.first_part as usize + p](self.layer)) {
                let rows = delta.a.chunks_exact(layout.k as usize);
                let own = a[p * rank * k..].chunks_exact_mut(k);
                own.zip(rows).for_each(|(to, row)| to[..row.len()].copy_from_slice(row));
                for (n, row) in delta.b.chunks_exact(delta.rank as usize).enumerate() {
                    row.iter().enumerate().for_each(|(j, value)| b[j * width + first + n] = *value);
                }
            }
            first += stride(part.size) as usize;
        }
        for (buffer, floats) in [(&self.a, &a), (&self.b, &b)] {
            let bytes: &[u8] = bytemuck::cast_slice(floats);
            gpu.write(&buffer.slice(slot * bytes.len() as u64, bytes.len() as u64), bytes);
        }
    }
}

/// Bound kernels of a site.
pub(super) struct SiteKernels {
    shrink: LoraShrink,
    expand: LoraExpand,
    bits: u32,
    is_before: bool,
}

impl SiteKernels {
    fn record(&self, recording: &mut Recording, shape: LoraShape) {
        if self.is_needed(shape) {
            self.shrink.record(recording, shape);
            self.expand.record(recording, shape);
        }
    }

    /// Whether some adapter of the step changes a projection of the site.
    pub(super) fn is_needed(&self, shape: LoraShape) -> bool {
        shape.num_tiles > 0 && shape.parts & self.bits != 0
    }

    /// What has to stand before the site's product.
    pub(super) fn record_before(&self, recording: &mut Recording, shape: LoraShape) {
        if self.is_before {
            self.record(recording, shape);
        }
    }

    /// What has to stand behind it.
    pub(super) fn record_after(&self, recording: &mut Recording, shape: LoraShape) {
        if !self.is_before {
            self.record(recording, shape);
        }
    }
}

/// What a site's shrink reads: the form that its products read where they lack the norm's factor, else floats where
/// there are any.
fn rows_of<'x>(x: &'x Activation, folded: Option<Activations<'x>>) -> Result<Activations<'x>, LoadError> {
    match (folded, &x.f32, &x.i8) {
        (Some(folded), ..) => Ok(folded),
        (None, Some(x), _) => Ok(Activations::F32(x)),
        (None, None, Some(x)) => Ok(Activations::I8(x)),
        (None, None, None) => Err(LoadError::Unsupported("a LoRA has no rows to read".into())),
    }
}

impl Builder<'_> {
    /// `None` where there is no room for adapters, here and below.
    fn site(
        &mut self,
        (layer, site): (usize, Site),
        x: Activations<'_>,
        to: To<'_>,
        is_before: bool,
    ) -> Result<Option<SiteKernels>, LoadError> {
        let loras = self.loras;
        let Some((buffers, h)) = loras.site(layer as u32, site) else { return Ok(None) };
        let (layout, label) = (&buffers.layout, format!("layer {layer} {site:?} LoRA"));
        let (a, b) = (buffers.a.whole(), buffers.b.whole());
        let shrink = LoraShrink::new(&mut self.context(), &label, layout.rows(), (x, &a), h)?;
        let sizes = (layout.rank, layout.first_part);
        let expand = LoraExpand::new(&mut self.context(), &label, &layout.parts, sizes, (&b, h), to)?;
        Ok(Some(SiteKernels { shrink, expand, bits: layout.bits(), is_before }))
    }

    /// Of Q, K and V.
    pub(super) fn lora_of_qkv(
        &mut self,
        l: usize,
        weights: &LayerWeights,
        link: Link,
        scratch: &Scratch,
        y_stride: u32,
    ) -> Result<Option<SiteKernels>, LoadError> {
        let x = rows_of(&scratch.normed, self.folded_rows(link, &weights.qkv, &scratch.normed)?)?;
        self.site((l, Site::Qkv), x, To::Added { y: &scratch.qkv, stride: y_stride }, false)
    }

    /// Of gate and up; what the product adds where it stores no sums.
    pub(super) fn lora_of_gate_up(
        &mut self,
        l: usize,
        weights: &FfnWeights,
        (normed, link): (&Activation, Link),
        scratch: &FfnScratch,
    ) -> Result<Option<SiteKernels>, LoadError> {
        let (FfnWeights::Dense(weights), Some((y, stride, gated))) = (weights, scratch.gate_up_rows(self)) else {
            return Ok(None);
        };
        let x = rows_of(normed, self.folded_rows(link, &weights.gate_up, normed)?)?;
        match weights.is_interleaved && gated.i8.is_some() {
            true => self.site((l, Site::GateUp), x, To::Interleaved { y }, true),
            false => self.site((l, Site::GateUp), x, To::Added { y, stride }, false),
        }
    }

    /// Of O or down, whose product goes to `to`.
    pub(super) fn lora_of_sum(
        &mut self,
        place: (usize, Site),
        x: &Activation,
        to: Sum<'_>,
    ) -> Result<Option<SiteKernels>, LoadError> {
        let (y, is_before) = match to {
            Sum::Folded { x, .. } => (x, true),
            Sum::Plain { y, accumulate } => (y, accumulate),
        };
        let stride = stride(self.spec.hidden_size);
        self.site(place, rows_of(x, None)?, To::Added { y, stride }, is_before)
    }

    fn folded_rows<'x>(
        &self,
        link: Link,
        parts: &[Part],
        x: &'x Activation,
    ) -> Result<Option<Activations<'x>>, LoadError> {
        match (link, parts.first()) {
            (Link::Folded | Link::Fused, Some(part)) => self.rows_behind(link, part, x).map(Some),
            _ => Ok(None),
        }
    }
}
