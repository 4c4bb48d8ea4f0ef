//! The rules that a batch must keep before an executor runs it.
//!
//! Guarantees: what passes names only blocks, places and tokens that are there. It does not know what a block holds.

use super::{BlockCopy, HostTransfer, NO_MASK, StepBatch};
use crate::ids::{BlockId, HostSlot};

impl StepBatch {
    /// Checks the shape of the arrays and that every id is in range; the text names the array at fault.
    pub fn check(&self, num_blocks: u32, vocab_size: u32) -> Result<(), String> {
        let (tokens, rows, logits) = (self.num_tokens(), self.num_rows(), self.num_logits());
        let groups = self.num_groups();
        let lengths = [
            ("positions", self.positions.len(), tokens),
            ("kv_slots", self.kv_slots.len(), tokens * groups),
            ("row_of_token", self.row_of_token.len(), tokens),
            ("slot_of_row", self.slot_of_row.len(), rows),
            ("block_table_start", self.block_table_start.len(), rows * groups + 1),
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
        if let Some((first, number)) = self.hidden.iter().find(|(first, n)| (first + n) as usize > tokens || *n == 0) {
            return Err(format!("hidden wants {number} tokens from {first}, the batch has {tokens}"));
        }
        let is_odd = |s: &&super::ScoredToken| s.token_idx as usize >= tokens || s.next >= vocab_size;
        if let Some(odd) = self.scored.iter().find(is_odd) {
            return Err(format!("scored holds {odd:?}, the batch has {tokens} tokens"));
        }
        self.check_masks(vocab_size)?;
        self.check_copies(num_blocks)?;
        (0..rows).try_for_each(|row| (0..groups).try_for_each(|group| self.check_row(row, group, num_blocks)))?;
        if !self.chains.is_empty() && self.chains.len() != rows {
            return Err(format!("chains has {} entries, not {rows}", self.chains.len()));
        }
        if self.adapter_of_row.len() > rows {
            return Err(format!("adapter_of_row has {} entries, the batch has {rows} rows", self.adapter_of_row.len()));
        }
        if groups > 1 { Ok(()) } else { self.groups.check(self.tables()) }
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

    fn check_row(&self, row: usize, group: usize, num_blocks: u32) -> Result<(), String> {
        let (start, end) = (self.row_start[row] as usize, self.row_start[row + 1] as usize);
        let table = self.table(row, group);
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
            let block = self.kv_slot(token, group) / self.block_size;
            let is_logits_only = block == BlockId::NULL.0 && self.logit_tokens.contains(&(token as u32));
            if block == BlockId::NULL.0 && !is_logits_only || block >= num_blocks {
                return Err(format!("row {row} writes block {block}, which is nobody's"));
            }
        }
        Ok(())
    }
}
