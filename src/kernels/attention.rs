//! `attention`: PagedAttention (Kwon et al., SOSP 2023, arXiv 2309.06180). Reads K and V from their pages through the
//! block tables; decode rows, prompts and chunks of prompts in one batch; causal, with a sliding window or none; query
//! heads of one kv head share its loads.
//!
//! Guarantees: a token's result depends on its row's keys alone, bit for bit: not on chunking, batch, block size,
//! physical blocks or the number of tokens that a workgroup takes. Partials run over the absolute key ranges
//! [0, 256), [256, 512), …, each with its own (m, l, o), merged in ascending order: by the workgroup that computed them,
//! or, where [`super::attention_work`] spreads them, by a second kernel that is the same text.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::attention_way::{AttentionKey, Way};
use super::attention_work::WorkCounts;
use super::kv_layout::{KvFormat, KvLayout, padded_head_dim};
use super::{Class, KernelContext, RowOutput, stride};
use crate::batch::StepBatch;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};

/// Mirrors `Params` of attention.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// Keys that a token sees, itself included; 0 is all.
    pub window: u32,
    pub q_stride: u32,
    pub out_stride: u32,
    /// The layer group whose block tables are read.
    pub group: u32,
    /// Times log2(e); read where the shape has one.
    pub softcap: f32,
}

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// A multiple of `num_kv_heads`.
    pub num_heads: u32,
    pub num_kv_heads: u32,
    /// At most 1024.
    pub head_dim: u32,
    pub kv: KvFormat,
    /// Scores are bounded by `c * tanh(score / c)` before the softmax.
    pub softcap: Option<f32>,
    /// Each head has one more logit, without a key or a value, in its softmax.
    pub has_sinks: bool,
}

/// The kernels that make up attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Items of one token.
    Single,
    /// Items of several.
    Several,
    /// Partial results to output.
    Merge,
}

const LANES_FLOOR: u32 = 64;
/// Of heads with more than four dims for each of those.
const LANES_FLOOR_WIDE: u32 = 256;
/// Dims of the widest row of keys: four for each lane.
const MAX_HEAD_DIM: u32 = 4 * LANES_FLOOR_WIDE;

impl Shape {
    /// Elements of a row of q: as `rope_kv_write` writes it.
    pub fn q_stride(&self) -> u32 {
        stride(self.num_heads * padded_head_dim(self.head_dim))
    }

    /// Elements of a row of the output: heads of `head_dim` dims, padded.
    pub fn out_stride(&self) -> u32 {
        stride(self.num_heads * self.head_dim)
    }

    /// True when the epilogue can quantise: a workgroup then owns whole groups of 32.
    pub fn can_quantise(&self, class: Class) -> bool {
        self.head_dim.is_multiple_of(32) && class != Class::Floor
    }

    pub fn params(&self, window: Option<u32>, group: u32) -> Params {
        Params {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            window: window.unwrap_or(0),
            q_stride: self.q_stride(),
            out_stride: self.out_stride(),
            group,
            softcap: self.softcap.unwrap_or(0.0) * std::f32::consts::LOG2_E,
        }
    }

    /// What the ways of one of its kernels hang on.
    pub fn key(&self, variant: Variant, is_quantised: bool) -> AttentionKey {
        AttentionKey { shape: *self, variant, is_quantised }
    }

    /// Workgroups that share a token, as every class begins.
    pub fn parts(&self) -> u32 {
        self.num_heads / self.key(Variant::Single, false).prior(Class::Floor).heads
    }

    /// Bytes of one slot of partial results: numerators, maximum and sum of every head.
    pub fn partial_bytes(&self) -> u64 {
        u64::from(self.num_heads) * (u64::from(padded_head_dim(self.head_dim)) + 4) * 4
    }

    /// Tokens per workgroup when rows are long, as the class begins.
    pub fn tokens_per_workgroup(&self, class: Class) -> u32 {
        self.key(Variant::Several, false).prior(class).tokens
    }

    /// Its kernels, each as the class begins.
    fn priors(&self, class: Class, is_quantised: bool) -> impl Iterator<Item = (Variant, Way)> {
        let way = move |&variant: &Variant| (variant, self.key(variant, is_quantised).prior(class));
        variants(self.tokens_per_workgroup(class)).iter().map(way)
    }

    /// The files and defines that this shape needs, for compiling ahead.
    pub fn kernels(&self, class: Class, is_quantised: bool) -> Vec<(String, Defines)> {
        let defines = |(variant, way)| self.defines(class, variant, is_quantised, way);
        self.priors(class, is_quantised).map(|kernel| ("attention".into(), defines(kernel))).collect()
    }

    /// Every way that may be chosen.
    pub fn candidate_kernels(&self, class: Class, is_quantised: bool) -> Vec<(String, Defines)> {
        let keys = [Variant::Single, Variant::Several].map(|variant| self.key(variant, is_quantised));
        let ways = keys.iter().flat_map(|key| key.candidates(class).into_iter().map(|way| (key.variant, way)));
        let ways = ways.filter(|(variant, way)| *variant == Variant::Single || way.tokens > 1);
        ways.map(|(variant, way)| ("attention".into(), self.defines(class, variant, is_quantised, way))).collect()
    }

    /// With slopes, for compiling ahead.
    pub fn alibi_kernels(&self, class: Class, is_quantised: bool) -> Vec<(String, Defines)> {
        let kernels = self.priors(class, is_quantised).filter(|(variant, _)| *variant != Variant::Merge);
        let defines = |(variant, way)| self.defines(class, variant, is_quantised, way).flag("ALIBI");
        kernels.map(|kernel| ("attention".into(), defines(kernel))).collect()
    }

    /// Of a cache in which row r lies in block r, read without a table: for measuring what pages cost.
    pub fn contiguous_kernels(&self, class: Class) -> Vec<(String, Defines)> {
        self.kernels(class, false).into_iter().map(|(name, defines)| (name, defines.flag("CONTIGUOUS"))).collect()
    }

    /// Of a cache that is a line of texels.
    pub fn texel_kernels(&self, class: Class, is_quantised: bool) -> Vec<(String, Defines)> {
        let kernels = self.kernels(class, is_quantised).into_iter();
        let with_texels = |(name, defines): (String, Defines)| match defines.get("MERGE") {
            None => (name, defines.flag("KV_TEXELS")),
            Some(_) => (name, defines),
        };
        kernels.map(with_texels).collect()
    }

    fn defines(&self, class: Class, variant: Variant, is_quantised: bool, way: Way) -> Defines {
        assert!(self.head_dim <= MAX_HEAD_DIM, "head dim {} is above {MAX_HEAD_DIM}", self.head_dim);
        assert!(self.num_heads.is_multiple_of(self.num_kv_heads), "{self:?}");
        let Way { heads, tokens, dims } = way;
        let queries = heads * tokens;
        let padded = padded_head_dim(self.head_dim);
        let numbers = match class {
            Class::Subgroup(lanes) => subgroup_numbers(lanes, padded, dims),
            Class::Floor => floor_numbers(queries, padded),
        };
        let mut defines = class.defines();
        for (name, value) in numbers {
            defines = defines.set(name, i64::from(value));
        }
        defines = defines
            .set("D", i64::from(self.head_dim))
            .set("DP", i64::from(padded))
            .set("HEADS", i64::from(heads))
            .set("TQ", i64::from(tokens))
            .set("NQ", i64::from(queries));
        let is_merge = variant == Variant::Merge;
        let has_softcap = self.softcap.is_some() && !is_merge;
        let flags = [("I8", is_quantised), ("MERGE", is_merge), ("SOFTCAP", has_softcap), ("SINKS", self.has_sinks)];
        let defines = flags.iter().filter(|f| f.1).fold(defines, |defines, flag| defines.flag(flag.0));
        match self.kv.flag().filter(|_| !is_merge) {
            Some(flag) => defines.flag(flag),
            None => defines,
        }
    }
}

/// The kernels that there are where a workgroup takes so many tokens of a long row.
fn variants(tokens: u32) -> &'static [Variant] {
    match tokens {
        1 => &[Variant::Single, Variant::Merge],
        _ => &[Variant::Single, Variant::Several, Variant::Merge],
    }
}

/// KT keys per tile, KPL of them per lane, DPL dims per lane in CPL rounds, q loaded QW dims at a time.
fn subgroup_numbers(lanes: u32, padded: u32, dims: u32) -> Vec<(&'static str, u32)> {
    // At most four for each lane: a driver of four lanes compiles longer texts for minutes.
    let keys = lanes.max(32.min(4 * lanes));
    vec![
        ("KT", keys),
        ("KPL", keys / lanes),
        ("DPL", dims),
        ("CPL", (padded / dims).div_ceil(lanes)),
        ("QW", lanes.min(8)),
    ]
}

/// KT keys per tile, DPL dims per lane; NG groups of lanes share the queries, QPT each.
fn floor_numbers(queries: u32, padded: u32) -> Vec<(&'static str, u32)> {
    let lanes = if padded / 4 > LANES_FLOOR { LANES_FLOOR_WIDE } else { LANES_FLOOR };
    let groups = lanes / (padded / 4);
    vec![("KT", lanes), ("DPL", 4), ("NG", groups), ("QPT", queries.div_ceil(groups))]
}

/// What [`Attention::new`] binds.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// f32 `[num_tokens, q_stride]`, as `rope_kv_write` writes it.
    pub q: &'a BufferSlice,
    /// See [`KvLayout`]; both are texels or neither is.
    pub k_cache: &'a BufferSlice,
    pub v_cache: &'a BufferSlice,
    /// f32 `[num_heads]`, each sink times log2(e), where the shape has them.
    pub sinks: Option<&'a BufferSlice>,
    /// f32 `[num_heads, 2]`, instead of sinks, where heads add a multiple of the key's position to their scores: the
    /// multiple, a bf16, and the scale of the scores times log2(e). The product is rounded to bf16 first.
    pub slopes: Option<&'a BufferSlice>,
    /// Scratch of [`Shape::partial_bytes`] for each slot that work lists may name; all layers share it.
    pub partials: &'a BufferSlice,
    /// Rows of `out_stride` elements; `I8` only when the shape [can quantise](Shape::can_quantise).
    pub y: RowOutput<'a>,
}

/// What [`super::attention_work`] has to know of the ways that were chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionCut {
    /// Tokens of a workgroup when rows are long.
    pub tokens_per_workgroup: u32,
    /// Workgroups that share an item of one token.
    pub parts: u32,
}

impl AttentionCut {
    /// One token in one piece.
    pub const WHOLE: AttentionCut = AttentionCut { tokens_per_workgroup: 1, parts: 1 };
}

/// The kernels with one layer's buffers.
#[derive(Clone, Debug)]
pub struct Attention {
    label: String,
    /// Each with its workgroups for an item.
    bound: Vec<(Variant, Arc<Bound>, u32)>,
    tokens: u32,
}

impl Attention {
    /// `window` is the number of keys that a token sees, itself included; `None` is all. `group` is the layer's group.
    pub fn new(
        ctx: &mut KernelContext<'_>,
        label: &str,
        shape: &Shape,
        layer: (Option<u32>, u32),
        buffers: &Buffers<'_>,
    ) -> Result<Attention, GpuError> {
        Attention::with_flags(ctx, label, shape, layer, buffers, &[])
    }

    /// As `new`, with flags of attention.wgsl that only measurements set.
    pub(super) fn with_flags(
        ctx: &mut KernelContext<'_>,
        label: &str,
        shape: &Shape,
        (window, group): (Option<u32>, u32),
        buffers: &Buffers<'_>,
        flags: &[&str],
    ) -> Result<Attention, GpuError> {
        let is_quantised = matches!(buffers.y, RowOutput::I8(_));
        if is_quantised && !shape.can_quantise(ctx.class) {
            let message = format!("heads of {} dims cannot be quantised here", shape.head_dim);
            return Err(GpuError::Validation { what: label.into(), message });
        }
        let params = ctx.params.push(ctx.gpu, &shape.params(window, group))?;
        let choices = &mut *ctx.choices;
        let mut way = |variant| choices.take_attention(&shape.key(variant, is_quantised), ctx.class);
        let tokens = way(Variant::Several).tokens;
        let ways: Vec<(Variant, Way)> = variants(tokens).iter().map(|&variant| (variant, way(variant))).collect();
        let bind = |&(variant, way): &(Variant, Way)| -> Result<(Variant, Arc<Bound>, u32), GpuError> {
            let mut bindings = vec![("step_meta", ctx.step_meta), ("partials", buffers.partials), ("params", &params)];
            let mut defines = shape.defines(ctx.class, variant, is_quantised, way);
            if variant != Variant::Merge {
                bindings.extend([("q", buffers.q), ("k_cache", buffers.k_cache), ("v_cache", buffers.v_cache)]);
                if buffers.k_cache.buffer.is_texels() {
                    defines = defines.flag("KV_TEXELS");
                }
            }
            bindings.extend(buffers.sinks.map(|sinks| ("sinks", sinks)));
            let slopes = buffers.slopes.filter(|_| variant != Variant::Merge);
            bindings.extend(slopes.map(|slopes| ("slopes", slopes)));
            bindings.extend(buffers.y.bindings());
            let defines = flags.iter().fold(defines, |defines, flag| defines.flag(flag));
            let defines = if slopes.is_some() { defines.flag("ALIBI") } else { defines };
            let kernel = ctx.gpu.kernel("attention", &defines)?;
            Ok((variant, ctx.gpu.bind(&kernel, &bindings)?, shape.num_heads / way.heads))
        };
        Ok(Attention { label: label.into(), bound: ways.iter().map(bind).collect::<Result<_, _>>()?, tokens })
    }

    /// What a step's work is to be cut for.
    pub fn cut(&self) -> AttentionCut {
        let parts = self.bound.first().map_or(1, |(.., parts)| *parts);
        AttentionCut { tokens_per_workgroup: self.tokens, parts }
    }

    /// One dispatch for each kind of work that there is.
    pub fn record(&self, recording: &mut Recording, counts: WorkCounts) {
        for (variant, bound, parts) in &self.bound {
            let items = match variant {
                Variant::Single => counts.single,
                Variant::Several => counts.several,
                Variant::Merge => counts.merges,
            };
            recording.dispatch(self.label.clone(), bound, items * parts);
        }
    }
}

/// What the kernel computes, in f64, f32 output `[num_tokens, out_stride]`. Caches of keys and of values are decoded
/// ([`KvLayout::decode`]); sinks as the kernel has them.
pub fn reference(
    shape: &Shape,
    layout: &KvLayout,
    batch: &StepBatch,
    window: Option<u32>,
    q: &[f32],
    (k_cache, v_cache): (&[f32], &[f32]),
    sinks: Option<&[f32]>,
) -> Vec<f32> {
    let cap = shape.softcap.map(|cap| f64::from(cap) * std::f64::consts::LOG2_E);
    let capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
    let (dim, padded) = (shape.head_dim as usize, padded_head_dim(shape.head_dim) as usize);
    let group = shape.num_heads / shape.num_kv_heads;
    let mut out = vec![0.0; batch.num_tokens() * shape.out_stride() as usize];
    for token in 0..batch.num_tokens() {
        let row = batch.row_of_token[token] as usize;
        let table = batch.table(row, 0);
        let position = batch.positions[token];
        let lowest = window.map_or(0, |w| (position + 1).saturating_sub(w));
        let slot = |key: u32| table[(key / layout.block_size) as usize] * layout.block_size + key % layout.block_size;
        for head in 0..shape.num_heads {
            let query = &q[token * shape.q_stride() as usize + head as usize * padded..][..dim];
            let value_idx = |key: u32| layout.value_idx(slot(key), head / group);
            let scores: Vec<f64> =
                (lowest..=position).map(|key| capped(dot(query, &k_cache[value_idx(key)..]))).collect();
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head as usize]));
            let top = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp2()).collect();
            let total = weights.iter().sum::<f64>() + (sink - top).exp2();
            let to = token * shape.out_stride() as usize + head as usize * dim;
            for d in 0..dim {
                let sum: f64 =
                    (lowest..=position).zip(&weights).map(|(key, w)| w * f64::from(v_cache[value_idx(key) + d])).sum();
                out[to + d] = (sum / total) as f32;
            }
        }
    }
    out
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}
