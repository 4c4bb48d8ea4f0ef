//! Chat templates against what transformers renders, byte for byte, and templates that mean harm.

use super::{hf_tokenizer, ids_of};
use crate::support::{files_with_extension, fixtures, folders, read_json};
use kvasir::tokenizer::chat_template::template_of_config;
use kvasir::tokenizer::{AddSpecial, ChatTemplate, Now, RenderRequest, SpecialTokens, TemplateError, Tokenizer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

const NOW: Now = Now { year: 2024, month: 7, day: 26, hour: 12, minute: 34, second: 56 };

/// Expected text of a case, or `None` where transformers raises.
fn render_case(
    template: &Result<ChatTemplate, TemplateError>,
    case: &Value,
    now: Now,
) -> Result<String, TemplateError> {
    let template = template.as_ref().map_err(Clone::clone)?;
    template.render(&RenderRequest {
        messages: &case["messages"],
        tools: case.get("tools").filter(|tools| !tools.is_null()),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
        now,
        extra: &BTreeMap::new(),
    })
}

#[test]
fn chat_templates_render_as_transformers_renders_them() {
    let mut faults = Vec::new();
    let mut checked = 0;
    for spec in files_with_extension(&fixtures().join("chat_templates"), "json") {
        let json = read_json(&spec);
        let token = |key: &str| json[key].as_str().map(str::to_owned);
        let special =
            SpecialTokens { bos: token("bos_token"), eos: token("eos_token"), unk: token("unk_token"), pad: None };
        let source = std::fs::read_to_string(spec.with_extension("jinja")).expect("the template beside its cases");
        let template = ChatTemplate::new(&source, special);
        let now = Now::parse(json["strftime_now"].as_str().expect("strftime_now")).expect("a date");
        for case in json["cases"].as_array().expect("cases") {
            let at = format!("{} {}", spec.file_stem().expect("a name").display(), case["name"]);
            let found = render_case(&template, case, now);
            checked += 1;
            match (case["expected"].as_str(), &found) {
                (Some(expected), Ok(text)) if text == expected => {}
                (Some(expected), Ok(text)) => {
                    faults.push(format!("{at}\n  found    {text:?}\n  expected {expected:?}"));
                }
                (Some(_), Err(e)) => faults.push(format!("{at}: {e}")),
                (None, found) if case["error"]["kind"] == "TemplateError" => {
                    let message = case["error"]["message"].as_str().expect("message").to_owned();
                    if *found != Err(TemplateError::Raised(message)) {
                        faults.push(format!("{at}: the template's own error is expected, not {found:?}"));
                    }
                }
                // Python's own limits: more lenient is fine, a panic is not.
                (None, _) => {}
            }
        }
    }
    assert!(faults.is_empty(), "{} of {checked} differ:\n{}", faults.len(), faults.join("\n"));
    assert!(checked >= 36, "only {checked} renderings compared");
}

/// Text and ids of one chat, or the template's own refusal. The ids come from the rendered text alone.
fn check_chat(at: &Path, tokenizer: &Tokenizer, template: &ChatTemplate, chat: &Value) {
    let rendered = template.render(&RenderRequest {
        messages: &chat["messages"],
        tools: None,
        add_generation_prompt: chat["add_generation_prompt"].as_bool().expect("a flag"),
        now: NOW,
        extra: &BTreeMap::new(),
    });
    if let Some(error) = chat["error"].as_str() {
        let message = error.strip_prefix("TemplateError: ").expect("an error of the template itself").to_owned();
        assert_eq!(rendered, Err(TemplateError::Raised(message)), "{}", at.display());
        return;
    }
    let text = rendered.unwrap_or_else(|e| panic!("{}: {e}", at.display()));
    assert_eq!(text, chat["text"].as_str().expect("text"), "{}", at.display());
    let ids = tokenizer.encode(&text, AddSpecial::No).expect("encodable");
    assert_eq!(ids, ids_of(&chat["ids"]), "{}: {text:?}", at.display());
}

#[test]
fn tiny_models_render_the_chats_of_the_reference() {
    let mut checked = 0;
    for dir in folders(&fixtures().join("tiny")) {
        let config = read_json(&dir.join("tokenizer_config.json"));
        let source = match std::fs::read_to_string(dir.join("chat_template.jinja")) {
            Ok(source) => source,
            Err(_) => template_of_config(&config)
                .expect("a string")
                .unwrap_or_else(|| panic!("{}: no template", dir.display()))
                .to_owned(),
        };
        let tokenizer = hf_tokenizer(&dir).expect("a valid tokenizer");
        let template = ChatTemplate::new(&source, tokenizer.special_tokens()).expect("a valid template");
        for chat in read_json(&dir.join("tokenizer_cases.json"))["chats"].as_array().expect("chats") {
            check_chat(&dir, &tokenizer, &template, chat);
            checked += 1;
        }
    }
    assert!(checked >= 4, "only {checked} chats compared");
}

fn template(source: &str) -> Result<ChatTemplate, TemplateError> {
    ChatTemplate::new(source, SpecialTokens::default())
}

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = serde_json::json!([{"role": "user", "content": "Hi"}]);
    template(source)?.render(&RenderRequest {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        now: NOW,
        extra: &BTreeMap::from([("enable_thinking".to_owned(), Value::Bool(false))]),
    })
}

#[test]
fn template_environment_is_that_of_transformers() {
    for (source, expected) in [
        ("{% generation %}a{% endgeneration %}\nb", "ab"),
        ("x\n  {%- generation -%}\n a \n{%- endgeneration %}", "xa"),
        ("{% for m in messages %}{{ m.content.upper() }}{% break %}{% endfor %}", "HI"),
        ("{{ messages | tojson }}", r#"[{"role": "user", "content": "Hi"}]"#),
        ("{{ messages[0] }}", "{'role': 'user', 'content': 'Hi'}"),
        ("{{ true }} {{ none }} {{ 1.0 }}", "True None 1.0"),
        ("{{ tools is defined }} {{ tools is none }} {{ pad_token is defined }}", "True True False"),
        ("{{ strftime_now('%d %b %Y, %H:%M') }}", "26 Jul 2024, 12:34"),
        ("{{ enable_thinking }}", "False"),
        ("{{ none is iterable }} {{ [] is iterable }} {{ 'a' is iterable }}", "False True True"),
        ("{{ '<'|safe + '<' + '\"' }}{{ '<' + '&' }}", "<&lt;&#34;<&"),
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn errors_of_templates_say_what_is_wrong() {
    assert_eq!(render("{{ raise_exception('no tools') }}"), Err(TemplateError::Raised("no tools".to_owned())));
    assert!(matches!(template("{% for m in messages %}{{ m.content "), Err(TemplateError::Syntax(_))));
    assert!(matches!(render("{{ nothing.at.all }}"), Err(TemplateError::Render(_))));
    assert!(matches!(render("{{ strftime_now('%Q') }}"), Err(TemplateError::Render(_))));
    assert!(matches!(Now::parse("yesterday"), Err(TemplateError::BadTime(_))));
    let huge = "x".repeat(2 << 20);
    assert!(matches!(template(&huge), Err(TemplateError::TooLarge { .. })));
}

#[test]
fn runaway_templates_end_in_bounded_time_and_memory() {
    let sources = [
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
        "{{ [1] * 90000000 }}",
        "{{ [[1] * 90000000] * 90000000 }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
        "{{ ([1] * 90000000) | tojson }}",
        "{{ messages | tojson(indent=100000000) ~ ([[[[1]]]] * 9000000) | tojson(indent=64) }}",
        "{% for i in range(99999) %}{{ 'y' * 90000 }}{% endfor %}",
    ];
    for source in sources {
        let start = Instant::now();
        let error = render(source).expect_err(source);
        assert!(start.elapsed() < Duration::from_secs(10), "{source} took {:?}", start.elapsed());
        assert!(!error.to_string().is_empty());
    }
}

#[test]
fn template_of_a_config_may_be_text_or_a_list_of_named_texts() {
    let named = serde_json::json!({"chat_template": [
        {"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"},
    ]});
    assert_eq!(template_of_config(&named), Ok(Some("d")));
    assert_eq!(template_of_config(&serde_json::json!({"chat_template": "x"})), Ok(Some("x")));
    assert_eq!(template_of_config(&serde_json::json!({})), Ok(None));
    assert_eq!(template_of_config(&serde_json::json!({"chat_template": 42})), Err(TemplateError::NotAString));
}
