// y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n] for many tokens, by cooperative matrices: weights and activations
// as f16, sums as f32.
//
// The order of a sum is the adapter's, so y differs in its last bits from what matmul_i8.wgsl and matmul_f32.wgsl give. A
// token's row is brought to f16's range by a power of two, so that no activation overflows; weights beyond 65504 do.
//
// A workgroup has 64 rows, a block of w, and 32 tokens; each of its 64 lanes unpacks a row of w for each group of 32.
// Grid: for each 64 rows, for each 32 tokens (fastest).
//
// NORMED, TO_HIDDEN, GATED, ADDED, QUANTISES: as in matmul_i8.wgsl.
//
// Defines: the weights' format and TEXELS (kernels/pack.rs); T, SG (shared/units.wgsl); SUBGROUP; FLOAT_ROWS, for
// activations of f32.
enable f16;
enable wgpu_cooperative_matrix;
#import grid
#import step
#import weight_planes
#import weights
#import units
#ifdef QUANTISES
#import quantise
#endif
#import matmul_params

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#ifdef FLOAT_ROWS
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [m, x_stride / 4]
#else
@group(0) @binding(1) var<storage, read> xq: array<vec4<u32>>; // [m, x_stride / 16], 16 x i8
@group(0) @binding(2) var<storage, read> xs: array<vec2<f32>>; // [m, x_stride / 32], (scale, scale * sum of q)
#endif
#ifdef TO_HIDDEN
@group(0) @binding(6) var<storage, read> gain: array<f32>; // [n], of the norm that follows
#else
@group(0) @binding(6) var<storage, read> biases: array<f32>; // [n], read if has_bias
#endif
#ifdef ADDED
@group(0) @binding(7) var<storage, read> added: array<f32>; // [m, added_stride], in the order of w's rows
#endif
#ifndef GATED
@group(0) @binding(7) var<storage, read_write> y: array<f32>; // [m, y_stride]
#endif
#ifdef QUANTISES
@group(0) @binding(8) var<storage, read_write> yq: array<vec4<u32>>; // [m, y_stride / 16] packed i8
@group(0) @binding(9) var<storage, read_write> ys: array<vec2<f32>>; // [m, y_stride / 32], then the sums of squares
#endif
#ifdef GATED
alias Gate = vec4<f32>;
#import activation
#endif
@group(0) @binding(10) var<uniform> params: Params;

/// What brings a token's row to f16's range, and what its sums are multiplied with at the end.
var<workgroup> factors: array<vec2<f32>, 32>;

/// Four sums of a token, from row `own` of the workgroup's on.
fn sums_of(t: u32, own: u32) -> vec4<f32> {
  let at = t * 64u + own;
  return vec4(sums[at], sums[at + 1u], sums[at + 2u], sums[at + 3u]) * factors[t].y;
}

#ifdef TO_HIDDEN
/// Adds to four elements of the hidden state from `at` on, which is element n of the slice; those beyond n are zero.
fn joined(at: u32, n: u32, added: vec4<f32>) -> vec4<f32> {
  var v = vec4(0.0);
#for c in 0..4
  if n + ${c}u < params.n {
    v[${c}] = y[at + ${c}u] + added[${c}];
    y[at + ${c}u] = v[${c}];
  }
#end
  return v;
}

fn gains(n: u32) -> vec4<f32> {
  let last = params.n - 1u;
  return vec4(gain[min(n, last)], gain[min(n + 1u, last)], gain[min(n + 2u, last)], gain[min(n + 3u, last)]);
}
#endif

#ifdef GATED
/// What joins four rows of gate or up of a token, from row `own` of the workgroup's on.
fn shifts(token: u32, first_row: u32, own: u32) -> vec4<f32> {
  var v = vec4(0.0);
#for c in 0..4
  if params.has_bias != 0u {
    v[${c}] = biases[first_row + own + ${c}u];
  }
#end
#ifdef ADDED
  if lora_changes_gate_or_up(token) {
    let added_at = token * params.added_stride + params.added_offset + first_row;
    let last = params.n - 1u - first_row;
#for c in 0..4
    v[${c}] += added[added_at + min(own + ${c}u, last)];
#end
  }
#endif
  return v;
}
#endif

@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
  @builtin(local_invocation_index) idx: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let m = select(num_tokens(), num_logits(), params.counts_logits == 1u);
  if m == 0u {
    return;
  }
  let num_tiles = (m + 31u) / 32u;
  // Not by the function: naga takes what a function makes of its argument for not uniform.
  let workgroup = group_id.x + group_id.y * GRID_ROW;
  let block = workgroup / num_tiles;
  let first_row = block * 64u;
  let first_token = (workgroup % num_tiles) * 32u;
  if first_row >= params.n {
    return;
  }
#ifdef TEXELS
  open_planes(block);
#endif
  // Never parameters alone: lavapipe compiles a small kernel anew whenever one that decides on control flow changes.
  let groups = min(params.groups, m * 0x10000u);

  for (var t = subgroup; t < 32u; t += ${64 / SG}u) {
    let token = min(first_token + t, m - 1u);
    var largest_own = 0.0;
    var back = 1.0 / 256.0;
#ifdef FLOAT_ROWS
    for (var i = lane; i < groups * 8u; i += ${SG}u) {
      let v = abs(x[token * (params.x_stride / 4u) + i]);
      largest_own = max(largest_own, max(max(v.x, v.y), max(v.z, v.w)));
    }
#else
    let row_at = token * (params.x_stride / 32u);
    for (var g = lane; g < groups; g += ${SG}u) {
      largest_own = max(largest_own, 127.0 * xs[row_at + g].x);
    }
#ifdef NORMED
    var squares = 0.0;
    for (var g = lane; g < groups; g += ${SG}u) {
      squares += xs[params.squares_at + row_at + g].x;
    }
    back *= inverseSqrt(subgroupAdd(squares) / f32(params.norm_k) + params.eps);
#endif
#endif
    // The power of two below the largest, within what has an inverse, becomes 2^8.
    let power = clamp(bitcast<u32>(subgroupMax(largest_own)) & 0x7f800000u, 0x08000000u, 0x7f000000u);
    if lane == 0u {
      factors[t] = vec2(bitcast<f32>(0x83000000u - power), bitcast<f32>(power) * back);
    }
  }
  workgroupBarrier();

#for i in 0..SG / T
#for j in 0..32 / T
  var sum${i}_${j}: Sums;
#end
#end
  // A lane brings a row of w, and half of a group of a token.
  let t_own = idx / 2u;
  let half = idx % 2u;
  let token_own = min(first_token + t_own, m - 1u);
  let w_to = idx * PITCH;
  let x_to = t_own * PITCH + half * 16u;
  for (var g = 0u; g < groups; g++) {
#ifdef QUANTISED
    let scales = group_scales(block, groups, g, idx);
    let elements = group_elements(block, groups, g, idx);
#for j in 0..4
    put_weights(w_to + ${j * 4}u, element_floats(elements.low[${j}]) * scales.x + scales.z);
    put_weights(w_to + ${j * 4 + 16}u, element_floats(elements.high[${j}]) * scales.y + upper_minimum(scales));
#end
#endif
#ifdef FLOATS
#for j in 0..8
    put_weights(w_to + ${j * 4}u, bitcast<vec4<f32>>(granule(block, groups * 8u, g * 8u + ${j}u, idx)));
#end
#endif
#ifdef TWO_BYTES
#for j in 0..4
    let q${j} = granule(block, groups * 4u, g * 4u + ${j}u, idx);
    put_weights(w_to + ${j * 8}u, vec4(two_floats(q${j}.x), two_floats(q${j}.y)));
    put_weights(w_to + ${j * 8 + 4}u, vec4(two_floats(q${j}.z), two_floats(q${j}.w)));
#end
#endif
#ifdef FLOAT_ROWS
#for j in 0..4
    let x${j} = x[token_own * (params.x_stride / 4u) + g * 8u + half * 4u + ${j}u];
    put_rows(x_to + ${j * 4}u, x${j} * factors[t_own].x);
#end
#else
    let q_row = xq[token_own * (params.x_stride / 16u) + g * 2u + half];
    let x_scale = xs[token_own * (params.x_stride / 32u) + g].x * factors[t_own].x;
#for j in 0..4
    put_rows(x_to + ${j * 4}u, vec4<f32>(unpack4xI8(q_row[${j}])) * x_scale);
#end
#endif
    workgroupBarrier();
#import units_multiply
    workgroupBarrier();
  }
#import units_store
  workgroupBarrier();

#ifdef GATED
  // 32 rows of gate, then the 32 rows of up that belong to them.
  if idx < 32u && first_token + idx < m {
    let token = first_token + idx;
    let at = token * params.y_stride + params.y_offset + first_row / 2u;
#for j in 0..8
    let gate${j} = sums_of(idx, ${j * 4}u) + shifts(token, first_row, ${j * 4}u);
    let up${j} = sums_of(idx, ${j * 4 + 32}u) + shifts(token, first_row, ${j * 4 + 32}u);
    let v${j} = gated(gate${j}, up${j});
#end
    let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
    yq[at / 16u] = q.low;
    yq[at / 16u + 1u] = q.high;
    ys[at / 32u] = q.scales;
  }
#endif
#ifdef TO_HIDDEN
  // A lane has a group of 32 of a token.
  let own = half * 32u;
  let n = first_row + own;
  if first_token + t_own < m && params.y_offset + n < params.y_stride {
    let at = (first_token + t_own) * params.y_stride + params.y_offset + n;
    var squares = 0.0;
#for j in 0..8
    let h${j} = joined(at + ${j * 4}u, n + ${j * 4}u, sums_of(t_own, own + ${j * 4}u));
    squares += dot(h${j}, h${j});
    let v${j} = h${j} * gains(n + ${j * 4}u);
#end
    let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
    yq[at / 16u] = q.low;
    yq[at / 16u + 1u] = q.high;
    ys[at / 32u] = q.scales;
    ys[params.to_squares_at + at / 32u] = vec2(squares, 0.0);
  }
#endif
#ifndef QUANTISES
  let n = first_row + idx;
  let has_bias = params.has_bias * m != 0u;
  let accumulates = params.accumulate * m != 0u;
  if n < params.n {
    var bias_n = 0.0;
    if has_bias {
      bias_n = biases[n];
    }
    for (var t = 0u; t < min(32u, m - first_token); t++) {
      let at = (first_token + t) * params.y_stride + params.y_offset + n;
      var value = sums[t * 64u + idx] * factors[t].y + bias_n;
      if accumulates {
        value += y[at];
      }
      y[at] = value;
    }
  }
#endif
}
