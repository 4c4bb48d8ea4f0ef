//! `/kvasir/v1/prefixes`: a prefix is computed ahead, named, found, let go and evicted.

use super::TestServer;
use kvasir::engine::EngineHandle;
use kvasir::engine::options::FakeOptions;
use kvasir::server::ServerOptions;
use serde_json::{Value, json};

const PREFIXES: &str = "/kvasir/v1/prefixes";
const SYSTEM: &str = "You are a careful assistant who answers in short words.";

fn listed(server: &TestServer, id: &str) -> Option<Value> {
    let all = server.get(PREFIXES).json()["prefixes"].as_array().expect("a list").clone();
    all.into_iter().find(|prefix| prefix["id"] == id)
}

fn cached(server: &TestServer, salt: Option<&str>) -> u64 {
    let body = json!({ "prompt": format!("{SYSTEM} Hello"), "max_tokens": 1, "cache_salt": salt });
    let answer = server.ok("/v1/completions", &body);
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

#[test]
fn a_prefix_is_computed_ahead_named_let_go_and_evicted() {
    let server = TestServer::fake();
    let pinned = server.ok(PREFIXES, &json!({ "prompt": SYSTEM, "name": "system" }));
    assert_eq!((&pinned["pinned"], &pinned["cached_tokens"]), (&json!(true), &json!(0)));
    let num_tokens = pinned["tokens"].as_u64().expect("a count");
    assert!(num_tokens >= 16, "{pinned}");
    let id = pinned["id"].as_str().expect("an id").to_owned();
    assert_eq!((cached(&server, None), cached(&server, Some("another"))), (num_tokens, 0));
    let hit = |server: &TestServer| listed(server, &id).is_some_and(|prefix| prefix["hits"] == 1);
    server.wait_until("the hit is listed", hit);
    let prefix = listed(&server, &id).expect("listed");
    assert_eq!((&prefix["name"], &prefix["tier"]), (&json!("system"), &json!("gpu")));
    assert_eq!(prefix["hit_tokens"], num_tokens);
    assert!(SYSTEM.starts_with(prefix["text"].as_str().expect("a text")), "{prefix}");

    let path = format!("{PREFIXES}/{id}");
    assert_eq!(server.ok(&path, &json!({ "name": "other" }))["pinned"], true);
    let is_named = |server: &TestServer| listed(server, &id).is_some_and(|prefix| prefix["name"] == "other");
    server.wait_until("it has its new name", is_named);
    assert_eq!(server.ok(&path, &json!({ "pinned": false }))["pinned"], false);
    assert_eq!(server.post(&path, &json!({ "pinned": false })).status, 404, "it was let go before");
    server.wait_until("it is listed as let go", |server| listed(server, &id).is_some_and(|p| p["pinned"] == false));
    assert_eq!(server.ok(&path, &json!({}))["pinned"], true, "it is in the cache still");
    let evicted = server.send("DELETE", &path, &[], "");
    assert_eq!((evicted.status, &evicted.json()["deleted"]), (200, &json!(true)), "{}", evicted.body);
    assert_eq!(server.send("DELETE", &path, &[], "").status, 404);
    assert_eq!(server.post(&path, &json!({})).status, 404);
    assert_eq!(cached(&server, None), 0);
}

#[test]
fn messages_and_tokens_are_prefixes_too_and_faults_name_their_field() {
    let server = TestServer::fake();
    let system = json!([{ "role": "system", "content": SYSTEM }]);
    let pinned = server.ok(PREFIXES, &json!({ "messages": system, "cache_salt": "mine" }));
    let chat = json!({
        "messages": [{ "role": "system", "content": SYSTEM }, { "role": "user", "content": "Hello" }],
        "max_tokens": 1,
        "cache_salt": "mine",
    });
    let usage = &server.ok("/v1/chat/completions", &chat)["usage"];
    assert!(pinned["tokens"].as_u64() >= Some(16), "{pinned}");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], pinned["tokens"]);
    let tokens: Vec<u32> = (0..32).map(|n| 65 + n % 26).collect();
    let first = server.ok(PREFIXES, &json!({ "prompt": tokens }));
    let again = server.ok(PREFIXES, &json!({ "prompt": tokens, "name": "again" }));
    assert_eq!((&first["id"], &first["cached_tokens"]), (&again["id"], &json!(0)));
    assert!(again["cached_tokens"].as_u64() >= Some(16), "{again}");
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({ "prompt": "short" }), "prompt"),
        (json!({ "prompt": ["a", "b"] }), "prompt"),
        (json!({ "prompt": [4_000_000_000u32] }), "prompt"),
        (json!({ "prompt": "x y ".repeat(1000) }), "prompt"),
        (json!({ "messages": [] }), "messages"),
    ] {
        let answer = server.post(PREFIXES, &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)), "{}", answer.body);
    }
    for id in ["17", "x", "99999999999999999999999"] {
        assert_eq!(server.post(&format!("{PREFIXES}/{id}"), &json!({})).status, 404, "{id}");
        assert_eq!(server.send("DELETE", &format!("{PREFIXES}/{id}"), &[], "").status, 404, "{id}");
    }
}

#[test]
fn a_request_that_cannot_fit_beside_pins_is_refused_before_its_stream_begins() {
    let fake = FakeOptions { num_blocks: 33, ..FakeOptions::small() };
    let server = TestServer::start(EngineHandle::start_fake(fake), ServerOptions::local());
    let pinned = "p".repeat(160);
    let body = |prompt: &str| json!({ "prompt": prompt, "max_tokens": 200, "ignore_eos": true, "stream": true });
    let (own, shared) = ("x".repeat(200), pinned.clone() + &"x".repeat(40));
    assert_eq!(server.post("/v1/completions", &body(&own)).status, 200, "25 of 32 blocks");
    let id = server.ok(PREFIXES, &json!({ "prompt": pinned }))["id"].as_str().expect("an id").to_owned();
    let refused = server.post("/v1/completions", &body(&own));
    assert_eq!(refused.status, 400, "{}", refused.body);
    let message = refused.json()["error"]["message"].as_str().expect("a message").to_owned();
    assert!(message.contains("25") && message.contains("22"), "{message}");
    assert_eq!(server.post("/v1/completions", &body(&shared)).status, 200, "ten of its blocks are pinned");
    assert_eq!(server.ok(&format!("{PREFIXES}/{id}"), &json!({ "pinned": false }))["pinned"], false);
    assert_eq!(server.post("/v1/completions", &body(&own)).status, 200, "the pin let go");
}
