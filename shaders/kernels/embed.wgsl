// x[t, k] = w[token_id(t), k]: rows of the packed embedding table, dequantised as the CPU does it.
//
// A table that is cut into slices takes a dispatch for each; a token belongs to one of them.
// Grid: a lane for each (token, group of 32), WG lanes in a workgroup.
//
// Defines: the weights' format (kernels/pack.rs); WG.
#import grid
#import step
#import weights

struct Params {
  first_row: u32, // of this slice
  num_rows: u32,
  groups: u32,    // of 32, along k
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> wq: array<vec4<u32>>; // [num_rows / 64, granules, 64]
#ifdef HAS_HIGH
@group(0) @binding(2) var<storage, read> wh: array<HighBits>; // [num_rows / 64, groups, 64]
#endif
#ifdef QUANTISED
@group(0) @binding(3) var<storage, read> ws: array<Scales>; // [num_rows / 64, quads, 64, ..]
#endif
@group(0) @binding(4) var<storage, read_write> x: array<vec4<f32>>; // [num_tokens, groups * 8]
@group(0) @binding(5) var<uniform> params: Params;

#ifdef QUANTISED
fn floats_of(word: u32) -> vec4<f32> {
  return vec4<f32>(unpack4xI8(word));
}
#endif

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let idx = linear_workgroup(group_id) * ${WG}u + lane;
  let groups = params.groups;
  if idx >= num_tokens() * groups {
    return;
  }
  let id = token_id(idx / groups);
  if id < params.first_row || id - params.first_row >= params.num_rows {
    return;
  }
  let block = (id - params.first_row) / 64u;
  let row = (id - params.first_row) % 64u;
  let g = idx % groups;
  let to = idx * 8u;
#ifdef QUANTISED
  let elements = group_elements(block, groups, g, row);
  let scales = group_scales(block, groups, g, row);
#for i in 0..4
  x[to + ${i}u] = scales.x * floats_of(elements.low[${i}]) + scales.z;
  x[to + ${i + 4}u] = scales.y * floats_of(elements.high[${i}]) + scales.z;
#end
#else
#ifdef TWO_BYTES
  let at = (block * groups + g) * 256u + row;
#for i in 0..4
  let q${i} = wq[at + ${i * 64}u];
  x[to + ${2 * i}u] = vec4(two_floats(q${i}.x), two_floats(q${i}.y));
  x[to + ${2 * i + 1}u] = vec4(two_floats(q${i}.z), two_floats(q${i}.w));
#end
#else
  let at = (block * groups + g) * 512u + row;
#for i in 0..8
  x[to + ${i}u] = bitcast<vec4<f32>>(wq[at + ${i * 64}u]);
#end
#endif
#endif
}
