// RMSNorm: y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * gain, as f32 or quantised; for each token, or gathered for each logit
// row. A lane takes whole groups of 32, so that the order of the sum depends on the adapter's lanes alone.
// Grid: a workgroup per row.
//
// Defines: I8 (quantised output) or not; GATHER (row l is token logit_token(l)); SG, SUBGROUP.
#import grid
#import step
#ifdef I8
#import quantise
#endif

struct Params {
  k: u32,      // elements of a row
  stride: u32, // elements from row to row, k rounded up to 32
  eps: f32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, stride / 4]
@group(0) @binding(2) var<storage, read> gain: array<vec4<f32>>; // [stride / 4], zero beyond k
#ifdef I8
@group(0) @binding(3) var<storage, read_write> yq: array<vec4<u32>>; // [m, stride / 16]
@group(0) @binding(4) var<storage, read_write> ys: array<vec2<f32>>; // [m, stride / 32]
#else
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>; // [m, stride / 4]
#endif
@group(0) @binding(5) var<uniform> params: Params;

#ifndef SUBGROUP
var<workgroup> partial: array<f32, ${SG}>;
#endif

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
#ifdef SUBGROUP
  @builtin(subgroup_invocation_id) lane: u32,
#else
  @builtin(local_invocation_index) lane: u32,
#endif
) {
  let row = linear_workgroup(group_id);
#ifdef GATHER
  if row >= num_logits() {
    return;
  }
  let source = logit_token(row);
#else
  if row >= num_tokens() {
    return;
  }
  let source = row;
#endif
  let groups = params.stride / 32u;
  let start = source * (params.stride / 4u);
  var sum = 0.0;
  for (var g = lane; g < groups; g += ${SG}u) {
#for j in 0..8
    let v${j} = x[start + g * 8u + ${j}u];
    sum += dot(v${j}, v${j});
#end
  }
#ifdef SUBGROUP
  let total = subgroupAdd(sum);
#else
  partial[lane] = sum;
#for step in 0..6
#let reach = (step == 0) * 32 + (step == 1) * 16 + (step == 2) * 8 + (step == 3) * 4 + (step == 4) * 2 + (step == 5)
  workgroupBarrier();
  if lane < ${reach}u {
    partial[lane] += partial[lane + ${reach}u];
  }
#end
  workgroupBarrier();
  let total = partial[0];
#endif
  let scale = inverseSqrt(total / f32(params.k) + params.eps);
  for (var g = lane; g < groups; g += ${SG}u) {
#for j in 0..8
    let v${j} = x[start + g * 8u + ${j}u] * scale * gain[g * 8u + ${j}u];
#end
#ifdef I8
    let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
    let at = row * groups + g;
    yq[at * 2u] = q.low;
    yq[at * 2u + 1u] = q.high;
    ys[at] = q.scales;
#else
#for j in 0..8
    y[(row * groups + g) * 8u + ${j}u] = v${j};
#end
#endif
  }
}
