//! A small engine without a model: it makes the telemetry that a scheduler with paged blocks, prefix sharing, chunked
//! prefill, eviction, preemption by recompute and by swap, forks with copy-on-write, a host tier and pinned prefixes
//! would make. Deterministic.

#[path = "inspect_jobs.rs"]
mod jobs;
#[path = "inspect_snapshot.rs"]
mod snapshot;

pub use jobs::{Job, crowd, crowded_jobs, demo_jobs};
use kvasir::ids::{BlockId, RequestId, SeqSlot};
use kvasir::protocol::FinishReason;
use kvasir::telemetry::{
    BlockDelta, BlockInfo, BlockState, EngineSnapshot, Limits, PreemptMode, Preemption, RowKind, SeqStep, StepRecord,
    Telemetry, VictimPolicy, WaitReason,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

pub const BLOCK_SIZE: u32 = 16;
pub const WATERMARK: usize = 1;

#[derive(Clone, Debug)]
struct Live {
    id: RequestId,
    job: Job,
    parent: Option<RequestId>,
    choice: u32,
    computed: u32,
    outputs: u32,
    cached: u32,
    table: Vec<BlockId>,
    /// Places in host memory and what is filled there, in logical order.
    swapped: Vec<(u32, u32)>,
    preemptions: u32,
    submitted_us: u64,
    first_token_us: Option<u64>,
    last_token_us: Option<u64>,
    finish: Option<FinishReason>,
}

impl Live {
    /// Tokens that must be computed before the next can be sampled.
    fn target(&self) -> u32 {
        self.job.prompt + self.outputs
    }

    fn hash(&self, logical: u32) -> u64 {
        let key = if logical < self.job.prefix_blocks { self.job.prefix } else { 1_000_000 + self.id.0 };
        content_hash(key, logical)
    }
}

fn content_hash(key: u64, logical: u32) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(logical).wrapping_mul(0xff51_afd7_ed55_8ccd)
}

/// What is in a place of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    Swapped(RequestId),
    Cached(u64),
}

/// A prefix that jobs share.
#[derive(Clone, Debug, Default)]
struct Prefix {
    blocks: u32,
    hits: u64,
    hit_tokens: u64,
    last_hit_step: u64,
    is_pinned: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    query_tokens: u64,
    hit_tokens: u64,
    host_hit_tokens: u64,
    preemptions: u64,
    swaps: u64,
    copies: u64,
    computed: u64,
    recomputed: u64,
}

pub struct World {
    pub telemetry: Arc<Telemetry>,
    blocks: Vec<BlockInfo>,
    free: VecDeque<BlockId>,
    idle: VecDeque<BlockId>,
    cache: HashMap<u64, BlockId>,
    host: Vec<Place>,
    host_cache: BTreeMap<u64, u32>,
    jobs: VecDeque<Job>,
    waiting: VecDeque<Live>,
    running: Vec<Live>,
    done: VecDeque<Live>,
    /// Prefixes to pin (or unpin) from a step on.
    pins: Vec<(u64, u64, bool)>,
    prefixes: BTreeMap<u64, Prefix>,
    served: BTreeMap<u64, (String, u64)>,
    budget: u32,
    step: u64,
    now_us: u64,
    next_id: u64,
    counters: Counters,
    record: StepRecord,
    binding: Option<WaitReason>,
}

impl World {
    pub fn new(num_blocks: u32, budget: u32, jobs: Vec<Job>) -> World {
        World::with_host(num_blocks, 0, budget, jobs)
    }

    /// With `num_host` places in host memory: preempted requests swap where they fit.
    pub fn with_host(num_blocks: u32, num_host: u32, budget: u32, mut jobs: Vec<Job>) -> World {
        jobs.sort_by_key(|j| j.arrive);
        let mut blocks = vec![BlockInfo::default(); num_blocks as usize];
        blocks[0].state = BlockState::Null;
        let world = World {
            telemetry: Telemetry::new(Limits { max_steps: 4_096, max_deltas: 262_144 }),
            blocks,
            free: (1..num_blocks).map(BlockId).collect(),
            idle: VecDeque::new(),
            cache: HashMap::new(),
            host: vec![Place::Free; num_host as usize],
            host_cache: BTreeMap::new(),
            jobs: jobs.into(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            done: VecDeque::new(),
            pins: Vec::new(),
            prefixes: BTreeMap::new(),
            served: BTreeMap::new(),
            budget,
            step: 0,
            now_us: 1_000_000,
            next_id: 1,
            counters: Counters::default(),
            record: StepRecord::default(),
            binding: None,
        };
        world.publish();
        world
    }

    /// Pins (or lets go) the blocks of a prefix that are cached when `step` begins.
    pub fn pin_at(&mut self, step: u64, prefix: u64, is_pinned: bool) {
        self.pins.push((step, prefix, is_pinned));
    }

    pub fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
    }

    pub fn step(&mut self) {
        self.step += 1;
        self.record = StepRecord { step: self.step, t0_us: self.now_us, budget: self.budget, ..StepRecord::default() };
        self.set_pins();
        while self.jobs.front().is_some_and(|j| j.arrive <= self.step) {
            let job = self.jobs.pop_front().expect("there is a front");
            self.submit(job);
        }
        let mut budget = self.budget;
        self.serve_running(&mut budget);
        if self.record.preempted.is_empty() {
            self.admit(&mut budget);
        }
        self.commit();
        self.note_waiting(budget);
        let tokens = self.record.num_tokens();
        self.record.sched_us = 180 + 7 * tokens.min(100);
        self.record.gpu_us = 14_000 + 130 * tokens;
        self.record.output_us = 900;
        self.record.total_us = self.record.sched_us + self.record.gpu_us + self.record.output_us + 120;
        self.now_us += u64::from(self.record.total_us);
        self.record.num_running = self.running.len() as u32;
        self.record.num_waiting = self.waiting.len() as u32;
        self.record.kv = self.totals();
        let record = std::mem::take(&mut self.record);
        self.telemetry.push(record);
        self.publish();
    }

    fn set_pins(&mut self) {
        for (step, prefix, is_pinned) in self.pins.clone() {
            let Some(stat) = self.prefixes.get_mut(&prefix).filter(|_| step == self.step) else { continue };
            stat.is_pinned = is_pinned;
            let chain: Vec<BlockId> =
                (0..stat.blocks).map_while(|l| self.cache.get(&content_hash(prefix, l)).copied()).collect();
            for block in chain.into_iter().filter(|b| self.blocks[b.idx()].pinned != is_pinned).collect::<Vec<_>>() {
                self.blocks[block.idx()].pinned = is_pinned;
                self.blocks[block.idx()].last_step = self.step;
                self.idle.retain(|b| *b != block);
                if !is_pinned && self.blocks[block.idx()].refs == 0 {
                    self.idle.push_back(block);
                }
                self.record.deltas.push(if is_pinned {
                    BlockDelta::Pin { block }
                } else {
                    BlockDelta::Unpin { block }
                });
            }
        }
    }

    fn submit(&mut self, job: Job) {
        let id = RequestId(self.next_id);
        self.next_id += u64::from(job.choices.max(1));
        if job.prefix_blocks > 0 {
            self.prefixes.entry(job.prefix).or_default().blocks = job.prefix_blocks;
        }
        self.served.entry(job.owner).or_insert_with(|| (job.label.clone(), 0));
        self.waiting.push_back(Live {
            id,
            job,
            parent: None,
            choice: 0,
            computed: 0,
            outputs: 0,
            cached: 0,
            table: Vec::new(),
            swapped: Vec::new(),
            preemptions: 0,
            submitted_us: self.now_us,
            first_token_us: None,
            last_token_us: None,
            finish: None,
        });
    }

    fn serve_running(&mut self, budget: &mut u32) {
        let mut i = 0;
        while i < self.running.len() {
            let r = &self.running[i];
            let need = (r.target() - r.computed).min(*budget);
            if need == 0 {
                i += 1;
                continue;
            }
            let id = r.id;
            let end = r.computed + need;
            if !self.reserve(i, end) {
                let victim = self.running.len() - 1;
                self.preempt(victim, id);
                continue;
            }
            let r = &self.running[i];
            let kind = if r.computed + 1 == r.target() && r.outputs > 0 {
                RowKind::Decode
            } else if r.preemptions > 0 {
                RowKind::Recompute { cached: 0 }
            } else {
                RowKind::Prefill { cached: 0 }
            };
            self.push_row(i, kind, need);
            *budget -= need;
            i += 1;
        }
    }

    fn admit(&mut self, budget: &mut u32) {
        while let Some(front) = self.waiting.front() {
            if *budget == 0 {
                break;
            }
            let target = front.target();
            let full = (target - 1) / BLOCK_SIZE;
            let is_swapped = !front.swapped.is_empty();
            let hits: Vec<BlockId> =
                (0..full).take_while(|_| !is_swapped).map_while(|l| self.cache.get(&front.hash(l)).copied()).collect();
            let places: Vec<(u32, u32)> = match is_swapped {
                true => front.swapped.clone(),
                false => (hits.len() as u32..full)
                    .map_while(|l| self.host_cache.get(&front.hash(l)).map(|host| (*host, BLOCK_SIZE)))
                    .collect(),
            };
            let needed = (target.div_ceil(BLOCK_SIZE) as usize).saturating_sub(hits.len());
            let idle_hits = hits.iter().filter(|b| self.idle.contains(b)).count();
            if needed + WATERMARK > self.free.len() + self.idle.len() - idle_hits {
                break;
            }
            let mut live = self.waiting.pop_front().expect("there is a front");
            for (logical, block) in (0u32..).zip(hits.iter().copied()) {
                self.share(block, live.id, logical);
                live.table.push(block);
            }
            self.record.admitted.push(live.id);
            let (id, num_hits, num_host) = (live.id, hits.len() as u32, places.len() as u32);
            live.swapped.clear();
            self.running.push(live);
            let idx = self.running.len() - 1;
            places.into_iter().for_each(|(host, filled)| self.bring_back(idx, host, filled));
            if is_swapped {
                self.go_on(idx, budget);
            } else {
                self.note_hits(idx, target, num_hits, num_host);
                self.begin(idx, (num_hits + num_host) * BLOCK_SIZE, budget);
            }
            assert!(self.record.rows.iter().any(|r| r.request == id));
        }
    }

    /// A swapped request takes up where it stopped.
    fn go_on(&mut self, idx: usize, budget: &mut u32) {
        let r = &self.running[idx];
        let num = (r.target() - r.computed).min(*budget);
        let end = r.computed + num;
        let is_decode = r.computed + 1 == r.target() && r.outputs > 0;
        assert!(self.reserve(idx, end), "admission counted the blocks");
        self.push_row(idx, if is_decode { RowKind::Decode } else { RowKind::Prefill { cached: 0 } }, num);
        *budget -= num;
    }

    fn begin(&mut self, idx: usize, cached: u32, budget: &mut u32) {
        let target = self.running[idx].target();
        let r = &mut self.running[idx];
        r.computed = cached;
        r.cached = if r.preemptions == 0 { cached } else { r.cached };
        let kind = if r.preemptions > 0 { RowKind::Recompute { cached } } else { RowKind::Prefill { cached } };
        let num = (target - cached).min(*budget);
        assert!(self.reserve(idx, cached + num), "admission counted the blocks");
        self.push_row(idx, kind, num);
        *budget -= num;
    }

    fn note_hits(&mut self, idx: usize, target: u32, num_hits: u32, num_host: u32) {
        let tokens = u64::from((num_hits + num_host) * BLOCK_SIZE);
        self.counters.query_tokens += u64::from(target);
        self.counters.hit_tokens += tokens;
        self.counters.host_hit_tokens += u64::from(num_host * BLOCK_SIZE);
        if let Some(stat) = self.prefixes.get_mut(&self.running[idx].job.prefix).filter(|_| tokens > 0) {
            stat.hits += 1;
            stat.hit_tokens += tokens;
            stat.last_hit_step = self.step;
        }
    }

    /// A block comes back from host memory, as the next of a table.
    fn bring_back(&mut self, idx: usize, host: u32, filled: u32) {
        // Bound for the device, it is no longer the cache's to drop.
        if let Place::Cached(hash) = self.host[host as usize] {
            self.host_cache.remove(&hash);
        }
        let (request, logical) = (self.running[idx].id, self.running[idx].table.len() as u32);
        assert!(self.reserve(idx, (logical + 1) * BLOCK_SIZE), "admission counted the blocks");
        let block = self.running[idx].table[logical as usize];
        self.blocks[block.idx()].filled = filled;
        self.record.deltas.push(BlockDelta::SwapIn { host, block, request });
        if let Place::Cached(hash) = std::mem::replace(&mut self.host[host as usize], Place::Free) {
            self.blocks[block.idx()].hash = Some(hash);
            self.cache.insert(hash, block);
            self.record.deltas.push(BlockDelta::Publish { block, hash });
        }
        self.record.deltas.push(BlockDelta::HostFree { host });
    }

    fn push_row(&mut self, idx: usize, kind: RowKind, num_tokens: u32) {
        let r = &self.running[idx];
        let sampled = (r.computed + num_tokens == r.target()).then_some(7);
        self.record.rows.push(SeqStep {
            request: r.id,
            slot: SeqSlot(idx as u32),
            kind,
            from: r.computed,
            num_tokens,
            sampled,
            forced: Vec::new(),
        });
    }

    fn reserve(&mut self, idx: usize, tokens: u32) -> bool {
        if !self.make_own(idx, tokens) {
            return false;
        }
        while (self.running[idx].table.len() as u32) < tokens.div_ceil(BLOCK_SIZE) {
            let Some(block) = self.take_block() else { return false };
            let (request, logical) = (self.running[idx].id, self.running[idx].table.len() as u32);
            self.hand_out(block, request, logical);
            self.running[idx].table.push(block);
        }
        true
    }

    /// Copies the shared block that the next tokens would be written into.
    fn make_own(&mut self, idx: usize, tokens: u32) -> bool {
        let r = &self.running[idx];
        let logical = r.computed / BLOCK_SIZE;
        let Some(from) = r.table.get(logical as usize).copied().filter(|_| tokens > r.computed) else { return true };
        if self.blocks[from.idx()].refs < 2 {
            return true;
        }
        let request = r.id;
        let Some(to) = self.take_block() else { return false };
        self.hand_out(to, request, logical);
        self.blocks[to.idx()].filled = self.blocks[from.idx()].filled;
        self.record.deltas.push(BlockDelta::Copy { from, to, request });
        self.running[idx].table[logical as usize] = to;
        self.counters.copies += 1;
        self.let_go(request, from);
        true
    }

    fn hand_out(&mut self, block: BlockId, request: RequestId, logical: u32) {
        self.record.deltas.push(BlockDelta::Alloc { block, request, logical });
        self.blocks[block.idx()] =
            BlockInfo { state: BlockState::Active, refs: 1, last_step: self.step, ..BlockInfo::default() };
    }

    fn take_block(&mut self) -> Option<BlockId> {
        if let Some(block) = self.free.pop_front() {
            return Some(block);
        }
        let block = self.idle.pop_front()?;
        let hash = self.blocks[block.idx()].hash.expect("idle blocks are published");
        self.cache.remove(&hash);
        // Half of host memory is for the cache.
        let place = self.host.iter().position(|p| *p == Place::Free);
        if let Some(place) = place.filter(|_| self.host_cache.len() < self.host.len() / 2) {
            self.host[place] = Place::Cached(hash);
            self.host_cache.insert(hash, place as u32);
            self.record.deltas.push(BlockDelta::SwapOut { block, host: place as u32, request: None });
        }
        self.blocks[block.idx()] = BlockInfo { last_step: self.step, ..BlockInfo::default() };
        self.record.deltas.push(BlockDelta::Evict { block });
        Some(block)
    }

    fn share(&mut self, block: BlockId, request: RequestId, logical: u32) {
        let info = &mut self.blocks[block.idx()];
        if info.refs == 0 {
            self.idle.retain(|b| *b != block);
            info.state = BlockState::Active;
        }
        info.refs += 1;
        info.last_step = self.step;
        self.record.deltas.push(BlockDelta::Share { block, request, logical });
    }

    /// Gives back a table, the tail first, so that leaves are evicted before roots.
    fn release(&mut self, request: RequestId, table: Vec<BlockId>) {
        table.into_iter().rev().for_each(|block| self.let_go(request, block));
    }

    fn let_go(&mut self, request: RequestId, block: BlockId) {
        let info = &mut self.blocks[block.idx()];
        info.refs -= 1;
        info.last_step = self.step;
        self.record.deltas.push(BlockDelta::Unref { block, request });
        if info.refs > 0 {
            return;
        }
        if info.hash.is_some() {
            info.state = BlockState::CachedIdle;
            if !info.pinned {
                self.idle.push_back(block);
            }
            self.record.deltas.push(BlockDelta::CacheIdle { block });
        } else {
            *info = BlockInfo { last_step: self.step, ..BlockInfo::default() };
            self.free.push_back(block);
            self.record.deltas.push(BlockDelta::Free { block });
        }
    }

    fn preempt(&mut self, idx: usize, beneficiary: RequestId) {
        let scores = (0u64..).zip(&self.running).map(|(i, r)| (r.id, i)).collect();
        let mut victim = self.running.remove(idx);
        self.record.rows.retain(|r| r.request != victim.id);
        let places: Vec<u32> = (0u32..).zip(&self.host).filter(|(_, p)| **p == Place::Free).map(|(i, _)| i).collect();
        let is_swap = !victim.table.is_empty() && places.len() >= victim.table.len();
        self.record.preempted.push(Preemption {
            victim: victim.id,
            beneficiary,
            freed_blocks: victim.table.len() as u32,
            lost_tokens: if is_swap { 0 } else { victim.computed },
            mode: if is_swap { PreemptMode::Swap } else { PreemptMode::Recompute },
            policy: VictimPolicy::LastIn,
            scores,
        });
        if is_swap {
            self.counters.swaps += 1;
            for (&block, host) in victim.table.iter().zip(places) {
                self.host[host as usize] = Place::Swapped(victim.id);
                victim.swapped.push((host, self.blocks[block.idx()].filled));
                self.record.deltas.push(BlockDelta::SwapOut { block, host, request: Some(victim.id) });
            }
        } else {
            self.counters.recomputed += u64::from(victim.computed);
            victim.computed = 0;
        }
        self.release(victim.id, std::mem::take(&mut victim.table));
        victim.preemptions += 1;
        self.counters.preemptions += 1;
        self.waiting.push_front(victim);
    }

    fn commit(&mut self) {
        let end_us = self.now_us + 15_000;
        for row in self.record.rows.clone() {
            let idx = self.running.iter().position(|r| r.id == row.request).expect("rows are of running requests");
            let before = self.running[idx].computed;
            self.running[idx].computed = row.from + row.num_tokens;
            self.counters.computed += u64::from(row.num_tokens);
            self.served.entry(self.running[idx].job.owner).or_default().1 += u64::from(row.num_tokens);
            self.fill(idx, before);
            if row.sampled.is_some() {
                let r = &mut self.running[idx];
                r.outputs += 1;
                r.first_token_us.get_or_insert(end_us);
                r.last_token_us = Some(end_us);
                if r.outputs == 1 && r.parent.is_none() {
                    self.fork(idx);
                }
            }
        }
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].outputs < self.running[i].job.output {
                i += 1;
                continue;
            }
            let mut r = self.running.remove(i);
            self.record.finished.push((r.id, FinishReason::StopToken(2)));
            self.release(r.id, std::mem::take(&mut r.table));
            r.finish = Some(FinishReason::StopToken(2));
            self.done.push_back(r);
            if self.done.len() > 16 {
                self.done.pop_front();
            }
        }
    }

    /// The other choices of a request that has read its prompt.
    fn fork(&mut self, idx: usize) {
        for choice in 1..self.running[idx].job.choices {
            let parent = &self.running[idx];
            let id = RequestId(parent.id.0 + u64::from(choice));
            let child = Live { id, parent: Some(parent.id), choice, ..parent.clone() };
            for (logical, &block) in (0u32..).zip(&child.table) {
                self.share(block, id, logical);
            }
            self.running.push(child);
        }
    }

    fn fill(&mut self, idx: usize, before: u32) {
        let r = &self.running[idx];
        let (computed, first) = (r.computed, before / BLOCK_SIZE);
        let touched: Vec<(u32, BlockId)> = (0u32..).zip(r.table.iter().copied()).skip(first as usize).collect();
        for (logical, block) in touched {
            let filled = (computed.saturating_sub(logical * BLOCK_SIZE)).min(BLOCK_SIZE);
            let hash = self.running[idx].hash(logical);
            let info = &mut self.blocks[block.idx()];
            if filled == 0 || info.filled >= filled {
                continue;
            }
            info.filled = filled;
            info.last_step = self.step;
            self.record.deltas.push(BlockDelta::Fill { block, filled });
            if filled == BLOCK_SIZE && !self.cache.contains_key(&hash) {
                info.hash = Some(hash);
                self.cache.insert(hash, block);
                self.record.deltas.push(BlockDelta::Publish { block, hash });
            }
        }
    }

    fn note_waiting(&mut self, budget: u32) {
        let available = (self.free.len() + self.idle.len()).saturating_sub(WATERMARK) as u32;
        for (i, r) in self.waiting.iter().enumerate() {
            let reason = match i {
                _ if !self.record.preempted.is_empty() => WaitReason::Preemption,
                0 if budget == 0 => WaitReason::Budget,
                0 => WaitReason::Blocks { needed: r.target().div_ceil(BLOCK_SIZE), available },
                _ => WaitReason::Behind { position: i as u32 },
            };
            self.record.waiting.push((r.id, reason));
        }
        self.binding = self.record.waiting.first().map(|(_, reason)| *reason);
    }

    pub fn publish(&self) {
        self.telemetry.publish(self.snapshot());
    }
}
