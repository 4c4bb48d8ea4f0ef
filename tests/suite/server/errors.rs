//! What is refused: the status, the field and the code of each mistake.

use super::TestServer;
use crate::base_models::base_of;
use crate::malformed::{added_token, with_tokenizer};
use crate::support::tiny_engine;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};

fn check(server: &TestServer, path: &str, body: Value, status: u16, param: &str) -> Value {
    let answer = server.post(path, &body);
    assert_eq!(answer.status, status, "{path} {body}: {}", answer.body);
    let error = answer.json()["error"].clone();
    assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{path} {body}: {error}");
    assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
    error
}

#[test]
fn mistakes_in_chats_name_their_field() {
    let server = TestServer::fake();
    let hi = json!([{ "role": "user", "content": "hi" }]);
    let with = |field: &str, value: Value| {
        let mut body = json!({ "messages": hi });
        body[field] = value;
        body
    };
    let table: Vec<(Value, u16, &str)> = vec![
        (json!({}), 400, "messages"),
        (json!({ "messages": [] }), 400, "messages"),
        (json!({ "messages": "hi" }), 400, "messages"),
        (json!({ "messages": [1] }), 400, "messages[0]"),
        (json!({ "messages": [{ "content": "hi" }] }), 400, "messages[0].role"),
        (json!({ "messages": [{ "role": "user", "content": 1 }] }), 400, "messages[0].content"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }] }),
            415,
            "messages[0].content[0]",
        ),
        (with("model", json!("nobody")), 404, "model"),
        (with("temperature", json!("hot")), 400, "temperature"),
        (with("temperature", json!(-1)), 400, "temperature"),
        (with("top_p", json!(0)), 400, "top_p"),
        (with("top_k", json!(-2)), 400, "top_k"),
        (with("n", json!(0)), 400, "n"),
        (with("n", json!(1000)), 400, "n"),
        (with("best_of", json!(0)), 400, "best_of"),
        (with("max_tokens", json!(0)), 400, "max_tokens"),
        (with("max_tokens", json!(100_000)), 400, "messages"),
        (with("min_tokens", json!(9)), 200, ""),
        (with("presence_penalty", json!(3)), 400, "presence_penalty"),
        (with("logit_bias", json!({ "x": 1 })), 400, "logit_bias"),
        (with("logit_bias", json!({ "99999": 1 })), 400, "logit_bias"),
        (with("logit_bias", json!({ "1": 101 })), 400, "logit_bias"),
        (with("top_logprobs", json!(2)), 400, "top_logprobs"),
        (with("stop", json!([""])), 400, "stop"),
        (with("stop_token_ids", json!([99_999])), 400, "stop_token_ids"),
        (with("prompt_logprobs", json!(21)), 400, "prompt_logprobs"),
        (with("modalities", json!(["audio"])), 501, "modalities"),
        (with("verbosity", json!("high")), 501, "verbosity"),
        (with("kv_transfer_params", json!({ "do_remote_decode": true })), 501, "kv_transfer_params"),
        (with("logits_processors", json!(["mine"])), 501, "logits_processors"),
        (with("thinking_token_budget", json!(5)), 501, "thinking_token_budget"),
        (with("return_tokens_as_token_ids", json!(true)), 501, "return_tokens_as_token_ids"),
        (with("mm_processor_kwargs", json!({})), 200, ""),
        (with("request_id", json!("two words")), 400, "request_id"),
        (with("allowed_token_ids", json!([])), 400, "allowed_token_ids"),
        (with("chat_template", json!("{% for")), 400, "chat_template"),
        (with("stream_options", json!({ "include_usage": "yes" })), 400, "stream_options.include_usage"),
        (with("no_such_field", json!({ "a": 1 })), 200, ""),
    ];
    for (mut body, status, param) in table {
        if status == 200 {
            body["max_tokens"] = 9.into();
            server.ok("/v1/chat/completions", &body);
        } else {
            check(&server, "/v1/chat/completions", body, status, param);
        }
    }
    assert_eq!(server.ok("/v1/chat/completions", &with("request_id", json!("mine-1")))["id"], "chatcmpl-mine-1");
    let mut body = with("logprobs", json!(true));
    body["top_logprobs"] = 21.into();
    check(&server, "/v1/chat/completions", body, 400, "top_logprobs");
}

#[test]
fn mistakes_in_completions_name_their_field() {
    let server = TestServer::fake();
    let path = "/v1/completions";
    check(&server, path, json!({}), 400, "prompt");
    check(&server, path, json!({ "prompt": "" }), 400, "prompt");
    check(&server, path, json!({ "prompt": [] }), 400, "prompt");
    check(&server, path, json!({ "prompt": { "a": 1 } }), 400, "prompt");
    check(&server, path, json!({ "prompt": [1, 99_999] }), 400, "prompt");
    check(&server, path, json!({ "prompt": "x", "suffix": "y" }), 501, "suffix");
    check(&server, path, json!({ "prompt": "x", "logprobs": 21 }), 400, "logprobs");
    check(&server, path, json!({ "prompt": vec!["x"; 257] }), 400, "prompt");
    check(&server, path, json!({ "prompt": "x", "min_tokens": 17 }), 400, "min_tokens");
    check(&server, path, json!({ "prompt": "x", "truncate_prompt_tokens": 0 }), 400, "truncate_prompt_tokens");
}

#[test]
fn a_long_prompt_is_told_with_both_numbers_and_a_short_one_is_clamped() {
    let server = TestServer::fake();
    let long = "x".repeat(2000);
    let error = check(&server, "/v1/completions", json!({ "prompt": long }), 400, "prompt");
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains("2000") && message.contains("1024"), "{message}");
    // Public clients know the error by these words.
    assert!(message.starts_with("This model's maximum context length is 1024 tokens"), "{message}");
    let body = json!({ "prompt": "x".repeat(1000), "max_tokens": 100 });
    let error = check(&server, "/v1/completions", body, 400, "prompt");
    assert!(error["message"].as_str().expect("a message").contains("1100"), "{error}");
    // Where max_tokens is not given the context is the limit.
    let body = server.ok("/v1/completions", &json!({ "prompt": "x".repeat(1020), "ignore_eos": true }));
    assert_eq!(body["usage"]["completion_tokens"], 4);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let truncated = json!({ "prompt": long, "truncate_prompt_tokens": 10 });
    assert_eq!(server.ok("/v1/completions", &truncated)["usage"]["prompt_tokens"], 10);
}

#[test]
fn bodies_that_are_no_json_objects_are_refused() {
    let server = TestServer::fake();
    let json = [("content-type", "application/json; charset=utf-8")];
    for (headers, body, status) in [
        (&json[..], "{", 400),
        (&json[..], "[]", 400),
        (&json[..], "\u{feff}{}", 400),
        (&[("content-type", "text/plain")][..], "{}", 415),
        (&[][..], "{}", 415),
        (&[json[0], ("content-encoding", "gzip")][..], "{}", 415),
    ] {
        let answer = server.send("POST", "/v1/chat/completions", headers, body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(answer.json()["error"]["message"].is_string());
    }
    let nested = format!("{{\"messages\":{}{}}}", "[".repeat(20_000), "]".repeat(20_000));
    assert_eq!(server.send("POST", "/v1/chat/completions", &json, &nested).status, 400);
    assert_eq!(server.get("/no/such/path").status, 404);
    assert_eq!(server.get("/v1/chat/completions").status, 405);
}

#[test]
fn tokens_and_models_are_told() {
    let server = TestServer::fake();
    let body = server.ok("/tokenize", &json!({ "prompt": "hé", "return_token_strs": true }));
    assert_eq!(body["tokens"], json!([104, 195, 169]));
    assert_eq!((&body["count"], &body["max_model_len"]), (&json!(3), &json!(1024)));
    assert_eq!(body["token_strs"], json!(["h", "<0xC3>", "<0xA9>"]));
    assert_eq!(server.ok("/detokenize", &json!({ "tokens": [104, 195, 169] }))["prompt"], "hé");
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let tokens = server.ok("/tokenize", &chat)["tokens"].clone();
    assert_eq!(server.ok("/v1/chat/completions/render", &chat)["token_ids"], tokens);
    check(&server, "/detokenize", json!({ "tokens": [999] }), 400, "tokens");
    let models = server.get("/v1/models").json();
    let card = &models["data"][0];
    assert_eq!((&card["id"], &card["owned_by"]), (&json!("Simulation"), &json!("vllm")));
    assert_eq!(card["max_model_len"], 1024);
    assert_eq!(server.get("/v1/models/Simulation").json(), *card);
    assert_eq!(server.get("/v1/models/nobody/none").status, 404);
    assert!(server.get("/version").json()["version"].is_string());
    assert_eq!(server.get("/v1/loads").json()["loads"][0]["max_running_requests"], 8);
    assert_eq!(server.get("/health/generate").status, 200);
}

#[test]
fn a_message_can_be_continued_and_echoed() {
    let server = TestServer::fake();
    let mut body = json!({
        "messages": [{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "I am" }],
        "continue_final_message": true, "max_tokens": 4, "seed": 1,
    });
    let rendered = server.ok("/v1/chat/completions/render", &body)["token_ids"].clone();
    let text = server.ok("/detokenize", &json!({ "tokens": rendered }))["prompt"].as_str().expect("text").to_owned();
    assert!(text.ends_with("<|im_start|>assistant\nI am"), "{text}");
    let plain = server.ok("/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone();
    body["echo"] = true.into();
    let echoed = server.ok("/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone();
    assert_eq!(echoed, format!("I am{}", plain.as_str().expect("content")));
    body["add_generation_prompt"] = true.into();
    check(&server, "/v1/chat/completions", body, 400, "continue_final_message");
}

#[test]
fn an_added_token_beyond_the_embedding_is_refused_wherever_it_is_named() {
    let folder = with_tokenizer(|json| {
        json["added_tokens"].as_array_mut().expect("a list").push(added_token("<image_soft_token>", 512));
    });
    let Some(engine) = tiny_engine(folder.path().to_owned(), |_| ()) else { return };
    let server = TestServer::start(engine, ServerOptions::local());
    let mut wanted = json!({ "prompt": "Hello", "max_tokens": 4, "temperature": 0 });
    server.ok("/v1/completions", &wanted);
    for (field, value) in [
        ("prompt", json!("an <image_soft_token>")),
        ("prompt", json!([1, 512])),
        ("logit_bias", json!({ "512": 100 })),
        ("stop_token_ids", json!([512])),
        ("allowed_token_ids", json!([1, 512])),
    ] {
        let before = wanted[field].take();
        wanted[field] = value;
        let error = check(&server, "/v1/completions", wanted.clone(), 400, field);
        assert!(error["message"].as_str().is_some_and(|m| m.contains("512")), "{error}");
        wanted[field] = before;
    }
    let guided = json!({ "prompt": "Hello", "max_tokens": 4, "guided_regex": "[a-z <>_]{1,40}", "temperature": 0 });
    server.ok("/v1/completions", &guided);
}

#[test]
fn a_model_without_a_head_refuses_chats_and_embeds() {
    let folder = base_of("llama", &[]);
    let Some(engine) = tiny_engine(folder.path().to_owned(), |_| ()) else { return };
    let server = TestServer::start(engine, ServerOptions::local());
    let body = json!({ "prompt": "Hello", "max_tokens": 4, "stream": true });
    let error = check(&server, "/v1/completions", body, 400, "model");
    assert!(error["message"].as_str().is_some_and(|m| m.contains("no output head")), "{error}");
    server.ok("/v1/embeddings", &json!({ "input": "Hello" }));
}
