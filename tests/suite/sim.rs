//! Worlds of the simulation, and scenarios that once went wrong in engines of this kind.
//!
//! `SEED=n cargo test --release sim` replays one world, `SIM_WORLDS=n` runs so many.

mod faults;
mod forks;

use kvasir::batch::{RowSampling, StepBatch};
use kvasir::executor::paged_fake::{Attention, FakeConfig, Fault, PagedFake, Reply, UnpagedRun};
use kvasir::executor::{ExecError, Executor};
use kvasir::ids::{RequestId, TokenId};
use kvasir::kv::{BlockState, KvCache, KvConfig};
use kvasir::protocol::{FinishReason, RunError, SamplingParams, StopRules};
use kvasir::scheduler::{
    CheckLevel, Ended, NewSequence, PlanInputs, PreemptCosts, PreemptionMode, QueuePolicy, RowKind, Scheduler,
    SchedulerConfig, StepPlan, VictimPolicy, WaitReason,
};
use kvasir::sim::{SimOptions, WorldStats, run, run_world};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

mod swap;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[test]
fn every_request_gets_the_tokens_it_gets_alone() {
    if let Some(seed) = variable("SEED") {
        let outcome = run_world(seed);
        println!("seed {seed}: {outcome:?}");
        assert!(outcome.is_ok(), "seed {seed}: {outcome:?}");
        return;
    }
    let worlds = variable("SIM_WORLDS").unwrap_or(10_000);
    let started = Instant::now();
    let report = run(SimOptions { first_seed: 1, worlds }, || started.elapsed());
    println!("{worlds} worlds, {:.0} steps/s, {:?}", report.steps_s, report.stats);
    let first: Vec<_> = report.failures.iter().take(5).collect();
    assert!(first.is_empty(), "{} worlds failed, SEED=… replays one: {first:#?}", report.failures.len());
    assert_nothing_is_untried(&report.stats, worlds);
}

/// Worlds that never meet a rule prove nothing about it.
fn assert_nothing_is_untried(stats: &WorldStats, worlds: u64) {
    let counted = [
        ("mixed steps", stats.mixed_steps),
        ("preemptions", stats.preemptions),
        ("recomputed tokens", stats.recomputed_tokens),
        ("prefix hits", stats.hit_tokens),
        ("evictions", stats.evictions),
        ("shared blocks", stats.shared_blocks),
        ("aborts", stats.aborted),
        ("ends while in flight", stats.finished_in_flight),
        ("stop tokens", stats.stopped_by_token),
        ("full contexts", stats.context_full),
        ("rows that are not finite", stats.not_finite),
        ("released steps", stats.released_steps),
        ("abandoned steps", stats.abandoned_steps),
        ("restarts", stats.restarts),
        ("protected requests", stats.protected),
        ("beam searches", stats.searches),
        ("steps of several beams", stats.beam_steps),
        ("preemptions of a gang", stats.gang_preemptions),
        ("gangs in host memory", stats.gang_swaps),
        ("beams that come back from host memory", stats.restored_beams),
        ("gangs that wait for slots", stats.gang_waits),
        ("blocks saved along a beam tree", stats.beam_blocks_saved),
        ("swaps", stats.swaps),
        ("restored tokens", stats.restored_tokens),
        ("demoted blocks", stats.demoted),
        ("hits in host memory", stats.host_hit_tokens),
        ("hits on disk", stats.disk_hit_tokens),
        ("failed transfers", stats.failed_transfers),
        ("forks", stats.forks),
        ("forks while in flight", stats.forks_in_flight),
        ("forks of waiting requests", stats.forks_of_waiting),
        ("choices", stats.choices),
        ("copied blocks", stats.copied_blocks),
        ("failed steps that copy", stats.failed_copies),
        ("tokens found in part of a block", stats.partial_hit_tokens),
        ("tokens computed for their logits alone", stats.logits_only),
        ("requests that another client's went before", stats.waits_for_share),
        ("pinned prefixes", stats.pinned),
        ("hits on pinned prefixes", stats.pinned_hits),
        ("unpinned prefixes", stats.unpinned),
        ("pins computed again", stats.repinned),
        ("refused pins", stats.refused_pins),
        ("evicted prefixes", stats.evicted_prefixes),
        ("resets", stats.resets),
    ];
    for (what, count) in counted {
        assert!(count > 0 || worlds < 1_000, "{worlds} worlds had no {what}");
    }
}

const VOCAB: u32 = 1 << 20;
/// Copying a block both ways is cheaper than computing two tokens.
pub(crate) const COSTS: PreemptCosts = PreemptCosts { recompute_token_ns: 1_000, swap_block_ns: 1_500 };

/// Scheduler, fake executor and what each client has received.
pub(crate) struct Engine {
    pub scheduler: Scheduler,
    pub executor: PagedFake,
    pub batch: StepBatch,
    pub step: u64,
    pub output: BTreeMap<u64, Vec<TokenId>>,
    pub ended: BTreeMap<u64, Ended>,
}

pub(crate) fn limits(max_num_seqs: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_tokens_per_step: 64,
        max_model_len: 1_000,
        max_waiting: 20_000,
        long_prefill_cap: 64,
        watermark_blocks: 0,
        max_preemptions: 1_000,
        queue_policy: QueuePolicy::Fcfs,
        aging_steps: 256,
        victim: VictimPolicy::LastIn,
        preemption: PreemptionMode::Auto,
        check: CheckLevel::Full,
    }
}

pub(crate) fn pool(num_usable: u32) -> KvCache {
    KvCache::new(KvConfig { num_blocks: num_usable + 1, block_size: 4, enable_prefix_cache: true })
}

fn request(id: u64, prompt: &[TokenId], stop: StopRules) -> NewSequence {
    NewSequence {
        id: RequestId(id),
        prompt: prompt.to_vec(),
        sampling: SamplingParams::greedy(),
        seed: 0,
        stop,
        eos_ids: Vec::new(),
        cache_salt: 0,
        adapter: 0,
        priority: 0,
        client: 0,
    }
}

impl Engine {
    /// Blocks of 4 tokens; the null block comes on top of `num_usable`.
    pub fn new(num_usable: u32, config: SchedulerConfig) -> Self {
        let executor = PagedFake::new(FakeConfig {
            num_blocks: num_usable + 1,
            block_size: 4,
            vocab_size: VOCAB,
            attention: Attention::Every,
            reply: Reply::Tokens,
            step_delay: Duration::ZERO,
            kv_bytes_per_block: 0,
        });
        Engine {
            scheduler: Scheduler::new(config, pool(num_usable)),
            executor,
            batch: StepBatch::default(),
            step: 0,
            output: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    pub fn try_add(&mut self, id: u64, prompt: &[TokenId], stop: StopRules) -> Result<(), RunError> {
        self.scheduler.add(request(id, prompt, stop))
    }

    /// A request of this client and priority.
    pub fn add_for(&mut self, client: u64, priority: i32, id: u64, prompt: &[TokenId], max_tokens: u32) {
        let new = NewSequence { client, priority, ..request(id, prompt, StopRules::max_tokens(max_tokens)) };
        self.scheduler.add(new).expect("it fits");
    }

    /// A request of this salt and adapter.
    pub fn add_keyed(&mut self, id: u64, cache_salt: u64, adapter: u64, prompt: &[TokenId], max_tokens: u32) {
        let new = NewSequence { cache_salt, adapter, ..request(id, prompt, StopRules::max_tokens(max_tokens)) };
        self.scheduler.add(new).expect("it fits");
    }

    pub fn add(&mut self, id: u64, prompt: &[TokenId], max_tokens: u32) {
        self.try_add(id, prompt, StopRules::max_tokens(max_tokens)).expect("it fits");
    }

    pub fn plan(&mut self) -> StepPlan {
        self.step += 1;
        let plan = self.scheduler.plan_step(PlanInputs {
            step: self.step,
            max_tokens: 64,
            max_prefill_tokens: 64,
            costs: COSTS,
        });
        self.batch.build(&plan, &self.scheduler);
        plan
    }

    pub fn finish_step(&mut self, plan: &StepPlan) {
        let handle = self.executor.launch(&self.batch).expect("a valid batch");
        let output = self.executor.wait(handle).expect("no fault was injected");
        let committed = self.scheduler.commit(plan, &output.tokens, &output.not_finite);
        for row in committed.rows {
            self.output.entry(row.request.0).or_default().extend(row.token);
        }
        self.read_ends();
    }

    pub fn step(&mut self) -> StepPlan {
        let plan = self.plan();
        self.finish_step(&plan);
        plan
    }

    fn read_ends(&mut self) {
        for ended in self.scheduler.take_ended() {
            assert!(self.ended.insert(ended.request.0, ended).is_none(), "a request ended twice");
        }
    }

    pub fn run_to_end(&mut self) {
        for _ in 0..10_000 {
            if !self.scheduler.has_work() {
                let counts = self.scheduler.kv().counts();
                assert_eq!(counts.free + counts.cached_idle + counts.pinned, counts.total, "blocks are lost");
                return;
            }
            self.step();
        }
        panic!("work is left");
    }

    pub fn reason(&self, id: u64) -> &FinishReason {
        self.ended[&id].outcome.as_ref().expect("it ended well")
    }
}

pub(crate) fn alone(prompt: &[TokenId], num_output: usize) -> Vec<TokenId> {
    let sampling = RowSampling::new(&SamplingParams::greedy(), 0);
    let mut run = UnpagedRun::default();
    prompt.iter().for_each(|token| run.push(*token));
    let mut output = Vec::new();
    for _ in 0..num_output {
        output.push(run.draw(sampling, &[], &[], VOCAB));
        run.push(output[output.len() - 1]);
    }
    output
}

pub(crate) fn prompt(len: u32, tag: u32) -> Vec<TokenId> {
    (0..len).map(|i| i * 7 + tag * 1000).collect()
}

#[test]
fn cancelling_one_of_two_that_share_a_prefix_leaves_the_other_alone() {
    for len in 1..=13 {
        for cancel_in_step in 1..=6 {
            for in_flight in [false, true] {
                let mut engine = Engine::new(12, limits(3));
                engine.add(1, &prompt(len, 0), 8);
                engine.step();
                engine.add(2, &[prompt(len, 0), prompt(2, 5)].concat(), 8);
                engine.add(3, &prompt(len, 0), 8);
                for step in 1..=cancel_in_step {
                    let plan = engine.plan();
                    if step == cancel_in_step && in_flight {
                        engine.scheduler.abort(RequestId(1));
                    }
                    engine.finish_step(&plan);
                }
                engine.scheduler.abort(RequestId(1));
                engine.run_to_end();
                assert_eq!(engine.output[&2], alone(&[prompt(len, 0), prompt(2, 5)].concat(), 8), "length {len}");
                assert_eq!(engine.output[&3], alone(&prompt(len, 0), 8), "length {len}");
            }
        }
    }
}

#[test]
fn blocks_are_not_shared_before_the_step_that_writes_them_commits() {
    let tokens = prompt(9, 0);
    let mut engine = Engine::new(12, limits(2));
    engine.add(1, &tokens, 4);
    let plan = engine.plan();
    engine.add(2, &tokens, 4);
    engine.scheduler.abandon(&plan);
    let again = engine.step();
    assert!(again.admitted.is_empty(), "the blocks are not there yet: they are being computed again");
    assert_eq!(again.waiting.first(), Some(&(RequestId(2), WaitReason::Prefix { leader: RequestId(1) })));
    let admitted = engine.step().admitted;
    assert_eq!((admitted[0].request, admitted[0].cached_tokens), (RequestId(2), 8));
    engine.add(3, &tokens, 4);
    engine.run_to_end();
    assert_eq!(engine.ended[&3].usage.cached_tokens, 8, "both full blocks are found after the commit");
    for id in 1..=3 {
        assert_eq!(engine.output[&id], alone(&tokens, 4));
    }
}

#[test]
fn tokens_after_a_stop_never_enter_the_cache() {
    // Position 7 fills the second block in the step in flight when the stop string is seen.
    let tokens = prompt(6, 0);
    let output = alone(&tokens, 2);
    let mut engine = Engine::new(12, limits(2));
    engine.add(1, &tokens, 20);
    engine.step();
    engine.step();
    let plan = engine.plan();
    assert_eq!((plan.rows[0].from, plan.rows[0].num_tokens), (7, 1));
    assert!(engine.scheduler.finish(RequestId(1), FinishReason::StopString("x".into())));
    engine.finish_step(&plan);
    assert_eq!(engine.output[&1], output, "the token sampled after the stop is dropped");
    engine.add(2, &[tokens, output, prompt(3, 9)].concat(), 1);
    engine.run_to_end();
    assert_eq!(engine.ended[&2].usage.cached_tokens, 7, "what was computed after the stop is not found");
}

#[test]
fn a_stop_token_is_counted_but_not_computed() {
    let tokens = prompt(3, 0);
    let stop = alone(&tokens, 2)[1];
    let mut engine = Engine::new(12, limits(2));
    let rules = StopRules { stop_token_ids: vec![stop], ..StopRules::max_tokens(9) };
    engine.try_add(1, &tokens, rules).expect("it fits");
    engine.run_to_end();
    assert_eq!(engine.reason(1), &FinishReason::StopToken(stop));
    assert_eq!(engine.ended[&1].usage.output_tokens, 2);
    assert_eq!(engine.scheduler.totals().computed_tokens, 4, "prompt and first output token");
}

#[test]
fn what_can_never_fit_is_refused_with_both_numbers_and_what_just_fits_runs() {
    let mut engine = Engine::new(5, limits(2));
    let refused = engine.try_add(1, &prompt(10, 0), StopRules::max_tokens(11));
    assert_eq!(refused, Err(RunError::NeverFits { needed: 6, total: 5 }));
    engine.add(2, &prompt(10, 0), 10);
    engine.run_to_end();
    assert_eq!(engine.output[&2], alone(&prompt(10, 0), 10));

    let mut engine = Engine::new(500, limits(2));
    let refused = |prompt_len, max_tokens| {
        let rules = StopRules { max_tokens, ..StopRules::max_tokens(1) };
        engine.try_add(1, &prompt(prompt_len, 0), rules).expect_err("it does not fit")
    };
    let mut refused = refused;
    assert_eq!(refused(0, Some(1)), RunError::EmptyPrompt);
    assert_eq!(refused(1001, Some(1)), RunError::PromptTooLong { prompt: 1001, max_model_len: 1000 });
    assert_eq!(refused(1000, None), RunError::ContextExceeded { needed: 1001, max_model_len: 1000 });
    assert_eq!(refused(900, Some(101)), RunError::ContextExceeded { needed: 1001, max_model_len: 1000 });
    assert!(matches!(refused(5, Some(0)), RunError::InvalidParam(fault) if fault.field == "max_tokens"));
}

#[test]
fn an_idle_block_of_the_requests_own_prefix_is_counted_once() {
    let mut engine = Engine::new(6, limits(3));
    engine.add(1, &prompt(16, 0), 1);
    engine.run_to_end();
    assert_eq!(engine.scheduler.kv().counts().cached_idle, 4);
    engine.add(2, &prompt(5, 1), 3);
    engine.step();
    assert_eq!(engine.scheduler.kv().counts().free, 0);
    engine.add(3, &[prompt(16, 0), prompt(4, 2)].concat(), 1);
    let plan = engine.step();
    assert_eq!(plan.waiting, [(RequestId(3), WaitReason::Blocks { needed: 1, available: 0 })]);
    engine.run_to_end();
    assert_eq!(engine.ended[&3].usage.cached_tokens, 16);
    assert_eq!(engine.output[&3], alone(&[prompt(16, 0), prompt(4, 2)].concat(), 1));
}

#[test]
fn preempted_request_resumes_with_same_tokens() {
    let mut engine = Engine::new(6, limits(2));
    engine.add(1, &prompt(8, 0), 12);
    engine.add(2, &prompt(8, 1), 12);
    engine.run_to_end();
    assert_eq!(engine.ended[&1].usage.preemptions, 0, "the first to come is the last to give way");
    assert!(engine.ended[&2].usage.preemptions > 0);
    assert_eq!(engine.output[&1], alone(&prompt(8, 0), 12));
    assert_eq!(engine.output[&2], alone(&prompt(8, 1), 12));
}

#[test]
fn requests_that_arrive_together_compute_their_common_prefix_once() {
    let mut engine = Engine::new(40, limits(4));
    let common = prompt(12, 0);
    for id in 1..=3 {
        let own = prompt(3, id as u32);
        engine.add(id, &[common.clone(), own].concat(), 4);
    }
    let plan = engine.step();
    assert_eq!(plan.rows.len(), 1, "the first computes, the others wait to share");
    assert_eq!(plan.waiting.first(), Some(&(RequestId(2), WaitReason::Prefix { leader: RequestId(1) })));
    let plan = engine.step();
    let cached: Vec<u32> = plan.admitted.iter().map(|a| a.cached_tokens).collect();
    assert_eq!(cached, [12, 12]);
    engine.run_to_end();
    for id in 1..=3 {
        assert_eq!(engine.output[&id], alone(&[common.clone(), prompt(3, id as u32)].concat(), 4));
    }
}

#[test]
fn a_preemption_is_told_with_beneficiary_and_loss_and_nothing_is_admitted_beside_it() {
    let mut engine = Engine::new(6, limits(3));
    engine.add(1, &prompt(8, 0), 16);
    engine.add(2, &prompt(8, 1), 12);
    engine.step();
    engine.add(3, &prompt(1, 2), 1);
    let plan = loop {
        let plan = engine.step();
        if !plan.preempted.is_empty() {
            break plan;
        }
    };
    let preemption = &plan.preempted[0];
    assert_eq!((preemption.victim, preemption.beneficiary), (RequestId(2), RequestId(1)));
    assert_eq!((preemption.freed_blocks, preemption.lost_tokens), (3, 12));
    assert!(plan.admitted.is_empty());
    assert_eq!(plan.waiting.first(), Some(&(RequestId(2), WaitReason::Preemption)));
    let resumed = loop {
        let plan = engine.step();
        if let Some(admitted) = plan.admitted.first() {
            assert_eq!((admitted.request, admitted.is_resumed), (RequestId(2), true));
            break plan;
        }
    };
    assert!(resumed.rows.iter().any(|row| matches!(row.kind, RowKind::Recompute { .. })));
    assert!(engine.scheduler.totals().recomputed_tokens > 0);
    engine.run_to_end();
}

#[test]
fn a_step_that_never_ran_leaves_the_state_as_before() {
    let mut tried = Tried::default();
    // The third ends just after the fourth gave way to it, which then comes back protected behind the others.
    let max_tokens = [40, 38, 14, 20];
    for num_usable in 13..24 {
        for max_preemptions in [1, 2, 1_000] {
            let mut engine = Engine::new(num_usable, SchedulerConfig { max_preemptions, ..limits(4) });
            engine.add(9, &prompt(5, 7), 1);
            engine.run_to_end();
            let prompts = [8, 7, 5, 9].map(|len| prompt(len, len));
            for (id, prompt) in (1..).zip(&prompts) {
                engine.add(id, prompt, max_tokens[id as usize - 1]);
            }
            while engine.scheduler.has_work() {
                fail_one_step(&mut engine, &mut tried);
                engine.step();
            }
            for (id, prompt) in (1..).zip(&prompts) {
                assert_eq!(engine.output[&id], alone(prompt, max_tokens[id as usize - 1] as usize));
            }
        }
    }
    assert!(tried.preempted > 0 && tried.evicted > 0 && tried.admitted > 0, "{tried:?}");
    assert!(tried.not_last > 0, "a protected request behind the victim: {tried:?}");
}

/// What the steps that failed had decided.
#[derive(Debug, Default)]
struct Tried {
    preempted: usize,
    not_last: usize,
    evicted: u32,
    admitted: usize,
}

fn fail_one_step(engine: &mut Engine, tried: &mut Tried) {
    let before = engine.scheduler.state();
    let last = engine.scheduler.running().last().map(|seq| seq.id());
    engine.scheduler.drain_block_events();
    let plan = engine.plan();
    tried.preempted += plan.preempted.len();
    tried.not_last += usize::from(plan.preempted.first().is_some_and(|p| Some(p.victim) != last));
    tried.admitted += plan.admitted.len();
    tried.evicted += engine.scheduler.kv().counts().evicted_this_step;
    engine.executor.inject(Fault::Launch(ExecError::OutOfMemory("test".into())));
    engine.executor.launch(&engine.batch).expect_err("injected");
    engine.scheduler.release(&plan);
    assert_eq!(engine.scheduler.state(), before);
    assert_eq!(engine.scheduler.drain_block_events().count(), 0, "what never happened is not told");
}

#[test]
fn a_step_that_may_have_run_is_computed_again() {
    let mut engine = Engine::new(6, limits(2));
    engine.add(1, &prompt(8, 0), 12);
    engine.add(2, &prompt(7, 1), 12);
    while engine.scheduler.has_work() {
        let plan = engine.plan();
        engine.executor.inject(Fault::Wait(ExecError::OutOfMemory("test".into())));
        let handle = engine.executor.launch(&engine.batch).expect("launched");
        engine.executor.wait(handle).expect_err("injected");
        engine.scheduler.abandon(&plan);
        engine.step();
    }
    assert_eq!(engine.output[&1], alone(&prompt(8, 0), 12));
    assert_eq!(engine.output[&2], alone(&prompt(7, 1), 12));
}

#[test]
fn after_a_lost_device_every_request_goes_on_in_order_of_arrival() {
    let mut engine = Engine::new(20, limits(3));
    for id in 1..=4 {
        engine.add(id, &prompt(6, id as u32), 10);
    }
    for _ in 0..4 {
        engine.step();
    }
    let plan = engine.plan();
    engine.executor.scramble();
    assert!(engine.scheduler.abort(RequestId(2)), "ends when the step is over");
    engine.scheduler.restart(pool(20));
    engine.read_ends();
    assert_eq!(engine.reason(2), &FinishReason::Aborted);
    let order: Vec<u64> = engine.scheduler.waiting().map(|seq| seq.id().0).collect();
    assert_eq!((order, plan.rows.len()), (vec![1, 3, 4], 3));
    engine.run_to_end();
    for id in [1, 3, 4] {
        assert_eq!(engine.output[&id], alone(&prompt(6, id as u32), 10));
    }
}

#[test]
fn a_smaller_pool_after_a_lost_device_ends_what_can_never_fit() {
    let mut engine = Engine::new(20, limits(3));
    engine.add(1, &prompt(6, 1), 10);
    engine.add(2, &prompt(6, 2), 40);
    engine.step();
    engine.scheduler.restart(pool(4));
    engine.read_ends();
    assert_eq!(engine.ended[&2].outcome, Err(RunError::NeverFits { needed: 12, total: 4 }));
    assert!(!engine.ended.contains_key(&1));
}

#[test]
fn blocks_that_gave_no_finite_logits_are_never_shared() {
    let tokens = prompt(8, 0);
    let mut engine = Engine::new(12, limits(3));
    engine.add(1, &tokens, 20);
    engine.step();
    engine.executor.inject(Fault::NotFinite(0));
    engine.step();
    assert_eq!(engine.ended[&1].outcome, Err(RunError::NotFinite { position: 9 }));
    let kept = engine.scheduler.kv().blocks().filter(|block| block.state == BlockState::CachedIdle).count();
    assert_eq!(kept, 0);
    engine.add(2, &[tokens.clone(), vec![3]].concat(), 4);
    engine.run_to_end();
    assert_eq!(engine.ended[&2].usage.cached_tokens, 0);
    assert_eq!(engine.output[&2], alone(&[tokens, vec![3]].concat(), 4));
}

#[test]
fn a_request_is_preempted_at_most_so_often() {
    for max_preemptions in 0..3 {
        let mut engine = Engine::new(9, SchedulerConfig { max_preemptions, ..limits(5) });
        for id in 1..=6 {
            engine.add(id, &prompt(4 + id as u32, id as u32), 20);
        }
        engine.run_to_end();
        for id in 1..=6 {
            assert!(engine.ended[&id].usage.preemptions <= max_preemptions);
            assert_eq!(engine.output[&id], alone(&prompt(4 + id as u32, id as u32), 20));
        }
    }
}

#[test]
fn admissions_keep_the_watermark_free_while_anybody_runs() {
    let mut engine = Engine::new(8, SchedulerConfig { watermark_blocks: 3, ..limits(4) });
    engine.add(1, &prompt(14, 1), 2);
    engine.add(2, &prompt(5, 2), 2);
    let plan = engine.step();
    assert_eq!(plan.admitted.len(), 1);
    assert_eq!(plan.waiting, [(RequestId(2), WaitReason::Blocks { needed: 2, available: 1 })]);
    engine.add(3, &prompt(28, 3), 2);
    engine.run_to_end();
    assert_eq!(engine.output[&3], alone(&prompt(28, 3), 2), "a request that needs the whole pool runs when alone");
}

#[test]
fn a_slot_stays_with_its_request() {
    let mut engine = Engine::new(40, limits(3));
    let mut slots = BTreeMap::new();
    for id in 1..=7 {
        engine.add(id, &prompt(3, id as u32), 2 * id as u32);
    }
    while engine.scheduler.has_work() {
        for row in engine.step().rows {
            assert_eq!(*slots.entry(row.request).or_insert(row.slot), row.slot);
        }
    }
}
