//! Identities that must not be mixed up. Counts and indices stay plain integers; identities are newtypes.

use serde::{Deserialize, Serialize};

/// A token of the model's vocabulary. Plain `u32`, since it flows through tokenizer, batch and GPU buffers unchanged.
pub type TokenId = u32;

/// Shortest context, in tokens: one of a prompt and one of an output.
pub const MIN_CONTEXT: u32 = 2;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The identity as an index into a flat array.
            pub fn idx(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// One generation request, unique for the life of the engine, ascending in order of submission.
    RequestId(u64)
);
id!(
    /// A place in the batch, fixed from admission to finish or preemption.
    SeqSlot(u32)
);
id!(
    /// A physical block of the KV pool. Block 0 is the null block: never allocated, never written.
    BlockId(u32)
);
id!(
    /// A place for one block's content in host memory.
    HostSlot(u32)
);
id!(
    /// A decoder layer, counted from the embedding upwards.
    LayerIdx(u32)
);

impl BlockId {
    /// The block that stands for "nothing here"; it belongs to nobody.
    pub const NULL: BlockId = BlockId(0);
}
