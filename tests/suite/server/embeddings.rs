//! Embeddings: against transformers' logits (the head applied to a vector points where they point), and that a vector is
//! the same alone, in a batch, in chunks and beside a warm prefix cache.

use super::TestServer;
use super::logprobs::tiny_llama_with;
use crate::support::core_fixtures;
use kvasir::protocol::Pooling;
use kvasir::server::ServerOptions;
use safetensors::SafeTensors;
use serde_json::{Value, json};

const PATH: &str = "/v1/embeddings";

fn floats(values: &Value) -> Vec<f32> {
    values.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

fn vectors(body: &Value) -> Vec<Vec<f32>> {
    body["data"].as_array().expect("data").iter().map(|entry| floats(&entry["embedding"])).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn pooled(pooling: Pooling, max_num_batched_tokens: u32) -> Option<TestServer> {
    let server = ServerOptions { pooling: Some(pooling), ..ServerOptions::local() };
    tiny_llama_with(server, |options| {
        options.precise = true;
        options.max_num_batched_tokens = max_num_batched_tokens;
    })
}

#[test]
fn vectors_point_where_the_reference_points() {
    let folder = core_fixtures().join("tiny/llama");
    let reference = std::fs::read(folder.join("reference.safetensors")).expect("a reference");
    let reference = SafeTensors::deserialize(&reference).expect("a reference");
    let weights = std::fs::read(folder.join("model.safetensors")).expect("weights");
    let weights = SafeTensors::deserialize(&weights).expect("weights");
    let head: Vec<f32> = bytemuck::pod_collect_to_vec(weights.tensor("lm_head.weight").expect("a head").data());
    for pooling in [Pooling::Last, Pooling::Mean] {
        // The long prompt comes in five chunks.
        let Some(server) = pooled(pooling, 32) else { return };
        for name in ["long", "short", "one"] {
            let tensor = |part: &str| reference.tensor(&format!("{name}.{part}")).expect("a tensor");
            let ids: Vec<i64> = bytemuck::pod_collect_to_vec(tensor("input_ids").data());
            let logits: Vec<f32> = bytemuck::pod_collect_to_vec(tensor("logits").data());
            let vocab = logits.len() / ids.len();
            let mut wanted = vec![0.0; vocab];
            for (position, row) in logits.chunks_exact(vocab).enumerate() {
                if pooling == Pooling::Mean || position + 1 == ids.len() {
                    wanted.iter_mut().zip(row).for_each(|(sum, logit)| *sum += f64::from(*logit));
                }
            }
            let body = server.ok(PATH, &json!({ "input": ids }));
            assert_eq!(body["usage"], json!({ "prompt_tokens": ids.len(), "total_tokens": ids.len() }));
            let vector = vectors(&body).swap_remove(0);
            let length: f64 = vector.iter().map(|v| f64::from(*v).powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-5, "{length}");
            let through_head: Vec<f64> = head
                .chunks_exact(vector.len())
                .map(|row| row.iter().zip(&vector).map(|(w, v)| f64::from(*w) * f64::from(*v)).sum())
                .collect();
            let cosine = cosine(&through_head, &wanted);
            assert!(cosine > 0.999_999, "{pooling:?} {name}: {cosine}");
        }
    }
}

#[test]
fn a_vector_does_not_depend_on_chunks_company_or_the_cache() {
    let texts: Vec<String> = (0..5).map(|i| format!("{} {i}", "The quick brown fox jumps. ".repeat(3 + i))).collect();
    for pooling in [Pooling::Last, Pooling::Mean] {
        let Some(server) = pooled(pooling, 512) else { return };
        let alone: Vec<Vec<f32>> =
            texts.iter().flat_map(|text| vectors(&server.ok(PATH, &json!({ "input": text })))).collect();
        assert_eq!(vectors(&server.ok(PATH, &json!({ "input": texts }))), alone, "in one batch, prefixes warm");
        let Some(chunked) = pooled(pooling, 16) else { return };
        assert_eq!(vectors(&chunked.ok(PATH, &json!({ "input": texts }))), alone, "in chunks");
    }
}

#[test]
fn the_shapes_of_vectors_are_as_asked_for() {
    let server = TestServer::fake();
    let plain = server.ok(PATH, &json!({ "input": ["one", "two"], "model": "Simulation" }));
    let whole = vectors(&plain);
    assert_eq!((whole.len(), whole[0].len()), (2, 16));
    assert_ne!(whole[0], whole[1]);
    assert_eq!((&plain["object"], &plain["data"][1]["index"]), (&json!("list"), &json!(1)));
    let cut = vectors(&server.ok(PATH, &json!({ "input": "one", "dimensions": 4 }))).swap_remove(0);
    let length: f32 = cut.iter().map(|v| v * v).sum();
    assert!(cut.len() == 4 && (length - 1.0).abs() < 1e-5);
    assert!((cut[1] / cut[0] - whole[0][1] / whole[0][0]).abs() < 1e-4, "the same direction");
    let body = server.ok(PATH, &json!({ "input": "one", "encoding_format": "base64" }));
    let text = body["data"][0]["embedding"].as_str().expect("text");
    assert_eq!(decode(text), whole[0].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    let tokens = vectors(&server.ok(PATH, &json!({ "input": [[111, 110, 101], [116, 119, 111]] })));
    assert_eq!(tokens, whole);
    let many: Vec<String> = (0..200).map(|i| i.to_string()).collect();
    assert_eq!(vectors(&server.ok(PATH, &json!({ "input": many }))).len(), 200);
    let kept = server.ok(PATH, &json!({ "input": "two one", "truncate_prompt_tokens": 3 }));
    assert_eq!(kept["usage"]["prompt_tokens"], 3);
}

fn decode(text: &str) -> Vec<u8> {
    let letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u32> = text.chars().filter_map(|c| letters.find(c)).map(|at| at as u32).collect();
    let group = |four: &[u32]| {
        let all = four.iter().fold(0, |all, bits| all << 6 | bits) << (6 * (4 - four.len()));
        [(all >> 16) as u8, (all >> 8) as u8, all as u8][..four.len() - 1].to_vec()
    };
    bits.chunks(4).flat_map(group).collect()
}

#[test]
fn mistakes_in_embeddings_name_their_field() {
    let server = TestServer::fake();
    for (body, status, param) in [
        (json!({}), 400, "input"),
        (json!({ "input": [] }), 400, "input"),
        (json!({ "input": "" }), 400, "input"),
        (json!({ "input": { "text": "x" } }), 400, "input"),
        (json!({ "input": [1, 99_999] }), 400, "input"),
        (json!({ "input": "x", "dimensions": 0 }), 400, "dimensions"),
        (json!({ "input": "x", "dimensions": 17 }), 400, "dimensions"),
        (json!({ "input": "x", "encoding_format": "hex" }), 400, "encoding_format"),
        (json!({ "input": "x".repeat(2000) }), 400, "input"),
        (json!({ "input": "x", "model": "nobody" }), 404, "model"),
    ] {
        let answer = server.post(PATH, &body);
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (status, &json!(param)), "{body}");
    }
}
