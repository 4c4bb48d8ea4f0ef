//! Gangs on the scheduler alone: what is shared, copied, given up and taken back.

use super::{
    CheckLevel, GangAdvance, GangBlocks, GangChild, GangNext, NewSequence, PlanInputs, PreemptCosts, PreemptMode,
    PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig, StepPlan, VictimPolicy,
};
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvCache, KvConfig};
use crate::protocol::{RunError, SamplingParams, StopRules};

fn scheduler(num_blocks: u32) -> Scheduler {
    with_host_memory(num_blocks, 0)
}

/// What is preempted goes to host memory, where there is room.
fn with_host_memory(num_blocks: u32, num_host_blocks: u32) -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_tokens_per_step: 64,
        max_model_len: 64,
        max_waiting: 8,
        long_prefill_cap: 64,
        watermark_blocks: 0,
        max_preemptions: 100,
        victim: VictimPolicy::LastIn,
        preemption: PreemptionMode::Swap,
        queue_policy: QueuePolicy::Fcfs,
        aging_steps: 100,
        check: CheckLevel::Full,
    };
    let kv = KvCache::new(KvConfig { num_blocks, block_size: 4, enable_prefix_cache: false });
    Scheduler::new(config, kv.with_host_pool(num_host_blocks, false))
}

fn request(id: u64, prompt: Vec<TokenId>) -> NewSequence {
    NewSequence {
        id: RequestId(id),
        prompt,
        sampling: SamplingParams::greedy(),
        seed: 0,
        stop: StopRules::max_tokens(20),
        eos_ids: vec![],
        priority: 0,
        cache_salt: 0,
        adapter: 0,
        client: 0,
    }
}

/// Plans and commits a step; `children` are (parent, token) of the one gang, if its beams have logits.
fn step(scheduler: &mut Scheduler, step: u64, children: &[(usize, TokenId)]) -> StepPlan {
    let plan = scheduler.plan_step(PlanInputs {
        step,
        max_tokens: 64,
        max_prefill_tokens: 64,
        costs: PreemptCosts::default(),
    });
    let next: Vec<_> = children.iter().map(|&(parent, token)| GangChild { parent, token }).collect();
    let gangs: Vec<RequestId> = scheduler.gang_rows(&plan).iter().map(|rows| rows.gang).collect();
    let advance = |gang| GangAdvance { gang, next: GangNext::Beams(next.clone()) };
    let advances: Vec<_> = gangs.into_iter().map(advance).collect();
    let sampled = vec![7; plan.num_logits()];
    scheduler.commit_gangs(&plan, &sampled, &vec![false; sampled.len()], &advances);
    plan
}

fn outputs(scheduler: &Scheduler) -> Vec<Vec<TokenId>> {
    scheduler.gang_members(RequestId(1)).map(|seq| seq.output().to_vec()).collect()
}

#[test]
fn beams_share_until_they_write_and_only_the_written_block_is_copied() {
    let mut scheduler = scheduler(40);
    scheduler.add_gang(request(1, vec![5; 10]), 3).expect("it fits");
    step(&mut scheduler, 1, &[(0, 1), (0, 2), (0, 3)]);
    assert_eq!(outputs(&scheduler), [[1], [2], [3]]);
    assert_eq!(scheduler.gang_blocks(RequestId(1)), Some(GangBlocks { logical: 9, held: 3 }), "all is shared");
    let plan = step(&mut scheduler, 2, &[(1, 4), (1, 5), (0, 6)]);
    assert_eq!((plan.rows.len(), plan.copies.len()), (3, 2), "the last to write keeps the block");
    assert_eq!(outputs(&scheduler), [[2, 4], [2, 5], [1, 6]]);
    assert_eq!(scheduler.gang_blocks(RequestId(1)), Some(GangBlocks { logical: 9, held: 4 }));
    // Twelve positions are three full blocks: nothing is copied, each beam takes a block of its own.
    let plan = step(&mut scheduler, 3, &[(0, 1), (1, 1), (2, 1)]);
    assert_eq!(plan.copies.len(), 1, "two beams share the block of their common token");
    let plan = step(&mut scheduler, 4, &[(0, 1), (1, 1), (2, 1)]);
    assert_eq!((plan.copies.len(), plan.rows.iter().map(|row| row.num_new_blocks).sum::<u32>()), (0, 3));
}

#[test]
fn a_gang_gives_way_whole_and_comes_back_whole() {
    give_way_and_come_back(scheduler(13), PreemptMode::Recompute);
}

#[test]
fn a_gang_in_host_memory_comes_back_without_computing_again() {
    // Leader: the prompt's three blocks; each other beam: the block that is its own.
    give_way_and_come_back(with_host_memory(13, 8), PreemptMode::Swap);
    give_way_and_come_back(with_host_memory(13, 3), PreemptMode::Recompute);
}

fn give_way_and_come_back(mut scheduler: Scheduler, mode: PreemptMode) {
    // The search and another request fill the pool; the older one takes a block more in each fourth step.
    scheduler.add(request(0, vec![8; 16])).expect("it fits");
    let search = NewSequence { stop: StopRules::max_tokens(8), ..request(1, vec![5; 9]) };
    scheduler.add_gang(search, 3).expect("it fits");
    let children = [(0, 1), (0, 2), (0, 3)];
    step(&mut scheduler, 1, &children);
    let spread = [(0, 1), (1, 2), (2, 3)];
    let mut at = 2;
    let preempted = loop {
        let plan = step(&mut scheduler, at, &spread);
        if let Some(preemption) = plan.preempted.first() {
            assert_eq!(preemption.mode, mode, "{preemption:?}");
            break preemption.victim;
        }
        at += 1;
        assert!(at < 40, "nobody gives way");
    };
    assert_eq!(preempted, RequestId(1));
    assert_eq!((scheduler.running().len(), scheduler.waiting().len()), (1, 1), "one entry stands for all beams");
    let kept = outputs(&scheduler);
    assert_eq!(kept.len(), 3);
    assert!(scheduler.abort(RequestId(0)));
    for _ in 0..3 {
        at += 1;
        step(&mut scheduler, at, &spread);
    }
    assert_eq!(scheduler.running().len(), 3);
    let now = outputs(&scheduler);
    assert!(now.iter().zip(&kept).all(|(now, kept)| now.starts_with(kept) && now.len() > kept.len()), "{now:?}");
    let blocks = scheduler.gang_blocks(RequestId(1)).expect("it lives");
    assert_eq!(blocks.logical - blocks.held, 4, "the prompt's two full blocks are shared again, without a cache");
    let (totals, host) = (scheduler.totals(), scheduler.kv().counts().host);
    match mode {
        PreemptMode::Swap => {
            assert_eq!((totals.swaps, totals.recomputed_tokens), (1, 3), "a token for each beam");
            assert!(totals.restored_tokens >= 9, "{totals:?}");
        }
        PreemptMode::Recompute => assert_eq!((totals.swaps, totals.restored_tokens), (0, 0)),
    }
    assert_eq!(host.free, host.total, "nothing stays in host memory");
}

#[test]
fn the_leader_lives_on_when_its_beam_does_not() {
    let mut scheduler = scheduler(40);
    scheduler.add_gang(request(1, vec![5; 6]), 3).expect("it fits");
    step(&mut scheduler, 1, &[(0, 1), (0, 2), (0, 3)]);
    step(&mut scheduler, 2, &[(1, 4), (2, 5)]);
    assert_eq!(outputs(&scheduler), [[2, 4], [3, 5]]);
    assert_eq!(scheduler.get(RequestId(1)).map(|seq| seq.output().to_vec()), Some(vec![3, 5]), "it took a place");
    step(&mut scheduler, 3, &[(0, 6), (0, 7), (1, 8)]);
    assert_eq!(outputs(&scheduler), [vec![2, 4, 6], vec![2, 4, 7], vec![3, 5, 8]]);
    assert!(scheduler.abort(RequestId(3)), "any beam stands for the search");
    assert_eq!((scheduler.take_ended().len(), scheduler.has_work(), scheduler.kv().counts().used), (1, false, 0));
}

#[test]
fn what_can_never_fit_is_refused_with_both_numbers() {
    let mut scheduler = scheduler(20);
    // 10 + 20 tokens: two shared blocks, and six of each of three beams.
    let refused = scheduler.add_gang(request(1, vec![5; 10]), 3);
    assert_eq!(refused, Err(RunError::NeverFits { needed: 20, total: 19 }));
    assert!(scheduler.add_gang(request(1, vec![5; 12]), 2).is_ok());
    let wide = scheduler.add_gang(request(20, vec![5; 4]), 5).expect_err("five beams in four slots").to_string();
    assert!(wide.contains("at most 4") && wide.contains("not 5"), "{wide}");
}
