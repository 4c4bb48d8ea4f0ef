//! What the engine did, step by step: plain records in a bounded ring, and the latest snapshot.
//!
//! Guarantees: the engine thread is the only writer and never waits for a reader; readers copy out and hold no engine
//! lock; memory is bounded by [`Limits`]. It does not attempt to keep text or tensors.

pub mod in_flight;
pub mod kernels;
pub mod prefixes;

use self::in_flight::InFlight;
use self::kernels::KernelProfile;
use self::prefixes::PrefixFeed;
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
    /// What a grammar forced behind it: computed in the next step, and not sampled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forced: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A chunk of the prompt; `cached` tokens came from the prefix cache when the row was admitted in this step.
    Prefill { cached: u32 },
    /// The last token, to get the next; with those that were forced behind it.
    Decode,
    /// Tokens computed again after a preemption.
    Recompute { cached: u32 },
}

/// A change of one block, in order of happening. Readers rebuild the block map from these and a keyframe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockDelta {
    /// Taken from the free list (or evicted first: an `Evict` of the same block precedes it).
    Alloc {
        block: BlockId,
        request: RequestId,
        logical: u32,
    },
    /// Written up to `filled` tokens.
    Fill {
        block: BlockId,
        filled: u32,
    },
    /// One more table holds it: a prefix hit.
    Share {
        block: BlockId,
        request: RequestId,
        logical: u32,
    },
    /// One table less holds it.
    Unref {
        block: BlockId,
        request: RequestId,
    },
    /// Nobody holds it, its content stays for prefix hits.
    CacheIdle {
        block: BlockId,
    },
    /// A cached-idle block loses its content to make room.
    Evict {
        block: BlockId,
    },
    /// Nobody holds it and nothing is kept.
    Free {
        block: BlockId,
    },
    /// Full, committed and now findable by prefix.
    Publish {
        block: BlockId,
        hash: u64,
    },
    /// Copied to a fresh block (its `Alloc` precedes this) because `request` is about to write into a shared one.
    Copy {
        from: BlockId,
        to: BlockId,
        request: RequestId,
    },
    /// Content copied to host memory: of a preempted request, or (`None`) of a cached block that is being evicted.
    SwapOut {
        block: BlockId,
        host: u32,
        request: Option<RequestId>,
    },
    /// Content copied back from host memory into a fresh block (its `Alloc` precedes this). The place stays taken until a
    /// `HostFree`.
    SwapIn {
        host: u32,
        block: BlockId,
        request: RequestId,
    },
    /// A place of host memory is given back: its request went on or ended, or its cached block was dropped.
    HostFree {
        host: u32,
    },
    /// A pinned prefix holds it: it is not evicted.
    Pin {
        block: BlockId,
    },
    Unpin {
        block: BlockId,
    },
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
    /// Of the tokens found: in a block shared in part (copied on write), in host memory, on disk.
    pub partial_hit_tokens: u64,
    pub host_hit_tokens: u64,
    pub disk_hit_tokens: u64,
    /// Blocks that pinned prefixes hold.
    pub pinned: u32,
    /// Places for blocks in host memory, and those taken by preempted requests and by cached prefixes.
    pub host_total: u32,
    pub host_swapped: u32,
    pub host_cached: u32,
    /// Blocks that the disk tier holds.
    pub disk_cached: u64,
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
    /// Its client has had more than its share: another client's request goes first.
    Share { ahead: RequestId },
    /// The beams of a search join together: so many slots are needed, so many are there.
    Gang { needed: u32, available: u32 },
}

/// How a preempted request gets its K and V back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreemptMode {
    /// From its tokens.
    #[default]
    Recompute,
    /// From host memory, bit for bit.
    Swap,
}

/// A preemption and how the victim was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preemption {
    pub victim: RequestId,
    /// Whose growth needed the blocks.
    pub beneficiary: RequestId,
    pub freed_blocks: u32,
    pub lost_tokens: u32,
    pub mode: PreemptMode,
    /// The policy that chose, and what it ranked the candidates by: the highest is the victim.
    pub policy: VictimPolicy,
    pub scores: Vec<(RequestId, u64)>,
}

/// Who gives way when blocks are short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VictimPolicy {
    /// The last to join.
    #[default]
    LastIn,
    /// The one with the fewest computed tokens: least work is lost.
    LeastComputed,
    /// The one of lowest priority, the last to join among equals.
    Priority,
}

/// Who is admitted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueuePolicy {
    /// In order of arrival.
    Fcfs,
    Priority,
    /// The longest cached prefix first.
    LongestPrefix,
    /// Between clients by tokens served, within a client in order of arrival.
    #[default]
    Fair,
}

/// A client in the queue, under the fair policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientShare {
    pub owner: OwnerTag,
    /// Prompt and output tokens computed for it since the engine started.
    pub served_tokens: u64,
    /// What the policy ranks by: the lowest goes first.
    pub counter: u64,
    pub waiting: u32,
    pub running: u32,
}

/// The queue after a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueInfo {
    pub policy: QueuePolicy,
    /// What stopped the last admission; `None` when the queue is empty.
    pub binding: Option<WaitReason>,
    /// Clients with live requests (bounded).
    pub clients: Vec<ClientShare>,
}

/// Where a prefix is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    #[default]
    Gpu,
    Host,
    Disk,
}

/// A prefix that the cache knows: a chain of blocks that requests have shared, or that is pinned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefixInfo {
    /// Content hash of its last full block: the name by which commands pin, unpin and evict it.
    pub id: u64,
    pub name: Option<String>,
    pub tokens: u32,
    pub blocks: u32,
    /// Admissions that found it, and the tokens they were spared.
    pub hits: u64,
    pub hit_tokens: u64,
    /// Of these tokens: in host memory, on disk.
    #[serde(default)]
    pub host_hit_tokens: u64,
    #[serde(default)]
    pub disk_hit_tokens: u64,
    pub last_hit_step: u64,
    pub pinned: bool,
    /// Where its last block is.
    pub tier: Tier,
    pub cache_salt: u64,
    pub adapter: u64,
    /// The first tokens, for a preview (at most 32).
    pub head: Vec<TokenId>,
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
    /// Tokens that rows which compute several may have together beside decoding ones.
    pub max_prefill_tokens: u32,
    /// What the choice between recomputing and swapping was made from: computing a token again, and copying a block to
    /// host memory and back.
    #[serde(default)]
    pub recompute_token_ns: u64,
    #[serde(default)]
    pub swap_block_ns: u64,
    pub rows: Vec<SeqStep>,
    pub admitted: Vec<RequestId>,
    pub preempted: Vec<Preemption>,
    pub finished: Vec<(RequestId, FinishReason)>,
    pub waiting: Vec<(RequestId, WaitReason)>,
    pub num_running: u32,
    pub num_waiting: u32,
    /// Pinned prefixes that gave way, by the request that pinned them and the name that they had.
    #[serde(default)]
    pub yielded_pins: Vec<(RequestId, Option<String>)>,
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
    /// Tokens beside one for each decoding row; those that were forced behind it are among them.
    pub fn num_prefill_tokens(&self) -> u32 {
        self.num_tokens() - self.num_decode()
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
    /// Physical ids in logical order, in a model with layer groups one per group for each block of tokens: entry `i` is of
    /// group `i % num_groups`. The null block stands where a windowed group sees no more.
    pub blocks: Vec<BlockId>,
    /// The sequence that it was forked from (another choice or beam of one request, or a branch of a chat).
    pub parent: Option<RequestId>,
    /// Which choice of its request, or which of its search's beams; 0 where there is one.
    pub choice: u32,
    /// A beam of a search. The first names no parent and lasts; the others come and go.
    #[serde(default)]
    pub is_beam: bool,
    pub priority: i32,
    /// The LoRA adapter that it has; 0 is none.
    #[serde(default)]
    pub adapter: u64,
    /// Blocks held in host memory while it waits after a preemption.
    pub swapped_blocks: u32,
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
    /// A pinned prefix holds it.
    pub pinned: bool,
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

/// A place of host memory that holds a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostBlock {
    pub host: u32,
    /// Whose block it is; `None` for a block of the prefix cache.
    pub request: Option<RequestId>,
    /// Chained content hash, where the block was published.
    pub hash: Option<u64>,
}

/// The engine's state after its latest step; also the keyframe that deltas build upon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSnapshot {
    pub step: u64,
    pub t_us: u64,
    pub block_size: u32,
    pub kv_bytes_per_block: u64,
    /// Everything that the engine holds on the GPU.
    pub gpu_bytes: u64,
    /// Positions that each layer group sees, `None` for all; a model without windows has one group.
    pub group_windows: Vec<Option<u32>>,
    pub kv: KvTotals,
    /// Indexed by `BlockId`.
    pub blocks: Vec<BlockInfo>,
    /// Cached-idle blocks, next victim first.
    pub eviction_order: Vec<BlockId>,
    /// Taken places of host memory, ascending.
    pub host: Vec<HostBlock>,
    /// Blocks that admissions leave free for the growth of what runs.
    pub watermark_blocks: u32,
    pub victim_policy: VictimPolicy,
    /// Running in batch order, then waiting in queue order, then the last finished (bounded).
    pub requests: Vec<RequestInfo>,
    pub max_num_seqs: u32,
    pub max_tokens_per_step: u32,
    pub preemptions_total: u64,
    pub recomputed_tokens_total: u64,
    pub computed_tokens_total: u64,
    /// Of the preemptions: those that saved their blocks to host memory.
    pub swaps_total: u64,
    /// Blocks copied because a sharer was about to write.
    pub copied_blocks_total: u64,
    pub queue: QueueInfo,
    /// Pinned first, then by hits (bounded).
    pub prefixes: Vec<PrefixInfo>,
}

impl EngineSnapshot {
    /// The recompute tax: tokens computed again after preemptions, as a share of all computed tokens; 0 before the first.
    pub fn recompute_tax(&self) -> f64 {
        match self.computed_tokens_total {
            0 => 0.0,
            total => self.recomputed_tokens_total as f64 / total as f64,
        }
    }
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
    profiling: AtomicBool,
    window_visible: AtomicBool,
    profile: RwLock<Option<Arc<KernelProfile>>>,
    prefix_feed: PrefixFeed,
    in_flight: InFlight,
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
            profiling: AtomicBool::new(false),
            window_visible: AtomicBool::new(false),
            profile: RwLock::default(),
            prefix_feed: PrefixFeed::default(),
            in_flight: InFlight::default(),
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

    /// Whether somebody wants to know how long each kernel takes.
    pub fn is_profiling(&self) -> bool {
        self.profiling.load(Ordering::Relaxed)
    }

    /// Asks for the time of each kernel from the next step on, which makes steps a little slower.
    pub fn set_profiling(&self, on: bool) {
        self.profiling.store(on, Ordering::Relaxed);
    }

    /// Whether a window of this process is being drawn.
    pub fn is_window_visible(&self) -> bool {
        self.window_visible.load(Ordering::Relaxed)
    }

    /// Tells that a window is being drawn, or not any more.
    pub fn set_window_visible(&self, is_visible: bool) {
        self.window_visible.store(is_visible, Ordering::Relaxed);
    }

    /// Replaces the profile. Engine thread only.
    pub fn publish_profile(&self, profile: KernelProfile) {
        *self.profile.write().unwrap_or_else(|e| e.into_inner()) = Some(Arc::new(profile));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The kernels of the last step that was timed.
    pub fn profile(&self) -> Option<Arc<KernelProfile>> {
        self.profile.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Changes of what the prefix cache can find.
    pub fn prefix_feed(&self) -> &PrefixFeed {
        &self.prefix_feed
    }

    /// The step that the engine is in.
    pub fn in_flight(&self) -> &InFlight {
        &self.in_flight
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
