// y[t, n] (+)= sum over k of x[t, k] * w[n, k] + bias[n], with w in groups of 32 quantised weights and x quantised to i8.
//
// Each group is an exact integer dot product, scaled and added to one f32 accumulator in ascending order: the bits of
// y[t, n] depend on row n and token t alone, not on the tile (R rows of a lane, C tokens).
//
// A lane owns R rows of a block of 64. With subgroups the lanes load different activations and spread them by
// broadcasts of constant index; without, every lane reads them all.
// Grid: for each R * SG rows, for each C tokens (fastest). R * SG divides 64.
//
// Defines: the weights' format (kernels/pack.rs); R; C, a power of two; SG, SUBGROUP; GROUPED; PAIRS multiplies two 4-bit weights
// at once, where dot4I8Packed is many instructions.
#import grid
#ifndef GROUPED
#import step
#endif
#import weights
#ifdef PAIRS
#import pairs
#else
#import dot8
#endif

struct Params {
  n: u32,             // rows of w in this slice
  groups: u32,        // of 32, along k
  x_stride: u32,      // elements from row to row of x
  y_stride: u32,      // elements from row to row of y
  y_offset: u32,
  counts_logits: u32, // 1: x has a row per logit row; 0: per token
  accumulate: u32,    // 1: adds to y
  has_bias: u32,
  // GROUPED: weights of experts one after the other, each padded to whole blocks of 64 rows.
  expert_rows: u32,   // padded rows of an expert
  first_row: u32,     // of this slice, counted over experts
  num_rows: u32,      // of this slice
  slots: u32,         // where the pairs begin in work
  pairs_per_row: u32, // pairs that share a row of x
}

#ifdef GROUPED
@group(0) @binding(0) var<storage, read> work: array<u32>; // see expert_pairs.wgsl
#else
@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#endif
@group(0) @binding(1) var<storage, read> xq: array<vec4<u32>>; // [m, x_stride / 16], 16 x i8
@group(0) @binding(2) var<storage, read> xs: array<vec2<f32>>; // [m, x_stride / 32], (scale, scale * sum of q)
@group(0) @binding(3) var<storage, read> wq: array<Granule>; // [n / 64, granules, 64]
#ifdef HAS_HIGH
@group(0) @binding(4) var<storage, read> wh: array<HighBits>; // [n / 64, groups, 64]
#endif
@group(0) @binding(5) var<storage, read> ws: array<Scales>; // [n / 64, quads, 64, ..]
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
  let row = first_row % 64u + lane;
  let bias_start = 0u;
#endif
  let groups = params.groups;
#for r in 0..R
#for c in 0..C
  var acc${r}_${c} = 0.0;
#end
#end

#ifdef SUBGROUP
  // Load h of lane l takes granule i % 2 of token i / 2, and the scales of token j, for i = j = h * SG + l.
#for h in 0..(C * 2 + SG - 1) / SG
  let x_item${h} = (${h * SG}u + lane) % ${C * 2}u;
  let x_base${h} = x_row(min(first_token + x_item${h} / 2u, m - 1u)) * (params.x_stride / 16u) + x_item${h} % 2u;
#end
#for h in 0..(C + SG - 1) / SG
  let s_base${h} = x_row(min(first_token + (${h * SG}u + lane) % ${C}u, m - 1u)) * (params.x_stride / 32u);
#end
#else
#for c in 0..C
  let s_base${c} = x_row(min(first_token + ${c}u, m - 1u)) * (params.x_stride / 32u);
#end
#endif

  for (var g = 0u; g < groups; g++) {
#ifdef SUBGROUP
#for h in 0..(C * 2 + SG - 1) / SG
    let x_load${h} = xq[x_base${h} + g * 2u];
#ifdef PAIRS
    let x_even${h} = even_pairs(x_load${h});
    let x_odd${h} = odd_pairs(x_load${h});
#endif
#end
#for h in 0..(C + SG - 1) / SG
    let s_load${h} = xs[s_base${h} + g];
#end
#for c in 0..C
#for half in 0..2
#let i = c * 2 + half
#ifdef PAIRS
    let xe${c}_${half} = subgroupBroadcast(x_even${i / SG}, ${i % SG}u);
    let xo${c}_${half} = subgroupBroadcast(x_odd${i / SG}, ${i % SG}u);
#else
    let x${c}_${half} = subgroupBroadcast(x_load${i / SG}, ${i % SG}u);
#endif
#end
    let sx${c} = subgroupBroadcast(s_load${c / SG}, ${c % SG}u);
#end
#else
#for c in 0..C
#for half in 0..2
    let x${c}_${half} = xq[(s_base${c} + g) * 2u + ${half}u];
#ifdef PAIRS
    let xe${c}_${half} = even_pairs(x${c}_${half});
    let xo${c}_${half} = odd_pairs(x${c}_${half});
#endif
#end
    let sx${c} = xs[s_base${c} + g];
#end
#endif

#ifdef TWO_MINIMUMS
#for c in 0..C
    let sums${c} = sx${c}.x * vec2(f32(dot_bytes(ONES, x${c}_0)), f32(dot_bytes(ONES, x${c}_1)));
#end
#endif

#for r in 0..R
    {
      let scales = group_scales(block, groups, g, row + ${r * SG}u);
#ifdef PAIRS
      let q = wq[(block * groups + g) * 64u + row + ${r * SG}u];
      let low_even = q & PAIR_MASK;
      let low_odd = (q >> vec4(8u)) & PAIR_MASK;
      let high_even = (q >> vec4(4u)) & PAIR_MASK;
      let high_odd = (q >> vec4(12u)) & PAIR_MASK;
#else
      let w = group_elements(block, groups, g, row + ${r * SG}u);
#endif
#for c in 0..C
      {
#ifdef TWO_MINIMUMS
        acc${r}_${c} = fma(scales.z, sums${c}.x, acc${r}_${c});
        acc${r}_${c} = fma(scales.w, sums${c}.y, acc${r}_${c});
#else
#ifdef HAS_MINIMUM
        acc${r}_${c} = fma(scales.z, sx${c}.y, acc${r}_${c});
#endif
#endif
#ifdef PAIRS
        let dot = dot_pairs(low_even, xe${c}_0, low_odd, xo${c}_0) + dot_pairs(high_even, xe${c}_1, high_odd, xo${c}_1);
        acc${r}_${c} = fma(scales.x, sx${c}.x * f32(dot), acc${r}_${c});
#else
#ifdef TWO_SCALES
        acc${r}_${c} = fma(scales.x, sx${c}.x * f32(dot_bytes(w.low, x${c}_0)), acc${r}_${c});
        acc${r}_${c} = fma(scales.y, sx${c}.x * f32(dot_bytes(w.high, x${c}_1)), acc${r}_${c});
#else
        let dot = dot_bytes(w.low, x${c}_0) + dot_bytes(w.high, x${c}_1);
        acc${r}_${c} = fma(scales.x, sx${c}.x * f32(dot), acc${r}_${c});
#endif
#endif
      }
#end
    }
#end
  }

#for r in 0..R
  {
    let n = first_row + ${r * SG}u + lane;
    if n < params.n {
      var bias_n = 0.0;
      if params.has_bias == 1u {
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
        if params.accumulate == 1u {
          value += y[at];
        }
        y[at] = value;
      }
#end
    }
  }
#end
}
