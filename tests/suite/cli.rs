//! The built binary as a shell sees it: exit codes, JSON shapes, broken files, closed pipes.

mod messages;

use crate::support::{core_fixtures, full_fixtures, read_json, require_gpu};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// No command of these tests may take longer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A command in a home of its own, away from the settings of whoever runs the tests.
fn kvasir(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    for name in ["KVASIR_MODEL", "KVASIR_BACKEND", "KVASIR_ADAPTER", "KVASIR_MAX_MODEL_LEN"] {
        command.env_remove(name);
    }
    command.args(args).env("KVASIR_HOME", home).env("HF_HUB_OFFLINE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The most memory that a process has held, where the system tells.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Runs to the end, or fails the test at the time limit.
fn finish(child: Child, what: &str) -> Output {
    finish_measured(child, what).0
}

/// As [`finish`], with the most memory that was seen in use.
fn finish_measured(mut child: Child, what: &str) -> (Output, u64) {
    let mut peak = 0;
    let started = Instant::now();
    let readers = [
        child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read + Send>),
        child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read + Send>),
    ]
    .map(|pipe| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                pipe.read_to_end(&mut bytes).expect("a readable pipe");
            }
            bytes
        })
    });
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child to wait for") {
            break status;
        }
        peak = peak.max(peak_bytes(child.id()));
        if started.elapsed() > TIMEOUT {
            child.kill().expect("a child to end");
            panic!("{what} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().expect("a reader that ends"));
    (Output { status, stdout, stderr }, peak)
}

fn run_in(home: &Path, args: &[&str]) -> Output {
    let child = kvasir(home, args).spawn().expect("the built binary");
    finish(child, &args.join(" "))
}

fn run(args: &[&str]) -> Output {
    let home = tempfile::tempdir().expect("a temporary folder");
    run_in(home.path(), args)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The JSON lines of a command that must succeed.
fn json_lines(args: &[&str]) -> Vec<Value> {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    let text = String::from_utf8(output.stdout).expect("UTF-8 on standard output");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{args:?}: {e}: {line}"))).collect()
}

fn fixture(path: &str) -> String {
    core_fixtures().join(path).to_str().expect("a UTF-8 path").to_owned()
}

/// True when some adapter runs; prints a line where not.
fn has_adapter() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let found = *FOUND.get_or_init(|| run(&["doctor", "--json"]).status.success());
    assert!(found || !require_gpu(), "REQUIRE_GPU is set, but there is no adapter");
    if !found {
        println!("skipped: no adapter");
    }
    found
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    let (llama, missing) = (fixture("tiny/llama"), fixture("tiny/no_such_model"));
    let text = fixture("smollm2/perplexity_text.txt");
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/traces/sharing_under_pressure.jsonl").to_owned();
    let cases: &[(i32, &[&str])] = &[
        (0, &["--help"]),
        (0, &["--version"]),
        (0, &["generate", "--help"]),
        (2, &["generate"]),
        (2, &["no-such-flag", "--no-such-flag"]),
        (2, &["generate", "hi", "--no-such-flag"]),
        (2, &["generate", "hi", "--model", &llama, "--max-tokens", "many"]),
        (2, &["generate", "hi", "--model", &llama, "-n", "3", "--best-of", "2"]),
        (2, &["generate", "hi", "--model", &llama, "--length-penalty", "2"]),
        (2, &["generate", "hi", "--model", &llama, "--early-stopping", "true"]),
        (2, &["generate", "hi", "--model", &llama, "--preemption-mode", "swap", "--swap-space", "0"]),
        (2, &["serve", &llama, "--kv-events-topic", "kv@here@it"]),
        (2, &["generate", "hi", "--model", &llama, "--backend", "cuda"]),
        (2, &["generate", "hi", "--model", &llama, "--block-size", "0"]),
        (2, &["generate", "hi", "--model", &llama, "--block-size", "3"]),
        (2, &["generate", "hi", "--model", &llama, "--max-model-len", "1"]),
        (2, &["generate", "hi", "--model", ""]),
        (2, &["tokenize", "--text", "hi", "--model", ""]),
        (2, &["estimate", ""]),
        (2, &["serve", "--model", ""]),
        (2, &["serve", "--model", "name="]),
        (2, &["replay", &trace, "--max-num-seqs", "4294967295"]),
        (2, &["replay", &trace, "--block-size", "4294967295"]),
        (2, &["replay", &trace, "--num-blocks", "4294967295"]),
        (2, &["trace", "export", &trace, "--out", &trace]),
        (2, &["eval", "logits", "--model", &llama, "--tokens", &missing, "--out", "never-written"]),
        (2, &["eval", "logits", "--model", &llama, "--tokens", &text, "--out", "never-written"]),
        (2, &["render", "--messages", &missing, "--template", &missing]),
        (3, &["generate", "hi", "--model", &missing]),
        (3, &["generate", "hi", "--model", "nobody/no-such-model-id"]),
        (3, &["inspect", &missing]),
        (3, &["inspect", &text]),
        (3, &["tokenize", "--text", "hi", "--model", &text]),
        (3, &["estimate", &missing]),
        (4, &["estimate", &llama, "--num-gpu-blocks-override", "16M", "--block-size", "256"]),
        (3, &["estimate", &llama, "--max-model-len", "8M"]),
        (5, &["generate", "hi", "--model", &llama, "--adapter", "no adapter has this name"]),
    ];
    for (want, args) in cases {
        let output = run(args);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(*want), "{args:?}: {message}");
        assert!(!message.contains("panicked"), "{args:?}: {message}");
        assert!(*want == 0 || !message.trim().is_empty() || !output.stdout.is_empty(), "{args:?} says nothing");
        assert!(*want == 0 || output.stdout.is_empty() || args[0] == "estimate", "{args:?}: faults go to stderr");
    }
}

#[test]
fn values_out_of_range_are_told_with_their_range() {
    let llama = fixture("tiny/llama");
    let cases: &[(&[&str], &str)] = &[
        (&["--cpu-offload-gb", "-1"], "cpu_offload_gb must be between 0 and 65536 GiB, not -1"),
        (&["--gpu-memory-gb", "-0.5"], "gpu_memory_gb must be between 0 and 65536 GiB, not -0.5"),
        (&["--gpu-memory-utilization", "-1"], "gpu_memory_utilization must be above 0 and at most 1, not -1"),
        (&["--max-model-len", "-1"], "`-1` is not a count"),
        (&["--max-model-len", "1"], "max_model_len must be between 2 and"),
    ];
    for (args, words) in cases {
        let args = [&["generate", "hi", "--model", &llama], *args].concat();
        let output = run(&args);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(words), "{args:?}: {message}");
    }
    let home = tempfile::tempdir().expect("a temporary folder");
    let child = kvasir(home.path(), &["generate", "hi"]).env("KVASIR_MODEL", "").spawn().expect("the built binary");
    let output = finish(child, "generate with an empty KVASIR_MODEL");
    assert!(stderr(&output).contains("KVASIR_MODEL"), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn tokenize_gives_the_ids_of_the_fixtures() {
    for model in ["tiny/llama", "tiny/qwen2_sharded", "tiny/mistral_swa"] {
        let cases = read_json(&core_fixtures().join(model).join("tokenizer_cases.json"));
        let model = fixture(model);
        // A few through the binary; every case goes through the library in `tokenizers`.
        for case in cases["cases"].as_array().expect("cases").iter().step_by(7) {
            let text = case["text"].as_str().expect("text");
            let with = json_lines(&["tokenize", "--json", "--model", &model, "--text", text]);
            assert_eq!(with[0]["ids"], case["ids"], "{model} {text:?}");
            let without = json_lines(&["tokenize", "--json", "--no-special", "--model", &model, "--text", text]);
            assert_eq!(without[0]["ids"], case["ids_no_special"], "{model} {text:?}");
            assert_eq!(without[0]["tokens"].as_array().map(Vec::len), case["ids_no_special"].as_array().map(Vec::len));
        }
    }
}

#[test]
fn tokenize_needs_no_weights() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(Path::new(&fixture("tiny/llama")).join(name), dir.path().join(name)).expect("copied");
    }
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let ids = |model: &str| json_lines(&["tokenize", "--json", "--model", model, "--text", "Hello"])[0]["ids"].clone();
    assert_eq!(ids(&text(dir.path())), ids(&fixture("tiny/llama")));
    let Some(root) = full_fixtures() else { return };
    let vocabulary = root.join("tokenizers/ggml-vocab-gpt-2.gguf");
    assert_eq!(ids(&text(&vocabulary)), json!([15496]));
}

#[test]
fn tokenize_reads_standard_input() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let model = fixture("tiny/llama");
    let mut command = kvasir(home.path(), &["tokenize", "--json", "--model", &model]);
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the built binary");
    child.stdin.take().expect("a pipe").write_all(b"Hello").expect("a reader");
    let output = finish(child, "tokenize");
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["ids"], json_lines(&["tokenize", "--json", "--model", &model, "--text", "Hello"])[0]["ids"]);
}

#[test]
fn render_gives_the_text_of_the_fixtures() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407", "google-gemma-2-2b-it"] {
        let spec = read_json(&core_fixtures().join(format!("chat_templates/{name}.json")));
        let template = fixture(&format!("chat_templates/{name}.jinja"));
        for case in spec["cases"].as_array().expect("cases") {
            let messages = dir.path().join("messages.json");
            std::fs::write(&messages, case["messages"].to_string()).expect("a writable folder");
            let mut args =
                vec!["render", "--json", "--template", &template, "--messages", messages.to_str().expect("UTF-8")];
            args.extend(["--now", spec["strftime_now"].as_str().expect("a time")]);
            for (flag, key) in
                [("--bos-token", "bos_token"), ("--eos-token", "eos_token"), ("--unk-token", "unk_token")]
            {
                args.extend(spec[key].as_str().into_iter().flat_map(|token| [flag, token]));
            }
            let tools = dir.path().join("tools.json");
            if case["tools"].is_array() {
                std::fs::write(&tools, case["tools"].to_string()).expect("a writable folder");
                args.extend(["--tools", tools.to_str().expect("UTF-8")]);
            }
            if case["add_generation_prompt"] == json!(false) {
                args.push("--no-generation-prompt");
            }
            let output = run(&args);
            let value: Value = serde_json::from_slice(&output.stdout).expect("JSON, also for a refusal");
            match case["expected"].as_str() {
                Some(expected) => assert_eq!(value["text"].as_str(), Some(expected), "{name} {}", case["name"]),
                None => assert!(value["error"].is_string() && output.status.code() == Some(1), "{name}: {value}"),
            }
        }
    }
}

#[test]
fn inspect_shows_header_and_tensors() {
    let found = json_lines(&["inspect", "--json", &fixture("gguf/q4_k/tiny-llama-Q4_K.gguf")]);
    assert_eq!(found[0]["arch"], "llama");
    assert_eq!(found[0]["metadata"]["general.architecture"], "llama");
    let tensors = found[0]["tensors"].as_array().expect("tensors");
    assert!(tensors.iter().any(|t| t["dtype"] == "Q4_K" && t["bytes"].as_u64() > Some(0) && t["shape"].is_array()));
    let found = json_lines(&["inspect", "--json", &fixture("tiny/qwen2_sharded")]);
    assert_eq!(found[0]["arch"], "qwen2");
    assert!(found[0]["metadata"]["hidden_size"].is_number());
}

#[test]
fn estimate_says_what_a_model_needs() {
    let found = json_lines(&["estimate", "--json", &fixture("tiny/llama"), "--max-model-len", "128"]);
    let found = &found[0];
    for field in ["weights_bytes", "kv_bytes_per_token", "workspace_bytes", "max_model_len"] {
        assert!(found[field].as_u64() > Some(0), "{field}: {found}");
    }
    assert_eq!((&found["fits"], &found["max_model_len"]), (&json!(true), &json!(128)));
}

#[test]
fn models_lists_what_the_settings_name() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let settings = format!(
        "[models]\ndirs = [{:?}]\nscan_hf = false\nscan_lmstudio = false\nscan_ollama = false\nscan_nowhere = 1\n",
        core_fixtures()
    );
    std::fs::write(home.path().join("config.toml"), settings).expect("a writable folder");
    let output = run_in(home.path(), &["models", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("models.scan_nowhere"), "unknown keys warn: {}", stderr(&output));
    let models: Value = serde_json::from_slice(&output.stdout).expect("one JSON array");
    let gguf =
        models.as_array().expect("a list").iter().find(|m| m["path"].as_str().is_some_and(|p| p.contains("Q4_K")));
    let gguf = gguf.expect("the GGUF of the fixtures");
    for field in ["id", "format", "arch", "params", "quant", "bytes", "context"] {
        assert!(!gguf[field].is_null(), "{field}: {gguf}");
    }
}

#[test]
fn wrong_settings_name_file_and_key() {
    let home = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(home.path().join("config.toml"), "[engine]\nblock_size = \"big\"\n").expect("a writable folder");
    let output = run_in(home.path(), &["doctor"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("block_size") && stderr(&output).contains("config.toml"), "{}", stderr(&output));
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let output = run(&["completions", shell]);
        let script = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(output.status.success() && script.contains("tokenize"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let page = String::from_utf8(run(&["man"]).stdout).expect("UTF-8");
    assert!(page.contains(".TH kvasir") && page.contains("tokenize"), "{page}");
    let home = tempfile::tempdir().expect("a temporary folder");
    let folder = home.path().join("man");
    assert!(run(&["man", "--out", folder.to_str().expect("UTF-8")]).status.success());
    let page = std::fs::read_to_string(folder.join("kvasir-serve.1")).expect("the page of a command");
    assert!(page.contains("port"), "{page}");
}

#[test]
fn a_soak_in_a_small_pool_leaves_nothing_behind() {
    if !has_adapter() {
        return;
    }
    let llama = fixture("tiny/llama");
    let pool = ["--num-gpu-blocks-override", "60", "--block-size", "8", "--check-invariants"];
    let args = ["bench", "soak", "--json", "--seconds", "3", "--max-input-len", "40", "--model", &llama];
    let lines = json_lines(&[&args[..], &pool].concat());
    let (failures, leaked) = (&lines[0]["failures"], &lines[0]["leaked_blocks"]);
    assert_eq!((failures, leaked, &lines[0]["gpu_bytes_growth"]), (&json!(0), &json!(0), &json!(0)), "{}", lines[0]);
    assert!(lines[0]["requests"].as_u64() > Some(8), "{}", lines[0]);
}

#[test]
fn a_reader_that_goes_away_ends_a_command_quietly() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let gguf = fixture("gguf/q4_k/tiny-llama-Q4_K.gguf");
    for args in [&["completions", "zsh"][..], &["inspect", &gguf], &["inspect", "--json", &gguf], &["--help"]] {
        let mut child = kvasir(home.path(), args).spawn().expect("the built binary");
        drop(child.stdout.take());
        let output = finish(child, "a command without a reader");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn every_malformed_model_ends_in_a_message() {
    let Some(root) = full_fixtures().map(|f| f.join("malformed")) else { return };
    for case in read_json(&root.join("manifest.json"))["cases"].as_array().expect("cases") {
        let name = case["path"].as_str().expect("a path");
        let is_control = case["fault"].as_str().is_some_and(|f| f.starts_with("none"));
        let lenient = case["lenient_loading_acceptable"] == json!(true);
        if is_control && !has_adapter() {
            continue;
        }
        let path = root.join(name);
        let mut args = vec!["generate", "hello", "--max-tokens", "2", "--model", path.to_str().expect("UTF-8")];
        args.extend(case["stage"].as_str().filter(|s| s.starts_with("chat")).map(|_| "--chat"));
        let home = tempfile::tempdir().expect("a temporary folder");
        let started = Instant::now();
        let (output, peak) = finish_measured(kvasir(home.path(), &args).spawn().expect("the built binary"), name);
        let (code, message) = (output.status.code(), stderr(&output));
        if code != Some(0) && case["stage"] == "load" {
            assert!(started.elapsed() < Duration::from_secs(10), "{name} took {:?}", started.elapsed());
            assert!(peak <= 300 << 20, "{name} took {} MiB", peak >> 20);
        }
        assert!(code.is_some() && code != Some(101) && !message.contains("panicked"), "{name}: {code:?} {message}");
        if is_control {
            assert_eq!(code, Some(0), "{name} is valid: {message}");
        } else {
            assert!(code != Some(0) || lenient, "{name} is accepted ({})", case["fault"]);
        }
        assert!(code == Some(0) || !message.trim().is_empty(), "{name}: no message");
    }
}

#[test]
fn quantize_writes_a_smaller_folder_and_says_what_it_costs() {
    if !has_adapter() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (model, out) = (fixture("tiny/llama"), dir.path().join("q"));
    let text = dir.path().join("text");
    std::fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(4)).expect("written");
    let [out, text] = [&out, &text].map(|path| path.to_str().expect("UTF-8"));
    let args = ["quantize", &model, out, "--text", text, "--calibrate", text, "--calibration-tokens", "24", "--json"];
    let got = &json_lines(&args)[0];
    let number = |key: &str| got[key].as_f64().unwrap_or_else(|| panic!("{key} of {got}"));
    assert!(number("bytes_after") < number("bytes_before") && number("quantised") > 0.0, "{got}");
    let ratio = number("ppl_after") / number("ppl_before");
    assert!((0.8..1.25).contains(&ratio), "{got}");
    let again = run(&["quantize", &model, out]);
    assert!(again.status.code() == Some(2) && stderr(&again).contains("exists already"), "{}", stderr(&again));
}

#[test]
fn generate_reports_tokens_usage_and_timings() {
    if !has_adapter() {
        return;
    }
    let model = fixture("tiny/llama");
    let args = ["generate", "Hello", "--prompt", "The", "--model", &model, "--json", "--temperature", "0"];
    let args = [&args[..], &["--max-tokens", "5", "--ignore-eos", "-n", "2", "--logprobs", "3"]].concat();
    let lines = json_lines(&args);
    assert_eq!(lines.len(), 2, "one line per prompt");
    for line in &lines {
        let outputs = line["outputs"].as_array().expect("outputs");
        assert_eq!(outputs.len(), 2);
        for (index, output) in outputs.iter().enumerate() {
            assert_eq!((&output["index"], &output["finish_reason"]), (&json!(index), &json!("length")));
            assert_eq!(output["token_ids"].as_array().map(Vec::len), Some(5));
            assert_eq!(output["logprobs"][4]["top"].as_array().map(Vec::len), Some(3));
            assert_eq!(output["logprobs"][0]["token_id"], output["token_ids"][0]);
        }
        assert_eq!(outputs[0]["token_ids"], outputs[1]["token_ids"], "greedy outputs are equal");
        assert_eq!(line["usage"]["completion_tokens"], 10);
        assert!(line["timings"]["ttft_ms"].as_f64() > Some(0.0) && line["timings"]["decode_tok_s"].is_number());
    }
    let ids = &json_lines(&["tokenize", "--json", "--model", &model, "--text", "Hello"])[0]["ids"];
    assert_eq!(lines[0]["prompt_tokens"].as_u64(), ids.as_array().map(|ids| ids.len() as u64));
}

#[test]
fn generate_finds_what_it_pinned_first() {
    if !has_adapter() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (pin, prompt, short) =
        (dir.path().join("pin.json"), dir.path().join("prompt.json"), dir.path().join("short.txt"));
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 500).collect();
    std::fs::write(&pin, json!(ids).to_string()).expect("a writable folder");
    std::fs::write(&prompt, json!([ids]).to_string()).expect("a writable folder");
    std::fs::write(&short, "Hi").expect("a writable folder");
    let [pin, prompt, short] = [&pin, &prompt, &short].map(|path| path.to_str().expect("UTF-8"));
    let model = fixture("tiny/llama");
    let args =
        ["generate", "--token-ids", prompt, "--model", &model, "--json", "--temperature", "0", "--max-tokens", "3"];
    let plain = json_lines(&args);
    let pinned = json_lines(&[&args[..], &["--pin-prefix", pin]].concat());
    assert_eq!(plain[0]["outputs"][0]["token_ids"], pinned[0]["outputs"][0]["token_ids"]);
    let cached = |lines: &[Value]| lines[0]["usage"]["cached_tokens"].clone();
    assert_eq!((cached(&plain), cached(&pinned)), (json!(0), json!(32)));
    let refused = run(&[&args[..], &["--pin-prefix", short]].concat());
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.contains("fill a block"), "{message}");
}

#[test]
fn choices_are_what_their_seeds_give_alone_and_the_best_are_among_them() {
    if !has_adapter() {
        return;
    }
    let model = fixture("tiny/llama");
    let run = |extra: &[&str]| {
        let args = ["generate", "Hello there, how", "--model", &model, "--json", "--temperature", "1", "--ignore-eos"];
        json_lines(&[&args[..], &["--max-tokens", "9", "--logprobs", "1", "--block-size", "8"], extra].concat())
            .remove(0)
    };
    let several = run(&["-n", "3", "--seed", "5"]);
    for choice in 0..3u64 {
        let seed = 5u64.wrapping_add(choice.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_string();
        let (of_several, alone) = (&several["outputs"][choice as usize], &run(&["--seed", &seed])["outputs"][0]);
        for field in ["text", "token_ids", "finish_reason", "logprobs"] {
            assert_eq!(of_several[field], alone[field], "{field} of choice {choice}");
        }
    }
    assert_ne!(several["outputs"][0]["token_ids"], several["outputs"][1]["token_ids"]);
    assert_eq!((&several["usage"]["completion_tokens"], &several["outputs"][2]["index"]), (&json!(27), &json!(2)));
    let best = run(&["-n", "1", "--best-of", "3", "--seed", "5"]);
    let sum = |output: &serde_json::Value| -> f64 {
        output["logprobs"].as_array().expect("logprobs").iter().filter_map(|row| row["logprob"].as_f64()).sum()
    };
    let all = several["outputs"].as_array().expect("outputs");
    let likeliest = all.iter().max_by(|a, b| sum(a).total_cmp(&sum(b))).expect("three outputs");
    assert_eq!(best["outputs"][0]["token_ids"], likeliest["token_ids"]);
    assert_eq!(best["outputs"].as_array().map(Vec::len), Some(1));
}

#[test]
fn eval_logits_writes_a_row_per_position() {
    if !has_adapter() {
        return;
    }
    eval_logits_of(&fixture("tiny/llama"));
    // Layer groups have a table each.
    let grouped = full_fixtures().map(|dir| dir.join("tiny/gemma3_text"));
    grouped.iter().for_each(|dir| eval_logits_of(dir.to_str().expect("a UTF-8 path")));
}

fn eval_logits_of(model: &str) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (tokens, out) = (dir.path().join("tokens.json"), dir.path().join("out.safetensors"));
    std::fs::write(&tokens, "[[0, 44, 73, 385, 83], [7]]").expect("a writable folder");
    let (tokens, out_path) = (tokens.to_str().expect("UTF-8"), out.to_str().expect("UTF-8"));
    let mut seen: Vec<Vec<u8>> = Vec::new();
    for extra in [&[][..], &["--chunk", "2"], &["--batched"], &["--block-size", "8"]] {
        let args = ["eval", "logits", "--json", "--precise", "--model", model, "--tokens", tokens, "--out", out_path];
        let lines = json_lines(&[&args[..], extra].concat());
        assert_eq!((&lines[0]["prompts"], &lines[0]["tokens"]), (&json!(2), &json!(6)));
        let bytes = std::fs::read(&out).expect("the written file");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
        assert_eq!(file.tensor("logits.0").expect("a tensor").shape()[0], 5);
        assert_eq!(file.tensor("logits.1").expect("a tensor").shape()[0], 1);
        seen.push(file.tensor("logits.0").expect("a tensor").data().to_vec());
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "cutting differently changes no bit");
}

#[test]
fn bench_sim_runs_without_failures() {
    let lines = json_lines(&["bench", "sim", "--json", "--worlds", "50", "--load-steps", "50"]);
    assert_eq!((&lines[0]["worlds"], &lines[0]["failures"]), (&json!(50), &json!(0)));
    assert!(lines[0]["steps"].as_u64() > Some(50) && lines[0]["steps_s"].as_f64() > Some(0.0));
    let (load, planning) = (&lines[0]["load"], &lines[0]["planning"]);
    assert_eq!((&load["sequences"], &load["blocks"], &load["steps"]), (&json!(64), &json!(4096), &json!(50)));
    assert_eq!((&planning["running"], &planning["waiting"]), (&json!(256), &json!(10_000)));
    assert!(load["steps_s"].as_f64() > Some(0.0) && planning["us_p50"].as_f64() > Some(0.0));
}

#[test]
fn serve_tells_a_taken_port_and_ends_well_on_a_signal() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let llama = fixture("tiny/llama");
    let output = run(&["serve", &llama, "--port", &port]);
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stderr(&output).contains("--port"), "{}", stderr(&output));
    let output = run(&["serve", "no-such-model-here", "--port", "0"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    let broken = fixture("smollm2/perplexity_text.txt");
    let output = run(&["serve", &broken, "--port", "0"]);
    assert_eq!(output.status.code(), Some(3), "a model that cannot be loaded ends the server: {}", stderr(&output));
}

#[test]
fn a_block_damaged_on_purpose_is_caught_with_its_name() {
    if !has_adapter() {
        return;
    }
    for dtype in ["f16", "int8"] {
        let llama = fixture("tiny/llama");
        let told = json_lines(&["doctor", "--canary", "--json", "--model", &llama, "--kv-cache-dtype", dtype]);
        let canary = &told.last().expect("an answer")["canary"];
        assert_eq!(canary["caught"], json!(true), "{told:?}");
        let block = canary["block"].as_u64().expect("a block");
        assert!(canary["told"].as_str().is_some_and(|text| text.contains(&format!("block {block}"))), "{told:?}");
    }
}

#[test]
fn predictions_are_compared_with_those_of_another_cache() {
    if !has_adapter() {
        return;
    }
    let (llama, text) = (fixture("tiny/llama"), fixture("smollm2/perplexity_text.txt"));
    let home = tempfile::tempdir().expect("a temporary folder");
    let short = home.path().join("text.txt");
    let start: String = std::fs::read_to_string(&text).expect("a text").chars().take(600).collect();
    std::fs::write(&short, start).expect("written");
    let short = short.to_str().expect("a UTF-8 path");
    let measure = |dtype: &str| {
        let args =
            ["eval", "divergence", short, "--model", &llama, "--json", "--kv-cache-dtype", dtype, "--chunk", "50"];
        json_lines(&args).remove(0)
    };
    let same = measure("f16");
    assert_eq!((same["kl_max"].as_f64(), same["same_top"].as_f64()), (Some(0.0), Some(1.0)), "{same}");
    let int8 = measure("int8");
    let mean = int8["kl_mean"].as_f64().expect("a number");
    assert!(mean > 0.0 && mean < 1e-2, "{int8}");
    assert_eq!(same["ppl_from"], int8["ppl_from"]);
}
