// What a workgroup of attention.wgsl owns, and where keys, scales and partial results lie.

/// Keys of a partial result.
#ifdef ONE_RANGE
const RANGE: u32 = 0x40000000u; // a bench's: one running softmax, whose bits would hang on how the work is cut
#else
const RANGE: u32 = 256u;
#endif

/// Four-element words of a partial result: numerators, then (m, l, 0, 0).
const PARTIAL: u32 = ${DP / 4 + 1}u;

/// What a workgroup owns.
struct Tile {
  tokens: u32, // first of its work tokens; MERGE: the merge
  count: u32, // tokens; 0 when there is nothing to do
  part: u32,  // which HEADS query heads
  kv_head: u32,
  table: u32, // word of the metadata where a block table begins that holds for all of its tokens; CONTIGUOUS: the block
  begin: u32, // ranges begin..end
  end: u32,
  is_partial: bool,
  shift: u32, // log2 of the block size, a power of two
}

fn find_tile(workgroup: u32) -> Tile {
  let parts = params.num_heads / ${HEADS}u;
  let part = workgroup % parts;
  let kv_head = part * ${HEADS}u / (params.num_heads / params.num_kv_heads);
#ifdef MERGE
  let item = workgroup / parts;
  if item >= num_merges() {
    return Tile(0u, 0u, 0u, 0u, 0u, 0u, 0u, false, 0u);
  }
  return Tile(item, 1u, part, kv_head, 0u, merge_word(item, 2u), merge_word(item, 3u), false, 0u);
#else
#if TQ == 1
  let item = workgroup / parts;
  let end = num_single_items();
#else
  let item = workgroup / parts + num_single_items();
  let end = num_items();
#endif
  if item >= end {
    return Tile(0u, 0u, 0u, 0u, 0u, 0u, 0u, false, 0u);
  }
  let first = item_word(item, 0u);
  // What does not change from key to key is read once: software drivers read metadata word by word.
  let row = row_of_token(work_token(first).x);
#ifdef CONTIGUOUS
  let table = row;
#else
  let table = block_tables_word() + block_table_start(row, params.group);
#endif
  return Tile(first, item_word(item, 1u), part, kv_head, table, item_word(item, 2u), item_word(item, 3u),
    item_word(item, 4u) == 1u, firstTrailingBit(block_size()));
#endif
}

/// (token, slot of its range 0) of a tile's token; tokens beyond `count` repeat the last one.
fn tile_token(tile: Tile, idx: u32) -> vec2<u32> {
#ifdef MERGE
  return vec2(merge_word(tile.tokens, 0u), merge_word(tile.tokens, 1u));
#else
  return work_token(tile.tokens + min(idx, max(tile.count, 1u) - 1u));
#endif
}

/// First key that a position sees.
fn lowest_key(position: u32) -> u32 {
  return select(0u, position + 1u - min(params.window, position + 1u), params.window > 0u);
}

#ifdef SINKS
/// What numerators of maximum m and sum l are multiplied by when the head's sink joins the sum.
fn share_beside_sink(m: f32, l: f32, head: u32) -> f32 {
  let top = max(m, sinks[head]);
  let keys = exp2_neg(m - top);
  return keys / fma(l, keys, exp2_neg(sinks[head] - top));
}
#endif

/// First word of a partial result.
fn partial_at(slot: u32, head: u32) -> u32 {
  return (slot * params.num_heads + head) * PARTIAL;
}

#ifndef MERGE
#ifdef SOFTCAP
/// c * tanh(score / c), all times log2(e): tanh(u) = 1 - 2 / (exp(2u) + 1), without overflow.
fn soft_capped(score: f32) -> f32 {
  let e = exp2(clamp(2.88539008 * score / params.softcap, -60.0, 60.0));
  return params.softcap * (1.0 - 2.0 / (e + 1.0));
}
#endif

/// The block that holds a key of the tile's row.
fn block_of(tile: Tile, key: u32) -> u32 {
#ifdef CONTIGUOUS
  return tile.table;
#else
  return step_meta[tile.table + (key >> tile.shift)];
#endif
}

#ifdef KV_I8
/// Words of a block: values, scales, padding.
fn block_words() -> u32 {
  return (params.num_kv_heads * block_size() * ${DP / 4 + 1}u + 3u) & 0xfffffffcu;
}

/// First word of the block that holds a key, and the key's row in it, counted over heads.
fn block_row(tile: Tile, key: u32) -> vec2<u32> {
  let in_block = key & ((1u << tile.shift) - 1u);
  return vec2(block_of(tile, key) * block_words(), (tile.kv_head << tile.shift) + in_block);
}

/// First word of a key of the tile's row.
fn cache_row(tile: Tile, key: u32) -> u32 {
  let at = block_row(tile, key);
  return at.x + at.y * ${DP / 4}u;
}

/// (scale of the key, scale of the value)
fn cache_scales(tile: Tile, key: u32) -> vec2<f32> {
  let at = block_row(tile, key);
  let word = at.x + params.num_kv_heads * block_size() * ${DP / 4}u + at.y;
  let k = k_cache[word >> 1u];
#if DPL == 8
  let v_pair = v_cache[word >> 1u];
  let v = select(v_pair.x, v_pair.y, (word & 1u) == 1u);
#else
  let v = v_cache[word];
#endif
  return vec2(bitcast<f32>(select(k.x, k.y, (word & 1u) == 1u)), bitcast<f32>(v));
}

fn unpacked(word: u32) -> vec4<f32> {
  return vec4<f32>(unpack4xI8(word));
}
#else
/// Row of the cache (in units of DP values) that holds a key of the tile's row.
fn cache_row(tile: Tile, key: u32) -> u32 {
  let in_block = key & ((1u << tile.shift) - 1u);
  return ((block_of(tile, key) * params.num_kv_heads + tile.kv_head) << tile.shift) + in_block;
}

#ifndef KV_F32
/// Eight dims of a key, from dim 8 * chunk on, as pairs of f16.
fn key_granule(row: u32, chunk: u32) -> vec4<u32> {
#ifdef KV_TEXELS
  return textureLoad(k_cache, texel_of(row * ${DP / 8}u + chunk));
#else
  return k_cache[row * ${DP / 8}u + chunk];
#endif
}

/// DPL dims of a value, from dim DPL * chunk on, as pairs of f16.
#if DPL == 8
fn value_granule(row: u32, chunk: u32) -> vec4<u32> {
#ifdef KV_TEXELS
  return textureLoad(v_cache, texel_of(row * ${DP / 8}u + chunk));
#else
  return v_cache[row * ${DP / 8}u + chunk];
#endif
}
#else
fn value_granule(row: u32, chunk: u32) -> vec2<u32> {
#ifdef KV_TEXELS
  let both = textureLoad(v_cache, texel_of(row * ${DP / 8}u + (chunk >> 1u)));
  return select(both.xy, both.zw, (chunk & 1u) == 1u);
#else
  return v_cache[row * ${DP / 4}u + chunk];
#endif
}
#endif
#endif
#endif
#endif
