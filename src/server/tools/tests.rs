//! Calls in each notation, cut at every character.

use super::*;
use crate::server::reducer::Part;

const NAMES: [&str; 2] = ["get_weather", "now"];

/// Content and calls, with each cut of the text giving the same.
fn read(format: &Format, text: &str, is_parallel: bool) -> (String, Vec<(String, String)>) {
    let whole = read_cut(format, text, text.len(), is_parallel);
    for (at, _) in text.char_indices() {
        assert_eq!(read_cut(format, text, at, is_parallel), whole, "{format:?} {text:?} at {at}");
    }
    whole
}

fn read_cut(format: &Format, text: &str, at: usize, is_parallel: bool) -> (String, Vec<(String, String)>) {
    let names = NAMES.iter().map(|name| name.to_string()).collect();
    let mut parts = Vec::new();
    if *format == Format::Harmony {
        let mut parser = HarmonyParser::default();
        [&text[..at], &text[at..]].into_iter().for_each(|piece| parser.push(piece, &mut parts));
        parser.finish(&mut parts);
    } else {
        let mut parser = ToolParser::new(format.clone(), names, is_parallel);
        [&text[..at], &text[at..]].into_iter().for_each(|piece| parser.push(piece, &mut parts));
        parser.finish(&mut parts);
    }
    let (mut content, mut calls) = (String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Content(text) => content.push_str(&text),
            Part::Reasoning(text) => content.push_str(&format!("({text})")),
            Part::ToolCall { index, name, .. } => {
                assert_eq!(index, calls.len(), "indices are dense");
                calls.push((name, String::new()));
            }
            Part::Arguments { index, text } => calls[index].1.push_str(&text),
        }
    }
    (content, calls)
}

fn check(format: Format, text: &str, content: &str, calls: &[(&str, &str)]) {
    let want: Vec<(String, String)> = calls.iter().map(|(name, args)| (name.to_string(), args.to_string())).collect();
    assert_eq!(read(&format, text, true), (content.to_string(), want), "{format:?} {text}");
}

const CITY: &str = r#"{"city": "Lübeck </tool_call>"}"#;

#[test]
fn hermes_calls() {
    let call =
        |name: &str, args: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {args}}}\n</tool_call>");
    check(Format::Hermes, &call("get_weather", CITY), "", &[("get_weather", CITY)]);
    let two = format!("Let me see.\n\n{}\n{}", call("get_weather", CITY), call("now", "{}"));
    check(Format::Hermes, &two, "Let me see.", &[("get_weather", CITY), ("now", "{}")]);
    check(Format::Hermes, "a < b <tool> c", "a < b <tool> c", &[]);
    check(Format::Hermes, "unfinished <tool_ca", "unfinished <tool_ca", &[]);
    let cut = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1";
    check(Format::Hermes, cut, "", &[("now", "{\"a\": 1")]);
    assert_eq!(read(&Format::Hermes, &two, false).1.len(), 1);
}

#[test]
fn mistral_calls() {
    let list = format!(
        "[TOOL_CALLS] [{{\"name\": \"get_weather\", \"arguments\": {CITY}}}, {{\"name\": \"now\", \"arguments\": {{}}}}]"
    );
    check(Format::Mistral, &list, "", &[("get_weather", CITY), ("now", "{}")]);
    let new = format!("Sure.[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}");
    check(Format::Mistral, &new, "Sure.", &[("get_weather", CITY), ("now", "{}")]);
}

#[test]
fn llama_calls() {
    let call = format!("{{\"name\": \"get_weather\", \"parameters\": {CITY}}}");
    check(Format::Llama3Json, &call, "", &[("get_weather", CITY)]);
    check(
        Format::Llama3Json,
        &format!("<|python_tag|>{call}; {{\"name\": \"now\", \"parameters\": {{}}}}"),
        "",
        &[("get_weather", CITY), ("now", "{}")],
    );
    let json = r#"{"name": "Ada", "born": 1815}"#;
    check(Format::Llama3Json, json, json, &[]);
    check(Format::Llama3Json, "{} is empty", "{} is empty", &[]);
    let python = "[get_weather(city='Lübeck', days=[1, 2]), now()]";
    check(Format::Pythonic, python, "", &[("get_weather", r#"{"city":"Lübeck","days":[1,2]}"#), ("now", "{}")]);
    check(Format::Pythonic, "[1, 2] are numbers", "[1, 2] are numbers", &[]);
}

#[test]
fn deepseek_calls() {
    let old = format!(
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    check(Format::DeepSeek, &old, "Yes.", &[("get_weather", CITY), ("now", "{}")]);
    let new = format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    check(Format::DeepSeek, &new, "", &[("get_weather", CITY)]);
}

#[test]
fn harmony_calls() {
    let text = format!(
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|>"
    );
    check(Format::Harmony, &text, "(Look it up.)", &[("get_weather", CITY)]);
    check(Format::Harmony, "<|channel|>final<|message|>Hello <|x", "Hello <|x", &[]);
}

#[test]
fn bare_and_forced_calls() {
    let call = format!("{{\"name\": \"get_weather\", \"arguments\": {CITY}}}");
    check(Format::Generic, &format!("```json\n{call}\n```"), "", &[("get_weather", CITY)]);
    check(Format::Generic, &format!("[{call}, {{\"name\": \"now\"}}]"), "", &[("get_weather", CITY), ("now", "{}")]);
    check(Format::Generic, "```json\n{\"a\": 1}\n```", "```json\n{\"a\": 1}\n```", &[]);
    check(Format::Generic, "``` not json", "``` not json", &[]);
    check(Format::Required, &format!("[{call}\n, {call}]"), "", &[("get_weather", CITY), ("get_weather", CITY)]);
    check(Format::Named("now".into()), CITY, "", &[("now", CITY)]);
}

#[test]
fn formats_are_known_by_the_template() {
    let table = [
        ("{{ '<tool_call>' }}", Format::Hermes),
        ("[TOOL_CALLS]", Format::Mistral),
        ("Environment: ipython", Format::Llama3Json),
        ("<｜tool▁calls▁begin｜>", Format::DeepSeek),
        ("<|channel|><|message|>", Format::Harmony),
        ("tools", Format::Generic),
    ];
    for (template, want) in table {
        assert_eq!(format_of("auto", template), want, "{template}");
    }
    assert_eq!(format_of("mistral", "<tool_call>"), Format::Mistral);
}
