//! The queue's promises on the real scheduler: shares, aging, long prompts, costs, pins.

use crate::sim::{COSTS, Engine, alone, limits, prompt};
use kvasir::ids::RequestId;
use kvasir::protocol::{FinishReason, RunError, StopRules};
use kvasir::scheduler::{
    CheckLevel, MAX_REASONS, NewPin, PlanInputs, QueuePolicy, RowKind, SchedulerConfig, WaitReason,
};
use std::time::Duration;

fn with_policy(queue_policy: QueuePolicy, max_num_seqs: u32) -> SchedulerConfig {
    SchedulerConfig { queue_policy, ..limits(max_num_seqs) }
}

fn counter(engine: &Engine, client: u64) -> u64 {
    engine.scheduler.clients().find(|view| view.client == client).map_or(0, |view| view.counter)
}

fn served(engine: &Engine, client: u64) -> u64 {
    engine.scheduler.clients().find(|view| view.client == client).map_or(0, |view| view.served_tokens)
}

#[test]
fn two_clients_with_work_waiting_are_served_alike_whatever_they_send() {
    const SLOTS: u32 = 4;
    let config = SchedulerConfig { check: CheckLevel::Cheap, ..with_policy(QueuePolicy::Fair, SLOTS) };
    let mut engine = Engine::new(400, config);
    // Client 1 floods with long requests before client 2 comes with short ones.
    let long = |id: u64| (prompt(60, id as u32), 30);
    let short = |id: u64| (prompt(9, id as u32), 5);
    for id in 1..=120 {
        let (tokens, max_tokens) = long(id);
        engine.add_for(1, 0, id, &tokens, max_tokens);
    }
    for _ in 0..20 {
        engine.step();
    }
    for id in 121..=700 {
        let (tokens, max_tokens) = short(id);
        engine.add_for(2, 0, id, &tokens, max_tokens);
    }
    // The bound: a prompt, and what the batch may still give out to one client.
    let bound = 60 + u64::from(SLOTS) * 30;
    let (first, second) = (served(&engine, 1), served(&engine, 2));
    let (mut steps, mut shared) = (0, 0);
    while [1, 2].iter().all(|c| engine.scheduler.clients().any(|view| view.client == *c && view.waiting > 0)) {
        let plan = engine.step();
        steps += 1;
        shared += u64::from(plan.waiting.iter().any(|(_, reason)| matches!(reason, WaitReason::Share { .. })));
        let (a, b) = (counter(&engine, 1), counter(&engine, 2));
        assert!(a.abs_diff(b) <= bound, "step {steps}: {a} and {b}");
        let (a, b) = (served(&engine, 1) - first, served(&engine, 2) - second);
        // What is charged is served a prompt later at most.
        assert!(a.abs_diff(b) <= 2 * (bound + 60), "step {steps}: {a} and {b} tokens served");
    }
    assert!(served(&engine, 2) - second > 10 * bound, "the contest is long against the bound: {steps} steps");
    assert!(shared > 0, "some wait because their client had more");
    engine.run_to_end();
}

#[test]
fn a_newcomer_does_not_wait_for_the_flood_before_it() {
    let mut engine = Engine::new(400, with_policy(QueuePolicy::Fair, 2));
    for id in 1..=200 {
        engine.add_for(1, 0, id, &prompt(10, id as u32), 6);
    }
    engine.step();
    engine.add_for(2, 0, 201, &prompt(10, 201), 6);
    let mut steps = 0;
    while engine.scheduler.get(RequestId(201)).is_some() {
        engine.step();
        steps += 1;
    }
    assert!(steps <= 20, "{steps}");
}

#[test]
fn no_priority_waits_for_ever() {
    let config = SchedulerConfig { aging_steps: 8, ..with_policy(QueuePolicy::Priority, 1) };
    let mut engine = Engine::new(60, config);
    engine.add_for(1, 0, 1, &prompt(3, 1), 2);
    engine.step();
    engine.add_for(1, 5, 2, &prompt(3, 2), 2);
    // Two steps per request, one of the best priority comes every two steps.
    let mut id = 2;
    let mut steps = 0u64;
    while engine.scheduler.get(RequestId(2)).is_some_and(|seq| seq.slot().is_none()) {
        if steps.is_multiple_of(2) {
            id += 1;
            engine.add_for(1, 0, id, &prompt(3, id as u32), 2);
        }
        engine.step();
        steps += 1;
        assert!(steps <= 5 * 8 + 4, "five levels are worth forty steps");
    }
    assert!(steps > 30, "until then those of better priority went before it: {steps}");
    engine.run_to_end();
}

#[test]
fn the_longest_cached_prefix_goes_first_and_the_others_still_get_their_turn() {
    let config = SchedulerConfig { aging_steps: 50, ..with_policy(QueuePolicy::LongestPrefix, 1) };
    let mut engine = Engine::new(100, config);
    engine.add(1, &prompt(40, 0), 1);
    engine.run_to_end();
    engine.add(2, &prompt(5, 2), 1);
    engine.step();
    // All arrive in one step; request 5 finds 40 tokens, request 4 finds 20, request 3 none.
    engine.add(6, &prompt(3, 6), 30);
    engine.step();
    engine.add(7, &prompt(12, 7), 1);
    engine.add(8, &[prompt(20, 0), prompt(4, 8)].concat(), 1);
    engine.add(9, &[prompt(40, 0), prompt(4, 9)].concat(), 1);
    let order: Vec<u64> = engine.scheduler.waiting().map(|seq| seq.id().0).collect();
    assert_eq!(order, [9, 8, 7]);
    // Requests with the long prefix keep coming, one per step: they overtake for 50 steps at most.
    let mut id = 9;
    let mut steps = 0;
    while engine.scheduler.get(RequestId(7)).is_some() {
        id += 1;
        engine.add(id, &[prompt(40, 0), prompt(4, id as u32)].concat(), 1);
        engine.step();
        steps += 1;
        assert!(steps <= 30 + 50 + 4, "it starves");
    }
    engine.run_to_end();
}

#[test]
fn prefixes_that_appear_while_a_request_waits_count() {
    let mut engine = Engine::new(100, with_policy(QueuePolicy::LongestPrefix, 1));
    engine.add(1, &prompt(24, 0), 3);
    engine.add(2, &prompt(9, 2), 1);
    engine.add(3, &[prompt(24, 0), prompt(3, 3)].concat(), 1);
    engine.step();
    let order: Vec<u64> = engine.scheduler.waiting().map(|seq| seq.id().0).collect();
    assert_eq!(order, [3, 2], "request 1 has published what request 3 begins with");
    engine.run_to_end();
}

#[test]
fn a_long_prompt_leaves_those_who_decode_their_token_in_every_step() {
    let config = SchedulerConfig { long_prefill_cap: 16, max_tokens_per_step: 24, ..limits(4) };
    let mut engine = Engine::new(100, config);
    engine.add(1, &prompt(4, 1), 30);
    engine.step();
    engine.add(2, &prompt(200, 2), 2);
    let mut num_mixed = 0;
    while engine.scheduler.get(RequestId(1)).is_some() {
        engine.step += 1;
        let inputs = PlanInputs { step: engine.step, max_tokens: 24, max_prefill_tokens: 10, costs: COSTS };
        let plan = engine.scheduler.plan_step(inputs);
        engine.batch.build(&plan, &engine.scheduler);
        let row = plan.rows.iter().find(|row| row.request == RequestId(1)).expect("it gets its token");
        assert_eq!((row.kind, row.wants_logits), (RowKind::Decode, true));
        if let Some(row) = plan.rows.iter().find(|row| row.request == RequestId(2) && row.num_tokens > 1) {
            assert!(row.num_tokens <= 10);
            num_mixed += 1;
        }
        engine.finish_step(&plan);
    }
    assert!(num_mixed >= 20, "{num_mixed}");
    engine.run_to_end();
    assert_eq!(engine.output[&2], alone(&prompt(200, 2), 2));
}

#[test]
fn the_queue_is_bounded_and_its_reasons_too() {
    let mut engine = Engine::new(40, SchedulerConfig { max_waiting: 100, ..limits(1) });
    for id in 1..=100 {
        engine.add(id, &prompt(3, id as u32), 2);
    }
    let refused = engine.try_add(101, &prompt(3, 0), StopRules::max_tokens(1));
    assert_eq!(refused, Err(RunError::QueueFull { limit: 100 }));
    let plan = engine.step();
    assert_eq!((plan.num_waiting, plan.waiting.len()), (99, MAX_REASONS));
    assert_eq!(plan.waiting[0].1, WaitReason::Slots { max_num_seqs: 1 });
    assert_eq!(plan.waiting[5].1, WaitReason::Behind { position: 5 });
}

#[test]
fn a_short_prompt_gets_its_token_soon_behind_a_long_one() {
    for decoding in [false, true] {
        let mut engine = Engine::new(2_000, SchedulerConfig { max_model_len: 6_000, ..limits(4) });
        if decoding {
            engine.add(9, &prompt(4, 9), 200);
            engine.step();
        }
        engine.add(1, &prompt(5_000, 1), 2);
        engine.step();
        engine.add(2, &prompt(12, 2), 2);
        let mut steps = 0;
        while !engine.output.contains_key(&2) {
            engine.step += 1;
            let max_prefill_tokens = if decoding { 16 } else { 64 };
            let plan = engine.scheduler.plan_step(PlanInputs {
                step: engine.step,
                max_tokens: 64,
                max_prefill_tokens,
                costs: COSTS,
            });
            engine.batch.build(&plan, &engine.scheduler);
            let prefill: u32 =
                plan.rows.iter().filter(|row| row.kind != RowKind::Decode).map(|row| row.num_tokens).sum();
            assert_eq!(prefill, max_prefill_tokens, "nothing of the budget is lost");
            engine.finish_step(&plan);
            steps += 1;
        }
        assert!(steps <= 2, "{steps} steps with {decoding}");
        engine.scheduler.abort(RequestId(9));
        engine.run_to_end();
        assert_eq!(engine.output[&1], alone(&prompt(5_000, 1), 2));
    }
}

#[test]
fn long_prompts_share_the_budget() {
    let mut engine = Engine::new(2_000, SchedulerConfig { max_model_len: 6_000, ..limits(4) });
    for id in 1..=3 {
        engine.add(id, &prompt(900, id as u32), 1);
    }
    for _ in 0..3 {
        engine.step();
    }
    let tokens: Vec<u32> = engine.step().rows.iter().map(|row| row.num_tokens).collect();
    assert_eq!(tokens, [22, 21, 21]);
    engine.run_to_end();
}

#[test]
fn who_waits_to_share_a_prefix_takes_nothing_from_its_leader() {
    let mut engine = Engine::new(400, limits(4));
    engine.add(1, &prompt(800, 0), 1);
    engine.add(2, &[prompt(790, 0), prompt(8, 2)].concat(), 1);
    let mut steps = 0;
    while engine.scheduler.get(RequestId(1)).is_some() {
        let plan = engine.step();
        assert_eq!(plan.num_tokens(), if steps < 12 { 64 } else { 32 });
        steps += 1;
    }
    engine.run_to_end();
    assert_eq!(engine.ended[&2].usage.cached_tokens, 790);
}

#[test]
fn planning_looks_at_those_who_run_and_join_not_at_those_who_wait() {
    for policy in [QueuePolicy::Fcfs, QueuePolicy::Priority, QueuePolicy::LongestPrefix, QueuePolicy::Fair] {
        let config = SchedulerConfig { check: CheckLevel::Cheap, ..with_policy(policy, 8) };
        let mut engine = Engine::new(400, config);
        for id in 1..=10_000 {
            engine.add_for(id % 700, (id % 5) as i32, id, &prompt(3, id as u32 % 50), 3);
        }
        for _ in 0..40 {
            let before = engine.scheduler.num_looked_at();
            let plan = engine.step();
            let looked_at = engine.scheduler.num_looked_at() - before;
            let due = plan.num_running as usize + plan.admitted.len() + MAX_REASONS + 18;
            assert!(looked_at <= due as u64, "{policy:?}: {looked_at} looked at, {due} are due");
        }
        let order: Vec<RequestId> = engine.scheduler.waiting().map(|seq| seq.id()).collect();
        for id in order.iter().step_by(3) {
            assert!(engine.scheduler.abort(*id));
        }
        let left: Vec<RequestId> = engine.scheduler.waiting().map(|seq| seq.id()).collect();
        let expected: Vec<RequestId> =
            order.iter().enumerate().filter(|(i, _)| i % 3 != 0).map(|(_, id)| *id).collect();
        if policy != QueuePolicy::Fair {
            assert_eq!(left, expected, "aborts leave the order of the others alone");
        }
        assert_eq!(left.len(), expected.len());
    }
}

fn pin(engine: &mut Engine, id: u64, tokens: &[u32]) -> Result<(), RunError> {
    let name = Some(format!("pin {id}"));
    engine.scheduler.add_pin(NewPin {
        id: RequestId(id),
        name,
        tokens: tokens.to_vec(),
        cache_salt: 0,
        adapter: 0,
        client: 0,
    })
}

#[test]
fn a_pinned_prefix_is_computed_at_once_and_outlives_any_pressure() {
    let mut engine = Engine::new(20, limits(2));
    pin(&mut engine, 1, &prompt(18, 0)).expect("it fits");
    engine.run_to_end();
    assert_eq!(engine.reason(1), &FinishReason::MaxTokens);
    assert_eq!(engine.scheduler.kv().counts().pinned, 4, "whole blocks of four tokens");
    for id in 2..=8 {
        engine.add(id, &prompt(30, id as u32), 20);
    }
    engine.run_to_end();
    engine.add(9, &[prompt(18, 0), prompt(3, 9)].concat(), 2);
    engine.run_to_end();
    assert_eq!(engine.ended[&9].usage.cached_tokens, 16);
    let listed = engine.scheduler.kv().prefixes(64, &|_| false);
    assert_eq!((listed[0].name.as_deref(), listed[0].hits, listed[0].hit_tokens), (Some("pin 1"), 1, 16));
    assert!(engine.scheduler.unpin(listed[0].id));
    engine.run_to_end();
    assert_eq!(engine.scheduler.kv().counts().pinned, 0);
}

#[test]
fn pins_leave_room_for_those_who_live_and_say_so() {
    let mut engine = Engine::new(20, limits(2));
    assert_eq!(pin(&mut engine, 1, &prompt(44, 0)), Err(RunError::PinLimit { needed: 11, pinned: 0, limit: 10 }));
    assert!(
        matches!(pin(&mut engine, 1, &prompt(3, 0)), Err(RunError::InvalidParam(fault)) if fault.field == "prefix")
    );
    pin(&mut engine, 2, &prompt(24, 2)).expect("six blocks of ten");
    engine.run_to_end();
    assert_eq!(pin(&mut engine, 3, &prompt(24, 3)), Err(RunError::PinLimit { needed: 6, pinned: 6, limit: 10 }));
    let refused = engine.try_add(4, &prompt(40, 4), StopRules::max_tokens(20));
    assert_eq!(refused, Err(RunError::NeverFits { needed: 15, total: 14 }));
    engine.add(5, &[prompt(24, 2), prompt(20, 5)].concat(), 20);
    assert_eq!(pin(&mut engine, 6, &prompt(20, 6)), Err(RunError::PinLimit { needed: 5, pinned: 6, limit: 4 }));
    engine.run_to_end();
    assert_eq!(engine.output[&5], alone(&[prompt(24, 2), prompt(20, 5)].concat(), 20));
}

#[test]
fn a_pin_under_way_counts_what_a_shorter_one_lets_go() {
    let mut engine = Engine::new(20, limits(2));
    pin(&mut engine, 1, &prompt(12, 0)).expect("three blocks");
    engine.run_to_end();
    pin(&mut engine, 2, &prompt(16, 0)).expect("one block more");
    let first = engine.scheduler.kv().prefixes(1, &|_| false)[0].id;
    assert!(engine.scheduler.unpin(first));
    let refused = engine.try_add(3, &prompt(60, 3), StopRules::max_tokens(8));
    assert_eq!(refused, Err(RunError::NeverFits { needed: 17, total: 16 }));
    engine.add(4, &prompt(60, 4), 4);
    engine.run_to_end();
    assert_eq!(engine.scheduler.kv().counts().pinned, 4);
    assert_eq!(engine.output[&4], alone(&prompt(60, 4), 4));
}

#[test]
fn pins_are_computed_again_after_a_lost_device() {
    let mut engine = Engine::new(20, limits(2));
    pin(&mut engine, 1, &prompt(18, 0)).expect("it fits");
    engine.run_to_end();
    engine.ended.clear();
    engine.executor.scramble();
    engine.scheduler.restart(crate::sim::pool(20));
    assert!(engine.scheduler.has_work(), "the pin is on its way again");
    engine.run_to_end();
    engine.add(9, &[prompt(18, 0), prompt(3, 9)].concat(), 2);
    engine.run_to_end();
    assert_eq!(engine.ended[&9].usage.cached_tokens, 16);
    assert_eq!(engine.output[&9], alone(&[prompt(18, 0), prompt(3, 9)].concat(), 2));
}

#[test]
fn equal_tokens_of_another_salt_or_adapter_are_not_shared() {
    let mut engine = Engine::new(60, limits(2));
    let tokens = prompt(20, 0);
    for (id, (salt, adapter)) in (1..).zip([(0, 0), (7, 0), (0, 7), (7, 7), (0, 7)]) {
        engine.add_keyed(id, salt, adapter, &tokens, 2);
        engine.run_to_end();
        assert_eq!(engine.ended[&id].usage.cached_tokens, if id == 5 { 19 } else { 0 });
    }
}

#[test]
fn figures_of_load_and_planning_are_those_of_a_busy_engine() {
    let load = kvasir::sim::run_load(400, || Duration::ZERO);
    assert!(load.mean_running > 20.0 && load.hit_tokens > 0 && load.tokens > 5_000, "{load:?}");
    let planning = kvasir::sim::run_planning(10_000, 20, || Duration::ZERO);
    assert!(planning.looked_at <= u64::from(planning.running) * 2 + MAX_REASONS as u64 + 3, "{planning:?}");
}
