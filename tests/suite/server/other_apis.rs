//! OpenAI's responses, Anthropic's messages and the Open Inference Protocol over the same engine.

use super::TestServer;
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};

fn messages(extra: Value) -> Value {
    let mut body = json!({ "max_tokens": 200, "messages": [{ "role": "user", "content": "hi" }] });
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

fn weather() -> Value {
    let schema = json!({ "type": "object", "properties": { "city": { "const": "Rome" } }, "required": ["city"] });
    json!([{ "name": "get_weather", "description": "Weather", "input_schema": schema }])
}

#[test]
fn messages_answer_in_blocks_with_their_own_reasons() {
    let server = TestServer::fake();
    let plain =
        messages(json!({ "system": [{ "type": "text", "text": "Be kind" }], "temperature": 0, "max_tokens": 9 }));
    let body = server.ok("/v1/messages", &plain);
    assert_eq!(
        (&body["type"], &body["role"], &body["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("max_tokens"))
    );
    assert_eq!(body["content"][0]["type"], "text");
    let usage = &body["usage"];
    assert_eq!(usage["output_tokens"], 9);
    let counted = server.ok("/v1/messages/count_tokens", &plain)["input_tokens"].as_u64();
    let read = usage["input_tokens"].as_u64().zip(usage["cache_read_input_tokens"].as_u64());
    assert_eq!(counted, read.map(|(new, cached)| new + cached));
    let forced = messages(json!({ "tools": weather(), "tool_choice": { "type": "tool", "name": "get_weather" } }));
    let body = server.ok("/v1/messages", &forced);
    assert_eq!((&body["stop_reason"], &body["content"][0]["input"]), (&json!("tool_use"), &json!({ "city": "Rome" })));
    let id = body["content"][0]["id"].clone();
    let turn = messages(json!({ "tools": weather(), "messages": [
        { "role": "user", "content": "hi" },
        { "role": "assistant", "content": body["content"] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": id, "content": [{ "type": "text", "text": "sun" }] },
            { "type": "text", "text": "And?" },
        ] },
    ] }));
    server.ok("/v1/messages", &turn);
}

#[test]
fn streamed_messages_open_and_close_their_blocks() {
    let server = TestServer::fake();
    for extra in [json!({ "temperature": 0 }), json!({ "tools": weather(), "tool_choice": { "type": "any" } })] {
        let mut body = messages(extra);
        let whole = server.ok("/v1/messages", &body);
        body["stream"] = true.into();
        let answer = server.post("/v1/messages", &body);
        let mut text = String::new();
        let mut names = Vec::new();
        for event in answer.body.split("\n\n").filter(|event| event.starts_with("event: ")) {
            let (name, data) = event["event: ".len()..].split_once("\ndata: ").expect("data");
            let data: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(data["type"], name);
            let delta = &data["delta"];
            text.push_str(delta["text"].as_str().or(delta["partial_json"].as_str()).unwrap_or_default());
            if name != "content_block_delta" {
                names.push(name.to_owned());
            }
            if name == "message_delta" {
                assert_eq!(delta["stop_reason"], whole["stop_reason"]);
            }
        }
        let block = &whole["content"][0];
        match block["type"] == "text" {
            true => assert_eq!(block["text"], text),
            false => assert!(text.contains("Rome"), "{text}"),
        }
        assert_eq!(names[..2], ["message_start", "content_block_start"], "{names:?}");
        assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"], "{names:?}");
    }
}

#[test]
fn messages_refuse_in_their_own_shape() {
    let server = TestServer::fake();
    let check = |body: Value, status: u16, kind: &str| {
        let answer = server.post("/v1/messages", &body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        let error = answer.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!(kind)));
    };
    check(json!({ "messages": [{ "role": "user", "content": "hi" }] }), 400, "invalid_request_error");
    check(messages(json!({ "model": "nobody" })), 404, "not_found_error");
    check(messages(json!({ "messages": [{ "role": "tool", "content": "hi" }] })), 400, "invalid_request_error");
    let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
    check(messages(json!({ "messages": image })), 415, "invalid_request_error");
}

#[test]
fn open_inference_clients_are_served() {
    let options = ServerOptions { served_names: vec!["m".into()], ..ServerOptions::local() };
    let server = TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options);
    for path in ["/v2/health/live", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m", "/v2"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.get("/v2/models/other/ready").status, 404);
    let body = json!({ "id": "7", "text_input": "Once", "parameters": { "max_tokens": 12, "temperature": 0 } });
    let whole = server.ok("/v2/models/m/generate", &body);
    assert_eq!((&whole["id"], &whole["model_name"]), (&json!("7"), &json!("m")));
    let plain = server.ok("/v1/completions", &json!({ "prompt": "Once", "max_tokens": 12, "temperature": 0 }));
    assert_eq!(whole["text_output"], plain["choices"][0]["text"]);
    let events = server.post("/v2/models/m/generate_stream", &body).events();
    let text: String = events
        .iter()
        .map(|event| {
            serde_json::from_str::<Value>(event).expect("JSON")["text_output"].as_str().expect("text").to_owned()
        })
        .collect();
    assert_eq!(whole["text_output"], text);
    assert_eq!(server.post("/v2/models/m/generate", &json!({ "text": "x" })).status, 400);
}

#[test]
fn responses_are_streamed_kept_and_gone_on_from() {
    let server = TestServer::fake();
    let tools = json!([{ "type": "function", "name": "now", "parameters": { "type": "object", "properties": {} } }]);
    let cases = [
        json!({ "input": "hi", "temperature": 0 }),
        json!({ "input": "hi", "temperature": 0, "max_output_tokens": 5 }),
        json!({ "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "hi" }] }], "tools": tools,
            "tool_choice": { "type": "function", "name": "now" } }),
    ];
    for mut body in cases {
        let whole = server.ok("/v1/responses", &body);
        let id = whole["id"].as_str().expect("an id");
        assert_eq!(server.get(&format!("/v1/responses/{id}")).json(), whole);
        let incomplete = body["max_output_tokens"] == 5;
        assert_eq!(whole["status"], if incomplete { "incomplete" } else { "completed" }, "{whole}");
        body["stream"] = true.into();
        let answer = server.post("/v1/responses", &body);
        let data = |event: &str| serde_json::from_str(event.split_once("\ndata: ")?.1).ok();
        let events: Vec<Value> = answer.body.split("\n\n").filter_map(data).collect();
        let numbers: Vec<Option<u64>> = events.iter().map(|event| event["sequence_number"].as_u64()).collect();
        assert_eq!(numbers, (0..events.len() as u64).map(Some).collect::<Vec<_>>());
        let last = &events.last().expect("an event")["response"];
        assert_eq!(last["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
        let done: Vec<&Value> = events.iter().filter(|e| e["type"] == "response.output_item.done").collect();
        let items: Vec<Value> = done.iter().map(|event| event["item"].clone()).collect();
        assert_eq!(last["output"], Value::from(items), "the items that were told are those of the end");
        let delta = |event: &Value| event["delta"].as_str().map(str::to_owned);
        let text: String = events.iter().filter_map(delta).collect();
        let item = &whole["output"][0];
        assert_eq!(text, item["content"][0]["text"].as_str().or(item["arguments"].as_str()).expect("text"));
        for event in &events[2..events.len() - 1] {
            assert!(event["output_index"].is_u64(), "{event}");
        }
    }
    let first = server.ok("/v1/responses", &json!({ "input": "hi", "instructions": "Be kind" }));
    let next = json!({ "input": "and?", "previous_response_id": first["id"] });
    let second = server.ok("/v1/responses", &next);
    assert!(second["usage"]["input_tokens"].as_u64() > first["usage"]["output_tokens"].as_u64(), "{second}");
    let path = format!("/v1/responses/{}", first["id"].as_str().expect("an id"));
    assert_eq!(server.send("DELETE", &path, &[], "").json()["deleted"], true);
    assert_eq!(server.get(&path).status, 404);
    assert_eq!(server.post("/v1/responses", &next).status, 404);
    let unkept = server.ok("/v1/responses", &json!({ "input": "hi", "store": false }));
    assert_eq!(server.get(&format!("/v1/responses/{}", unkept["id"].as_str().expect("an id"))).status, 404);
    assert_eq!(server.post("/v1/responses", &json!({ "input": "hi", "background": true })).status, 501);
    let search = server.post("/v1/responses", &json!({ "input": "hi", "tools": [{ "type": "web_search" }] }));
    assert_eq!((search.status, &search.json()["error"]["param"]), (501, &json!("tools[0].type")), "{}", search.body);
}

#[test]
fn messages_answer_by_a_schema_and_refuse_what_they_cannot_do() {
    let server = TestServer::fake();
    let schema = json!({ "type": "object", "properties": { "a": { "enum": [1, 2] } }, "required": ["a"],
        "additionalProperties": false });
    let format = json!({ "format": { "type": "json_schema", "schema": schema } });
    let answer = server.ok("/v1/messages", &messages(json!({ "output_config": format, "max_tokens": 64 })));
    let text = answer["content"][0]["text"].as_str().expect("a text");
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(value["a"] == 1 || value["a"] == 2, "{text}");
    for (field, given) in [("mcp_servers", json!([{ "type": "url" }])), ("container", json!("x"))] {
        let refused = server.post("/v1/messages", &messages(json!({ field: given })));
        assert_eq!(refused.status, 501, "{field}: {}", refused.body);
    }
    server.ok("/v1/messages", &messages(json!({ "mcp_servers": [] })));
}
