//! What is no recording of ours, and what of one cannot be run with other settings, is said in words.

use super::*;
use kvasir::protocol::{BeamParams, EarlyStopping};
use kvasir::recording::what_if::{LeftOut, left_out};

#[test]
fn numbers_that_no_engine_has_are_refused_before_anything_is_allocated() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let text = std::fs::read_to_string(&path).expect("a recording");
    let (header, rest) = text.split_once('\n').expect("lines");
    let refused = |section: &str, field: &str, value: u64| {
        let mut changed: Value = serde_json::from_str(header).expect("a header");
        let fields = if section.is_empty() { &mut changed["header"] } else { &mut changed["header"][section] };
        assert!(fields[field].is_number(), "{section}.{field} is there");
        fields[field] = value.into();
        let error = Recording::read(format!("{changed}\n{rest}").as_bytes()).expect_err("a number out of range");
        let error = error.to_string();
        assert!(error.contains("line 1") && error.contains(field) && error.contains(&value.to_string()), "{error}");
    };
    for value in [0, 1, u64::from(u32::MAX)] {
        refused("kv", "num_blocks", value);
    }
    for value in [0, u64::from(u32::MAX)] {
        refused("kv", "block_size", value);
        refused("scheduler", "max_num_seqs", value);
        refused("scheduler", "max_tokens_per_step", value);
        refused("scheduler", "max_model_len", value);
    }
    refused("scheduler", "aging_steps", 0);
    refused("scheduler", "long_prefill_cap", 0);
    refused("", "num_host_blocks", u64::from(u32::MAX));

    let recording = read(&path);
    let mut settings = Settings { kv: recording.header.kv, scheduler: recording.header.scheduler };
    settings.kv.block_size = u32::MAX;
    let error = what_if(&recording, settings).expect_err("no such block").to_string();
    assert!(error.contains("kv.block_size is 4294967295"), "{error}");
}

/// A search with beams beside so many plain requests.
fn with_search(num_plain: u64) -> Recording {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.jsonl");
    let roomy = FakeOptions { num_blocks: 200, ..options(&path) };
    let engine = EngineHandle::start_fake(roomy);
    let beams = BeamParams { width: 3, num_return: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    let search =
        GenerateRequest { decoding: Decoding::Beam(beams), sampling: SamplingParams::greedy(), ..request(0, 12) };
    let requests = [search].into_iter().chain((1..=num_plain).map(|i| request(i, 12)));
    let runs: Vec<_> = requests.map(|request| engine.submit(request).expect("queued")).collect();
    for run in runs {
        while run.recv().is_some() {}
    }
    engine.shutdown();
    read(&path)
}

#[test]
fn what_other_settings_leave_out_is_counted() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let recording = read(&path);
    assert_eq!(left_out(&recording).beam_searches, 0);

    let both = with_search(3);
    let left = left_out(&both);
    assert_eq!(left, LeftOut { beam_searches: 1, ..LeftOut::default() });
    assert_eq!(left.words().as_deref(), Some("1 search with beams"));
    let same = Settings { kv: both.header.kv, scheduler: both.header.scheduler };
    assert_eq!(what_if(&both, same).expect("three requests are left").requests, 3);

    let alone = with_search(0);
    let same = Settings { kv: alone.header.kv, scheduler: alone.header.scheduler };
    let error = what_if(&alone, same).expect_err("nothing is left").to_string();
    assert!(error.contains("1 search with beams only"), "{error}");
}

#[test]
fn a_file_that_holds_something_else_is_not_recorded_over() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let notes = folder.path().join("notes.txt");
    std::fs::write(&notes, "not to be lost\n").expect("a file");
    record(options(&notes));
    assert_eq!(std::fs::read_to_string(&notes).expect("a file"), "not to be lost\n");
    // A recording gives way to the next one, and so does an empty file.
    for start in [&b""[..], b"{\"header\":{\"version\":0}}\n"] {
        let path = folder.path().join("run.jsonl");
        std::fs::write(&path, start).expect("a file");
        record(options(&path));
        assert!(!read(&path).records.is_empty());
    }
}
