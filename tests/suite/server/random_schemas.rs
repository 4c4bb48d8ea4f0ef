//! Random JSON schemas: every answer is a valid document, or ends by length. The validator is not the one that made the
//! grammar. `SCHEMAS=1000` asks for as many.

use super::TestServer;
use super::logprobs::tiny_llama_with;
use kvasir::server::ServerOptions;
use serde_json::{Map, Value, json};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const DEFAULT_SCHEMAS: u64 = 96;
/// Requests at a time.
const PARALLEL: usize = 8;
const WORDS: [&str; 8] = ["id", "name", "größe", "unit price", "a/b", "x", "$ref?", "note"];
/// Patterns, each with what it means.
const PATTERNS: [(&str, fn(&str) -> bool); 3] = [
    ("^[a-z]{1,4}$", |text| (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase())),
    ("^(red|green)$", |text| text == "red" || text == "green"),
    ("^[0-9]{3}-[0-9]{2}$", |text| shape(text) == "000-00"),
];
/// Formats, each with what it means.
const FORMATS: [(&str, fn(&str) -> bool); 3] = [
    ("date", |text| shape(text) == "0000-00-00"),
    ("uuid", |text| text.len() == 36 && text.split('-').map(str::len).eq([8, 4, 4, 4, 12])),
    ("ipv4", |text| text.split('.').filter(|part| part.parse::<u8>().is_ok()).count() == 4),
];

/// A text with its digits as 0.
fn shape(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect()
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }

    fn range(&mut self, least: i64, most: i64) -> i64 {
        least + self.below((most - least + 1) as u64) as i64
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

fn scalar(draw: &mut Draw) -> Value {
    let enumerated =
        [json!("a"), json!("b\n"), json!("ü"), json!(1), json!(-2.5), json!(null), json!([1]), json!({ "k": "v" })];
    match draw.below(9) {
        0 => {
            let least = draw.range(0, 3);
            json!({ "type": "string", "minLength": least, "maxLength": least + draw.range(0, 8) })
        }
        1 => json!({ "type": "string", "pattern": draw.one(&PATTERNS).0 }),
        2 => json!({ "type": "string", "format": draw.one(&FORMATS).0 }),
        3 => {
            let least = draw.range(-200, 200);
            json!({ "type": "integer", "minimum": least, "maximum": least + draw.range(0, 500) })
        }
        4 => {
            let least = draw.range(-9, 9);
            json!({ "type": "number", "minimum": least, "exclusiveMaximum": least + draw.range(1, 9) })
        }
        5 => json!({ "type": "boolean" }),
        6 => json!({ "type": "null" }),
        7 => {
            let from = draw.below(5) as usize;
            json!({ "enum": enumerated[from..from + 1 + draw.below(3) as usize] })
        }
        _ => json!({ "const": draw.one(&enumerated) }),
    }
}

fn schema(draw: &mut Draw, depth: u32, names: &[&str]) -> Value {
    match if depth > 0 { draw.below(7) } else { 0 } {
        2 => {
            let from = draw.below(6) as usize;
            let keys = &WORDS[from..(from + draw.below(4) as usize).min(WORDS.len())];
            let fields: Map<String, Value> =
                keys.iter().map(|key| ((*key).to_owned(), schema(draw, depth - 1, names))).collect();
            let required: Vec<&&str> = keys.iter().filter(|_| draw.below(10) < 7).collect();
            let extra = if keys.is_empty() || draw.below(3) > 0 { json!(false) } else { scalar(draw) };
            json!({ "type": "object", "properties": fields, "required": required, "additionalProperties": extra })
        }
        3 => {
            let least = draw.range(0, 2);
            let items = schema(draw, depth - 1, names);
            json!({ "type": "array", "items": items, "minItems": least, "maxItems": least + draw.range(0, 2) })
        }
        4 => {
            let items: Vec<Value> = (0..draw.range(1, 3)).map(|_| schema(draw, depth - 1, names)).collect();
            json!({ "type": "array", "minItems": items.len(), "prefixItems": items, "items": false })
        }
        5 => {
            let any: Vec<Value> = (0..draw.range(1, 3)).map(|_| schema(draw, depth - 1, names)).collect();
            json!({ "anyOf": any })
        }
        6 if !names.is_empty() => json!({ "$ref": format!("#/$defs/{}", draw.one(names)) }),
        _ => scalar(draw),
    }
}

/// A schema that hangs on the seed alone.
fn document(seed: u64) -> Value {
    let mut draw = Draw(seed);
    let mut whole = schema(&mut draw, 3, &["one", "two"]);
    whole["$defs"] = json!({ "one": schema(&mut draw, 1, &[]), "two": scalar(&mut draw) });
    whole
}

/// The part of JSON Schema that is drawn from.
fn is_valid(value: &Value, schema: &Value, root: &Value) -> bool {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.strip_prefix("#/$defs/")) {
        return is_valid(value, &root["$defs"][name], root);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|one| is_valid(value, one, root));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    if let Some(one) = schema.get("const") {
        return value == one;
    }
    match schema["type"].as_str().expect("a type") {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.as_str().is_some_and(|text| is_text(text, schema)),
        "integer" => value.as_i64().is_some_and(|n| is_in_range(n as f64, schema)),
        "number" => value.as_f64().is_some_and(|n| is_in_range(n, schema)),
        "array" => value.as_array().is_some_and(|items| is_list(items, schema, root)),
        "object" => value.as_object().is_some_and(|fields| is_object(fields, schema, root)),
        other => panic!("{other} is not drawn"),
    }
}

fn is_text(text: &str, schema: &Value) -> bool {
    let means = |of: &[(&str, fn(&str) -> bool)], key: &str| {
        let Some(named) = schema[key].as_str() else { return true };
        of.iter().any(|(name, holds)| *name == named && holds(text))
    };
    let length = text.chars().count() as u64;
    let fits =
        length >= schema["minLength"].as_u64().unwrap_or(0) && length <= schema["maxLength"].as_u64().unwrap_or(99);
    fits && means(&PATTERNS, "pattern") && means(&FORMATS, "format")
}

fn is_in_range(n: f64, schema: &Value) -> bool {
    let bound = |key: &str| schema[key].as_f64();
    bound("minimum").is_none_or(|least| n >= least)
        && bound("maximum").is_none_or(|most| n <= most)
        && bound("exclusiveMaximum").is_none_or(|end| n < end)
}

fn is_list(items: &[Value], schema: &Value, root: &Value) -> bool {
    if let Some(all) = schema["prefixItems"].as_array() {
        return items.len() == all.len() && items.iter().zip(all).all(|(item, one)| is_valid(item, one, root));
    }
    let bound = |key: &str| schema[key].as_u64().expect("a bound") as usize;
    (bound("minItems")..=bound("maxItems")).contains(&items.len())
        && items.iter().all(|item| is_valid(item, &schema["items"], root))
}

fn is_object(fields: &Map<String, Value>, schema: &Value, root: &Value) -> bool {
    let required = schema["required"].as_array().expect("a list");
    let is_field = |(key, value): (&String, &Value)| match schema["properties"].get(key) {
        Some(known) => is_valid(value, known, root),
        None => schema["additionalProperties"] != false && is_valid(value, &schema["additionalProperties"], root),
    };
    required.iter().all(|key| fields.contains_key(key.as_str().expect("a name"))) && fields.iter().all(is_field)
}

fn ask(server: &TestServer, seed: u64) -> (Value, String, String) {
    let wanted = document(seed);
    let format = json!({ "type": "json_schema", "json_schema": { "name": "random", "schema": wanted } });
    let body = json!({ "prompt": format!("Document {}", seed % 7), "max_tokens": 60, "seed": seed, "response_format": format });
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "seed {seed}: {} for {wanted}", answer.body);
    let choice = &answer.json()["choices"][0];
    let text = |field: &str| choice[field].as_str().expect("a string").to_owned();
    (wanted, text("text"), text("finish_reason"))
}

#[test]
fn answers_to_random_schemas_are_valid_or_end_by_length() {
    let Some(server) = tiny_llama_with(ServerOptions::local(), |_| {}) else { return };
    let num_schemas = std::env::var("SCHEMAS").map_or(DEFAULT_SCHEMAS, |n| n.parse().expect("a number"));
    let (next, num_whole, faults) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= num_schemas {
                        return;
                    }
                    let (wanted, text, finish) = ask(&server, seed);
                    if finish == "length" {
                        continue;
                    }
                    num_whole.fetch_add(1, Ordering::Relaxed);
                    let value = serde_json::from_str::<Value>(&text);
                    if finish != "stop" || !value.is_ok_and(|value| is_valid(&value, &wanted, &wanted)) {
                        faults.lock().expect("no panic").push(format!("seed {seed}, {finish}: {text:?} for {wanted}"));
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().expect("no panic");
    assert!(faults.is_empty(), "{} faults: {:#?}", faults.len(), &faults[..faults.len().min(5)]);
    let num_whole = num_whole.into_inner();
    assert!(num_whole * 2 > num_schemas, "only {num_whole} of {num_schemas} came to an end");
}

#[test]
fn the_validator_tells_right_from_wrong() {
    let schema = json!({
        "type": "object", "required": ["a"], "additionalProperties": { "type": "null" },
        "properties": { "a": { "type": "array", "items": { "$ref": "#/$defs/one" }, "minItems": 1, "maxItems": 2 } },
        "$defs": { "one": { "anyOf": [{ "type": "integer", "minimum": 3 }, { "type": "string", "pattern": "^[a-z]{1,4}$" }] } },
    });
    let good = [json!({ "a": [3] }), json!({ "a": ["abc", 7], "b": null })];
    let bad =
        [json!({}), json!({ "a": [] }), json!({ "a": [2] }), json!({ "a": ["abcde"] }), json!({ "a": [3], "b": 1 })];
    assert!(good.iter().all(|value| is_valid(value, &schema, &schema)));
    assert!(!bad.iter().any(|value| is_valid(value, &schema, &schema)));
}
