//! Recordings: written by the engine, read back, run again, run otherwise, shown as a trace.

mod refusals;
mod traces;

use kvasir::engine::EngineHandle;
use kvasir::engine::options::{FakeFault, FakeOptions, PreemptionMode};
use kvasir::protocol::{Decoding, EngineEvent, GenerateRequest, OwnerTag, SamplingParams, StopRules};
use kvasir::recording::what_if::{Settings, what_if};
use kvasir::recording::{Header, Line, ReadError, Recorder, Recording, ReplayReport, replay, trace};
use kvasir::scheduler::Op;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A pool that is too small for all, so that requests wait, share and give way.
fn options(record: &Path) -> FakeOptions {
    FakeOptions {
        num_blocks: 25,
        block_size: 4,
        max_num_seqs: 5,
        max_num_batched_tokens: 24,
        max_model_len: 90,
        record: Some(record.to_path_buf()),
        ..FakeOptions::small()
    }
}

fn request(index: u64, max_tokens: u32) -> GenerateRequest {
    let mut prompt: Vec<u32> = (0..10).map(|i| 97 + i % 26).collect();
    prompt.extend((0..index as u32 % 7 + 1).map(|i| 65 + (index as u32 + i) % 26));
    GenerateRequest {
        owner: OwnerTag { id: index, label: format!("chat {index}") },
        prompt,
        sampling: SamplingParams { temperature: 0.7, seed: Some(index), ..SamplingParams::greedy() },
        stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
        decoding: Decoding::ONE,
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

fn record(options: FakeOptions) {
    record_with(options, 40);
}

/// Runs some requests to their ends, one of them cancelled, one stopped by a string.
fn record_with(options: FakeOptions, output: u32) {
    let engine = EngineHandle::start_fake(options);
    // All are there before the first step, so that they compete for the pool however slowly this thread runs.
    engine.pause();
    while !engine.is_paused() {
        std::thread::yield_now();
    }
    let mut runs: Vec<_> = (0..8).map(|i| engine.submit(request(i, output)).expect("queued")).collect();
    let mut stopped = request(8, output);
    stopped.stop.stop_strings = vec!["a".into(), "e".into(), "i".into()];
    runs.push(engine.submit(stopped).expect("queued"));
    engine.resume();
    let cancelled = runs.remove(3);
    while let Some(event) = cancelled.recv() {
        if matches!(event, EngineEvent::Text { .. }) {
            break;
        }
    }
    drop(cancelled);
    for run in runs {
        while run.recv().is_some() {}
    }
    engine.shutdown();
}

fn recorded(name: &str, change: impl FnOnce(&mut FakeOptions)) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    let mut options = options(&path);
    change(&mut options);
    record(options);
    (folder, path)
}

fn read(path: &Path) -> Recording {
    let file = std::fs::File::open(path).expect("a recording");
    Recording::read(std::io::BufReader::new(file)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn assert_identical(recording: &Recording) -> ReplayReport {
    let report = replay(recording, None).expect("it can be run again");
    assert!(report.identical && report.first_difference.is_none(), "{report:?}");
    report
}

#[test]
fn recorded_run_is_run_again_to_the_same_decisions() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let recording = read(&path);
    assert!(!recording.is_truncated);
    let report = assert_identical(&recording);
    assert_eq!(report.steps as usize, recording.records.len(), "no step failed");
    let has = |test: fn(&Op) -> bool| recording.ops.iter().any(|timed| test(&timed.op));
    assert!(has(|op| matches!(op, Op::Plan { plan, .. } if !plan.preempted.is_empty())), "memory was short");
    assert!(has(|op| matches!(op, Op::Finish { .. })), "a run was cancelled or stopped");
    let hits = recording.records.last().map_or(0, |record| record.kv.hit_tokens);
    assert!(hits > 0, "prefixes were shared");
    let text = std::fs::read_to_string(&path).expect("a recording");
    assert!(!text.contains("chat 1"), "names and texts stay out");
}

#[test]
fn failed_steps_and_a_lost_device_are_run_again() {
    use FakeFault::{DeviceLost, FailedWait, None as Fine, OutOfMemory, Rejected};
    let faults =
        vec![Fine, Rejected, Fine, Fine, FailedWait, OutOfMemory, Fine, Fine, Fine, DeviceLost, Fine, Rejected];
    let (_folder, path) = recorded("faults.jsonl", |options| options.faults = faults);
    let recording = read(&path);
    let report = assert_identical(&recording);
    assert!(report.steps as usize >= recording.records.len() + 5, "failed steps have no record");
    let count = |test: fn(&Op) -> bool| recording.ops.iter().filter(|timed| test(&timed.op)).count();
    assert!(count(|op| matches!(op, Op::Release)) >= 3 && count(|op| matches!(op, Op::Abandon)) >= 2);
    assert_eq!(count(|op| matches!(op, Op::Restart(_))), 1);
}

#[test]
fn swaps_and_blocks_from_disk_are_run_again() {
    let disk = tempfile::tempdir().expect("a temporary folder");
    let tiers = |options: &mut FakeOptions| {
        options.num_host_blocks = 40;
        options.preemption = PreemptionMode::Swap;
        options.prefix_cache_dir = Some(disk.path().to_path_buf());
    };
    recorded("first.jsonl", tiers);
    let (_folder, path) = recorded("second.jsonl", tiers);
    let recording = read(&path);
    assert_eq!(recording.header.kv_cache_dtype, "auto");
    assert_identical(&recording);
    let has = |test: fn(&Op) -> bool| recording.ops.iter().any(|timed| test(&timed.op));
    assert!(has(|op| matches!(op, Op::Adopt(_))), "blocks were read from disk");
    assert!(has(|op| matches!(op, Op::Plan { plan, .. } if !plan.swap_out.is_empty() && !plan.preempted.is_empty())));
    assert!(has(|op| matches!(op, Op::Plan { plan, .. } if !plan.swap_in.is_empty())), "and came back");
}

#[test]
fn first_difference_names_step_field_and_values() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let recording = read(&path);
    let at = recording.ops.iter().position(|timed| matches!(&timed.op, Op::Plan { plan, .. } if plan.step == 9));
    let mut changed = recording.clone();
    if let Op::Plan { inputs, .. } = &mut changed.ops[at.expect("a ninth step")].op {
        inputs.max_tokens = 5;
    }
    let report = replay(&changed, None).expect("it can be run");
    let difference = report.first_difference.expect("a smaller budget is another plan");
    assert_eq!((difference.step, difference.field.as_str()), (9, "plan.budget"));
    assert_eq!((difference.recorded, difference.replayed), (24.into(), 5.into()));
    assert!(!report.identical);

    let mut impossible = recording.clone();
    let add = impossible.ops.iter().find(|timed| matches!(timed.op, Op::Add(_))).expect("an arrival").clone();
    impossible.ops.insert(1, add);
    let error = replay(&impossible, None).expect_err("a request cannot come twice");
    assert!(error.to_string().contains("added twice"), "{error}");
}

#[test]
fn what_is_left_of_a_run_that_was_cut_off_is_read() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let bytes = std::fs::read(&path).expect("a recording");
    let whole = read(&path);
    let cut = Recording::read(&bytes[..bytes.len() - 9]).expect("the last line is left out");
    assert!(cut.is_truncated && cut.ops.len() + cut.records.len() + 1 == whole.ops.len() + whole.records.len());
    assert_identical(&cut);

    let mut lines: Vec<&str> = std::str::from_utf8(&bytes).expect("UTF-8").lines().collect();
    lines[4] = "{\"op\": 7}";
    let error = Recording::read((lines.join("\n") + "\n").as_bytes()).expect_err("a bad line");
    assert!(matches!(error, ReadError::Line { line: 5, .. }), "{error}");
    let newer = lines[0].replacen("\"version\":1", "\"version\":2", 1) + "\n";
    let error = Recording::read(newer.as_bytes()).expect_err("another version");
    assert!(error.to_string().contains("version 2"), "{error}");
    assert!(matches!(Recording::read(&b""[..]), Err(ReadError::Empty)));
    assert!(Recording::read(&b"not a recording\n"[..]).is_err_and(|e| e.to_string().contains("line 1")));
}

/// Takes so many bytes, then is full.
struct SmallDisk {
    written: Arc<Mutex<Vec<u8>>>,
    size: usize,
}

impl Write for SmallDisk {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut written = self.written.lock().expect("no writer panicked");
        let len = bytes.len().min(self.size - written.len());
        written.extend_from_slice(&bytes[..len]);
        if len == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(len) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn lines_of(recording: &Recording) -> (Header, Vec<Line>) {
    let ops = recording.ops.iter().cloned().map(|op| Line::Op(Box::new(op)));
    (recording.header.clone(), ops.collect())
}

#[test]
fn full_disk_ends_the_recording_and_what_was_written_is_read() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let (header, lines) = lines_of(&read(&path));
    let written = Arc::new(Mutex::new(Vec::new()));
    // How long the run is, hangs on how its steps fell: the header and the first half of the lines fit, and half of
    // the next, since a cut between two lines leaves nothing to be told.
    let bytes = |line: &Line| serde_json::to_string(line).expect("a line").len() + 1;
    let (first, rest) = lines.split_at(lines.len() / 2);
    let size =
        bytes(&Line::Header(Box::new(header.clone()))) + first.iter().map(bytes).sum::<usize>() + bytes(&rest[0]) / 2;
    let disk = SmallDisk { written: written.clone(), size };
    let mut recorder = Recorder::start(disk, header).expect("a thread");
    let mut taken = 0;
    while taken < 1_000_000 && recorder.push(lines[taken % lines.len()].clone()) {
        taken += 1;
    }
    assert!(taken < 1_000_000, "pushing ends when the disk is full");
    drop(recorder);
    let written = written.lock().expect("no writer panicked").clone();
    assert_eq!(written.len(), size);
    let rest = Recording::read(&written[..]).expect("the part that fitted");
    assert!(rest.is_truncated && !rest.ops.is_empty());
    assert_identical(&rest);
}

#[test]
fn disk_that_is_too_slow_never_makes_a_step_wait() {
    struct Stuck(std::sync::mpsc::Receiver<()>);
    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            // Until the test lets go of the other end.
            let _ = self.0.recv();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let (header, lines) = lines_of(&read(&path));
    let (let_go, held) = std::sync::mpsc::sync_channel(1);
    let mut recorder = Recorder::start(Stuck(held), header).expect("a thread");
    let mut taken = 0;
    while taken < 1_000_000 && recorder.push(lines[taken % lines.len()].clone()) {
        taken += 1;
    }
    assert!(taken < 1_000_000, "what waits for the disk is bounded");
    drop(let_go);
}

#[test]
fn what_if_answers_with_other_settings() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let recording = read(&path);
    let same = Settings { kv: recording.header.kv, scheduler: recording.header.scheduler };
    let run = |settings| what_if(&recording, settings).expect("the arrivals can be run");
    let recorded = run(same);
    assert_eq!(recorded, run(same), "the same settings give the same figures");
    let outputs = |kind: fn(&Op) -> usize| recording.ops.iter().map(|timed| kind(&timed.op)).sum::<usize>();
    assert_eq!(recorded.requests as usize, outputs(|op| usize::from(matches!(op, Op::Add(_)))));
    assert!(recorded.preemptions > 0 && recorded.hit_tokens > 0, "{recorded:?}");

    let mut large = same;
    large.kv.num_blocks = 400;
    let roomy = run(large);
    assert_eq!((roomy.preemptions, roomy.recompute_tax), (0, 0.0), "there is room for all");
    assert!(roomy.steps < recorded.steps && roomy.kv_use < recorded.kv_use, "{roomy:?}");

    let mut cold = large;
    cold.kv.enable_prefix_cache = false;
    assert_eq!(run(cold).hit_tokens, 0);

    let mut alone = large;
    alone.scheduler.max_num_seqs = 1;
    let alone = run(alone);
    assert!(alone.mean_batch <= 1.0 && alone.queue_steps > roomy.queue_steps, "{alone:?}");

    let mut tiny = same;
    tiny.kv.num_blocks = 5;
    assert!(run(tiny).refused > 0, "some requests never fit into four blocks");
}

#[test]
fn traces_follow_the_rules_of_the_format() {
    let (_folder, path) = recorded("run.jsonl", |_| {});
    let trace = trace::export(&read(&path));
    let events = trace["traceEvents"].as_array().expect("a list of events");
    let number = |event: &Value, key: &str| event[key].as_u64().unwrap_or_else(|| panic!("{key} of {event}"));
    let mut slices: std::collections::BTreeMap<(u64, u64), Vec<(u64, u64, String)>> = Default::default();
    for event in events {
        let (pid, tid, ts) = (number(event, "pid"), number(event, "tid"), number(event, "ts"));
        let name = event["name"].as_str().expect("a name").to_string();
        match event["ph"].as_str().expect("a phase") {
            "X" => slices.entry((pid, tid)).or_default().push((ts, ts + number(event, "dur"), name)),
            "C" => assert!(event["args"]["value"].is_number(), "{event}"),
            "M" => assert!(event["args"]["name"].is_string(), "{event}"),
            "s" | "f" => assert!(event["id"].is_u64() && event["cat"].is_string(), "{event}"),
            other => panic!("phase {other} is not used here"),
        }
    }
    for (track, slices) in &mut slices {
        slices.sort();
        for pair in slices.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "slices of track {track:?} overlap: {pair:?}");
        }
    }
    let names: std::collections::BTreeSet<&str> = slices.values().flatten().map(|(_, _, name)| name.as_str()).collect();
    for name in ["queued", "prefill", "decode", "preempted", "recompute", "schedule", "compute", "output"] {
        assert!(names.contains(name), "no slice {name}");
    }
    let arrows: Vec<&Value> = events.iter().filter(|e| e["ph"] == "s").collect();
    for start in &arrows {
        let end = events.iter().find(|e| e["ph"] == "f" && e["id"] == start["id"]).expect("an arrow has two ends");
        assert!(number(start, "ts") <= number(end, "ts") && start["name"] == end["name"]);
        for tip in [*start, end] {
            let at = number(tip, "ts");
            let track = &slices[&(number(tip, "pid"), number(tip, "tid"))];
            assert!(track.iter().any(|(from, to, _)| (*from..=*to).contains(&at)), "{tip} lies in no slice");
        }
    }
    for what in ["preemption", "shared prefix"] {
        assert!(arrows.iter().any(|arrow| arrow["name"] == what), "no arrow {what}");
    }
}
