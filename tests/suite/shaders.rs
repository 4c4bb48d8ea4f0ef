//! Every shader variant, without a GPU: it parses, validates, translates to each back end, keeps WebGPU's limits, and its
//! parameters lie where the Rust mirror has them.

use std::collections::BTreeMap;
use std::path::Path;

use kvasir::gpu::pipeline::{BindingKind, Reflection, reflect};
use kvasir::gpu::shader::stitch;
use kvasir::gpu::{Defines, Stitched, sources};
use kvasir::kernels::{
    attention, attention_work, combine, copy_blocks, embed, expert_pairs, gather, heads_norm, latent_write, logit_cap,
    lora_expand, lora_shrink, lora_work, matmul, measure, mlp, norm, quantise, rope_kv_write, route, sample, step_meta,
    variants,
};

struct Variant {
    name: String,
    label: String,
    stitched: Stitched,
    module: naga::Module,
    info: naga::valid::ModuleInfo,
    reflection: Reflection,
    /// It has cooperative matrices, and with them f16.
    has_matrices: bool,
}

fn load(name: &str, defines: &Defines) -> Variant {
    let label = format!("{name} [{defines}]");
    let stitched = stitch(name, defines).unwrap_or_else(|e| panic!("{label}: {e}"));
    let module = stitched.parse().unwrap_or_else(|e| panic!("{label}: {e}"));
    // `unpack2x16float` is core WGSL; naga counts it apart for the sake of old GL.
    let mut capabilities = naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(naga::valid::Capabilities::SUBGROUP, defines.get("SUBGROUP").is_some());
    let has_matrices = matches!(name, "matmul_units" | "units_probe");
    let of_matrices = naga::valid::Capabilities::COOPERATIVE_MATRIX | naga::valid::Capabilities::SHADER_FLOAT16;
    capabilities.set(of_matrices, has_matrices);
    let mut validator = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities);
    let info = validator.validate(&module).unwrap_or_else(|e| panic!("{label}: {}", e.emit_to_string(&stitched.text)));
    let reflection = reflect(&stitched, &module).unwrap_or_else(|e| panic!("{label}: {e}"));
    Variant { name: name.into(), label, stitched, module, info, reflection, has_matrices }
}

/// Calls `check` with each variant, on two threads.
fn for_each_variant(check: impl Fn(&Variant) + Sync) {
    let all = variants::all();
    std::thread::scope(|scope| {
        for half in all.chunks(all.len().div_ceil(2)) {
            scope.spawn(|| half.iter().for_each(|(name, defines)| check(&load(name, defines))));
        }
    });
}

#[test]
fn the_list_of_variants_is_what_the_code_compiles() {
    let list: String = variants::all().iter().map(|(name, defines)| format!("{name}: {defines}\n")).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders/variants.txt");
    if std::env::var_os("UPDATE_VARIANTS").is_some() {
        std::fs::write(&path, &list).unwrap();
    }
    let file = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(file == list, "shaders/variants.txt is stale: run this test with UPDATE_VARIANTS=1");
    for source in sources::KERNELS {
        let prefix = format!("{}: ", source.name);
        assert!(list.lines().any(|l| l.starts_with(&prefix)), "no variant of {} is listed", source.name);
    }
}

#[test]
fn every_variant_translates_to_every_back_end() {
    for_each_variant(|v| {
        let entry = (naga::ShaderStage::Compute, "main".to_string());
        let spv = naga::back::spv::PipelineOptions { shader_stage: entry.0, entry_point: entry.1.clone() };
        let options = naga::back::spv::Options { lang_version: (1, 3), ..Default::default() };
        naga::back::spv::write_vec(&v.module, &v.info, &options, Some(&spv))
            .unwrap_or_else(|e| panic!("{} to SPIR-V: {e}", v.label));

        let options = naga::back::msl::Options { lang_version: (2, 4), ..Default::default() };
        let pipeline = naga::back::msl::PipelineOptions { entry_point: Some(entry.clone()), ..Default::default() };
        naga::back::msl::write_string(&v.module, &v.info, &options, &pipeline)
            .unwrap_or_else(|e| panic!("{} to MSL: {e}", v.label));

        if v.has_matrices {
            // DX12 has none, and its adapters report none.
            return;
        }
        let options =
            naga::back::hlsl::Options { shader_model: naga::back::hlsl::ShaderModel::V6_4, ..Default::default() };
        let pipeline = naga::back::hlsl::PipelineOptions { entry_point: Some(entry) };
        let mut text = String::new();
        naga::back::hlsl::Writer::new(&mut text, &options, &pipeline)
            .write(&v.module, &v.info, None)
            .unwrap_or_else(|e| panic!("{} to HLSL: {e}", v.label));
    });
}

#[test]
fn every_variant_keeps_the_limits_of_webgpu_and_orders_its_bindings() {
    for_each_variant(|v| {
        let bindings = &v.reflection.bindings;
        let storage = bindings.iter().filter(|b| b.kind != BindingKind::Uniform).count();
        // Fused products are for adapters that say they have room.
        let most = if v.label.contains("QUANTISES") { matmul::Fusion::BUFFERS as usize } else { 8 };
        assert!(storage <= most, "{}: {storage} storage buffers", v.label);
        assert!(v.reflection.workgroup_bytes <= 16 << 10, "{}: {} bytes", v.label, v.reflection.workgroup_bytes);
        let invocations: u32 = v.reflection.workgroup_size.iter().product();
        assert!(invocations <= 256, "{}: {invocations} invocations", v.label);
        // Inputs, then outputs, then parameters.
        let order = |kind| match kind {
            BindingKind::ReadOnly | BindingKind::Texels(_) => 0,
            BindingKind::ReadWrite | BindingKind::WrittenTexels(_) => 1,
            BindingKind::Uniform => 2,
        };
        assert!(bindings.is_sorted_by_key(|b| order(b.kind)), "{}: bindings out of order", v.label);
        let entry = v.info.get_entry_point(0);
        for (handle, global) in v.module.global_variables.iter() {
            assert!(!entry[handle].is_empty(), "{}: {:?} is not used", v.label, global.name);
        }
        let enables: Vec<&str> = v.stitched.text.lines().filter(|line| line.starts_with("enable ")).collect();
        let wanted: &[&str] = if v.has_matrices { &["enable f16;", "enable wgpu_cooperative_matrix;"] } else { &[] };
        assert_eq!(enables, wanted, "{}: what else is enabled is refused by naga or not asked for", v.label);
    });
}

/// Name, offset of each field and size, as Rust lays the struct out.
type Mirror = (Vec<(&'static str, usize)>, usize);

macro_rules! mirror {
    ($type:ty: $($field:ident)*) => {
        (vec![$((stringify!($field), std::mem::offset_of!($type, $field))),*], std::mem::size_of::<$type>())
    };
}

/// The Rust mirror of each kernel's `Params`.
fn mirrors() -> BTreeMap<&'static str, Mirror> {
    let product = || {
        mirror!(matmul::Params: n groups x_stride y_stride y_offset counts_logits accumulate has_bias
        expert_rows first_row num_rows slots pairs_per_row squares_at norm_k eps to_squares_at
        added_stride added_offset)
    };
    let logits = || mirror!(sample::Params: vocab stride);
    BTreeMap::from([
        ("attention", mirror!(attention::Params: num_heads num_kv_heads window q_stride out_stride group softcap)),
        ("logprobs", logits()),
        ("penalties", logits()),
        ("mask", logits()),
        (
            "rope_kv_write",
            mirror!(rope_kv_write::Params: num_heads num_kv_heads qkv_stride q_stride q_scale rms_eps group),
        ),
        ("sample", logits()),
        ("copy_blocks", mirror!(copy_blocks::Params: words)),
        ("embed", mirror!(embed::Params: first_row num_rows stride scale)),
        ("matmul_f32", product()),
        ("matmul_i8", product()),
        ("matmul_units", product()),
        ("norm", mirror!(norm::Params: k stride eps scale squares_at)),
        ("gather", mirror!(gather::Params: stride counts_logits)),
        ("quantise", mirror!(quantise::Params: stride)),
        ("heads_norm", mirror!(heads_norm::Params: q_len k_len num_q num_segments stride eps)),
        ("latent_write", mirror!(latent_write::Params: num_heads raw_q_stride raw_kv_stride q_stride q_scale eps)),
        ("mlp", mirror!(mlp::Params: k x_stride up_offset y_stride rows_per_token)),
        ("route", mirror!(route::Params: num_experts num_active stride num_groups num_active_groups scale)),
        ("expert_pairs", mirror!(expert_pairs::Params: num_experts num_active columns slots)),
        ("combine", mirror!(combine::Params: num_active stride scale logits_stride mix_at)),
        ("peak", mirror!(measure::peaks::Params: rounds factor)),
        ("lora_shrink", mirror!(lora_shrink::Params: groups rows rank first_part squares_at norm_k eps)),
        (
            "lora_expand",
            mirror!(lora_expand::Params: quads quads1 quads2 size0 size1 size2 at0 at1 at2 rank rows y_stride first_part),
        ),
        ("logit_cap", mirror!(logit_cap::Params: stride scale cap)),
    ])
}

#[test]
fn parameters_lie_where_their_rust_mirrors_have_them() {
    let mirrors = mirrors();
    for_each_variant(|v| {
        let params = v.module.types.iter().find(|(_, t)| t.name.as_deref() == Some("Params"));
        let Some((_, params)) = params else { return };
        // `fill` is used by tests only and has its mirror there.
        let Some((fields, size)) = mirrors.get(v.name.as_str()) else {
            assert_eq!(v.name, "fill", "{} has parameters, but no mirror is listed", v.name);
            return;
        };
        let naga::TypeInner::Struct { members, span } = &params.inner else { panic!("{}: not a struct", v.label) };
        let found: Vec<(&str, usize)> =
            members.iter().map(|m| (m.name.as_deref().unwrap_or(""), m.offset as usize)).collect();
        assert_eq!(&found, fields, "{}", v.label);
        assert_eq!(*span as usize, *size, "{}", v.label);
    });
}

#[test]
fn the_metadata_accessors_read_the_words_that_rust_writes() {
    use step_meta::header;
    let text = sources::shared("step").unwrap().text;
    for (call, word) in [
        ("fn num_tokens() -> u32 { return step_meta[", header::NUM_TOKENS),
        ("fn num_rows() -> u32 { return step_meta[", header::NUM_ROWS),
        ("fn num_logits() -> u32 { return step_meta[", header::NUM_LOGITS),
        ("fn block_size() -> u32 { return step_meta[", header::BLOCK_SIZE),
        ("fn num_groups() -> u32 { return step_meta[", header::NUM_GROUPS),
        ("+ token * step_meta[", header::NUM_GROUPS),
        ("+ row * step_meta[", header::NUM_GROUPS),
        ("fn token_id(token: u32) -> u32 { return step_meta[step_meta[", header::TOKEN_IDS),
        ("fn position(token: u32) -> u32 { return step_meta[step_meta[", header::POSITIONS),
        ("fn kv_slot(token: u32, group: u32) -> u32 { return step_meta[step_meta[", header::KV_SLOTS),
        ("fn row_of_token(token: u32) -> u32 { return step_meta[step_meta[", header::ROW_OF_TOKEN),
        ("fn row_start(row: u32) -> u32 { return step_meta[step_meta[", header::ROW_START),
        ("fn block_table_start(row: u32, group: u32) -> u32 { return step_meta[step_meta[", header::BLOCK_TABLE_START),
        ("fn block_table(idx: u32) -> u32 { return step_meta[step_meta[", header::BLOCK_TABLES),
        ("fn logit_token(logit: u32) -> u32 { return step_meta[step_meta[", header::LOGIT_TOKENS),
        ("fn sampling_word(logit: u32, word: u32) -> u32 { return step_meta[step_meta[", header::SAMPLING),
        ("fn penalty_start(logit: u32) -> u32 { return step_meta[step_meta[", header::PENALTY_START),
        ("fn penalty(idx: u32) -> vec2<u32> { let at = step_meta[", header::PENALTIES),
        ("fn bias_start(logit: u32) -> u32 { return step_meta[step_meta[", header::BIAS_START),
        ("fn bias(idx: u32) -> vec2<u32> { let at = step_meta[", header::BIASES),
        ("fn num_single_items() -> u32 { return step_meta[", header::NUM_SINGLE_ITEMS),
        ("fn num_items() -> u32 { return step_meta[", header::NUM_ITEMS),
        ("fn num_merges() -> u32 { return step_meta[", header::NUM_MERGES),
        ("fn item_word(item: u32, word: u32) -> u32 { return step_meta[step_meta[", header::ITEMS),
        ("fn work_token(idx: u32) -> vec2<u32> { let at = step_meta[", header::WORK_TOKENS),
        ("fn merge_word(merge: u32, word: u32) -> u32 { return step_meta[step_meta[", header::MERGES),
        ("fn row_chain(row: u32) -> u32 { return step_meta[step_meta[", header::CHAINS),
        ("fn most_keys() -> u32 { return step_meta[", header::MOST_KEYS),
        ("fn slot_of_row(row: u32) -> u32 { return step_meta[step_meta[", header::SLOT_OF_ROW),
        ("fn num_copies() -> u32 { return step_meta[", header::NUM_COPIES),
        ("fn block_copy(idx: u32) -> vec2<u32> { let at = step_meta[", header::COPIES),
        ("fn num_lora_tiles() -> u32 { return step_meta[", header::NUM_LORA_TILES),
        ("fn lora_tile_word(tile: u32, word: u32) -> u32 { return step_meta[step_meta[", header::LORA_TILES),
        ("fn lora_parts(token: u32) -> u32 { return step_meta[step_meta[", header::LORA_PARTS),
    ] {
        assert!(text.contains(&format!("{call}{word}]")), "{call}{word}]");
    }
    assert!(text.contains(&format!("SAMPLING_WORDS: u32 = {}u", step_meta::SAMPLING_WORDS)));
    assert!(text.contains(&format!("LORA_TILE_WORDS: u32 = {}u", lora_work::TILE_WORDS)));
    assert!(text.contains(&format!("ITEM_WORDS: u32 = {}u", attention_work::ITEM_WORDS)));
}
