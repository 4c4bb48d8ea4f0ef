//! Every combination of kernel and defines that can be compiled, for tests that look at each. `shaders/variants.txt`
//! is this list as text.

use super::expert_matmul::ExpertMatmul;
use super::kv_layout::KvFormat;
use super::matmul::{self, Ends, Fusion, Matmul, Precision};
use super::norm::{Form, Writes};
use super::pack::Format;
use super::tile::ProductKey;
use super::{
    Class, RowCount, attention, canary, combine, copy_blocks, embed, expert_pairs, feed, gather, heads_norm,
    latent_write, logit_cap, logprobs, lora_expand, lora_shrink, mask, matrix_units, mlp, norm, penalties,
    rope_kv_write, route, sample,
};
use crate::gpu::Defines;
use crate::gpu::texels::TEXEL_LANES;
use crate::model::dtype::{DType, GGUF_TYPES, Span};
use crate::model::experts::{Routing, Scoring};
use crate::model::spec::{Activation, MlpKind};

/// Classes that exist: one for each size of subgroup, and the one without.
pub const CLASSES: [Class; 6] = [
    Class::Subgroup(4),
    Class::Subgroup(8),
    Class::Subgroup(16),
    Class::Subgroup(32),
    Class::Subgroup(64),
    Class::Floor,
];

/// Types that weights can have on the GPU: those of GGUF files, then the groups of checkpoints in folders.
pub const WEIGHT_TYPES: [DType; 37] = {
    let mut types = [DType::F32; 37];
    let mut i = 0;
    while i < GGUF_TYPES.len() {
        types[i] = GGUF_TYPES[i];
        i += 1;
    }
    let spans = [Span::One, Span::Two, Span::Four];
    let mut j = 0;
    while j < spans.len() {
        types[i + 3 * j] = DType::Int4(spans[j]);
        types[i + 3 * j + 1] = DType::Int8(spans[j]);
        types[i + 3 * j + 2] = DType::Float8(spans[j]);
        j += 1;
    }
    types
};

/// (query heads, kv heads, head dim): shapes of known models and the edges of what is supported. Others compile, too.
pub const HEADS: [(u32, u32, u32); 8] =
    [(9, 3, 64), (14, 2, 64), (32, 8, 128), (16, 8, 128), (4, 2, 16), (3, 1, 20), (7, 1, 80), (2, 1, 256)];

/// All of them, sorted, each once.
pub fn all() -> Vec<(String, Defines)> {
    let mut found = vec![("fill".to_string(), Defines::new())];
    found.extend([true, false].map(|checks| ("canary".to_string(), canary::defines(checks))));
    found.extend((1..=copy_blocks::MAX_BUFFERS).map(|n| ("copy_blocks".into(), copy_blocks::defines(n))));
    found.push(("expert_pairs".into(), expert_pairs::defines()));
    found.push(("feed".into(), feed::defines()));
    for class in CLASSES {
        of_rows(class, &mut found);
        of_experts(class, &mut found);
        of_heads(class, &mut found);
        found.push(("peak".into(), class.defines()));
        found.push(("penalties".into(), penalties::defines()));
        found.push(("mask".into(), mask::defines()));
        found.push(("sample".into(), sample::defines(class)));
        found.push(("logprobs".into(), logprobs::defines()));
        for dtype in WEIGHT_TYPES.into_iter().filter(|dtype| is_listed(*dtype, class)) {
            let format = Format::of(dtype);
            of_weights(class, format, &mut found);
            if let Some(format) = format.as_texels().filter(|_| has_texels(class)) {
                of_weights(class, format, &mut found);
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Software drivers' subgroups.
fn has_texels(class: Class) -> bool {
    matches!(class, Class::Subgroup(lanes) if lanes <= TEXEL_LANES)
}

/// Types of the last page of a list of quantisations are listed for two classes: they differ from the others by a few
/// lines that know no class.
fn is_listed(dtype: DType, class: Class) -> bool {
    let is_common = matches!(
        dtype,
        DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1
    ) || matches!(dtype, DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K)
        || matches!(dtype, DType::Int4(Span::Four) | DType::Int8(Span::Four));
    is_common || matches!(class, Class::Subgroup(32) | Class::Floor)
}

fn of_rows(class: Class, found: &mut Vec<(String, Defines)>) {
    if let Class::Subgroup(_) = class {
        found.push(("subgroup_probe".into(), class.defines()));
        let sides = [8, 16].into_iter().filter(|&side| matrix_units::is_possible(side, class));
        found.extend(sides.map(|side| ("units_probe".into(), class.defines().set("T", i64::from(side)))));
    }
    found.push(("quantise".into(), class.defines()));
    found.extend(lora_shrink::kernels(class));
    found.extend(lora_expand::kernels(class));
    found.extend([false, true].map(|is_quantised| ("gather".into(), gather::defines(class, is_quantised))));
    found.extend([false, true].map(|is_layer| ("heads_norm".into(), heads_norm::defines(class, is_layer))));
    found.push(("logit_cap".into(), logit_cap::defines(class)));
    for is_quantised in [false, true] {
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
            for kind in [MlpKind::Gated, MlpKind::Plain] {
                found.push(("mlp".into(), mlp::defines(class, kind, activation, is_quantised)));
            }
        }
        found.push(("mlp".into(), mlp::defines(class, MlpKind::Gated, Activation::ClampedSwiglu, is_quantised)));
    }
    for form in [Form::Rms, Form::Layer { bias: false }, Form::Layer { bias: true }, Form::Copy] {
        if form == Form::Rms {
            found.push(("norm".into(), norm::defines(class, form, Writes::Folded, RowCount::Tokens)));
        }
        for writes in [Writes::F32, Writes::I8, Writes::Add] {
            found.push(("norm".into(), norm::defines(class, form, writes, RowCount::Tokens)));
        }
        if form != Form::Copy {
            found.push(("norm".into(), norm::defines(class, form, Writes::F32, RowCount::Logits)));
            found.push(("norm".into(), norm::defines(class, form, Writes::I8, RowCount::Logits)));
        }
    }
}

fn of_experts(class: Class, found: &mut Vec<(String, Defines)>) {
    for (has_shared, has_mix) in [(false, false), (true, false), (true, true)] {
        found.push(("combine".into(), combine::defines(class, has_shared, has_mix)));
    }
    let plain = Routing { is_normalised: false, ..Routing::SOFTMAX };
    let by_best = Routing { num_groups: 4, ..plain };
    let sigmoid = Routing { scoring: Scoring::Sigmoid, has_selection_bias: true, ..Routing::SOFTMAX };
    let by_two = Routing { num_groups: 4, group_by_two: true, ..sigmoid };
    for routing in [Routing::SOFTMAX, plain, by_best, sigmoid, by_two] {
        found.push(("route".into(), route::defines(class, &routing)));
    }
}

fn of_heads(class: Class, found: &mut Vec<(String, Defines)>) {
    let has_texels = has_texels(class);
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        for kv in [KvFormat::F16, KvFormat::F32, KvFormat::I8] {
            // Every head shape plain; one of them also with what few families have.
            let extras = [(None, false), (Some(50.0), false), (None, true)];
            for (softcap, has_sinks) in &extras[..if num_heads == 9 { 3 } else { 1 }] {
                let (softcap, has_sinks) = (*softcap, *has_sinks);
                let shape = attention::Shape { num_heads, num_kv_heads, head_dim, kv, softcap, has_sinks };
                found.extend(shape.kernels(class, false));
                if num_heads == 9 && kv == KvFormat::F16 && !has_sinks && softcap.is_none() {
                    found.extend(shape.contiguous_kernels(class));
                }
                if num_heads == 9 && !has_sinks && softcap.is_none() {
                    found.extend(shape.alibi_kernels(class, false));
                }
                if shape.can_quantise(class) {
                    found.extend(shape.kernels(class, true));
                }
                // Ways know nothing of what else the kernel does.
                if kv == KvFormat::F16 && !has_sinks && softcap.is_none() && matches!(class, Class::Subgroup(8 | 32)) {
                    found.extend(shape.candidate_kernels(class, shape.can_quantise(class)));
                }
                if has_texels && kv == KvFormat::F16 {
                    found.extend(shape.texel_kernels(class, false));
                    if shape.can_quantise(class) {
                        found.extend(shape.texel_kernels(class, true));
                    }
                }
            }
            for (interleaved, qk_norm) in [(false, false), (false, true), (true, false), (true, true)] {
                let shape = rope_kv_write::Shape {
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    rotary_dim: head_dim,
                    interleaved,
                    qk_norm,
                    kv,
                };
                found.push(("rope_kv_write".into(), shape.defines(class)));
                if has_texels && kv == KvFormat::F16 {
                    found.push(("rope_kv_write".into(), shape.texel_defines(class)));
                }
            }
        }
    }
    for (kv, interleaved) in
        [(KvFormat::F16, true), (KvFormat::F32, true), (KvFormat::I8, true), (KvFormat::F16, false)]
    {
        let (num_heads, rank, rope_dim, nope_dim) = (16, 512, 64, 128);
        let shape = latent_write::Shape { num_heads, rank, rope_dim, nope_dim, interleaved, kv };
        found.push(("latent_write".into(), shape.defines(class)));
        let row = attention::Shape {
            num_heads,
            num_kv_heads: 1,
            head_dim: shape.row_dim(),
            kv,
            softcap: None,
            has_sinks: false,
        };
        found.extend(row.kernels(class, false));
    }
}

fn of_weights(class: Class, format: Format, found: &mut Vec<(String, Defines)>) {
    found.push(("embed".into(), embed::defines(class, format, false)));
    found.push(("embed".into(), embed::defines(class, format, true)));
    found.extend(Matmul::kernels(format, Precision::F32, class, false, Fusion::default()));
    if format.takes_i8() {
        found.extend(Matmul::kernels(format, Precision::I8, class, false, Fusion::default()));
        found.extend(Matmul::kernels(format, Precision::I8, class, true, Fusion::default()));
    }
    of_fused(class, format, found);
    of_units(class, format, found);
    // Tiles change nothing of how weights are read: some types and classes stand for all.
    let some = [DType::F16, DType::Q8_0, DType::Q4_1, DType::Q4_K].contains(&format.dtype);
    if some && matches!(class, Class::Subgroup(8 | 32)) {
        of_candidates(class, format, found);
    }
    // GROUPED changes nothing of how weights are read: some types stand for all.
    if [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_K, DType::MXFP4].contains(&format.dtype) {
        found.extend(ExpertMatmul::kernels(format, Precision::F32, class, false));
        if format.takes_i8() {
            let kernels = |&pairs: &bool| ExpertMatmul::kernels(format, Precision::I8, class, pairs);
            found.extend([false, true].iter().flat_map(kernels));
        }
    }
}

/// Products by cooperative matrices, on a driver on the CPU and on a graphics card.
fn of_units(class: Class, format: Format, found: &mut Vec<(String, Defines)>) {
    let side = match class {
        Class::Subgroup(8) => 8,
        Class::Subgroup(32) => 16,
        _ => return,
    };
    let mut add = |precision, fusion| {
        let (name, defines) = matrix_units::variant(format, precision, class, side, fusion);
        found.push((name.to_string(), defines));
    };
    if format.takes_i8() {
        add(Precision::I8, Fusion::default());
    }
    if !format.takes_i8() || format.dtype == DType::Q4_1 {
        add(Precision::F32, Fusion::default());
    }
    // What is done beside multiplying changes nothing of how weights are read: one type stands for all.
    if format.dtype == DType::Q4_1 {
        let silu = Activation::Silu;
        for (is_normed, ends) in [
            (true, Ends::Sums),
            (false, Ends::Hidden),
            (true, Ends::Gated(silu)),
            (false, Ends::Gated(silu)),
            (true, Ends::Adapted(silu)),
        ] {
            add(Precision::I8, Fusion { is_normed, ends });
        }
    }
}

/// Every way that the tuner may choose.
fn of_candidates(class: Class, format: Format, found: &mut Vec<(String, Defines)>) {
    let mut fusions = vec![Fusion::default()];
    if format.dtype == DType::Q4_1 {
        fusions.push(Fusion { is_normed: false, ends: Ends::Hidden });
        fusions.push(Fusion { is_normed: true, ends: Ends::Sums });
        if Fusion::can_gate(format, class) {
            fusions.push(Fusion { is_normed: true, ends: Ends::Gated(Activation::Silu) });
        }
    }
    let precision = if format.takes_i8() { Precision::I8 } else { Precision::F32 };
    for fusion in fusions {
        for tokens in matmul::COLUMNS {
            let key = ProductKey { format, precision, n: 64, k: 64, fusion, tokens };
            let tiles = key.candidates(class, true).into_iter();
            let kernels = tiles.map(|tile| matmul::variant(format, precision, class, tile, fusion));
            found.extend(kernels.map(|(name, defines)| (name.to_string(), defines)));
        }
    }
}

/// What products do beside multiplying changes nothing of how weights are read: some types stand for all.
fn of_fused(class: Class, format: Format, found: &mut Vec<(String, Defines)>) {
    let some = [DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q6_K].contains(&format.dtype);
    let is_listed = format.dtype == DType::Q4_1 || some && matches!(class, Class::Subgroup(8 | 32));
    if !is_listed || !Fusion::is_possible(class) {
        return;
    }
    let mut fusions =
        vec![Fusion { is_normed: true, ends: Ends::Sums }, Fusion { is_normed: false, ends: Ends::Hidden }];
    if Fusion::can_gate(format, class) {
        let others = [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::ClampedSwiglu];
        let others = if format.dtype == DType::Q4_1 { &others[..] } else { &[] };
        let gated = [Activation::Silu].iter().chain(others);
        if format.dtype == DType::Q4_1 {
            fusions.push(Fusion { is_normed: false, ends: Ends::Gated(Activation::Silu) });
        }
        for &activation in gated {
            let gated = Fusion { is_normed: true, ends: Ends::Gated(activation) };
            fusions.extend([gated, Fusion { ends: Ends::Adapted(activation), ..gated }]);
        }
    }
    for fusion in fusions {
        for pairs in [false, true].iter().take(if format.is_four_bit() { 2 } else { 1 }) {
            found.extend(Matmul::kernels(format, Precision::I8, class, *pairs, fusion));
        }
    }
}
