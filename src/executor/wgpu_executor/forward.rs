//! The forward pass as bound kernels: made once at load, recorded anew each step. One path for every family; the spec
//! and the storage types decide which kernels it is made of.

use std::sync::Arc;

use super::super::LoadError;
use super::ExecutorConfig;
use super::activation::{Activation, Forms};
use super::ffn::{Ffn, FfnScratch};
use super::folding::Link;
use super::hidden::Hidden;
use super::kv_buffers::KvBuffers;
use super::latents::{Latent, LatentScratch};
use super::loras::{LoraSlots, Site, SiteKernels};
use super::product::{Product, Reordered};
use super::shapes::{self, StepShape, attention_shape, kv_layout, norm_buffers, norm_kind, warm_up_shapes};
use super::weights::{LayerWeights, ModelWeights, NormWeights, Part};
use crate::batch::BlockCopy;
use crate::gpu::{Buffer, BufferSlice, BufferUse, Gpu, Recording, Streamed};
use crate::kernels::attention::{self, Attention, AttentionCut};
use crate::kernels::context::{Activations, KernelContext, RowCount, RowOutput};
use crate::kernels::copy_blocks::CopyBlocks;
use crate::kernels::embed::Embed;
use crate::kernels::gather::Gather;
use crate::kernels::heads_norm::{self, HeadsNorm};
use crate::kernels::logit_cap::{self, LogitCap};
use crate::kernels::logprobs::{self, Logprobs};
use crate::kernels::mask::Mask;
use crate::kernels::matmul::{self, Matmul};
use crate::kernels::norm::{Norm, Target};
use crate::kernels::pack::Format;
use crate::kernels::penalties::Penalties;
use crate::kernels::quantise::Quantise;
use crate::kernels::rope_kv_write::{self, RopeKvWrite};
use crate::kernels::sample::{self, Sample};
use crate::kernels::weights::PackedMatrix;
use crate::kernels::{Choices, Class, ParamArena, stride};
use crate::model::groups::LayerGroups;
use crate::model::spec::{MlpKind, ModelSpec, NormPlacement, QkNorm, Residual, RopePairing};

/// Bound kernels of one layer.
struct Layer {
    /// Its matrices, where they come from host memory.
    streamed: Option<Arc<Streamed>>,
    /// What attention's input passes through: a norm, or a copy in the forms that are read.
    attn_norm: Vec<Norm>,
    qkv: Vec<Product>,
    /// Where there is room for adapters, here and below.
    lora_qkv: Option<SiteKernels>,
    /// Where the q and k norm is not rope's own.
    qk_norm: Option<HeadsNorm>,
    /// Of latent attention, in place of rope.
    latent: Option<Latent>,
    rope: Option<RopeKvWrite>,
    attention: Attention,
    /// Where attention cannot quantise its own output.
    quantise_attended: Option<Quantise>,
    o: Product,
    lora_o: Option<SiteKernels>,
    /// Where the sum is not the product's own: attention's part added to the hidden state.
    add_attended: Option<Norm>,
    /// Empty where the MLP reads what attention read.
    ffn_norm: Vec<Norm>,
    ffn: Ffn,
    add_mlp: Option<Norm>,
}

/// The whole pass.
pub struct Forward {
    copy_blocks: CopyBlocks,
    embed: Embed,
    positions: Option<Embed>,
    residual: Residual,
    layers: Vec<Layer>,
    output_norm: Vec<Norm>,
    pub hidden: Hidden,
    head: Product,
    logit_cap: Option<LogitCap>,
    penalties: Penalties,
    mask: Mask,
    sample: Sample,
    pub logprobs: Logprobs,
    /// f32 `[max_logits, logits_stride]`
    pub logits: Buffer,
    /// [`sample::Sampled`] `[max_logits]`
    pub sampled: Buffer,
    /// [`logprobs::ROW_BYTES`] `[max_logits]`
    pub row_logprobs: Buffer,
    pub logits_stride: u32,
    pub max_logits: u32,
    pub kv: KvBuffers,
    pub attention_cut: AttentionCut,
    /// With the products and kernels of attention that asked.
    pub choices: Choices,
}

/// Activations that all layers share.
pub(super) struct Scratch {
    pub(super) x: BufferSlice, // f32 [tokens, stride(hidden)]
    /// f32 [tokens, stride(hidden)]: what a block adds, where it is not added as it is.
    pub(super) branch: Option<BufferSlice>,
    pub(super) normed: Activation, // [tokens, hidden]
    pub(super) qkv: BufferSlice,   // f32 [tokens, qkv_stride]
    latent: Option<LatentScratch>,
    q: BufferSlice,        // f32 [tokens, q_stride]
    partials: BufferSlice, // attention's scratch, see Shape::partial_bytes
    attended: Activation,
    ffn: FfnScratch,
}

/// What making the pass needs to know.
pub(super) struct Builder<'a> {
    pub(super) gpu: &'a Gpu,
    class: Class,
    pub(super) spec: &'a ModelSpec,
    groups: &'a LayerGroups,
    pub(super) cfg: &'a ExecutorConfig,
    meta: BufferSlice,
    arena: ParamArena,
    choices: Choices,
    reordered: Reordered,
    pub(super) loras: &'a LoraSlots,
}

impl Forward {
    /// Products take the ways that `choices` says; `kv` is a pool that is there already.
    pub fn new(
        gpu: &Gpu,
        (spec, groups): (&ModelSpec, &LayerGroups),
        cfg: &ExecutorConfig,
        (weights, loras): (&ModelWeights, &LoraSlots),
        meta: &Buffer,
        (choices, kv): (Choices, Option<KvBuffers>),
    ) -> Result<Forward, LoadError> {
        let class = Class::of(gpu.caps());
        let mut b = Builder {
            gpu,
            class,
            spec,
            groups,
            cfg,
            meta: meta.whole(),
            arena: ParamArena::new(),
            choices,
            reordered: Reordered::default(),
            loras,
        };
        let scratch = b.scratch(weights)?;
        let tables = b.rope_tables()?;
        let kv = match kv {
            Some(kv) => kv,
            None => KvBuffers::alloc(gpu, kv_layout(spec, cfg), (spec, groups.size), cfg.canary)?,
        };
        let layers = (0..spec.num_layers as usize)
            .map(|l| b.layer(l, weights, &scratch, tables.of(spec, l as u32), &kv))
            .collect::<Result<_, _>>()?;
        let embed = Embed::new(&mut b.context(), &weights.embedding, &scratch.x, spec.block.embedding_scale)?;
        b.finish(weights, &scratch, embed, layers, kv)
    }

    /// Copies of blocks, before anything reads or marks them.
    pub fn record_copies(&self, recording: &mut Recording, copies: &[BlockCopy]) {
        self.copy_blocks.record(recording, copies);
    }

    /// Everything from token ids to logits and, if `samples`, to tokens.
    pub fn record(&self, recording: &mut Recording, shape: StepShape, samples: bool) {
        let n = shape.num_tokens;
        self.embed.record(recording, n);
        self.positions.iter().for_each(|k| k.record(recording, n));
        for layer in &self.layers {
            layer.streamed.iter().for_each(|content| recording.load(content));
            layer.attn_norm.iter().for_each(|k| k.record(recording, n));
            layer.qkv.iter().for_each(|m| m.record(recording, n));
            layer.lora_qkv.iter().for_each(|k| k.record_after(recording, shape.lora));
            layer.qk_norm.iter().for_each(|k| k.record(recording, n));
            layer.rope.iter().for_each(|k| k.record(recording, n));
            layer.latent.iter().for_each(|k| k.record(recording, n));
            layer.attention.record(recording, shape.attention);
            layer.latent.iter().for_each(|k| k.record_values(recording, n));
            if let Some(quantise) = &layer.quantise_attended {
                quantise.record(recording, n);
            }
            // The norm of a parallel MLP reads the hidden state before attention's part is added.
            if self.residual == Residual::Parallel {
                layer.ffn_norm.iter().for_each(|k| k.record(recording, n));
            }
            layer.lora_o.iter().for_each(|k| k.record_before(recording, shape.lora));
            layer.o.record(recording, n);
            layer.lora_o.iter().for_each(|k| k.record_after(recording, shape.lora));
            layer.add_attended.iter().for_each(|k| k.record(recording, n));
            if self.residual == Residual::Sequential {
                layer.ffn_norm.iter().for_each(|k| k.record(recording, n));
            }
            layer.ffn.record(recording, n, shape.lora);
            layer.add_mlp.iter().for_each(|k| k.record(recording, n));
        }
        self.hidden.record(recording, shape);
        self.record_head(recording, shape, samples);
    }

    /// From the last hidden state of the step's logit rows to logits, and to tokens.
    pub fn record_head(&self, recording: &mut Recording, shape: StepShape, samples: bool) {
        self.output_norm.iter().for_each(|k| k.record(recording, shape.num_logits));
        self.head.record(recording, shape.num_logits);
        self.logit_cap.iter().for_each(|k| k.record(recording, shape.num_logits));
        if !samples {
            return;
        }
        if shape.has_penalties {
            self.penalties.record(recording, shape.num_logits);
        }
        if shape.has_masks {
            self.mask.record(recording, shape.num_logits);
        }
        self.sample.record(recording, shape.num_logits);
        if shape.has_logprobs {
            self.logprobs.record(recording, shape.num_logits);
        }
    }

    /// One tiny dispatch of every pipeline, on zeroed metadata and for such numbers of tokens: drivers compile at the first.
    pub fn record_warm_up(&self, recording: &mut Recording, counts: &[u32]) {
        let has_loras = self.layers.iter().any(|layer| layer.lora_qkv.is_some());
        for shape in warm_up_shapes(counts, self.max_logits, has_loras) {
            self.record_copies(recording, &[BlockCopy { from: 0, to: 0 }]);
            self.record(recording, shape, true);
        }
        recording.skip_loads();
    }
}

impl Builder<'_> {
    /// A matrix takes i8 activations when it is quantised, unless every product is to be exact.
    pub(super) fn forms(&self, format: Format) -> Forms {
        if format.takes_i8() && !self.cfg.precise { Forms::I8 } else { Forms::F32 }
    }

    /// What must be there for a matrix; inputs that are brought into another order are quantised after that.
    pub(super) fn input_forms(&self, matrix: &PackedMatrix) -> Forms {
        if matrix.order.is_some() { Forms::F32 } else { self.forms(matrix.format) }
    }

    pub(super) fn forms_of(&self, parts: impl Iterator<Item = Forms>) -> Forms {
        parts.reduce(Forms::union).unwrap_or(Forms::F32)
    }

    fn scratch(&self, weights: &ModelWeights) -> Result<Scratch, LoadError> {
        let (spec, rows) = (self.spec, self.cfg.max_tokens_per_step);
        let layers = || weights.layers.iter();
        let qkv = layers().flat_map(|l| &l.qkv).map(|p| self.input_forms(&p.matrix));
        let latent = layers().filter_map(|l| l.latent.as_ref()).flat_map(|l| l.input_forms(self));
        let normed = qkv.chain(latent).chain(layers().flat_map(|l| l.ffn.input_forms(self)));
        let attended = self.forms_of(layers().map(|l| self.input_forms(&l.o.matrix)));
        let attention = attention_shape(self.spec, self.cfg);
        // What attention cannot quantise itself is quantised from f32.
        let is_latent = spec.block.latent.is_some();
        let attended = if attended.i8 && (attended.f32 || is_latent || !attention.can_quantise(self.class)) {
            Forms { f32: true, i8: true }
        } else {
            attended
        };
        let f32_rows = |label: &str, elements: u32| self.f32_rows(label, rows, elements);
        let slots = shapes::attention_slots(spec, self.cfg, self.gpu.caps().max_binding_bytes);
        let partial_bytes = slots * attention.partial_bytes();
        Ok(Scratch {
            x: f32_rows("hidden", stride(spec.hidden_size))?,
            branch: match self.adds_as_is() {
                true => None,
                false => Some(f32_rows("branch", stride(spec.hidden_size))?),
            },
            normed: Activation::alloc_foldable(self.gpu, "normed", rows, spec.hidden_size, self.forms_of(normed))?,
            qkv: f32_rows("qkv", if is_latent { stride(1) } else { self.rope_shape().qkv_stride() })?,
            latent: self.latent_scratch(weights)?,
            q: f32_rows("q", self.rope_shape().q_stride())?,
            partials: self.gpu.alloc("attention partials", partial_bytes, BufferUse::Storage)?.whole(),
            attended: Activation::alloc(self.gpu, "attended", rows, spec.attended_dim(), attended)?,
            ffn: self.ffn_scratch(weights)?,
        })
    }

    pub(super) fn f32_rows(&self, label: &str, rows: u32, elements: u32) -> Result<BufferSlice, LoadError> {
        let bytes = u64::from(rows) * u64::from(elements) * 4;
        Ok(self.gpu.alloc(label, bytes, BufferUse::Storage)?.whole())
    }

    /// Attention's and the MLP's parts are added by the products themselves.
    pub(super) fn adds_as_is(&self) -> bool {
        self.spec.block.norm_placement == NormPlacement::Before && self.spec.block.residual_scale == 1.0
    }

    /// Elements of a row of gate and up, of so many each.
    pub(super) fn gate_up_stride(&self, size: u32) -> u32 {
        let num = if self.spec.block.mlp == MlpKind::Gated { 2 } else { 1 };
        num * stride(size)
    }

    fn rope_shape(&self) -> rope_kv_write::Shape {
        rope_kv_write::Shape {
            num_heads: self.spec.num_heads,
            num_kv_heads: self.spec.num_kv_heads,
            head_dim: self.spec.head_dim,
            rotary_dim: self.spec.rope.rotary_dim,
            interleaved: self.spec.rope.pairing == RopePairing::Interleaved,
            qk_norm: self.spec.qk_norm == QkNorm::Head,
            kv: self.cfg.kv,
        }
    }

    fn layer(
        &mut self,
        l: usize,
        model: &ModelWeights,
        scratch: &Scratch,
        table: &BufferSlice,
        kv: &KvBuffers,
    ) -> Result<Layer, LoadError> {
        let weights = &model.layers[l];
        let place = self.groups.layers[l];
        let planes = &kv.layers[place.buffer as usize];
        let (k_cache, v_cache) = (planes.k.whole(), planes.v.whole());
        let rope_stride = self.rope_shape().qkv_stride();
        let (to_attention, to_ffn) = (self.link_to_attention(model, l), self.link_to_ffn(weights));
        let qkv = weights.qkv.iter();
        let qkv = qkv.map(|p| self.product(p, (&scratch.normed, to_attention), (&scratch.qkv, rope_stride)));
        let o_sum = scratch.sum(to_ffn, weights.ffn_norm.as_ref());
        Ok(Layer {
            streamed: weights.streamed.clone(),
            qkv: qkv.collect::<Result<_, _>>()?,
            lora_qkv: self.lora_of_qkv(l, weights, to_attention, scratch, rope_stride)?,
            attn_norm: self.norm_of_link(to_attention, weights.attn_norm.as_ref(), scratch)?,
            qk_norm: self.heads_norm(weights, scratch)?,
            latent: self.latent_of(l, weights, scratch, table, &k_cache)?,
            rope: match weights.latent {
                Some(_) => None,
                None => Some(self.rope(weights, scratch, table, (&k_cache, &v_cache), place.group)?),
            },
            attention: self.attention(l, weights, scratch, (&k_cache, &v_cache))?,
            quantise_attended: self.quantise_attended(scratch)?,
            o: self.sum(&weights.o, &scratch.attended, o_sum)?,
            lora_o: self.lora_of_sum((l, Site::O), &scratch.attended, o_sum)?,
            add_attended: self.add_branch(weights.post_attn_norm.as_ref(), scratch)?,
            ffn_norm: match self.spec.block.residual {
                Residual::ParallelOneNorm => Vec::new(),
                _ => self.norm_of_link(to_ffn, weights.ffn_norm.as_ref(), scratch)?,
            },
            ffn: {
                let next = self.norm_after(model, l);
                let to = scratch.sum(if next.is_some() { Link::Fused } else { Link::Normed }, next);
                self.ffn((l, &weights.ffn), (&scratch.normed, to_ffn), &scratch.ffn, to, &scratch.x)?
            },
            add_mlp: match weights.ffn.experts() {
                // A mixture adds its part itself.
                Some(_) => None,
                None => self.add_branch(weights.post_ffn_norm.as_ref(), scratch)?,
            },
        })
    }

    fn latent_of(
        &mut self,
        l: usize,
        weights: &LayerWeights,
        scratch: &Scratch,
        table: &BufferSlice,
        k_cache: &BufferSlice,
    ) -> Result<Option<Latent>, LoadError> {
        let (Some(spec), Some(weights), Some(own), Some(values)) =
            (&self.spec.block.latent, &weights.latent, &scratch.latent, &scratch.attended.f32)
        else {
            return Ok(None);
        };
        let (normed, q) = (&scratch.normed, &scratch.q);
        self.latent(spec, l == 0, weights, normed, own, table, q, k_cache, values).map(Some)
    }

    /// x += scale * norm(branch), where the model asks for more than a sum.
    fn add_branch(&mut self, norm: Option<&NormWeights>, scratch: &Scratch) -> Result<Option<Norm>, LoadError> {
        let Some(branch) = &scratch.branch else { return Ok(None) };
        let target = Target::Add { y: &scratch.x, scale: self.spec.block.residual_scale };
        let size = (self.spec.hidden_size, self.spec.rms_eps);
        let (gain, bias) = norm_buffers(norm);
        let kind = norm_kind(self.spec.block.norm, gain.as_ref(), bias.as_ref());
        Ok(Some(Norm::new(&mut self.context(), "add", branch, kind, target, size, RowCount::Tokens)?))
    }

    /// The norm in the forms that `out` has; a copy where the model has no norm there.
    pub(super) fn norm(
        &mut self,
        norm: Option<&NormWeights>,
        scratch: &Scratch,
        out: &Activation,
        rows: RowCount,
    ) -> Result<Vec<Norm>, LoadError> {
        let size = (self.spec.hidden_size, self.spec.rms_eps);
        let (gain, bias) = norm_buffers(norm);
        let kind = norm_kind(self.spec.block.norm, gain.as_ref(), bias.as_ref());
        let norms = out.outputs().map(|y| {
            let target = Target::Row(y);
            Norm::new(&mut self.context(), "norm", &scratch.x, kind, target, size, rows).map_err(LoadError::from)
        });
        norms.collect()
    }

    pub(super) fn context(&mut self) -> KernelContext<'_> {
        KernelContext {
            gpu: self.gpu,
            class: self.class,
            params: &mut self.arena,
            choices: &mut self.choices,
            step_meta: &self.meta,
            multiply_pairs: KernelContext::prefers_pairs(self.gpu),
            matrix_units: self.gpu.matrix_units(),
        }
    }

    pub(super) fn matmul(
        &mut self,
        part: &Part,
        x: &Activation,
        (y, y_stride): (&BufferSlice, u32),
        accumulate: bool,
    ) -> Result<Product, LoadError> {
        self.matmul_of(
            &part.matrix,
            part.bias.as_ref(),
            x,
            (y, y_stride, part.y_offset),
            (accumulate, RowCount::Tokens),
        )
    }

    /// The inputs of a matrix in the order of its columns, where that is not theirs.
    fn in_order(
        &mut self,
        matrix: &PackedMatrix,
        x: &Activation,
        rows: RowCount,
    ) -> Result<Option<(Gather, Activation)>, LoadError> {
        let (Some(order), Some(x)) = (&matrix.order, &x.f32) else { return Ok(None) };
        let k = stride(matrix.k);
        let num_rows = (x.size / (4 * u64::from(k))) as u32;
        let ordered = self.reordered.get(self.gpu, num_rows, k, self.forms(matrix.format))?;
        let Some(y) = ordered.outputs().next() else { return Ok(None) };
        let label = format!("{} inputs", matrix.label);
        let gather = Gather::new(&mut self.context(), &label, (x, order), k, y, rows)?;
        Ok(Some((gather, ordered)))
    }

    /// The form that a matrix of this format reads.
    pub(super) fn activations<'x>(
        &self,
        format: Format,
        x: &'x Activation,
        label: &str,
    ) -> Result<Activations<'x>, LoadError> {
        match (self.forms(format).i8, &x.i8, &x.f32) {
            (true, Some(x), _) => Ok(Activations::I8(x)),
            (false, _, Some(x)) => Ok(Activations::F32(x)),
            _ => Err(LoadError::Unsupported(format!("{label}: activations in the wrong form"))),
        }
    }

    fn matmul_of(
        &mut self,
        matrix: &PackedMatrix,
        bias: Option<&Buffer>,
        x: &Activation,
        (y, y_stride, y_offset): (&BufferSlice, u32, u32),
        (accumulate, rows): (bool, RowCount),
    ) -> Result<Product, LoadError> {
        let bias = bias.map(Buffer::whole);
        let (gather, ordered) = self.in_order(matrix, x, rows)?.unzip();
        let x = ordered.as_ref().unwrap_or(x);
        let x = self.activations(matrix.format, x, &matrix.label)?;
        let out = matmul::Output { slice: y, stride: y_stride, offset: y_offset, accumulate };
        let matmul = Matmul::new(&mut self.context(), &matrix.label, matrix, x, out, bias.as_ref(), rows)?;
        Ok(Product { gather, matmul })
    }

    /// The q and k norms that are wider than rope's lanes.
    fn heads_norm(&mut self, weights: &LayerWeights, scratch: &Scratch) -> Result<Option<HeadsNorm>, LoadError> {
        let Some(gains) = weights.qk_gains.as_ref().filter(|_| self.spec.qk_norm != QkNorm::Head) else {
            return Ok(None);
        };
        let shape = heads_norm::Shape {
            num_heads: self.spec.num_heads,
            num_kv_heads: self.spec.num_kv_heads,
            head_dim: self.spec.head_dim,
            is_layer_per_head: self.spec.qk_norm != QkNorm::Width,
        };
        let (stride, eps) = (self.rope_shape().qkv_stride(), self.spec.rms_eps);
        Ok(Some(HeadsNorm::new(&mut self.context(), &shape, (stride, eps), &gains.whole(), &scratch.qkv)?))
    }

    fn rope(
        &mut self,
        weights: &LayerWeights,
        scratch: &Scratch,
        table: &BufferSlice,
        (k_cache, v_cache): (&BufferSlice, &BufferSlice),
        group: u32,
    ) -> Result<RopeKvWrite, LoadError> {
        let (shape, numbers) = (self.rope_shape(), (self.spec.rms_eps, self.spec.attention_scale()));
        let gains = weights.qk_gains.as_ref().filter(|_| shape.qk_norm).map(Buffer::whole);
        let (qkv, q) = (&scratch.qkv, &scratch.q);
        let buffers = rope_kv_write::Buffers { qkv, rope: table, gains: gains.as_ref(), q, k_cache, v_cache };
        Ok(RopeKvWrite::new(&mut self.context(), "rope + kv write", &shape, (numbers, group), &buffers)?)
    }

    fn attention(
        &mut self,
        l: usize,
        weights: &LayerWeights,
        scratch: &Scratch,
        (k_cache, v_cache): (&BufferSlice, &BufferSlice),
    ) -> Result<Attention, LoadError> {
        let (shape, window) = (attention_shape(self.spec, self.cfg), self.spec.windows[l]);
        let group = self.groups.layers[l].group;
        // Attention writes one form; i8 from f32 is a kernel of its own.
        let own = scratch.latent.as_ref().map(|latent| RowOutput::F32(&latent.attended));
        let y = own
            .or(scratch.attended.outputs().next())
            .ok_or(LoadError::Unsupported("attention has no reader".into()))?;
        let (sinks, slopes) = (weights.sinks.as_ref().map(Buffer::whole), weights.slopes.as_ref().map(Buffer::whole));
        let (q, partials, sinks, slopes) = (&scratch.q, &scratch.partials, sinks.as_ref(), slopes.as_ref());
        let buffers = attention::Buffers { q, k_cache, v_cache, sinks, slopes, partials, y };
        Ok(Attention::new(&mut self.context(), "attention", &shape, (window, group), &buffers)?)
    }

    fn quantise_attended(&mut self, scratch: &Scratch) -> Result<Option<Quantise>, LoadError> {
        let (Some(x), Some(out)) = (&scratch.attended.f32, &scratch.attended.i8) else { return Ok(None) };
        let elements = stride(self.spec.attended_dim());
        Ok(Some(Quantise::new(&mut self.context(), "quantise attended", x, elements, out)?))
    }

    /// Output norm, head, sampling.
    fn finish(
        mut self,
        weights: &ModelWeights,
        scratch: &Scratch,
        embed: Embed,
        layers: Vec<Layer>,
        kv: KvBuffers,
    ) -> Result<Forward, LoadError> {
        let (gpu, vocab) = (self.gpu, self.spec.vocab_size);
        let logits_stride = vocab.next_multiple_of(4);
        let row_bytes = u64::from(logits_stride) * 4;
        let max_logits = shapes::max_logits(self.spec, self.cfg, gpu.caps().max_binding_bytes);
        let (matrix, bias) = match &weights.head {
            Some(part) => (&part.matrix, part.bias.as_ref()),
            None => (&weights.embedding, None),
        };
        let alloc = |label: &str, bytes: u64| gpu.alloc(label, u64::from(max_logits) * bytes, BufferUse::Storage);
        let logits = alloc("logits", row_bytes)?;
        let sampled = alloc("sampled", size_of::<sample::Sampled>() as u64)?;
        let row_logprobs = alloc("logprobs", logprobs::ROW_BYTES)?;
        let last = Activation::alloc(gpu, "last hidden", max_logits, self.spec.hidden_size, self.input_forms(matrix))?;
        let params = sample::Params { vocab, stride: logits_stride };
        let block = &self.spec.block;
        let has_cap = block.logit_softcap.is_some() || block.logit_scale != 1.0;
        let cap = logit_cap::Params {
            stride: logits_stride,
            scale: block.logit_scale,
            cap: block.logit_softcap.unwrap_or(0.0),
        };
        let residual = block.residual;
        let positions = weights.positions.as_ref();
        let (logits_all, sampled_all, logprobs_all) = (logits.whole(), sampled.whole(), row_logprobs.whole());
        let planes: Vec<_> = kv.planes().map(|plane| (plane.buffer.whole(), plane.block_bytes)).collect();
        Ok(Forward {
            copy_blocks: CopyBlocks::new(&mut self.context(), &planes)?,
            embed,
            positions: positions.map(|p| Embed::positions(&mut self.context(), p, &scratch.x)).transpose()?,
            residual,
            attention_cut: layers.first().map_or(AttentionCut::WHOLE, |layer| layer.attention.cut()),
            layers,
            logit_cap: match has_cap {
                true => Some(LogitCap::new(&mut self.context(), cap, &logits_all)?),
                false => None,
            },
            output_norm: self.norm(Some(&weights.output_norm), scratch, &last, RowCount::Logits)?,
            hidden: Hidden::new(&mut self, &weights.output_norm, scratch)?,
            head: self.matmul_of(matrix, bias, &last, (&logits_all, logits_stride, 0), (false, RowCount::Logits))?,
            penalties: Penalties::new(&mut self.context(), params, &logits_all)?,
            mask: Mask::new(&mut self.context(), params, &logits_all)?,
            sample: Sample::new(&mut self.context(), params, &logits_all, &sampled_all)?,
            logprobs: Logprobs::new(&mut self.context(), params, &logits_all, &sampled_all, &logprobs_all)?,
            logits,
            sampled,
            row_logprobs,
            logits_stride,
            max_logits,
            kv,
            choices: self.choices,
        })
    }
}
