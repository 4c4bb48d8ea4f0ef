// Between the MLP's products: y[t, i] = act(gate[t, i]) * up[t, i] from one row that holds gate and, behind it, up
// (SwiGLU, GeGLU; gpt_oss bounds both and adds 1 to up); with PLAIN y[t, i] = act(x[t, i]). As f32 or quantised. A lane takes a group of 32.
// Grid: ceil(num_tokens * groups / SG) workgroups.
//
// Defines: SILU, GELU, GELU_TANH, RELU or CLAMPED_SWIGLU (not with PLAIN); PLAIN; I8 (quantised output); SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step
#ifdef I8
#import quantise
#endif

struct Params {
  k: u32,         // elements of gate, a multiple of 4
  x_stride: u32,  // elements from row to row of x
  up_offset: u32, // first element of up in a row, a multiple of 4
  y_stride: u32,  // k rounded up to 32
  rows_per_token: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, x_stride / 4]
#ifdef I8
@group(0) @binding(2) var<storage, read_write> yq: array<vec4<u32>>; // [num_tokens, y_stride / 16]
@group(0) @binding(3) var<storage, read_write> ys: array<vec2<f32>>; // [num_tokens, y_stride / 32]
#else
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>; // [num_tokens, y_stride / 4]
#endif
@group(0) @binding(4) var<uniform> params: Params;

alias Gate = vec4<f32>;
#import activation

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let groups = params.y_stride / 32u;
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  if item >= num_tokens() * params.rows_per_token * groups {
    return;
  }
  let g = item % groups;
  let gate_at = (item / groups) * (params.x_stride / 4u) + g * 8u;
  let up_at = gate_at + params.up_offset / 4u;
#for j in 0..8
  var v${j} = vec4(0.0);
  if g * 32u + ${j * 4}u < params.k {
#ifdef PLAIN
    v${j} = act(x[up_at + ${j}u]);
#else
    v${j} = gated(x[gate_at + ${j}u], x[up_at + ${j}u]);
#endif
  }
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
