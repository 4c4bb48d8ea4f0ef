//! A step as flat arrays: what the executor reads. Pure data, reused from step to step.

use crate::ids::{BlockId, SeqSlot, TokenId};
use crate::protocol::SamplingParams;
use crate::scheduler::{Scheduler, StepPlan, TokenCount};
use prefix_groups::{PrefixGroups, Tables};

mod ahead;
pub mod canary;
mod check;
pub mod prefix_groups;

pub use crate::scheduler::HostTransfer;

/// The rows of one step, flattened. Row r owns tokens `row_start[r]..row_start[r + 1]`, at consecutive positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    pub step: u64,
    pub block_size: u32,
    /// Layer groups: each has its own slots and tables. 0 stands for 1.
    pub num_groups: u32,
    /// Done before anything is computed. No copy touches what another one reads or writes.
    pub copies: Vec<BlockCopy>,
    pub input_ids: Vec<TokenId>, // [num_tokens]
    pub positions: Vec<u32>,     // [num_tokens]
    /// Where each token's K and V go in each group: block id * block_size + offset. In the null block: nowhere, they are
    /// there already and the token is computed for its logits alone.
    pub kv_slots: Vec<u32>, // [num_tokens, num_groups]
    pub row_of_token: Vec<u32>,  // [num_tokens]
    pub row_start: Vec<u32>,     // [num_rows + 1]
    pub slot_of_row: Vec<u32>,   // [num_rows]
    /// The weights' adapter of each row, 0 for none; rows behind its end have none. Empty when no row has one.
    pub adapter_of_row: Vec<u64>,
    /// Physical block ids in logical order, see [`StepBatch::table`], covering at least every position that the row computes
    /// in this step. 0 where no token of the step looks.
    pub block_tables: Vec<u32>,
    pub block_table_start: Vec<u32>, // [num_rows * num_groups + 1]
    /// Indices into the token arrays whose hidden state goes through the head, ascending.
    pub logit_tokens: Vec<u32>, // [num_logits]
    pub sampling: Vec<RowSampling>,  // [num_logits]
    /// Tokens whose logits are penalised, each once: `penalties[penalty_start[l]..penalty_start[l + 1]]`.
    pub penalties: Vec<TokenPenalty>,
    pub penalty_start: Vec<u32>, // [num_logits + 1]
    /// `logit_bias` entries, each token once per row.
    pub biases: Vec<(TokenId, f32)>,
    pub bias_start: Vec<u32>, // [num_logits + 1]
    /// Tokens that rows may draw, a bit each: those of row l begin at word `mask_start[l]`, or it may draw any
    /// ([`NO_MASK`]). Both are empty when no row has a mask.
    pub masks: Vec<u32>,
    pub mask_start: Vec<u32>, // [num_logits]
    /// Rows whose tables begin with the same blocks: they may read them together. [`StepBatch::find_groups`] fills it.
    pub groups: PrefixGroups,
    /// For the KV canary: the chain of what each row computed before, `[num_rows]`, or empty when it is off.
    pub chains: Vec<u32>,
    /// Content to be copied between blocks and host memory before anything is computed: first all that goes out, then
    /// all that comes in.
    pub swap_out: Vec<HostTransfer>,
    pub swap_in: Vec<HostTransfer>,
    /// Tokens (first, number) whose hidden states come back, after the last norm.
    pub hidden: Vec<(u32, u32)>,
    /// Tokens of which the log-probability of a given next token comes back.
    pub scored: Vec<ScoredToken>,
    /// What comes back besides the sampled ids.
    pub want: Want,
}

/// Asks for the log-probability of a token that is known to follow, and of the most likely ones beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoredToken {
    /// Index into the token arrays.
    pub token_idx: u32,
    pub next: TokenId,
    pub num_top: u8,
}

/// Stands for "any token" in [`StepBatch::mask_start`].
pub const NO_MASK: u32 = u32::MAX;

/// A block of the pool whose K and V, of all layers, become those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: u32,
    pub to: u32,
}

/// What the executor returns besides token ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Want {
    #[default]
    Ids,
    /// Raw logits (before penalties) of each logit token, f32 `[num_logits, vocab]`. Nothing is sampled.
    Logits,
}

/// Sampling of one logit row, resolved: the seed is drawn, off values are neutral.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub seed: u64,
    /// Position of the token being drawn (the input position + 1): with the seed it fixes the draw.
    pub position: u32,
    /// Number of alternatives to report; `None` reports nothing.
    pub logprobs: Option<u8>,
    /// A beam of a search: penalties and biases change log-probabilities, which are not normalised again, as
    /// transformers does it. For any other row they change logits.
    pub is_beam: bool,
}

/// A token seen before in this sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPenalty {
    pub token: TokenId,
    /// Occurrences in the output; 0 when it is in the prompt only.
    pub output_count: u32,
}

impl StepBatch {
    pub fn num_tokens(&self) -> usize {
        self.input_ids.len()
    }
    pub fn num_rows(&self) -> usize {
        self.row_start.len().saturating_sub(1)
    }
    pub fn num_logits(&self) -> usize {
        self.logit_tokens.len()
    }
    /// At least 1.
    pub fn num_groups(&self) -> usize {
        self.num_groups.max(1) as usize
    }

    /// The blocks of one row in one group, in logical order.
    pub fn table(&self, row: usize, group: usize) -> &[u32] {
        let at = row * self.num_groups() + group;
        &self.block_tables[self.block_table_start[at] as usize..self.block_table_start[at + 1] as usize]
    }

    /// Where a token's K and V go in one group.
    pub fn kv_slot(&self, token: usize, group: usize) -> u32 {
        self.kv_slots[token * self.num_groups() + group]
    }

    /// True when penalties or biases act on this logit row.
    pub fn changes_logits(&self, l: usize) -> bool {
        self.penalty_start[l] < self.penalty_start[l + 1] || self.bias_start[l] < self.bias_start[l + 1]
    }

    /// Empties every array, keeping capacity.
    pub fn clear(&mut self) {
        let StepBatch {
            step,
            block_size,
            num_groups,
            copies,
            input_ids,
            positions,
            kv_slots,
            row_of_token,
            row_start,
            slot_of_row,
            adapter_of_row,
            block_tables,
            block_table_start,
            logit_tokens,
            sampling,
            penalties,
            penalty_start,
            biases,
            bias_start,
            masks,
            mask_start,
            groups,
            chains,
            swap_out,
            swap_in,
            hidden,
            scored,
            want,
        } = self;
        groups.clear();
        chains.clear();
        *step = 0;
        *block_size = 0;
        *num_groups = 0;
        *want = Want::Ids;
        for v in [
            input_ids,
            positions,
            kv_slots,
            row_of_token,
            row_start,
            slot_of_row,
            block_tables,
            block_table_start,
            logit_tokens,
            penalty_start,
            bias_start,
            masks,
            mask_start,
        ] {
            v.clear();
        }
        adapter_of_row.clear();
        copies.clear();
        sampling.clear();
        penalties.clear();
        biases.clear();
        swap_out.clear();
        swap_in.clear();
        hidden.clear();
        scored.clear();
    }
}

/// One row to be appended to a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    pub slot: SeqSlot,
    /// Position of the first of `tokens`.
    pub first_position: u32,
    /// Positions before this one are not written.
    pub write_from: u32,
    /// The row's input, at consecutive positions.
    pub tokens: &'a [TokenId],
    /// Physical blocks in logical order, covering every position of the row.
    pub blocks: &'a [BlockId],
    pub logits: RowLogits<'a>,
}

/// Which of a row's positions go through the head.
#[derive(Clone, Copy, Debug)]
pub enum RowLogits<'a> {
    None,
    /// The last position; a token is drawn from it.
    Last(LogitRow<'a>),
    /// Every position, with neutral sampling: for reading logits.
    All,
}

/// How one logit row becomes a token.
#[derive(Clone, Copy, Debug)]
pub struct LogitRow<'a> {
    /// Its `position` is filled in by [`StepBatch::push_row`].
    pub sampling: RowSampling,
    /// The tokens that penalties look at, each once.
    pub counts: &'a [TokenCount],
    /// Bias entries, each token once.
    pub biases: &'a [(TokenId, f32)],
}

impl RowSampling {
    /// Resolved from a request's parameters and its seed.
    pub fn new(params: &SamplingParams, seed: u64) -> Self {
        RowSampling {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            seed,
            position: 0,
            logprobs: params.logprobs,
            is_beam: false,
        }
    }
}

impl StepBatch {
    /// The plan as flat arrays, in place of what `self` held. Tokens, tables and sampling come from the scheduler that
    /// made the plan, while the plan's step is in flight.
    pub fn build(&mut self, plan: &StepPlan, scheduler: &Scheduler) {
        self.begin(plan.step, scheduler.kv().block_size());
        self.num_groups = scheduler.kv().config().groups.num();
        self.swap_out.extend_from_slice(&plan.swap_out);
        self.swap_in.extend_from_slice(&plan.swap_in);
        self.copies.extend(plan.copies.iter().map(|copy| BlockCopy { from: copy.from.0, to: copy.to.0 }));
        for row in &plan.rows {
            let seq = scheduler.get(row.request).expect("a planned row is live until its step is over");
            let logits = match row.wants_logits {
                true => RowLogits::Last(LogitRow {
                    sampling: RowSampling {
                        is_beam: seq.gang().is_some(),
                        ..RowSampling::new(seq.sampling(), seq.seed())
                    },
                    counts: seq.token_counts(),
                    biases: seq.biases(),
                }),
                false => RowLogits::None,
            };
            self.push_row(BatchRow {
                slot: row.slot,
                first_position: row.from,
                write_from: row.write_from,
                tokens: &seq.tokens()[row.from as usize..row.to() as usize],
                blocks: seq.table().ids(),
                logits,
            });
            self.set_adapter(seq.cache_key().adapter);
        }
        self.find_groups();
    }

    /// Gives the last row an adapter; 0 is none.
    pub fn set_adapter(&mut self, adapter: u64) {
        if adapter != 0 {
            self.adapter_of_row.resize(self.num_rows() - 1, 0);
            self.adapter_of_row.push(adapter);
        }
    }

    /// The adapter of a row; 0 is none.
    pub fn adapter(&self, row: usize) -> u64 {
        self.adapter_of_row.get(row).copied().unwrap_or(0)
    }

    /// Lets logit row `l` draw the tokens of `mask` only, once all rows are in. [ceil(vocab / 32)]
    pub fn mask_row(&mut self, l: usize, mask: &[u32]) {
        self.mask_start.resize(self.num_logits(), NO_MASK);
        self.mask_start[l] = self.masks.len() as u32;
        self.masks.extend_from_slice(mask);
    }

    /// True when logit row `l` may draw this token.
    pub fn may_draw(&self, l: usize, token: TokenId) -> bool {
        match self.mask_start.get(l) {
            None | Some(&NO_MASK) => true,
            Some(&start) => self.masks[(start + token / 32) as usize] >> (token % 32) & 1 == 1,
        }
    }

    /// Finds rows that share leading blocks, once all rows are in.
    pub fn find_groups(&mut self) {
        // With layer groups, rows that share blocks in one group may not in another.
        if self.num_groups() > 1 {
            return;
        }
        let mut groups = std::mem::take(&mut self.groups);
        groups.find(self.tables());
        self.groups = groups;
    }

    fn tables(&self) -> Tables<'_> {
        Tables { block_size: self.block_size, blocks: &self.block_tables, start: &self.block_table_start }
    }

    /// Empties the batch for a step, to be filled with [`StepBatch::push_row`]. It has one group until told otherwise.
    pub fn begin(&mut self, step: u64, block_size: u32) {
        assert!(block_size >= 1, "a block holds at least one token");
        self.clear();
        self.step = step;
        self.block_size = block_size;
        self.num_groups = 1;
        for starts in [&mut self.row_start, &mut self.block_table_start, &mut self.penalty_start, &mut self.bias_start]
        {
            starts.push(0);
        }
    }

    /// Appends a row. The block table is cut to what the row can read: its last position's block.
    pub fn push_row(&mut self, row: BatchRow<'_>) {
        assert!(!row.tokens.is_empty(), "a row computes at least one token");
        let row_idx = self.num_rows() as u32;
        let first_token = self.num_tokens() as u32;
        let end = row.first_position + row.tokens.len() as u32;
        let num_groups = self.num_groups();
        let num_blocks = end.div_ceil(self.block_size) as usize * num_groups;
        assert!(num_blocks <= row.blocks.len(), "the block table ends before position {end}");
        self.input_ids.extend_from_slice(row.tokens);
        for position in row.first_position..end {
            let (at, offset) = ((position / self.block_size) as usize * num_groups, position % self.block_size);
            let is_there = position < row.write_from;
            let block_of = |block: &BlockId| if is_there { BlockId::NULL } else { *block };
            let blocks = row.blocks[at..at + num_groups].iter().map(block_of);
            self.kv_slots.extend(blocks.map(|block| block.0 * self.block_size + offset));
            self.positions.push(position);
            self.row_of_token.push(row_idx);
        }
        self.row_start.push(self.input_ids.len() as u32);
        self.slot_of_row.push(row.slot.0);
        for group in 0..num_groups {
            self.block_tables.extend(row.blocks[..num_blocks].chunks_exact(num_groups).map(|row| row[group].0));
            self.block_table_start.push(self.block_tables.len() as u32);
        }
        match row.logits {
            RowLogits::None => {}
            RowLogits::Last(logits) => self.push_logits(self.num_tokens() as u32 - 1, &logits),
            RowLogits::All => {
                let sampling = RowSampling::new(&SamplingParams::greedy(), 0);
                for token in first_token..self.num_tokens() as u32 {
                    self.push_logits(token, &LogitRow { sampling, counts: &[], biases: &[] });
                }
            }
        }
    }

    fn push_logits(&mut self, token: u32, logits: &LogitRow<'_>) {
        self.logit_tokens.push(token);
        self.sampling.push(RowSampling { position: self.positions[token as usize] + 1, ..logits.sampling });
        let penalties = logits.counts.iter();
        self.penalties.extend(penalties.map(|c| TokenPenalty { token: c.token, output_count: c.output_count }));
        self.penalty_start.push(self.penalties.len() as u32);
        self.biases.extend_from_slice(logits.biases);
        self.bias_start.push(self.biases.len() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::HostSlot;

    fn greedy(counts: &[TokenCount]) -> LogitRow<'_> {
        LogitRow { sampling: RowSampling::new(&SamplingParams::greedy(), 9), counts, biases: &[(7, 1.0)] }
    }

    #[test]
    fn rows_are_flattened_through_their_block_tables() {
        let mut batch = StepBatch::default();
        batch.begin(3, 4);
        let blocks = [5, 2, 9].map(BlockId);
        let counts = [TokenCount { token: 8, output_count: 2 }];
        batch.push_row(BatchRow {
            slot: SeqSlot(6),
            first_position: 3,
            write_from: 3,
            tokens: &[10, 11, 12],
            blocks: &blocks,
            logits: RowLogits::None,
        });
        batch.push_row(BatchRow {
            slot: SeqSlot(1),
            first_position: 0,
            write_from: 0,
            tokens: &[13],
            blocks: &[BlockId(7)],
            logits: RowLogits::Last(greedy(&counts)),
        });
        assert_eq!(batch.positions, [3, 4, 5, 0]);
        assert_eq!(batch.kv_slots, [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 7 * 4]);
        assert_eq!((&batch.row_of_token[..], &batch.row_start[..]), (&[0, 0, 0, 1][..], &[0, 3, 4][..]));
        assert_eq!(batch.slot_of_row, [6, 1]);
        assert_eq!((&batch.block_tables[..], &batch.block_table_start[..]), (&[5, 2, 7][..], &[0, 2, 3][..]));
        assert_eq!((&batch.logit_tokens[..], batch.sampling[0].position, batch.sampling[0].seed), (&[3][..], 1, 9));
        assert_eq!(batch.penalties, [TokenPenalty { token: 8, output_count: 2 }]);
        assert_eq!((&batch.penalty_start[..], &batch.bias_start[..]), (&[0, 1][..], &[0, 1][..]));
        assert_eq!(batch.check(10, 14), Ok(()));
        assert!(batch.check(9, 14).is_ok_and(|()| true), "block 9 is cut off: the row does not reach it");
        assert!(batch.check(7, 14).is_err_and(|e| e.contains("block 7")));
        assert!(batch.check(10, 13).is_err_and(|e| e.contains("token 13")));
    }

    #[test]
    fn each_layer_group_has_its_own_slots_and_tables() {
        let mut batch = StepBatch::default();
        batch.begin(3, 4);
        batch.num_groups = 2;
        // Row by row, in a row group by group; the second group no longer sees its first block.
        let blocks = [5, 0, 2, 6, 9, 8].map(BlockId);
        batch.push_row(BatchRow {
            slot: SeqSlot(0),
            first_position: 7,
            write_from: 7,
            tokens: &[10, 11],
            blocks: &blocks,
            logits: RowLogits::None,
        });
        assert_eq!(batch.kv_slots, [2 * 4 + 3, 6 * 4 + 3, 9 * 4, 8 * 4]);
        assert_eq!((batch.table(0, 0), batch.table(0, 1)), (&[5, 2, 9][..], &[0, 6, 8][..]));
        assert_eq!(batch.check(10, 14), Ok(()));
        batch.kv_slots[1] = 3;
        assert!(batch.check(10, 14).is_err_and(|e| e.contains("nobody's")));
    }

    #[test]
    fn all_positions_can_ask_for_logits() {
        let mut batch = StepBatch::default();
        batch.begin(0, 2);
        batch.push_row(BatchRow {
            slot: SeqSlot(0),
            first_position: 1,
            write_from: 1,
            tokens: &[1, 2],
            blocks: &[BlockId(1), BlockId(2)],
            logits: RowLogits::All,
        });
        assert_eq!(batch.logit_tokens, [0, 1]);
        assert_eq!(batch.sampling.iter().map(|s| s.position).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(batch.check(3, 3), Ok(()));
    }

    #[test]
    fn transfers_that_overwrite_each_other_are_refused() {
        let transfer = |(block, host)| HostTransfer { block: BlockId(block), host: HostSlot(host) };
        let check = |out: &[(u32, u32)], back: &[(u32, u32)]| {
            let list = |pairs: &[(u32, u32)]| pairs.iter().copied().map(transfer).collect();
            let batch = StepBatch { swap_out: list(out), swap_in: list(back), ..StepBatch::default() };
            batch.check_transfers(4, 2)
        };
        assert_eq!(check(&[(1, 0)], &[(1, 1), (2, 1)]), Ok(()));
        assert!(check(&[(1, 0), (2, 0)], &[]).is_err_and(|e| e.contains("host slot 0 twice")));
        assert!(check(&[], &[(3, 0), (3, 1)]).is_err_and(|e| e.contains("block 3 twice")));
        assert!(check(&[(1, 0)], &[(2, 0)]).is_err_and(|e| e.contains("same step")));
        for (block, host) in [(0, 0), (4, 0), (1, 2)] {
            assert!(check(&[(block, host)], &[]).is_err_and(|e| e.contains("not both there")));
        }
    }

    #[test]
    fn a_damaged_batch_is_named() {
        let mut batch = StepBatch::default();
        batch.begin(0, 2);
        batch.push_row(BatchRow {
            slot: SeqSlot(0),
            first_position: 0,
            write_from: 0,
            tokens: &[1, 2],
            blocks: &[BlockId(1)],
            logits: RowLogits::None,
        });
        let check = |damage: fn(&mut StepBatch), expected: &str| {
            let mut damaged = batch.clone();
            damage(&mut damaged);
            let error = damaged.check(3, 3).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        };
        check(|b| b.kv_slots[0] = 0, "nobody's");
        check(|b| b.positions[1] = 3, "consecutive");
        check(|b| b.row_of_token[1] = 1, "row_of_token");
        check(|b| b.row_start[1] = 1, "row_start");
        check(|b| b.slot_of_row.clear(), "slot_of_row");
    }
}
