//! The rules of streams: each is a test.

use super::TestServer;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What the chunks of a stream come to, by choice: text, finish reason, ids.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    text: String,
    finish: Option<String>,
    ids: Vec<u64>,
    logprobs: Vec<Value>,
}

fn ids(value: &Value) -> impl Iterator<Item = u64> + '_ {
    value.as_array().into_iter().flatten().filter_map(Value::as_u64)
}

fn concat_chat(chunks: &[Value]) -> BTreeMap<u64, Whole> {
    let mut all: BTreeMap<u64, Whole> = BTreeMap::new();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices")) {
        let index = choice["index"].as_u64().expect("an index");
        let is_first = !all.contains_key(&index);
        let whole = all.entry(index).or_default();
        assert_eq!(choice["delta"]["role"] == "assistant", is_first, "the role comes first, once: {choice}");
        assert!(whole.finish.is_none(), "nothing follows the finish: {choice}");
        whole.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        whole.finish = choice["finish_reason"].as_str().map(str::to_owned);
        whole.ids.extend(ids(&choice["token_ids"]));
        whole.logprobs.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
    }
    all
}

fn whole_chat(body: &Value) -> BTreeMap<u64, Whole> {
    let choices = body["choices"].as_array().expect("choices").iter();
    let one = |choice: &Value| Whole {
        text: choice["message"]["content"].as_str().expect("content").to_owned(),
        finish: choice["finish_reason"].as_str().map(str::to_owned),
        ids: ids(&choice["token_ids"]).collect(),
        logprobs: choice["logprobs"]["content"].as_array().cloned().unwrap_or_default(),
    };
    choices.map(|choice| (choice["index"].as_u64().expect("an index"), one(choice))).collect()
}

fn chat(extra: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Tell me" }], "seed": 7, "max_tokens": 60 });
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    body
}

#[test]
fn a_streamed_chat_concatenates_to_the_whole_answer() {
    let server = TestServer::fake();
    let cases = [
        json!({}),
        json!({ "n": 3 }),
        json!({ "stop": ["e", " t"] }),
        json!({ "stop": "e", "include_stop_str_in_output": true }),
        json!({ "return_token_ids": true, "n": 2 }),
        json!({ "logprobs": true }),
        json!({ "n": 2, "best_of": 4 }),
        json!({ "max_tokens": 1 }),
    ];
    for case in cases {
        let body = server.ok("/v1/chat/completions", &chat(case.clone()));
        let chunks = server.post("/v1/chat/completions", &streamed(chat(case.clone()))).chunks();
        let (last, others) = chunks.split_last().expect("chunks");
        assert_eq!(concat_chat(others), whole_chat(&body), "{case}");
        assert_eq!(last["choices"], json!([]), "the usage chunk has no choices");
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][count], body["usage"][count], "{case}: {count}");
        }
        assert!(others.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()), "{case}");
        assert!(body["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
        let ids: Vec<&Value> = chunks.iter().map(|chunk| &chunk["id"]).collect();
        assert!(ids.iter().all(|id| *id == ids[0]), "one id for all chunks");
    }
}

#[test]
fn a_streamed_completion_concatenates_to_the_whole_answer() {
    let server = TestServer::fake();
    let cases = [
        json!({ "prompt": "Once" }),
        json!({ "prompt": ["Once", "upon a time"], "n": 2 }),
        json!({ "prompt": [79, 110, 99, 101], "echo": true }),
        json!({ "prompt": [[79, 110], [99]], "echo": true, "n": 2 }),
        json!({ "prompt": "Once", "max_tokens": 40, "stop": ["a"] }),
    ];
    for case in cases {
        let mut body = case.clone();
        body["seed"] = 3.into();
        let whole = server.ok("/v1/completions", &body);
        let chunks = server.post("/v1/completions", &streamed(body)).chunks();
        let mut texts: BTreeMap<u64, (String, Value)> = BTreeMap::new();
        for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices")) {
            let entry = texts.entry(choice["index"].as_u64().expect("an index")).or_default();
            entry.0.push_str(choice["text"].as_str().expect("text"));
            entry.1 = choice["finish_reason"].clone();
        }
        for choice in whole["choices"].as_array().expect("choices") {
            let (text, finish) = &texts[&choice["index"].as_u64().expect("an index")];
            assert_eq!(choice["text"], text.as_str(), "{case}");
            assert_eq!(choice["finish_reason"], *finish, "{case}");
        }
        assert_eq!(whole["choices"].as_array().map(Vec::len), Some(texts.len()), "{case}");
        assert_eq!(chunks.last().expect("a chunk")["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
        if case["echo"] == true {
            assert!(texts[&0].0.starts_with("On"), "{case}: {:?}", texts[&0]);
        }
    }
}

#[test]
fn usage_comes_only_where_it_is_asked_for() {
    let server = TestServer::fake();
    let mut body = chat(json!({ "stream": true }));
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "{chunks:?}");
    assert!(chunks.last().expect("a chunk")["choices"][0]["finish_reason"].is_string());
    body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": true });
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    let counts: Vec<u64> = chunks.iter().filter_map(|c| c["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts.len(), chunks.len(), "every chunk counts");
    assert!(counts.is_sorted(), "{counts:?}");
}

#[test]
fn choices_of_one_stream_take_turns_and_differ() {
    let server = TestServer::fake();
    let body = chat(json!({ "n": 3, "stream": true, "temperature": 1.0, "ignore_eos": true }));
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    let order: Vec<u64> = chunks.iter().filter_map(|c| c["choices"][0]["index"].as_u64()).collect();
    let last_of_first = order.iter().rposition(|&index| index == 0).expect("choice 0");
    let first_of_last = order.iter().position(|&index| index == 2).expect("choice 2");
    assert!(first_of_last < last_of_first, "{order:?}");
}

#[test]
fn stop_strings_never_show_and_text_before_them_is_whole() {
    let server = TestServer::fake();
    let plain = server.ok("/v1/chat/completions", &chat(json!({})));
    let text = plain["choices"][0]["message"]["content"].as_str().expect("content").to_owned();
    let stop: String = text.chars().skip(10).take(3).collect();
    let want = &text[..text.find(&stop).expect("the stop string")];
    let body = server.ok("/v1/chat/completions", &chat(json!({ "stop": stop })));
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], want);
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    let body = server.ok("/v1/chat/completions", &chat(json!({ "stop": stop, "include_stop_str_in_output": true })));
    assert_eq!(body["choices"][0]["message"]["content"], format!("{want}{stop}"));
}

#[test]
fn an_engine_fault_ends_the_stream_with_one_error() {
    use kvasir::engine::EngineHandle;
    use kvasir::engine::options::{FakeFault, FakeOptions};
    let faults = vec![FakeFault::None, FakeFault::None, FakeFault::None, FakeFault::NotFinite];
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
    let server = TestServer::start(engine, kvasir::server::ServerOptions::local());
    let answer = server.post("/v1/chat/completions", &chat(json!({ "stream": true })));
    let events = answer.events();
    let last: Value = serde_json::from_str(events.last().expect("an event")).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error", "{}", answer.body);
    assert!(!answer.body.contains("[DONE]") && !answer.body.contains("position"), "{}", answer.body);
    assert_eq!(events.iter().filter(|event| event.contains("\"error\"")).count(), 1);
}

#[test]
fn keep_alive_comments_fill_a_silent_stream() {
    use kvasir::engine::EngineHandle;
    use kvasir::engine::options::FakeOptions;
    use std::time::Duration;
    let fake = FakeOptions { step_delay: Duration::from_millis(120), ..FakeOptions::small() };
    let options = kvasir::server::ServerOptions {
        keep_alive: Duration::from_millis(20),
        ..kvasir::server::ServerOptions::local()
    };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    let answer = server.post("/v1/chat/completions", &chat(json!({ "stream": true, "max_tokens": 2 })));
    assert!(answer.body.contains(": keep-alive\n\n"), "{}", answer.body);
    assert!(!answer.chunks().is_empty());
}

#[test]
fn a_long_prompt_does_not_silence_its_stream() {
    use kvasir::engine::EngineHandle;
    use kvasir::engine::options::FakeOptions;
    use std::time::Duration;
    // Prefill tells its progress more often than a comment is due.
    let fake =
        FakeOptions { step_delay: Duration::from_millis(15), max_num_batched_tokens: 16, ..FakeOptions::small() };
    let options = kvasir::server::ServerOptions {
        keep_alive: Duration::from_millis(60),
        ..kvasir::server::ServerOptions::local()
    };
    let server = TestServer::start(EngineHandle::start_fake(fake), options);
    let body = json!({ "prompt": "x".repeat(400), "stream": true, "max_tokens": 1 });
    let answer = server.post("/v1/completions", &body);
    let before = answer.body.split("data: ").next().unwrap_or_default();
    assert!(before.matches(": keep-alive\n\n").count() >= 2, "{}", answer.body);
}
