//! The habits that a machine can check, each reported as `file:line: rule`.
//!
//! Every rule is a function from one file's text to faults, tried on a bad example below and on every file of the
//! repository above it. Data for tests (`tests/data`, `tests/snapshots`) is not ours to tidy.

pub mod source;

use std::path::{Path, PathBuf};

const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 100;
/// Kernels keep their accumulators as named variables, so an entry point cannot be cut into functions as freely.
const MAX_SHADER_FUNCTION_LINES: usize = 240;
const MAX_FILE_BYTES: u64 = 5 << 20;

/// A file and its place in the repository.
struct File {
    path: String,
    text: String,
}

/// Line (from 1) and rule.
type Fault = (usize, String);

type Rule = fn(&File) -> Vec<Fault>;

const RULES: [Rule; 11] = [
    files_are_short,
    functions_are_short,
    nothing_is_left_open,
    code_is_not_commented_out,
    no_unwrap_in_the_product,
    no_tabs_or_trailing_spaces,
    exceptions_have_a_reason,
    no_machine_paths,
    no_registry_hosts,
    modules_say_what_they_are,
    colours_come_from_the_theme,
];

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the repository, by path from its root, without build output and git's own.
pub fn repository_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("readable entry").path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            match path.is_dir() {
                true if folder == root() && matches!(name.as_str(), "target" | ".git") => {}
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

fn path_in_repository(path: &Path) -> String {
    let path = path.strip_prefix(root()).expect("a file of the repository");
    path.to_string_lossy().replace('\\', "/")
}

fn is_test_data(path: &str) -> bool {
    path.starts_with("tests/data/") || path.starts_with("tests/snapshots/")
}

fn is_text(path: &str) -> bool {
    let extension = path.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map(|(_, extension)| extension);
    matches!(extension, Some("rs" | "wgsl" | "toml" | "md" | "sh" | "txt" | "yml")) || path == ".ci/run"
}

#[test]
fn repository_is_tidy() {
    let mut faults = Vec::new();
    let mut num_files = 0;
    for path in repository_files() {
        let name = path_in_repository(&path);
        if is_test_data(&name) || !is_text(&name) || name == "Cargo.lock" {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        num_files += 1;
        let file = File { path: name, text };
        for rule in RULES {
            faults.extend(rule(&file).into_iter().map(|(line, what)| format!("{}:{line}: {what}", file.path)));
        }
    }
    assert!(num_files > 20, "only {num_files} files were looked at");
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn files_are_small_enough_for_a_clone() {
    for path in repository_files() {
        let bytes = path.metadata().map_or(0, |m| m.len());
        assert!(bytes <= MAX_FILE_BYTES, "{}: {bytes} bytes, the limit is {MAX_FILE_BYTES}", path.display());
    }
}

#[test]
fn every_kernel_file_has_a_line_in_variants() {
    let kernels = root().join("shaders/kernels");
    let list = root().join("shaders/variants.txt");
    let variants = std::fs::read_to_string(&list).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    // A line reads `kernel: defines`.
    let listed = |kernel: &str| variants.lines().any(|line| line.split(':').next() == Some(kernel));
    let names = crate::support::files_with_extension(&kernels, "wgsl").into_iter();
    let names = names.filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned()));
    let missing: Vec<String> = names.filter(|name| !listed(name)).collect();
    assert!(missing.is_empty(), "shaders/variants.txt:1: no line for the kernels {}", missing.join(", "));
}

fn is_rust(file: &File) -> bool {
    file.path.ends_with(".rs")
}

fn is_code(file: &File) -> bool {
    is_rust(file) || file.path.ends_with(".wgsl")
}

/// Lines of `text` that hold `mark`, as faults.
fn lines_with(text: &str, mark: &str, what: &str) -> Vec<Fault> {
    let lines = text.lines().enumerate();
    lines.filter(|(_, line)| line.contains(mark)).map(|(i, _)| (i + 1, what.to_owned())).collect()
}

fn files_are_short(file: &File) -> Vec<Fault> {
    let num_lines = file.text.lines().count();
    let is_long = is_code(file) && num_lines > MAX_FILE_LINES;
    is_long.then(|| (1, format!("{num_lines} lines, the limit is {MAX_FILE_LINES}"))).into_iter().collect()
}

fn functions_are_short(file: &File) -> Vec<Fault> {
    if !is_code(file) {
        return Vec::new();
    }
    let limit = if is_rust(file) { MAX_FUNCTION_LINES } else { MAX_SHADER_FUNCTION_LINES };
    let functions = source::functions(&source::code_of(&file.text));
    let long = functions.into_iter().filter(|f| f.lines.len() > limit);
    long.map(|f| {
        let what = format!("function {} has {} lines, the limit is {limit}", f.name, f.lines.len());
        (f.lines.start + 1, what)
    })
    .collect()
}

fn nothing_is_left_open(file: &File) -> Vec<Fault> {
    if !is_code(file) {
        return Vec::new();
    }
    let code = source::code_of(&file.text);
    // Spelled in parts, so that a plain search for them does not stop here.
    let marks = [concat!("to", "do!("), concat!("un", "implemented!("), concat!("#[ig", "nore"), concat!("d", "bg!(")];
    marks.into_iter().flat_map(|mark| lines_with(&code, mark, &format!("{mark} is left"))).collect()
}

fn code_is_not_commented_out(file: &File) -> Vec<Fault> {
    if !is_code(file) {
        return Vec::new();
    }
    let starts = ["let ", "fn ", "pub ", "use ", "mod ", "return", "if ", "for ", "match ", "var ", "assert", "#["];
    let looks_like_code = |line: &str| {
        let Some(comment) = line.trim().strip_prefix("// ") else { return false };
        let ends = comment.ends_with(';') || comment.ends_with(" {");
        (ends && starts.iter().any(|start| comment.starts_with(start))) || comment == "}"
    };
    let lines = file.text.lines().enumerate().filter(|(_, line)| looks_like_code(line));
    lines.map(|(i, _)| (i + 1, "code is commented out".to_owned())).collect()
}

fn no_unwrap_in_the_product(file: &File) -> Vec<Fault> {
    if !file.path.starts_with("src/") || !is_rust(file) {
        return Vec::new();
    }
    let faults = lines_with(&source::code_of(&file.text), ".unwrap()", "unwrap() outside tests");
    outside_tests(file, faults)
}

/// The faults that are not in items under `#[cfg(test)]`.
fn outside_tests(file: &File, faults: Vec<Fault>) -> Vec<Fault> {
    if source::is_test_file(&file.path) {
        return Vec::new();
    }
    let tests = source::test_lines(&source::code_of(&file.text));
    faults.into_iter().filter(|(line, _)| !tests.iter().any(|range| range.contains(&(line - 1)))).collect()
}

fn no_tabs_or_trailing_spaces(file: &File) -> Vec<Fault> {
    // Written by a test: a kernel without defines has nothing after its colon.
    if file.path == "shaders/variants.txt" {
        return Vec::new();
    }
    let mut faults = lines_with(&file.text, "\t", "a tab");
    for (i, line) in file.text.lines().enumerate() {
        if line.ends_with(' ') {
            faults.push((i + 1, "a space at the end".to_owned()));
        }
    }
    faults
}

fn exceptions_have_a_reason(file: &File) -> Vec<Fault> {
    if !is_rust(file) {
        return Vec::new();
    }
    let code = source::code_of(&file.text);
    let mut faults = Vec::new();
    for mark in ["[allow(", "[expect("] {
        for (at, _) in code.match_indices(mark) {
            let end = code[at..].find(']').map_or(code.len(), |len| at + len);
            if !code[at..end].contains("reason") {
                let line = code[..at].matches('\n').count() + 1;
                faults.push((line, format!("#{mark}…)] without a reason")));
            }
        }
    }
    faults
}

fn no_machine_paths(file: &File) -> Vec<Fault> {
    // The X server's socket folder has a fixed place.
    let text = file.text.replace("/tmp/.X11-unix", "");
    let places = ["/home/", "/root/", "/tmp/", concat!("/wo", "rk/"), "/Users/"];
    let faults = places.into_iter().flat_map(|place| {
        let is_start = move |line: &str| {
            line.match_indices(place)
                .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "}~./$".contains(c)))
        };
        let lines: Vec<usize> =
            text.lines().enumerate().filter(|(_, line)| is_start(line)).map(|(i, _)| i + 1).collect();
        lines.into_iter().map(move |line| (line, format!("the path {place} of one machine")))
    });
    let faults = faults.collect();
    outside_tests(file, faults)
}

fn no_registry_hosts(file: &File) -> Vec<Fault> {
    // This file has the list itself.
    if file.path == "tests/suite/tidy.rs" {
        return Vec::new();
    }
    let hosts = ["pypi.org", "pythonhosted.org", "crates.io", "npmjs.", "rubygems.org", "proxy.golang.org"];
    hosts.into_iter().flat_map(|host| lines_with(&file.text, host, &format!("the registry host {host}"))).collect()
}

fn modules_say_what_they_are(file: &File) -> Vec<Fault> {
    let is_silent = is_rust(file) && file.path.starts_with("src/") && !file.text.starts_with("//! ");
    is_silent.then(|| (1, "the file does not start with a //! line".to_owned())).into_iter().collect()
}

fn colours_come_from_the_theme(file: &File) -> Vec<Fault> {
    if !file.path.starts_with("src/app/") || file.path == "src/app/theme.rs" {
        return Vec::new();
    }
    let code = source::code_of(&file.text);
    let marks = ["Color32::from_rgb", "Color32::from_gray", "Color32::from_black", "Color32::from_white"];
    let faults = marks.into_iter().flat_map(|mark| lines_with(&code, mark, "a colour by number outside theme.rs"));
    outside_tests(file, faults.collect())
}

/// Runs one rule over one text; the lines of its faults.
fn lines_of(rule: Rule, path: &str, text: &str) -> Vec<usize> {
    let file = File { path: path.to_owned(), text: text.to_owned() };
    rule(&file).into_iter().map(|(line, _)| line).collect()
}

#[test]
fn rules_find_what_they_forbid() {
    let long_file = "x\n".repeat(MAX_FILE_LINES + 1);
    let long_function = format!("// one\nfn f() {{\n{}}}\n", "    g();\n".repeat(MAX_FUNCTION_LINES));
    let table: [(Rule, &str, &str, &[usize]); 26] = [
        (files_are_short, "src/a.rs", &long_file, &[1]),
        (files_are_short, "README.md", &long_file, &[]),
        (functions_are_short, "src/a.rs", &long_function, &[2]),
        (nothing_is_left_open, "src/a.rs", concat!("a\nfn f() { to", "do!() }"), &[2]),
        (nothing_is_left_open, "src/a.rs", concat!("#[ig", "nore = \"slow\"]\nd", "bg!(x)"), &[1, 2]),
        (nothing_is_left_open, "src/a.rs", concat!("// to", "do!() is no way\nlet s = \"d", "bg!(\";"), &[]),
        (code_is_not_commented_out, "src/a.rs", "// let x = 1;\n// if so, it ends\n//     }", &[1]),
        (code_is_not_commented_out, "src/a.rs", "/// let x = 1;\n// for all rows (and no other); good", &[]),
        (no_unwrap_in_the_product, "src/a.rs", "x.unwrap()\n#[cfg(test)]\nmod t {\n y.unwrap() }", &[1]),
        (no_unwrap_in_the_product, "tests/suite/a.rs", "x.unwrap()", &[]),
        (no_unwrap_in_the_product, "src/a/tests.rs", "x.unwrap()", &[]),
        (functions_are_short, "shaders/kernels/a.wgsl", &long_function, &[]),
        (no_tabs_or_trailing_spaces, "README.md", "a\tb\nc \nd", &[1, 2]),
        (exceptions_have_a_reason, "src/a.rs", "x\n#[allow(dead_code)]", &[2]),
        (exceptions_have_a_reason, "src/a.rs", "#![allow(\n  dead_code,\n  reason = \"shared\"\n)]", &[]),
        (exceptions_have_a_reason, "src/a.rs", "#[expect(dead_code)]", &[1]),
        (no_machine_paths, "src/a.rs", "let p = \"/home/me/x\";", &[1]),
        (no_machine_paths, "scripts/a.sh", concat!("cd /wo", "rk/x\nls $HOME/tmp/y ~/wo", "rk/z"), &[1]),
        (no_machine_paths, "tests/suite/a.rs", "\"/tmp/x\"", &[]),
        (no_registry_hosts, "src/a.rs", "let h = \"pypi.org\";", &[1]),
        (no_registry_hosts, "README.md", "crates in the registry", &[]),
        (modules_say_what_they_are, "src/a.rs", "use x;", &[1]),
        (modules_say_what_they_are, "src/a.rs", "//! Words.\nuse x;", &[]),
        (modules_say_what_they_are, "tests/suite/a.rs", "use x;", &[]),
        (colours_come_from_the_theme, "src/app/views/a.rs", "let c = Color32::from_rgb(1, 2, 3);", &[1]),
        (colours_come_from_the_theme, "src/app/theme.rs", "let c = Color32::from_gray(3);", &[]),
    ];
    for (i, (rule, path, text, expected)) in table.into_iter().enumerate() {
        assert_eq!(lines_of(rule, path, text), expected, "example {i}: {path}: {text:.60}");
    }
}
