//! Who gives way, and how a preempted request gets its K and V back.

use super::*;

/// Three requests in a pool that two fill; the first to be preempted and what the plan says of it.
fn first_victim(victim: VictimPolicy, priorities: [i32; 3]) -> (u64, Vec<(u64, u64)>) {
    let mut engine = Engine::new(9, SchedulerConfig { victim, ..limits(3) });
    for (i, len) in [9, 5, 7].into_iter().enumerate() {
        let new = NewSequence {
            id: RequestId(i as u64 + 1),
            prompt: prompt(len, len),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules::max_tokens(16),
            eos_ids: Vec::new(),
            priority: priorities[i],
            cache_salt: 0,
            adapter: 0,
            client: 0,
        };
        engine.scheduler.add(new).expect("it fits");
    }
    loop {
        let plan = engine.step();
        if let Some(preemption) = plan.preempted.first() {
            assert_eq!(preemption.policy, victim);
            let scores = preemption.scores.iter().map(|(id, score)| (id.0, *score)).collect();
            let victim = preemption.victim.0;
            engine.run_to_end();
            for (i, len) in [9, 5, 7].into_iter().enumerate() {
                assert_eq!(engine.output[&(i as u64 + 1)], alone(&prompt(len, len), 16));
            }
            return (victim, scores);
        }
    }
}

#[test]
fn the_policy_names_the_victim_and_its_scores_say_why() {
    assert_eq!(first_victim(VictimPolicy::LastIn, [0; 3]), (3, vec![(1, 0), (2, 1), (3, 2)]));
    let (victim, scores) = first_victim(VictimPolicy::LeastComputed, [0; 3]);
    assert_eq!(victim, 2, "it has the shortest prompt: {scores:?}");
    assert!(scores[1].1 > scores[0].1 && scores[1].1 > scores[2].1);
    assert_eq!(first_victim(VictimPolicy::Priority, [5, -1, 0]).0, 1, "the highest number runs last");
    assert_eq!(first_victim(VictimPolicy::Priority, [2, 2, -7]).0, 2, "the last to join among equals");
}

/// A pool of 6 blocks for two requests of 5 each, with host memory; what the second one's preemption came to.
fn preempted(preemption: PreemptionMode, num_host_blocks: u32, shares_prefixes: bool) -> Engine {
    let mut engine = Engine::new(6, SchedulerConfig { preemption, ..limits(2) });
    let config = KvConfig { num_blocks: 7, block_size: 4, enable_prefix_cache: shares_prefixes };
    let kv = KvCache::new(config).with_host_pool(num_host_blocks, false);
    engine.scheduler = Scheduler::new(engine.scheduler.config(), kv);
    engine.executor = engine.executor.with_host_blocks(num_host_blocks);
    engine.add(1, &prompt(8, 0), 12);
    engine.add(2, &prompt(8, 1), 12);
    engine.run_to_end();
    assert!(engine.ended[&2].usage.preemptions > 0);
    for id in [1, 2] {
        assert_eq!(engine.output[&id], alone(&prompt(8, id as u32 - 1), 12), "request {id}");
    }
    let counts = engine.scheduler.kv().counts();
    assert_eq!(counts.host.swapped, 0, "nothing is held when all have ended");
    engine
}

#[test]
fn swapped_request_computes_nothing_again() {
    for shares_prefixes in [false, true] {
        let totals = preempted(PreemptionMode::Swap, 8, shares_prefixes).scheduler.totals();
        assert!(totals.swaps > 0 && totals.restored_tokens >= 8, "{totals:?}");
        assert_eq!(totals.recomputed_tokens, 0, "{totals:?}");
        assert_eq!(totals.computed_tokens, 2 * (8 + 11), "each token but the last, once");
    }
}

#[test]
fn without_room_in_host_memory_the_request_is_computed_again() {
    for (mode, num_host_blocks) in
        [(PreemptionMode::Swap, 0), (PreemptionMode::Swap, 1), (PreemptionMode::Recompute, 8)]
    {
        let totals = preempted(mode, num_host_blocks, false).scheduler.totals();
        assert!(totals.swaps == 0 && totals.recomputed_tokens > 0, "{mode:?}: {totals:?}");
    }
}

#[test]
fn the_cheaper_way_is_chosen() {
    // COSTS favour the copy for blocks of four tokens.
    assert!(preempted(PreemptionMode::Auto, 8, true).scheduler.totals().swaps > 0);
}

#[test]
fn evicted_blocks_are_found_again_in_host_memory() {
    let mut engine = Engine::new(6, limits(1));
    let config = KvConfig { num_blocks: 7, block_size: 4, enable_prefix_cache: true };
    engine.scheduler = Scheduler::new(engine.scheduler.config(), KvCache::new(config).with_host_pool(6, false));
    engine.executor = engine.executor.with_host_blocks(6);
    engine.add(1, &prompt(17, 0), 2);
    engine.run_to_end();
    engine.add(2, &prompt(21, 1), 2);
    engine.run_to_end();
    let counts = engine.scheduler.kv().counts();
    assert!(counts.host.cached >= 4, "the blocks of the first went to host memory: {counts:?}");
    engine.add(3, &prompt(17, 0), 2);
    engine.run_to_end();
    assert_eq!(engine.ended[&3].usage.cached_tokens, 16);
    assert_eq!(engine.scheduler.kv().counts().host_hit_tokens, 16);
    assert_eq!(engine.output[&3], alone(&prompt(17, 0), 2));
    engine.add(4, &[prompt(16, 0), prompt(3, 9)].concat(), 2);
    engine.run_to_end();
    assert_eq!(engine.output[&4], alone(&[prompt(16, 0), prompt(3, 9)].concat(), 2));
    let counts = engine.scheduler.kv().counts();
    assert_eq!((counts.hit_tokens, counts.host_hit_tokens), (32, 16), "this time they are in the pool again");
}
