//! Tool calls and reasoning: enforced, read from the model's own notation, streamed.

use super::TestServer;
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn tools() -> Value {
    let city =
        json!({ "type": "object", "properties": { "city": { "enum": ["Rome", "Oslo"] } }, "required": ["city"] });
    json!([
        { "type": "function", "function": { "name": "get_weather", "parameters": city } },
        { "type": "function", "function": { "name": "now" } },
    ])
}

fn chat(extra: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "hi" }], "tools": tools(), "max_tokens": 300, "seed": 1,
    });
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

fn hermes() -> TestServer {
    let options = ServerOptions { tool_call_parser: "hermes".into(), ..ServerOptions::local() };
    TestServer::start(EngineHandle::start_fake(FakeOptions::small()), options)
}

/// (content, reasoning, calls, finish reason), the same streamed and not.
fn answer(server: &TestServer, mut body: Value) -> (Value, Value, Vec<(String, String)>, String) {
    let whole = server.ok("/v1/chat/completions", &body);
    let choice = &whole["choices"][0];
    let message = &choice["message"];
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let call = |call: &Value| (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
    let calls: Vec<(String, String)> = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
    let finish = text(&choice["finish_reason"]);

    body["stream"] = true.into();
    let (mut content, mut reasoning, mut streamed) = (String::new(), String::new(), BTreeMap::new());
    let mut last = Value::Null;
    for chunk in server.post("/v1/chat/completions", &body).chunks() {
        let choice = &chunk["choices"][0];
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        reasoning.push_str(choice["delta"]["reasoning_content"].as_str().unwrap_or_default());
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let is_new = !streamed.contains_key(&delta["index"].as_u64());
            let (name, arguments): &mut (String, String) = streamed.entry(delta["index"].as_u64()).or_default();
            assert_eq!(delta["id"].is_string() && delta["function"]["name"].is_string(), is_new, "{delta}");
            name.push_str(delta["function"]["name"].as_str().unwrap_or_default());
            arguments.push_str(delta["function"]["arguments"].as_str().expect("a piece"));
        }
        last = choice["finish_reason"].clone();
    }
    assert_eq!(streamed.into_values().collect::<Vec<_>>(), calls);
    assert_eq!(content, message["content"].as_str().unwrap_or_default());
    assert_eq!(reasoning, message["reasoning_content"].as_str().unwrap_or_default());
    assert_eq!(last, finish);
    (message["content"].clone(), message["reasoning_content"].clone(), calls, finish)
}

#[test]
fn required_and_named_calls_are_enforced() {
    let server = TestServer::fake();
    for seed in 0..3 {
        let (content, _, calls, finish) = answer(&server, chat(json!({ "tool_choice": "required", "seed": seed })));
        assert!(content.is_null() && !calls.is_empty(), "{content} {calls:?}");
        if finish == "tool_calls" {
            for (name, arguments) in &calls {
                let arguments: Value = serde_json::from_str(arguments).expect("whole arguments");
                assert!(name == "now" || matches!(arguments["city"].as_str(), Some("Rome" | "Oslo")), "{arguments}");
            }
        } else {
            assert_eq!(finish, "length", "length wins over tool calls");
        }
    }
    let named = json!({ "tool_choice": { "type": "function", "function": { "name": "get_weather" } } });
    let (_, _, calls, finish) = answer(&server, chat(named));
    assert_eq!((calls.len(), calls[0].0.as_str(), finish.as_str()), (1, "get_weather", "tool_calls"));
    let single = json!({ "tool_choice": "required", "parallel_tool_calls": false });
    assert_eq!(answer(&server, chat(single)).2.len(), 1);
}

#[test]
fn definitions_of_two_tools_may_have_the_same_name() {
    let server = TestServer::fake();
    let tool = |name: &str, place: Value| {
        let parameters = json!({
            "type": "object",
            "properties": { "default": { "$ref": "#/$defs/Place" }, "next": { "$ref": "#/properties/default" } },
            "required": ["default", "next"], "additionalProperties": false, "$defs": { "Place": place },
        });
        json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
    };
    let tools = [tool("go", json!({ "enum": ["Rome", "Oslo"] })), tool("count", json!({ "enum": [1, 22, 333] }))];
    let mut heard = std::collections::BTreeSet::new();
    for seed in 0..6 {
        let body = chat(json!({
            "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "seed": seed, "temperature": 1.5,
        }));
        let (_, _, calls, _) = answer(&server, body);
        for (name, arguments) in calls {
            let arguments: Value = serde_json::from_str(&arguments).expect("whole arguments");
            for field in ["default", "next"] {
                assert_eq!(arguments[field].is_string(), name == "go", "{name} {arguments}");
            }
            heard.insert(name);
        }
    }
    assert!(!heard.is_empty());
}

#[test]
fn calls_are_read_in_the_notation_of_the_model() {
    let server = hermes();
    let call =
        r#"<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>"#.replace("\\n", "\n");
    let text = format!("Let me see. {call}\n{call}");
    let said = json!({ "structured_outputs": { "choice": [text] } });
    let (content, _, calls, finish) = answer(&server, chat(said.clone()));
    let one = ("get_weather".to_owned(), r#"{"city": "Rome"}"#.to_owned());
    assert_eq!((content, calls, finish.as_str()), (json!("Let me see."), vec![one.clone(), one], "tool_calls"));
    let mut cut = chat(said.clone());
    cut["max_tokens"] = 70.into();
    let (_, _, calls, finish) = answer(&server, cut);
    assert_eq!((calls.len(), finish.as_str()), (1, "length"), "length wins");
    let mut none = chat(said);
    none["tool_choice"] = "none".into();
    let (content, _, calls, finish) = answer(&server, none);
    assert_eq!((content, calls.len(), finish.as_str()), (json!(text), 0, "stop"));
}

#[test]
fn reasoning_is_told_apart() {
    let server = hermes();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}";
    let text = "<think>\nFirst this.\n</think>\n\nThen that.";
    let body = chat(json!({ "chat_template": template, "structured_outputs": { "choice": [text] } }));
    let (content, reasoning, _, _) = answer(&server, body);
    assert_eq!((content, reasoning), (json!("Then that."), json!("First this.")));
    let mut body = chat(json!({ "chat_template": template, "structured_outputs": { "choice": [text] } }));
    let usage = server.ok("/v1/chat/completions", &body)["usage"].clone();
    // A token is a byte here: from the end of the first mark to the end of the second.
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], "\nFirst this.\n</think>".len() + 1);
    (body["stream"], body["stream_options"]) = (true.into(), json!({ "include_usage": true }));
    assert_eq!(server.post("/v1/chat/completions", &body).chunks().pop().expect("a chunk")["usage"], usage);
    let inside = format!("{template}<think>");
    let body = chat(json!({ "chat_template": inside, "structured_outputs": { "choice": ["a</think>b"] } }));
    let (content, reasoning, _, _) = answer(&server, body);
    assert_eq!((content, reasoning), (json!("b"), json!("a")));
}

#[test]
fn tools_are_told_to_models_whose_template_does_not_know_them() {
    let server = TestServer::fake();
    let prompt = |body: &Value| {
        let ids = server.ok("/v1/chat/completions/render", body)["token_ids"].clone();
        server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].as_str().expect("text").to_owned()
    };
    let told = prompt(&chat(json!({})));
    assert!(told.starts_with("<|im_start|>system\nYou can call") && told.contains("get_weather"), "{told}");
    assert!(!prompt(&chat(json!({ "tool_choice": "none" }))).contains("get_weather"));
    let with_template = chat(json!({ "chat_template": "{% if tools %}{{ tools[1].function.name }}{% endif %}!" }));
    assert_eq!(prompt(&with_template), "now!");
}

#[test]
fn faulty_tools_name_their_field() {
    let server = TestServer::fake();
    let check = |extra: Value, status: u16, param: &str| {
        let answer = server.post("/v1/chat/completions", &chat(extra.clone()));
        assert_eq!(answer.status, status, "{extra}: {}", answer.body);
        assert_eq!(answer.json()["error"]["param"], param, "{extra}: {}", answer.body);
    };
    check(json!({ "tools": [{ "type": "function" }] }), 400, "tools[0]");
    check(json!({ "tools": [{ "type": "web_search" }] }), 501, "tools[0].type");
    check(json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }), 400, "tools[0].function.name");
    check(json!({ "tool_choice": "some" }), 400, "tool_choice");
    check(json!({ "tool_choice": { "type": "function", "function": { "name": "other" } } }), 400, "tool_choice");
    check(json!({ "tool_choice": "required", "tools": [] }), 400, "tool_choice");
    check(json!({ "tool_choice": "required", "response_format": { "type": "json_object" } }), 400, "tools");
}
