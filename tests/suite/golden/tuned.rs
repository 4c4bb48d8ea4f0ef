//! Whatever the tuner chooses, a model's logits are the same bits; and what it measured is found again.

use std::collections::BTreeMap;

use kvasir::executor::wgpu_executor::{TuneMode, Tuning};
use kvasir::kernels::tune::TuneKey;
use kvasir::kernels::tune::table::{Adapter, Table};
use kvasir::kernels::{Choices, Class, DeviceClass};

use super::*;
use crate::support::open_gpu;

/// Products of 4-bit and of 8-bit weights by int8 activations, and of floats.
const CASES: [(&str, &str); 3] = [("gguf", "q4_1"), ("gguf", "q8_0"), ("tiny", "phi3_f16")];

/// Bits of the logits of whole prompts and of pieces, so that products of one, of few and of many tokens take part.
fn bits(executor: &mut WgpuExecutor, case: &Case) -> Vec<u32> {
    let prompts = [case.prompts[0].ids.iter().copied().take(21).collect::<Vec<u32>>()];
    let plans = [None, Some(1), Some(2), Some(4)].map(|chunk| LogitsPlan { chunk, ..WHOLE });
    let logits = plans.into_iter().flat_map(|plan| logits(executor, &prompts, plan)).flatten();
    logits.map(f32::to_bits).collect()
}

#[test]
fn every_way_that_the_tuner_may_choose_gives_the_same_logits() {
    for (kind, name) in CASES {
        let Some(case) = case(&fixtures(), kind, name) else { continue };
        let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
        let cfg = config(DEFAULT_MODE, 50, 256);
        let open = |choices: Choices| -> Option<WgpuExecutor> {
            let executor = WgpuExecutor::with_choices(open_gpu()?, &model, cfg, 0, choices, &mut |_| true);
            Some(executor.unwrap_or_else(|e| panic!("{}: {e}", case.name)))
        };
        let Some(mut executor) = open(Choices::default()) else { return };
        let want = bits(&mut executor, &case);
        let caps = executor.gpu().caps();
        let (class, pairs) = (Class::of(caps), DeviceClass::of(caps).multiplies_pairs);
        let ways_of = |key: &TuneKey| -> Vec<String> {
            match key {
                TuneKey::Product(key) => key.candidates(class, pairs).iter().map(ToString::to_string).collect(),
                TuneKey::Attention(key) => key.candidates(class).iter().map(ToString::to_string).collect(),
            }
        };
        let keys = executor.tune_keys();
        let num_attention = keys.iter().filter(|key| matches!(key, TuneKey::Attention(_))).count();
        assert_eq!(num_attention, 2, "{}: attention of one token and of several", case.name);
        let ways: Vec<_> = keys.iter().map(|key| (key.to_string(), ways_of(key))).collect();
        let most = ways.iter().map(|(_, tiles)| tiles.len()).max().unwrap_or(0);
        assert!(most > 1, "{}: nothing to choose", case.name);
        for i in 1..most {
            let chosen: BTreeMap<String, String> =
                ways.iter().filter_map(|(key, ways)| Some((key.clone(), ways.get(i)?.clone()))).collect();
            let mut executor = open(Choices::new(chosen)).expect("an adapter as before");
            assert!(bits(&mut executor, &case) == want, "{}: way {i} gives other bits", case.name);
        }
    }
}

#[test]
fn what_was_measured_is_kept_and_used_at_the_next_load() {
    let Some(case) = case(&fixtures(), "gguf", "q4_1") else { return };
    let model = Model::open(&case.model).unwrap_or_else(|e| panic!("{e}"));
    let dir = tempfile::tempdir().expect("a temporary folder");
    let cfg = config(DEFAULT_MODE, 50, 256);
    let open = |mode| -> Option<(WgpuExecutor, Vec<&'static str>)> {
        let tuning = Tuning { mode, dir: dir.path().to_path_buf() };
        let mut phases = Vec::new();
        let progress = &mut |progress: kvasir::executor::LoadProgress| {
            phases.push(progress.phase);
            true
        };
        let executor = WgpuExecutor::tuned(open_gpu()?, &model, cfg, 0, &tuning, progress);
        Some((executor.unwrap_or_else(|e| panic!("{}: {e}", case.name)), phases))
    };
    let Some((mut executor, phases)) = open(TuneMode::Never) else { return };
    assert!(!phases.contains(&"Measuring kernels") && std::fs::read_dir(dir.path()).unwrap().count() == 0);
    let want = bits(&mut executor, &case);
    let (mut executor, phases) = open(TuneMode::Again).expect("an adapter as before");
    assert!(phases.contains(&"Measuring kernels"), "{phases:?}");
    assert!(bits(&mut executor, &case) == want, "measured kernels give other bits");
    let (table, warning) = Table::load(dir.path(), Adapter::of(executor.gpu().caps()));
    assert_eq!(warning, None);
    assert!(!table.products.is_empty());
    for (key, entry) in &table.products {
        assert!(entry.banned.is_empty(), "{key}: {entry:?}");
        assert!(entry.us.is_empty() || entry.us.contains_key(&entry.chosen), "{key}: {entry:?}");
    }
    let (mut executor, phases) = open(TuneMode::Auto).expect("an adapter as before");
    let is_complete = executor.tune_keys().iter().all(|key| table.products.contains_key(&key.to_string()));
    assert!(!is_complete || !phases.contains(&"Measuring kernels"), "all is known: {phases:?}");
    assert!(bits(&mut executor, &case) == want, "kernels of the table give other bits");
}
