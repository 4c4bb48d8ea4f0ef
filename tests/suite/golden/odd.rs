//! Models of odd shapes, made up here: the GPU against the plain CPU executor, which agrees with transformers on the
//! fixtures.

use std::collections::BTreeMap;

use kvasir::engine::logits::LogitsPlan;
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::model::Model;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::{DEFAULT_MODE, INT8_MODE, Mode, PRECISE_MODE, WHOLE, logits, open, relative_error};
use crate::kernels::harness::Random;

/// Numbers of a made-up llama.
#[derive(Clone, Copy, Debug)]
struct Odd {
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
}

impl Odd {
    fn config(&self) -> serde_json::Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
            "hidden_act": "silu"
        })
    }

    /// Names and shapes.
    fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = BTreeMap::from([
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab, self.hidden]),
            ("lm_head.weight".to_owned(), vec![self.vocab, self.hidden]),
            ("model.norm.weight".to_owned(), vec![self.hidden]),
        ]);
        for l in 0..2 {
            for (name, shape) in [
                ("input_layernorm", vec![self.hidden]),
                ("post_attention_layernorm", vec![self.hidden]),
                ("self_attn.q_proj", vec![q, self.hidden]),
                ("self_attn.k_proj", vec![kv, self.hidden]),
                ("self_attn.v_proj", vec![kv, self.hidden]),
                ("self_attn.o_proj", vec![self.hidden, q]),
                ("mlp.gate_proj", vec![self.intermediate, self.hidden]),
                ("mlp.up_proj", vec![self.intermediate, self.hidden]),
                ("mlp.down_proj", vec![self.hidden, self.intermediate]),
            ] {
                tensors.insert(format!("model.layers.{l}.{name}.weight"), shape);
            }
        }
        tensors
    }

    fn write(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(dir.path().join("config.json"), self.config().to_string()).expect("written");
        let mut random = Random(self.head_dim as u64);
        let data: BTreeMap<String, (Vec<usize>, Vec<u8>)> = self
            .tensors()
            .into_iter()
            .map(|(name, shape)| {
                let scale = if shape.len() == 2 { 1.7 / (shape[1] as f32).sqrt() } else { 1.0 };
                let values = random.vector(shape.iter().product(), scale);
                (name, (shape, bytemuck::cast_slice(&values).to_vec()))
            })
            .collect();
        let views = data.iter().map(|(name, (shape, bytes))| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("bytes of the shape"))
        });
        let bytes = safetensors::serialize(views, None).expect("serialised");
        std::fs::write(dir.path().join("model.safetensors"), bytes).expect("written");
        dir
    }
}

#[test]
fn odd_head_dims_heads_widths_and_vocabularies_agree_with_the_cpu() {
    let plain = Odd { hidden: 88, intermediate: 344, heads: 5, kv_heads: 5, head_dim: 80, vocab: 1000 };
    let shapes = [
        plain,
        Odd { heads: 10, head_dim: 96, ..plain },
        Odd { hidden: 100, intermediate: 52, heads: 7, kv_heads: 1, head_dim: 20, vocab: 257 },
    ];
    let prompts: Vec<Vec<u32>> =
        [1usize, 9, 40].iter().map(|&n| (0..n as u32).map(|i| (i * 37 + 5) % 257).collect()).collect();
    for odd in shapes {
        let dir = odd.write();
        let model = Model::open(dir.path()).unwrap_or_else(|e| panic!("{odd:?}: {e}"));
        let cfg = ReferenceConfig { num_blocks: 16, block_size: 8 };
        let mut reference = ReferenceExecutor::new(&model, cfg).unwrap_or_else(|e| panic!("{odd:?}: {e}"));
        let want = logits(&mut reference, &prompts, WHOLE);
        let modes = [(PRECISE_MODE, 2e-5), (DEFAULT_MODE, 1e-2), (INT8_MODE, 6e-2)];
        for (mode, tolerance) in modes {
            for mode in [mode, Mode { floor: true, ..mode }] {
                let Some(mut executor) = open(dir.path(), mode, 64, 128) else { return };
                let got = logits(&mut executor, &prompts, LogitsPlan { chunk: Some(11), ..WHOLE });
                for (got, want) in got.iter().zip(&want) {
                    let error = relative_error(got, want);
                    assert!(error <= tolerance, "{odd:?} {mode:?}: {error:e}");
                }
            }
        }
    }
}
