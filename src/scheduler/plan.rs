//! What a step will do: the immutable record of the scheduler's decisions.

use super::{SeqIdx, YieldedPin};
use crate::ids::{RequestId, SeqSlot};
use crate::kv::{BlockCopy, HostTransfer};

/// What a row of the batch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum RowKind {
    /// A chunk of the prompt; `cached` tokens came from the prefix cache when the row was admitted in this step.
    Prefill { cached: u32 },
    /// The token sampled last, to get the next; with those that were forced behind it.
    Decode,
    /// Tokens computed again after a preemption.
    Recompute { cached: u32 },
}

/// One sequence's part of a step: positions `from..from + num_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlanRow {
    pub request: RequestId,
    pub(super) seq: SeqIdx,
    pub slot: SeqSlot,
    pub kind: RowKind,
    pub from: u32,
    pub num_tokens: u32,
    /// K and V of positions before this one are there already: they are read, not written. At most `to()`.
    pub write_from: u32,
    /// Blocks reserved for this row in this step.
    pub num_new_blocks: u32,
    /// The row reaches the last known token: the next one is sampled.
    pub wants_logits: bool,
}

impl PlanRow {
    /// The position after the last one computed.
    pub fn to(&self) -> u32 {
        self.from + self.num_tokens
    }
}

/// A request that joins the batch in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Admission {
    pub request: RequestId,
    /// Known tokens: the prompt, and after a preemption the output so far.
    pub num_tokens: u32,
    /// How many of them need not be computed.
    pub cached_tokens: u32,
    /// Of those, how many come back from host memory.
    pub restored_tokens: u32,
    /// It ran before and was preempted.
    pub is_resumed: bool,
}

/// Who gives way when blocks are short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VictimPolicy {
    /// The last to join.
    #[default]
    LastIn,
    /// The one with the fewest computed tokens, the last to join among equals: least work is lost.
    LeastComputed,
    /// The one that the priority policy would run last, the last to join among equals.
    Priority,
}

/// How a preempted request gets its K and V back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreemptMode {
    /// From its tokens.
    #[default]
    Recompute,
    /// From host memory, bit for bit.
    Swap,
}

/// A request that is put back in the queue to make room.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Preemption {
    pub victim: RequestId,
    /// Whose growth needed the blocks; the victim itself when nobody else may be taken.
    pub beneficiary: RequestId,
    /// Blocks that became available.
    pub freed_blocks: u32,
    /// Computed positions given up (some may be found again by prefix).
    pub lost_tokens: u32,
    pub mode: PreemptMode,
    pub policy: VictimPolicy,
    /// What the policy ranked the candidates by, in batch order: the last of the highest is the victim. Protected requests
    /// are no candidates.
    pub scores: Vec<(RequestId, u64)>,
}

/// Why a request waits: the binding constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WaitReason {
    /// Behind others in the queue; 1 is next after the one that could not be admitted.
    Behind { position: u32 },
    /// Blocks needed after prefix hits, and available after hits, promises to running requests and watermark.
    Blocks { needed: u32, available: u32 },
    /// All slots of the batch are taken.
    Slots { max_num_seqs: u32 },
    /// The step's token budget is used up.
    Budget,
    /// The beams of a search join together: so many slots are needed, so many are free.
    Gang { needed: u32, available: u32 },
    /// A preemption happened in this step; nothing is admitted beside it.
    Preemption,
    /// Its next block is being computed by `leader` in this step; it is shared in the next.
    Prefix { leader: RequestId },
    /// Its client has had more than its share: a later request, of another client, goes first.
    Share { ahead: RequestId },
}

/// The decisions of one step. Rows are in batch order: one-token rows first.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StepPlan {
    pub step: u64,
    /// Tokens that the step may compute.
    pub budget: u32,
    pub rows: Vec<PlanRow>,
    pub admitted: Vec<Admission>,
    pub preempted: Vec<Preemption>,
    /// Content to be copied before anything is computed: blocks to host memory, then host memory to blocks.
    pub swap_out: Vec<HostTransfer>,
    pub swap_in: Vec<HostTransfer>,
    /// Done before anything is computed, in any order: no copy touches what another one reads or writes.
    pub copies: Vec<BlockCopy>,
    /// The first of the queue with their reasons, at most [`super::MAX_REASONS`].
    pub waiting: Vec<(RequestId, WaitReason)>,
    /// What stopped the last admission; `None` when nothing waits.
    pub binding: Option<WaitReason>,
    pub num_running: u32,
    pub num_waiting: u32,
    /// Pins that gave way for this step, or for one before it that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub yielded: Vec<YieldedPin>,
}

impl StepPlan {
    /// True when there is nothing to launch; it must still be committed.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.swap_out.is_empty()
    }

    pub fn num_tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.num_tokens).sum()
    }

    /// Rows that sample a token, in the order in which results come back.
    pub fn num_logits(&self) -> usize {
        self.rows.iter().filter(|row| row.wants_logits).count()
    }
}
