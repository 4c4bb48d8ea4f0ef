//! One file per kernel: parameters, recording, reference. This page is the table of contents.
//!
//! | module | does |
//! |---|---|
//! | [`feed`] | tokens that the last step drew become this step's input |
//! | [`embed`] | token ids to rows of the embedding table |
//! | [`norm`] | RMSNorm or LayerNorm, f32, quantised or added, also of the gathered logit rows |
//! | [`matmul`] | products with packed weights, f32 or i8 activations |
//! | [`matrix_units`] | the same products of many tokens by cooperative matrices, where that is asked for |
//! | [`mlp`] | act(gate) * up or act(up), f32 or quantised |
//! | [`route`], [`expert_pairs`] | router logits to each token's experts, sorted by expert |
//! | [`expert_matmul`] | products in which each row has its own expert |
//! | [`combine`] | what experts computed joins the hidden state |
//! | [`quantise`] | f32 rows to i8 |
//! | [`gather`] | f32 rows in another order, f32 or quantised |
//! | [`pack`], [`weights`] | checkpoint tensors as planes on the GPU |
//! | [`measure`] | how fast products are on this adapter |
//! | [`device_class`] | families of adapters, and what each begins with |
//! | [`tile`], [`tune`] | ways to compute a product that give the same bits, and which is fastest here |
//! | [`context`] | what every kernel is built from |
//! | [`params`] | uniform parameters of every (kernel, layer) in one arena |
//! | [`step_meta`] | the step's flat arrays as one buffer of words |
//! | [`kv_layout`] | how K and V lie in the pool |
//! | [`copy_blocks`] | blocks of the cache copied before they are written |
//! | [`rope_kv_write`] | q and k norms, rotary embedding, K and V into the cache |
//! | [`latent_write`] | the compressed rows of latent attention into the cache, and its queries |
//! | [`heads_norm`] | q and k norms over all heads together, or with a gain for each head |
//! | [`attention`] | PagedAttention over the block tables |
//! | [`attention_way`] | ways to compute attention that give the same bits |
//! | [`attention_work`] | how a step's attention is cut into workgroups |
//! | [`logit_cap`] | logits scaled and bounded by a soft cap |
//! | [`canary`] | marks of what was written to each slot, and their check |
//! | [`penalties`] | repetition, presence and frequency penalties, biases |
//! | [`mask`] | tokens that a grammar does not allow |
//! | [`sample`] | greedy or drawn token per logit row |
//! | [`logprobs`] | log-probabilities for rows that ask |
//! | [`lora_shrink`], [`lora_expand`] | what LoRA adapters add to projections, row by row |
//! | [`lora_work`] | a step's rows with adapters as tiles |
//!
//! # Conventions
//!
//! - **Step metadata**: one storage buffer `step_meta: array<u32>`, written once per step by [`step_meta::encode`] and
//!   read through the functions of `shaders/shared/step.wgsl`. Zeroed, it makes every kernel do nothing, which is how
//!   pipelines are warmed up.
//! - **Static parameters**: a uniform `params: Params`, whose Rust mirror (`#[repr(C)]`, `Pod`) stands in the kernel's
//!   file. What varies by step is in the metadata, so bindings are made once, at load.
//! - **Activations**: f32 `[num_tokens, stride]`, stride = K rounded up to 32; the padding is zero.
//!   Quantised: `xq: array<vec4<u32>>` `[num_tokens, stride / 16]` of packed i8 and `xs: array<vec2<f32>>`
//!   `[num_tokens, stride / 32]` = (scale, scale * sum of q), symmetric in groups of 32: scale = max |x| / 127,
//!   q = round(x / scale).
//! - **Batch invariance**: each output element is one f32 accumulator with K ascending; the formula text does not depend
//!   on how many tokens there are, on the tile or on the neighbours, so a row's bits depend on that row alone.
//! - **Classes** ([`Class`]): `Subgroup` kernels run one subgroup per workgroup, without barriers or workgroup memory;
//!   `Floor` kernels use WebGPU's defaults only. One WGSL file serves both through `#ifdef SUBGROUP`.
//! - **Grids** are counted in one line (`shared/grid.wgsl`) and cut to rows by [`crate::gpu::recording::grid`].
//! - wgpu tracks hazards by whole buffers: inputs and outputs of a kernel are different buffers.

use crate::gpu::Defines;

pub mod attention;
pub mod attention_way;
pub mod attention_work;
pub mod canary;
pub mod combine;
pub mod context;
pub mod copy_blocks;
pub mod device_class;
pub mod embed;
pub mod expert_matmul;
pub mod expert_pairs;
pub mod feed;
pub mod gather;
pub mod heads_norm;
pub mod kv_layout;
pub mod latent_write;
pub mod logit_cap;
pub mod logprobs;
pub mod lora_expand;
pub mod lora_shrink;
pub mod lora_work;
pub mod mask;
pub mod matmul;
pub mod matrix_units;
pub mod measure;
pub mod mlp;
pub mod norm;
pub mod pack;
pub mod params;
pub mod penalties;
pub mod quantise;
pub mod rope_kv_write;
pub mod route;
pub mod sample;
pub mod step_meta;
pub mod tile;
pub mod tune;
pub mod variants;
pub mod weights;

pub use context::{Activations, KernelContext, QuantisedRows, RowCount, RowOutput};
pub use device_class::DeviceClass;
pub use params::ParamArena;
pub use tile::Choices;
pub use weights::{PackedMatrix, PackedSlice, WeightError, upload_vector};

/// Activation rows are padded to this many elements; also the size of a quantisation group.
pub const GROUP: u32 = 32;

/// Elements of a padded activation row.
pub fn stride(k: u32) -> u32 {
    k.next_multiple_of(GROUP)
}

/// Which shape of kernel an adapter gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Workgroups of one subgroup with this many lanes: 4, 8, 16, 32 or 64.
    Subgroup(u32),
    /// No optional feature.
    Floor,
}

impl Class {
    /// Lanes of a workgroup.
    pub fn lanes(self) -> u32 {
        match self {
            Class::Subgroup(size) => size,
            Class::Floor => 64,
        }
    }

    /// `SUBGROUP SG=n`, or `SG=64`: lanes of a workgroup, and whether they are a subgroup.
    pub fn defines(self) -> Defines {
        match self {
            Class::Subgroup(size) => Defines::new().flag("SUBGROUP").set("SG", i64::from(size)),
            Class::Floor => Defines::new().set("SG", i64::from(self.lanes())),
        }
    }
}
