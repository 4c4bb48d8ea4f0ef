// f32 activations become i8 with a scale for each 32.
//
// Grid: a lane for each (token, group of 32), WG lanes in a workgroup.
//
// Defines: WG.
#import grid
#import step
#import quantise

struct Params {
  groups: u32, // of 32 in a row, padding included
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, groups * 8], padding is zero
@group(0) @binding(2) var<storage, read_write> yq: array<vec4<u32>>; // [num_tokens, groups * 2]
@group(0) @binding(3) var<storage, read_write> ys: array<vec2<f32>>; // [num_tokens, groups]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let idx = linear_workgroup(group_id) * ${WG}u + lane;
  if idx >= num_tokens() * params.groups {
    return;
  }
#for i in 0..8
  let v${i} = x[idx * 8u + ${i}u];
#end
  let q = quantise(v0, v1, v2, v3, v4, v5, v6, v7);
  yq[idx * 2u] = q.low;
  yq[idx * 2u + 1u] = q.high;
  ys[idx] = q.scale;
}
