// y[t, n] += sum over j of b[slot, j, n] * h[t, j]: the second product of a LoRA, for the tokens of each tile, which all have the
// adapter in one slot; b has been multiplied by the adapter's scale. A lane has four neighbouring outputs of a
// projection; j ascends. Outputs of projections that the adapter does not change stay as they are.
// INTERLEAVED: gate and up, in turns of 32 outputs, are stored instead of added, with zeros for what is not changed: what
// matmul_i8.wgsl adds with ADDED.
// Grid: for each SG quads of outputs, for each tile (fastest).
//
// Defines: C, 1 or 4; INTERLEAVED; SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step

struct Params {
  quads: u32,      // of all projections
  quads1: u32,     // where those of the second begin, and of the third; quads where there is none
  quads2: u32,
  size0: u32,      // outputs of each projection
  size1: u32,
  size2: u32,
  at0: u32,        // where they begin in a row of y
  at1: u32,
  at2: u32,
  rank: u32,       // rows of a projection in a slot
  rows: u32,       // of a slot, and from token to token of h
  y_stride: u32,
  first_part: u32, // bit of the first projection
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>; // [slots, rank, quads]
@group(0) @binding(2) var<storage, read> h: array<f32>; // [num_tokens, rows]
@group(0) @binding(3) var<storage, read_write> y: array<f32>; // [num_tokens, y_stride]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let num_tiles = num_lora_tiles();
  if num_tiles == 0u {
    return;
  }
  let workgroup = linear_workgroup(group_id);
  let tile = workgroup % num_tiles;
  let quad = (workgroup / num_tiles) * ${SG}u + lane;
  if quad >= params.quads {
    return;
  }
  let is_second = quad >= params.quads1;
  let is_third = quad >= params.quads2;
  let part = u32(is_second) + u32(is_third);
  let first = select(select(0u, params.quads1, is_second), params.quads2, is_third);
  let size = select(select(params.size0, params.size1, is_second), params.size2, is_third);
  let at = select(select(params.at0, params.at1, is_second), params.at2, is_third);
  let count = lora_tile_word(tile, 1u);
  let shape = lora_tile_word(tile, 3u);
  let has_part = ((shape >> (16u + params.first_part + part)) & 1u) == 1u;
#ifndef INTERLEAVED
  if !has_part {
    return;
  }
#endif
  let rank = select(0u, shape & 0xffffu, has_part);
  let b_base = lora_tile_word(tile, 2u) * params.rank * params.quads + quad;
#for c in 0..C
  let token${c} = lora_tile_word(tile, 0u) + min(${c}u, count - 1u);
  let h_base${c} = token${c} * params.rows + part * params.rank;
  var acc${c} = vec4(0.0);
#end
  for (var j = 0u; j < rank; j++) {
    let weights = b[b_base + j * params.quads];
#for c in 0..C
    acc${c} = fma(vec4(h[h_base${c} + j]), weights, acc${c});
#end
  }
  let n = (quad - first) * 4u;
#ifdef INTERLEAVED
  let to = at + (n / 32u) * 64u + part * 32u + n % 32u;
#else
  let to = at + n;
#endif
#for c in 0..C
  if ${c}u < count {
#for e in 0..4
    if n + ${e}u < size {
      let to${e} = token${c} * params.y_stride + to + ${e}u;
#ifdef INTERLEAVED
      y[to${e}] = acc${c}[${e}u];
#else
      y[to${e}] += acc${c}[${e}u];
#endif
    }
#end
  }
#end
}
