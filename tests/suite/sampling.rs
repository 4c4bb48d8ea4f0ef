//! The sampler against transformers' logits processors (`sampling.json`) and against chance.

use crate::support;
use kvasir::sampling::{Draw, PenaltyStrengths, SeenToken, Warp, reference};

/// One case of `sampling.json`.
pub struct Case {
    pub name: String,
    pub warp: Warp,
    pub strengths: PenaltyStrengths,
    pub seen: Vec<SeenToken>,
    pub biases: Vec<(u32, f32)>,
    pub logits: Vec<f32>,
    pub processed: Vec<f32>,
    pub kept: Vec<u32>,
    pub probs: Vec<f64>,
    pub argmax: u32,
}

pub fn cases() -> Vec<Case> {
    let file = support::read_json(&support::fixtures().join("sampling.json"));
    let cases = file["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 60);
    cases.iter().enumerate().map(|(i, case)| read_case(i, case)).collect()
}

fn read_case(i: usize, case: &serde_json::Value) -> Case {
    let number = |v: &serde_json::Value| v.as_f64().expect("number");
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        v.as_array().expect("ids").iter().map(|t| t.as_u64().expect("id") as u32).collect()
    };
    let floats = |v: &serde_json::Value| -> Vec<f64> { v.as_array().expect("floats").iter().map(number).collect() };
    let params = &case["params"];
    let field = |name: &str| number(&params[name]) as f32;
    let output = ids(&case["output_ids"]);
    let mut all = ids(&case["prompt_ids"]);
    all.extend(&output);
    all.sort_unstable();
    all.dedup();
    let count = |token| output.iter().filter(|&&o| o == token).count() as u32;
    let biases = params["logit_bias"].as_object().expect("biases");
    Case {
        name: format!("case {i}"),
        warp: Warp {
            temperature: field("temperature"),
            top_k: field("top_k") as u32,
            top_p: field("top_p"),
            min_p: field("min_p"),
        },
        strengths: PenaltyStrengths {
            repetition: field("repetition_penalty"),
            presence: field("presence_penalty"),
            frequency: field("frequency_penalty"),
        },
        seen: all.iter().map(|&token| SeenToken { token, output_count: count(token) }).collect(),
        biases: biases.iter().map(|(t, b)| (t.parse().expect("id"), number(b) as f32)).collect(),
        logits: floats(&case["logits"]).iter().map(|&l| l as f32).collect(),
        processed: floats(&case["after_penalties_and_bias"]).iter().map(|&l| l as f32).collect(),
        kept: ids(&case["kept"]),
        probs: floats(&case["probs"]),
        argmax: case["argmax"].as_u64().expect("id") as u32,
    }
}

#[test]
fn reference_sampler_keeps_what_transformers_keeps() {
    for case in cases() {
        let mut logits = case.logits.clone();
        reference::apply_penalties(&mut logits, &case.strengths, &case.seen, &case.biases);
        for (token, (ours, theirs)) in logits.iter().zip(&case.processed).enumerate() {
            assert!((ours - theirs).abs() <= 1e-5, "{}: logit of {token}: {ours}, expected {theirs}", case.name);
        }
        assert_eq!(reference::argmax(&logits), case.argmax, "{}", case.name);

        let kept = reference::kept(&logits, &case.warp);
        let mut probs = vec![0.0; logits.len()];
        for (&token, &p) in kept.tokens.iter().zip(&kept.probs) {
            probs[token as usize] = p;
        }
        let differs = |t: u32| (kept.tokens.contains(&t) != case.kept.contains(&t)) && logits[t as usize] != kept.cut;
        let wrong: Vec<u32> = (0..logits.len() as u32).filter(|&t| differs(t)).collect();
        assert!(wrong.is_empty(), "{}: kept differs at {wrong:?}", case.name);
        if kept.tokens == case.kept {
            for (token, (ours, theirs)) in probs.iter().zip(&case.probs).enumerate() {
                assert!((ours - theirs).abs() <= 1e-6, "{}: p({token}) {ours}, expected {theirs}", case.name);
            }
        }
    }
}

/// Pearson's statistic of `counts` against `probs`, cells below 5 expected draws merged, with its degrees of freedom.
pub fn chi_squared(counts: &[u32], probs: &[f64]) -> (f64, f64) {
    let draws: u32 = counts.iter().sum();
    let (mut statistic, mut cells) = (0.0, 0.0);
    let (mut rest_count, mut rest_expected) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(probs) {
        let expected = p * f64::from(draws);
        if expected < 5.0 {
            rest_count += f64::from(count);
            rest_expected += expected;
        } else {
            statistic += (f64::from(count) - expected).powi(2) / expected;
            cells += 1.0;
        }
    }
    if rest_expected > 1.0 {
        statistic += (rest_count - rest_expected).powi(2) / rest_expected;
        cells += 1.0;
    }
    (statistic, cells - 1.0)
}

/// Asserts that the statistic is within 5 standard deviations of its mean (a wrong distribution is hundreds away).
pub fn assert_chi_squared(counts: &[u32], probs: &[f64], what: &str) {
    let (statistic, freedom) = chi_squared(counts, probs);
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 5.0;
    assert!(statistic < limit, "{what}: chi-squared {statistic:.1} with {freedom} degrees of freedom");
}

#[test]
fn reference_draws_follow_the_kept_probabilities() {
    let logits: Vec<f32> = (0..40).map(|i| ((i * 7919 % 97) as f32) / 20.0 - 2.0).collect();
    for warp in [
        Warp { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Warp { temperature: 0.7, top_k: 12, top_p: 0.9, min_p: 0.02 },
        Warp { temperature: 2.0, top_k: 0, top_p: 0.8, min_p: 0.0 },
    ] {
        let kept = reference::kept(&logits, &warp);
        let (mut by_position, mut by_seed) = (vec![0; 40], vec![0; 40]);
        for i in 0..20_000u32 {
            let a = reference::sample(&logits, &warp, Draw { seed: 5, position: i }).expect("finite");
            let b = reference::sample(&logits, &warp, Draw { seed: u64::from(i) << 20, position: 3 }).expect("finite");
            by_position[a as usize] += 1;
            by_seed[b as usize] += 1;
        }
        let mut probs = vec![0.0; 40];
        for (&t, &p) in kept.tokens.iter().zip(&kept.probs) {
            probs[t as usize] = p;
        }
        for (counts, what) in [(by_position, "positions"), (by_seed, "seeds")] {
            assert!(counts.iter().zip(&probs).all(|(&c, &p)| c == 0 || p > 0.0), "a dropped token was drawn");
            assert_chi_squared(&counts, &probs, what);
        }
    }
}
