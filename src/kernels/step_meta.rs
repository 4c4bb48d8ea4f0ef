//! A [`StepBatch`] as the words that kernels read: mirrors `shaders/shared/step.wgsl`.
//!
//! The header holds counts and the start of each section; sections follow in any order. See the WGSL file for what each
//! word means.

use super::attention_work::{AttentionWork, Item};
use crate::batch::{RowSampling, StepBatch};

pub const HEADER_WORDS: usize = 36;
/// Words of a logit row's sampling parameters.
pub const SAMPLING_WORDS: usize = 12;
/// Stands for "no logprobs".
pub const NONE: u32 = u32::MAX;

/// Where the header keeps things, by word.
pub mod header {
    pub const NUM_TOKENS: usize = 0;
    pub const NUM_ROWS: usize = 1;
    pub const NUM_LOGITS: usize = 2;
    pub const BLOCK_SIZE: usize = 3;
    pub const TOKEN_IDS: usize = 4;
    pub const POSITIONS: usize = 5;
    pub const KV_SLOTS: usize = 6;
    pub const ROW_OF_TOKEN: usize = 7;
    pub const ROW_START: usize = 8;
    pub const BLOCK_TABLE_START: usize = 9;
    pub const BLOCK_TABLES: usize = 10;
    pub const LOGIT_TOKENS: usize = 11;
    pub const SAMPLING: usize = 12;
    pub const PENALTY_START: usize = 13;
    pub const PENALTIES: usize = 14;
    pub const BIAS_START: usize = 15;
    pub const BIASES: usize = 16;
    pub const SLOT_OF_ROW: usize = 17;
    pub const NUM_COPIES: usize = 18;
    pub const COPIES: usize = 19;
    pub const MASK_START: usize = 20;
    pub const MASKS: usize = 21;
    pub const NUM_GROUPS: usize = 22;
    pub const NUM_SINGLE_ITEMS: usize = 24;
    pub const NUM_ITEMS: usize = 25;
    pub const NUM_MERGES: usize = 26;
    pub const ITEMS: usize = 27;
    pub const WORK_TOKENS: usize = 28;
    pub const MERGES: usize = 29;
    pub const CHAINS: usize = 30;
    /// The most keys that a row computed in earlier steps.
    pub const MOST_KEYS: usize = 31;
    pub const NUM_LORA_TILES: usize = 32;
    pub const LORA_TILES: usize = 33;
    pub const LORA_PARTS: usize = 34;
    /// 0 where all tokens are known: see [`append_feed`](super::append_feed).
    pub const FEED: usize = 35;
}

/// Words that [`encode`] needs, to size or check the buffer.
pub fn num_words(batch: &StepBatch, work: &AttentionWork) -> usize {
    HEADER_WORDS
        + work.num_words()
        + batch.chains.len()
        + 3 * batch.num_tokens()
        + batch.kv_slots.len()
        + batch.row_start.len()
        + batch.slot_of_row.len()
        + batch.block_table_start.len()
        + batch.block_tables.len()
        + batch.logit_tokens.len()
        + SAMPLING_WORDS * batch.sampling.len()
        + batch.penalty_start.len()
        + 2 * batch.penalties.len()
        + batch.bias_start.len()
        + 2 * batch.biases.len()
        + 2 * batch.copies.len()
        + batch.mask_start.len()
        + batch.masks.len()
}

/// Replaces `words` by the batch's metadata.
pub fn encode(batch: &StepBatch, work: &AttentionWork, words: &mut Vec<u32>) {
    words.clear();
    words.reserve(num_words(batch, work));
    words.resize(HEADER_WORDS, 0);
    words[header::NUM_TOKENS] = batch.num_tokens() as u32;
    words[header::NUM_ROWS] = batch.num_rows() as u32;
    words[header::NUM_LOGITS] = batch.num_logits() as u32;
    words[header::BLOCK_SIZE] = batch.block_size;
    words[header::NUM_COPIES] = batch.copies.len() as u32;
    words[header::NUM_GROUPS] = batch.num_groups() as u32;
    section(words, header::TOKEN_IDS, batch.input_ids.iter().copied());
    section(words, header::POSITIONS, batch.positions.iter().copied());
    section(words, header::KV_SLOTS, batch.kv_slots.iter().copied());
    section(words, header::ROW_OF_TOKEN, batch.row_of_token.iter().copied());
    section(words, header::ROW_START, batch.row_start.iter().copied());
    section(words, header::SLOT_OF_ROW, batch.slot_of_row.iter().copied());
    section(words, header::BLOCK_TABLE_START, batch.block_table_start.iter().copied());
    section(words, header::BLOCK_TABLES, batch.block_tables.iter().copied());
    section(words, header::LOGIT_TOKENS, batch.logit_tokens.iter().copied());
    let sampling = batch.sampling.iter().enumerate();
    section(words, header::SAMPLING, sampling.flat_map(|(l, row)| sampling_words(row, batch.changes_logits(l))));
    section(words, header::PENALTY_START, batch.penalty_start.iter().copied());
    section(words, header::PENALTIES, batch.penalties.iter().flat_map(|p| [p.token, p.output_count]));
    section(words, header::BIAS_START, batch.bias_start.iter().copied());
    section(words, header::BIASES, batch.biases.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]));
    section(words, header::COPIES, batch.copies.iter().flat_map(|copy| [copy.from, copy.to]));
    section(words, header::MASK_START, batch.mask_start.iter().copied());
    section(words, header::MASKS, batch.masks.iter().copied());
    words[header::NUM_SINGLE_ITEMS] = work.counts.single;
    words[header::NUM_ITEMS] = work.items.len() as u32;
    words[header::NUM_MERGES] = work.merges.len() as u32;
    let item = |i: &Item| [i.first, i.count, i.begin, i.end, u32::from(i.is_partial)];
    section(words, header::ITEMS, work.items.iter().flat_map(item));
    section(words, header::WORK_TOKENS, work.tokens.iter().flat_map(|t| [t.token, t.base]));
    section(words, header::MERGES, work.merges.iter().flat_map(|m| [m.token, m.base, m.begin, m.end]));
    section(words, header::CHAINS, batch.chains.iter().copied());
    words[header::MOST_KEYS] = most_keys(batch);
    debug_assert_eq!(words.len(), num_words(batch, work));
}

/// Appends which logit row of the last step draws each token. [num_tokens]
pub fn append_feed(words: &mut Vec<u32>, sources: &[u32]) {
    section(words, header::FEED, sources.iter().copied());
}

/// The most keys that a row of the batch computed in earlier steps.
pub fn most_keys(batch: &StepBatch) -> u32 {
    let first = batch.row_start.iter().take(batch.num_rows()).map(|&token| batch.positions[token as usize]);
    first.max().unwrap_or(0)
}

pub(super) fn section(words: &mut Vec<u32>, header_word: usize, items: impl Iterator<Item = u32>) {
    words[header_word] = words.len() as u32;
    words.extend(items);
}

fn sampling_words(row: &RowSampling, changes_logits: bool) -> [u32; SAMPLING_WORDS] {
    [
        row.temperature.to_bits(),
        row.top_k,
        row.top_p.to_bits(),
        row.min_p.to_bits(),
        row.repetition_penalty.to_bits(),
        row.presence_penalty.to_bits(),
        row.frequency_penalty.to_bits(),
        row.seed as u32,
        (row.seed >> 32) as u32,
        row.position,
        row.logprobs.map_or(NONE, u32::from),
        u32::from(row.is_beam && changes_logits),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BlockCopy, TokenPenalty};
    use crate::kernels::attention_work::{ITEM_WORDS, Merge, WorkCounts, WorkToken};

    fn sampling(seed: u64) -> RowSampling {
        RowSampling {
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.0,
            repetition_penalty: 1.1,
            presence_penalty: 0.0,
            frequency_penalty: 0.25,
            seed,
            position: 7,
            logprobs: None,
            is_beam: true,
        }
    }

    fn batch() -> StepBatch {
        StepBatch {
            block_size: 16,
            copies: vec![BlockCopy { from: 3, to: 9 }],
            input_ids: vec![5, 6, 7],
            positions: vec![0, 1, 9],
            kv_slots: vec![16, 17, 41],
            row_of_token: vec![0, 0, 1],
            row_start: vec![0, 2, 3],
            slot_of_row: vec![4, 3],
            block_tables: vec![1, 2],
            block_table_start: vec![0, 1, 2],
            logit_tokens: vec![1, 2],
            sampling: vec![sampling(1 << 40 | 3), sampling(9)],
            penalties: vec![TokenPenalty { token: 6, output_count: 2 }],
            penalty_start: vec![0, 0, 1],
            biases: vec![(8, -1.5)],
            bias_start: vec![0, 1, 1],
            chains: vec![77, 78],
            masks: vec![5],
            mask_start: vec![NONE, 0],
            ..StepBatch::default()
        }
    }

    #[test]
    fn every_section_is_found_through_the_header() {
        let batch = batch();
        let mut words = vec![99];
        let work = AttentionWork {
            items: vec![Item { first: 0, count: 2, begin: 3, end: 4, is_partial: true }],
            tokens: vec![WorkToken { token: 2, base: 7 }, WorkToken { token: 1, base: 9 }],
            merges: vec![Merge { token: 2, base: 7, begin: 3, end: 5 }],
            counts: WorkCounts { single: 0, several: 1, merges: 1 },
            num_slots: 4,
        };
        encode(&batch, &work, &mut words);
        assert_eq!(words.len(), num_words(&batch, &work));
        let at = |section: usize, len: usize| &words[words[section] as usize..][..len];
        assert_eq!(&words[..4], &[3, 2, 2, 16]);
        assert_eq!(words[header::NUM_GROUPS], 1);
        assert_eq!(at(header::TOKEN_IDS, 3), batch.input_ids);
        assert_eq!(at(header::POSITIONS, 3), batch.positions);
        assert_eq!(at(header::KV_SLOTS, 3), batch.kv_slots);
        assert_eq!(at(header::ROW_OF_TOKEN, 3), batch.row_of_token);
        assert_eq!(at(header::ROW_START, 3), batch.row_start);
        assert_eq!(at(header::SLOT_OF_ROW, 2), batch.slot_of_row);
        assert_eq!(at(header::BLOCK_TABLE_START, 3), batch.block_table_start);
        assert_eq!(at(header::BLOCK_TABLES, 2), batch.block_tables);
        assert_eq!(at(header::LOGIT_TOKENS, 2), batch.logit_tokens);
        let first = at(header::SAMPLING, SAMPLING_WORDS);
        assert_eq!(f32::from_bits(first[0]), 0.5);
        assert_eq!((first[7], first[8], first[9], first[10]), (3, 1 << 8, 7, NONE));
        assert_eq!(first[11], 1, "a beam's row with a bias");
        assert_eq!(at(header::PENALTIES, 2), [6, 2]);
        assert_eq!(at(header::BIASES, 2), [8, (-1.5f32).to_bits()]);
        assert_eq!(at(header::BIAS_START, 3), [0, 1, 1]);
        assert_eq!((words[header::NUM_COPIES], at(header::COPIES, 2)), (1, &[3, 9][..]));
        assert_eq!(words[header::NUM_SINGLE_ITEMS..=header::NUM_MERGES], [0, 1, 1]);
        assert_eq!(at(header::ITEMS, ITEM_WORDS), [0, 2, 3, 4, 1]);
        assert_eq!(at(header::WORK_TOKENS, 4), [2, 7, 1, 9]);
        assert_eq!(at(header::MERGES, 4), [2, 7, 3, 5]);
        assert_eq!(at(header::CHAINS, 2), [77, 78]);
        assert_eq!((at(header::MASK_START, 2), at(header::MASKS, 1)), (&[NONE, 0][..], &[5][..]));
        assert_eq!(words[header::MOST_KEYS], 9);
    }

    #[test]
    fn an_empty_batch_has_no_tokens() {
        let mut words = Vec::new();
        encode(&StepBatch::default(), &AttentionWork::default(), &mut words);
        assert_eq!(&words[..3], &[0, 0, 0]);
    }
}
