//! `matmul_units`: products of many tokens by the adapter's cooperative matrices.
//!
//! Guarantees: what [`super::matmul`] computes, within the precision of f16 factors and f32 sums, with all that a product
//! does beside multiplying. It is used only where the device was opened for it ([`crate::gpu::Gpu::matrix_units`]).
//!
//! Not attempted: the same bits as for few tokens, since the order of a sum is the adapter's: a row's result hangs on how
//! many tokens its step had, and so on chunking and company. Products with experts keep their own kernels.

use super::Class;
use super::matmul::{Fusion, Precision};
use super::pack::{BLOCK_ROWS, Format};
use crate::gpu::Defines;

/// Tokens from which on a product is computed so: a tile's rows at least.
pub const MIN_TOKENS: u32 = 16;
/// Tokens of a workgroup, which has a block's 64 rows of weights.
pub const TOKENS: u32 = 32;

/// Whether matrices of `side` fill the rows that a subgroup of the class has.
pub fn is_possible(side: u32, class: Class) -> bool {
    matches!(class, Class::Subgroup(lanes) if lanes <= BLOCK_ROWS && lanes.is_multiple_of(side))
}

/// File and defines.
pub fn variant(
    format: Format,
    precision: Precision,
    class: Class,
    side: u32,
    fusion: Fusion,
) -> (&'static str, Defines) {
    let defines = fusion.flags(format.defines().and(&class.defines()).set("T", i64::from(side)));
    match precision {
        Precision::F32 => ("matmul_units", defines.flag("FLOAT_ROWS")),
        Precision::I8 => ("matmul_units", defines),
    }
}
