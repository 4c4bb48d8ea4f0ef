//! What a seed stands for: a pool, limits, and requests with what will befall them.

use super::rng::Rng;
use crate::ids::{RequestId, TokenId};
use crate::kv::{KvConfig, KvGroups};
use crate::protocol::{BeamParams, EarlyStopping, SamplingParams, StopRules};
use crate::scheduler::{CheckLevel, NewPin, NewSequence, PreemptionMode, QueuePolicy, SchedulerConfig, VictimPolicy};

const POLICIES: [QueuePolicy; 4] =
    [QueuePolicy::Fcfs, QueuePolicy::Priority, QueuePolicy::LongestPrefix, QueuePolicy::Fair];

/// A world before its first step.
pub(super) struct World {
    pub kv: KvConfig,
    pub hash_mask: u64,
    pub scheduler: SchedulerConfig,
    pub vocab_size: u32,
    /// Places for blocks in host memory.
    pub num_host_blocks: u32,
    /// What leaves host memory is kept, and outlives a lost device.
    pub has_disk: bool,
    /// In order of arrival.
    pub requests: Vec<Request>,
    /// Prefixes to be pinned, in order of arrival.
    pub pins: Vec<Pin>,
    /// Chance in percent per step.
    pub fault_percent: u32,
    pub abort_percent: u32,
    pub fork_percent: u32,
    /// Chance in percent per step that a prefix is unpinned, evicted, or the cache reset.
    pub prefix_percent: u32,
    /// Chance in percent per sampled token that tokens are forced behind it.
    pub force_percent: u32,
    /// The budget of a step is drawn anew each time.
    pub varies_budget: bool,
}

/// A request and when it comes.
pub(super) struct Request {
    pub arrives_at: u64,
    pub new: NewSequence,
    pub num_choices: u32,
    pub stop_string: Option<StopString>,
    /// It is a beam search.
    pub beams: Option<BeamParams>,
}

/// A prefix to be pinned and when.
pub(super) struct Pin {
    pub arrives_at: u64,
    pub new: NewPin,
}

/// Ids of pins begin here.
pub(super) const FIRST_PIN: u64 = 1_000;

/// The client's stop string is complete with this output token.
#[derive(Clone, Copy)]
pub(super) struct StopString {
    pub after_tokens: u32,
    /// It is seen while the next step is in flight, not right after the commit.
    pub in_flight: bool,
}

impl World {
    pub fn new(rng: &mut Rng) -> World {
        let block_size = if rng.percent(60) { 4 } else { rng.range(1, 8) };
        let num_blocks = if rng.percent(60) { rng.range(6, 14) } else { rng.range(6, 40) };
        let groups = groups(rng, block_size);
        let num_blocks = 1 + (num_blocks - 1) * groups.num();
        let max_num_seqs = rng.range(1, 8);
        let max_tokens_per_step = max_num_seqs + rng.range(0, 24);
        let capacity = groups.tokens_in(num_blocks - 1, 200, max_tokens_per_step, block_size).max(8);
        let scheduler = SchedulerConfig {
            max_num_seqs,
            max_tokens_per_step,
            max_model_len: if rng.percent(70) { capacity + rng.range(0, 8) } else { rng.range(12, capacity + 8) },
            max_waiting: if rng.percent(10) { 3 } else { 1000 },
            long_prefill_cap: if rng.percent(50) { 1000 } else { rng.range(1, 9) },
            watermark_blocks: if rng.percent(50) { 0 } else { rng.range(1, 3) },
            max_preemptions: if rng.percent(50) { 1000 } else { rng.range(0, 3) },
            queue_policy: POLICIES[rng.range(0, 3) as usize],
            aging_steps: if rng.percent(50) { 256 } else { rng.range(1, 20) },
            victim: [VictimPolicy::LastIn, VictimPolicy::LeastComputed, VictimPolicy::Priority]
                [rng.range(0, 2) as usize],
            preemption: match rng.range(0, 3) {
                0 => PreemptionMode::Swap,
                1 => PreemptionMode::Recompute,
                _ => PreemptionMode::Auto,
            },
            check: CheckLevel::Full,
        };
        let mut world = World {
            kv: KvConfig { num_blocks, block_size, groups, enable_prefix_cache: rng.percent(80) },
            // A quarter of all worlds has hashes of few bits, so that contents collide all the time.
            hash_mask: if rng.percent(25) { (1 << rng.range(0, 4)) - 1 } else { u64::MAX },
            scheduler,
            vocab_size: rng.range(6, 60),
            num_host_blocks: if rng.percent(40) { 0 } else { rng.range(1, 16) },
            has_disk: rng.percent(50),
            requests: Vec::new(),
            pins: Vec::new(),
            fault_percent: if rng.percent(50) { 0 } else { rng.range(1, 12) },
            abort_percent: if rng.percent(50) { 0 } else { rng.range(1, 8) },
            fork_percent: if rng.percent(60) { 0 } else { rng.range(1, 12) },
            varies_budget: rng.percent(40),
            prefix_percent: 0,
            force_percent: 0,
        };
        let prefixes: Vec<Vec<TokenId>> = (0..3).map(|_| world.prefix(rng)).collect();
        let mut arrives_at = 0;
        for _ in 0..rng.range(2, 18) {
            arrives_at += if rng.percent(50) { 0 } else { u64::from(rng.range(0, 10)) };
            let new = world.sequence(&prefixes, rng);
            let stop_string =
                rng.percent(20).then(|| StopString { after_tokens: rng.range(1, 10), in_flight: rng.percent(50) });
            let num_choices = if rng.percent(85) { 1 } else { rng.range(2, 5) };
            let beams = rng.percent(15).then(|| beams(rng));
            world.requests.push(Request { arrives_at, new, num_choices, stop_string, beams });
        }
        // Drawn last, so that worlds without pins are as they were.
        if rng.percent(40) {
            world.prefix_percent = rng.range(0, 15);
        }
        if world.prefix_percent > 0 && groups == KvGroups::ONE {
            for id in 0..u64::from(rng.range(1, 4)) {
                let arrives_at = u64::from(rng.range(0, 30));
                world.pins.push(Pin { arrives_at, new: world.pin(RequestId(FIRST_PIN + id), &prefixes, rng) });
            }
            world.pins.sort_by_key(|pin| pin.arrives_at);
        }
        // Drawn aside, so that all other worlds are as they were.
        let mut aside = rng.clone();
        if aside.percent(12) {
            world.become_searches(&mut aside);
        }
        if aside.percent(30) {
            world.force_percent = aside.range(5, 40);
        }
        world
    }

    /// Searches that press on a pool with host memory behind it.
    fn become_searches(&mut self, rng: &mut Rng) {
        self.num_host_blocks = rng.range(4, 40);
        if rng.percent(60) {
            self.scheduler.preemption = PreemptionMode::Swap;
        }
        self.scheduler.max_num_seqs = rng.range(4, 12);
        self.scheduler.max_tokens_per_step = self.scheduler.max_num_seqs + rng.range(0, 24);
        for request in &mut self.requests {
            if rng.percent(40) {
                continue;
            }
            request.beams = Some(BeamParams { early_stopping: EarlyStopping::Never, ..beams(rng) });
            request.num_choices = 1;
            request.new.stop.stop_token_ids.clear();
            request.new.stop.ignore_eos = true;
        }
    }

    fn pin(&self, id: RequestId, prefixes: &[Vec<TokenId>], rng: &mut Rng) -> NewPin {
        let mut tokens = prefixes[rng.range(0, 2) as usize].clone();
        tokens.extend((0..rng.range(0, self.kv.block_size)).map(|_| rng.range(0, self.vocab_size - 1)));
        let cache_salt = if rng.percent(80) { 0 } else { 7 };
        NewPin {
            id,
            name: Some(format!("pin {id}")),
            tokens,
            cache_salt,
            adapter: 0,
            client: u64::from(rng.range(0, 3)),
        }
    }

    /// At a block boundary, or one beside it, half of the time.
    fn prefix(&self, rng: &mut Rng) -> Vec<TokenId> {
        let blocks = rng.range(1, (self.kv.num_blocks / 3).min(4)) * self.kv.block_size;
        let len = if rng.percent(50) { blocks + rng.range(0, 2) - 1 } else { rng.range(1, blocks) };
        (0..len).map(|_| rng.range(0, self.vocab_size - 1)).collect()
    }

    /// A request that goes on from another one; its id and its own tokens come later.
    pub fn branch(&self, rng: &mut Rng) -> NewSequence {
        NewSequence { prompt: Vec::new(), ..self.sequence(&[], rng) }
    }

    /// The id is given on arrival.
    fn sequence(&self, prefixes: &[Vec<TokenId>], rng: &mut Rng) -> NewSequence {
        let prefix = rng.percent(70).then(|| rng.range(0, 2) as usize);
        let mut prompt = prefix.and_then(|at| prefixes.get(at).cloned()).unwrap_or_default();
        let suffix = if rng.percent(15) { 0 } else { rng.range(1, 12) };
        prompt.extend((0..suffix).map(|_| rng.range(0, self.vocab_size - 1)));
        let least = u32::from(rng.percent(95));
        let most = if rng.percent(90) { (self.kv.num_blocks * self.kv.block_size / 2).min(40) } else { 60 };
        let max_tokens = if rng.percent(85) { Some(rng.range(least, most)) } else { None };
        let stop_token_ids = (0..rng.range(0, 2)).map(|_| rng.range(0, self.vocab_size - 1)).collect();
        NewSequence {
            id: RequestId(0),
            prompt,
            sampling: self.sampling(rng),
            seed: rng.next(),
            stop: StopRules {
                max_tokens,
                min_tokens: if rng.percent(80) { 0 } else { rng.range(1, 6) },
                stop_token_ids,
                stop_strings: Vec::new(),
                ignore_eos: rng.percent(50),
            },
            eos_ids: vec![1],
            cache_salt: if rng.percent(80) { 0 } else { 7 },
            adapter: if rng.percent(90) { 0 } else { 7 },
            priority: rng.range(0, 4) as i32 - 2,
            client: u64::from(rng.range(0, 3)),
        }
    }

    fn sampling(&self, rng: &mut Rng) -> SamplingParams {
        let mut sampling = SamplingParams::greedy();
        if rng.percent(50) {
            sampling.temperature = 0.5;
        }
        if rng.percent(25) {
            sampling.frequency_penalty = 0.5;
        }
        if rng.percent(15) {
            sampling.logit_bias = vec![(rng.range(0, self.vocab_size - 1), 1.5)];
        }
        sampling
    }
}

/// Half of all worlds have a model without windows, the others one to three groups with windows below and above a block.
fn groups(rng: &mut Rng, block_size: u32) -> KvGroups {
    if rng.percent(50) {
        return KvGroups::ONE;
    }
    let windows: Vec<Option<u32>> = (0..rng.range(1, 3))
        .map(|_| if rng.percent(35) { None } else { Some(rng.range(1, 3 * block_size + 2)) })
        .collect();
    KvGroups::new(&windows)
}

fn beams(rng: &mut Rng) -> BeamParams {
    let width = rng.range(1, 5);
    BeamParams {
        width,
        num_return: rng.range(1, width),
        length_penalty: [-0.5, 0.0, 1.0, 2.0][rng.range(0, 3) as usize],
        early_stopping: [EarlyStopping::AtOnce, EarlyStopping::Heuristic, EarlyStopping::Never]
            [rng.range(0, 2) as usize],
    }
}
