//! Forced tokens are appended without running the model: the output is that of drawing them one by one, with fewer steps.

use crate::support::tiny_llama_engine as engine;
use kvasir::constrain::{Grammar, GrammarCompiler};
use kvasir::engine::EngineHandle;
use kvasir::ids::TokenId;
use kvasir::protocol::{
    Decoding, EngineEvent, FinishReason, GenerateRequest, OutputRules, OwnerTag, SamplingParams, StopRules,
    TokenConstraint,
};
use serde_json::json;

/// Tells masks only.
struct StepByStep(Box<dyn TokenConstraint>);

impl TokenConstraint for StepByStep {
    fn allow(&mut self, output: &[TokenId], mask: &mut [u32]) -> Result<(), String> {
        self.0.allow(output, mask)
    }

    fn fork(&self) -> Box<dyn TokenConstraint> {
        Box::new(StepByStep(self.0.fork()))
    }
}

fn grammar() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object", "additionalProperties": false,
        "required": ["temperature_in_celsius", "weather_description", "unit_of_measurement"],
        "properties": {
            "temperature_in_celsius": { "type": "integer", "minimum": -40, "maximum": 60 },
            "weather_description": { "enum": ["sunny_with_clouds", "rain_in_the_afternoon"] },
            "unit_of_measurement": { "const": "degrees_celsius" },
        },
    }))
}

/// What a choice came to: tokens, text, end.
type Output = (Vec<TokenId>, String, Option<FinishReason>);

fn request(seed: u64, n: u32, stop: StopRules) -> GenerateRequest {
    GenerateRequest {
        owner: OwnerTag { id: seed, label: "test".into() },
        prompt: (3..40).collect(),
        sampling: SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::greedy() },
        stop,
        decoding: Decoding::Sample { n, best_of: n },
        priority: 0,
        cache_salt: 0,
        adapter: 0,
    }
}

fn run(engine: &EngineHandle, requests: &[GenerateRequest], jumps: bool) -> Vec<Vec<Output>> {
    let model = engine.model().expect("a model");
    let compiler =
        GrammarCompiler::new(&model.tokenizer, model.vocab_size, &model.eos_token_ids).expect("a vocabulary");
    let runs: Vec<_> = requests
        .iter()
        .map(|request| {
            let constraint = compiler.compile(&grammar()).expect("a grammar");
            let constraint = if jumps { constraint } else { Box::new(StepByStep(constraint)) };
            let rules = OutputRules { constraint: Some(constraint), ..OutputRules::default() };
            engine.submit_with(request.clone(), rules).expect("a queue with room")
        })
        .collect();
    let collect = |(run, request): (&kvasir::engine::Run, &GenerateRequest)| {
        let mut outputs: Vec<Output> = vec![Default::default(); request.decoding.num_choices() as usize];
        while let Some(event) = run.recv() {
            match event {
                EngineEvent::Text { choice, delta, tokens, .. } => {
                    outputs[choice as usize].0.extend(tokens);
                    outputs[choice as usize].1.push_str(&delta);
                }
                EngineEvent::Choice { choice, reason, .. } => outputs[choice as usize].2 = Some(reason),
                EngineEvent::Finished { reason, .. } if outputs.len() == 1 => outputs[0].2 = Some(reason),
                EngineEvent::Failed { error } => panic!("{error}"),
                _ => {}
            }
        }
        outputs
    };
    runs.iter().zip(requests).map(collect).collect()
}

#[test]
fn forced_tokens_change_no_output_and_save_steps() {
    let Some(engine) = engine(|_| {}) else { return };
    let requests: Vec<GenerateRequest> =
        (0..4).map(|seed| request(seed, 1 + seed as u32 % 3, StopRules::max_tokens(200))).collect();
    let before = engine.step_totals();
    let plain = run(&engine, &requests, false);
    let between = engine.step_totals();
    let jumped = run(&engine, &requests, true);
    let after = engine.step_totals();
    assert_eq!(jumped, plain);
    let tokens: usize = jumped.iter().flatten().map(|(tokens, ..)| tokens.len()).sum();
    let (slow, fast) = (between.since(&before), after.since(&between));
    assert_eq!(slow.forced_tokens, 0);
    assert!(fast.forced_tokens * 3 > tokens as u64, "{} of {tokens} tokens were forced", fast.forced_tokens);
    assert!(fast.steps * 3 < slow.steps * 2, "{} steps instead of {}", fast.steps, slow.steps);
    for (_, text, finish) in jumped.iter().flatten() {
        assert!(matches!(finish, Some(FinishReason::StopToken(_))), "{finish:?}");
        let value: serde_json::Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(value["unit_of_measurement"], "degrees_celsius");
    }
    // The second round found the prompt in the cache, and nothing of it is held any more.
    let counts = engine.telemetry().snapshot().kv;
    assert!(counts.hit_tokens > 0);
}

#[test]
fn ends_fall_where_they_fall_token_by_token() {
    let Some(engine) = engine(|_| {}) else { return };
    let stops = |text: &str| StopRules { stop_strings: vec![text.into()], ..StopRules::max_tokens(200) };
    let mut requests: Vec<GenerateRequest> =
        (1..24).map(|max| request(u64::from(max), 1, StopRules::max_tokens(max))).collect();
    requests.extend(["_in_", "celsius", "description\"", "degrees_c"].map(|stop| request(7, 2, stops(stop))));
    let plain = run(&engine, &requests, false);
    let jumped = run(&engine, &requests, true);
    for (i, (plain, jumped)) in plain.iter().zip(&jumped).enumerate() {
        assert_eq!(jumped, plain, "request {i}");
    }
    let by_text = jumped.iter().flatten().filter(|(.., end)| matches!(end, Some(FinishReason::StopString(_)))).count();
    assert!(by_text >= 6, "{by_text} ended at a stop string");
}

#[test]
fn a_small_pool_and_small_steps_change_nothing() {
    let Some(roomy) = engine(|_| {}) else { return };
    let requests: Vec<GenerateRequest> = (0..6).map(|seed| request(seed, 1, StopRules::max_tokens(150))).collect();
    let alone: Vec<_> = requests.iter().flat_map(|one| run(&roomy, std::slice::from_ref(one), false)).collect();
    let tight = engine(|options| {
        options.num_gpu_blocks_override = Some(24);
        options.max_model_len = Some(256);
        options.max_num_batched_tokens = 9;
        options.max_num_seqs = 6;
    });
    let Some(tight) = tight else { return };
    assert_eq!(run(&tight, &requests, true), alone);
    assert!(tight.step_totals().forced_tokens > 0);
    assert!(tight.telemetry().snapshot().preemptions_total > 0, "the pool was too large to show anything");
}
