//! What the engine did, step by step: plain records in a bounded ring, and the latest snapshot.
//!
//! Guarantees: the engine thread is the only writer and never waits for a reader; readers copy out and hold no engine
//! lock; memory is bounded by [`Limits`]. It does not attempt to keep text or tensors.

use crate::ids::{BlockId, RequestId, SeqSlot, TokenId};
use crate::protocol::{FinishReason, OwnerTag};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// What one row of a step's batch did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeqStep {
    pub request: RequestId,
    pub slot: SeqSlot,
    pub kind: RowKind,
    /// Tokens computed in this step: positions `from..from + num_tokens`.
    pub from: u32,
    pub num_tokens: u32,
    /// The token sampled by this row, if its last position asked for logits.
    pub sampled: Option<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A chunk of the prompt; `cached` tokens came from the prefix cache when the row was admitted in this step.
    Prefill { cached: u32 },
    /// One new token.
    Decode,
    /// Tokens computed again after a preemption.
    Recompute { cached: u32 },
}

/// A change of one block, in order of happening. Readers rebuild the block map from these and a keyframe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockDelta {
    /// Taken from the free list (or evicted first: an `Evict` of the same block precedes it).
    Alloc { block: BlockId, request: RequestId, logical: u32 },
    /// Written up to `filled` tokens.
    Fill { block: BlockId, filled: u32 },
    /// One more table holds it: a prefix hit.
    Share { block: BlockId, request: RequestId, logical: u32 },
    /// One table less holds it.
    Unref { block: BlockId, request: RequestId },
    /// Nobody holds it, its content stays for prefix hits.
    CacheIdle { block: BlockId },
    /// A cached-idle block loses its content to make room.
    Evict { block: BlockId },
    /// Nobody holds it and nothing is kept.
    Free { block: BlockId },
    /// Full, committed and now findable by prefix.
    Publish { block: BlockId, hash: u64 },
}

/// Totals of the KV pool after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTotals {
    /// All blocks but the null block.
    pub total: u32,
    /// Held by at least one table.
    pub used: u32,
    /// Held by nobody, content kept.
    pub cached_idle: u32,
    pub free: u32,
    /// Held by two tables or more.
    pub shared: u32,
    /// Blocks saved by sharing: the sum over shared blocks of (references - 1).
    pub saved: u32,
    pub evicted_this_step: u32,
    /// Prompt tokens looked up and found, since start.
    pub query_tokens: u64,
    pub hit_tokens: u64,
}

/// Why a waiting request was not admitted in this step: the binding constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// Behind others in the queue.
    Behind { position: u32 },
    /// KV is short: blocks needed and available (after hits and watermark).
    Blocks { needed: u32, available: u32 },
    /// All slots of the batch are taken.
    Slots { max_num_seqs: u32 },
    /// The step's token budget is used up.
    Budget,
    /// A preemption happened in this step; nothing is admitted beside it.
    Preemption,
    /// Its next block is being computed by `leader` in this step; it is shared in the next.
    Prefix { leader: RequestId },
}

/// A preemption and how the victim was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preemption {
    pub victim: RequestId,
    /// Whose growth needed the blocks.
    pub beneficiary: RequestId,
    pub freed_blocks: u32,
    pub lost_tokens: u32,
}

/// Everything the scheduler decided in one step and what it cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    pub step: u64,
    /// Microseconds since the engine started.
    pub t0_us: u64,
    pub sched_us: u32,
    pub gpu_us: u32,
    pub output_us: u32,
    pub total_us: u32,
    /// Token budget of the step and what is used of it.
    pub budget: u32,
    pub rows: Vec<SeqStep>,
    pub admitted: Vec<RequestId>,
    pub preempted: Vec<Preemption>,
    pub finished: Vec<(RequestId, FinishReason)>,
    pub waiting: Vec<(RequestId, WaitReason)>,
    pub num_running: u32,
    pub num_waiting: u32,
    pub kv: KvTotals,
    pub deltas: Vec<BlockDelta>,
}

impl StepRecord {
    pub fn num_tokens(&self) -> u32 {
        self.rows.iter().map(|r| r.num_tokens).sum()
    }
    pub fn num_decode(&self) -> u32 {
        self.rows.iter().filter(|r| r.kind == RowKind::Decode).count() as u32
    }
    pub fn num_prefill_tokens(&self) -> u32 {
        self.rows.iter().filter(|r| r.kind != RowKind::Decode).map(|r| r.num_tokens).sum()
    }
}

/// The life of a request as the app shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    Waiting { reason: WaitReason, preempted: bool },
    Reading { computed: u32, total: u32 },
    Decoding,
    Finished,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestInfo {
    pub id: RequestId,
    pub owner: OwnerTag,
    pub state: RequestState,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub num_computed: u32,
    /// Physical ids in logical order.
    pub blocks: Vec<BlockId>,
    pub preemptions: u32,
    /// Microseconds since the engine started.
    pub submitted_us: u64,
    pub first_token_us: Option<u64>,
    pub last_token_us: Option<u64>,
    pub finish: Option<FinishReason>,
}

/// One block as it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    pub state: BlockState,
    pub refs: u32,
    pub filled: u32,
    /// Chained content hash of a published block.
    pub hash: Option<u64>,
    /// Step of the last event.
    pub last_step: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    #[default]
    Free,
    Active,
    CachedIdle,
    Null,
}

/// The engine's state after its latest step; also the keyframe that deltas build upon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSnapshot {
    pub step: u64,
    pub t_us: u64,
    pub block_size: u32,
    pub kv_bytes_per_block: u64,
    pub kv: KvTotals,
    /// Indexed by `BlockId`.
    pub blocks: Vec<BlockInfo>,
    /// Cached-idle blocks, next victim first.
    pub eviction_order: Vec<BlockId>,
    /// Running in batch order, then waiting in queue order, then the last finished (bounded).
    pub requests: Vec<RequestInfo>,
    pub max_num_seqs: u32,
    pub max_tokens_per_step: u32,
    pub preemptions_total: u64,
    pub recomputed_tokens_total: u64,
    pub computed_tokens_total: u64,
}

/// Bounds of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_steps: usize,
    pub max_deltas: usize,
}

/// The ring and the latest snapshot. Clone the `Arc` to read from another thread.
pub struct Telemetry {
    limits: Limits,
    recording: AtomicBool,
    ring: Mutex<Ring>,
    snapshot: RwLock<Arc<EngineSnapshot>>,
    version: AtomicU64,
}

#[derive(Default)]
struct Ring {
    records: VecDeque<Arc<StepRecord>>,
    num_deltas: usize,
    dropped: u64,
}

impl Telemetry {
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Telemetry {
            limits,
            recording: AtomicBool::new(true),
            ring: Mutex::new(Ring::default()),
            snapshot: RwLock::new(Arc::new(EngineSnapshot::default())),
            version: AtomicU64::new(0),
        })
    }

    pub fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    pub fn set_recording(&self, on: bool) {
        self.recording.store(on, Ordering::Relaxed);
    }

    /// Appends a record, dropping the oldest beyond the limits. Engine thread only.
    pub fn push(&self, record: StepRecord) {
        if !self.is_recording() {
            return;
        }
        let mut ring = lock(&self.ring);
        ring.num_deltas += record.deltas.len();
        ring.records.push_back(Arc::new(record));
        while ring.records.len() > self.limits.max_steps
            || (ring.num_deltas > self.limits.max_deltas && ring.records.len() > 1)
        {
            if let Some(old) = ring.records.pop_front() {
                ring.num_deltas -= old.deltas.len();
                ring.dropped += 1;
            }
        }
        drop(ring);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Replaces the snapshot. Engine thread only.
    pub fn publish(&self, snapshot: EngineSnapshot) {
        *self.snapshot.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(snapshot);
        self.version.fetch_add(1, Ordering::Release);
    }

    pub fn snapshot(&self) -> Arc<EngineSnapshot> {
        self.snapshot.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Records with `step > after`, oldest first, and how many records were dropped since start.
    pub fn records_after(&self, after: Option<u64>) -> (Vec<Arc<StepRecord>>, u64) {
        let ring = lock(&self.ring);
        let start = match after {
            Some(step) => ring.records.partition_point(|r| r.step <= step),
            None => 0,
        };
        (ring.records.iter().skip(start).cloned().collect(), ring.dropped)
    }

    /// Grows with each push or publish: a cheap "did anything change".
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}
