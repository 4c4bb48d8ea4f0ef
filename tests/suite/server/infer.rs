//! Texts as tensors, as Triton's HTTP clients send them.

use super::{Answer, TestServer};
use serde_json::{Value, json};

const PATH: &str = "/v2/models/Simulation/infer";

fn tensor(name: &str, datatype: &str, data: Value) -> Value {
    json!({ "name": name, "datatype": datatype, "shape": [data.as_array().expect("a list").len()], "data": data })
}

/// An infer request without a media type, as the public client sends it; `binary` lies behind the JSON.
fn infer(server: &TestServer, head: &Value, binary: &str) -> Answer {
    let head = head.to_string();
    let length = head.len().to_string();
    let headers = [("inference-header-content-length", length.as_str())];
    server.send("POST", PATH, if binary.is_empty() { &[] } else { &headers }, &(head + binary))
}

fn output<'a>(body: &'a Value, name: &str) -> &'a Value {
    body["outputs"].as_array().expect("outputs").iter().find(|output| output["name"] == name).expect("an output")
}

#[test]
fn tensors_are_answered_like_plain_completions() {
    let server = TestServer::fake();
    let plain = server.ok("/v1/completions", &json!({ "prompt": ["Once", "Hé"], "max_tokens": 9, "seed": 4 }));
    let texts = json!([plain["choices"][0]["text"], plain["choices"][1]["text"]]);
    let as_fields = json!({ "id": "7", "inputs": [
        tensor("text_input", "BYTES", json!(["Once", "Hé"])),
        tensor("max_tokens", "INT32", json!([9])),
        tensor("seed", "INT64", json!([4])),
    ]});
    let as_text = json!({ "parameters": { "seed": 4 }, "inputs": [
        tensor("text_input", "BYTES", json!(["Once", "Hé"])),
        tensor("sampling_parameters", "BYTES", json!(["{\"max_tokens\": 9}"])),
    ]});
    for head in [&as_fields, &as_text] {
        let answer = infer(&server, head, "");
        assert_eq!(answer.status, 200, "{}", answer.body);
        let body = answer.json();
        assert_eq!(output(&body, "text_output")["data"], texts);
        assert_eq!(output(&body, "finish_reason")["data"], json!(["length", "length"]));
        assert_eq!(output(&body, "text_output")["shape"], json!([2]));
    }
    assert_eq!(infer(&server, &as_fields, "").json()["id"], "7");
}

#[test]
fn tensors_may_be_bytes_behind_the_json_both_ways() {
    let server = TestServer::fake();
    let plain = server.ok("/v1/completions", &json!({ "prompt": "Once", "max_tokens": 9, "seed": 4 }));
    let text = plain["choices"][0]["text"].as_str().expect("text");
    let bytes = |name: &str, datatype: &str, size: usize| {
        json!({
            "name": name, "datatype": datatype, "shape": [1], "parameters": { "binary_data_size": size },
        })
    };
    let head = json!({
        "id": "7", "parameters": { "seed": 4, "binary_data_output": true },
        "inputs": [bytes("text_input", "BYTES", 8), bytes("max_tokens", "INT32", 4), bytes("temperature", "FP32", 4)],
        "outputs": [{ "name": "text_output" }],
    });
    let answer = infer(&server, &head, "\u{4}\0\0\0Once\u{9}\0\0\0\0\0\0\0");
    assert_eq!(answer.status, 200, "{}", answer.body);
    let length: usize = answer.header("inference-header-content-length").expect("a length").parse().expect("a number");
    let (head, binary) = answer.body.split_at(length);
    let head: Value = serde_json::from_str(head).expect("JSON");
    let greedy = server.ok("/v1/completions", &json!({ "prompt": "Once", "max_tokens": 9, "temperature": 0 }));
    let greedy = greedy["choices"][0]["text"].as_str().expect("text");
    assert_ne!(greedy, text, "the temperature is read");
    assert_eq!(head["outputs"][0]["parameters"]["binary_data_size"], greedy.len() + 4);
    let size = char::from_u32(greedy.len() as u32).expect("a short text");
    assert_eq!(binary, format!("{size}\0\0\0{greedy}"));
}

#[test]
fn faulty_tensors_are_refused_in_the_shape_of_the_protocol() {
    let server = TestServer::fake();
    let prompt = tensor("text_input", "BYTES", json!(["x"]));
    let size = |size: u64| json!({ "name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": { "binary_data_size": size } });
    let table = [
        (json!({}), "", "inputs"),
        (json!({ "inputs": [] }), "", "inputs"),
        (json!({ "inputs": [tensor("text", "BYTES", json!(["x"]))] }), "", "text_input"),
        (json!({ "inputs": [tensor("text_input", "INT32", json!([1]))] }), "", "text_input"),
        (
            json!({ "inputs": [{ "name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["x"] }] }),
            "",
            "shape",
        ),
        (
            json!({ "inputs": [{ "name": "text_input", "datatype": "BYTES", "shape": [u64::MAX, 3], "data": ["x"] }] }),
            "",
            "shape",
        ),
        (json!({ "inputs": [prompt, tensor("max_tokens", "INT32", json!([1, 2]))] }), "", "max_tokens"),
        (json!({ "inputs": [prompt, tensor("n", "INT32", json!([2]))] }), "", "n is not supported"),
        (json!({ "inputs": [prompt, tensor("stream", "BOOL", json!([true]))] }), "", "stream is not supported"),
        (json!({ "inputs": [prompt], "outputs": [{ "name": "logits" }] }), "", "logits"),
        (json!({ "inputs": [prompt], "parameters": { "sequence_id": 3 } }), "", "sequence_id"),
        (json!({ "inputs": [prompt] }), "more", "4 bytes"),
        (json!({ "inputs": [size(9)] }), "\u{1}\0\0\0x", "missing"),
        (json!({ "inputs": [size(u64::MAX)] }), "\u{1}\0\0\0x", "missing"),
        (json!({ "inputs": [size(5)] }), "\u{2}\0\0\0x", "UTF-8"),
    ];
    for (head, binary, word) in table {
        let answer = infer(&server, &head, binary);
        assert!((400..=501).contains(&answer.status) && answer.status != 500, "{head}: {}", answer.status);
        let message = answer.json()["error"].as_str().expect("a plain message").to_owned();
        assert!(message.contains(word), "{head}: {message}");
    }
    let body = json!({ "inputs": [prompt] }).to_string();
    let page = [("origin", "https://page.example")];
    assert_eq!(server.send("POST", PATH, &page, &body).status, 415, "a page posts without asking first");
    assert_eq!(server.send("POST", PATH, &[("content-type", "text/plain")], &body).status, 415);
    assert_eq!(server.send("POST", PATH, &[("inference-header-content-length", "999")], &body).status, 400);
    assert_eq!(server.send("POST", "/v2/models/Simulation/versions/2/infer", &[], &body).status, 404);
    assert_eq!(server.send("POST", "/v2/models/Simulation/versions/1/infer", &[], &body).status, 200);
    let generate = json!({ "text_input": "x", "n": 2 });
    let answer = server.post("/v2/models/Simulation/generate", &generate);
    assert_eq!((answer.status, answer.json()["error"].is_string()), (501, true), "{}", answer.body);
}
