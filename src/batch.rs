//! A step as flat arrays: what the executor reads. Pure data, reused from step to step.

use crate::ids::TokenId;

/// The rows of one step, flattened. Row r owns tokens `row_start[r]..row_start[r + 1]`, at consecutive positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    pub step: u64,
    pub block_size: u32,
    pub input_ids: Vec<TokenId>, // [num_tokens]
    pub positions: Vec<u32>,     // [num_tokens]
    /// Where each token's K and V go: block id * block_size + offset.
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
    /// What comes back besides the sampled ids.
    pub want: Want,
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

    /// Empties every array, keeping capacity.
    pub fn clear(&mut self) {
        let StepBatch {
            step,
            block_size,
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
            want,
        } = self;
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
        ] {
            v.clear();
        }
        sampling.clear();
        penalties.clear();
        biases.clear();
    }
}
