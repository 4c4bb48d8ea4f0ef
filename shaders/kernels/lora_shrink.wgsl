// h[t, j] = sum over k of a[slot, j, k] * x[t, k]: the first product of a LoRA (arXiv 2106.09685), for the tokens of each
// tile, which all have the adapter in one slot (as in S-LoRA, arXiv 2311.03285).
//
// A lane takes whole groups of 32, so that the order of the sum depends on the device's lanes alone. A workgroup has four
// rows of a projection and C tokens. Rows beyond the adapter's rank, and of projections that it does not change, are
// neither computed nor written.
// Grid: for each four rows of a slot, for each tile (fastest).
//
// Defines: C, 1 or 4; I8 (quantised x), NORMED (rows of x lack the factor of their RMS norm, see matmul_i8.wgsl); SG, SUBGROUP.
#import grid
#import step
#ifndef SUBGROUP
#import sum_of_lanes
#endif

struct Params {
  groups: u32,     // of 32, along k
  rows: u32,       // of a slot, and from token to token of h
  rank: u32,       // rows of a projection in a slot, a multiple of 4
  first_part: u32, // bit of the first projection
  squares_at: u32, // NORMED: first sum of squares in xs
  norm_k: u32,     // NORMED: elements of a row, without padding
  eps: f32,        // NORMED
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>; // [slots, rows, groups * 8]
#ifdef I8
@group(0) @binding(2) var<storage, read> xq: array<vec4<u32>>; // [num_tokens, groups * 2], 16 x i8
@group(0) @binding(3) var<storage, read> xs: array<vec2<f32>>; // [num_tokens, groups], (scale, scale * sum of q)
#else
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>; // [num_tokens, groups * 8]
#endif
@group(0) @binding(4) var<storage, read_write> h: array<f32>; // [num_tokens, rows]
@group(0) @binding(5) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  let num_tiles = num_lora_tiles();
  if num_tiles == 0u {
    return;
  }
  let workgroup = linear_workgroup(group_id);
  let tile = workgroup % num_tiles;
  let row = (workgroup / num_tiles) * 4u;
  let count = lora_tile_word(tile, 1u);
  let shape = lora_tile_word(tile, 3u);
  let has_part = (shape >> (16u + params.first_part + row / params.rank)) & 1u;
  if row >= params.rows || row % params.rank >= (shape & 0xffffu) || has_part == 0u {
    return;
  }
  // Never parameters alone: lavapipe compiles a small kernel anew whenever one that decides on control flow changes.
  let groups = min(params.groups, count * 0x10000u);
#for r in 0..4
  let a_base${r} = (lora_tile_word(tile, 2u) * params.rows + row + ${r}u) * groups * 8u;
#end
#for c in 0..C
  let token${c} = lora_tile_word(tile, 0u) + min(${c}u, count - 1u);
#for r in 0..4
  var acc${r}_${c} = 0.0;
#end
#end
  for (var g = lane; g < groups; g += ${SG}u) {
#ifdef I8
#for c in 0..C
#for half in 0..2
    let q${c}_${half} = xq[(token${c} * groups + g) * 2u + ${half}u];
#end
    let scale${c} = xs[token${c} * groups + g].x;
#for r in 0..4
    var part${r}_${c} = 0.0;
#end
#end
#endif
#for half in 0..2
#for j in 0..4
    {
#for r in 0..4
      let a${r} = a[a_base${r} + g * 8u + ${half * 4 + j}u];
#end
#for c in 0..C
#ifdef I8
      let x${c} = vec4<f32>(unpack4xI8(q${c}_${half}[${j}u]));
#for r in 0..4
      part${r}_${c} = fma(a${r}.x, x${c}.x, part${r}_${c});
      part${r}_${c} = fma(a${r}.y, x${c}.y, part${r}_${c});
      part${r}_${c} = fma(a${r}.z, x${c}.z, part${r}_${c});
      part${r}_${c} = fma(a${r}.w, x${c}.w, part${r}_${c});
#end
#else
      let x${c} = x[(token${c} * groups + g) * 8u + ${half * 4 + j}u];
#for r in 0..4
      acc${r}_${c} = fma(a${r}.x, x${c}.x, acc${r}_${c});
      acc${r}_${c} = fma(a${r}.y, x${c}.y, acc${r}_${c});
      acc${r}_${c} = fma(a${r}.z, x${c}.z, acc${r}_${c});
      acc${r}_${c} = fma(a${r}.w, x${c}.w, acc${r}_${c});
#end
#endif
#end
    }
#end
#end
#ifdef I8
#for c in 0..C
#for r in 0..4
    acc${r}_${c} = fma(scale${c}, part${r}_${c}, acc${r}_${c});
#end
#end
#endif
  }
#for c in 0..C
#ifdef NORMED
  var squares${c} = 0.0;
  for (var g = lane; g < groups; g += ${SG}u) {
    squares${c} += xs[params.squares_at + token${c} * groups + g].x;
  }
  let factor${c} = inverseSqrt(subgroupAdd(squares${c}) / f32(params.norm_k) + params.eps);
#else
  let factor${c} = 1.0;
#endif
#for r in 0..4
#ifdef SUBGROUP
  let total${r}_${c} = subgroupAdd(acc${r}_${c}) * factor${c};
#else
  let total${r}_${c} = sum_of_lanes(lane, acc${r}_${c}) * factor${c};
#endif
#end
  if lane == 0u && ${c}u < count {
#for r in 0..4
    h[token${c} * params.rows + row + ${r}u] = total${r}_${c};
#end
  }
#end
}
