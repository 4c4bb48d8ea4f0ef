// y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n], with f32 activations and weights of any format.
//
// One f32 accumulator per output, k ascending: the bits of y[t, n] depend on row n and token t alone, not on the tile
// (R rows of a lane, C tokens). Quantised weights are dequantised as the CPU does it.
//
// Lanes, rows and grid as in matmul_i8.wgsl.
//
// Defines: the weights' format and TEXELS (kernels/pack.rs); R; C, a power of two; SG, SUBGROUP; GROUPED (without TEXELS).
#import grid
#ifndef GROUPED
#import step
#endif
#import weight_planes
#import weights
#import matmul_params

#ifdef GROUPED
@group(0) @binding(0) var<storage, read> work: array<u32>; // see expert_pairs.wgsl
#else
@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#endif
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [m, x_stride / 4]
@group(0) @binding(6) var<storage, read> biases: array<f32>; // [n] (GROUPED: of all experts), read if has_bias
@group(0) @binding(7) var<storage, read_write> y: array<f32>; // [m, y_stride]
@group(0) @binding(8) var<uniform> params: Params;

#ifdef GROUPED
#import expert_tile
#else
fn x_row(token: u32) -> u32 {
  return token;
}
#endif

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
#ifdef GROUPED
  // Slots first_token..m stand for tokens, rows first_row.. of the tile's expert for rows.
  let num_tiles = num_expert_tiles();
  if num_tiles == 0u {
    return;
  }
  let workgroup = linear_workgroup(group_id);
  let first_row = (workgroup / num_tiles) * ${R * SG}u;
  let tile = expert_tile(workgroup % num_tiles);
  let first_token = tile.y;
  let m = tile.y + tile.z;
  let packed_row = tile.x * params.expert_rows + first_row;
  if first_row >= params.n || packed_row < params.first_row || packed_row >= params.first_row + params.num_rows {
    return;
  }
  let block = (packed_row - params.first_row) / 64u;
  let row = packed_row % 64u + lane;
  let bias_start = tile.x * params.n;
#else
  let m = select(num_tokens(), num_logits(), params.counts_logits == 1u);
  if m == 0u {
    return;
  }
  let num_tiles = (m + ${C - 1}u) / ${C}u;
  let workgroup = linear_workgroup(group_id);
  let first_row = (workgroup / num_tiles) * ${R * SG}u;
  let first_token = (workgroup % num_tiles) * ${C}u;
  if first_row >= params.n {
    return;
  }
  let block = first_row / 64u;
#ifdef TEXELS
  open_planes(block);
#endif
  let row = first_row % 64u + lane;
  let bias_start = 0u;
#endif
  // Never parameters alone: lavapipe compiles a small kernel anew whenever one that decides on control flow changes.
  let groups = min(params.groups, m * 0x10000u);
  let has_bias = params.has_bias * m != 0u;
  let accumulates = params.accumulate * m != 0u;
#for r in 0..R
#for c in 0..C
  var acc${r}_${c} = 0.0;
#end
#end

#ifdef SUBGROUP
  // Load h of lane l takes elements 4 * (i % 8).. of token i / 8, for i = h * SG + l.
#for h in 0..(C * 8 + SG - 1) / SG
  let x_item${h} = (${h * SG}u + lane) % ${C * 8}u;
  let x_base${h} = x_row(min(first_token + x_item${h} / 8u, m - 1u)) * (params.x_stride / 4u) + x_item${h} % 8u;
#end
#else
#for c in 0..C
  let x_base${c} = x_row(min(first_token + ${c}u, m - 1u)) * (params.x_stride / 4u);
#end
#endif

  for (var g = 0u; g < groups; g++) {
#ifdef SUBGROUP
#for h in 0..(C * 8 + SG - 1) / SG
    let x_load${h} = x[x_base${h} + g * 8u];
#end
#endif
#ifdef QUANTISED
#for r in 0..R
    let scales${r} = group_scales(block, groups, g, row + ${r * SG}u);
    let elements${r} = group_elements(block, groups, g, row + ${r * SG}u);
#end
#endif
#for j in 0..8
#for c in 0..C
#ifdef SUBGROUP
#let i = c * 8 + j
    let x${c}_${j} = subgroupBroadcast(x_load${i / SG}, ${i % SG}u);
#else
    let x${c}_${j} = x[x_base${c} + g * 8u + ${j}u];
#endif
#end
#for r in 0..R
#ifdef QUANTISED
#if j < 4
    let w${r}_${j} = element_floats(elements${r}.low[${j}]) * scales${r}.x + scales${r}.z;
#else
    let w${r}_${j} = element_floats(elements${r}.high[${j - 4}]) * scales${r}.y + upper_minimum(scales${r});
#endif
#endif
#ifdef FLOATS
    let w${r}_${j} = bitcast<vec4<f32>>(granule(block, groups * 8u, g * 8u + ${j}u, row + ${r * SG}u));
#endif
#ifdef TWO_BYTES
#if j % 2 == 0
    let q${r}_${j} = granule(block, groups * 4u, g * 4u + ${j / 2}u, row + ${r * SG}u);
    let w${r}_${j} = vec4(two_floats(q${r}_${j}.x), two_floats(q${r}_${j}.y));
#else
    let w${r}_${j} = vec4(two_floats(q${r}_${j - 1}.z), two_floats(q${r}_${j - 1}.w));
#endif
#endif
#for c in 0..C
    acc${r}_${c} = fma(w${r}_${j}.x, x${c}_${j}.x, acc${r}_${c});
    acc${r}_${c} = fma(w${r}_${j}.y, x${c}_${j}.y, acc${r}_${c});
    acc${r}_${c} = fma(w${r}_${j}.z, x${c}_${j}.z, acc${r}_${c});
    acc${r}_${c} = fma(w${r}_${j}.w, x${c}_${j}.w, acc${r}_${c});
#end
#end
#end
  }

#for r in 0..R
  {
    let n = first_row + ${r * SG}u + lane;
    if n < params.n {
      var bias_n = 0.0;
      if has_bias {
        bias_n = biases[bias_start + n];
      }
#for c in 0..C
      if first_token + ${c}u < m {
#ifdef GROUPED
        let at = pair_of_slot(first_token + ${c}u) * params.y_stride + params.y_offset + n;
#else
        let at = (first_token + ${c}u) * params.y_stride + params.y_offset + n;
#endif
        var value = acc${r}_${c} + bias_n;
        if accumulates {
          value += y[at];
        }
        y[at] = value;
      }
#end
    }
  }
#end
}
