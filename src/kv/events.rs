//! What happens to blocks, told to whoever mirrors them.

use crate::ids::{BlockId, HostSlot, RequestId};

/// A change of one block, in order of happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum BlockEvent {
    /// Handed out (an `Evict` of the same block precedes it where its content was kept until now). `logical` counts the
    /// entries of [`super::BlockTable::ids`]: with one group, blocks in logical order.
    Alloc { block: BlockId, request: RequestId, logical: u32 },
    /// Written up to `filled` slots.
    Fill { block: BlockId, filled: u32 },
    /// One more table holds it: a prefix hit.
    Share { block: BlockId, request: RequestId, logical: u32 },
    /// One table less holds it.
    Unref { block: BlockId, request: RequestId },
    /// Nobody holds it, its content stays for prefix hits.
    CacheIdle { block: BlockId },
    /// A cached-idle block loses its content.
    Evict { block: BlockId },
    /// Nobody holds it and nothing is kept.
    Free { block: BlockId },
    /// Committed and now findable by prefix: full, or the tail of a request that ended. A held block that stops being findable (another took its hash, or its
    /// content is suspect) tells nothing: it will be told as `Free`, not `CacheIdle`, once nobody holds it.
    Publish { block: BlockId, hash: u64 },
    /// Its content goes to host memory: that of a preempted request, or (`None`) that of a cached block.
    SwapOut { block: BlockId, host: HostSlot, request: Option<RequestId> },
    /// Content comes back from host memory into a block just handed out. The place stays taken until a `HostFree`.
    SwapIn { host: HostSlot, block: BlockId, request: RequestId },
    /// A place of host memory is given back.
    HostFree { host: HostSlot },
    /// Copied into a fresh block (its `Alloc` precedes this, its `Fill` follows) because `request` may not write into
    /// `from`, which others see. `request` lets go of `from` when the step is over.
    Copy { from: BlockId, to: BlockId, request: RequestId },
    /// A pinned prefix holds it (`Share` told so before): it is not evicted.
    Pin { block: BlockId },
    /// No pinned prefix holds it any more (an `Unref` follows).
    Unpin { block: BlockId },
}
