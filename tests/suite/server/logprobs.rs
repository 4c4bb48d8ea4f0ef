//! Log-probabilities and sampling fields on a real model.

use super::TestServer;
use crate::support::{core_fixtures, tiny_llama_engine};
use kvasir::engine::options::EngineOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};

/// A server on the tiny llama; `None` where there is no adapter.
pub fn tiny_llama() -> Option<TestServer> {
    tiny_llama_with(ServerOptions::local(), |_| {})
}

/// The same with other options.
pub fn tiny_llama_with(server: ServerOptions, adjust: impl FnOnce(&mut EngineOptions)) -> Option<TestServer> {
    Some(TestServer::start(tiny_llama_engine(adjust)?, server))
}

fn chat(extra: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Hello there" }], "max_tokens": 8, "temperature": 0, "ignore_eos": true,
    });
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

#[test]
fn chats_and_completions_report_logprobs_of_a_real_model() {
    let Some(server) = tiny_llama() else { return };
    let body = server.ok("/v1/chat/completions", &chat(json!({ "logprobs": true, "top_logprobs": 3 })));
    let rows = body["choices"][0]["logprobs"]["content"].as_array().expect("rows").clone();
    assert_eq!(rows.len(), 8);
    for row in &rows {
        let top = row["top_logprobs"].as_array().expect("alternatives");
        assert_eq!(top.len(), 3);
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&row["token"], &row["logprob"]), "greedy takes the first");
        assert!(row["logprob"].as_f64().is_some_and(|lp| lp <= 0.0) && row["bytes"].is_array(), "{row}");
    }
    let bare = server.ok("/v1/chat/completions", &chat(json!({ "logprobs": true })));
    assert_eq!(bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    // Streamed ones are the same, chunk by chunk.
    let streamed =
        server.post("/v1/chat/completions", &chat(json!({ "logprobs": true, "top_logprobs": 3, "stream": true })));
    let chunks = streamed.chunks();
    let all: Vec<&Value> =
        chunks.iter().flat_map(|c| c["choices"][0]["logprobs"]["content"].as_array().into_iter().flatten()).collect();
    assert_eq!(all, rows.iter().collect::<Vec<_>>());

    let prompt = json!({ "prompt": "Hello", "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": true });
    let body = server.ok("/v1/completions", &prompt);
    let logprobs = &body["choices"][0]["logprobs"];
    let lens: Vec<usize> = ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
        .iter()
        .map(|list| logprobs[list].as_array().expect("a list").len())
        .collect();
    assert_eq!(lens, [6; 4]);
    let tokens = logprobs["tokens"].as_array().expect("tokens");
    let mut offset = 0;
    for (token, at) in tokens.iter().zip(logprobs["text_offset"].as_array().expect("offsets")) {
        assert_eq!(at.as_u64(), Some(offset));
        offset += token.as_str().expect("text").chars().count() as u64;
    }
}

#[test]
fn sampling_fields_reach_the_sampler() {
    let Some(server) = tiny_llama() else { return };
    let ids = |extra: Value| {
        let mut body = chat(extra);
        body["return_token_ids"] = true.into();
        server.ok("/v1/chat/completions", &body)["choices"][0]["token_ids"].clone()
    };
    let greedy = ids(json!({}));
    assert_eq!(greedy, ids(json!({ "temperature": 1, "top_k": 1, "seed": 5 })));
    assert_eq!(ids(json!({ "temperature": 1, "seed": 5 })), ids(json!({ "temperature": 1, "seed": 5 })));
    assert_ne!(ids(json!({ "temperature": 1, "seed": 5 })), ids(json!({ "temperature": 1, "seed": 6 })));
    let first = greedy[0].as_u64().expect("an id");
    let banned = ids(json!({ "logit_bias": { first.to_string(): -100 } }));
    assert_ne!(banned[0].as_u64(), Some(first));
    assert_eq!(ids(json!({ "logit_bias": { "7": 100 } })), json!([7, 7, 7, 7, 7, 7, 7, 7]));
    let stopped = ids(json!({ "stop_token_ids": [greedy[2]] }));
    assert_eq!(stopped.as_array().map(Vec::len), Some(3), "the stop token is the last one");
    let again = server.ok("/v1/chat/completions", &chat(json!({})));
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().is_some_and(|n| n > 0), "{again}");
    let beams = json!({ "use_beam_search": true, "n": 2, "best_of": 3, "max_tokens": 4 });
    let body = server.ok("/v1/chat/completions", &chat(beams));
    let texts: Vec<&Value> = (0..2).map(|i| &body["choices"][i]["message"]["content"]).collect();
    assert!(texts[0].is_string() && texts[1].is_string() && texts[0] != texts[1], "{body}");
    let wide = server.post("/v1/chat/completions", &chat(json!({ "use_beam_search": true, "n": 100 })));
    assert_eq!((wide.status, &wide.json()["error"]["param"]), (400, &json!("n")), "{}", wide.body);
    for (field, value) in [
        ("best_of", json!(100)),
        ("temperature", json!(0.7)),
        ("top_p", json!(0.5)),
        ("length_penalty", json!(40)),
        ("length_penalty", json!(-40)),
        ("early_stopping", json!("soon")),
    ] {
        let mut body = chat(json!({ "use_beam_search": true, "n": 2 }));
        body[field] = value;
        let refused = server.post("/v1/chat/completions", &body);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(field)), "{}", refused.body);
    }
    for early_stopping in [json!(true), json!(false), json!("never")] {
        let beams = json!({ "use_beam_search": true, "n": 2, "temperature": 0, "early_stopping": early_stopping });
        server.ok("/v1/chat/completions", &chat(beams));
    }
}

/// log p(next | before) of the reference's logits.
fn reference_logprob(row: &[f32], next: usize) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|logit| f64::from(logit - most).exp()).sum();
    f64::from(row[next] - most) - sum.ln()
}

#[test]
fn prompts_are_scored_as_the_reference_scores_them_whatever_the_chunks() {
    let folder = core_fixtures().join("tiny/llama");
    let reference = std::fs::read(folder.join("reference.safetensors")).expect("a reference");
    let reference = safetensors::SafeTensors::deserialize(&reference).expect("a reference");
    let tensor = |name: &str| reference.tensor(name).expect("a tensor");
    let ids: Vec<i64> = bytemuck::pod_collect_to_vec(tensor("long.input_ids").data());
    let logits: Vec<f32> = bytemuck::pod_collect_to_vec(tensor("long.logits").data());
    let vocab = logits.len() / ids.len();
    let mut all = Vec::new();
    for max_num_batched_tokens in [512, 32] {
        let Some(server) = tiny_llama_with(ServerOptions::local(), |options| {
            options.precise = true;
            options.max_num_batched_tokens = max_num_batched_tokens;
        }) else {
            return;
        };
        let body = json!({
            "prompt": ids, "max_tokens": 2, "temperature": 0, "logprobs": 1, "echo": true, "prompt_logprobs": 3,
            "ignore_eos": true,
        });
        // The second time nothing comes from the prefix cache.
        for _ in 0..2 {
            let choice = server.ok("/v1/completions", &body)["choices"][0].clone();
            let shown = &choice["logprobs"];
            for list in ["text_offset", "token_logprobs", "tokens", "top_logprobs"] {
                assert_eq!(shown[list].as_array().expect("a list").len(), ids.len() + 2, "{list}");
            }
            assert!(shown["token_logprobs"][0].is_null() && shown["top_logprobs"][0].is_null());
            assert_eq!(shown["text_offset"][0], 0);
            for (i, pair) in ids.windows(2).enumerate() {
                let wanted = reference_logprob(&logits[i * vocab..(i + 1) * vocab], pair[1] as usize);
                let told = shown["token_logprobs"][i + 1].as_f64().expect("a number");
                assert!((told - wanted).abs() < 2e-3, "token {}: {told}, not {wanted}", i + 1);
                let row = &choice["prompt_logprobs"][i + 1];
                assert_eq!(row[pair[1].to_string()]["logprob"], shown["token_logprobs"][i + 1]);
                assert!(matches!(row.as_object().expect("a row").len(), 3 | 4), "{row}");
            }
            all.push(choice);
        }
    }
    assert!(all.iter().all(|choice| *choice == all[0]), "the same bits in chunks and beside a warm cache");
}

#[test]
fn streams_and_chats_tell_scores_once() {
    let Some(server) = tiny_llama() else { return };
    let mut body = json!({ "prompt": "Hello there", "max_tokens": 3, "logprobs": 2, "echo": true, "seed": 1, "n": 2 });
    let whole = server.ok("/v1/completions", &body);
    body["stream"] = true.into();
    let chunks = server.post("/v1/completions", &body).chunks();
    for index in 0..2 {
        let of_choice = |chunk: &&Value| chunk["choices"][0]["index"] == index;
        let told: Vec<&Value> = chunks
            .iter()
            .filter(of_choice)
            .flat_map(|c| c["choices"][0]["logprobs"]["token_logprobs"].as_array().into_iter().flatten())
            .collect();
        let all = whole["choices"][index]["logprobs"]["token_logprobs"].as_array().expect("a list");
        assert_eq!(told, all.iter().collect::<Vec<_>>());
    }
    let body = chat(json!({ "prompt_logprobs": 0, "seed": 1 }));
    let whole = server.ok("/v1/chat/completions", &body);
    let rows = whole["prompt_logprobs"].as_array().expect("rows");
    assert_eq!(rows.len() as u64, whole["usage"]["prompt_tokens"].as_u64().expect("a count"));
    let mut streamed = body;
    streamed["stream"] = true.into();
    let chunks = server.post("/v1/chat/completions", &streamed).chunks();
    assert_eq!(chunks[0]["prompt_logprobs"], whole["prompt_logprobs"]);
    assert!(chunks[1..].iter().all(|chunk| chunk.get("prompt_logprobs").is_none()));
}
