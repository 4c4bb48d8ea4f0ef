// The step's metadata, read through a binding that the kernel file declares:
//   @group(0) @binding(n) var<storage, read> step_meta: array<u32>;
// Written by kernels/step_meta.rs, once per step. Words 0..36 are the header; the rest are sections, whose starts (in
// words) the header holds. An all-zero buffer is a step without tokens: kernels then do nothing.

fn num_tokens() -> u32 { return step_meta[0]; }
fn num_rows() -> u32 { return step_meta[1]; }
fn num_logits() -> u32 { return step_meta[2]; }
fn block_size() -> u32 { return step_meta[3]; }

/// Word of token_id(0).
fn token_ids_word() -> u32 { return step_meta[4]; }
fn token_id(token: u32) -> u32 { return step_meta[step_meta[4] + token]; }
fn position(token: u32) -> u32 { return step_meta[step_meta[5] + token]; }
/// Block id * block_size + offset, in a layer group.
fn kv_slot(token: u32, group: u32) -> u32 { return step_meta[step_meta[6] + token * step_meta[22] + group]; }
fn row_of_token(token: u32) -> u32 { return step_meta[step_meta[7] + token]; }
/// First token of a row; of num_rows(): the end of the last.
fn row_start(row: u32) -> u32 { return step_meta[step_meta[8] + row]; }
fn block_table_start(row: u32, group: u32) -> u32 { return step_meta[step_meta[9] + row * step_meta[22] + group]; }
/// Block id of a row's block, counted from block_table_start(row, group); 0 where no token looks.
fn block_table(idx: u32) -> u32 { return step_meta[step_meta[10] + idx]; }
/// Word of block_table(0).
fn block_tables_word() -> u32 { return step_meta[10]; }
/// Token whose hidden state gives a logit row.
fn logit_token(logit: u32) -> u32 { return step_meta[step_meta[11] + logit]; }

const SAMPLING_WORDS: u32 = 12u;
/// Word `word` of a logit row's sampling parameters: 0 temperature, 1 top_k (u32), 2 top_p, 3 min_p, 4 repetition,
/// 5 presence, 6 frequency, 7 seed low, 8 seed high, 9 position, 10 logprobs or 0xffffffff,
/// 11 one where penalties and biases change log-probabilities (a beam search's row that has some), else zero.
fn sampling_word(logit: u32, word: u32) -> u32 { return step_meta[step_meta[12] + logit * SAMPLING_WORDS + word]; }
fn penalty_start(logit: u32) -> u32 { return step_meta[step_meta[13] + logit]; }
/// (token, occurrences in the output)
fn penalty(idx: u32) -> vec2<u32> { let at = step_meta[14] + idx * 2u; return vec2(step_meta[at], step_meta[at + 1u]); }
fn bias_start(logit: u32) -> u32 { return step_meta[step_meta[15] + logit]; }
/// (token, bits of the f32 bias)
fn bias(idx: u32) -> vec2<u32> { let at = step_meta[16] + idx * 2u; return vec2(step_meta[at], step_meta[at + 1u]); }
/// Layer groups, each with its own slots and tables.
fn num_groups() -> u32 { return step_meta[22]; }
fn slot_of_row(row: u32) -> u32 { return step_meta[step_meta[17] + row]; }
fn num_copies() -> u32 { return step_meta[18]; }
/// (block to copy from, block to copy to)
fn block_copy(idx: u32) -> vec2<u32> { let at = step_meta[19] + idx * 2u; return vec2(step_meta[at], step_meta[at + 1u]); }

/// First mask word of a logit row, or 0xffffffff: only where the step has masks.
fn mask_start(logit: u32) -> u32 { return step_meta[step_meta[20] + logit]; }
/// Bits of 32 tokens: set where the token may be drawn.
fn mask_word(idx: u32) -> u32 { return step_meta[step_meta[21] + idx]; }

// How attention is cut into workgroups: see kernels/attention_work.rs.
fn num_single_items() -> u32 { return step_meta[24]; }
fn num_items() -> u32 { return step_meta[25]; }
fn num_merges() -> u32 { return step_meta[26]; }
const ITEM_WORDS: u32 = 5u;
/// 0 first work token, 1 work tokens, 2 first range, 3 end of the ranges, 4 one when partial.
fn item_word(item: u32, word: u32) -> u32 { return step_meta[step_meta[27] + item * ITEM_WORDS + word]; }
/// (token, slot of its range 0)
fn work_token(idx: u32) -> vec2<u32> { let at = step_meta[28] + idx * 2u; return vec2(step_meta[at], step_meta[at + 1u]); }
/// 0 token, 1 slot of its range 0, 2 first range, 3 end of the ranges.
fn merge_word(merge: u32, word: u32) -> u32 { return step_meta[step_meta[29] + merge * 4u + word]; }

/// For the canary: the chain of what a row computed in earlier steps, and the most keys that any row did.
fn row_chain(row: u32) -> u32 { return step_meta[step_meta[30] + row]; }
fn most_keys() -> u32 { return step_meta[31]; }

/// Runs of tokens whose rows have the same LoRA, see kernels/lora_work.rs.
fn num_lora_tiles() -> u32 { return step_meta[32]; }
const LORA_TILE_WORDS: u32 = 4u;
/// 0 first token, 1 tokens, 2 slot, 3 rank, and from bit 16 on a bit for each projection that it changes.
fn lora_tile_word(tile: u32, word: u32) -> u32 { return step_meta[step_meta[33] + tile * LORA_TILE_WORDS + word]; }
/// Bits of the projections that a token's LoRA changes (Q, K, V, O, gate, up, down): only where the step has tiles.
fn lora_parts(token: u32) -> u32 { return step_meta[step_meta[34] + token]; }
fn lora_changes_gate_or_up(token: u32) -> bool { return (lora_parts(token) & 0x30u) != 0u; }

/// For steps that were submitted before the tokens of the last one were read: whether this is one, and which logit row of
/// the last step draws a token.
fn has_feed() -> bool { return step_meta[35] != 0u; }
fn feed_source(token: u32) -> u32 { return step_meta[step_meta[35] + token]; }
