//! A step as flat arrays: what the executor reads. Pure data, reused from step to step.

use crate::ids::{BlockId, HostSlot, SeqSlot, TokenId};
use crate::protocol::SamplingParams;
use crate::scheduler::{Scheduler, StepPlan, TokenCount};
use prefix_groups::{PrefixGroups, Tables};

pub mod canary;
pub mod prefix_groups;

pub use crate::scheduler::HostTransfer;

/// The rows of one step, flattened. Row r owns tokens `row_start[r]..row_start[r + 1]`, at consecutive positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    pub step: u64,
    pub block_size: u32,
    /// Done before anything is computed. No copy touches what another one reads or writes.
    pub copies: Vec<BlockCopy>,
    pub input_ids: Vec<TokenId>, // [num_tokens]
    pub positions: Vec<u32>,     // [num_tokens]
    /// Where each token's K and V go: block id * block_size + offset. In the null block: nowhere, they are there already
    /// and the token is computed for its logits alone.
    pub kv_slots: Vec<u32>, // [num_tokens]
    pub row_of_token: Vec<u32>,  // [num_tokens]
    pub row_start: Vec<u32>,     // [num_rows + 1]
    pub slot_of_row: Vec<u32>,   // [num_rows]
    /// Physical block ids of row r in logical order: `block_tables[block_table_start[r]..block_table_start[r + 1]]`,
    /// covering at least every position the row computes in this step.
    pub block_tables: Vec<u32>,
    pub block_table_start: Vec<u32>, // [num_rows + 1]
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
    /// What comes back besides the sampled ids.
    pub want: Want,
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

    /// True when penalties or biases act on this logit row.
    pub fn changes_logits(&self, l: usize) -> bool {
        self.penalty_start[l] < self.penalty_start[l + 1] || self.bias_start[l] < self.bias_start[l + 1]
    }

    /// Empties every array, keeping capacity.
    pub fn clear(&mut self) {
        let StepBatch {
            step,
            block_size,
            copies,
            input_ids,
            positions,
            kv_slots,
            row_of_token,
            row_start,
            slot_of_row,
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
            want,
        } = self;
        groups.clear();
        chains.clear();
        *step = 0;
        *block_size = 0;
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
        copies.clear();
        sampling.clear();
        penalties.clear();
        biases.clear();
        swap_out.clear();
        swap_in.clear();
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
        }
        self.find_groups();
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
        let mut groups = std::mem::take(&mut self.groups);
        groups.find(self.tables());
        self.groups = groups;
    }

    fn tables(&self) -> Tables<'_> {
        Tables { block_size: self.block_size, blocks: &self.block_tables, start: &self.block_table_start }
    }

    /// Empties the batch for a step, to be filled with [`StepBatch::push_row`].
    pub fn begin(&mut self, step: u64, block_size: u32) {
        assert!(block_size >= 1, "a block holds at least one token");
        self.clear();
        self.step = step;
        self.block_size = block_size;
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
        let num_blocks = end.div_ceil(self.block_size) as usize;
        assert!(num_blocks <= row.blocks.len(), "the block table ends before position {end}");
        self.input_ids.extend_from_slice(row.tokens);
        for position in row.first_position..end {
            let block = match position < row.write_from {
                true => BlockId::NULL,
                false => row.blocks[(position / self.block_size) as usize],
            };
            self.positions.push(position);
            self.kv_slots.push(block.0 * self.block_size + position % self.block_size);
            self.row_of_token.push(row_idx);
        }
        self.row_start.push(self.input_ids.len() as u32);
        self.slot_of_row.push(row.slot.0);
        self.block_tables.extend(row.blocks[..num_blocks].iter().map(|id| id.0));
        self.block_table_start.push(self.block_tables.len() as u32);
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

    /// Checks the shape of the arrays and that every id is in range; the text names the array at fault.
    pub fn check(&self, num_blocks: u32, vocab_size: u32) -> Result<(), String> {
        let (tokens, rows, logits) = (self.num_tokens(), self.num_rows(), self.num_logits());
        let lengths = [
            ("positions", self.positions.len(), tokens),
            ("kv_slots", self.kv_slots.len(), tokens),
            ("row_of_token", self.row_of_token.len(), tokens),
            ("slot_of_row", self.slot_of_row.len(), rows),
            ("block_table_start", self.block_table_start.len(), rows + 1),
            ("sampling", self.sampling.len(), logits),
            ("penalty_start", self.penalty_start.len(), logits + 1),
            ("bias_start", self.bias_start.len(), logits + 1),
        ];
        for (name, len, expected) in lengths {
            if len != expected {
                return Err(format!("{name} has {len} entries, not {expected}"));
            }
        }
        let starts = [
            ("row_start", &self.row_start, tokens),
            ("block_table_start", &self.block_table_start, self.block_tables.len()),
            ("penalty_start", &self.penalty_start, self.penalties.len()),
            ("bias_start", &self.bias_start, self.biases.len()),
        ];
        for (name, starts, end) in starts {
            if starts[0] != 0 || !starts.is_sorted() || starts[starts.len() - 1] as usize != end {
                return Err(format!("{name} does not ascend from 0 to {end}"));
            }
        }
        if let Some(token) = self.input_ids.iter().find(|token| **token >= vocab_size) {
            return Err(format!("input_ids holds token {token}, the vocabulary has {vocab_size}"));
        }
        if let Some(block) = self.block_tables.iter().find(|block| **block >= num_blocks) {
            return Err(format!("block_tables holds block {block}, the pool has {num_blocks}"));
        }
        if let Some(token) = self.logit_tokens.iter().find(|token| **token as usize >= tokens) {
            return Err(format!("logit_tokens holds {token}, the batch has {tokens} tokens"));
        }
        self.check_masks(vocab_size)?;
        self.check_copies(num_blocks)?;
        (0..rows).try_for_each(|row| self.check_row(row, num_blocks))?;
        if !self.chains.is_empty() && self.chains.len() != rows {
            return Err(format!("chains has {} entries, not {rows}", self.chains.len()));
        }
        self.groups.check(self.tables())
    }

    fn check_masks(&self, vocab_size: u32) -> Result<(), String> {
        let words = vocab_size.div_ceil(32) as usize;
        if !self.mask_start.is_empty() && self.mask_start.len() != self.num_logits() {
            return Err(format!("mask_start has {} entries, not {}", self.mask_start.len(), self.num_logits()));
        }
        match self.mask_start.iter().find(|&&start| start != NO_MASK && start as usize + words > self.masks.len()) {
            Some(start) => Err(format!("a mask begins at word {start} of {}", self.masks.len())),
            None => Ok(()),
        }
    }

    /// So that copies may be done at once or in any order.
    fn check_copies(&self, num_blocks: u32) -> Result<(), String> {
        for (i, copy) in self.copies.iter().enumerate() {
            let is_block = |id: u32| id != BlockId::NULL.0 && id < num_blocks;
            if !is_block(copy.from) || !is_block(copy.to) {
                return Err(format!("{copy:?} names a block that is nobody's"));
            }
            let meets = |other: &BlockCopy| other.to == copy.to || other.from == copy.to || other.to == copy.from;
            if copy.from == copy.to || self.copies[..i].iter().any(meets) {
                return Err(format!("{copy:?} touches what another copy of the step reads or writes"));
            }
        }
        Ok(())
    }

    /// Checks the transfers between blocks and `num_host_blocks` places in host memory: every id is in range, no place is
    /// written twice, and what comes in was there before the step.
    pub fn check_transfers(&self, num_blocks: u32, num_host_blocks: u32) -> Result<(), String> {
        let (mut hosts, mut blocks) = (Vec::new(), Vec::new());
        for &HostTransfer { block, host } in self.swap_out.iter().chain(&self.swap_in) {
            if block == BlockId::NULL || block.0 >= num_blocks || host.0 >= num_host_blocks {
                return Err(format!("block {block} and host slot {host} are not both there to be swapped"));
            }
        }
        hosts.extend(self.swap_out.iter().map(|t| t.host));
        blocks.extend(self.swap_in.iter().map(|t| t.block));
        hosts.sort_unstable();
        blocks.sort_unstable();
        if let Some(pair) = hosts.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("swap_out writes host slot {} twice", pair[0]));
        }
        if let Some(pair) = blocks.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("swap_in writes block {} twice", pair[0]));
        }
        let is_fresh = |host: HostSlot| hosts.binary_search(&host).is_ok();
        match self.swap_in.iter().find(|t| is_fresh(t.host)) {
            Some(t) => Err(format!("swap_in reads host slot {}, which the same step writes", t.host)),
            None => Ok(()),
        }
    }

    fn check_row(&self, row: usize, num_blocks: u32) -> Result<(), String> {
        let (start, end) = (self.row_start[row] as usize, self.row_start[row + 1] as usize);
        let table = &self.block_tables[self.block_table_start[row] as usize..self.block_table_start[row + 1] as usize];
        if start == end {
            return Err(format!("row {row} is empty"));
        }
        for token in start..end {
            let position = self.positions[token];
            if position as usize != self.positions[start] as usize + (token - start) {
                return Err(format!("the positions of row {row} are not consecutive"));
            }
            if self.row_of_token[token] as usize != row {
                return Err(format!("row_of_token does not name row {row} for token {token}"));
            }
            if (position / self.block_size) as usize >= table.len() {
                return Err(format!("the block table of row {row} ends before position {position}"));
            }
            let block = self.kv_slots[token] / self.block_size;
            let is_logits_only = block == BlockId::NULL.0 && self.logit_tokens.contains(&(token as u32));
            if block == BlockId::NULL.0 && !is_logits_only || block >= num_blocks {
                return Err(format!("row {row} writes block {block}, which is nobody's"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
