// In place on the fused projection, before rope: q and k normalised in segments. RMS over all heads together (olmo2), or
// with LAYER x - mean over each head (cohere). Every element of q and k has a gain of its own, with LAYER a bias too.
// Lane l takes elements l, l + SG, … of its segment, so that the order of the sum depends on the adapter's lanes alone.
// Grid: a workgroup for each segment of each token.
//
// Defines: LAYER; SG, SUBGROUP.
#import grid
#import step
#ifndef SUBGROUP
#import sum_of_lanes
#endif

struct Params {
  q_len: u32, // elements of a segment of q
  k_len: u32,
  num_q: u32, // segments of q
  num_segments: u32, // of q and k
  stride: u32, // elements from row to row of qkv
  eps: f32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> gains: array<f32>; // of q, then of k; LAYER: then biases likewise
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>; // [num_tokens, stride]
@group(0) @binding(3) var<uniform> params: Params;

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
  let token = item / params.num_segments;
  if token >= num_tokens() {
    return;
  }
  let segment = item % params.num_segments;
  let is_q = segment < params.num_q;
  let len = select(params.k_len, params.q_len, is_q);
  let first = select(params.num_q * params.q_len + (segment - params.num_q) * len, segment * len, is_q);
  let start = token * params.stride + first;
#ifdef LAYER
  var elements = 0.0;
  for (var i = lane; i < len; i += ${SG}u) {
    elements += qkv[start + i];
  }
#ifdef SUBGROUP
  let mean = subgroupAdd(elements) / f32(len);
#else
  let mean = sum_of_lanes(lane, elements) / f32(len);
#endif
#else
  let mean = 0.0;
#endif
  var sum = 0.0;
  for (var i = lane; i < len; i += ${SG}u) {
    let x = qkv[start + i] - mean;
    sum = fma(x, x, sum);
  }
#ifdef SUBGROUP
  let total = subgroupAdd(sum);
#else
  let total = sum_of_lanes(lane, sum);
#endif
  let scale = inverseSqrt(total / f32(len) + params.eps);
  for (var i = lane; i < len; i += ${SG}u) {
#ifdef LAYER
    let biases = params.num_q * params.q_len + (params.num_segments - params.num_q) * params.k_len;
    qkv[start + i] = fma((qkv[start + i] - mean) * scale, gains[first + i], gains[biases + first + i]);
#else
    qkv[start + i] = (qkv[start + i] - mean) * scale * gains[first + i];
#endif
  }
}
