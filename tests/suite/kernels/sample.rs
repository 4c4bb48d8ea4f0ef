//! Penalties, sampling and logprobs on the GPU against the CPU sampler, `sampling.json` and chance.

use kvasir::batch::{RowSampling, StepBatch, TokenPenalty};
use kvasir::gpu::{Buffer, Recording};
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::logprobs::{self, Logprobs};
use kvasir::kernels::penalties::Penalties;
use kvasir::kernels::sample::{Params, Sample, Sampled};
use kvasir::kernels::step_meta;
use kvasir::protocol::TokenLogprobs;
use kvasir::sampling::{Draw, PenaltyStrengths, SeenToken, Warp, reference};

use super::harness::{Random, Rig, rigs};
use crate::sampling::{assert_chi_squared, cases};

/// One logit row with everything that acts on it.
#[derive(Clone)]
struct Row {
    logits: Vec<f32>,
    warp: Warp,
    draw: Draw,
    strengths: PenaltyStrengths,
    seen: Vec<SeenToken>,
    biases: Vec<(u32, f32)>,
    logprobs: Option<u8>,
    is_beam: bool,
}

fn plain(logits: Vec<f32>, warp: Warp, draw: Draw) -> Row {
    let strengths = PenaltyStrengths { repetition: 1.0, presence: 0.0, frequency: 0.0 };
    Row { logits, warp, draw, strengths, seen: vec![], biases: vec![], logprobs: None, is_beam: false }
}

fn batch(rows: &[Row]) -> StepBatch {
    let mut batch = StepBatch { penalty_start: vec![0], bias_start: vec![0], ..StepBatch::default() };
    for (i, row) in rows.iter().enumerate() {
        batch.logit_tokens.push(i as u32);
        batch.sampling.push(RowSampling {
            temperature: row.warp.temperature,
            top_k: row.warp.top_k,
            top_p: row.warp.top_p,
            min_p: row.warp.min_p,
            repetition_penalty: row.strengths.repetition,
            presence_penalty: row.strengths.presence,
            frequency_penalty: row.strengths.frequency,
            seed: row.draw.seed,
            position: row.draw.position,
            logprobs: row.logprobs,
            is_beam: row.is_beam,
        });
        batch.penalties.extend(row.seen.iter().map(|s| TokenPenalty { token: s.token, output_count: s.output_count }));
        batch.penalty_start.push(batch.penalties.len() as u32);
        batch.biases.extend(&row.biases);
        batch.bias_start.push(batch.biases.len() as u32);
    }
    batch
}

struct Outcome {
    logits: Vec<f32>, // [num_rows, stride]
    sampled: Vec<Sampled>,
    logprobs: Vec<Option<TokenLogprobs>>,
}

/// Rows are padded with values that would win if anyone looked at them.
fn run(rig: &Rig, rows: &[Row], stride: u32) -> Outcome {
    let vocab = rows[0].logits.len();
    let batch = batch(rows);
    let meta = rig.step_meta(step_meta::num_words(&batch, &AttentionWork::default()));
    rig.set_step(&meta, &batch);
    let mut padded = vec![9e9f32; rows.len() * stride as usize];
    for (to, row) in padded.chunks_mut(stride as usize).zip(rows) {
        to[..vocab].copy_from_slice(&row.logits);
    }
    let logits = rig.upload("logits", &padded);
    let sampled = rig.upload("sampled", &vec![[77u32, 77]; rows.len()]);
    let top: Buffer = rig.upload("logprobs", &vec![0u8; rows.len() * logprobs::ROW_BYTES as usize]);
    let params = Params { vocab: vocab as u32, stride };
    let (logits_all, sampled_all) = (logits.whole(), sampled.whole());
    let penalties = rig.build(&meta, false, |ctx| Penalties::new(ctx, params, &logits_all));
    let sample = rig.build(&meta, false, |ctx| Sample::new(ctx, params, &logits_all, &sampled_all));
    let probabilities =
        rig.build(&meta, false, |ctx| Logprobs::new(ctx, params, &logits_all, &sampled_all, &top.whole()));
    let mut recording = Recording::new("sampling");
    penalties.record(&mut recording, rows.len() as u32);
    sample.record(&mut recording, rows.len() as u32);
    probabilities.record(&mut recording, rows.len() as u32);
    rig.replay(&recording);
    let sampled: Vec<Sampled> = rig.read(&sampled);
    let bytes: Vec<u8> = rig.read(&top);
    let logprobs = rows
        .iter()
        .zip(bytes.chunks(logprobs::ROW_BYTES as usize))
        .zip(&sampled)
        .map(|((row, bytes), s)| row.logprobs.map(|n| logprobs::decode(bytes, s.token, n)))
        .collect();
    Outcome { logits: rig.read(&logits), sampled, logprobs }
}

/// The GPU's token is the reference's, or one whose score is as large up to rounding, or one at the edge of the cut.
fn assert_same_draw(logits: &[f32], warp: &Warp, draw: Draw, got: u32, what: &str) {
    let want = reference::sample(logits, warp, draw).expect("finite");
    if got == want {
        return;
    }
    assert!(!warp.is_greedy(), "{what}: greedy token {got}, expected {want}");
    let score = |t: u32| reference::score(logits[t as usize], warp.temperature, draw, t);
    let kept = reference::kept(logits, warp);
    let near_cut =
        |t: u32| f64::from((logits[t as usize] - kept.cut).abs()) < 1e-5 * f64::from(kept.cut.abs().max(1.0));
    let edge = near_cut(got) || near_cut(want);
    let near = (score(got) - score(want)).abs() < 1e-4 * score(want).abs().max(1.0);
    assert!(edge || (near && kept.tokens.contains(&got)), "{what}: token {got}, expected {want}");
}

#[test]
fn penalties_and_biases_match_transformers() {
    for rig in rigs() {
        let cases = cases();
        let rows: Vec<Row> = cases
            .iter()
            .map(|c| Row {
                strengths: c.strengths,
                seen: c.seen.clone(),
                biases: c.biases.clone(),
                ..plain(c.logits.clone(), c.warp, Draw { seed: 1, position: 0 })
            })
            .collect();
        let outcome = run(rig, &rows, 100);
        for (case, got) in cases.iter().zip(outcome.logits.chunks(100)) {
            for (token, want) in case.processed.iter().enumerate() {
                let error = (got[token] - want).abs();
                assert!(error <= 1e-5, "{} {}: logit of {token} is off by {error}", rig.name, case.name);
            }
            assert!(got[97..].iter().all(|x| *x == 9e9), "padding must stay");
        }
    }
}

#[test]
fn every_draw_is_of_a_kept_token_and_none_is_missed() {
    // 600 draws of each case: all drawn tokens must be kept ones, and every likely kept one must come.
    for rig in rigs().iter().filter(|r| !r.name.contains("checked")) {
        for case in cases() {
            let rows: Vec<Row> = (0..600)
                .map(|i| plain(case.processed.clone(), case.warp, Draw { seed: 1 << 33 | 5, position: i }))
                .collect();
            let outcome = run(rig, &rows, 100);
            let mut counts = vec![0u32; 97];
            for (row, got) in rows.iter().zip(&outcome.sampled) {
                assert_eq!(got.not_finite, 0);
                let token = got.token;
                // Of tokens equal at the cut, transformers may keep fewer.
                let is_tie = reference::kept(&row.logits, &row.warp).cut == row.logits[token as usize];
                assert!(is_tie || case.kept.contains(&token), "{} {}: {token} is not kept", rig.name, case.name);
                assert_same_draw(&row.logits, &row.warp, row.draw, token, &format!("{} {}", rig.name, case.name));
                counts[token as usize] += 1;
            }
            for (token, &p) in case.probs.iter().enumerate() {
                // A token of 600 * p = 20 expected draws is missed once in 5e8 tests.
                let is_tie =
                    case.kept.iter().any(|&t| t != token as u32 && case.processed[t as usize] == case.processed[token]);
                assert!(
                    counts[token] > 0 || is_tie || p < 20.0 / 600.0,
                    "{} {}: {token} never came",
                    rig.name,
                    case.name
                );
            }
        }
    }
}

#[test]
fn draws_follow_the_kept_probabilities() {
    let logits: Vec<f32> = (0..40).map(|i| ((i * 7919 % 97) as f32) / 20.0 - 2.0).collect();
    for rig in rigs().iter().filter(|r| !r.name.contains("checked")) {
        for warp in [
            Warp { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
            Warp { temperature: 0.7, top_k: 12, top_p: 0.9, min_p: 0.02 },
        ] {
            let kept = reference::kept(&logits, &warp);
            let mut probs = vec![0.0; 40];
            for (&t, &p) in kept.tokens.iter().zip(&kept.probs) {
                probs[t as usize] = p;
            }
            let rows: Vec<Row> = (0..8000u32)
                .map(|i| plain(logits.clone(), warp, Draw { seed: u64::from(i) << 30 | 11, position: i % 7 }))
                .collect();
            let mut counts = vec![0; 40];
            for s in run(rig, &rows, 40).sampled {
                counts[s.token as usize] += 1;
            }
            assert_chi_squared(&counts, &probs, rig.name);
        }
    }
}

#[test]
fn large_vocabularies_draw_the_reference_token() {
    let mut random = Random(12);
    for rig in rigs() {
        for vocab in [1usize, 3, 1000, 49_152, 50_001] {
            let warps = [
                Warp::GREEDY,
                Warp { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
                Warp { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05 },
                Warp { temperature: 1.3, top_k: 0, top_p: 0.9, min_p: 0.0 },
                Warp { temperature: 0.5, top_k: 1000, top_p: 1.0, min_p: 0.0 },
                Warp { temperature: 5.0, top_k: 0, top_p: 1.0, min_p: 0.2 },
                Warp { temperature: 0.01, top_k: 5, top_p: 0.5, min_p: 0.0 },
            ];
            let rows: Vec<Row> = warps
                .iter()
                .flat_map(|warp| (0..3).map(move |position| (*warp, position)))
                .map(|(warp, position)| {
                    let logits: Vec<f32> = (0..vocab).map(|_| random.unit() * 6.0 + random.unit() * 6.0).collect();
                    plain(logits, warp, Draw { seed: random.bits(), position })
                })
                .collect();
            let stride = (vocab as u32).next_multiple_of(4);
            for (i, (row, got)) in rows.iter().zip(run(rig, &rows, stride).sampled).enumerate() {
                assert_eq!(got.not_finite, 0);
                let what = format!("{} vocab {vocab} row {i} {:?}", rig.name, row.warp);
                assert_same_draw(&row.logits, &row.warp, row.draw, got.token, &what);
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_lowest_id() {
    for rig in rigs() {
        let mut logits = vec![-3.0; 1001];
        logits[250] = 4.0;
        logits[251] = 4.0;
        logits[777] = 4.0;
        let rows = [
            plain(logits.clone(), Warp::GREEDY, Draw { seed: 0, position: 0 }),
            plain(vec![0.0; 1001], Warp::GREEDY, Draw { seed: 0, position: 0 }),
        ];
        let tokens: Vec<u32> = run(rig, &rows, 1004).sampled.iter().map(|s| s.token).collect();
        assert_eq!(tokens, [250, 0], "{}", rig.name);
    }
}

#[test]
fn rows_with_a_nan_or_an_infinity_are_flagged_and_others_are_not() {
    let sampled = Warp { temperature: 1.0, top_k: 5, top_p: 0.9, min_p: 0.0 };
    for rig in rigs() {
        let rows: Vec<Row> = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -f32::NAN]
            .iter()
            .flat_map(|bad| {
                let mut logits = vec![1.0; 203];
                logits[202] = *bad;
                [Warp::GREEDY, sampled].map(|warp| plain(logits.clone(), warp, Draw { seed: 4, position: 1 }))
            })
            .collect();
        let flags: Vec<u32> = run(rig, &rows, 204).sampled.iter().map(|s| s.not_finite).collect();
        assert_eq!(flags, [1, 1, 1, 1, 1, 1, 0, 0, 1, 1], "{}", rig.name);
    }
}

#[test]
fn logprobs_match_the_reference_where_asked_for() {
    let mut random = Random(5);
    for rig in rigs() {
        for vocab in [5usize, 97, 49_152] {
            let mut rows: Vec<Row> = [Some(20), None, Some(0), Some(3)]
                .iter()
                .map(|&asked| Row {
                    logprobs: asked,
                    ..plain(random.vector(vocab, 8.0), Warp::GREEDY, Draw { seed: 1, position: 2 })
                })
                .collect();
            rows[3].logits[3] = rows[3].logits[1]; // a tie
            let outcome = run(rig, &rows, (vocab as u32).next_multiple_of(4));
            for ((row, got), sampled) in rows.iter().zip(&outcome.logprobs).zip(&outcome.sampled) {
                let (Some(asked), Some(got)) = (row.logprobs, got) else {
                    assert!(row.logprobs.is_none());
                    continue;
                };
                let want = reference::logprobs(&row.logits, usize::from(asked));
                let chosen = f64::from(row.logits[sampled.token as usize]) - want.logsumexp;
                assert!((f64::from(got.logprob) - chosen).abs() < 1e-4, "{} {vocab}", rig.name);
                assert_eq!(got.top.len(), want.top.len(), "{} {vocab}", rig.name);
                for (got, want) in got.top.iter().zip(&want.top) {
                    assert_eq!(got.0, want.0, "{} {vocab}", rig.name);
                    assert!((f64::from(got.1) - want.1).abs() < 1e-4, "{} {vocab}", rig.name);
                }
            }
        }
    }
}

#[test]
fn beams_rank_by_log_probabilities_that_penalties_changed() {
    let mut random = Random(8);
    for rig in rigs() {
        for vocab in [70usize, 999, 49_152] {
            let seen: Vec<SeenToken> =
                (0..60).map(|i| SeenToken { token: i * 13 % vocab as u32, output_count: i % 3 }).collect();
            let beam = |random: &mut Random, repetition: f32, seen: &[SeenToken], biases: &[(u32, f32)]| Row {
                strengths: PenaltyStrengths { repetition, presence: 0.25, frequency: 0.5 },
                seen: seen.to_vec(),
                biases: biases.to_vec(),
                logprobs: Some(64),
                is_beam: true,
                ..plain(random.vector(vocab, 8.0), Warp::GREEDY, Draw { seed: 1, position: 2 })
            };
            let rows = [
                beam(&mut random, 1.3, &seen[..5], &[(3, 4.0)]),
                beam(&mut random, 1.0, &[], &[]),
                beam(&mut random, 0.7, &seen[..3], &[]),
            ];
            let outcome = run(rig, &rows, (vocab as u32).next_multiple_of(4));
            for (row, got) in rows.iter().zip(&outcome.logprobs) {
                let got = &got.as_ref().expect("asked for").top;
                let want = reference::beam_logprobs(&row.logits, &row.strengths, &row.seen, &row.biases, 64);
                assert_eq!(got.len(), want.len(), "{} {vocab}", rig.name);
                for (got, want) in got.iter().zip(&want) {
                    assert!((f64::from(got.1) - want.1).abs() < 1e-4, "{} {vocab}: {got:?}, not {want:?}", rig.name);
                }
                let sorted = |list: Vec<u32>| std::collections::BTreeSet::from_iter(list);
                let same = sorted(got.iter().map(|t| t.0).collect()) == sorted(want.iter().map(|t| t.0).collect());
                assert!(same, "{} {vocab}", rig.name);
            }
        }
    }
}
