// y[r, k] = x[t, k] / sqrt(mean over k of x[t, k]^2 + eps) * gain[k], as f32, as i8 with scales, or both.
//
// r counts tokens, and t = r; or, with GATHER, logit rows, and t is the token of that row.
// Grid: one workgroup for each r. A lane owns whole groups of 32, so that it can quantise them alone.
//
// Defines: WG lanes; SUBGROUP if a workgroup is one subgroup; OUT_F32, OUT_I8, GATHER.
#import grid
#import step
#ifdef OUT_I8
#import quantise
#endif

struct Params {
  size: u32,     // elements that count for the mean
  groups: u32,   // of 32, padding included
  eps: f32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, groups * 8], padding is zero
@group(0) @binding(2) var<storage, read> gain: array<vec4<f32>>; // [groups * 8], padding is zero
#ifdef OUT_F32
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>; // [rows, groups * 8]
#endif
#ifdef OUT_I8
@group(0) @binding(4) var<storage, read_write> yq: array<vec4<u32>>; // [rows, groups * 2]
@group(0) @binding(5) var<storage, read_write> ys: array<vec2<f32>>; // [rows, groups]
#endif
@group(0) @binding(6) var<uniform> params: Params;

#ifndef SUBGROUP
var<workgroup> partial_sums: array<f32, ${WG}>;
#endif

@compute @workgroup_size(${WG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  // Surplus workgroups repeat the last row: they write what is there already.
#ifdef GATHER
  let row = min(linear_workgroup(group_id), max(num_logits(), 1u) - 1u);
  let token = select(0u, logit_token(row), num_logits() > 0u);
#else
  let row = min(linear_workgroup(group_id), max(num_tokens(), 1u) - 1u);
  let token = row;
#endif
  let groups = params.groups;

  var squares = 0.0;
  for (var g = lane; g < groups; g += ${WG}u) {
    let at = (token * groups + g) * 8u;
#for i in 0..8
    let v${i} = x[at + ${i}u];
    squares += dot(v${i}, v${i});
#end
  }
#ifdef SUBGROUP
  let sum = subgroupAdd(squares);
#else
  partial_sums[lane] = squares;
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < ${WG}u; i++) {
    sum += partial_sums[i];
  }
#endif
  let inverse = inverseSqrt(sum / f32(params.size) + params.eps);

  for (var g = lane; g < groups; g += ${WG}u) {
    let from_at = (token * groups + g) * 8u;
    let gain_at = g * 8u;
#for i in 0..8
    let n${i} = x[from_at + ${i}u] * inverse * gain[gain_at + ${i}u];
#end
    let to = row * groups + g;
#ifdef OUT_F32
#for i in 0..8
    y[to * 8u + ${i}u] = n${i};
#end
#endif
#ifdef OUT_I8
    let q = quantise(n0, n1, n2, n3, n4, n5, n6, n7);
    yq[to * 2u] = q.low;
    yq[to * 2u + 1u] = q.high;
    ys[to] = q.scale;
#endif
  }
}
