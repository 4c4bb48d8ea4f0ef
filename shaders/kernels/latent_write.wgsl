// From the compressed projections of latent attention (MLA) to attention's inputs. Of each token: the latent normalised
// (RMS) and the shared rotary key turned, into its slot of the paged cache; of each of its heads: the latent query that q
// holds scaled for a base-2 softmax, and behind it the rotary part of raw_q, turned.
// Values that are not finite enter the cache as 0, others within what f16 holds, as in rope_kv_write.wgsl.
// KV_I8: scale = max |x| / 127 of the row, in a word of its own behind the block's values.
// Grid: a workgroup for each head of each token, and one for the token's row of the cache.
//
// Defines: RANK (dims of the latent), ROT (of the rotary part), NOPE (other dims of a head of raw_q), DP (RANK + ROT
// padded); INTERLEAVED; KV_F32, KV_I8 or neither; SG, SUBGROUP.
#import grid
#import step
#ifndef SUBGROUP
#import sum_of_lanes
#endif

struct Params {
  num_heads: u32,
  raw_q_stride: u32, // elements from row to row
  raw_kv_stride: u32,
  q_stride: u32,
  q_scale: f32,
  eps: f32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> raw_q: array<f32>; // [num_tokens, raw_q_stride]: heads of NOPE + ROT dims
@group(0) @binding(2) var<storage, read> raw_kv: array<f32>; // [num_tokens, raw_kv_stride]: RANK + ROT dims
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>; // [max_position, ROT / 2]: (cos, sin)
@group(0) @binding(4) var<storage, read> gain: array<f32>; // [RANK]
@group(0) @binding(5) var<storage, read_write> q: array<f32>; // [num_tokens, q_stride]: heads of DP dims
#ifdef KV_F32
@group(0) @binding(6) var<storage, read_write> k_cache: array<vec2<f32>>; // [num_blocks, block_size, DP / 2]
#else
@group(0) @binding(6) var<storage, read_write> k_cache: array<u32>; // the same in words; i8: behind each block its scales
#endif
@group(0) @binding(7) var<uniform> params: Params;

fn finite_or_zero(x: f32) -> f32 {
  return select(x, 0.0, (bitcast<u32>(x) & 0x7f800000u) == 0x7f800000u);
}

/// Dim i of a rotary part, turned: x is its value, other that of its partner.
fn turned(rope_start: u32, i: u32, x: f32, other: f32) -> f32 {
#ifdef INTERLEAVED
  let angle = rope[rope_start + i / 2u];
  let sine = select(-angle.y, angle.y, (i & 1u) == 1u);
#else
  let angle = rope[rope_start + i % ${ROT / 2}u];
  let sine = select(-angle.y, angle.y, i >= ${ROT / 2}u);
#endif
  return fma(x, angle.x, other * sine);
}

fn partner(i: u32) -> u32 {
#ifdef INTERLEAVED
  return i ^ 1u;
#else
  return (i + ${ROT / 2}u) % ${ROT}u;
#endif
}

/// Dim d of the row of the cache.
fn cached(source: u32, rope_start: u32, norm: f32, d: u32) -> f32 {
  if d < ${RANK}u {
    return finite_or_zero(raw_kv[source + d] * norm * gain[d]);
  }
  if d >= ${RANK + ROT}u {
    return 0.0;
  }
  let i = d - ${RANK}u;
  return finite_or_zero(turned(rope_start, i, raw_kv[source + d], raw_kv[source + ${RANK}u + partner(i)]));
}

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  let item = linear_workgroup(group_id);
  let token = item / (params.num_heads + 1u);
  if token >= num_tokens() {
    return;
  }
  let head = item % (params.num_heads + 1u);
  let rope_start = position(token) * ${ROT / 2}u;
  if head < params.num_heads {
    let to = token * params.q_stride + head * ${DP}u;
    for (var d = lane; d < ${RANK}u; d += ${SG}u) {
      q[to + d] *= params.q_scale;
    }
    let source = token * params.raw_q_stride + head * ${NOPE + ROT}u + ${NOPE}u;
    for (var i = lane; i < ${ROT}u; i += ${SG}u) {
      q[to + ${RANK}u + i] = turned(rope_start, i, raw_q[source + i], raw_q[source + partner(i)]) * params.q_scale;
    }
    for (var d = ${RANK + ROT}u + lane; d < ${DP}u; d += ${SG}u) {
      q[to + d] = 0.0;
    }
    return;
  }

  let source = token * params.raw_kv_stride;
  var sum = 0.0;
  for (var d = lane; d < ${RANK}u; d += ${SG}u) {
    sum = fma(raw_kv[source + d], raw_kv[source + d], sum);
  }
#ifdef SUBGROUP
  let total = subgroupAdd(sum);
#else
  let total = sum_of_lanes(lane, sum);
#endif
  let norm = inverseSqrt(total / ${RANK}.0 + params.eps);
  let slot = kv_slot(token);
#ifdef KV_I8
  // Every lane finds the largest for itself: a row is short, and nothing else is as plain.
  var largest = 0.0;
  for (var d = 0u; d < ${DP}u; d++) {
    largest = max(largest, abs(cached(source, rope_start, norm, d)));
  }
  let to_q = select(0.0, 127.0 / largest, largest > 1.2e-38);
  let size = block_size();
  let block = (slot / size) * ((size * ${DP / 4 + 1}u + 3u) & 0xfffffffcu);
  for (var i = lane; i < ${DP / 4}u; i += ${SG}u) {
    let x = vec4(
      cached(source, rope_start, norm, 4u * i),
      cached(source, rope_start, norm, 4u * i + 1u),
      cached(source, rope_start, norm, 4u * i + 2u),
      cached(source, rope_start, norm, 4u * i + 3u),
    );
    k_cache[block + (slot % size) * ${DP / 4}u + i] = pack4xI8(vec4<i32>(round(x * to_q)));
  }
  if lane == 0u {
    k_cache[block + size * ${DP / 4}u + slot % size] = bitcast<u32>(largest / 127.0);
  }
#else
  for (var i = lane; i < ${DP / 2}u; i += ${SG}u) {
    let x = vec2(cached(source, rope_start, norm, 2u * i), cached(source, rope_start, norm, 2u * i + 1u));
#ifdef KV_F32
    k_cache[slot * ${DP / 2}u + i] = x;
#else
    k_cache[slot * ${DP / 2}u + i] = pack2x16float(clamp(x, vec2(-65504.0), vec2(65504.0)));
#endif
  }
#endif
}
