//! Faults that engines of this kind have shipped, and what would catch each here.
//!
//! | Fault | Caught by |
//! |---|---|
//! | A cancelled request takes shared blocks with it, at lengths around a block's end | `cancelling_one_of_two_that_share_a_prefix_leaves_the_other_alone`, `a_fork_from_any_position_…` |
//! | A cancelled request leaves those waiting who were to share what it computes | [`whoever_waits_for_a_prefix_goes_on_when_its_leader_is_cancelled`] |
//! | A cancelled request leaks what a preemption kept for it | [`cancelling_a_swapped_request_gives_back_what_was_kept_for_it`] |
//! | A block is shared before the step that writes it has committed | `blocks_are_not_shared_before_the_step_that_writes_them_commits` |
//! | Tokens after a stop are in the cache | `tokens_after_a_stop_never_enter_the_cache`, [`a_stop_at_the_end_of_a_block_publishes_what_was_computed_and_no_more`] |
//! | A request larger than the pool waits for ever | `what_can_never_fit_is_refused_…`, [`a_request_without_a_limit_ends_when_the_pool_is_full`] |
//! | Evictable blocks of a request's own prefix are counted twice | `an_idle_block_of_the_requests_own_prefix_is_counted_once` |
//! | Forgotten prefixes are found in another tier, or are missed by who relied on them | [`a_reset_forgets_host_memory_and_a_swapped_request_still_gets_its_tokens`] |
//! | Equal hashes, salts or adapters mix what different requests see | worlds of the simulation (short hashes), `equal_tokens_of_another_salt_or_adapter_are_not_shared` |
//! | A failed step is half kept | `a_step_that_never_ran_leaves_the_state_as_before`, `a_step_that_may_have_run_is_computed_again` |
//! | Results hang on load, chunks, cache, preemption or block ids | `metamorphic` |
//! | Numbers that are not finite, or damaged blocks, are shared | `blocks_that_gave_no_finite_logits_are_never_shared`, `canary` |
//! | A client that goes away or does not read holds blocks or others up | engine tests: `abort_frees_the_blocks_within_one_step`, `a_client_that_does_not_read_…` |
//! | A stream differs from the whole answer; characters are cut | `server::streams`, `tokenizers` |

use super::*;

/// With host memory for so many blocks.
fn with_host(num_usable: u32, num_host_blocks: u32, shares_prefixes: bool, config: SchedulerConfig) -> Engine {
    let mut engine = Engine::new(num_usable, config);
    let kv = KvConfig { enable_prefix_cache: shares_prefixes, ..pool(num_usable).config() };
    engine.scheduler = Scheduler::new(config, KvCache::new(kv).with_host_pool(num_host_blocks, false));
    engine.executor = engine.executor.with_host_blocks(num_host_blocks);
    engine
}

/// Two requests of which the second is swapped to host memory and waits.
fn one_swapped(num_host_blocks: u32, shares_prefixes: bool) -> Engine {
    let config = SchedulerConfig { preemption: PreemptionMode::Swap, ..limits(2) };
    let mut engine = with_host(6, num_host_blocks, shares_prefixes, config);
    engine.add(1, &prompt(8, 0), 14);
    engine.add(2, &prompt(9, 1), 12);
    while engine.scheduler.totals().swaps == 0 {
        engine.step();
    }
    engine
}

#[test]
fn cancelling_a_swapped_request_gives_back_what_was_kept_for_it() {
    for (in_flight, shares_prefixes) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut engine = one_swapped(8, shares_prefixes);
        // What is published is kept by its content and needs no place.
        assert!(shares_prefixes || engine.scheduler.kv().counts().host.swapped > 0);
        if in_flight {
            let plan = engine.plan();
            engine.scheduler.abort(RequestId(2));
            engine.finish_step(&plan);
        } else {
            engine.scheduler.abort(RequestId(2));
        }
        assert_eq!(engine.scheduler.kv().counts().host.swapped, 0, "its places are free");
        engine.run_to_end();
        assert_eq!(engine.output[&1], alone(&prompt(8, 0), 14));
        engine.add(3, &prompt(9, 1), 12);
        engine.run_to_end();
        assert_eq!(engine.output[&3], alone(&prompt(9, 1), 12), "the same prompt again");
    }
}

#[test]
fn whoever_waits_for_a_prefix_goes_on_when_its_leader_is_cancelled() {
    for len in 7..=13 {
        for in_flight in [false, true] {
            let mut engine = Engine::new(20, SchedulerConfig { long_prefill_cap: 5, ..limits(3) });
            engine.add(1, &prompt(len, 0), 6);
            engine.add(2, &prompt(len, 0), 6);
            let plan = engine.step();
            assert_eq!(plan.waiting.first(), Some(&(RequestId(2), WaitReason::Prefix { leader: RequestId(1) })));
            let plan = engine.plan();
            if in_flight {
                engine.scheduler.abort(RequestId(1));
            }
            engine.finish_step(&plan);
            engine.scheduler.abort(RequestId(1));
            engine.run_to_end();
            assert_eq!(engine.output[&2], alone(&prompt(len, 0), 6), "length {len}");
        }
    }
}

#[test]
fn a_stop_at_the_end_of_a_block_publishes_what_was_computed_and_no_more() {
    for len in 5..=9 {
        for after in 1..=4 {
            let tokens = prompt(len, 0);
            let output = alone(&tokens, after);
            let mut engine = Engine::new(12, limits(2));
            let stop_token_ids = vec![output[after - 1]];
            let rules = StopRules { stop_token_ids, ..StopRules::max_tokens(9) };
            engine.try_add(1, &tokens, rules).expect("it fits");
            engine.run_to_end();
            assert_eq!(engine.output[&1], output);
            // The stop token was drawn and never computed: what follows it starts there at the latest.
            let next = [tokens, output, prompt(3, 9)].concat();
            engine.add(2, &next, 4);
            engine.run_to_end();
            assert_eq!(engine.ended[&2].usage.cached_tokens, len + after as u32 - 1, "length {len}, {after} tokens");
            assert_eq!(engine.output[&2], alone(&next, 4));
        }
    }
}

#[test]
fn a_request_without_a_limit_ends_when_the_pool_is_full() {
    let mut engine = Engine::new(5, limits(2));
    let rules = StopRules { max_tokens: None, ..StopRules::max_tokens(1) };
    engine.try_add(1, &prompt(10, 0), rules.clone()).expect("it fits");
    engine.try_add(2, &prompt(3, 1), rules).expect("it fits");
    engine.run_to_end();
    for (id, start) in [(1, prompt(10, 0)), (2, prompt(3, 1))] {
        assert_eq!(engine.reason(id), &FinishReason::ContextFull, "request {id}");
        assert_eq!(engine.output[&id], alone(&start, engine.output[&id].len()));
        assert!(start.len() + engine.output[&id].len() >= 20, "it uses all of the pool");
    }
}

#[test]
fn a_reset_forgets_host_memory_and_a_swapped_request_still_gets_its_tokens() {
    let mut engine = one_swapped(16, true);
    engine.scheduler.reset_prefixes();
    let counts = engine.scheduler.kv().counts();
    assert_eq!((counts.host.cached, counts.cached_idle), (0, 0), "{counts:?}");
    engine.run_to_end();
    assert_eq!(engine.output[&1], alone(&prompt(8, 0), 14));
    assert_eq!(engine.output[&2], alone(&prompt(9, 1), 12));

    // Content that was evicted from the pool, then reset: it is found nowhere.
    let mut engine = with_host(6, 8, true, limits(1));
    engine.add(1, &prompt(17, 0), 2);
    engine.run_to_end();
    engine.add(2, &prompt(21, 1), 2);
    engine.run_to_end();
    assert!(engine.scheduler.kv().counts().host.cached >= 4);
    engine.scheduler.reset_prefixes();
    engine.add(3, &prompt(17, 0), 2);
    engine.run_to_end();
    assert_eq!(engine.ended[&3].usage.cached_tokens, 0);
    assert_eq!(engine.output[&3], alone(&prompt(17, 0), 2));
}
