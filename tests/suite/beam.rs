//! Beam search against `generate(num_beams = …)` of transformers: `beam_search.json` of the fixtures.

use std::path::{Path, PathBuf};

use kvasir::engine::logits::{LogitsPlan, all_logits};
use kvasir::engine::options::{EngineOptions, FakeOptions, LoadRequest, ModelSource};
use kvasir::engine::{EngineHandle, Run};
use kvasir::executor::reference_executor::{ReferenceConfig, ReferenceExecutor};
use kvasir::model::Model;
use kvasir::model::groups::LayerGroups;
use kvasir::protocol::{
    BeamParams, Decoding, EarlyStopping, EngineEvent, FinishReason, GenerateRequest, OwnerTag, SamplingParams,
    StopRules,
};
use kvasir::sampling::beam::{BeamSearch, Hypothesis};
use kvasir::sampling::{PenaltyStrengths, SeenToken, reference};
use kvasir::scheduler::PreemptionMode;
use serde_json::Value;

use crate::support::{fixtures, read_json, started};

/// The largest difference of a score from the reference's.
pub const SCORE_TOLERANCE: f64 = 1e-4;

/// One search of the fixture.
pub struct Case {
    pub model: PathBuf,
    pub name: String,
    pub prompt: Vec<u32>,
    pub params: BeamParams,
    pub eos: Option<u32>,
    pub max_new_tokens: u32,
    pub sequences: Vec<Vec<u32>>,
    pub scores: Vec<f64>,
    /// Neighbouring scores are closer than the arithmetic allows to tell.
    pub is_close: bool,
}

fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|v| v.as_u64().expect("a token") as u32).collect()
}

fn case(root: &Path, value: &Value) -> Option<Case> {
    let name = value["model"].as_str().expect("a name");
    let width = value["num_beams"].as_u64().expect("a width") as u32;
    let early_stopping = match &value["early_stopping"] {
        Value::Bool(true) => EarlyStopping::AtOnce,
        Value::Bool(false) => EarlyStopping::Heuristic,
        other => {
            assert_eq!(other, "never");
            EarlyStopping::Never
        }
    };
    let length_penalty = value["length_penalty"].as_f64().expect("a penalty") as f32;
    let sequences = value["sequences"].as_array().expect("sequences").iter().map(numbers).collect();
    let eos = value["eos_token_id"].as_u64().map(|eos| eos as u32);
    let model = root.join("tiny").join(name);
    let loads = model.is_dir() && Model::open(&model).is_ok();
    loads.then(|| Case {
        model,
        name: format!(
            "{name} {} width {width} {early_stopping:?} penalty {length_penalty} eos {eos:?}",
            value["prompt"]
        ),
        prompt: numbers(&value["input_ids"]),
        params: BeamParams { width, num_return: width, length_penalty, early_stopping },
        eos,
        max_new_tokens: value["max_new_tokens"].as_u64().expect("a limit") as u32,
        sequences,
        scores: value["scores"].as_array().expect("scores").iter().map(|v| v.as_f64().expect("a score")).collect(),
        is_close: value["close"].as_bool().expect("a flag"),
    })
}

/// The fixture's searches on models that load, one list per model.
pub fn cases_by_model() -> Vec<Vec<Case>> {
    let root = fixtures();
    let file = read_json(&root.join("beam_search.json"));
    let mut groups: Vec<Vec<Case>> = Vec::new();
    for case in file["cases"].as_array().expect("cases").iter().filter_map(|value| case(&root, value)) {
        match groups.iter_mut().find(|group| group[0].model == case.model) {
            Some(group) => group.push(case),
            None => groups.push(vec![case]),
        }
    }
    assert!(groups.len() >= 3, "only {} models of the fixture load", groups.len());
    groups
}

/// Asserts sequences and scores of one search.
pub fn check(case: &Case, outputs: &[(Vec<u32>, f64)]) {
    let got: Vec<&Vec<u32>> = outputs.iter().map(|(tokens, _)| tokens).collect();
    let scores: Vec<f64> = outputs.iter().map(|(_, score)| *score).collect();
    assert!(
        case.is_close || got.iter().copied().eq(&case.sequences),
        "{}: {outputs:?}, not {:?}",
        case.name,
        case.sequences
    );
    assert_eq!(scores.len(), case.scores.len(), "{}", case.name);
    for (got, want) in scores.iter().zip(&case.scores) {
        assert!((got - want).abs() <= SCORE_TOLERANCE, "{}: {scores:?}, not {:?}", case.name, case.scores);
    }
}

/// The search without pages or batches: each beam's tokens are computed from the first.
fn search_alone(executor: &mut ReferenceExecutor, case: &Case, vocab: usize, repetition: f32) -> Vec<Hypothesis> {
    let plan = LogitsPlan { chunk: None, is_batched: false, max_tokens_per_step: 256 };
    let strengths = PenaltyStrengths { repetition, presence: 0.0, frequency: 0.0 };
    let mut search = BeamSearch::new(case.params.clone(), case.max_new_tokens, FinishReason::MaxTokens);
    let num_candidates = BeamSearch::num_candidates(case.params.width, 1) as usize;
    loop {
        let beams = (0..search.num_live()).map(|beam| [&case.prompt[..], search.live_tokens(beam)].concat());
        let lists: Vec<Vec<(u32, f32)>> = beams
            .map(|tokens| {
                let mut last = Vec::new();
                let keep = &mut |_, _, rows: &[f32]| last = rows[rows.len() - vocab..].to_vec();
                all_logits(executor, std::slice::from_ref(&tokens), plan, keep).expect("steps run");
                let seen: Vec<SeenToken> = tokens.iter().map(|&token| SeenToken { token, output_count: 0 }).collect();
                let row = reference::beam_logprobs(&last, &strengths, &distinct(seen), &[], num_candidates);
                row.iter().map(|&(token, logprob)| (token, logprob as f32)).collect()
            })
            .collect();
        let ends = |_, token| (case.eos == Some(token)).then_some(FinishReason::StopToken(token));
        if search.advance(&lists, ends).is_none() {
            return search.outputs().to_vec();
        }
    }
}

fn distinct(mut seen: Vec<SeenToken>) -> Vec<SeenToken> {
    seen.sort_unstable_by_key(|s| s.token);
    seen.dedup();
    seen
}

#[test]
fn the_scorer_finds_the_sequences_and_scores_of_transformers() {
    for group in cases_by_model() {
        let model = Model::open(&group[0].model).unwrap_or_else(|e| panic!("{e}"));
        let vocab = model.spec().vocab_size as usize;
        let mut executor = ReferenceExecutor::new(&model, ReferenceConfig { num_blocks: 40, block_size: 16 })
            .unwrap_or_else(|e| panic!("{e}"));
        // `generate` takes what it is not told from generation_config.json.
        let repetition = model.generation_defaults().repetition_penalty.unwrap_or(1.0);
        // Plain loops take their time; the engine's test takes every case.
        for case in group.iter().step_by(4) {
            let outputs = search_alone(&mut executor, case, vocab, repetition);
            let outputs: Vec<(Vec<u32>, f64)> = outputs.into_iter().map(|h| (h.tokens, h.score)).collect();
            check(case, &outputs);
        }
    }
}

/// How the engine is set up for a search.
#[derive(Clone, Copy, Debug)]
struct Setup {
    num_blocks: u32,
    block_size: u32,
    prefix_caching: bool,
    /// What is preempted goes to host memory.
    swaps: bool,
}

/// An engine on this model in the reference mode, or `None` where there is no adapter.
fn engine(model: &Path, setup: Setup) -> Option<EngineHandle> {
    let options = EngineOptions {
        max_model_len: Some(100.min((setup.num_blocks - 1) * setup.block_size)),
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        block_size: setup.block_size,
        num_gpu_blocks_override: Some(setup.num_blocks),
        prefix_caching: setup.prefix_caching,
        swap_space_bytes: if setup.swaps { 64 << 20 } else { 0 },
        preemption: PreemptionMode::Swap,
        precise: true,
        ..EngineHandle::start_fake(FakeOptions::small()).options()
    };
    started(LoadRequest { source: ModelSource::Path(model.to_path_buf()), options })
}

fn submit(engine: &EngineHandle, case: &Case) -> Run {
    let defaults = engine.model().expect("loaded").defaults.clone();
    let repetition_penalty = defaults.repetition_penalty.unwrap_or(1.0);
    let request = GenerateRequest {
        owner: OwnerTag::default(),
        prompt: case.prompt.clone(),
        sampling: SamplingParams { repetition_penalty, ..SamplingParams::greedy() },
        stop: StopRules {
            stop_token_ids: case.eos.into_iter().collect(),
            ignore_eos: true,
            ..StopRules::max_tokens(case.max_new_tokens)
        },
        decoding: Decoding::Beam(case.params.clone()),
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    };
    engine.submit(request).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

/// Tokens and score of each output, and how often the search gave way.
fn outputs(run: &Run) -> (Vec<(Vec<u32>, f64)>, u32) {
    let mut outputs: Vec<(Vec<u32>, f64)> = Vec::new();
    let mut num_preempted = 0;
    while let Some(event) = run.recv() {
        match event {
            EngineEvent::Text { tokens, .. } => outputs.push((tokens, f64::NAN)),
            EngineEvent::Choice { choice, score, .. } => {
                outputs[choice as usize].1 = f64::from(score.expect("a search has scores"));
            }
            EngineEvent::Preempted { .. } => num_preempted += 1,
            EngineEvent::Failed { error } => panic!("{error}"),
            _ => {}
        }
    }
    (outputs, num_preempted)
}

#[test]
fn the_engine_finds_the_sequences_and_scores_of_transformers() {
    for group in cases_by_model() {
        let setup = Setup { num_blocks: 200, block_size: 8, prefix_caching: true, swaps: false };
        let Some(engine) = engine(&group[0].model, setup) else { return };
        for case in &group {
            check(case, &outputs(&submit(&engine, case)).0);
        }
        engine.shutdown();
    }
}

#[test]
fn searches_that_give_way_as_a_gang_find_the_same() {
    let (mut num_preempted, mut num_swapped) = (0, 0);
    for (i, group) in cases_by_model().into_iter().enumerate() {
        // One search of 4 beams may come to need 22 blocks, so that two searches cannot stay; with windows they count as
        // if they shared nothing, once for each group of layers.
        let model = Model::open(&group[0].model).unwrap_or_else(|e| panic!("{e}"));
        let groups = LayerGroups::of(model.spec());
        let num_usable = if groups.windows == [None] { 23 } else { 4 * 10 * groups.num_groups() };
        let setup = Setup { num_blocks: 1 + num_usable, block_size: 4, prefix_caching: i % 3 == 0, swaps: i % 2 == 1 };
        let Some(engine) = engine(&group[0].model, setup) else { return };
        let cases: Vec<&Case> = group.iter().filter(|case| case.params.width <= 4).take(6).collect();
        engine.pause();
        let runs: Vec<Run> = cases.iter().map(|case| submit(&engine, case)).collect();
        engine.resume();
        for (case, run) in cases.iter().zip(&runs) {
            let (outputs, preempted) = outputs(run);
            num_preempted += preempted;
            check(case, &outputs);
        }
        assert!(engine.wait_idle(std::time::Duration::from_secs(20)), "the engine comes to rest");
        num_swapped += engine.telemetry().snapshot().swaps_total;
        engine.shutdown();
    }
    assert!(num_swapped > 0, "no search went to host memory");
    assert!(num_preempted > 0, "the pool is too large for this test");
}
