//! Recordings in `tests/data/traces` lead to the same decisions as when they were made.
//!
//! They fail when their format can no longer be read, and when a change of scheduler or cache changes a decision. Where
//! that is meant, `KVASIR_RENEW_TRACES=1 cargo test --release --test suite traces` makes them anew.

use super::*;

const MAX_BYTES: u64 = 200_000;

/// A recording: its name, what the engine is, and what must have happened.
struct Trace {
    name: &'static str,
    change: fn(&mut FakeOptions),
    has: &'static [(&'static str, fn(&Op) -> bool)],
}

const TRACES: [Trace; 3] = [
    Trace {
        name: "sharing_under_pressure",
        change: |options| options.num_blocks = 17,
        has: &[
            ("a preemption", |op| matches!(op, Op::Plan { plan, .. } if !plan.preempted.is_empty())),
            ("a hit", |op| matches!(op, Op::Plan { plan, .. } if plan.admitted.iter().any(|a| a.cached_tokens > 0))),
            ("an early end", |op| matches!(op, Op::Finish { .. })),
        ],
    },
    Trace {
        name: "failed_steps",
        change: |options| {
            use FakeFault::{DeviceLost, FailedWait, None as Fine, OutOfMemory, Rejected};
            options.faults =
                vec![Fine, Rejected, Fine, FailedWait, OutOfMemory, Fine, Fine, DeviceLost, Fine, Rejected];
        },
        has: &[
            ("a released step", |op| matches!(op, Op::Release)),
            ("an abandoned step", |op| matches!(op, Op::Abandon)),
            ("a restart", |op| matches!(op, Op::Restart(_))),
        ],
    },
    Trace {
        name: "swaps_and_disk",
        change: |options| {
            options.num_blocks = 17;
            options.num_host_blocks = 40;
            options.preemption = PreemptionMode::Swap;
        },
        has: &[
            ("blocks from disk", |op| matches!(op, Op::Adopt(_))),
            ("blocks to host memory", |op| matches!(op, Op::Plan { plan, .. } if !plan.swap_out.is_empty())),
            ("and back", |op| matches!(op, Op::Plan { plan, .. } if !plan.swap_in.is_empty())),
        ],
    },
];

fn path_of(trace: &Trace) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces").join(trace.name).with_extension("jsonl")
}

/// Makes a recording anew: operations only, since the records of steps are not compared.
fn renew(trace: &Trace) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let whole = folder.path().join("whole.jsonl");
    let mut options = options(&whole);
    (trace.change)(&mut options);
    if options.num_host_blocks > 0 {
        options.prefix_cache_dir = Some(folder.path().join("disk"));
        record_with(FakeOptions { record: None, ..options.clone() }, 12);
    }
    record_with(options, 12);
    let text = std::fs::read_to_string(&whole).expect("a recording");
    let kept: String = text.lines().filter(|line| !line.starts_with("{\"record\"")).flat_map(|l| [l, "\n"]).collect();
    std::fs::create_dir_all(path_of(trace).parent().expect("a folder")).expect("a folder");
    std::fs::write(path_of(trace), kept).expect("written");
}

#[test]
fn kept_recordings_lead_to_the_same_decisions() {
    if crate::support::renews_traces() {
        TRACES.iter().for_each(renew);
    }
    let mut bytes = 0;
    for trace in &TRACES {
        let recording = read(&path_of(trace));
        for (what, test) in trace.has {
            assert!(recording.ops.iter().any(|timed| test(&timed.op)), "{} has not {what}", trace.name);
        }
        let report = replay(&recording, None).unwrap_or_else(|error| panic!("{}: {error}", trace.name));
        assert!(report.identical && report.steps > 20, "{}: {report:?}", trace.name);
        bytes += std::fs::metadata(path_of(trace)).expect("a file").len();
    }
    assert!(bytes <= MAX_BYTES, "{bytes} bytes of recordings");
}
