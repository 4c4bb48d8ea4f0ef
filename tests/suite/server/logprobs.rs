//! Log-probabilities and sampling fields on a real model.

use super::TestServer;
use crate::support::{core_fixtures, require_gpu};
use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::{EngineOptions, LoadRequest, ModelSource};
use kvasir::server::ServerOptions;
use serde_json::{Value, json};

/// A server on the tiny llama; `None` where there is no adapter.
pub fn tiny_llama() -> Option<TestServer> {
    tiny_llama_with(ServerOptions::local(), |_| {})
}

/// The same with other options.
pub fn tiny_llama_with(server: ServerOptions, adjust: impl FnOnce(&mut EngineOptions)) -> Option<TestServer> {
    let mut options = EngineArgs::default()
        .resolve(&EngineSection::default(), &std::env::temp_dir(), Some(0))
        .expect("default options");
    options.num_gpu_blocks_override = Some(256);
    options.max_model_len = Some(512);
    adjust(&mut options);
    let engine = EngineHandle::start(options.clone());
    engine.load(LoadRequest { source: ModelSource::Path(core_fixtures().join("tiny/llama")), options });
    match engine.wait_for_model(|_| {}) {
        Ok(_) => Some(TestServer::start(engine, server)),
        Err(status) => {
            assert!(!require_gpu(), "REQUIRE_GPU is set: {status:?}");
            println!("skipped: no adapter");
            None
        }
    }
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
}
