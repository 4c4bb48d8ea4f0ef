//! Quantised checkpoints in folders: GPTQ, AWQ, compressed-tensors, FP8, MLX, and gpt-oss's experts in MXFP4.
//!
//! [`Scheme::read`] takes the method from `config.json`; [`find`] recognises the tensors that make up one matrix, checks
//! their shapes, and says as which [`DType`] it is handed out. [`Packed::bytes`] then writes its rows. Number of bits and
//! size of groups follow from the shapes, so that layers which deviate from the config are right as well.
//!
//! Guarantees: `w = scale * (q - zero)` or `scale * q + bias`, exact in f32 for scales of 16 bits. With an order of
//! activations (GPTQ's `g_idx`) columns are sorted by group and [`Packed::order`] tells which input each belongs to. Where
//! rows do not fill groups of 32, the matrix is handed out as f32. Formats: the writers' own readmes; E4M3 is OCP's.
//!
//! Not attempted: Marlin and GEMV orders of the same numbers, 4-bit floats elsewhere, sparsity.

mod codes;
mod find;
mod mxfp4;

use super::dtype::DType;
use super::error::Fault;
use serde_json::{Map, Value};
use std::sync::Arc;

pub use find::{expected_tensor, find};
pub use mxfp4::{Mxfp4, find as find_mxfp4};

/// How a folder's matrices are quantised.
#[derive(Clone, Debug, PartialEq)]
pub enum Scheme {
    /// `zero_offset` is what must be added to stored zeros: 1 in the first version of the format.
    Gptq {
        bits: u32,
        zero_offset: i32,
    },
    Awq,
    Compressed {
        format: String,
    },
    /// Rows and columns of a block with one scale, where scales are of blocks.
    Fp8 {
        block: (u64, u64),
    },
    Mlx {
        bits: u64,
    },
    /// Experts in 4-bit floats, all else plain.
    Mxfp4,
}

impl Scheme {
    /// The scheme that a `config.json` describes; `None` for plain checkpoints.
    pub fn read(config: &Map<String, Value>) -> Result<Option<Scheme>, Fault> {
        for key in ["quantization_config", "compression_config", "quantization"] {
            match config.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Object(quantization)) => return Scheme::of(key, quantization).map(Some),
                Some(_) => return Err(Fault::Malformed(format!("{key} must be an object"))),
            }
        }
        Ok(None)
    }

    fn of(key: &str, config: &Map<String, Value>) -> Result<Scheme, Fault> {
        let text = |name: &str| config.get(name).and_then(Value::as_str);
        let number = |name: &str| config.get(name).and_then(Value::as_u64);
        let method = text("quant_method").or(text("method"));
        let refuse = |what: String| Err(Fault::Unsupported(format!("{what} ({key}) is not supported")));
        match method {
            Some("gptq") => {
                let bits = number("bits").or(number("w_bit"));
                let Some(bits @ (2 | 3 | 4 | 8)) = bits else {
                    return refuse(format!("GPTQ with {} bits", bits.map_or("unknown".into(), |b| b.to_string())));
                };
                let zero_offset = match text("checkpoint_format").or(text("format")).unwrap_or("gptq") {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    other => return refuse(format!("GPTQ format `{other}`")),
                };
                Ok(Scheme::Gptq { bits: bits as u32, zero_offset })
            }
            Some("awq") => match (number("bits").or(number("w_bit")), text("version").or(text("format"))) {
                (Some(4), None | Some("gemm" | "GEMM")) => Ok(Scheme::Awq),
                (Some(4), Some(version)) => refuse(format!("AWQ version `{version}`")),
                (bits, _) => refuse(format!("AWQ with {} bits", bits.map_or("unknown".into(), |b| b.to_string()))),
            },
            Some("compressed-tensors") => match text("format").unwrap_or("pack-quantized") {
                format @ ("pack-quantized" | "int-quantized" | "naive-quantized" | "float-quantized"
                | "mixed-precision" | "dense") => Ok(Scheme::Compressed { format: format.to_owned() }),
                other => refuse(format!("compressed-tensors format `{other}`")),
            },
            Some("fp8" | "fbgemm_fp8") => {
                let block = config.get("weight_block_size").and_then(Value::as_array);
                let side = |i: usize| block.and_then(|b| b.get(i)).and_then(Value::as_u64).filter(|n| *n > 0);
                Ok(Scheme::Fp8 { block: (side(0).unwrap_or(128), side(1).unwrap_or(128)) })
            }
            Some("mxfp4") => Ok(Scheme::Mxfp4),
            None if config.contains_key("group_size") => match (number("bits"), text("mode").unwrap_or("affine")) {
                (Some(bits @ (2 | 3 | 4 | 5 | 6 | 8)), "affine") => Ok(Scheme::Mlx { bits }),
                (_, mode) if mode != "affine" => refuse(format!("MLX quantisation mode `{mode}`")),
                (bits, _) => refuse(format!("MLX with {} bits", bits.map_or("unknown".into(), |b| b.to_string()))),
            },
            other => refuse(format!("quantization method `{}`", other.unwrap_or("unnamed"))),
        }
    }

    /// For a person: `GPTQ 4 bit`.
    pub fn label(&self) -> String {
        match self {
            Scheme::Gptq { bits, .. } => format!("GPTQ {bits} bit"),
            Scheme::Awq => "AWQ 4 bit".into(),
            Scheme::Compressed { format } => format!("compressed-tensors {format}"),
            Scheme::Fp8 { .. } => "FP8".into(),
            Scheme::Mlx { bits } => format!("MLX {bits} bit"),
            Scheme::Mxfp4 => "MXFP4".into(),
        }
    }

    /// A checkpoint of this scheme has at least one quantised matrix.
    pub fn must_quantise(&self) -> bool {
        !matches!(self, Scheme::Compressed { format } if format == "dense")
    }
}

/// Numbers of a tensor of 16- or 32-bit floats, in place.
#[derive(Clone, Copy, Debug)]
struct Floats<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

impl Floats<'_> {
    fn at(&self, i: usize) -> f32 {
        let b = self.bytes;
        match self.dtype {
            DType::F16 => half::f16::from_le_bytes([b[2 * i], b[2 * i + 1]]).to_f32(),
            DType::BF16 => half::bf16::from_le_bytes([b[2 * i], b[2 * i + 1]]).to_f32(),
            _ => f32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]),
        }
    }
}

/// Unsigned numbers of a few bits that follow each other from the lowest bit up in little-endian words.
#[derive(Clone, Copy, Debug)]
struct Bits<'a> {
    bits: usize,
    bytes: &'a [u8],
}

impl Bits<'_> {
    /// Number i of those that begin at byte `from`.
    fn at(&self, from: usize, i: usize) -> u32 {
        let bit = i * self.bits;
        let at = from + bit / 8;
        let low = u32::from(self.bytes[at]);
        let high = self.bytes.get(at + 1).map_or(0, |b| u32::from(*b) << 8);
        ((low | high) >> (bit % 8)) & ((1 << self.bits) - 1)
    }
}

/// Where the codes of a matrix lie.
#[derive(Clone, Copy, Debug)]
enum Codes<'a> {
    /// `[words of k, n]`: a column of words for each row.
    Down(Bits<'a>),
    /// `[n, words of k]`.
    Along(Bits<'a>),
    /// `[k, n / 8]`: eight rows in a word, in AWQ's order.
    Awq(&'a [u8]),
    /// `[n, k]` signed bytes, or E4M3.
    Bytes(&'a [u8]),
}

/// What is subtracted before the scale is applied, or added after.
#[derive(Clone, Copy, Debug)]
enum Zeros<'a> {
    /// The same for all.
    Is(i32),
    /// `[groups, words of n]`, plus an offset.
    Down(Bits<'a>, i32),
    /// `[words of n, groups]`.
    Up(Bits<'a>),
    /// `[groups, n / 8]`, in AWQ's order.
    Awq(&'a [u8]),
    /// `[n, groups]` signed bytes.
    Bytes(&'a [u8]),
    /// `[n, groups]`, added.
    Biases(Floats<'a>),
}

/// A quantised matrix `[n, k]`, recognised and checked.
#[derive(Clone, Debug)]
pub struct Packed<'a> {
    n: usize,
    k: usize,
    /// As which it is handed out.
    pub dtype: DType,
    /// Column j of the rows that are handed out is input `order[j]`; `None` for the plain order.
    pub order: Option<Arc<[u32]>>,
    codes: Codes<'a>,
    zeros: Zeros<'a>,
    scales: Floats<'a>,
    /// Scales are `[groups, n]`, not `[n, groups]`.
    scales_down: bool,
    /// Codes are E4M3.
    is_float: bool,
    /// Rows that share a scale; inputs that share a scale.
    group: (usize, usize),
    /// Groups along k.
    groups: usize,
    /// The group of each input, where it is not its place over the group's size.
    group_of: Option<Arc<[u32]>>,
}

impl Packed<'_> {
    /// Outermost first.
    pub fn shape(&self) -> [u64; 2] {
        [self.n as u64, self.k as u64]
    }
}
