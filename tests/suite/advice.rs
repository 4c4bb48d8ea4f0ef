//! A model that does not fit is refused with the smallest change that does: the advice is taken, by its words, and loads.

use crate::support::{core_fixtures, started};
use clap::Parser;
use kvasir::config::{EngineArgs, EngineSection};
use kvasir::engine::handle::FailureKind;
use kvasir::engine::memory_plan::{EnginePlan, Machine, plan};
use kvasir::engine::options::{EngineOptions, LoadRequest, ModelSource};
use kvasir::model::Model;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Flags with their values.
type Flags = BTreeMap<String, String>;

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    engine: EngineArgs,
}

fn flags(text: &str) -> Flags {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.chunks(2).map(|pair| (pair[0].to_owned(), pair[1].to_owned())).collect()
}

/// Options as the command line reads them, on an adapter with so much memory.
fn options(flags: &Flags, gpu_bytes: u64) -> EngineOptions {
    let gib = gpu_bytes as f64 / f64::from(1 << 30);
    let fixed = format!("kvasir --gpu-memory-utilization 1 --gpu-memory-gb {gib}");
    let words = fixed.split(' ').chain(flags.iter().flat_map(|(flag, value)| [flag.as_str(), value.as_str()]));
    let args = Args::try_parse_from(words).unwrap_or_else(|e| panic!("{e}"));
    args.engine.resolve(&EngineSection::default(), Path::new("cache"), Some(1)).expect("options")
}

struct Case {
    folder: PathBuf,
    model: Model,
    gpu_bytes: u64,
    flags: Flags,
}

impl Case {
    /// A model of the fixtures with these flags, on an adapter that lacks so much of the memory that they take at least.
    fn new(name: &str, text: &str, missing_kib: u64) -> Case {
        let folder = core_fixtures().join("tiny").join(name);
        let model = Model::open(&folder).unwrap_or_else(|e| panic!("{e}"));
        let mut case = Case { folder, model, gpu_bytes: 0, flags: flags(text) };
        let (mut low, mut high) = (0, 1 << 36);
        while high - low > 1 {
            case.gpu_bytes = (low + high) / 2;
            *(if case.plan(&case.flags).is_ok() { &mut high } else { &mut low }) = case.gpu_bytes;
        }
        case.gpu_bytes = high - (missing_kib << 10);
        case
    }

    fn plan(&self, flags: &Flags) -> Result<EnginePlan, kvasir::engine::loader::LoadFailure> {
        let machine = Machine { is_cpu: false, available_bytes: None, max_binding_bytes: 128 << 20 };
        plan(&self.model, &options(flags, self.gpu_bytes), machine)
    }

    fn with(&self, changes: &Flags) -> Flags {
        self.flags.clone().into_iter().chain(changes.clone()).collect()
    }

    /// The ways out that the refusal tells.
    fn advice(&self) -> Vec<Flags> {
        let refused = self.plan(&self.flags).expect_err("it does not fit");
        assert_eq!(refused.kind, FailureKind::DoesNotFit);
        let fix = refused.fix.expect("advice");
        println!(
            "{}: {:?} with {} bytes: {}; {fix}",
            self.folder.display(),
            self.flags,
            self.gpu_bytes,
            refused.message
        );
        let ways = fix.strip_prefix("use ").unwrap_or_else(|| panic!("{fix}"));
        ways.split(", or ").map(flags).collect()
    }

    /// Each way out fits, and nothing less than it would.
    fn check(&self, ways: &[Flags]) {
        for way in ways {
            assert!(self.plan(&self.with(way)).is_ok(), "{way:?}");
            for (flag, value) in way {
                let mut less = way.clone();
                match value.parse::<u32>() {
                    Ok(n) => less.insert(flag.clone(), (if self.grows(flag, n) { n - 1 } else { n + 1 }).to_string()),
                    Err(_) => less.remove(flag),
                };
                let fault = self.plan(&self.with(&less)).expect_err("less than was advised fits");
                assert_eq!(fault.kind, FailureKind::DoesNotFit, "{less:?}");
            }
        }
    }

    fn grows(&self, flag: &str, n: u32) -> bool {
        self.flags.get(flag).is_some_and(|before| before.parse::<u32>().expect("a number") < n)
    }

    /// Loads with the first way out. `None` where there is no adapter.
    fn load(&self, way: &Flags) -> Option<()> {
        let options = options(&self.with(way), self.gpu_bytes);
        let engine = started(LoadRequest { source: ModelSource::Path(self.folder.clone()), options })?;
        engine.shutdown();
        Some(())
    }
}

#[test]
fn what_is_advised_fits_and_less_does_not_and_it_loads() {
    const SMALL: &str = "--max-num-batched-tokens 32 --max-num-seqs 1 --cpu-offload-gb 0";
    let cases = [
        ("llama", "--max-model-len 512 --cpu-offload-gb 0".into(), 500),
        ("llama", "--max-model-len 512 --cpu-offload-gb 0".into(), 2200),
        ("llama", format!("--max-model-len 512 {SMALL}"), 80),
        ("llama", format!("--max-model-len 64 --kv-cache-dtype int8 {SMALL}"), 100),
        ("llama", "--num-gpu-blocks-override 2000 --max-num-batched-tokens 32".into(), 5000),
        ("llama", "--max-model-len 256 --num-gpu-blocks-override 2000 --max-num-batched-tokens 32".into(), 5000),
        ("llama", "--max-model-len 500 --num-gpu-blocks-override 10".into(), 0),
        ("qwen3_bf16", format!("--max-model-len 256 --kv-cache-dtype f32 {SMALL}"), 100),
    ];
    for (name, text, missing_kib) in cases {
        let case = Case::new(name, &text, missing_kib);
        let ways = case.advice();
        case.check(&ways);
        if case.load(&ways[0]).is_none() {
            return;
        }
    }
}

#[test]
fn what_nothing_makes_fit_is_said_to_be_so() {
    let case = Case { gpu_bytes: 1000, ..Case::new("llama", "--max-model-len 512", 0) };
    let fix = case.plan(&case.flags).expect_err("too large").fix.expect("a fix");
    assert!(fix.starts_with("no setting makes it fit"), "{fix}");
}
