//! Checkpoints of a base class, as embedding models are published: the same hidden states, and no text.

use crate::support::{core_fixtures, read_json, tiny_engine, tiny_llama_engine};
use kvasir::engine::EngineHandle;
use kvasir::model::Model;
use kvasir::model::spec::WeightRole;
use kvasir::protocol::{EngineEvent, GenerateRequest, OutputRules, OwnerTag, Pooling, RunError};
use safetensors::SafeTensors;
use std::path::Path;
use std::time::Duration;

/// The fixture with names as the base class has them, without its head, and with some of the config's values changed.
pub fn base_of(name: &str, edits: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let from = core_fixtures().join("tiny").join(name);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let bytes = std::fs::read(from.join("model.safetensors")).expect("weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("weights");
    let bare = tensors.iter().filter_map(|(name, view)| Some((name.strip_prefix("model.")?.to_owned(), view)));
    let bytes = safetensors::serialize(bare, None).expect("serialised");
    std::fs::write(dir.path().join("model.safetensors"), bytes).expect("written");
    std::fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).expect("copied");
    let mut config = read_json(&from.join("config.json"));
    for (key, value) in edits {
        config[key] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    dir
}

fn request() -> GenerateRequest {
    GenerateRequest::embedding(OwnerTag { id: 0, label: "test".into() }, (1..40).collect())
}

fn embedding(engine: &EngineHandle) -> Vec<f32> {
    let rules = OutputRules { pooling: Some(Pooling::Mean), ..OutputRules::default() };
    let run = engine.submit_with(request(), rules).expect("hidden states can be had");
    let mut vector = Vec::new();
    loop {
        match run.recv_timeout(Duration::from_secs(60)).expect("no event for a minute") {
            EngineEvent::Embedding { values } => vector = values,
            EngineEvent::Finished { .. } => return vector,
            EngineEvent::Failed { error } => panic!("{error}"),
            _ => {}
        }
    }
}

#[test]
fn a_checkpoint_without_a_head_embeds_as_the_whole_one_and_writes_nothing() {
    let base = base_of("llama", &[("architectures", serde_json::json!(["LlamaModel"]))]);
    let Some(whole) = tiny_llama_engine(|_| ()) else { return };
    let wanted = embedding(&whole);
    let engine = tiny_engine(base.path().to_owned(), |_| ()).expect("an adapter");
    assert_eq!(embedding(&engine), wanted);
    assert_eq!(engine.submit(request()).err(), Some(RunError::NoHead));
    assert!(RunError::NoHead.to_string().contains("kvasir embed"));
}

fn open(path: &Path) -> Model {
    Model::open(path).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_config_says_what_a_missing_head_means() {
    // Names alone show the base class as well.
    let named = base_of("llama", &[]);
    assert!(!open(named.path()).has_head());
    let tied = base_of("llama", &[("tie_word_embeddings", true.into())]);
    let tied = open(tied.path());
    assert!(tied.has_head() && tied.spec().tie_embeddings);
    let name = tied.tensor_name(WeightRole::Q(0));
    assert_eq!(name, "layers.0.self_attn.q_proj.weight");
    let mistral = [("architectures", serde_json::json!(["MistralModel"]))];
    assert_eq!(open(base_of("mistral_swa", &mistral).path()).spec().arch, "mistral");
    let untyped = [("architectures", serde_json::json!(["LlamaModel"])), ("model_type", serde_json::Value::Null)];
    assert!(!open(base_of("llama", &untyped).path()).has_head());
    let fork = [("architectures", serde_json::json!(["OtherForCausalLM"]))];
    assert_eq!(open(base_of("llama", &fork).path()).spec().arch, "llama");
}

#[test]
fn classes_with_another_attention_or_head_are_refused_by_name() {
    let class = |name: &str| base_of("llama", &[("architectures", serde_json::json!([name]))]);
    for name in ["LlamaBidirectionalModel", "LlamaForSequenceClassification", "MistralModel"] {
        let text = Model::open(class(name).path()).expect_err(name).to_string();
        assert!(text.contains(name), "{text}");
    }
    let both_ways = base_of("llama", &[("is_causal", false.into())]);
    let text = Model::open(both_ways.path()).expect_err("not causal").to_string();
    assert!(text.contains("is_causal = false"), "{text}");
}
