//! One file per kernel: parameters, recording, reference. This page is the table of contents.
//!
//! | module | does |
//! |---|---|
//! | [`activation`] | rows of f32 or i8 between kernels |
//! | [`rms_norm`], [`swiglu`], [`quantize`] | the elementwise steps between matrix products |
//! | [`params`] | uniform parameters of every (kernel, layer) in one arena |
//! | [`step_meta`] | the step's flat arrays as one buffer of words |
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

use crate::gpu::{Defines, GpuCaps};

pub mod activation;
pub mod params;
pub mod quantize;
pub mod rms_norm;
pub mod step_meta;
pub mod swiglu;

pub use params::ParamArena;

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
    pub fn of(caps: &GpuCaps) -> Class {
        match caps.subgroup_size {
            Some(size) if size.is_power_of_two() => Class::Subgroup(size),
            _ => Class::Floor,
        }
    }

    /// `SUBGROUP SG=n`, or `SG=64`: lanes of a workgroup, and whether they are a subgroup.
    pub fn defines(self) -> Defines {
        match self {
            Class::Subgroup(size) => Defines::new().flag("SUBGROUP").set("SG", i64::from(size)),
            Class::Floor => Defines::new().set("SG", 64),
        }
    }
}
