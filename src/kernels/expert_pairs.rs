//! `expert_pairs`: pairs of (token, expert) sorted by expert and cut into tiles, on the GPU: the work list of
//! [`super::expert_matmul`].

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::KernelContext;
use super::matmul::COLUMNS;
use crate::gpu::{Bound, BufferSlice, Defines, GpuError, Recording};
use crate::model::experts::{ExpertSpec, MAX_EXPERTS};

/// Mirrors `Params` of expert_pairs.wgsl.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub num_experts: u32,
    pub num_active: u32,
    pub columns: u32,
    pub slots: u32,
}

/// Words of the header, and of a tile.
const WORDS: u32 = 4;

/// Sizes of the work list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub num_experts: u32,
    pub num_active: u32,
    /// Tokens of the largest step.
    pub max_tokens: u32,
}

impl Layout {
    pub fn new(spec: &ExpertSpec, max_tokens: u32) -> Layout {
        Layout { num_experts: spec.num_experts, num_active: spec.num_active, max_tokens }
    }

    fn max_pairs(&self) -> u32 {
        self.max_tokens * self.num_active
    }

    /// First word of the pairs: behind a tile for each pair.
    pub fn slots(&self) -> u32 {
        WORDS + WORDS * self.max_pairs()
    }

    /// Bytes of the work list.
    pub fn bytes(&self) -> u64 {
        u64::from(self.slots() + self.max_pairs()) * 4
    }

    /// Pairs in a tile for a step of so many tokens: about as many as an expert gets.
    pub fn columns(&self, num_tokens: u32) -> u32 {
        let per_expert = (num_tokens * self.num_active).div_ceil(self.num_experts);
        COLUMNS.into_iter().find(|&c| c >= per_expert).unwrap_or(COLUMNS[COLUMNS.len() - 1])
    }

    /// At most so many tiles are in the list of such a step.
    pub fn max_tiles(&self, num_tokens: u32) -> u32 {
        let pairs = num_tokens * self.num_active;
        pairs.min(pairs / self.columns(num_tokens) + self.num_experts)
    }
}

/// The defines of the kernel.
pub fn defines() -> Defines {
    Defines::new().set("MAX_EXPERTS", i64::from(MAX_EXPERTS))
}

/// The kernel with one layer's buffers, for each width of tiles.
#[derive(Clone, Debug)]
pub struct ExpertPairs {
    layout: Layout,
    bound: Vec<(u32, Arc<Bound>)>,
}

impl ExpertPairs {
    /// `chosen` is u32 `[num_tokens, num_active]`, `work` has [`Layout::bytes`].
    pub fn new(
        ctx: &mut KernelContext<'_>,
        layout: Layout,
        chosen: &BufferSlice,
        work: &BufferSlice,
    ) -> Result<ExpertPairs, GpuError> {
        let kernel = ctx.gpu.kernel("expert_pairs", &defines())?;
        let mut bound = Vec::new();
        for columns in COLUMNS {
            let Layout { num_experts, num_active, .. } = layout;
            let params = Params { num_experts, num_active, columns, slots: layout.slots() };
            let uniform = ctx.params.push(ctx.gpu, &params)?;
            let bindings = [("step_meta", ctx.step_meta), ("chosen", chosen), ("work", work), ("params", &uniform)];
            bound.push((columns, ctx.gpu.bind(&kernel, &bindings)?));
        }
        Ok(ExpertPairs { layout, bound })
    }

    pub fn record(&self, recording: &mut Recording, num_tokens: u32) {
        let columns = self.layout.columns(num_tokens);
        let bound = self.bound.iter().find(|(c, _)| *c == columns).expect("there is one for each width");
        recording.dispatch("expert pairs", &bound.1, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_as_wide_as_experts_are_busy_and_their_number_is_bounded() {
        let layout = Layout { num_experts: 8, num_active: 2, max_tokens: 64 };
        assert_eq!([1, 8, 16, 64].map(|tokens| layout.columns(tokens)), [2, 2, 4, 8]);
        // The worst case: every expert has one pair more than whole tiles.
        assert_eq!(layout.max_tiles(1), 2);
        assert_eq!(layout.max_tiles(64), 128 / 8 + 8);
        assert_eq!(layout.bytes(), (4 + 4 * 128 + 128) * 4);
    }
}
