// y[t, j] = x[t, order[j]], as f32 or quantised to i8: the inputs of a product in the order that its columns have.
// A lane takes a group of 32.
// Grid: ceil(rows * groups / SG) workgroups.
//
// Defines: I8 quantises; SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step
#ifdef I8
#import quantise
#endif

struct Params {
  stride: u32,        // elements from row to row, a multiple of 32
  counts_logits: u32, // 1: x has a row per logit row; 0: per token
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [rows, stride]
@group(0) @binding(2) var<storage, read> order: array<vec4<u32>>; // [stride / 4]
#ifdef I8
@group(0) @binding(3) var<storage, read_write> yq: array<vec4<u32>>; // [rows, stride / 16]
@group(0) @binding(4) var<storage, read_write> ys: array<vec2<f32>>; // [rows, stride / 32]
#else
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>; // [rows, stride / 4]
#endif
@group(0) @binding(5) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let m = select(num_tokens(), num_logits(), params.counts_logits == 1u);
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  let groups = params.stride / 32u;
  if item >= m * groups {
    return;
  }
  let row = (item / groups) * params.stride;
  let first = (item % groups) * 8u;
#for j in 0..8
  let o${j} = order[first + ${j}u];
  let v${j} = vec4(x[row + o${j}.x], x[row + o${j}.y], x[row + o${j}.z], x[row + o${j}.w]);
#end
#ifdef I8
  let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
  yq[item * 2u] = q.low;
  yq[item * 2u + 1u] = q.high;
  ys[item] = q.scales;
#else
#for j in 0..8
  y[item * 8u + ${j}u] = v${j};
#end
#endif
}
