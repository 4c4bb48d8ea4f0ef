//! Forks on the real executor: blocks shared and copied change no bit.

use super::*;
use kvasir::batch::{StepBatch, Want};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kv::{KvCache, KvConfig};
use kvasir::protocol::{SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, NewFork, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePlace, QueuePolicy, Scheduler,
    SchedulerConfig, VictimPolicy,
};
use std::collections::BTreeMap;

const BLOCK: u32 = 8;
const MODE: Mode = Mode { block_size: BLOCK, ..DEFAULT_MODE };

/// The real scheduler and cache over a real model; the most likely token is the next.
struct Engine<'a> {
    scheduler: Scheduler,
    executor: &'a mut WgpuExecutor,
    batch: StepBatch,
    step: u64,
    max_tokens: u32,
    num_copies: usize,
    /// Of each output token.
    logits: BTreeMap<u64, Vec<Vec<f32>>>,
    tokens: BTreeMap<u64, Vec<TokenId>>,
}

impl<'a> Engine<'a> {
    fn new(executor: &'a mut WgpuExecutor, max_tokens: u32, enable_prefix_cache: bool) -> Self {
        let config = SchedulerConfig {
            max_num_seqs: 8,
            max_tokens_per_step: max_tokens,
            max_model_len: 256,
            max_waiting: 100,
            long_prefill_cap: max_tokens,
            watermark_blocks: 0,
            max_preemptions: 1_000,
            queue_policy: QueuePolicy::Fcfs,
            aging_steps: 256,
            victim: VictimPolicy::LastIn,
            preemption: PreemptionMode::Recompute,
            check: CheckLevel::Full,
        };
        let kv = KvConfig { num_blocks: executor.num_blocks(), block_size: BLOCK, enable_prefix_cache };
        Engine {
            scheduler: Scheduler::new(config, KvCache::new(kv)),
            executor,
            batch: StepBatch::default(),
            step: 0,
            max_tokens,
            num_copies: 0,
            logits: BTreeMap::new(),
            tokens: BTreeMap::new(),
        }
    }

    fn sequence(id: u64, prompt: &[TokenId], max_tokens: u32) -> NewSequence {
        NewSequence {
            id: RequestId(id),
            prompt: prompt.to_vec(),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules { ignore_eos: true, ..StopRules::max_tokens(max_tokens) },
            eos_ids: Vec::new(),
            priority: 0,
            cache_salt: 0,
            adapter: 0,
            client: 0,
        }
    }

    fn add(&mut self, id: u64, prompt: &[TokenId], max_tokens: u32) {
        self.scheduler.add(Self::sequence(id, prompt, max_tokens)).expect("it fits");
    }

    fn fork(&mut self, parent: u64, id: u64, keep_tokens: u32, own: &[TokenId], max_tokens: u32) {
        let sequence = Self::sequence(id, own, max_tokens);
        let fork = NewFork { keep_tokens, sequence, place: QueuePlace::AsNew };
        self.scheduler.fork(RequestId(parent), fork).expect("it fits");
    }

    fn step(&mut self) {
        self.step += 1;
        let inputs = PlanInputs {
            step: self.step,
            max_tokens: self.max_tokens,
            max_prefill_tokens: self.max_tokens,
            costs: PreemptCosts::default(),
        };
        let plan = self.scheduler.plan_step(inputs);
        self.num_copies += plan.copies.len();
        self.batch.build(&plan, &self.scheduler);
        self.batch.want = Want::Logits;
        let handle = self.executor.launch(&self.batch).expect("a valid batch");
        let logits = self.executor.wait(handle).expect("it runs").logits.expect("wanted");
        let rows: Vec<&[f32]> = logits.chunks_exact(self.executor.vocab_size() as usize).collect();
        let tokens: Vec<TokenId> = rows.iter().map(|row| argmax(row)).collect();
        let committed = self.scheduler.commit(&plan, &tokens, &vec![false; tokens.len()]);
        for row in committed.rows {
            let (Some(token), Some(idx)) = (row.token, row.logit_idx) else { continue };
            self.tokens.entry(row.request.0).or_default().push(token);
            self.logits.entry(row.request.0).or_default().push(rows[idx as usize].to_vec());
        }
        self.scheduler.take_ended();
        self.scheduler.drain_block_events();
    }

    fn run_to_end(&mut self) {
        while self.scheduler.has_work() {
            self.step();
        }
    }
}

/// Logits and tokens of a request that runs by itself, in one chunk.
fn alone(executor: &mut WgpuExecutor, prompt: &[TokenId], max_tokens: u32) -> (Vec<Vec<f32>>, Vec<TokenId>) {
    let mut engine = Engine::new(executor, 256, false);
    engine.add(1, prompt, max_tokens);
    engine.run_to_end();
    (engine.logits.remove(&1).expect("it has output"), engine.tokens.remove(&1).expect("it has output"))
}

#[test]
fn a_fork_has_the_bits_of_its_tokens_alone_wherever_it_starts() {
    let root = core_fixtures();
    for case in [case(&root, "tiny", "llama"), case(&root, "gguf", "q4_1")].into_iter().flatten() {
        for mode in [MODE, Mode { precise: true, ..MODE }] {
            let Some(mut executor) = open_case(&case, mode) else { return };
            let prompt: Vec<TokenId> = case.prompts[0].ids.iter().copied().cycle().take(21).collect();
            let (parent_logits, parent_tokens) = alone(&mut executor, &prompt, 14);
            let all = [&prompt[..], &parent_tokens].concat();
            for has_cache in [true, false] {
                for max_tokens in [256, 8] {
                    let mut engine = Engine::new(&mut executor, max_tokens, has_cache);
                    engine.add(1, &prompt, 14);
                    while engine.tokens.get(&1).is_none_or(|tokens| tokens.len() < 7) {
                        engine.step();
                    }
                    // Around block boundaries, inside of blocks, in the prompt and in the output; with and without own tokens.
                    let starts: Vec<(u32, &[TokenId])> =
                        vec![(16, &[5, 6, 7]), (17, &[5]), (23, &[]), (24, &[]), (25, &[9, 9]), (27, &[]), (3, &[1])];
                    for (id, (keep, own)) in (2..).zip(&starts) {
                        engine.fork(1, id, *keep, own, 6);
                    }
                    engine.run_to_end();
                    assert!(engine.num_copies >= 5, "{} copies", engine.num_copies);
                    let (logits, tokens) = (engine.logits.clone(), engine.tokens.clone());
                    assert!(logits[&1] == parent_logits && tokens[&1] == parent_tokens, "{}: the parent", case.name);
                    for (id, (keep, own)) in (2..).zip(&starts) {
                        let whole = [&all[..*keep as usize], own].concat();
                        let (want_logits, want_tokens) = alone(&mut executor, &whole, 6);
                        assert_eq!(tokens[&id], want_tokens, "{} {mode:?} keep {keep}", case.name);
                        assert!(logits[&id] == want_logits, "{} {mode:?} keep {keep} changed bits", case.name);
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_found_in_part_change_no_bit() {
    let Some(case) = case(&core_fixtures(), "tiny", "llama") else { return };
    let Some(mut executor) = open_case(&case, MODE) else { return };
    let prompt: Vec<TokenId> = case.prompts[0].ids.iter().copied().cycle().take(21).collect();
    let mut requests: Vec<Vec<TokenId>> = Vec::new();
    for (keep, own) in [(21, &[][..]), (20, &[7, 8][..]), (12, &[3][..]), (13, &[3, 4, 5, 6, 7][..]), (16, &[2][..])] {
        requests.push([&prompt[..keep], own].concat());
    }
    let want: Vec<_> = requests.iter().map(|prompt| alone(&mut executor, prompt, 5)).collect();
    let mut engine = Engine::new(&mut executor, 256, true);
    engine.add(1, &prompt, 5);
    engine.run_to_end();
    for (id, prompt) in (2..).zip(&requests) {
        engine.add(id, prompt, 5);
        engine.run_to_end();
    }
    assert!(engine.num_copies >= 4 && engine.scheduler.kv().counts().partial_hit_tokens >= 10);
    for (id, (logits, tokens)) in (2..).zip(&want) {
        assert_eq!(&engine.tokens[&id], tokens, "request {id}");
        assert!(&engine.logits[&id] == logits, "request {id} changed bits");
    }
}
