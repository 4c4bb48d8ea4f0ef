//! The model's tensors on the GPU, grouped as the forward pass reads them: Q, K and V (gate and up) of one storage type
//! make one matrix, so that one dispatch serves them; mixed types make several.

use super::super::{LoadError, LoadProgress};
use crate::gpu::{Buffer, BufferUse, Gpu, Uploader};
use crate::kernels::stride;
use crate::kernels::weights::PackedMatrix;
use crate::model::spec::{MlpKind, ModelSpec, QkNorm, WeightRole};
use crate::model::{Model, TensorView, WeightForm};

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
    pub qkv: Vec<Part>,
    /// Gains of q and k norms: f32 `[2, head_dim]`, or one for each element of q and k.
    pub qk_gains: Option<Buffer>,
    /// f32 `[num_heads]`, times log2(e).
    pub sinks: Option<Buffer>,
    pub o: Part,
    pub post_attn_norm: Option<NormWeights>,
    pub ffn_norm: Option<NormWeights>,
    pub post_ffn_norm: Option<NormWeights>,
    pub gate_up: Vec<Part>,
    pub down: Part,
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

/// Uploads everything, straight from the mapped file in bounded pieces.
pub fn upload(gpu: &Gpu, model: &Model, progress: Progress<'_>) -> Result<ModelWeights, LoadError> {
    let spec = model.spec();
    let mut loader = Loader { gpu, model, spec, uploader: Uploader::new(gpu), label: String::new() };
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
    for l in 0..spec.num_layers {
        layers.push(loader.layer(l)?);
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
    uploader: Uploader<'a>,
    label: String,
}

impl Loader<'_> {
    fn layer(&mut self, l: u32) -> Result<LayerWeights, LoadError> {
        self.label = format!("layer {l} ");
        let spec = self.spec;
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let qkv = [
            (WeightRole::Q(l), WeightRole::QBias(l), 0),
            (WeightRole::K(l), WeightRole::KBias(l), q),
            (WeightRole::V(l), WeightRole::VBias(l), q + kv),
        ];
        // A padded intermediate size leaves a gap between gate and up, which one matrix cannot skip.
        let up_at = stride(spec.intermediate_size);
        let gate_up =
            [(WeightRole::Gate(l), WeightRole::GateBias(l), 0), (WeightRole::Up(l), WeightRole::UpBias(l), up_at)];
        let up = [(WeightRole::Up(l), WeightRole::UpBias(l), 0)];
        let gate_up: &[_] = if spec.block.mlp == MlpKind::Gated { &gate_up } else { &up };
        Ok(LayerWeights {
            attn_norm: self.norm("attention norm", WeightRole::AttnNorm(l), Some(WeightRole::AttnNormBias(l)))?,
            qkv: self.fused("qkv", &qkv)?,
            qk_gains: if spec.qk_norm == QkNorm::None { None } else { Some(self.qk_gains(l)?) },
            sinks: self.sinks(l)?,
            o: self.part("o", &[(WeightRole::O(l), Some(WeightRole::OBias(l)))], 0)?,
            post_attn_norm: self.norm("norm after attention", WeightRole::PostAttnNorm(l), None)?,
            ffn_norm: self.norm("ffn norm", WeightRole::FfnNorm(l), Some(WeightRole::FfnNormBias(l)))?,
            post_ffn_norm: self.norm("norm after ffn", WeightRole::PostFfnNorm(l), None)?,
            gate_up: self.fused("gate+up", gate_up)?,
            down: self.part("down", &[(WeightRole::Down(l), Some(WeightRole::DownBias(l)))], 0)?,
        })
    }

    /// Joins neighbours of equal storage type whose output rows touch.
    fn fused(&mut self, name: &str, roles: &[(WeightRole, WeightRole, u32)]) -> Result<Vec<Part>, LoadError> {
        let mut runs: Vec<(Vec<(WeightRole, Option<WeightRole>)>, u32)> = Vec::new();
        let mut last = None;
        for &(role, bias, y_offset) in roles {
            let form = form(self.model, role)?;
            let rows = form.shape.first().copied().unwrap_or(0) as u32;
            let kind = (form.dtype, form.order);
            match runs.last_mut() {
                Some((run, _)) if last.as_ref() == Some(&(kind.clone(), y_offset)) => run.push((role, Some(bias))),
                _ => runs.push((vec![(role, Some(bias))], y_offset)),
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
        let mut gains = floats(&view(self.model, WeightRole::QNorm(l))?)?;
        gains.extend(floats(&view(self.model, WeightRole::KNorm(l))?)?);
        self.floats("qk norm", &gains)
    }

    /// As attention reads them: its scores are in base 2.
    fn sinks(&mut self, l: u32) -> Result<Option<Buffer>, LoadError> {
        let Some(view) = self.model.weight(WeightRole::Sinks(l))? else { return Ok(None) };
        let sinks: Vec<f32> = floats(&view)?.iter().map(|s| s * std::f32::consts::LOG2_E).collect();
        self.floats("sinks", &sinks).map(Some)
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
