//! A small engine without a model: it makes the telemetry that a scheduler with paged blocks, prefix sharing, chunked
//! prefill, eviction and preemption would make. Deterministic.

use kvasir::ids::{BlockId, RequestId, SeqSlot};
use kvasir::protocol::{FinishReason, OwnerTag};
use kvasir::telemetry::{
    BlockDelta, BlockInfo, BlockState, EngineSnapshot, KvTotals, Limits, PreemptMode, Preemption, RequestInfo,
    RequestState, RowKind, SeqStep, StepRecord, Telemetry, VictimPolicy, WaitReason,
};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

pub const BLOCK_SIZE: u32 = 16;
const WATERMARK: usize = 1;

/// A request to come.
#[derive(Clone, Debug)]
pub struct Job {
    pub arrive: u64,
    pub owner: u64,
    pub label: String,
    /// Jobs of equal prefix share their first `prefix_blocks` blocks.
    pub prefix: u64,
    pub prefix_blocks: u32,
    pub prompt: u32,
    pub output: u32,
}

#[derive(Clone, Debug)]
struct Live {
    id: RequestId,
    job: Job,
    computed: u32,
    outputs: u32,
    cached: u32,
    table: Vec<BlockId>,
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
        (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(logical).wrapping_mul(0xff51_afd7_ed55_8ccd)
    }
}

pub struct World {
    pub telemetry: Arc<Telemetry>,
    blocks: Vec<BlockInfo>,
    free: VecDeque<BlockId>,
    idle: VecDeque<BlockId>,
    cache: HashMap<u64, BlockId>,
    jobs: VecDeque<Job>,
    waiting: VecDeque<Live>,
    running: Vec<Live>,
    done: VecDeque<Live>,
    budget: u32,
    step: u64,
    now_us: u64,
    next_id: u64,
    query_tokens: u64,
    hit_tokens: u64,
    preemptions: u64,
    record: StepRecord,
}

impl World {
    pub fn new(num_blocks: u32, budget: u32, mut jobs: Vec<Job>) -> World {
        jobs.sort_by_key(|j| j.arrive);
        let mut blocks = vec![BlockInfo::default(); num_blocks as usize];
        blocks[0].state = BlockState::Null;
        let world = World {
            telemetry: Telemetry::new(Limits { max_steps: 4_096, max_deltas: 262_144 }),
            blocks,
            free: (1..num_blocks).map(BlockId).collect(),
            idle: VecDeque::new(),
            cache: HashMap::new(),
            jobs: jobs.into(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            done: VecDeque::new(),
            budget,
            step: 0,
            now_us: 1_000_000,
            next_id: 1,
            query_tokens: 0,
            hit_tokens: 0,
            preemptions: 0,
            record: StepRecord::default(),
        };
        world.publish();
        world
    }

    pub fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
    }

    pub fn step(&mut self) {
        self.step += 1;
        self.record = StepRecord { step: self.step, t0_us: self.now_us, budget: self.budget, ..StepRecord::default() };
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

    fn submit(&mut self, job: Job) {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Live {
            id,
            job,
            computed: 0,
            outputs: 0,
            cached: 0,
            table: Vec::new(),
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
            let hits: Vec<BlockId> =
                (0..(target - 1) / BLOCK_SIZE).map_while(|l| self.cache.get(&front.hash(l)).copied()).collect();
            let needed = (target.div_ceil(BLOCK_SIZE) as usize).saturating_sub(hits.len());
            let idle_hits = hits.iter().filter(|b| self.blocks[b.idx()].refs == 0).count();
            if needed + WATERMARK > self.free.len() + self.idle.len() - idle_hits {
                break;
            }
            let mut live = self.waiting.pop_front().expect("there is a front");
            self.query_tokens += u64::from(target);
            self.hit_tokens += hits.len() as u64 * u64::from(BLOCK_SIZE);
            let cached = hits.len() as u32 * BLOCK_SIZE;
            for (logical, block) in (0u32..).zip(hits) {
                self.share(block, live.id, logical);
                live.table.push(block);
            }
            live.computed = cached;
            live.cached = if live.preemptions == 0 { cached } else { live.cached };
            let kind = if live.preemptions > 0 { RowKind::Recompute { cached } } else { RowKind::Prefill { cached } };
            let num = (target - cached).min(*budget);
            self.record.admitted.push(live.id);
            self.running.push(live);
            let idx = self.running.len() - 1;
            assert!(self.reserve(idx, cached + num), "admission counted the blocks");
            self.push_row(idx, kind, num);
            *budget -= num;
        }
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
        });
    }

    fn reserve(&mut self, idx: usize, tokens: u32) -> bool {
        while (self.running[idx].table.len() as u32) < tokens.div_ceil(BLOCK_SIZE) {
            let Some(block) = self.take_block() else { return false };
            let (request, logical) = (self.running[idx].id, self.running[idx].table.len() as u32);
            self.record.deltas.push(BlockDelta::Alloc { block, request, logical });
            self.blocks[block.idx()] =
                BlockInfo { state: BlockState::Active, refs: 1, last_step: self.step, ..BlockInfo::default() };
            self.running[idx].table.push(block);
        }
        true
    }

    fn take_block(&mut self) -> Option<BlockId> {
        if let Some(block) = self.free.pop_front() {
            return Some(block);
        }
        let block = self.idle.pop_front()?;
        let hash = self.blocks[block.idx()].hash.expect("idle blocks are published");
        self.cache.remove(&hash);
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
        for block in table.into_iter().rev() {
            let info = &mut self.blocks[block.idx()];
            info.refs -= 1;
            info.last_step = self.step;
            self.record.deltas.push(BlockDelta::Unref { block, request });
            if info.refs > 0 {
                continue;
            }
            if info.hash.is_some() {
                info.state = BlockState::CachedIdle;
                self.idle.push_back(block);
                self.record.deltas.push(BlockDelta::CacheIdle { block });
            } else {
                *info = BlockInfo { last_step: self.step, ..BlockInfo::default() };
                self.free.push_back(block);
                self.record.deltas.push(BlockDelta::Free { block });
            }
        }
    }

    fn preempt(&mut self, idx: usize, beneficiary: RequestId) {
        let mut victim = self.running.remove(idx);
        self.record.rows.retain(|r| r.request != victim.id);
        self.record.preempted.push(Preemption {
            victim: victim.id,
            beneficiary,
            freed_blocks: victim.table.len() as u32,
            lost_tokens: victim.computed,
            mode: PreemptMode::Recompute,
            policy: VictimPolicy::LastIn,
            scores: Vec::new(),
        });
        self.release(victim.id, std::mem::take(&mut victim.table));
        victim.computed = 0;
        victim.preemptions += 1;
        self.preemptions += 1;
        self.waiting.push_front(victim);
    }

    fn commit(&mut self) {
        let end_us = self.now_us + 15_000;
        for row in self.record.rows.clone() {
            let idx = self.running.iter().position(|r| r.id == row.request).expect("rows are of running requests");
            let before = self.running[idx].computed;
            self.running[idx].computed = row.from + row.num_tokens;
            self.fill(idx, before);
            if row.sampled.is_some() {
                let r = &mut self.running[idx];
                r.outputs += 1;
                r.first_token_us.get_or_insert(end_us);
                r.last_token_us = Some(end_us);
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
    }

    fn totals(&self) -> KvTotals {
        let count = |f: &dyn Fn(&BlockInfo) -> bool| self.blocks.iter().skip(1).filter(|b| f(b)).count() as u32;
        KvTotals {
            total: self.blocks.len() as u32 - 1,
            used: count(&|b| b.state == BlockState::Active),
            cached_idle: self.idle.len() as u32,
            free: self.free.len() as u32,
            shared: count(&|b| b.refs >= 2),
            saved: self.blocks.iter().map(|b| b.refs.saturating_sub(1)).sum(),
            evicted_this_step: self.record.deltas.iter().filter(|d| matches!(d, BlockDelta::Evict { .. })).count()
                as u32,
            query_tokens: self.query_tokens,
            hit_tokens: self.hit_tokens,
            ..KvTotals::default()
        }
    }

    pub fn snapshot(&self) -> EngineSnapshot {
        let info = |r: &Live, state| RequestInfo {
            id: r.id,
            owner: OwnerTag { id: r.job.owner, label: r.job.label.clone() },
            state,
            prompt_tokens: r.job.prompt,
            cached_tokens: r.cached,
            output_tokens: r.outputs,
            num_computed: r.computed,
            blocks: r.table.clone(),
            parent: None,
            choice: 0,
            priority: 0,
            swapped_blocks: 0,
            preemptions: r.preemptions,
            submitted_us: r.submitted_us,
            first_token_us: r.first_token_us,
            last_token_us: r.last_token_us,
            finish: r.finish.clone(),
        };
        let waiting = RequestState::Waiting { reason: WaitReason::Budget, preempted: false };
        let requests = self.running.iter().map(|r| info(r, RequestState::Decoding));
        let requests = requests.chain(self.waiting.iter().map(|r| info(r, waiting)));
        let requests = requests.chain(self.done.iter().map(|r| info(r, RequestState::Finished)));
        EngineSnapshot {
            step: self.step,
            t_us: self.now_us,
            block_size: BLOCK_SIZE,
            kv_bytes_per_block: 512 << 10,
            kv: self.totals(),
            blocks: self.blocks.clone(),
            eviction_order: self.idle.iter().copied().collect(),
            requests: requests.collect(),
            max_num_seqs: 64,
            max_tokens_per_step: self.budget,
            preemptions_total: self.preemptions,
            ..EngineSnapshot::default()
        }
    }

    pub fn publish(&self) {
        self.telemetry.publish(self.snapshot());
    }
}

/// Four chats that share a system prompt, one API request, and a long prompt that arrives late.
pub fn demo_jobs() -> Vec<Job> {
    let chat = |arrive, owner, label: &str, prompt, output| Job {
        arrive,
        owner,
        label: label.to_owned(),
        prefix: 1,
        prefix_blocks: 6,
        prompt,
        output,
    };
    vec![
        chat(1, 11, "Rust lifetimes", 260, 420),
        chat(9, 12, "Poem about the sea", 140, 300),
        chat(22, 13, "Translate a letter", 180, 340),
        chat(40, 14, "Plan a trip to Oslo", 220, 380),
        Job { prefix: 9, prefix_blocks: 0, ..chat(90, 9_000, "API request 7", 300, 160) },
        chat(150, 15, "Summarise the minutes", 640, 200),
        chat(210, 11, "Rust lifetimes", 420, 300),
    ]
}

/// Enough requests to keep a pool of `num_blocks` about `share` full.
pub fn crowd(num_blocks: u32, share: f32, num_requests: u32) -> Vec<Job> {
    let tokens = (num_blocks as f32 * share) as u32 * BLOCK_SIZE / num_requests;
    (0..num_requests)
        .map(|i| Job {
            arrive: 1,
            owner: 20 + u64::from(i % 12),
            label: format!("Chat {}", i + 1),
            prefix: u64::from(i % 3),
            prefix_blocks: 4,
            prompt: (tokens + i * 13).max(100),
            output: 4_000,
        })
        .collect()
}
