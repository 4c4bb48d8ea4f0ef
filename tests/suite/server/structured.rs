//! Outputs that follow a grammar, a schema or lists of tokens.

use super::logprobs::tiny_llama;
use super::{Answer, TestServer};
use serde_json::{Value, json};

fn complete(server: &TestServer, extra: Value) -> Answer {
    let mut body = json!({ "prompt": "x", "max_tokens": 300, "temperature": 1 });
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    server.post("/v1/completions", &body)
}

/// Texts and finish reasons of all choices.
fn choices(answer: &Answer) -> Vec<(String, String)> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let body = answer.json();
    let all = body["choices"].as_array().expect("choices").iter();
    all.map(|choice| (text(&choice["text"]), text(&choice["finish_reason"]))).collect()
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "tags": { "type": "array", "items": { "enum": ["red", "green"] }, "maxItems": 2 },
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

fn assert_is_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(value["name"].is_string() && value["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
    assert!(value["tags"].as_array().is_some_and(|tags| tags.iter().all(|t| t == "red" || t == "green")), "{text}");
}

#[test]
fn every_choice_of_every_seed_follows_the_schema_or_ends_by_length() {
    let Some(server) = tiny_llama() else { return };
    let format = json!({ "type": "json_schema", "json_schema": { "name": "person", "schema": person() } });
    let mut num_whole = 0;
    for seed in 0..6 {
        let answer = complete(&server, json!({ "response_format": format, "n": 3, "seed": seed }));
        for (text, finish) in choices(&answer) {
            if finish == "stop" {
                assert_is_person(&text);
                num_whole += 1;
            } else {
                assert_eq!(finish, "length", "{text}");
            }
        }
    }
    assert!(num_whole >= 6, "only {num_whole} of 18 came to an end");
}

#[test]
fn a_grammar_changes_no_other_row_and_the_prefix_cache_works() {
    let Some(server) = tiny_llama() else { return };
    let plain = json!({ "temperature": 0, "max_tokens": 40, "ignore_eos": true, "prompt": "Hello" });
    let alone = choices(&complete(&server, plain.clone()));
    let grammar =
        json!({ "structured_outputs": { "regex": "[a-z]{30,60}" }, "n": 2, "prompt": "Hello", "max_tokens": 60 });
    std::thread::scope(|scope| {
        let constrained = scope.spawn(|| complete(&server, grammar.clone()));
        for _ in 0..3 {
            assert_eq!(choices(&complete(&server, plain.clone())), alone);
        }
        let answer = constrained.join().expect("an answer");
        for (text, _) in choices(&answer) {
            assert!(text.chars().all(|c| c.is_ascii_lowercase()) && text.len() <= 60, "{text}");
        }
    });
    // A streamed answer follows the same grammar, and is the same with the same seed.
    let mut body = grammar.clone();
    body["seed"] = 3.into();
    let whole = choices(&complete(&server, body.clone()));
    body["stream"] = true.into();
    let chunks = complete(&server, body).chunks();
    for (index, (text, _)) in whole.iter().enumerate() {
        let of_choice = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let streamed: String = of_choice.filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(streamed, *text);
    }
}

#[test]
fn choices_grammars_and_lists_bind_the_output() {
    let server = TestServer::fake();
    let one = |extra: Value| choices(&complete(&server, extra)).swap_remove(0);
    for field in
        [json!({ "structured_outputs": { "choice": ["yes", "no"] } }), json!({ "guided_choice": ["yes", "no"] })]
    {
        let (text, finish) = one(field);
        assert!((text == "yes" || text == "no") && finish == "stop", "{text} {finish}");
    }
    let (text, _) = one(json!({ "structured_outputs": { "grammar": "start: \"a\" /[0-9]{3}/ \"z\"" } }));
    assert!(text.len() == 5 && text.starts_with('a') && text.ends_with('z'), "{text}");
    let (text, _) = one(json!({ "guided_regex": "(ab){2}" }));
    assert_eq!(text, "abab");
    let (text, _) = one(json!({ "guided_json": "{\"const\": 7}" }));
    assert_eq!(text, "7");
    let (text, _) = one(json!({ "allowed_token_ids": [97, 98], "max_tokens": 50 }));
    assert!(text.len() == 50 && text.chars().all(|c| c == 'a' || c == 'b'), "{text}");
    let (text, _) = one(json!({ "bad_words": ["a", "e"], "max_tokens": 200, "ignore_eos": true }));
    assert!(text.len() > 100 && !text.contains(['a', 'e']), "{text}");
}

#[test]
fn chats_take_response_formats() {
    let server = TestServer::fake();
    let chat = json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 200,
        "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": { "enum": [{ "a": 1 }] } } },
    });
    let body = server.ok("/v1/chat/completions", &chat);
    let text = body["choices"][0]["message"]["content"].as_str().expect("content");
    assert_eq!(serde_json::from_str::<Value>(text).expect("JSON"), json!({ "a": 1 }));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[test]
fn faulty_grammars_name_their_field() {
    let server = TestServer::fake();
    let check = |extra: Value, status: u16, param: &str| {
        let answer = complete(&server, extra.clone());
        assert_eq!(answer.status, status, "{extra}: {}", answer.body);
        assert_eq!(answer.json()["error"]["param"], param, "{extra}: {}", answer.body);
    };
    check(json!({ "structured_outputs": { "regex": "(" } }), 400, "structured_outputs.regex");
    check(json!({ "structured_outputs": { "choice": [] } }), 400, "structured_outputs.choice");
    check(json!({ "structured_outputs": { "grammar": "begin: x" } }), 400, "structured_outputs.grammar");
    check(json!({ "guided_json": "{" }), 400, "guided_json");
    check(json!({ "response_format": { "type": "json_schema" } }), 400, "response_format.json_schema.schema");
    check(json!({ "response_format": { "type": "structural_tag" } }), 501, "response_format");
    check(json!({ "response_format": { "type": "json_object" }, "guided_regex": "a" }), 400, "guided_regex");
    check(json!({ "guided_regex": "a", "ignore_eos": true }), 400, "ignore_eos");
    check(json!({ "allowed_token_ids": [9999] }), 400, "allowed_token_ids");
    check(json!({ "guided_regex": "a", "use_beam_search": true }), 400, "use_beam_search");
}

#[test]
fn special_tokens_show_where_asked() {
    let server = TestServer::fake();
    let bias = json!({ "logit_bias": {}, "allowed_token_ids": [256], "max_tokens": 2 });
    let hidden = choices(&complete(&server, bias.clone()));
    assert_eq!(hidden[0].0, "");
    let mut shown = bias;
    shown["skip_special_tokens"] = false.into();
    assert_eq!(choices(&complete(&server, shown))[0].0, "<|im_start|><|im_start|>");
}
