//! Who may import whom, and which words may not appear where (ARCHITECTURE.md has the picture).
//!
//! Paths are read from `use crate::…` (with nested braces) and from `crate::…` in code. Test modules may look further.

use crate::tidy::{repository_files, root, source};
use std::collections::BTreeSet;

/// A module and what it may name of the crate. `module::part` allows that part only; `*` allows all.
const MAY_IMPORT: [(&str, &[&str]); 23] = [
    ("ids", &[]),
    ("protocol", &["ids"]),
    ("telemetry", &["ids", "protocol"]),
    ("kv", &["ids"]),
    ("scheduler", &["ids", "protocol", "kv"]),
    ("batch", &["ids", "protocol", "scheduler"]),
    ("tokenizer", &["ids"]),
    ("model", &["ids"]),
    // Grammars over a vocabulary; the engine sees the trait in `protocol` only.
    ("constrain", &["ids", "protocol", "tokenizer"]),
    ("sampling", &["ids", "protocol"]),
    ("memory", &["kv::KvGroups", "model::spec", "model::groups", "model::dtype"]),
    ("gpu", &[]),
    (
        "kernels",
        &[
            "gpu",
            "model::dtype",
            "model::experts",
            "model::quant",
            "model::coded",
            "model::spec",
            "sampling",
            "batch",
            "protocol",
        ],
    ),
    // Of telemetry: what a step's time went into.
    ("executor", &["ids", "protocol", "telemetry::kernels", "gpu", "kernels", "batch", "model", "sampling", "memory"]),
    ("sim", &["ids", "protocol", "kv", "scheduler", "batch", "executor", "sampling"]),
    // Runs the scheduler again, with or without an executor.
    ("recording", &["ids", "protocol", "telemetry", "kv", "scheduler", "batch", "executor"]),
    ("engine", &ENGINE),
    ("server", &OUTSIDE),
    ("app", &OUTSIDE),
    ("config", &["*"]),
    ("cli", &["*"]),
    ("lib", &[]),
    ("main", &["*"]),
];

/// The engine puts the parts together.
const ENGINE: [&str; 13] = [
    "recording",
    "ids",
    "protocol",
    "telemetry",
    "kv",
    "scheduler",
    "batch",
    "executor",
    "sampling",
    "tokenizer",
    "model",
    "memory",
    "gpu",
];

/// Those outside hold a handle; text becomes tokens on their threads.
const OUTSIDE: [&str; 13] = [
    "constrain",
    "ids",
    "protocol",
    "telemetry",
    "tokenizer",
    "model::catalog",
    "memory",
    "config",
    "engine::handle",
    "engine::options",
    // Scaling of pooled vectors.
    "engine::pooling",
    "engine::EngineHandle",
    "engine::Run",
];

/// Words that the modules which decide and describe do not know: devices, async, windows, time, place and chance.
const DECIDING: [&str; 9] =
    ["ids", "kv", "scheduler", "batch", "sampling", "tokenizer", "model", "protocol", "telemetry"];
const NOT_FOR_DECIDING: [&str; 9] =
    ["wgpu", "tokio", "axum", "egui", "eframe", "std::time", "std::env", "rand::", "thread_rng"];

/// (modules, words, files that are exempt with the reason beside them).
const ABSENT: [(&[&str], &[&str], &[&str]); 6] = [
    // The hub part of `model` downloads: it waits, and reads where the user's cache is.
    (&DECIDING, &NOT_FOR_DECIDING, &["src/model/hub.rs", "src/model/hub/"]),
    // Settings have one origin: config (and the command line, which reads where models may be).
    (
        &["memory", "gpu", "kernels", "executor", "engine", "sim", "server", "app"],
        &["env::var", "env::var_os", "env::vars", "env::args"],
        &[],
    ),
    (&["gpu"], &["TokenId", "tokenizer", "vocab"], &[]),
    (&["kernels"], &["RequestId", "OwnerTag"], &[]),
    (&["app", "server"], &["Scheduler", "KvCache", "dyn Executor", "impl Executor"], &[]),
    (
        &["kv", "scheduler", "batch", "executor", "kernels", "engine", "sampling", "gpu"],
        &["thread_local!", "static mut"],
        &[],
    ),
];

/// A file of `src` with the module that it belongs to and its code outside tests.
struct Module {
    name: String,
    path: String,
    code: String,
}

fn modules() -> Vec<Module> {
    let src = root().join("src");
    let files = repository_files().into_iter().filter(|path| path.starts_with(&src));
    let files = files.filter(|path| path.extension().is_some_and(|x| x == "rs"));
    let read = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let below = path.strip_prefix(&src).expect("a file of src").to_string_lossy().replace('\\', "/");
        let name = below.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
        Module { name, path: format!("src/{below}"), code: without_tests(&text) }
    };
    files.map(read).filter(|module| !source::is_test_file(&module.path)).collect()
}

/// Code with comments, literals and test items blanked.
fn without_tests(text: &str) -> String {
    let code = source::code_of(text);
    let tests = source::test_lines(&code);
    let keep = |(i, line): (usize, _)| if tests.iter().any(|range| range.contains(&i)) { "" } else { line };
    code.lines().enumerate().map(keep).collect::<Vec<_>>().join("\n")
}

/// Every `crate::a::b` that `code` names, by line (from 1): first two parts, or one where no second follows.
fn crate_paths(code: &str) -> BTreeSet<(usize, String)> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        for first in heads(&code[at + "crate::".len()..]) {
            match first.1 {
                Some(rest) => {
                    found.extend(heads(rest).into_iter().map(|(part, _)| (line, format!("{}::{part}", first.0))))
                }
                None => _ = found.insert((line, first.0.to_owned())),
            };
        }
    }
    found
}

/// The first part of the path at the start of `text`, or of each path in `{…}`, with what follows its `::`.
fn heads(text: &str) -> Vec<(&str, Option<&str>)> {
    let text = text.trim_start();
    let Some(inside) = text.strip_prefix('{') else {
        let len = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        return vec![(&text[..len], text[len..].strip_prefix("::"))];
    };
    let mut depth = 0;
    let mut start = 0;
    let mut parts = Vec::new();
    for (i, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                if !inside[start..i].trim().is_empty() {
                    parts.extend(heads(&inside[start..i]));
                }
                start = i + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    parts
}

fn is_allowed(path: &str, allowed: &[&str]) -> bool {
    let first = path.split("::").next().unwrap_or_default();
    allowed.iter().any(|&entry| entry == "*" || entry == first || entry == path)
}

#[test]
fn modules_import_only_what_their_layer_allows() {
    let mut faults = Vec::new();
    for module in modules() {
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == module.name) else {
            faults.push(format!("{}:1: module {} has no line in the table of layers", module.path, module.name));
            continue;
        };
        for (line, path) in crate_paths(&module.code) {
            let is_own = path.split("::").next() == Some(&module.name);
            if !is_own && !is_allowed(&path, allowed) {
                faults.push(format!("{}:{line}: {} may not name crate::{path}", module.path, module.name));
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn words_are_absent_where_the_design_says_so() {
    let mut faults = Vec::new();
    for module in modules() {
        for (names, words, exempt) in ABSENT {
            if !names.contains(&module.name.as_str()) || exempt.iter().any(|path| module.path.starts_with(path)) {
                continue;
            }
            for (i, line) in module.code.lines().enumerate() {
                for word in words.iter().filter(|word| has_word(line, word)) {
                    faults.push(format!("{}:{}: {} may not know of {word}", module.path, i + 1, module.name));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let after = &line[at + word.len()..];
        !line[..at].ends_with(is_part) && (word.ends_with([':', '!']) || !after.starts_with(is_part))
    })
}

#[test]
fn paths_are_read_with_nested_braces_and_only_two_parts() {
    let code = "use crate::ids::{TokenId, SeqSlot};\nuse crate::{kv, model::{spec::ModelSpec, dtype}};\nlet x = crate::batch::f();\nmy_crate::no";
    let found: Vec<String> = crate_paths(code).into_iter().map(|(line, path)| format!("{line} {path}")).collect();
    assert_eq!(found, ["1 ids::SeqSlot", "1 ids::TokenId", "2 kv", "2 model::dtype", "2 model::spec", "3 batch::f"]);
    assert!(is_allowed("model::spec", &["model::spec"]) && !is_allowed("model::gguf", &["model::spec"]));
    assert!(is_allowed("ids::TokenId", &["ids"]) && is_allowed("kv", &["*"]) && !is_allowed("kv", &["ids"]));
}

#[test]
fn words_are_whole_words() {
    assert!(has_word("use wgpu::Device;", "wgpu") && has_word("std::time::Instant", "std::time"));
    assert!(!has_word("let my_wgpu = 1;", "wgpu") && !has_word("wgpu_executor", "wgpu"));
    assert!(has_word("rand::random()", "rand::") && !has_word("operand::x", "rand::"));
}
