//! The paged KV cache's bookkeeping: which block holds what, for whom, and what can be found again.
