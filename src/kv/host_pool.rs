//! Places for the content of blocks in host memory.

use crate::ids::{BlockId, HostSlot};

/// One block's content on its way between the pool and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostTransfer {
    pub block: BlockId,
    pub host: HostSlot,
}
