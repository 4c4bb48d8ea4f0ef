//! Experts in 4-bit floats as gpt-oss is published: all experts of a layer in `NAME_blocks`, u8
//! `[experts, rows, inputs / 32, 16]`, two inputs in a byte, the first in its low half, and `NAME_scales`, u8
//! `[experts, rows, inputs / 32]`, powers of two with a bias of 127 (OCP Microscaling Formats, MXFP4).

use crate::model::arch::source::{ExpertLayout, Part, Source};
use crate::model::error::ModelError;
use crate::model::safetensors::{SafeTensor, SafetensorsFile, SafetensorsSet};
use std::path::Path;

/// Inputs that share a scale.
const GROUP: usize = 32;

/// The matrix `[n, k]` of one expert, in place.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4<'a> {
    pub file: &'a Path,
    n: usize,
    k: usize,
    /// Row i is row `first + i * step` of the expert's.
    first: usize,
    step: usize,
    blocks: &'a [u8],
    scales: &'a [u8],
}

/// The matrix that stands for `source`, a role of this shape; `None` when it is stored plainly.
pub fn find<'a>(weights: &'a SafetensorsSet, source: &Source, shape: &[u64]) -> Result<Option<Mxfp4<'a>>, ModelError> {
    let Part::Expert { expert, of, layout } = source.part else { return Ok(None) };
    let [n, k] = shape[..] else { return Ok(None) };
    let (first, step) = match layout {
        ExpertLayout::Rows => (0, 1),
        ExpertLayout::Columns { from, step } => (from, step),
    };
    let Some(blocks) = weights.tensor(&format!("{}_blocks", source.name)) else { return Ok(None) };
    let scales_name = format!("{}_scales", source.name);
    let Some(scales) = weights.tensor(&scales_name) else {
        let fault = format!("tensor {scales_name} is missing beside {}", blocks.1.name);
        return Err(ModelError::malformed(blocks.0.path(), fault));
    };
    let groups = k / GROUP as u64;
    if !k.is_multiple_of(GROUP as u64) {
        let fault = format!("tensor {} cannot hold rows of {k} inputs in groups of {GROUP}", blocks.1.name);
        return Err(ModelError::malformed(blocks.0.path(), fault));
    }
    let rows = n.saturating_mul(step);
    let all_blocks = bytes(blocks, &[of, rows, groups, GROUP as u64 / 2])?;
    let all_scales = bytes(scales, &[of, rows, groups])?;
    let own = |all: &'a [u8]| {
        let size = all.len() / of as usize;
        &all[expert as usize * size..][..size]
    };
    let (n, k, first, step) = (n as usize, k as usize, first as usize, step as usize);
    let file = blocks.0.path();
    Ok(Some(Mxfp4 { file, n, k, first, step, blocks: own(all_blocks), scales: own(all_scales) }))
}

/// The tensor's bytes, if it has this shape.
fn bytes<'a>((file, tensor): (&'a SafetensorsFile, &'a SafeTensor), shape: &[u64]) -> Result<&'a [u8], ModelError> {
    let fault = |fault: String| Err(ModelError::malformed(file.path(), format!("tensor {} {fault}", tensor.name)));
    if tensor.type_name != "U8" {
        return fault(format!("has type {}; the format needs U8", tensor.type_name));
    }
    if tensor.shape != shape {
        return fault(format!("has the shape {:?}; the model needs {shape:?}", tensor.shape));
    }
    Ok(file.bytes(tensor))
}

impl Mxfp4<'_> {
    /// All rows, as [`crate::model::dtype::DType::MXFP4`] stores them: the scale, then element j in the low and j + 16
    /// in the high half of byte j.
    pub fn bytes(&self) -> Vec<u8> {
        let groups = self.k / GROUP;
        let half = GROUP / 2;
        let mut out = Vec::with_capacity(self.n * groups * (1 + half));
        for row in (0..self.n).map(|i| self.first + i * self.step) {
            for group in row * groups..(row + 1) * groups {
                let pairs = &self.blocks[group * half..][..half];
                let element = |j: usize| pairs[j / 2] >> (4 * (j % 2)) & 15;
                out.push(self.scales[group]);
                out.extend((0..half).map(|j| element(j) | element(j + half) << 4));
            }
        }
        out
    }
}
