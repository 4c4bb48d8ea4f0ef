// y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n], with w in groups of 32 quantised weights and x quantised to i8.
//
// Each group is an exact integer dot product, scaled and added to one f32 accumulator in ascending order: the bits of
// y[t, n] depend on row n and token t alone, not on the tile (R rows of a lane, C tokens).
//
// A lane owns R rows of a block of 64. With subgroups the lanes load different activations and spread them by
// broadcasts of constant index; without, every lane reads them all.
// Grid: for each R * SG rows, for each C tokens (fastest). R * SG divides 64.
//
// NORMED: rows of x lack the factor of their RMS norm; it is made of the sums of squares that lie behind xs and is
// multiplied last. TO_HIDDEN: adds to y, the hidden state, and writes what the next norm's readers take: gain * y as
// signed bytes, and the sums of squares of y. GATED: w has rows of gate and of up in turns of 32; act(gate) * up goes out
// as signed bytes; with ADDED the delta of a token's LoRA joins gate and up before. For these two (QUANTISES) a lane owns P neighbouring rows, so that 32 lie in 32 / P neighbouring lanes.
//
// Defines: the weights' format and TEXELS (kernels/pack.rs); R; C, a power of two; U, groups of a pass, a power of two up to
// 4 that divides all; SG, SUBGROUP; GROUPED (without TEXELS); PAIRS multiplies two 4-bit weights at once, where dot4I8Packed
// is many instructions.
#import grid
#ifndef GROUPED
#import step
#endif
#import weight_planes
#import weights
#ifdef PAIRS
#import pairs
#else
#import dot8
#endif
#import matmul_params

#ifdef GROUPED
@group(0) @binding(0) var<storage, read> work: array<u32>; // see expert_pairs.wgsl
#else
@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#endif
@group(0) @binding(1) var<storage, read> xq: array<vec4<u32>>; // [m, x_stride / 16], 16 x i8
@group(0) @binding(2) var<storage, read> xs: array<vec2<f32>>; // [m, x_stride / 32], (scale, scale * sum of q)
#ifdef TO_HIDDEN
@group(0) @binding(6) var<storage, read> gain: array<f32>; // [n], of the norm that follows
#else
@group(0) @binding(6) var<storage, read> biases: array<f32>; // [n] (GROUPED: of all experts), read if has_bias
#endif
#ifdef ADDED
@group(0) @binding(7) var<storage, read> added: array<f32>; // [m, added_stride], in the order of w's rows
#endif
#ifndef GATED
@group(0) @binding(7) var<storage, read_write> y: array<f32>; // [m, y_stride]
#endif
#ifdef QUANTISES
@group(0) @binding(8) var<storage, read_write> yq: array<u32>; // [m, y_stride / 4] packed i8
@group(0) @binding(9) var<storage, read_write> ys: array<vec2<f32>>; // [m, y_stride / 32], then the sums of squares
#import quantise_lanes
#endif
#ifdef GATED
alias Gate = f32;
#import activation
#endif
@group(0) @binding(10) var<uniform> params: Params;

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
  let row_in_block = packed_row % 64u;
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
  let row_in_block = first_row % 64u;
  let bias_start = 0u;
#endif
#for r in 0..R
#ifdef QUANTISES
  let own${r} = ${r / P * P * SG + r % P}u + lane * ${P}u;
#else
  let own${r} = ${r * SG}u + lane;
#endif
  let row${r} = row_in_block + own${r};
#end
  // Never parameters alone: lavapipe compiles a small kernel anew whenever one that decides on control flow changes.
  let groups = min(params.groups, m * 0x10000u);
#ifndef TO_HIDDEN
  let has_bias = params.has_bias * m != 0u;
#endif
#ifndef QUANTISES
  let accumulates = params.accumulate * m != 0u;
#endif
#for r in 0..R
#for c in 0..C
  var acc${r}_${c} = 0.0;
#end
#end

#ifdef SUBGROUP
  // Load h of lane l takes granule i % (2 U) of token i / (2 U), and the scales of group j % U of token j / U, for
  // i = j = h * SG + l.
#for h in 0..(C * U * 2 + SG - 1) / SG
  let x_item${h} = (${h * SG}u + lane) % ${C * U * 2}u;
  let x_base${h} = x_row(min(first_token + x_item${h} / ${U * 2}u, m - 1u)) * (params.x_stride / 16u) + x_item${h} % ${U * 2}u;
#end
#for h in 0..(C * U + SG - 1) / SG
  let s_item${h} = (${h * SG}u + lane) % ${C * U}u;
  let s_base${h} = x_row(min(first_token + s_item${h} / ${U}u, m - 1u)) * (params.x_stride / 32u) + s_item${h} % ${U}u;
#end
#else
#for c in 0..C
  let s_base${c} = x_row(min(first_token + ${c}u, m - 1u)) * (params.x_stride / 32u);
#end
#endif

  for (var g = 0u; g < groups; g += ${U}u) {
#ifdef SUBGROUP
#for h in 0..(C * U * 2 + SG - 1) / SG
    let x_load${h} = xq[x_base${h} + g * 2u];
#ifdef PAIRS
    let x_even${h} = even_pairs(x_load${h});
    let x_odd${h} = odd_pairs(x_load${h});
#endif
#end
#for h in 0..(C * U + SG - 1) / SG
    let s_load${h} = xs[s_base${h} + g];
#end
#for c in 0..C
#for u in 0..U
#for half in 0..2
#let i = (c * U + u) * 2 + half
#ifdef PAIRS
    let xe${c}_${u}_${half} = subgroupBroadcast(x_even${i / SG}, ${i % SG}u);
    let xo${c}_${u}_${half} = subgroupBroadcast(x_odd${i / SG}, ${i % SG}u);
#else
    let x${c}_${u}_${half} = subgroupBroadcast(x_load${i / SG}, ${i % SG}u);
#endif
#end
#let j = c * U + u
    let sx${c}_${u} = subgroupBroadcast(s_load${j / SG}, ${j % SG}u);
#end
#end
#else
#for c in 0..C
#for u in 0..U
#for half in 0..2
    let x${c}_${u}_${half} = xq[(s_base${c} + g + ${u}u) * 2u + ${half}u];
#ifdef PAIRS
    let xe${c}_${u}_${half} = even_pairs(x${c}_${u}_${half});
    let xo${c}_${u}_${half} = odd_pairs(x${c}_${u}_${half});
#endif
#end
    let sx${c}_${u} = xs[s_base${c} + g + ${u}u];
#end
#end
#endif

#ifdef TWO_MINIMUMS
#for c in 0..C
#for u in 0..U
    let sums${c}_${u} = sx${c}_${u}.x * vec2(f32(dot_bytes(ONES, x${c}_${u}_0)), f32(dot_bytes(ONES, x${c}_${u}_1)));
#end
#end
#endif

#for r in 0..R
    {
#ifdef TEXELS
      let words = scale_texel(groups, g, row${r});
#endif
#for u in 0..U
      {
#ifdef TEXELS
      let scales = scales_in(words, g + ${u}u);
#else
      let scales = group_scales(block, groups, g + ${u}u, row${r});
#endif
#ifdef PAIRS
      let q = granule(block, groups, g + ${u}u, row${r});
      let low_even = q & PAIR_MASK;
      let low_odd = (q >> vec4(8u)) & PAIR_MASK;
      let high_even = (q >> vec4(4u)) & PAIR_MASK;
      let high_odd = (q >> vec4(12u)) & PAIR_MASK;
#else
      let w = group_elements(block, groups, g + ${u}u, row${r});
#endif
#for c in 0..C
      {
#ifdef TWO_MINIMUMS
        acc${r}_${c} = fma(scales.z, sums${c}_${u}.x, acc${r}_${c});
        acc${r}_${c} = fma(scales.w, sums${c}_${u}.y, acc${r}_${c});
#else
#ifdef HAS_MINIMUM
        acc${r}_${c} = fma(scales.z, sx${c}_${u}.y, acc${r}_${c});
#endif
#endif
#ifdef PAIRS
        let dot = dot_pairs(low_even, xe${c}_${u}_0, low_odd, xo${c}_${u}_0)
          + dot_pairs(high_even, xe${c}_${u}_1, high_odd, xo${c}_${u}_1);
        acc${r}_${c} = fma(scales.x, sx${c}_${u}.x * f32(dot), acc${r}_${c});
#else
#ifdef TWO_SCALES
        acc${r}_${c} = fma(scales.x, sx${c}_${u}.x * f32(dot_bytes(w.low, x${c}_${u}_0)), acc${r}_${c});
        acc${r}_${c} = fma(scales.y, sx${c}_${u}.x * f32(dot_bytes(w.high, x${c}_${u}_1)), acc${r}_${c});
#else
        let dot = dot_bytes(w.low, x${c}_${u}_0) + dot_bytes(w.high, x${c}_${u}_1);
        acc${r}_${c} = fma(scales.x, sx${c}_${u}.x * f32(dot), acc${r}_${c});
#endif
#endif
      }
#end
      }
#end
    }
#end
  }

#for c in 0..C
#ifdef NORMED
  var squares${c} = 0.0;
  let squares_from${c} = params.squares_at + min(first_token + ${c}u, m - 1u) * (params.x_stride / 32u);
  for (var g = lane; g < groups; g += ${SG}u) {
    squares${c} += xs[squares_from${c} + g].x;
  }
  let factor${c} = inverseSqrt(subgroupAdd(squares${c}) / f32(params.norm_k) + params.eps);
#for r in 0..R
  acc${r}_${c} *= factor${c};
#end
#endif
#end

#ifdef GATED
#for r in 0..R
  var bias${r} = 0.0;
  if has_bias {
    bias${r} = biases[bias_start + first_row + own${r}];
  }
#end
#import store_gated
#endif
#ifdef TO_HIDDEN
#import store_hidden
#endif
#ifndef QUANTISES
#for r in 0..R
  {
    let n = first_row + own${r};
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
#endif
}
