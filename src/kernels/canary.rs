//! `canary`: marks each slot of the KV cache with the token, position and chain that were written to it, and checks the
//! marks of a row's blocks before a step reads them.
//!
//! Guarantees: a table that holds a block of another sequence, an older content of a block, tokens at other positions or
//! marks that were overwritten is found before the row's next token is used. It does not look at keys and values: damage
//! that leaves the marks alone goes unseen.

use std::sync::Arc;

use super::step_meta;
use crate::batch::StepBatch;
use crate::gpu::{Bound, Buffer, BufferSlice, BufferUse, Defines, Gpu, GpuError, Recording};

/// Bytes of a slot's mark.
pub const MARK_BYTES: u32 = 16;
const LANES: u32 = 64;

/// A row whose blocks do not hold what it computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corruption {
    pub row: u32,
    /// The first position that is wrong.
    pub position: u32,
    /// The block that holds it.
    pub block: u32,
}

/// The kernels with their buffers.
#[derive(Debug)]
pub struct Canary {
    check: Arc<Bound>,
    write: Arc<Bound>,
    faults: Buffer,
}

/// With CHECK and without.
pub fn defines(checks: bool) -> Defines {
    if checks { Defines::new().flag("CHECK") } else { Defines::new() }
}

impl Canary {
    /// `marks` is `[num_blocks, block_size]` of [`MARK_BYTES`].
    pub fn new(gpu: &Gpu, step_meta: &BufferSlice, marks: &BufferSlice, max_rows: u32) -> Result<Canary, GpuError> {
        let faults = gpu.alloc("canary faults", u64::from(max_rows) * 4, BufferUse::Storage)?;
        let check = gpu.kernel("canary", &defines(true))?;
        let write = gpu.kernel("canary", &defines(false))?;
        Ok(Canary {
            check: gpu.bind(&check, &[("step_meta", step_meta), ("marks", marks), ("faults", &faults.whole())])?,
            write: gpu.bind(&write, &[("step_meta", step_meta), ("marks", marks)])?,
            faults,
        })
    }

    /// Checks what the batch's rows will read, then marks what they write. Gives the slice to be read back for
    /// [`corruptions`].
    pub fn record(&self, recording: &mut Recording, batch: &StepBatch) -> BufferSlice {
        let rows = batch.num_rows() as u32;
        let faults = self.faults.slice(0, u64::from(rows) * 4);
        recording.clear_slice(faults.clone());
        recording.dispatch("canary check", &self.check, rows * step_meta::most_keys(batch).div_ceil(LANES));
        recording.dispatch("canary write", &self.write, rows.div_ceil(LANES));
        faults
    }
}

/// What a check found, from the words of its slice.
pub fn corruptions(batch: &StepBatch, words: &[u32]) -> Vec<Corruption> {
    let rows = (0u32..).zip(words).filter(|(_, word)| **word != 0);
    rows.map(|(row, &word)| {
        let position = !word;
        let at = batch.block_table_start[row as usize] + position / batch.block_size;
        Corruption { row, position, block: batch.block_tables[at as usize] }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_check_become_positions_and_blocks() {
        let batch = StepBatch {
            block_size: 4,
            block_tables: vec![7, 8, 9, 3],
            block_table_start: vec![0, 3, 4],
            ..StepBatch::default()
        };
        assert_eq!(corruptions(&batch, &[!9, 0]), [Corruption { row: 0, position: 9, block: 9 }]);
        assert_eq!(corruptions(&batch, &[0, !0]), [Corruption { row: 1, position: 0, block: 3 }]);
    }

    #[test]
    fn the_chain_is_the_one_of_the_batch() {
        let text = include_str!("../../shaders/kernels/canary.wgsl");
        assert!(text.contains(&format!("START: u32 = {:#x}u", crate::batch::canary::START)));
        for number in ["0x9e3779b1", "0x85ebca77", "0x21f0aaad", "0x735a2d97"] {
            assert!(text.contains(number), "{number}");
        }
    }
}
