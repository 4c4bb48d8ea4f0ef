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

#ifdef SILU
fn act(x: vec4<f32>) -> vec4<f32> {
  // exp of more than 88 overflows, and the quotient is zero long before.
  return x / (vec4(1.0) + exp(min(-x, vec4(80.0))));
}
#endif
#ifdef GELU
/// x / 2 * erfc(-x / sqrt(2)); erfc by the Chebyshev fit of Numerical Recipes 6.2, relative error below 1.2e-7.
fn act(x: vec4<f32>) -> vec4<f32> {
  let u = x * -0.70710678;
  let z = abs(u);
  let t = vec4(1.0) / (vec4(1.0) + 0.5 * z);
  var p = t * 0.17087277 + vec4(-0.82215223);
  p = t * p + vec4(1.48851587);
  p = t * p + vec4(-1.13520398);
  p = t * p + vec4(0.27886807);
  p = t * p + vec4(-0.18628806);
  p = t * p + vec4(0.09678418);
  p = t * p + vec4(0.37409196);
  p = t * p + vec4(1.00002368);
  p = t * p + vec4(-1.26551223);
  let tail = t * exp(max(p - z * z, vec4(-80.0)));
  return 0.5 * x * select(tail, vec4(2.0) - tail, u < vec4(0.0));
}
#endif
#ifdef GELU_TANH
fn act(x: vec4<f32>) -> vec4<f32> {
  // tanh(u) = 1 - 2 / (exp(2u) + 1), without overflow.
  let u = 0.7978845608 * (x + 0.044715 * x * x * x);
  let e = exp(clamp(2.0 * u, vec4(-80.0), vec4(80.0)));
  return x * (vec4(1.0) - vec4(1.0) / (e + vec4(1.0)));
}
#endif
#ifdef RELU
fn act(x: vec4<f32>) -> vec4<f32> {
  return max(x, vec4(0.0));
}
#endif

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
#ifdef CLAMPED_SWIGLU
    let gate${j} = min(x[gate_at + ${j}u], vec4(7.0));
    let up${j} = clamp(x[up_at + ${j}u], vec4(-7.0), vec4(7.0));
    v${j} = gate${j} / (vec4(1.0) + exp(min(-1.702 * gate${j}, vec4(80.0)))) * (up${j} + vec4(1.0));
#else
    v${j} = act(x[gate_at + ${j}u]) * x[up_at + ${j}u];
#endif
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
