// x[t] = scale * row token_id(t) of the embedding table, dequantised; tokens outside of this slice of the table are left
// alone. With POSITIONS: x[t] += row position(t) of the table of positions.
// A lane takes a group of 32.
// Grid: ceil(num_tokens * groups / SG) workgroups.
//
// Defines: POSITIONS; the table's format and TEXELS (kernels/pack.rs); SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step
#import weight_planes
#import weights

struct Params {
  first_row: u32, // of the table, in this slice
  num_rows: u32,
  stride: u32,    // elements of a row of x, k rounded up to 32
  scale: f32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(7) var<storage, read_write> x: array<vec4<f32>>; // [num_tokens, stride / 4]
@group(0) @binding(8) var<uniform> params: Params;

fn put(at: u32, value: vec4<f32>) {
#ifdef POSITIONS
  x[at] += value;
#else
  x[at] = params.scale * value;
#endif
}

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let groups = params.stride / 32u;
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  if item >= num_tokens() * groups {
    return;
  }
#ifdef POSITIONS
  let id = position(item / groups);
#else
  let id = token_id(item / groups);
#endif
  if id < params.first_row || id - params.first_row >= params.num_rows {
    return;
  }
  let block = (id - params.first_row) / 64u;
#ifdef TEXELS
  open_planes(block);
#endif
  let row = (id - params.first_row) % 64u;
  let g = item % groups;
#ifdef QUANTISED
  let scales = group_scales(block, groups, g, row);
  let elements = group_elements(block, groups, g, row);
#for j in 0..4
  put(item * 8u + ${j}u, element_floats(elements.low[${j}]) * scales.x + scales.z);
  put(item * 8u + ${j + 4}u, element_floats(elements.high[${j}]) * scales.y + upper_minimum(scales));
#end
#endif
#ifdef FLOATS
#for j in 0..8
  put(item * 8u + ${j}u, bitcast<vec4<f32>>(granule(block, groups * 8u, g * 8u + ${j}u, row)));
#end
#endif
#ifdef TWO_BYTES
#for j in 0..4
  let q${j} = granule(block, groups * 4u, g * 4u + ${j}u, row);
  put(item * 8u + ${j * 2}u, vec4(two_floats(q${j}.x), two_floats(q${j}.y)));
  put(item * 8u + ${j * 2 + 1}u, vec4(two_floats(q${j}.z), two_floats(q${j}.w)));
#end
#endif
}
