// PagedAttention (Kwon et al. 2023): softmax(q k^T) v with keys and values read from their pages through the block
// table. Decode and chunked prefill, rows of any length in one dispatch, causal, with a sliding window or none.
//
// A workgroup owns an item of the step's work list (up to TQ tokens that have the same blocks, some ranges of keys) and
// HEADS query heads of one kv head: NQ = TQ * HEADS queries that share each load of K and V. Per query the arithmetic
// does not depend on TQ, on the neighbours or on where pages lie: for each absolute range of 256 keys a partial (m, l, o)
// over tiles of KT keys, within a tile dims and keys ascending, one fma each; partials are merged in ascending order,
// here or, when the item is a partial one, by the MERGE variant through a scratch buffer: the same text. Results are thus
// equal bit for bit for every chunking, batch and way of cutting the work.
//
// SOFTCAP: scores are bounded by c * tanh(score / c) (gemma2). SINKS: each head has one more logit without a value, which
// joins the sum of the softmax after the last range (gpt-oss).
//
// SUBGROUP: one subgroup, no barrier. Lane = key for q k^T (KPL keys per lane), then lane = DPL dims of the output with
// the probabilities spread by broadcasts of constant lanes. Otherwise: 64 lanes and workgroup memory.
//
// CONTIGUOUS, for measuring what pages cost: row r lies in block r, however long blocks are, and no table is read.
//
// Grid: items (SINGLE: those of one token; SEVERAL: the others; MERGE: merges) * num_heads / HEADS workgroups.
#import grid
#import step
#import softmax
#ifdef KV_TEXELS
#import kv_texels
#endif

struct Params {
  num_heads: u32,
  num_kv_heads: u32,
  window: u32, // keys visible including the token itself; 0 is all
  q_stride: u32,
  out_stride: u32,
  group: u32, // of layers: whose block table
  softcap: f32, // times log2(e), read if SOFTCAP
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#ifdef MERGE
// [slots, num_heads, DP / 4 + 1]: numerators of DP dims, then (m, l, 0, 0)
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
#else
// [num_tokens, q_stride]: heads of DP dims, scaled by log2(e) / sqrt(D)
#ifdef SUBGROUP
@group(0) @binding(1) var<storage, read> q: array<f32>;
#else
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
#endif
// [num_blocks, num_kv_heads, block_size, DP], f32, f16 in pairs, or i8 in fours and behind each block its scales
#ifdef KV_I8
@group(0) @binding(2) var<storage, read> k_cache: array<vec2<u32>>;
#if DPL == 8
@group(0) @binding(3) var<storage, read> v_cache: array<vec2<u32>>;
#else
@group(0) @binding(3) var<storage, read> v_cache: array<u32>;
#endif
#else
#ifdef KV_TEXELS
@group(0) @binding(2) var k_cache: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var v_cache: texture_storage_2d<rgba32uint, read>;
#else
#ifdef KV_F32
@group(0) @binding(2) var<storage, read> k_cache: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> v_cache: array<vec4<f32>>;
#else
@group(0) @binding(2) var<storage, read> k_cache: array<vec4<u32>>;
#if DPL == 8
@group(0) @binding(3) var<storage, read> v_cache: array<vec4<u32>>;
#else
@group(0) @binding(3) var<storage, read> v_cache: array<vec2<u32>>;
#endif
#endif
#endif
#endif
#endif
#ifdef SINKS
@group(0) @binding(4) var<storage, read> sinks: array<f32>; // [num_heads], times log2(e)
#endif
#ifdef I8
#if DPL == 8
@group(0) @binding(5) var<storage, read_write> yq: array<vec2<u32>>; // [num_tokens, out_stride / 8] packed i8
#else
@group(0) @binding(5) var<storage, read_write> yq: array<u32>; // [num_tokens, out_stride / 4] packed i8
#endif
@group(0) @binding(6) var<storage, read_write> ys: array<vec2<f32>>; // [num_tokens, out_stride / 32]
#else
@group(0) @binding(5) var<storage, read_write> y: array<f32>; // [num_tokens, out_stride]: heads of D dims, then zeros
#endif
#ifndef MERGE
@group(0) @binding(7) var<storage, read_write> partials: array<vec4<f32>>; // [slots, num_heads, DP / 4 + 1]
#endif
@group(0) @binding(8) var<uniform> params: Params;

#import attention_tile

#ifdef SUBGROUP
@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(subgroup_invocation_id) lane: u32) {
  let tile = find_tile(linear_workgroup(group));
  if tile.count == 0u {
    return;
  }
#for t in 0..TQ
  let work_${t} = tile_token(tile, ${t}u);
  let position_${t} = position(work_${t}.x);
  let lowest_${t} = lowest_key(position_${t});
#end
  var lowest = lowest_0; // of all tokens
  var last = position_0;
#for t in 1..TQ
  lowest = min(lowest, lowest_${t});
  last = max(last, position_${t});
#end
#for n in 0..NQ
#ifndef MERGE
  let q_from_${n} = work_${n / HEADS}.x * params.q_stride + (tile.part * ${HEADS}u + ${n % HEADS}u) * ${DP}u
    + (lane & ${QW - 1}u);
#endif
  var total_m_${n} = MASKED;
  var total_l_${n} = 0.0;
#end
#for c in 0..CPL
  let chunk_${c} = min(lane + ${c * SG}u, ${DP / DPL - 1}u); // lanes beyond the head repeat its last dims
#for n in 0..NQ
#for i in 0..DPL / 4
  var total_${n}_${c}_${i} = vec4(0.0);
#end
#end
#end

#ifdef KV_TEXELS
#ifndef MERGE
  // The lane's dims of the queries: on these drivers an array is read much faster than a buffer.
  var held: array<f32, ${NQ * DP / QW}>;
  for (var i = 0u; i < ${DP / QW}u; i++) {
#for n in 0..NQ
    held[i * ${NQ}u + ${n}u] = q[q_from_${n} + i * ${QW}u];
#end
  }
#endif
#endif
  let end_range = min(tile.end, last / RANGE + 1u);
  for (var range = max(tile.begin, lowest / RANGE); range < end_range; range++) {
#ifdef MERGE
#for n in 0..NQ
    let from_${n} = partial_at(work_0.y + range, tile.part * ${HEADS}u + ${n}u);
    let m_${n} = partials[from_${n} + ${DP / 4}u].x;
    let l_${n} = partials[from_${n} + ${DP / 4}u].y;
#for c in 0..CPL
#for i in 0..DPL / 4
    let o_${n}_${c}_${i} = partials[from_${n} + chunk_${c} * ${DPL / 4}u + ${i}u];
#end
#end
#end
#else
#for n in 0..NQ
    var m_${n} = MASKED;
    var l_${n} = 0.0;
#for c in 0..CPL
#for i in 0..DPL / 4
    var o_${n}_${c}_${i} = vec4(0.0);
#end
#end
#end
    let begin = max(range * RANGE, lowest / ${KT}u * ${KT}u);
    let end = min((range + 1u) * RANGE, last + 1u);
    for (var base = begin; base < end; base += ${KT}u) {
      // Scores: lane = key.
#for k in 0..KPL
      let key_${k} = base + ${k * SG}u + lane;
      let row_${k} = cache_row(tile, min(key_${k}, last));
#ifdef KV_I8
      let scales_${k} = cache_scales(tile, min(key_${k}, last));
#endif
#for n in 0..NQ
      var s_${n}_${k} = 0.0;
#end
#end
      for (var chunk = 0u; chunk < ${DP / 8}u; chunk++) {
#for k in 0..KPL
#ifdef KV_F32
        let x_${k}_0 = k_cache[row_${k} * ${DP / 4}u + chunk * 2u];
        let x_${k}_1 = k_cache[row_${k} * ${DP / 4}u + chunk * 2u + 1u];
#else
#ifdef KV_I8
        let w_${k} = k_cache[(row_${k} >> 1u) + chunk];
        let x_${k}_0 = unpacked(w_${k}.x);
        let x_${k}_1 = unpacked(w_${k}.y);
#else
        let w_${k} = key_granule(row_${k}, chunk);
        let x_${k}_0 = vec4(unpack2x16float(w_${k}.x), unpack2x16float(w_${k}.y));
        let x_${k}_1 = vec4(unpack2x16float(w_${k}.z), unpack2x16float(w_${k}.w));
#endif
#endif
#end
#for n in 0..NQ
#for i in 0..8 / QW
#ifdef KV_TEXELS
        let q_${n}_${i} = held[(chunk * ${8 / QW}u + ${i}u) * ${NQ}u + ${n}u];
#else
        let q_${n}_${i} = q[q_from_${n} + chunk * 8u + ${i * QW}u];
#endif
#end
#for e in 0..8
        let q_${n}__${e} = subgroupBroadcast(q_${n}_${e / QW}, ${e % QW}u);
#for k in 0..KPL
        s_${n}_${k} = fma(q_${n}__${e}, x_${k}_${e / 4}[${e % 4}], s_${n}_${k});
#end
#end
#end
      }

      // Online softmax.
#for n in 0..NQ
#for k in 0..KPL
#ifdef KV_I8
      s_${n}_${k} *= scales_${k}.x;
#endif
#ifdef SOFTCAP
      s_${n}_${k} = soft_capped(s_${n}_${k});
#endif
      let seen_${n}_${k} = key_${k} <= position_${n / HEADS} && key_${k} >= lowest_${n / HEADS};
      s_${n}_${k} = select(MASKED, s_${n}_${k}, seen_${n}_${k});
#end
      var top_${n} = s_${n}_0;
#for k in 1..KPL
      top_${n} = max(top_${n}, s_${n}_${k});
#end
      top_${n} = max(m_${n}, subgroupMax(top_${n}));
      let shrink_${n} = exp2_neg(m_${n} - top_${n});
      m_${n} = top_${n};
      l_${n} *= shrink_${n};
#for k in 0..KPL
      let p_${n}_${k} = select(0.0, exp2(s_${n}_${k} - top_${n}), seen_${n}_${k});
#end
#for c in 0..CPL
#for i in 0..DPL / 4
      o_${n}_${c}_${i} *= shrink_${n};
#end
#end
#end

      // Values: lane = dims, keys in ascending order. A loop over k, since unrolling it takes long to compile.
      for (var k = 0u; k < ${KPL}u; k++) {
        var rows = row_0;
#ifdef KV_I8
        var scales = scales_0.y;
#for k in 1..KPL
        scales = select(scales, scales_${k}.y, k == ${k}u);
#end
#endif
#for n in 0..NQ
        var ps_${n} = p_${n}_0;
#end
#for k in 1..KPL
        rows = select(rows, row_${k}, k == ${k}u);
#for n in 0..NQ
        ps_${n} = select(ps_${n}, p_${n}_${k}, k == ${k}u);
#end
#end
#for j in 0..SG
        {
          let row = subgroupBroadcast(rows, ${j}u);
#ifdef KV_I8
          let scale = subgroupBroadcast(scales, ${j}u);
#endif
#for n in 0..NQ
          let p_${n} = subgroupBroadcast(ps_${n}, ${j}u);
          l_${n} += p_${n};
#ifdef KV_I8
          let weight_${n} = vec4(p_${n} * scale);
#else
          let weight_${n} = vec4(p_${n});
#endif
#end
#for c in 0..CPL
#ifdef KV_F32
#for i in 0..DPL / 4
          let v_${c}_${i} = v_cache[row * ${DP / 4}u + chunk_${c} * ${DPL / 4}u + ${i}u];
#end
#else
#ifdef KV_I8
#if DPL == 8
          let w_${c} = v_cache[(row >> 1u) + chunk_${c}];
          let v_${c}_0 = unpacked(w_${c}.x);
          let v_${c}_1 = unpacked(w_${c}.y);
#else
          let v_${c}_0 = unpacked(v_cache[row + chunk_${c}]);
#endif
#else
          let w_${c} = value_granule(row, chunk_${c});
          let v_${c}_0 = vec4(unpack2x16float(w_${c}.x), unpack2x16float(w_${c}.y));
#if DPL == 8
          let v_${c}_1 = vec4(unpack2x16float(w_${c}.z), unpack2x16float(w_${c}.w));
#endif
#endif
#endif
#for n in 0..NQ
#for i in 0..DPL / 4
          o_${n}_${c}_${i} = fma(weight_${n}, v_${c}_${i}, o_${n}_${c}_${i});
#end
#end
#end
        }
#end
      }
    }
#import attention_partial
#endif

    // Merge this range into the ranges before it.
#for n in 0..NQ
    {
      let top = max(total_m_${n}, m_${n});
      let before = exp2_neg(total_m_${n} - top);
      let here = exp2_neg(m_${n} - top);
      total_m_${n} = top;
      total_l_${n} = fma(l_${n}, here, total_l_${n} * before);
#for c in 0..CPL
#for i in 0..DPL / 4
      total_${n}_${c}_${i} = fma(o_${n}_${c}_${i}, vec4(here), total_${n}_${c}_${i} * before);
#end
#end
    }
#end
  }

#ifndef MERGE
  if tile.is_partial {
    return;
  }
#endif
#import attention_store
}
#else
#ifndef MERGE
var<workgroup> scores: array<f32, ${NQ * KT}>; // [NQ, KT] scores, then probabilities
var<workgroup> tops: array<f32, ${NQ}>; // largest score of the range so far
var<workgroup> shrinks: array<f32, ${NQ}>;
#endif

@compute @workgroup_size(${KT})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let tile = find_tile(linear_workgroup(group));
#for t in 0..TQ
  let work_${t} = tile_token(tile, ${t}u);
  let position_${t} = position(work_${t}.x);
  let lowest_${t} = lowest_key(position_${t});
#end
  var lowest = lowest_0; // of all tokens
  var last = position_0;
#for t in 1..TQ
  lowest = min(lowest, lowest_${t});
  last = max(last, position_${t});
#end
  // No early return before barriers: an empty tile has no ranges.
  let end_range = select(min(tile.end, last / RANGE + 1u), 0u, tile.count == 0u);
#ifndef MERGE
#for n in 0..NQ
  let q_from_${n} = (work_${n / HEADS}.x * params.q_stride + (tile.part * ${HEADS}u + ${n % HEADS}u) * ${DP}u) / 4u;
#end
#endif
  // Values: lane = four dims of the queries mine_0, mine_1, …
  let dims = lane % ${DP / 4}u;
  let is_busy = lane < ${DP / 4 * NG}u;
#for i in 0..QPT
  let mine_${i} = min(lane / ${DP / 4}u + ${i * NG}u, ${NQ - 1}u);
  var total_m_${i} = MASKED;
  var total_l_${i} = 0.0;
  var total_${i} = vec4(0.0);
#end

  for (var range = max(tile.begin, lowest / RANGE); range < end_range; range++) {
#ifdef MERGE
#for i in 0..QPT
    let from_${i} = partial_at(work_0.y + range, tile.part * ${HEADS}u + mine_${i});
    let m_${i} = partials[from_${i} + ${DP / 4}u].x;
    let l_${i} = partials[from_${i} + ${DP / 4}u].y;
    let o_${i} = partials[from_${i} + dims];
#end
#else
    if lane < ${NQ}u {
      tops[lane] = MASKED;
    }
#for i in 0..QPT
    var l_${i} = 0.0;
    var o_${i} = vec4(0.0);
#end
    let begin = max(range * RANGE, lowest / ${KT}u * ${KT}u);
    let end = min((range + 1u) * RANGE, last + 1u);
    for (var base = begin; base < end; base += ${KT}u) {
      // Scores: lane = key.
      let key = base + lane;
      let key_row = cache_row(tile, min(key, last));
#for n in 0..NQ
      var s_${n} = 0.0;
#end
      for (var chunk = 0u; chunk < ${DP / 8}u; chunk++) {
#ifdef KV_F32
        let x_0 = k_cache[key_row * ${DP / 4}u + chunk * 2u];
        let x_1 = k_cache[key_row * ${DP / 4}u + chunk * 2u + 1u];
#else
#ifdef KV_I8
        let w = k_cache[(key_row >> 1u) + chunk];
        let x_0 = unpacked(w.x);
        let x_1 = unpacked(w.y);
#else
        let w = key_granule(key_row, chunk);
        let x_0 = vec4(unpack2x16float(w.x), unpack2x16float(w.y));
        let x_1 = vec4(unpack2x16float(w.z), unpack2x16float(w.w));
#endif
#endif
#for n in 0..NQ
        let q_${n}_0 = q[q_from_${n} + chunk * 2u];
        let q_${n}_1 = q[q_from_${n} + chunk * 2u + 1u];
#for e in 0..8
        s_${n} = fma(q_${n}_${e / 4}[${e % 4}], x_${e / 4}[${e % 4}], s_${n});
#end
#end
      }
#ifdef KV_I8
      let key_scale = cache_scales(tile, min(key, last)).x;
#for n in 0..NQ
      s_${n} *= key_scale;
#end
#endif
#ifdef SOFTCAP
#for n in 0..NQ
      s_${n} = soft_capped(s_${n});
#end
#endif
#for n in 0..NQ
      let seen_${n} = key <= position_${n / HEADS} && key >= lowest_${n / HEADS};
      scores[${n * KT}u + lane] = select(MASKED, s_${n}, seen_${n});
#end
      workgroupBarrier();

      // Online softmax: lane = query, then lane = key.
      if lane < ${NQ}u {
        var top = tops[lane];
        for (var j = 0u; j < ${KT}u; j++) {
          top = max(top, scores[lane * ${KT}u + j]);
        }
        shrinks[lane] = exp2_neg(tops[lane] - top);
        tops[lane] = top;
      }
      workgroupBarrier();
#for n in 0..NQ
      scores[${n * KT}u + lane] = select(0.0, exp2(scores[${n * KT}u + lane] - tops[${n}]), seen_${n});
#end
      workgroupBarrier();

      // Values: keys in ascending order.
#for i in 0..QPT
      l_${i} *= shrinks[mine_${i}];
      o_${i} *= shrinks[mine_${i}];
#end
      for (var j = 0u; j < ${KT}u; j++) {
        let value_row = cache_row(tile, min(base + j, last));
#ifdef KV_F32
        let v = v_cache[value_row * ${DP / 4}u + dims];
#else
#ifdef KV_I8
        let v = unpacked(v_cache[value_row + dims]);
        let scale = cache_scales(tile, min(base + j, last)).y;
#else
        let w = value_granule(value_row, dims);
        let v = vec4(unpack2x16float(w.x), unpack2x16float(w.y));
#endif
#endif
#for i in 0..QPT
        let p_${i} = scores[mine_${i} * ${KT}u + j];
        l_${i} += p_${i};
#ifdef KV_I8
        o_${i} = fma(vec4(p_${i} * scale), v, o_${i});
#else
        o_${i} = fma(vec4(p_${i}), v, o_${i});
#endif
#end
      }
      workgroupBarrier();
    }

#for i in 0..QPT
    let m_${i} = tops[mine_${i}];
#end
    // Others may reset the tops for the next range now.
    workgroupBarrier();
    if tile.is_partial {
#for i in 0..QPT
      {
        let query = lane / ${DP / 4}u + ${i * NG}u;
        if is_busy && query / ${HEADS}u < tile.count {
          let slot = tile_token(tile, query / ${HEADS}u).y + range;
          let to = partial_at(slot, tile.part * ${HEADS}u + query % ${HEADS}u);
          partials[to + dims] = o_${i};
          if dims == 0u {
            partials[to + ${DP / 4}u] = vec4(m_${i}, l_${i}, 0.0, 0.0);
          }
        }
      }
#end
      continue;
    }
#endif

    // Merge this range into the ranges before it.
#for i in 0..QPT
    {
      let top = max(total_m_${i}, m_${i});
      let before = exp2_neg(total_m_${i} - top);
      let here = exp2_neg(m_${i} - top);
      total_m_${i} = top;
      total_l_${i} = fma(l_${i}, here, total_l_${i} * before);
      total_${i} = fma(o_${i}, vec4(here), total_${i} * before);
    }
#end
  }

#ifndef MERGE
  if tile.is_partial {
    return;
  }
#endif

#for i in 0..QPT
  {
    let query = lane / ${DP / 4}u + ${i * NG}u;
    let token = query / ${HEADS}u;
    let head = tile.part * ${HEADS}u + query % ${HEADS}u;
    let to = tile_token(tile, token).x * params.out_stride;
    if is_busy && token < tile.count {
#ifdef SINKS
      let share = share_beside_sink(total_m_${i}, total_l_${i}, head);
      let out = total_${i} * share;
#else
      let out = total_${i} / total_l_${i};
#endif
#for e in 0..4
      if dims * 4u + ${e}u < ${D}u {
        y[to + head * ${D}u + dims * 4u + ${e}u] = out[${e}];
      }
#end
      if dims == 0u && head + 1u == params.num_heads {
        for (var pad = params.num_heads * ${D}u; pad < params.out_stride; pad++) {
          y[to + pad] = 0.0;
        }
      }
    }
  }
#end
}
#endif
