//! GGUF files in the forms that converters have written over time, made here from folders: the same weights and spec.

use kvasir::model::Model;
use kvasir::model::experts::{ExpertPart, MixPart};
use kvasir::model::latent::LatentPart;
use kvasir::model::spec::{NormKind, Residual, WeightRole};
use std::path::Path;

use crate::support::{core_fixtures, full_fixtures};

/// A file of f32 tensors.
#[derive(Clone, Default)]
pub struct Gguf {
    pairs: Vec<u8>,
    num_pairs: u64,
    tensors: Vec<(String, Vec<u64>, Vec<f32>)>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    fn pair(&mut self, key: &str, type_id: u32, value: &[u8]) {
        text(&mut self.pairs, key);
        self.pairs.extend(type_id.to_le_bytes());
        self.pairs.extend(value);
        self.num_pairs += 1;
    }

    fn number(&mut self, key: &str, value: u32) {
        self.pair(key, 4, &value.to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.pair(key, 6, &value.to_le_bytes());
    }

    fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.pair(key, 8, &bytes);
    }

    /// `shape` is outermost first.
    fn tensor(&mut self, name: &str, shape: &[u64], values: Vec<f32>) {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "{name}");
        self.tensors.push((name.to_owned(), shape.to_vec(), values));
    }

    /// The tensors `range`, with the pairs if this is the first part.
    fn bytes(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((range.len() as u64).to_le_bytes());
        out.extend(self.num_pairs.to_le_bytes());
        out.extend(&self.pairs);
        let mut data: Vec<u8> = Vec::new();
        for (name, shape, values) in &self.tensors[range] {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(0u32.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    pub fn open(&self) -> (tempfile::TempDir, Model) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, self.bytes(0..self.tensors.len())).expect("written");
        let model = open(&path);
        (dir, model)
    }
}

pub fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn floats(model: &Model, role: WeightRole) -> Vec<f32> {
    let view = model.weight(role).unwrap_or_else(|e| panic!("{e}")).expect("there");
    view.to_f32().unwrap_or_else(|e| panic!("{e}"))
}

fn same_weights(a: &Model, b: &Model) {
    let roles: Vec<WeightRole> = a.spec().roles().collect();
    assert_eq!(roles, b.spec().roles().collect::<Vec<_>>());
    for role in roles {
        assert!(floats(a, role) == floats(b, role), "{role:?}");
    }
}

/// One of several that lie in one tensor.
fn is_stacked(role: WeightRole) -> bool {
    matches!(role, WeightRole::Expert(..) | WeightRole::Latent(_, LatentPart::KUp(_) | LatentPart::VUp(_)))
}

/// The name, as converters write it.
fn name_of(role: WeightRole) -> String {
    use WeightRole::*;
    let (layer, part) = match role {
        TokenEmbedding => return "token_embd.weight".into(),
        OutputNorm => return "output_norm.weight".into(),
        OutputNormBias => return "output_norm.bias".into(),
        LmHead => return "output.weight".into(),
        AttnNorm(l) => (l, "attn_norm.weight"),
        AttnNormBias(l) => (l, "attn_norm.bias"),
        PostAttnNorm(l) => (l, "post_attention_norm.weight"),
        PostFfnNorm(l) => (l, "post_ffw_norm.weight"),
        QNorm(l) => (l, "attn_q_norm.weight"),
        KNorm(l) => (l, "attn_k_norm.weight"),
        FfnNorm(l) => (l, "ffn_norm.weight"),
        Q(l) => (l, "attn_q.weight"),
        K(l) => (l, "attn_k.weight"),
        V(l) => (l, "attn_v.weight"),
        O(l) => (l, "attn_output.weight"),
        Gate(l) => (l, "ffn_gate.weight"),
        Up(l) => (l, "ffn_up.weight"),
        Down(l) => (l, "ffn_down.weight"),
        Mix(l, MixPart::Router) => (l, "ffn_gate_inp.weight"),
        Mix(l, MixPart::SelectionBias) => (l, "exp_probs_b.bias"),
        Mix(l, MixPart::SharedGate) => (l, "ffn_gate_shexp.weight"),
        Mix(l, MixPart::SharedUp) => (l, "ffn_up_shexp.weight"),
        Mix(l, MixPart::SharedDown) => (l, "ffn_down_shexp.weight"),
        Expert(l, _, ExpertPart::Gate) => (l, "ffn_gate_exps.weight"),
        Expert(l, _, ExpertPart::Up) => (l, "ffn_up_exps.weight"),
        Expert(l, _, ExpertPart::Down) => (l, "ffn_down_exps.weight"),
        Latent(l, LatentPart::QDown) => (l, "attn_q_a.weight"),
        Latent(l, LatentPart::QNorm) => (l, "attn_q_a_norm.weight"),
        Latent(l, LatentPart::QUp) => (l, "attn_q_b.weight"),
        Latent(l, LatentPart::KvDown) => (l, "attn_kv_a_mqa.weight"),
        Latent(l, LatentPart::KvNorm) => (l, "attn_kv_a_norm.weight"),
        Latent(l, LatentPart::KUp(_)) => (l, "attn_k_b.weight"),
        Latent(l, LatentPart::VUp(_)) => (l, "attn_v_b.weight"),
        other => panic!("{other:?}"),
    };
    format!("blk.{layer}.{part}")
}

/// All tensors of the model under new names: experts and heads one after the other.
fn tensors_of(model: &Model, gguf: &mut Gguf) {
    let mut stacks: Vec<(String, Vec<u64>, Vec<f32>)> = Vec::new();
    for role in model.spec().roles() {
        let shape = role.shape(model.spec()).expect("it has a shape");
        let (name, values) = (name_of(role), floats(model, role));
        if !is_stacked(role) {
            gguf.tensor(&name, &shape, values);
        } else if let Some((_, dims, all)) = stacks.iter_mut().find(|(other, ..)| *other == name) {
            dims[0] += 1;
            all.extend(values);
        } else {
            stacks.push((name, [&[1], &shape[..]].concat(), values));
        }
    }
    stacks.into_iter().for_each(|(name, shape, values)| gguf.tensor(&name, &shape, values));
}

/// Keys that every architecture has.
fn base_keys(gguf: &mut Gguf, model: &Model, arch: &str) {
    let spec = model.spec();
    gguf.text("general.architecture", arch);
    for (key, value) in [
        ("block_count", spec.num_layers),
        ("embedding_length", spec.hidden_size),
        ("feed_forward_length", spec.intermediate_size),
        ("attention.head_count", spec.num_heads),
        ("context_length", spec.max_position),
        ("vocab_size", spec.vocab_size),
    ] {
        gguf.number(&format!("{arch}.{key}"), value);
    }
    gguf.float(&format!("{arch}.attention.layer_norm_rms_epsilon"), spec.rms_eps);
    gguf.float(&format!("{arch}.rope.freq_base"), spec.rope.theta as f32);
    if let Some(experts) = &spec.block.experts {
        gguf.number(&format!("{arch}.expert_count"), experts.num_experts);
        gguf.number(&format!("{arch}.expert_used_count"), experts.num_active);
    }
    gguf.number("tokenizer.ggml.bos_token_id", spec.bos_token_id.unwrap_or(1));
    gguf.number("tokenizer.ggml.eos_token_id", spec.eos_token_ids[0]);
}

/// A `deepseek2` file; older converters wrote one up-projection and the dims of whole heads.
pub fn deepseek(model: &Model, is_old: bool) -> Gguf {
    let (spec, mut gguf) = (model.spec(), Gguf::default());
    let (latent, experts) = (spec.block.latent.expect("latent"), spec.block.experts.as_ref().expect("experts"));
    base_keys(&mut gguf, model, "deepseek2");
    let mut number = |key: &str, value: u32| gguf.number(&format!("deepseek2.{key}"), value);
    let dims = if is_old { (latent.q_dim(), latent.v_dim) } else { (latent.row_dim(), latent.kv_rank) };
    number("attention.key_length", dims.0);
    number("attention.value_length", dims.1);
    number("attention.head_count_kv", if is_old { spec.num_heads } else { 1 });
    if !is_old {
        number("attention.key_length_mla", latent.q_dim());
        number("attention.value_length_mla", latent.v_dim);
    }
    if latent.q_rank > 0 {
        number("attention.q_lora_rank", latent.q_rank);
    }
    number("attention.kv_lora_rank", latent.kv_rank);
    number("rope.dimension_count", latent.rope_dim);
    number("expert_feed_forward_length", experts.intermediate_size);
    number("expert_shared_count", experts.shared_size / experts.intermediate_size);
    number("leading_dense_block_count", experts.dense_layers.len() as u32);
    number("expert_group_count", experts.routing.num_groups);
    number("expert_group_used_count", experts.routing.num_active_groups);
    let is_v3 = spec.arch == "deepseek_v3";
    number("expert_gating_func", if is_v3 { 2 } else { 1 });
    gguf.pair("deepseek2.expert_weights_norm", 7, &[u8::from(experts.routing.is_normalised)]);
    gguf.float("deepseek2.expert_weights_scale", experts.routing.scale);
    if is_v3 {
        gguf.text("deepseek2.rope.scaling.type", "yarn");
        gguf.float("deepseek2.rope.scaling.factor", 4.0);
        gguf.number("deepseek2.rope.scaling.original_context_length", 32);
        gguf.float("deepseek2.rope.scaling.yarn_log_multiplier", 0.08);
    }
    tensors_of(model, &mut gguf);
    if is_old {
        one_up_projection(model, &mut gguf);
    }
    gguf
}

/// Keys' rows and values' rows of each head in one tensor `[heads * (nope + v), rank]`.
fn one_up_projection(model: &Model, gguf: &mut Gguf) {
    let latent = model.spec().block.latent.expect("latent");
    let (rank, nope, heads) = (latent.kv_rank as usize, latent.nope_dim as usize, model.spec().num_heads);
    gguf.tensors.retain(|(name, ..)| !name.contains("attn_k_b") && !name.contains("attn_v_b"));
    for l in 0..model.spec().num_layers {
        let mut all = Vec::new();
        for h in 0..heads {
            let keys = floats(model, WeightRole::Latent(l, LatentPart::KUp(h)));
            all.extend((0..nope).flat_map(|dim| (0..rank).map(move |r| (r, dim))).map(|(r, dim)| keys[r * nope + dim]));
            all.extend(floats(model, WeightRole::Latent(l, LatentPart::VUp(h))));
        }
        let rows = u64::from(heads * (latent.nope_dim + latent.v_dim));
        gguf.tensor(&format!("blk.{l}.attn_kv_b.weight"), &[rows, rank as u64], all);
    }
}

#[test]
fn deepseek_is_the_same_from_either_form_as_from_its_folder() {
    for name in ["deepseek_v2", "deepseek_v3"] {
        let model = open(&core_fixtures().join("families").join(name));
        for is_old in [false, true] {
            let (_dir, other) = deepseek(&model, is_old).open();
            let (want, got) = (model.spec(), other.spec());
            let scales = [want, got].map(|spec| spec.block.attention_scale.expect("a scale of its own"));
            assert!((scales[0] / scales[1] - 1.0).abs() < 1e-6, "{name}: {scales:?}");
            assert_eq!(
                (&want.arch, &want.block.experts, want.block.latent),
                (&got.arch, &got.block.experts, got.block.latent)
            );
            // The folder says how far YaRN's factors are apart; files leave it to the scale of the scores.
            if name == "deepseek_v2" {
                assert_eq!(want.rope, got.rope);
            }
            assert_eq!(
                (want.head_dim, want.num_kv_heads, want.tie_embeddings),
                (got.head_dim, got.num_kv_heads, got.tie_embeddings)
            );
            same_weights(&model, &other);
        }
    }
}

/// A file of a family that needs few keys.
pub fn plain(model: &Model, arch: &str) -> Gguf {
    let (spec, mut gguf) = (model.spec(), Gguf::default());
    base_keys(&mut gguf, model, arch);
    gguf.number(&format!("{arch}.attention.head_count_kv"), spec.num_kv_heads);
    gguf.number(&format!("{arch}.rope.dimension_count"), spec.rope.rotary_dim);
    if matches!(spec.block.norm, NormKind::Layer { .. }) {
        gguf.float(&format!("{arch}.attention.layer_norm_epsilon"), spec.rms_eps);
        let is_parallel = spec.block.residual == Residual::ParallelOneNorm;
        gguf.pair(&format!("{arch}.use_parallel_residual"), 7, &[u8::from(is_parallel)]);
    }
    tensors_of(model, &mut gguf);
    gguf
}

#[test]
fn norms_of_q_and_k_are_the_same_from_a_file_as_from_a_folder() {
    for (name, arch) in [("olmo2", "olmo2"), ("stablelm_qk_norm", "stablelm")] {
        let model = open(&core_fixtures().join("families").join(name));
        let (_dir, other) = plain(&model, arch).open();
        let (want, got) = (model.spec(), other.spec());
        assert_eq!((&want.block, want.qk_norm, &want.windows), (&got.block, got.qk_norm, &got.windows), "{name}");
        assert_eq!((&want.rope, want.rms_eps, want.num_kv_heads), (&got.rope, got.rms_eps, got.num_kv_heads), "{name}");
        same_weights(&model, &other);
    }
}

fn mixtral() -> Option<(Model, Gguf)> {
    let model = open(&full_fixtures()?.join("tiny/mixtral"));
    let mut gguf = Gguf::default();
    base_keys(&mut gguf, &model, "llama");
    gguf.number("llama.attention.head_count_kv", model.spec().num_kv_heads);
    gguf.number("llama.attention.key_length", model.spec().head_dim);
    tensors_of(&model, &mut gguf);
    Some((model, gguf))
}

#[test]
fn a_tensor_for_each_expert_is_the_same_as_one_for_all() {
    let Some((model, gguf)) = mixtral() else { return };
    let mut old = gguf.clone();
    old.tensors.clear();
    for (name, shape, values) in &gguf.tensors {
        if !name.contains("_exps.") {
            old.tensor(name, shape, values.clone());
            continue;
        }
        for (e, own) in values.chunks_exact(values.len() / shape[0] as usize).enumerate() {
            old.tensor(&name.replace("_exps.", &format!(".{e}.")), &shape[1..], own.to_vec());
        }
    }
    let [(_a, new), (_b, old)] = [gguf.open(), old.open()];
    assert_eq!((new.spec(), new.spec().arch.as_str()), (old.spec(), "mixtral"));
    same_weights(&new, &old);
    assert!(
        floats(&old, WeightRole::Expert(0, 1, ExpertPart::Up))
            == floats(&model, WeightRole::Expert(0, 1, ExpertPart::Up))
    );
}

#[test]
fn tensors_of_a_split_model_are_found_in_whichever_part_holds_them() {
    let Some((_, gguf)) = mixtral() else { return };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let half = gguf.tensors.len() / 2;
    let split = |no: u16, keys: &Gguf| {
        let mut part = Gguf { tensors: gguf.tensors.clone(), ..keys.clone() };
        part.pair("split.no", 2, &no.to_le_bytes());
        part.pair("split.count", 2, &2u16.to_le_bytes());
        part.pair("split.tensors.count", 5, &(gguf.tensors.len() as i32).to_le_bytes());
        let range = if no == 0 { 0..half } else { half..gguf.tensors.len() };
        let path = dir.path().join(format!("m-{:05}-of-00002.gguf", no + 1));
        std::fs::write(path, part.bytes(range)).expect("written");
    };
    split(0, &gguf);
    split(1, &Gguf::default());
    same_weights(&gguf.open().1, &open(dir.path()));
}
