//! A chat template from a file instead of the model's.

use super::logprobs::tiny_llama_with;
use crate::support::core_fixtures;
use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::loader;
use kvasir::engine::options::{LoadRequest, ModelSource};
use kvasir::server::ServerOptions;
use serde_json::json;

#[test]
fn chats_are_rendered_with_the_template_that_the_server_was_given() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mine.jinja");
    std::fs::write(&file, "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}").expect("written");
    let Some(server) = tiny_llama_with(ServerOptions::local(), |options| options.chat_template = Some(file)) else {
        return;
    };
    let body = json!({ "messages": [{ "role": "user", "content": "Hello there" }] });
    let chat = server.ok("/tokenize", &body)["tokens"].clone();
    let text = server.ok("/detokenize", &json!({ "tokens": chat }))["prompt"].clone();
    assert!(text.as_str().is_some_and(|text| text.ends_with("[user] Hello there")), "{text}");
}

#[test]
fn a_template_that_cannot_be_used_is_named_before_anything_is_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let broken = folder.path().join("broken.jinja");
    std::fs::write(&broken, "{% for m in messages %}").expect("written");
    let bytes = folder.path().join("bytes.jinja");
    std::fs::write(&bytes, [0xff, 0xfe, 0x00]).expect("written");
    for file in [broken, bytes, folder.path().join("missing.jinja")] {
        let args = EngineArgs { chat_template: Some(file.clone()), ..EngineArgs::default() };
        let options = args.resolve(&EngineSection::default(), folder.path(), Some(0)).expect("options");
        let request = LoadRequest { source: ModelSource::Path(core_fixtures().join("tiny/llama")), options };
        let mut phases = Vec::new();
        let failure = loader::load(&request, &mut |progress| {
            phases.push(progress.phase.to_owned());
            true
        });
        let message = failure.map(|_| ()).expect_err("the template is of no use").message;
        assert!(message.contains(&file.display().to_string()), "{message}");
        assert!(!phases.iter().any(|phase| phase.contains("adapter")), "{phases:?}");
    }
}
