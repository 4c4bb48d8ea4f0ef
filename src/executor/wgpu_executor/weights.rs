//! The model's tensors on the GPU, grouped as the forward pass reads them: Q, K and V (gate and up) of one storage type
//! make one matrix, so that one dispatch serves them; mixed types make several.

use super::super::{LoadError, LoadProgress};
use super::folding;
use crate::gpu::streamed::Slot;
use crate::gpu::{Buffer, BufferUse, Gpu, Streamed, Uploader};
use crate::kernels::pack::Format;
use crate::kernels::weights::{ExpertMatrix, ExpertShape, PackedMatrix};
use crate::kernels::{GROUP, stride};
use crate::model::experts::{ExpertPart, ExpertSpec, MixPart};
use crate::model::latent::LatentPart;
use crate::model::spec::{MlpKind, ModelSpec, QkNorm, WeightRole};
use crate::model::{Model, TensorView, WeightForm, alibi};
use std::borrow::Cow;
use std::sync::Arc;

/// Rows of a fused projection that share a storage type.
pub struct Part {
    pub matrix: PackedMatrix,
    /// f32 `[matrix.n]`, where the model has biases.
    pub bias: Option<Buffer>,
    /// Where the rows begin in an output row.
    pub y_offset: u32,
}

/// f32 `[stride(hidden)]` each.
pub struct NormWeights {
    pub gain: Buffer,
    /// Of a LayerNorm.
    pub bias: Option<Buffer>,
}

pub struct LayerWeights {
    /// `None` where the model has no such norm, here and below.
    pub attn_norm: Option<NormWeights>,
    /// Empty where attention is latent.
    pub qkv: Vec<Part>,
    pub latent: Option<LatentWeights>,
    /// Gains of q and k norms: f32 `[2, head_dim]`, or one for each element of q and k, then as many biases.
    pub qk_gains: Option<Buffer>,
    /// f32 `[num_heads]`, times log2(e).
    pub sinks: Option<Buffer>,
    /// f32 `[num_heads, 2]`: see [`crate::kernels::attention::Buffers::slopes`].
    pub slopes: Option<Buffer>,
    pub o: Part,
    pub post_attn_norm: Option<NormWeights>,
    pub ffn_norm: Option<NormWeights>,
    pub post_ffn_norm: Option<NormWeights>,
    pub ffn: FfnWeights,
    /// The matrices' content, where they share their memory with other layers'.
    pub streamed: Option<Arc<Streamed>>,
}

/// Latent attention's own.
pub struct LatentWeights {
    /// Where queries pass through a latent.
    pub q_down: Option<Part>,
    pub q_norm: Option<Buffer>,
    pub q: Option<Part>,
    pub kv_down: Part,
    pub kv_norm: Buffer,
    /// `[kv_rank, nope_dim]` of each head.
    pub k_up: ExpertMatrix,
    /// `[v_dim, kv_rank]` of each head.
    pub v_up: ExpertMatrix,
}

/// What follows attention.
pub enum FfnWeights {
    Dense(DenseWeights),
    Experts(Box<ExpertWeights>),
}

/// An MLP.
pub struct DenseWeights {
    pub gate_up: Vec<Part>,
    /// `gate_up` is one matrix of `2 * stride(intermediate)` rows, gate and up in turns of 32.
    pub is_interleaved: bool,
    pub down: Part,
}

/// A mixture of experts.
pub struct ExpertWeights {
    /// Rows of the experts' logits, then one that mixes the shared expert in, where there is one.
    pub router: Vec<Part>,
    /// f32 `[num_experts]`
    pub selection_bias: Option<Buffer>,
    pub gate_up: Vec<ExpertPartWeights>,
    pub down: ExpertPartWeights,
    pub shared: Option<DenseWeights>,
}

/// A product of every expert.
pub struct ExpertPartWeights {
    pub matrix: ExpertMatrix,
    /// f32 `[num_experts, matrix.n]`, where the model has biases.
    pub bias: Option<Buffer>,
    /// Where the rows begin in an output row.
    pub y_offset: u32,
}

impl FfnWeights {
    pub fn experts(&self) -> Option<&ExpertWeights> {
        match self {
            FfnWeights::Dense(_) => None,
            FfnWeights::Experts(experts) => Some(experts),
        }
    }
}

pub struct ModelWeights {
    pub embedding: PackedMatrix,
    /// A vector per position, where positions are learned.
    pub positions: Option<PackedMatrix>,
    /// `None` when the head reads the embedding.
    pub head: Option<Part>,
    pub output_norm: NormWeights,
    pub layers: Vec<LayerWeights>,
}

/// Told how far a load is; `false` cancels it.
pub type Progress<'a> = &'a mut dyn FnMut(LoadProgress) -> bool;

/// Layers that are kept in host memory take turns with so much memory on the GPU: one is computed while the next comes.
pub const RING: usize = 2;

/// Uploads everything, straight from the mapped file in bounded pieces. The matrices of the last `num_streamed` layers
/// stay in host memory.
pub fn upload(
    gpu: &Gpu,
    model: &Model,
    precise: bool,
    num_streamed: u32,
    progress: Progress<'_>,
) -> Result<ModelWeights, LoadError> {
    let spec = model.spec();
    let mut loader = Loader { gpu, model, spec, precise, uploader: Uploader::new(gpu), label: String::new() };
    let total = u64::from(spec.num_layers) + 2;
    let mut report = |done: u64| {
        let go_on = progress(LoadProgress { phase: "Uploading weights", done, total });
        if go_on { Ok(()) } else { Err(LoadError::Cancelled) }
    };
    report(0)?;
    let embedding = loader.matrix("embedding", &[WeightRole::TokenEmbedding])?;
    if embedding.order.is_some() {
        return Err(LoadError::Unsupported("an embedding table in an order of activations is not supported".into()));
    }
    let positions = match spec.block.learned_positions {
        true => Some(loader.matrix("positions", &[WeightRole::PositionEmbedding])?),
        false => None,
    };
    report(1)?;
    let mut layers = Vec::with_capacity(spec.num_layers as usize);
    let mut ring: [Slot; RING] = Default::default();
    for l in 0..spec.num_layers {
        let is_streamed = l + num_streamed >= spec.num_layers;
        let slot = &mut ring[l as usize % RING];
        if is_streamed {
            loader.uploader.begin_streamed(std::mem::take(slot));
        }
        let mut layer = loader.layer(l)?;
        if is_streamed {
            let (free, content) = loader.uploader.end_streamed();
            *slot = free;
            layer.streamed = Some(Arc::new(content));
        }
        layers.push(layer);
        report(u64::from(l) + 2)?;
    }
    let head = match model.weight_form(WeightRole::LmHead)? {
        Some(_) => Some(loader.part("head", &[(WeightRole::LmHead, Some(WeightRole::HeadBias))], 0)?),
        None => None,
    };
    let output_norm = loader
        .norm("output norm", WeightRole::OutputNorm, Some(WeightRole::OutputNormBias))?
        .ok_or(LoadError::MissingWeight { role: WeightRole::OutputNorm })?;
    loader.uploader.flush()?;
    report(total)?;
    Ok(ModelWeights { embedding, positions, head, output_norm, layers })
}

struct Loader<'a> {
    gpu: &'a Gpu,
    model: &'a Model,
    spec: &'a ModelSpec,
    precise: bool,
    uploader: Uploader<'a>,
    label: String,
}

impl Loader<'_> {
    fn layer(&mut self, l: u32) -> Result<LayerWeights, LoadError> {
        self.label = format!("layer {l} ");
        let spec = self.spec;
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let qkv = [
            (WeightRole::Q(l), Some(WeightRole::QBias(l)), 0),
            (WeightRole::K(l), Some(WeightRole::KBias(l)), q),
            (WeightRole::V(l), Some(WeightRole::VBias(l)), q + kv),
        ];
        Ok(LayerWeights {
            attn_norm: self.norm("attention norm", WeightRole::AttnNorm(l), Some(WeightRole::AttnNormBias(l)))?,
            qkv: if spec.block.latent.is_some() { Vec::new() } else { self.fused("qkv", &qkv)? },
            latent: if spec.block.latent.is_some() { Some(self.latent(l)?) } else { None },
            qk_gains: if spec.qk_norm == QkNorm::None { None } else { Some(self.qk_gains(l)?) },
            sinks: self.sinks(l)?,
            slopes: if spec.block.has_alibi { Some(self.slopes()?) } else { None },
            o: self.part("o", &[(WeightRole::O(l), Some(WeightRole::OBias(l)))], 0)?,
            post_attn_norm: self.norm("norm after attention", WeightRole::PostAttnNorm(l), None)?,
            ffn_norm: self.norm("ffn norm", WeightRole::FfnNorm(l), Some(WeightRole::FfnNormBias(l)))?,
            post_ffn_norm: self.norm("norm after ffn", WeightRole::PostFfnNorm(l), None)?,
            ffn: match spec.experts_of(l) {
                Some(experts) => FfnWeights::Experts(Box::new(self.experts(l, experts)?)),
                None => FfnWeights::Dense(self.dense(l)?),
            },
            streamed: None,
        })
    }

    fn latent(&mut self, l: u32) -> Result<LatentWeights, LoadError> {
        let role = |part| WeightRole::Latent(l, part);
        let has_down = self.model.weight(role(LatentPart::QDown))?.is_some();
        let q = if has_down { role(LatentPart::QUp) } else { WeightRole::Q(l) };
        Ok(LatentWeights {
            q_down: match has_down {
                true => Some(self.part("q down", &[(role(LatentPart::QDown), None)], 0)?),
                false => None,
            },
            q_norm: self.vector("q norm", role(LatentPart::QNorm))?,
            q: Some(self.part("q", &[(q, None)], 0)?),
            kv_down: self.part("kv down", &[(role(LatentPart::KvDown), None)], 0)?,
            kv_norm: self
                .vector("kv norm", role(LatentPart::KvNorm))?
                .ok_or(LoadError::MissingWeight { role: role(LatentPart::KvNorm) })?,
            k_up: self.of_heads("k up", l, LatentPart::KUp)?,
            v_up: self.of_heads("v up", l, LatentPart::VUp)?,
        })
    }

    /// A matrix of each head.
    fn of_heads(&mut self, name: &str, l: u32, part: fn(u32) -> LatentPart) -> Result<ExpertMatrix, LoadError> {
        let (model, label) = (self.model, format!("{}{name}", self.label));
        let first = view(model, WeightRole::Latent(l, part(0)))?;
        let shape = ExpertShape {
            label: &label,
            dtype: first.dtype,
            num_experts: self.spec.num_heads,
            n: first.shape[0] as u32,
            k: first.shape[1] as u32,
            max_plane_bytes: self.gpu.caps().max_binding_bytes,
        };
        let rows_of = |h| -> Result<Vec<Cow<'_, [u8]>>, LoadError> {
            let view = view(model, WeightRole::Latent(l, part(h)))?;
            if view.order.is_some() {
                let fault = format!("latents in an order of activations are not supported (tensor {})", view.name);
                return Err(LoadError::Unsupported(fault));
            }
            Ok(vec![view.bytes])
        };
        ExpertMatrix::upload(self.gpu, &mut self.uploader, shape, rows_of)
    }

    fn dense(&mut self, l: u32) -> Result<DenseWeights, LoadError> {
        // A padded intermediate size leaves a gap between gate and up, which one matrix cannot skip.
        let up_at = stride(self.spec.intermediate_size);
        let gate_up = [
            (WeightRole::Gate(l), Some(WeightRole::GateBias(l)), 0),
            (WeightRole::Up(l), Some(WeightRole::UpBias(l)), up_at),
        ];
        let up = [(WeightRole::Up(l), Some(WeightRole::UpBias(l)), 0)];
        let gate_up: &[_] = if self.spec.block.mlp == MlpKind::Gated { &gate_up } else { &up };
        let is_interleaved = self.can_interleave(l)?;
        Ok(DenseWeights {
            gate_up: match is_interleaved {
                true => vec![self.interleaved(l)?],
                false => self.fused("gate+up", gate_up)?,
            },
            is_interleaved,
            down: self.part("down", &[(WeightRole::Down(l), Some(WeightRole::DownBias(l)))], 0)?,
        })
    }

    /// Whether gate and up can be one product that also does what stands between them and down.
    fn can_interleave(&self, l: u32) -> Result<bool, LoadError> {
        if self.spec.block.mlp != MlpKind::Gated {
            return Ok(false);
        }
        let [gate, up, down] =
            [WeightRole::Gate(l), WeightRole::Up(l), WeightRole::Down(l)].map(|role| form(self.model, role));
        let (gate, up, down) = (gate?, up?, down?);
        let is_plain = gate.order.is_none() && up.order.is_none() && down.order.is_none();
        let k = gate.shape.last().copied().unwrap_or(0) as u32;
        let can_gate = folding::can_gate(self.gpu, self.precise, PackedMatrix::format(self.gpu, gate.dtype, k));
        Ok(is_plain && gate.dtype == up.dtype && Format::of(down.dtype).takes_i8() && can_gate)
    }

    /// Gate and up in turns of 32 rows, padded with rows of zeros.
    fn interleaved(&mut self, l: u32) -> Result<Part, LoadError> {
        let (gate, up) = (view(self.model, WeightRole::Gate(l))?, view(self.model, WeightRole::Up(l))?);
        let k = gate.shape.last().copied().unwrap_or(0) as u32;
        let size = self.spec.intermediate_size as usize;
        let row_bytes = gate.bytes.len() / size.max(1);
        let zeros = vec![0u8; row_bytes * GROUP as usize];
        let mut parts: Vec<&[u8]> = Vec::new();
        for first in (0..size).step_by(GROUP as usize) {
            let last = (first + GROUP as usize).min(size);
            for matrix in [&gate, &up] {
                parts.push(&matrix.bytes[first * row_bytes..last * row_bytes]);
                parts.push(&zeros[(last - first) * row_bytes..]);
            }
        }
        let label = format!("{}gate+up", self.label);
        let matrix = PackedMatrix::upload(self.gpu, &mut self.uploader, &label, gate.dtype, k, &parts)?;
        let biases = [WeightRole::GateBias(l), WeightRole::UpBias(l)].map(|role| self.model.weight(role));
        let mut bias = Vec::new();
        for (half, view) in biases.into_iter().enumerate() {
            let Some(view) = view? else { continue };
            bias.resize(matrix.n as usize, 0.0);
            for (i, value) in floats(&view)?.into_iter().enumerate() {
                bias[(i / 32 * 2 + half) * 32 + i % 32] = value;
            }
        }
        let bias = if bias.is_empty() { None } else { Some(self.floats("gate+up", &bias)?) };
        Ok(Part { matrix, bias, y_offset: 0 })
    }

    fn experts(&mut self, l: u32, spec: &ExpertSpec) -> Result<ExpertWeights, LoadError> {
        let mix = |part| WeightRole::Mix(l, part);
        let logits = [
            (mix(MixPart::Router), Some(mix(MixPart::RouterBias)), 0),
            (mix(MixPart::SharedMix), None, spec.num_experts),
        ];
        let up_at = stride(spec.shared_size);
        let gate_up = [(mix(MixPart::SharedGate), None, 0), (mix(MixPart::SharedUp), None, up_at)];
        let shared = match spec.shared_size {
            0 => None,
            _ => Some(DenseWeights {
                gate_up: self.fused("shared expert's gate+up", &gate_up)?,
                is_interleaved: false,
                down: self.part("shared expert's down", &[(mix(MixPart::SharedDown), None)], 0)?,
            }),
        };
        let (gate, up) = ((ExpertPart::Gate, ExpertPart::GateBias), (ExpertPart::Up, ExpertPart::UpBias));
        let up_at = stride(spec.intermediate_size);
        let dtype = |part| form(self.model, WeightRole::Expert(l, 0, part)).map(|form| form.dtype);
        let is_one = up_at == spec.intermediate_size && dtype(gate.0)? == dtype(up.0)?;
        let gate_up = match is_one {
            true => vec![self.expert_part("experts' gate+up", l, spec, (&[gate, up], 0))?],
            false => vec![
                self.expert_part("experts' gate", l, spec, (&[gate], 0))?,
                self.expert_part("experts' up", l, spec, (&[up], up_at))?,
            ],
        };
        let down = (ExpertPart::Down, ExpertPart::DownBias);
        Ok(ExpertWeights {
            router: self.fused("router", if spec.has_shared_gate { &logits } else { &logits[..1] })?,
            selection_bias: self.vector("selection bias", mix(MixPart::SelectionBias))?,
            gate_up,
            down: self.expert_part("experts' down", l, spec, (&[down], 0))?,
            shared,
        })
    }

    /// A product of every expert, of the rows of some parts, one after the other.
    fn expert_part(
        &mut self,
        name: &str,
        l: u32,
        spec: &ExpertSpec,
        (parts, y_offset): (&[(ExpertPart, ExpertPart)], u32),
    ) -> Result<ExpertPartWeights, LoadError> {
        let (model, label) = (self.model, format!("{}{name}", self.label));
        let first = form(model, WeightRole::Expert(l, 0, parts[0].0))?;
        let (n, k) = (first.shape[0] as u32 * parts.len() as u32, first.shape[1] as u32);
        let shape = ExpertShape {
            label: &label,
            dtype: first.dtype,
            num_experts: spec.num_experts,
            n,
            k,
            max_plane_bytes: self.gpu.caps().max_binding_bytes,
        };
        let rows_of = |e| -> Result<Vec<Cow<'_, [u8]>>, LoadError> {
            let views = parts.iter().map(|(part, _)| view(model, WeightRole::Expert(l, e, *part)));
            views
                .map(|view| match view? {
                    view if view.order.is_some() => {
                        let fault =
                            format!("experts in an order of activations are not supported (tensor {})", view.name);
                        Err(LoadError::Unsupported(fault))
                    }
                    view if view.dtype == shape.dtype => Ok(view.bytes),
                    view => {
                        let fault = format!("experts of types {} and {} in a layer", shape.dtype, view.dtype);
                        Err(LoadError::Unreadable { tensor: view.name.to_string(), fault })
                    }
                })
                .collect()
        };
        let matrix = ExpertMatrix::upload(self.gpu, &mut self.uploader, shape, rows_of)?;
        let mut bias = Vec::new();
        for e in 0..spec.num_experts {
            for (_, part) in parts {
                if let Some(view) = model.weight(WeightRole::Expert(l, e, *part))? {
                    bias.extend(floats(&view)?);
                }
            }
        }
        let bias = if bias.is_empty() { None } else { Some(self.floats(name, &bias)?) };
        Ok(ExpertPartWeights { matrix, bias, y_offset })
    }

    /// Joins neighbours of equal storage type whose output rows touch.
    fn fused(&mut self, name: &str, roles: &[(WeightRole, Option<WeightRole>, u32)]) -> Result<Vec<Part>, LoadError> {
        let mut runs: Vec<(Vec<(WeightRole, Option<WeightRole>)>, u32)> = Vec::new();
        let mut last = None;
        for &(role, bias, y_offset) in roles {
            let form = form(self.model, role)?;
            let rows = form.shape.first().copied().unwrap_or(0) as u32;
            let kind = (form.dtype, form.order);
            match runs.last_mut() {
                Some((run, _)) if last.as_ref() == Some(&(kind.clone(), y_offset)) => run.push((role, bias)),
                _ => runs.push((vec![(role, bias)], y_offset)),
            }
            last = Some((kind, y_offset + rows));
        }
        runs.iter().map(|(run, y_offset)| self.part(name, run, *y_offset)).collect()
    }

    fn part(&mut self, name: &str, run: &[(WeightRole, Option<WeightRole>)], y_offset: u32) -> Result<Part, LoadError> {
        let roles: Vec<WeightRole> = run.iter().map(|(role, _)| *role).collect();
        let matrix = self.matrix(name, &roles)?;
        let mut bias = Vec::with_capacity(matrix.n as usize);
        let mut has_bias = false;
        for (role, bias_role) in run {
            let rows = form(self.model, *role)?.shape.first().copied().unwrap_or(0) as usize;
            let values = match bias_role {
                Some(bias_role) => self.model.weight(*bias_role)?.map(|v| floats(&v)).transpose()?,
                None => None,
            };
            has_bias |= values.is_some();
            bias.extend(values.unwrap_or_else(|| vec![0.0; rows]));
        }
        let bias = if has_bias { Some(self.floats(name, &bias)?) } else { None };
        Ok(Part { matrix, bias, y_offset })
    }

    fn matrix(&mut self, name: &str, roles: &[WeightRole]) -> Result<PackedMatrix, LoadError> {
        let model = self.model;
        let views = roles.iter().map(|&r| view(model, r)).collect::<Result<Vec<_>, _>>()?;
        let k = views[0].shape.last().copied().unwrap_or(0) as u32;
        let parts: Vec<&[u8]> = views.iter().map(|v| v.bytes.as_ref()).collect();
        let label = format!("{}{name}", self.label);
        let mut matrix = PackedMatrix::upload(self.gpu, &mut self.uploader, &label, views[0].dtype, k, &parts)?;
        if let Some(order) = &views[0].order {
            let buffer = self.gpu.alloc(&format!("{label} order"), u64::from(k) * 4, BufferUse::Storage)?;
            self.uploader.write(&buffer.whole(), bytemuck::cast_slice(order))?;
            matrix.order = Some(buffer.whole());
        }
        Ok(matrix)
    }

    /// A norm's vectors, padded with zeros; `None` when the model has no such norm.
    fn norm(
        &mut self,
        name: &str,
        gain: WeightRole,
        bias: Option<WeightRole>,
    ) -> Result<Option<NormWeights>, LoadError> {
        let Some(gain) = self.vector(name, gain)? else { return Ok(None) };
        let bias = bias.map(|role| self.vector(name, role)).transpose()?.flatten();
        Ok(Some(NormWeights { gain, bias }))
    }

    /// A vector as f32, padded with zeros; `None` when the model has none.
    fn vector(&mut self, name: &str, role: WeightRole) -> Result<Option<Buffer>, LoadError> {
        let Some(view) = self.model.weight(role)? else { return Ok(None) };
        let mut values = floats(&view)?;
        values.resize(stride(values.len() as u32) as usize, 0.0);
        self.floats(name, &values).map(Some)
    }

    fn qk_gains(&mut self, l: u32) -> Result<Buffer, LoadError> {
        let (model, spec) = (self.model, self.spec);
        let is_shared = spec.qk_norm == QkNorm::LayerShared;
        let both = |roles: [WeightRole; 2]| -> Result<Vec<f32>, LoadError> {
            let mut all = Vec::new();
            for (role, num_heads) in roles.into_iter().zip([spec.num_heads, spec.num_kv_heads]) {
                let values = floats(&view(model, role)?)?;
                all.extend(values.repeat(if is_shared { num_heads as usize } else { 1 }));
            }
            Ok(all)
        };
        let mut gains = both([WeightRole::QNorm(l), WeightRole::KNorm(l)])?;
        match spec.qk_norm {
            QkNorm::LayerShared => gains.extend(both([WeightRole::QNormBias(l), WeightRole::KNormBias(l)])?),
            QkNorm::LayerPerHead => gains.resize(2 * gains.len(), 0.0),
            _ => {}
        }
        self.floats("qk norm", &gains)
    }

    /// As attention reads them: its scores are in base 2.
    fn sinks(&mut self, l: u32) -> Result<Option<Buffer>, LoadError> {
        let Some(view) = self.model.weight(WeightRole::Sinks(l))? else { return Ok(None) };
        let sinks: Vec<f32> = floats(&view)?.iter().map(|s| s * std::f32::consts::LOG2_E).collect();
        self.floats("sinks", &sinks).map(Some)
    }

    /// Of each head: what a position adds to its scores, and what scores are multiplied by.
    fn slopes(&mut self) -> Result<Buffer, LoadError> {
        let scale = (self.spec.attention_scale() * std::f64::consts::LOG2_E) as f32;
        let heads = self.spec.num_heads;
        let slopes: Vec<f32> = (0..heads).flat_map(|head| [alibi::slope(head, heads), scale]).collect();
        self.floats("slopes", &slopes)
    }

    fn floats(&mut self, name: &str, values: &[f32]) -> Result<Buffer, LoadError> {
        let label = format!("{}{name}", self.label);
        let buffer = self.gpu.alloc(&label, values.len() as u64 * 4, BufferUse::Storage)?;
        self.uploader.write(&buffer.whole(), bytemuck::cast_slice(values))?;
        Ok(buffer)
    }
}

fn form(model: &Model, role: WeightRole) -> Result<WeightForm, LoadError> {
    model.weight_form(role)?.ok_or(LoadError::MissingWeight { role })
}

fn view(model: &Model, role: WeightRole) -> Result<TensorView<'_>, LoadError> {
    model.weight(role)?.ok_or(LoadError::MissingWeight { role })
}

fn floats(view: &TensorView<'_>) -> Result<Vec<f32>, LoadError> {
    view.to_f32().map_err(|e| LoadError::Unreadable { tensor: view.name.to_string(), fault: e.to_string() })
}
