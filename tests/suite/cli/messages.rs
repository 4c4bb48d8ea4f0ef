//! What commands say when something is not as it should be: the place, the fault, what helps.

use super::*;

#[test]
fn offline_the_default_model_is_not_fetched() {
    for args in [&["models", "pull", "default"][..], &["generate", "hi"], &["tokenize", "--text", "hi"]] {
        let output = run(args);
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {told}");
        assert!(told.contains("HF_HUB_OFFLINE forbids") && told.contains("unset HF_HUB_OFFLINE"), "{args:?}: {told}");
    }
}

#[test]
fn estimate_says_whether_the_model_fits_what_was_told() {
    let llama = fixture("tiny/llama");
    let output = run(&["estimate", &llama, "--max-model-len", "128", "--gpu-memory-gb", "0.2"]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("yes, in the 215 MB of --gpu-memory-gb") && !told.contains("free now"), "{told}");
    let output = run(&["estimate", &llama, "--max-model-len", "128"]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.lines().any(|line| line.starts_with("fits ")), "{told}");
}

#[test]
fn a_wrong_adapter_is_answered_with_the_names_that_there_are() {
    if !has_adapter() {
        return;
    }
    let llama = fixture("tiny/llama");
    for args in [&["generate", "hi", "--model", &llama, "--adapter", "nope"][..], &["doctor", "--adapter", "nope"]] {
        let output = run(args);
        let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
        assert_eq!(output.status.code(), Some(5), "{args:?}: {told}");
        assert!(told.contains("there are `") && told.contains("a part of one of these names"), "{args:?}: {told}");
        assert!(!told.contains("install a Vulkan driver"), "{args:?}: {told}");
    }
}

#[test]
fn a_place_that_cannot_be_written_is_told_as_such() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "no folder").expect("written");
    let out = file.join("out");
    let output = run(&["quantize", &fixture("tiny/llama"), out.to_str().expect("UTF-8")]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("cannot be written") && told.contains("file/out"), "{told}");
}

#[test]
fn embed_names_the_line_that_it_cannot_take() {
    if !has_adapter() {
        return;
    }
    let home = tempfile::tempdir().expect("a temporary folder");
    let args = ["embed", "--model", &fixture("tiny/llama"), "--pooling", "mean", "--max-model-len", "16"];
    let mut child = kvasir(home.path(), &args).stdin(Stdio::piped()).spawn().expect("the built binary");
    let lines = format!("short\n{}\nshort\n", "a long line ".repeat(30));
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("written");
    let output = finish(child, "embed");
    assert!(!output.status.success() && stderr(&output).contains("line 2: "), "{}", stderr(&output));
}
