//! Recognises the tensors that make up a quantised matrix, and checks their shapes against each other.

use super::{Bits, Codes, Floats, Packed, Scheme, Zeros};
use crate::model::dtype::{DType, Span};
use crate::model::error::ModelError;
use crate::model::safetensors::{SafeTensor, SafetensorsFile, SafetensorsSet};
use std::sync::Arc;

/// Tensors of one matrix.
struct Parts<'a, 's> {
    weights: &'a SafetensorsSet,
    stem: &'s str,
}

type Tensor<'a> = (&'a SafetensorsFile, &'a SafeTensor);

impl<'a> Parts<'a, '_> {
    fn get(&self, suffix: &str) -> Option<Tensor<'a>> {
        self.weights.tensor(&format!("{}.{suffix}", self.stem))
    }

    fn required(&self, suffix: &str, beside: Tensor<'a>) -> Result<Tensor<'a>, ModelError> {
        self.get(suffix).ok_or_else(|| {
            ModelError::malformed(
                beside.0.path(),
                format!("tensor {}.{suffix} is missing beside {}", self.stem, beside.1.name),
            )
        })
    }
}

fn fail<T>(tensor: Tensor<'_>, fault: String) -> Result<T, ModelError> {
    Err(ModelError::malformed(tensor.0.path(), format!("tensor {} {fault}", tensor.1.name)))
}

/// The tensor's bytes, if it is of this type and shape.
fn checked<'a>(tensor: Tensor<'a>, types: &[&str], shape: &[usize]) -> Result<&'a [u8], ModelError> {
    if !types.contains(&tensor.1.type_name.as_str()) {
        return fail(tensor, format!("has type {}; the format needs {}", tensor.1.type_name, types.join(" or ")));
    }
    if tensor.1.shape.iter().map(|&d| d as usize).ne(shape.iter().copied()) {
        return fail(tensor, format!("has the shape {:?}; the model needs {shape:?}", tensor.1.shape));
    }
    Ok(tensor.0.bytes(tensor.1))
}

fn floats<'a>(tensor: Tensor<'a>) -> Result<Floats<'a>, ModelError> {
    match tensor.1.dtype() {
        Some(dtype) => Ok(Floats { dtype, bytes: tensor.0.bytes(tensor.1) }),
        None => fail(tensor, format!("has type {}, which scales cannot have", tensor.1.type_name)),
    }
}

/// Rows and columns of a matrix; a vector is one column, a number one of each.
fn dims(tensor: Tensor<'_>) -> Result<(usize, usize), ModelError> {
    match tensor.1.shape.as_slice() {
        [] => Ok((1, 1)),
        [n] => Ok((*n as usize, 1)),
        [n, k] => Ok((*n as usize, *k as usize)),
        shape => fail(tensor, format!("has the shape {shape:?}; a matrix has two dimensions")),
    }
}

/// The quantised matrix `[n, k]` whose tensors' names begin with `stem`; `None` when it is stored plainly.
pub fn find<'a>(
    scheme: &Scheme,
    weights: &'a SafetensorsSet,
    stem: &str,
    [n, k]: [u64; 2],
) -> Result<Option<Packed<'a>>, ModelError> {
    let parts = Parts { weights, stem };
    let size = (n as usize, k as usize);
    let plain = parts.get("weight");
    match scheme {
        Scheme::Gptq { bits, zero_offset } => match parts.get("qweight") {
            Some(qweight) => gptq(&parts, qweight, size, (*bits as usize, *zero_offset)).map(Some),
            None => Ok(None),
        },
        Scheme::Awq => match parts.get("qweight") {
            Some(qweight) => awq(&parts, qweight, size).map(Some),
            None => Ok(None),
        },
        Scheme::Compressed { .. } | Scheme::Fp8 { .. } => match (parts.get("weight_packed"), plain) {
            (Some(packed), _) => compressed(&parts, packed, size).map(Some),
            (None, Some(weight)) => match weight.1.type_name.as_str() {
                "I8" | "F8_E4M3" => {
                    let block = if let Scheme::Fp8 { block } = scheme { *block } else { (128, 128) };
                    scaled_bytes(&parts, weight, size, (block.0 as usize, block.1 as usize)).map(Some)
                }
                _ => Ok(None),
            },
            _ => Ok(None),
        },
        // Of whole mixtures, not of a matrix.
        Scheme::Mxfp4 => Ok(None),
        Scheme::Mlx { bits } => match plain {
            Some(weight) if weight.1.type_name == "U32" => mlx(&parts, weight, size, *bits as usize).map(Some),
            _ => Ok(None),
        },
    }
}

/// The type that rows of `k` codes are handed out as.
fn dtype_of(bits: usize, k: usize, group: usize) -> DType {
    match (Span::widest(k as u64, group as u64), bits) {
        (None, _) => DType::F32,
        (Some(span), 0..=4) => DType::Int4(span),
        (Some(span), _) => DType::Int8(span),
    }
}

/// Bits of a code, from words of 32 for `k` of them; `hint` where several numbers would do.
fn bits_of(tensor: Tensor<'_>, words: usize, k: usize, hint: usize) -> Result<usize, ModelError> {
    match [hint, 4, 8, 2, 3, 5, 6].into_iter().find(|bits| (k * bits).div_ceil(32) == words) {
        Some(bits) => Ok(bits),
        None => fail(tensor, format!("has the shape {:?}, which holds no {k} codes of 2 to 8 bits", tensor.1.shape)),
    }
}

/// Size of the groups that divide `k` into `groups`.
fn group_size(tensor: Tensor<'_>, k: usize, groups: usize) -> Result<usize, ModelError> {
    if groups == 0 || !k.is_multiple_of(groups) {
        return fail(
            tensor,
            format!("has the shape {:?}, which does not divide {k} inputs into groups", tensor.1.shape),
        );
    }
    Ok(k / groups)
}

/// qweight `[words of k, n]`, qzeros `[groups, words of n]`, scales `[groups, n]`, g_idx `[k]`.
fn gptq<'a>(
    parts: &Parts<'a, '_>,
    qweight: Tensor<'a>,
    (n, k): (usize, usize),
    (hint, zero_offset): (usize, i32),
) -> Result<Packed<'a>, ModelError> {
    let bits = bits_of(qweight, dims(qweight)?.0, k, hint)?;
    let codes = checked(qweight, &["I32"], &[(k * bits).div_ceil(32), n])?;
    let scales = parts.required("scales", qweight)?;
    let groups = dims(scales)?.0;
    checked(scales, &["F16", "BF16", "F32"], &[groups, n])?;
    let zeros = checked(parts.required("qzeros", qweight)?, &["I32"], &[groups, (n * bits).div_ceil(32)])?;
    let group_of = match parts.get("g_idx") {
        Some(g_idx) => Some(groups_of_inputs(g_idx, k, groups)?),
        None => None,
    };
    let mut packed = Packed {
        n,
        k,
        dtype: DType::F32,
        order: None,
        codes: Codes::Down(Bits { bits, bytes: codes }),
        zeros: Zeros::Down(Bits { bits, bytes: zeros }, zero_offset),
        scales: floats(scales)?,
        scales_down: true,
        is_float: false,
        group: (1, k.div_ceil(groups.max(1))),
        groups,
        group_of,
    };
    order_inputs(&mut packed, bits, scales)?;
    Ok(packed)
}

/// The group of each input.
fn groups_of_inputs(g_idx: Tensor<'_>, k: usize, groups: usize) -> Result<Arc<[u32]>, ModelError> {
    let bytes = checked(g_idx, &["I32"], &[k])?;
    let group_of: Arc<[u32]> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    match group_of.iter().position(|g| *g as usize >= groups) {
        Some(i) => fail(g_idx, format!("places input {i} in group {} of {groups}", group_of[i] as i32)),
        None => Ok(group_of),
    }
}

/// Settles type and order: inputs sorted by group where that gives groups of one size, else floats.
fn order_inputs(packed: &mut Packed<'_>, bits: usize, scales: Tensor<'_>) -> Result<(), ModelError> {
    let (k, groups) = (packed.k, packed.groups);
    let Some(group_of) = packed.group_of.clone() else {
        packed.group.1 = group_size(scales, k, groups)?;
        packed.dtype = dtype_of(bits, k, packed.group.1);
        return Ok(());
    };
    if groups == 0 || !k.is_multiple_of(groups) {
        return Ok(());
    }
    let group = k / groups;
    if group_of.iter().enumerate().all(|(i, g)| *g as usize == i / group) {
        packed.group_of = None;
        packed.dtype = dtype_of(bits, k, group);
        return Ok(());
    }
    let mut order: Vec<u32> = (0..k as u32).collect();
    order.sort_by_key(|&input| group_of[input as usize]);
    let is_even = order.iter().enumerate().all(|(j, &input)| group_of[input as usize] as usize == j / group);
    let dtype = dtype_of(bits, k, group);
    if is_even && dtype != DType::F32 {
        packed.dtype = dtype;
        packed.order = Some(order.into());
    }
    Ok(())
}

/// qweight `[k, n / 8]`, qzeros `[groups, n / 8]`, scales `[groups, n]`.
fn awq<'a>(parts: &Parts<'a, '_>, qweight: Tensor<'a>, (n, k): (usize, usize)) -> Result<Packed<'a>, ModelError> {
    if !n.is_multiple_of(8) {
        return fail(qweight, format!("cannot hold {n} rows, which are no multiple of 8"));
    }
    let codes = checked(qweight, &["I32"], &[k, n / 8])?;
    let scales = parts.required("scales", qweight)?;
    let groups = dims(scales)?.0;
    checked(scales, &["F16", "BF16", "F32"], &[groups, n])?;
    let zeros = match parts.get("qzeros") {
        Some(qzeros) => Zeros::Awq(checked(qzeros, &["I32"], &[groups, n / 8])?),
        None => Zeros::Is(8),
    };
    let group = group_size(scales, k, groups)?;
    Ok(Packed {
        n,
        k,
        dtype: dtype_of(4, k, group),
        order: None,
        codes: Codes::Awq(codes),
        zeros,
        scales: floats(scales)?,
        scales_down: true,
        is_float: false,
        group: (1, group),
        groups,
        group_of: None,
    })
}

/// weight_packed `[n, words of k]`, weight_scale `[n, groups]`, weight_zero_point `[words of n, groups]`.
fn compressed<'a>(parts: &Parts<'a, '_>, codes: Tensor<'a>, (n, k): (usize, usize)) -> Result<Packed<'a>, ModelError> {
    let bits = bits_of(codes, dims(codes)?.1, k, 4)?;
    let bytes = checked(codes, &["I32"], &[n, (k * bits).div_ceil(32)])?;
    let scales = parts.required("weight_scale", codes)?;
    let (rows, groups) = dims(scales)?;
    if rows != n && (rows, groups) != (1, 1) {
        return fail(scales, format!("has the shape {:?}; the model needs {n} rows", scales.1.shape));
    }
    // Codes and zero points are stored with half of the range added.
    let zeros = match parts.get("weight_zero_point") {
        Some(zeros) if zeros.1.type_name == "I32" => {
            Zeros::Up(Bits { bits, bytes: checked(zeros, &["I32"], &[(n * bits).div_ceil(32), groups])? })
        }
        Some(zeros) => return fail(zeros, format!("has type {}; packed zero points have I32", zeros.1.type_name)),
        None => Zeros::Is(1 << (bits - 1)),
    };
    let group_of = match parts.get("weight_g_idx") {
        Some(g_idx) => Some(groups_of_inputs(g_idx, k, groups)?),
        None => None,
    };
    let mut packed = Packed {
        n,
        k,
        dtype: DType::F32,
        order: None,
        codes: Codes::Along(Bits { bits, bytes }),
        zeros,
        scales: floats(scales)?,
        scales_down: false,
        is_float: false,
        group: (n / rows, k.div_ceil(groups.max(1))),
        groups,
        group_of,
    };
    order_inputs(&mut packed, bits, scales)?;
    Ok(packed)
}

/// weight `[n, k]` of I8 or F8_E4M3 with a scale for all, for each row, for each group or for each block.
fn scaled_bytes<'a>(
    parts: &Parts<'a, '_>,
    weight: Tensor<'a>,
    (n, k): (usize, usize),
    block: (usize, usize),
) -> Result<Packed<'a>, ModelError> {
    let bytes = checked(weight, &["I8", "F8_E4M3"], &[n, k])?;
    let is_float = weight.1.type_name == "F8_E4M3";
    let scales = match parts.get("weight_scale_inv") {
        Some(scales) => scales,
        None => parts.required("weight_scale", weight)?,
    };
    let (rows, groups) = dims(scales)?;
    let in_blocks = (n.div_ceil(block.0), k.div_ceil(block.1));
    let group = match (rows, groups) {
        (1, 1) => (n, k),
        (rows, groups) if rows == n && groups > 0 && k.is_multiple_of(groups) => (1, k / groups),
        size if size == in_blocks => block,
        _ => return fail(scales, format!("has the shape {:?}, which fits no [{n}, {k}]", scales.1.shape)),
    };
    let zeros = match parts.get("weight_zero_point") {
        Some(zeros) if !is_float && zeros.1.type_name == "I8" && rows == n => {
            Zeros::Bytes(checked(zeros, &["I8"], &[n, groups])?)
        }
        Some(zeros) if !is_float => return fail(zeros, "does not fit the scales".into()),
        _ => Zeros::Is(0),
    };
    let dtype = match (Span::widest(k as u64, if groups == 1 { k } else { group.1 } as u64), is_float) {
        (None, _) => DType::F32,
        (Some(span), true) => DType::Float8(span),
        (Some(span), false) => DType::Int8(span),
    };
    Ok(Packed {
        n,
        k,
        dtype,
        order: None,
        codes: Codes::Bytes(bytes),
        zeros,
        scales: floats(scales)?,
        scales_down: false,
        is_float,
        group,
        groups,
        group_of: None,
    })
}

/// weight `[n, words of k]`, scales and biases `[n, groups]`.
fn mlx<'a>(
    parts: &Parts<'a, '_>,
    weight: Tensor<'a>,
    (n, k): (usize, usize),
    hint: usize,
) -> Result<Packed<'a>, ModelError> {
    let bits = bits_of(weight, dims(weight)?.1, k, hint)?;
    let bytes = checked(weight, &["U32"], &[n, (k * bits).div_ceil(32)])?;
    let scales = parts.required("scales", weight)?;
    let groups = dims(scales)?.1;
    checked(scales, &["F16", "BF16", "F32"], &[n, groups])?;
    let biases = parts.required("biases", weight)?;
    checked(biases, &["F16", "BF16", "F32"], &[n, groups])?;
    let group = group_size(scales, k, groups)?;
    Ok(Packed {
        n,
        k,
        dtype: dtype_of(bits, k, group),
        order: None,
        codes: Codes::Along(Bits { bits, bytes }),
        zeros: Zeros::Biases(floats(biases)?),
        scales: floats(scales)?,
        scales_down: false,
        is_float: false,
        group: (1, group),
        groups,
        group_of: None,
    })
}

/// Where the first quantised matrix should have been, for a message.
pub fn expected_tensor(scheme: &Scheme, stem: &str) -> String {
    let suffix = match scheme {
        Scheme::Gptq { .. } | Scheme::Awq => "qweight",
        Scheme::Compressed { .. } => "weight_packed",
        Scheme::Fp8 { .. } => "weight_scale_inv",
        Scheme::Mlx { .. } => "scales",
        Scheme::Mxfp4 => return "model.layers.0.mlp.experts.gate_up_proj_blocks".into(),
    };
    format!("{stem}.{suffix}")
}
