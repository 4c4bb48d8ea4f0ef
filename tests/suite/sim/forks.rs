//! Scenarios of forks, copies on write and blocks found in part.

use super::*;
use kvasir::scheduler::{NewFork, QueuePlace};

impl Engine {
    /// A fork with the first `keep_tokens` tokens of a live parent, then `own`.
    fn fork(&mut self, parent: u64, id: u64, keep_tokens: u32, own: &[TokenId], max_tokens: u32) {
        let sequence = NewSequence {
            id: RequestId(id),
            prompt: own.to_vec(),
            sampling: SamplingParams::greedy(),
            seed: 0,
            stop: StopRules::max_tokens(max_tokens),
            eos_ids: Vec::new(),
            priority: 0,
            cache_salt: 0,
            adapter: 0,
            client: 0,
        };
        let fork = NewFork { keep_tokens, sequence, place: QueuePlace::AsNew };
        self.scheduler.fork(RequestId(parent), fork).expect("it fits");
    }

    fn tokens_of(&self, id: u64) -> Vec<TokenId> {
        self.scheduler.get(RequestId(id)).expect("live").tokens().to_vec()
    }
}

fn without_cache(num_usable: u32, config: SchedulerConfig) -> Engine {
    let mut engine = Engine::new(num_usable, config);
    let kv = KvConfig { num_blocks: num_usable + 1, block_size: 4, enable_prefix_cache: false };
    engine.scheduler = Scheduler::new(config, KvCache::new(kv));
    engine
}

#[test]
fn a_fork_from_any_position_gets_its_own_tokens_and_its_parent_too_whoever_is_cancelled() {
    for has_cache in [true, false] {
        for keep in 1..=13 {
            for own_len in [0, 1, 5] {
                for cancelled in [0, 1, 2] {
                    let make = if has_cache { Engine::new } else { without_cache };
                    let mut engine = make(20, limits(3));
                    engine.add(1, &prompt(9, 0), 12);
                    (0..5).for_each(|_| drop(engine.step()));
                    let own = prompt(own_len, 3);
                    let whole = [&engine.tokens_of(1)[..keep], &own].concat();
                    engine.fork(1, 2, keep as u32, &own, 9);
                    engine.step();
                    engine.step();
                    if cancelled > 0 {
                        assert!(engine.scheduler.abort(RequestId(cancelled)));
                    }
                    engine.run_to_end();
                    let (parent, fork) = (alone(&prompt(9, 0), 12), alone(&whole, 9));
                    assert!(parent.starts_with(&engine.output[&1]) && fork.starts_with(&engine.output[&2]));
                    assert_eq!(engine.output[&1].len() == 12, cancelled != 1, "keep {keep} own {own_len}");
                    assert_eq!(engine.output[&2].len() == 9, cancelled != 2, "keep {keep} own {own_len}");
                }
            }
        }
    }
}

#[test]
fn a_fork_computes_what_is_not_shared_and_copies_the_block_in_which_it_differs() {
    for (keep, copies) in [(8, 0), (7, 1), (9, 1)] {
        let mut engine = without_cache(20, limits(3));
        engine.add(1, &prompt(10, 0), 12);
        engine.step();
        engine.fork(1, 2, keep, &prompt(3, 5), 1);
        let plan = engine.step();
        assert_eq!(plan.copies.len(), copies, "keep {keep}");
        let row = plan.rows.iter().find(|row| row.request == RequestId(2)).expect("it joins at once");
        assert_eq!((row.from, row.num_tokens), (keep, 3));
        assert_eq!(engine.scheduler.kv().counts().shared, 0, "it has ended");
        assert_eq!(engine.ended[&2].usage.cached_tokens, keep);
        engine.run_to_end();
    }
}

#[test]
fn a_fork_of_a_whole_prompt_computes_its_last_token_for_the_logits_alone() {
    for len in [7, 8, 9] {
        let mut engine = without_cache(20, limits(4));
        engine.add(1, &prompt(len, 0), 6);
        engine.step();
        for id in 2..=4 {
            engine.fork(1, id, len, &[], 6);
        }
        let plan = engine.step();
        for row in &plan.rows[1..] {
            assert_eq!((row.from, row.num_tokens, row.write_from), (len - 1, 1, len), "nothing is written");
        }
        let counts = engine.scheduler.kv().counts();
        let partial = u32::from(!len.is_multiple_of(4));
        assert_eq!((counts.saved, plan.copies.len() as u32), (len / 4 * 3, partial * 3));
        engine.run_to_end();
        for id in 1..=4 {
            assert_eq!(engine.output[&id], alone(&prompt(len, 0), 6), "length {len}");
        }
    }
}

#[test]
fn forks_of_a_parent_that_still_reads_wait_for_what_it_computes() {
    let config = SchedulerConfig { long_prefill_cap: 6, ..limits(3) };
    for mut engine in [Engine::new(20, config), without_cache(20, config)] {
        engine.add(1, &prompt(20, 0), 2);
        engine.step();
        engine.fork(1, 2, 20, &[], 2);
        let plan = engine.step();
        assert_eq!(plan.waiting, [(RequestId(2), WaitReason::Prefix { leader: RequestId(1) })]);
        engine.run_to_end();
        assert_eq!(
            engine.scheduler.totals().computed_tokens,
            20 + 1 + 2,
            "the prompt once, then a token each, and the logits"
        );
        assert_eq!(engine.output[&2], alone(&prompt(20, 0), 2));
    }
}

#[test]
fn a_failed_step_that_copies_leaves_no_trace_or_is_computed_again() {
    for keep in 5..=9 {
        for fault in
            [Fault::Launch(ExecError::OutOfMemory("test".into())), Fault::Wait(ExecError::OutOfMemory("test".into()))]
        {
            let mut engine = Engine::new(20, limits(3));
            engine.add(1, &prompt(10, 0), 12);
            engine.step();
            let whole = [&engine.tokens_of(1)[..keep], &prompt(2, 5)].concat();
            engine.fork(1, 2, keep as u32, &prompt(2, 5), 6);
            let before = engine.scheduler.state();
            engine.scheduler.drain_block_events();
            let plan = engine.plan();
            assert_eq!(plan.copies.len(), usize::from(keep != 8));
            engine.executor.inject(fault);
            match engine.executor.launch(&engine.batch) {
                Ok(handle) => {
                    engine.executor.wait(handle).expect_err("injected");
                    engine.scheduler.abandon(&plan);
                }
                Err(_) => {
                    engine.scheduler.release(&plan);
                    assert_eq!(engine.scheduler.state(), before);
                    assert_eq!(engine.scheduler.drain_block_events().count(), 0);
                }
            }
            engine.run_to_end();
            assert_eq!(engine.output[&1], alone(&prompt(10, 0), 12), "keep {keep}");
            assert_eq!(engine.output[&2], alone(&whole, 6), "keep {keep}");
        }
    }
}

#[test]
fn a_parent_that_gives_way_in_the_step_of_a_fork_takes_nothing_from_it() {
    for num_usable in 6..12 {
        let mut engine = Engine::new(num_usable, limits(4));
        engine.add(1, &prompt(6, 1), 14);
        engine.add(2, &prompt(7, 2), 14);
        engine.step();
        let whole = engine.tokens_of(2)[..7].to_vec();
        engine.fork(2, 3, 7, &[9], 10);
        engine.run_to_end();
        assert_eq!(engine.output[&2], alone(&prompt(7, 2), 14));
        assert_eq!(engine.output[&3], alone(&[whole, vec![9]].concat(), 10));
    }
}

#[test]
fn the_tail_that_a_request_left_behind_is_found_and_copied() {
    let mut engine = Engine::new(12, limits(3));
    engine.add(1, &prompt(6, 0), 4);
    engine.run_to_end();
    let known = [prompt(6, 0), alone(&prompt(6, 0), 4)].concat();
    assert_eq!(engine.scheduler.kv().counts().cached_idle, 3, "nine tokens are computed: two blocks and a tail");
    // The conversation goes on; and another one branches off inside the second block.
    let next = [known.clone(), prompt(2, 7)].concat();
    engine.add(2, &next, 3);
    let branch = [&known[..6], &prompt(4, 8)].concat();
    engine.add(3, &branch, 3);
    let plan = engine.step();
    let cached: Vec<u32> = plan.admitted.iter().map(|admission| admission.cached_tokens).collect();
    assert_eq!((cached, plan.copies.len()), (vec![9, 6], 2));
    engine.run_to_end();
    assert_eq!((&engine.output[&2], &engine.output[&3]), (&alone(&next, 3), &alone(&branch, 3)));
    assert_eq!(engine.scheduler.kv().counts().partial_hit_tokens, 1 + 2);
}

#[test]
fn the_same_prompt_again_computes_one_token() {
    for len in [7, 8, 9] {
        let mut engine = Engine::new(12, limits(3));
        engine.add(1, &prompt(len, 0), 4);
        engine.run_to_end();
        let before = engine.scheduler.totals().computed_tokens;
        engine.add(2, &prompt(len, 0), 1);
        engine.run_to_end();
        assert_eq!(engine.scheduler.totals().computed_tokens - before, 1, "length {len}");
        assert_eq!(engine.ended[&2].usage.cached_tokens, len - 1);
        assert_eq!(engine.output[&2], alone(&prompt(len, 0), 1));
    }
}

#[test]
fn blocks_found_in_part_never_keep_out_a_request_that_needs_the_whole_pool() {
    for len in 13..=18 {
        let mut engine = Engine::new(5, limits(3));
        engine.add(1, &prompt(len, 0), 20 - len);
        engine.run_to_end();
        let other = [&prompt(len, 0)[..len as usize - 1], &[3]].concat();
        engine.add(2, &other, 20 - len);
        engine.run_to_end();
        assert_eq!(engine.output[&2], alone(&other, 20 - len as usize), "length {len}");
    }
}
