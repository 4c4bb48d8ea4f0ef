//! The step that is likely to come after one: its rows go on by the tokens that it draws.
//!
//! Guarantees: [`StepBatch::step_after`] writes to slots only that follow a slot which the step itself writes, in the same
//! block, so nothing that anybody was told of is touched; [`StepBatch::rows_in`] finds a batch in another only where each
//! of its rows would be computed from the same numbers. It does not know how long a sequence may become.

use super::{RowSampling, StepBatch, Want};
use crate::ids::TokenId;

impl StepBatch {
    /// The batch in which every row goes on by one token, which is not known yet and stands as 0. `None` where a row draws no
    /// token, its next draw hangs on what it draws now, or its next token needs another block.
    pub fn step_after(&self) -> Option<StepBatch> {
        if !self.is_plain() || self.num_logits() != self.num_rows() || self.num_rows() == 0 {
            return None;
        }
        let mut next = StepBatch {
            block_size: self.block_size,
            num_groups: self.num_groups,
            row_start: vec![0],
            slot_of_row: self.slot_of_row.clone(),
            adapter_of_row: self.adapter_of_row.clone(),
            block_tables: self.block_tables.clone(),
            block_table_start: self.block_table_start.clone(),
            penalty_start: self.penalty_start.clone(),
            biases: self.biases.clone(),
            bias_start: self.bias_start.clone(),
            ..StepBatch::default()
        };
        for (row, &last) in (0u32..).zip(&self.logit_tokens) {
            if last + 1 != self.row_start[row as usize + 1] {
                return None;
            }
            next.input_ids.push(0);
            next.positions.push(self.positions[last as usize] + 1);
            for group in 0..self.num_groups() {
                let slot = self.kv_slot(last as usize, group);
                let is_nobodys = slot < self.block_size;
                if is_nobodys || (slot + 1).is_multiple_of(self.block_size) {
                    return None;
                }
                next.kv_slots.push(slot + 1);
            }
            next.row_of_token.push(row);
            next.row_start.push(row + 1);
            next.logit_tokens.push(row);
        }
        let goes_on = |rules: &RowSampling| RowSampling { position: rules.position + 1, ..*rules };
        next.sampling.extend(self.sampling.iter().map(goes_on));
        next.find_groups();
        Some(next)
    }

    /// Which row of `ahead`, whose tokens turned out to be `tokens`, is each row of this batch; `None` where a row is not
    /// there, or the batch wants more than rows of one token.
    pub fn rows_in(&self, ahead: &StepBatch, tokens: &[TokenId]) -> Option<Vec<u32>> {
        let has_one_token_a_row = self.num_tokens() == self.num_rows() && self.num_logits() == self.num_rows();
        let moves = !self.copies.is_empty() || !self.swap_out.is_empty() || !self.swap_in.is_empty();
        let is_alike = (self.block_size, self.num_groups()) == (ahead.block_size, ahead.num_groups());
        if !self.is_plain() || !has_one_token_a_row || moves || !is_alike || self.num_rows() == 0 {
            return None;
        }
        let row_of = |row: usize| {
            let found = ahead.slot_of_row.iter().position(|slot| *slot == self.slot_of_row[row])?;
            self.is_row(row, (ahead, tokens), found).then_some(found as u32)
        };
        (0..self.num_rows()).map(row_of).collect()
    }

    /// Tokens are drawn by rules that are known before the step, and nothing else comes back.
    fn is_plain(&self) -> bool {
        let has_beams = self.sampling.iter().any(|rules| rules.is_beam);
        let reads = self.chains.is_empty() && self.hidden.is_empty() && self.scored.is_empty();
        self.want == Want::Ids && reads && self.masks.is_empty() && self.penalties.is_empty() && !has_beams
    }

    /// Whether a row of one token is computed from the same numbers as one of `ahead`.
    fn is_row(&self, row: usize, (ahead, tokens): (&StepBatch, &[TokenId]), other: usize) -> bool {
        let is_same_group = |group: usize| {
            self.kv_slot(row, group) == ahead.kv_slot(other, group)
                && self.table(row, group) == ahead.table(other, group)
        };
        let biases = |batch: &StepBatch, l: usize| -> Vec<(TokenId, u32)> {
            let range = batch.bias_start[l] as usize..batch.bias_start[l + 1] as usize;
            batch.biases[range].iter().map(|(token, bias)| (*token, bias.to_bits())).collect()
        };
        tokens.get(other) == Some(&self.input_ids[row])
            && self.positions[row] == ahead.positions[other]
            && self.sampling[row] == ahead.sampling[other]
            && self.adapter(row) == ahead.adapter(other)
            && (0..self.num_groups()).all(is_same_group)
            && biases(self, row) == biases(ahead, other)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BatchRow, BlockCopy, LogitRow, RowLogits, TokenPenalty};
    use super::*;
    use crate::ids::{BlockId, SeqSlot};
    use crate::protocol::SamplingParams;

    /// Rows of (slot, first position, tokens, blocks) over blocks of four.
    fn batch(rows: &[(u32, u32, &[u32], &[u32])]) -> StepBatch {
        let mut batch = StepBatch::default();
        batch.begin(5, 4);
        for &(slot, first_position, tokens, blocks) in rows {
            let blocks: Vec<BlockId> = blocks.iter().map(|b| BlockId(*b)).collect();
            let sampling = RowSampling::new(&SamplingParams::greedy(), u64::from(slot));
            batch.push_row(BatchRow {
                slot: SeqSlot(slot),
                first_position,
                write_from: first_position,
                tokens,
                blocks: &blocks,
                logits: RowLogits::Last(LogitRow { sampling, counts: &[], biases: &[(slot, 0.5)] }),
            });
        }
        batch.find_groups();
        batch
    }

    #[test]
    fn rows_go_on_in_the_slot_behind_their_last() {
        let now = batch(&[(3, 4, &[7, 8], &[2, 9]), (1, 0, &[5], &[6])]);
        let next = now.step_after().expect("both have room");
        assert_eq!((&next.positions[..], &next.kv_slots[..]), (&[6, 1][..], &[9 * 4 + 2, 6 * 4 + 1][..]));
        assert_eq!(next.check(10, 10), Ok(()));
        // What the engine will ask for, but for the tokens, in any order and without those that ended.
        let asked = batch(&[(1, 1, &[30], &[6]), (3, 6, &[20], &[2, 9])]);
        assert_eq!(asked.rows_in(&next, &[20, 30]), Some(vec![1, 0]));
        assert_eq!(batch(&[(1, 1, &[30], &[6])]).rows_in(&next, &[20, 30]), Some(vec![1]));
        assert_eq!(asked.rows_in(&next, &[20, 31]), None, "another token");
        assert_eq!(asked.rows_in(&next, &[]), None, "not known yet");
    }

    #[test]
    fn what_is_computed_from_other_numbers_is_not_found() {
        let next = batch(&[(3, 4, &[7, 8], &[2, 9]), (1, 0, &[5], &[6])]).step_after().expect("both have room");
        let found = |change: fn(&mut StepBatch)| {
            let mut asked = batch(&[(3, 6, &[20], &[2, 9]), (1, 1, &[30], &[6])]);
            change(&mut asked);
            asked.rows_in(&next, &[20, 30]).is_some()
        };
        assert!(found(|_| {}));
        assert!(!found(|b| b.slot_of_row[0] = 2), "a row that joined");
        assert!(!found(|b| b.block_tables[0] = 3), "a block that was copied");
        assert!(!found(|b| b.positions[1] = 2));
        assert!(!found(|b| b.kv_slots[1] = 0), "a row that writes nothing");
        assert!(!found(|b| b.sampling[0].seed = 9));
        assert!(!found(|b| b.sampling[1].logprobs = Some(2)));
        assert!(!found(|b| b.biases[0].1 = -0.5));
        assert!(!found(|b| b.adapter_of_row = vec![4]));
        assert!(!found(|b| b.copies.push(BlockCopy { from: 1, to: 3 })));
        assert!(!found(|b| b.mask_row(0, &[1])));
        assert!(!found(|b| b.want = Want::Logits));
    }

    #[test]
    fn steps_whose_next_is_not_known_have_none() {
        let has_next = |change: fn(&mut StepBatch)| {
            let mut now = batch(&[(3, 4, &[7, 8], &[2, 9]), (1, 0, &[5], &[6])]);
            change(&mut now);
            now.step_after().is_some()
        };
        assert!(has_next(|_| {}));
        assert!(!has_next(|b| b.kv_slots[1] = 9 * 4 + 3), "the next token needs another block");
        assert!(!has_next(|b| b.kv_slots[2] = 1), "the last block is somebody else's");
        assert!(!has_next(|b| b.penalties.push(TokenPenalty { token: 1, output_count: 1 })));
        assert!(!has_next(|b| b.sampling[0].is_beam = true));
        assert!(!has_next(|b| b.hidden.push((0, 1))));
        assert!(!has_next(|b| b.logit_tokens.truncate(1)), "a prompt that is read further");
        assert_eq!(StepBatch::default().step_after(), None);
    }
}
