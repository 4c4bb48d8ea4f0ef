// f32 rows to groups of 32 signed bytes with scales. A lane takes a group.
// Grid: ceil(num_tokens * groups / SG) workgroups.
//
// Defines: SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step
#import quantise

struct Params {
  stride: u32, // elements from row to row, a multiple of 32
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, stride / 4]
@group(0) @binding(2) var<storage, read_write> yq: array<vec4<u32>>; // [num_tokens, stride / 16]
@group(0) @binding(3) var<storage, read_write> ys: array<vec2<f32>>; // [num_tokens, stride / 32]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  if item >= num_tokens() * (params.stride / 32u) {
    return;
  }
#for j in 0..8
  let v${j} = x[item * 8u + ${j}u];
#end
  let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
  yq[item * 2u] = q.low;
  yq[item * 2u + 1u] = q.high;
  ys[item] = q.scales;
}
