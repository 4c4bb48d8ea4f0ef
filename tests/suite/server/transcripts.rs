//! The rules of streams, each with the transcript of a stream under `tests/data/transcripts`.
//!
//! What an answer says is forced by a grammar, so that a transcript can be read: ids are numbered, times are 0, and
//! neighbouring deltas of one kind are joined, since how many tokens an event carries depends on the reader's pace.
//! `UPDATE_TRANSCRIPTS=1` writes them anew. Rule 11 (disconnects and slow readers) is in `load` and `lifecycle`.

use super::{Answer, TestServer};
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";

/// A server whose model writes tool calls as Hermes does.
fn hermes() -> TestServer {
    let options = ServerOptions { tool_call_parser: "hermes".into(), ..ServerOptions::local() };
    TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options)
}

fn with(mut body: Value, extra: Value) -> Value {
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

/// A chat that can only be answered with `text`.
fn said(text: &str, extra: Value) -> Value {
    let body = json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 400, "seed": 1,
        "structured_outputs": { "choice": [text] },
    });
    with(body, extra)
}

fn with_usage() -> Value {
    json!({ "stream": true, "stream_options": { "include_usage": true } })
}

/// The stream of a chat, checked against the answer that is not streamed.
fn stream(server: &TestServer, body: &Value) -> Answer {
    let whole = server.ok(CHAT, body);
    let answer = server.post(CHAT, &with(body.clone(), with_usage()));
    let chunks = answer.chunks();
    let (last, chunks) = chunks.split_last().expect("chunks");
    let choices: Vec<Value> =
        (0..whole["choices"].as_array().expect("choices").len()).map(|i| fold(chunks, i)).collect();
    let mut want = whole["choices"].clone();
    for choice in want.as_array_mut().expect("choices") {
        let message = choice["message"].as_object_mut().expect("a message");
        message.remove("refusal");
        message.retain(|_, value| !value.is_null() && *value != "");
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            call.as_object_mut().expect("a call").remove("id");
        }
    }
    assert_eq!(Value::from(choices), want, "{body}");
    let mut usage = (last["usage"].clone(), whole["usage"].clone());
    for side in [&mut usage.0, &mut usage.1] {
        side.as_object_mut().expect("usage").remove("prompt_tokens_details");
    }
    assert_eq!(usage.0, usage.1, "{body}");
    answer
}

/// The choice that a stream's deltas come to, in the shape of a whole answer, without ids of calls.
fn fold(chunks: &[Value], index: usize) -> Value {
    let mut message = Map::new();
    let mut calls: BTreeMap<u64, (String, String)> = BTreeMap::new();
    let mut logprobs = Value::Null;
    let mut end = (Value::Null, Value::Null);
    for choice in chunks.iter().flat_map(|c| c["choices"].as_array().expect("choices")).filter(|c| c["index"] == index)
    {
        let delta = &choice["delta"];
        for (name, value) in delta.as_object().expect("a delta").iter().filter(|(name, _)| *name != "tool_calls") {
            let text = value.as_str().expect("text");
            let all = message.entry(name.clone()).or_insert_with(|| "".into());
            *all = format!("{}{text}", all.as_str().expect("text")).into();
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let is_new = !calls.contains_key(&call["index"].as_u64().expect("an index"));
            let known = calls.entry(call["index"].as_u64().expect("an index")).or_default();
            let function = &call["function"];
            assert_eq!((call["id"].is_string(), function["name"].is_string()), (is_new, is_new), "told once: {call}");
            known.0.push_str(function["name"].as_str().unwrap_or_default());
            known.1.push_str(function["arguments"].as_str().expect("a string"));
        }
        if let Some(more) = choice["logprobs"]["content"].as_array() {
            let mut all = logprobs["content"].as_array().cloned().unwrap_or_default();
            all.extend(more.iter().cloned());
            logprobs = json!({ "content": all });
        }
        end = (choice["finish_reason"].clone(), choice["stop_reason"].clone());
    }
    message.retain(|_, value| *value != "");
    if !calls.is_empty() {
        let call = |(name, arguments): (String, String)| json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
        message.insert("tool_calls".into(), calls.into_values().map(call).collect());
    }
    json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": end.0, "stop_reason": end.1 })
}

/// Compares a stream with its transcript.
fn check(name: &str, answer: &Answer) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/transcripts").join(format!("{name}.sse"));
    let text = transcript(&answer.body);
    if std::env::var_os("UPDATE_TRANSCRIPTS").is_some() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, &text).expect("a file");
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, want, "{} (UPDATE_TRANSCRIPTS=1 writes it anew)", path.display());
}

fn transcript(body: &str) -> String {
    let mut ids = Vec::new();
    let mut events: Vec<(String, Value)> = Vec::new();
    for event in body.split("\n\n").filter(|event| !event.is_empty()) {
        let (name, data) = event.split_once("data: ").unwrap_or_else(|| panic!("no data in {event}"));
        let Ok(mut data) = serde_json::from_str::<Value>(data) else {
            assert_eq!(data, "[DONE]");
            events.push((name.to_owned(), data.into()));
            continue;
        };
        normalise(&mut data, &mut ids);
        let is_joined = events.last_mut().is_some_and(|(known, last)| known == name && join(last, &data));
        if !is_joined {
            events.push((name.to_owned(), data));
        }
    }
    let line = |(name, data): (String, Value)| match data {
        Value::String(text) => format!("{name}data: {text}\n\n"),
        data => format!("{name}data: {data}\n\n"),
    };
    events.into_iter().map(line).collect()
}

/// Numbers ids, blanks times and sequence numbers, and what the prefix cache happened to hold.
fn normalise(value: &mut Value, ids: &mut Vec<String>) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|inner| normalise(inner, ids)),
        Value::Object(map) => {
            for (name, inner) in map.iter_mut() {
                match name.as_str() {
                    "id" | "item_id" | "call_id" => number(inner, ids),
                    "created" | "created_at" | "sequence_number" | "cached_tokens" if inner.is_number() => {
                        *inner = 0.into()
                    }
                    _ => normalise(inner, ids),
                }
            }
        }
        _ => {}
    }
}

fn number(id: &mut Value, ids: &mut Vec<String>) {
    let Some(text) = id.as_str().map(str::to_owned) else { return };
    let at = ids.iter().position(|known| *known == text).unwrap_or_else(|| {
        ids.push(text.clone());
        ids.len() - 1
    });
    let prefix = text.rfind(['-', '_']).map_or("", |end| &text[..=end]);
    *id = format!("{prefix}{at}").into();
}

/// Appends a delta to the one before it, where nothing but text (and what comes token by token) tells them apart.
fn join(last: &mut Value, next: &Value) -> bool {
    const TEXTS: [&str; 7] = [
        "/choices/0/delta/content",
        "/choices/0/delta/reasoning_content",
        "/choices/0/delta/tool_calls/0/function/arguments",
        "/choices/0/text",
        "/delta/text",
        "/delta/partial_json",
        "/delta",
    ];
    let Some(path) = TEXTS.iter().find(|path| next.pointer(path).is_some_and(Value::is_string)) else { return false };
    let blank = |value: &Value| {
        let mut value = value.clone();
        if let Some(text) = value.pointer_mut(path) {
            *text = "".into();
        }
        if let Some(content) = value.pointer_mut("/choices/0/logprobs/content") {
            *content = json!([]);
        }
        value
    };
    if blank(last) != blank(next) {
        return false;
    }
    let more = next.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(Value::String(text)) = last.pointer_mut(path) {
        text.push_str(&more);
    }
    let more = next.pointer("/choices/0/logprobs/content").and_then(Value::as_array).cloned();
    if let Some(Value::Array(list)) = last.pointer_mut("/choices/0/logprobs/content") {
        list.extend(more.unwrap_or_default());
    }
    true
}

fn tools() -> Value {
    let city = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({ "tools": [{ "type": "function", "function": { "name": "get_weather", "parameters": city } }] })
}

fn call(city: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>")
}

#[test]
fn rule_1_streams_concatenate_to_the_whole_answer() {
    let server = hermes();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    let text = format!("<think>\nRome, then.\n</think>\n\nI look. {}", call("Rome"));
    let body = said(&text, with(tools(), json!({ "chat_template": template, "logprobs": true, "top_logprobs": 1 })));
    stream(&server, &body);
    let answer = stream(&server, &said(&text, with(tools(), json!({ "chat_template": template }))));
    check("rule_01_reasoning_text_and_call", &answer);
    let drawn = json!({ "messages": [{ "role": "user", "content": "hi" }], "seed": 3, "max_tokens": 30, "n": 2, "logprobs": true });
    stream(&server, &drawn);
}

#[test]
fn rule_2_length_wins_over_tool_calls() {
    let server = hermes();
    let text = call("Rome");
    let finish = |answer: &Answer| fold(&answer.chunks(), 0)["finish_reason"].clone();
    let whole = stream(&server, &said(&text, tools()));
    assert_eq!(finish(&whole), "tool_calls");
    let cut = stream(&server, &said(&text, with(tools(), json!({ "max_tokens": text.len() - 16 }))));
    assert_eq!(finish(&cut), "length");
    check("rule_02_call_cut_by_length", &cut);
    // All of the text came, and the limit ended it all the same.
    let exact = stream(&server, &said(&text, with(tools(), json!({ "max_tokens": text.len() }))));
    assert_eq!(finish(&exact), "length");
}

#[test]
fn rule_3_role_first_then_finish_usage_done() {
    let server = TestServer::fake();
    let answer = stream(&server, &said("Hello", json!({})));
    check("rule_03_order_of_chunks", &answer);
    let answer = server.post(
        "/v1/completions",
        &with(json!({ "prompt": "x", "max_tokens": 40, "structured_outputs": { "choice": ["Hello"] } }), with_usage()),
    );
    check("rule_03_order_of_completion_chunks", &answer);
}

#[test]
fn rule_4_usage_is_one_chunk_where_asked_for_and_nowhere_else() {
    let server = TestServer::fake();
    let body = said("Hello", json!({ "stream": true }));
    let answer = server.post(CHAT, &body);
    assert!(!answer.body.contains("usage"), "{}", answer.body);
    check("rule_04_no_usage", &answer);
    let answer = server.post(CHAT, &with(body.clone(), with_usage()));
    let chunks = answer.chunks();
    assert!(chunks.iter().all(|chunk| chunk["choices"] == json!([]) || chunk.get("usage") == Some(&Value::Null)));
    assert_eq!(chunks.iter().filter(|chunk| chunk["choices"] == json!([])).count(), 1);
    let off = json!({ "stream_options": { "include_usage": false } });
    assert!(!server.post(CHAT, &with(body, off)).body.contains("usage"));
}

#[test]
fn rule_5_calls_have_stable_indices_and_their_ids_once() {
    let server = hermes();
    let answer = stream(&server, &said(&format!("{}\n{}", call("Rome"), call("Oslo")), tools()));
    check("rule_05_two_calls", &answer);
    let forced =
        said("", with(tools(), json!({ "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 60 })));
    let mut forced = forced;
    forced.as_object_mut().expect("an object").remove("structured_outputs");
    stream(&server, &forced);
}

/// The bytes that the tokens of a chat's chunks stand for and the text that was sent, after each chunk.
fn held(answer: &Answer) -> Vec<String> {
    let (mut tokens, mut sent, mut held) = (Vec::new(), 0, Vec::new());
    for choice in answer.chunks().iter().filter_map(|chunk| chunk["choices"].get(0)) {
        if choice["finish_reason"].is_string() {
            break;
        }
        // In the simulation a token is a byte.
        tokens.extend(
            choice["token_ids"].as_array().into_iter().flatten().filter_map(|id| u8::try_from(id.as_u64()?).ok()),
        );
        sent += choice["delta"]["content"].as_str().unwrap_or_default().len();
        held.push(String::from_utf8(tokens[sent..].to_vec()).expect("ASCII"));
    }
    held
}

#[test]
fn rule_6_text_is_held_back_only_while_it_may_be_a_stop_or_a_tag() {
    let server = hermes();
    let text = "a STO b STOP? no: STO";
    let body = said(text, json!({ "stop": ["STOP!"], "return_token_ids": true, "stream": true }));
    let answer = server.post(CHAT, &body);
    for held in held(&answer) {
        assert!("STOP!".starts_with(&held) && held.len() < 5, "held back {held:?}");
    }
    assert_eq!(fold(&answer.chunks(), 0)["message"]["content"], text, "all of it is flushed at the end");
    check("rule_06_flushed_stop_prefix", &server.post(CHAT, &said(text, json!({ "stop": ["STOP!"], "stream": true }))));
    let text = "a <tool b <tool_cal c <";
    let body = said(text, with(tools(), json!({ "return_token_ids": true, "stream": true })));
    let answer = server.post(CHAT, &body);
    for held in held(&answer) {
        // White space before a call belongs to the call.
        assert!("<tool_call>".starts_with(held.trim_start()), "held back {held:?}");
    }
    assert_eq!(fold(&answer.chunks(), 0)["message"]["content"], text, "all of it is flushed at the end");
    check("rule_06_flushed_tag_prefix", &server.post(CHAT, &said(text, with(tools(), json!({ "stream": true })))));
}

#[test]
fn rule_7_no_half_characters() {
    let server = TestServer::fake();
    let whole = stream(&server, &said("é→𝄞", json!({})));
    check("rule_07_whole_characters", &whole);
    for (max_tokens, want) in
        [(1, None), (2, Some("é")), (3, Some("é")), (4, Some("é")), (5, Some("é→")), (8, Some("é→"))]
    {
        let cut = stream(&server, &said("é→𝄞", json!({ "max_tokens": max_tokens, "logprobs": true })));
        assert_eq!(fold(&cut.chunks(), 0)["message"]["content"].as_str(), want, "{max_tokens}");
        assert!(!cut.body.contains('\u{fffd}'), "{}", cut.body);
        if max_tokens == 3 {
            check("rule_07_cut_inside_a_character", &cut);
            let rows = fold(&cut.chunks(), 0)["logprobs"]["content"].clone();
            assert_eq!(rows[2]["bytes"], json!([0xe2]), "the raw byte: {rows}");
        }
    }
    // The replacement character itself is a character like any other.
    let real = stream(&server, &said("a\u{fffd}b", json!({})));
    assert_eq!(fold(&real.chunks(), 0)["message"]["content"], "a\u{fffd}b");
    // Bytes that are no character: a replacement where the tokens really encode it, and never in the middle of one.
    let body = json!({ "prompt": "x", "max_tokens": 3, "allowed_token_ids": [0xff] });
    let bytes = server.ok("/v1/completions", &body)["choices"][0]["text"].clone();
    let streamed = server.post("/v1/completions", &with(body, json!({ "stream": true })));
    let text: String =
        streamed.chunks().iter().filter_map(|c| c["choices"][0]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(bytes, text);
}

#[test]
fn rule_8_logprobs_without_alternatives_have_empty_lists() {
    let server = TestServer::fake();
    let answer = stream(&server, &said("Hi", json!({ "logprobs": true })));
    let rows = fold(&answer.chunks(), 0)["logprobs"]["content"].clone();
    assert_eq!(rows.as_array().map(Vec::len), Some(3), "two letters and the end: {rows}");
    assert!(rows.as_array().into_iter().flatten().all(|row| row["top_logprobs"] == json!([])), "{rows}");
    assert!(rows.as_array().into_iter().flatten().all(|row| row["logprob"].is_number() && row["bytes"].is_array()));
}

#[test]
fn rule_9_choices_interleave_and_usage_comes_once() {
    let server = TestServer::fake();
    let body = said("Hello", json!({ "n": 3 }));
    let answer = stream(&server, &body);
    let chunks = answer.chunks();
    let mut seen: Vec<u64> = chunks.iter().filter_map(|chunk| chunk["choices"][0]["index"].as_u64()).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, [0, 1, 2]);
    assert_eq!(chunks.iter().filter(|chunk| chunk["usage"].is_object()).count(), 1);
    assert_eq!(chunks.last().expect("a chunk")["usage"]["completion_tokens"], 3 * 6);
    // How the choices take turns depends on the reader's pace; each alone is always the same.
    for index in 0..3 {
        let (message, finish) =
            (fold(&chunks, index)["message"].clone(), fold(&chunks, index)["finish_reason"].clone());
        assert_eq!((message, finish), (json!({ "role": "assistant", "content": "Hello" }), json!("stop")));
    }
}

#[test]
fn rule_10_events_of_responses_are_numbered_and_placed() {
    let server = hermes();
    let tools = json!([{ "type": "function", "name": "get_weather", "parameters": { "type": "object" } }]);
    let text = format!("I look. {}\n{}", call("Rome"), call("Oslo"));
    let body = json!({ "input": "hi", "tools": tools, "stream": true, "structured_outputs": { "choice": [text] } });
    let answer = server.post("/v1/responses", &body);
    let data = |event: &str| serde_json::from_str::<Value>(event.split_once("data: ")?.1).ok();
    let events: Vec<Value> = answer.body.split("\n\n").filter_map(data).collect();
    let numbers: Vec<Option<u64>> = events.iter().map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).map(Some).collect::<Vec<_>>());
    for event in &events {
        let kind = event["type"].as_str().expect("a type");
        let is_placed = !matches!(kind, "response.created" | "response.in_progress" | "response.completed");
        let is_content = kind.contains("content_part") || kind.contains("output_text");
        assert_eq!(event["output_index"].is_u64(), is_placed, "{event}");
        assert_eq!(event["content_index"].is_u64(), is_content, "{event}");
    }
    let items = |kind: &str| events.iter().filter(|e| e["type"] == kind).map(|e| e["item"].clone()).collect::<Vec<_>>();
    let done = items("response.output_item.done");
    assert_eq!(events.last().expect("an event")["response"]["output"], Value::from(done.clone()));
    let ids = |items: &[Value]| items.iter().map(|item| item["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&items("response.output_item.added")), ids(&done));
    assert_eq!(done.len(), 3, "a text and two calls");
    check("rule_10_responses", &answer);
}

#[test]
fn messages_open_and_close_each_block() {
    let server = TestServer::fake();
    let schema = json!({ "type": "object", "properties": { "city": { "const": "Rome" } }, "required": ["city"],
        "additionalProperties": false });
    let body = json!({
        "max_tokens": 400, "stream": true, "temperature": 0, "messages": [{ "role": "user", "content": "hi" }],
        "tools": [{ "name": "get_weather", "input_schema": schema }],
        "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
    });
    check("messages", &server.post("/v1/messages", &body));
}

#[test]
fn a_fault_after_the_headers_is_one_event() {
    use kvasir::engine::options::FakeFault;
    let faults = vec![FakeFault::None, FakeFault::None, FakeFault::None, FakeFault::NotFinite];
    let engine = EngineHandle::start_fake(FakeOptions { faults, ..FakeOptions::small() });
    let server = TestServer::start(engine, ServerOptions::local());
    // With lists of words beside it the grammar goes token by token, so that there is a fourth step.
    check("fault", &server.post(CHAT, &said("Hello", json!({ "stream": true, "bad_words": ["#"] }))));
}
