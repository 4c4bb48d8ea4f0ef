//! Where in a checkpoint the tensor for a role lies: under which name, and which part of it where files fuse several.

use crate::model::dtype::DType;
use crate::model::error::Fault;
use std::borrow::Cow;

/// The tensor that holds a role.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// As the file names it.
    pub name: String,
    pub part: Part,
    /// Added to each element when it is read as floats (gemma stores the gain of its norms less 1).
    pub add: f32,
}

/// Which part of the stored tensor. Counts are rows of a matrix and elements of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    /// Rows `from..` of a tensor with `of` rows (phi3's fused projections).
    Rows {
        from: u64,
        of: u64,
    },
    /// Stored `[cols, of]`: columns `from..`, read as rows (gpt2's `Conv1D`). A vector is cut as by `Rows`.
    Columns {
        from: u64,
        of: u64,
    },
    /// Of each `period` rows, the `take` from `from` on (gpt_neox's Q, K and V head by head).
    Every {
        period: u64,
        from: u64,
        take: u64,
    },
    /// Rows `from..` of a tensor with `of` rows, as many as the role has columns, turned into its columns.
    TransposedRows {
        from: u64,
        of: u64,
    },
    /// A tensor for each row: the name has `{}` where the row's number stands (stablelm's norms of heads).
    RowEach,
    /// One of `of` experts that lie one after the other.
    Expert {
        expert: u64,
        of: u64,
        layout: ExpertLayout,
    },
}

/// How an expert lies in a tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertLayout {
    /// As the role: `[of, rows, cols]`.
    Rows,
    /// Transposed, every `step`-th row from `from` on: `[of, cols, rows * step]` (gpt_oss).
    Columns { from: u64, step: u64 },
}

impl From<String> for Source {
    fn from(name: String) -> Source {
        Source { name, part: Part::Whole, add: 0.0 }
    }
}

impl Source {
    /// A part of the tensor of this name.
    pub fn part(name: String, part: Part) -> Source {
        Source { name, part, add: 0.0 }
    }

    /// The shape that the stored tensor must have for the role to have `shape`.
    pub fn stored_shape(&self, shape: &[u64]) -> Vec<u64> {
        let mut stored = shape.to_vec();
        match self.part {
            Part::Whole => {}
            Part::RowEach => stored = shape[1..].to_vec(),
            Part::Rows { of, .. } => stored[0] = of,
            Part::TransposedRows { of, .. } => stored = vec![of, shape[0]],
            Part::Columns { of, .. } if shape.len() == 2 => stored = vec![shape[1], of],
            Part::Columns { of, .. } => stored[0] = of,
            Part::Every { period, take, .. } => stored[0] = shape[0] / take * period,
            Part::Expert { of, layout: ExpertLayout::Rows, .. } => stored.insert(0, of),
            Part::Expert { of, layout: ExpertLayout::Columns { step, .. }, .. } => {
                let rows = shape[0] * step;
                stored = if shape.len() == 2 { vec![of, shape[1], rows] } else { vec![of, rows] };
            }
        }
        stored
    }

    /// The role's bytes out of the stored tensor's. The shapes are checked, so that all indices are in range.
    pub fn cut<'a>(&self, dtype: DType, bytes: &'a [u8], shape: &[u64]) -> Result<Cow<'a, [u8]>, Fault> {
        let unit = if shape.len() == 2 { shape[1] } else { 1 };
        let row_bytes = |rows: u64| match dtype.bytes(unit).and_then(|bytes| bytes.checked_mul(rows)) {
            Some(bytes) => Ok(bytes as usize),
            None => Err(Fault::Unsupported(format!("{dtype} in rows of {unit} elements cannot be cut"))),
        };
        match self.part {
            Part::Whole | Part::RowEach => Ok(Cow::Borrowed(bytes)),
            Part::Columns { from, of } if shape.len() == 2 => transposed(dtype, bytes, shape, (from, of, 1)),
            Part::Rows { from, .. } | Part::Columns { from, .. } => {
                Ok(Cow::Borrowed(&bytes[row_bytes(from)?..row_bytes(from + shape[0])?]))
            }
            Part::TransposedRows { from, .. } => {
                let start = dtype.bytes(shape[0]).unwrap_or(0) as usize * from as usize;
                transposed(dtype, &bytes[start..], shape, (0, shape[0], 1))
            }
            Part::Every { period, from, take } => {
                let mut out = Vec::with_capacity(row_bytes(shape[0])?);
                for block in bytes.chunks_exact(row_bytes(period)?) {
                    out.extend_from_slice(&block[row_bytes(from)?..row_bytes(from + take)?]);
                }
                Ok(Cow::Owned(out))
            }
            Part::Expert { expert, layout: ExpertLayout::Rows, .. } => {
                let size = row_bytes(shape[0])?;
                Ok(Cow::Borrowed(&bytes[expert as usize * size..(expert as usize + 1) * size]))
            }
            Part::Expert { expert, layout: ExpertLayout::Columns { from, step }, of } => {
                let size = bytes.len() / of as usize;
                let own = &bytes[expert as usize * size..][..size];
                // A vector is a matrix with one column.
                let shape = [shape[0], shape.get(1).copied().unwrap_or(1)];
                transposed(dtype, own, &shape, (from, shape[0] * step, step))
            }
        }
    }
}

/// Columns `from, from + step, …` of a plain `[cols, of]` tensor as rows.
fn transposed(
    dtype: DType,
    bytes: &[u8],
    shape: &[u64],
    (from, of, step): (u64, u64, u64),
) -> Result<Cow<'static, [u8]>, Fault> {
    if dtype.block_elements() != 1 {
        return Err(Fault::Unsupported(format!("{dtype} cannot be transposed")));
    }
    let size = dtype.block_bytes();
    let (rows, cols) = (shape[0] as usize, shape[1] as usize);
    let mut out = Vec::with_capacity(rows * cols * size);
    for row in 0..rows {
        for col in 0..cols {
            let at = (col * of as usize + from as usize + row * step as usize) * size;
            out.extend_from_slice(&bytes[at..at + size]);
        }
    }
    Ok(Cow::Owned(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[track_caller]
    fn check(part: Part, stored: &[f32], shape: &[u64], stored_shape: &[u64], want: &[f32]) {
        let source = Source::part("w".into(), part);
        assert_eq!(source.stored_shape(shape), stored_shape);
        let bytes = floats(stored);
        let cut = source.cut(DType::F32, &bytes, shape).expect("can be cut");
        assert_eq!(cut.as_ref(), floats(want));
    }

    #[test]
    fn parts_of_matrices_and_vectors_are_cut() {
        let stored = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        check(Part::Whole, &stored, &[4, 2], &[4, 2], &stored);
        check(Part::Rows { from: 1, of: 4 }, &stored, &[2, 2], &[4, 2], &[2.0, 3.0, 4.0, 5.0]);
        check(Part::Rows { from: 6, of: 8 }, &stored, &[2], &[8], &[6.0, 7.0]);
        check(Part::Columns { from: 1, of: 4 }, &stored, &[2, 2], &[2, 4], &[1.0, 5.0, 2.0, 6.0]);
        check(Part::Columns { from: 1, of: 8 }, &stored, &[2], &[8], &[1.0, 2.0]);
        check(Part::Every { period: 2, from: 1, take: 1 }, &stored, &[2, 2], &[4, 2], &[2.0, 3.0, 6.0, 7.0]);
        let turned = Part::TransposedRows { from: 2, of: 4 };
        check(turned, &stored, &[2, 2], &[4, 2], &[4.0, 6.0, 5.0, 7.0]);
        let expert = |layout| Part::Expert { expert: 1, of: 2, layout };
        check(expert(ExpertLayout::Rows), &stored, &[2, 2], &[2, 2, 2], &[4.0, 5.0, 6.0, 7.0]);
        let odd = ExpertLayout::Columns { from: 1, step: 2 };
        check(expert(odd), &stored, &[1, 2], &[2, 2, 2], &[5.0, 7.0]);
        check(expert(odd), &stored, &[2], &[2, 4], &[5.0, 7.0]);
        check(Part::Every { period: 4, from: 2, take: 2 }, &stored, &[4], &[8], &[2.0, 3.0, 6.0, 7.0]);
    }
}
