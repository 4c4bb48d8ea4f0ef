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
