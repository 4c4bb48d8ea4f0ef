// y[t] = norm(x[t]): RMS is x / sqrt(mean(x^2) + eps) * gain; LAYER is RMS of x - mean(x), plus a bias with BIAS; neither
// is x itself. As f32 or quantised, or added to what y holds. For each token, or gathered for each logit row.
// FOLDED leaves the factor of an RMS norm to the products (matmul_i8.wgsl, NORMED): y is gain * x, with the sums of squares
// of each group of x behind the scales.
// A lane takes whole groups of 32, so that the order of the sum depends on the adapter's lanes alone.
// Grid: a workgroup per row.
//
// Defines: RMS, LAYER or none; FOLDED (with RMS and I8); BIAS; I8 (quantised output), ADD (y += scale * result) or neither; GATHER (row l is token
// logit_token(l)); SG, SUBGROUP.
#import grid
#import step
#ifdef I8
#import quantise
#endif

struct Params {
  k: u32,      // elements of a row
  stride: u32, // elements from row to row, k rounded up to 32
  eps: f32,
  scale: f32, // what is added, with ADD
  squares_at: u32, // first sum of squares in ys, with FOLDED
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [num_tokens, stride / 4]
#ifdef NORMS
@group(0) @binding(2) var<storage, read> gain: array<vec4<f32>>; // [stride / 4], zero beyond k
#endif
#ifdef BIAS
@group(0) @binding(3) var<storage, read> shift: array<vec4<f32>>; // [stride / 4], zero beyond k
#endif
#ifdef I8
@group(0) @binding(4) var<storage, read_write> yq: array<vec4<u32>>; // [m, stride / 16]
@group(0) @binding(5) var<storage, read_write> ys: array<vec2<f32>>; // [m, stride / 32]
#else
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>; // [m, stride / 4]
#endif
@group(0) @binding(6) var<uniform> params: Params;

#ifdef NORMS
#ifndef SUBGROUP
#ifndef FOLDED
#import sum_of_lanes
#endif
#endif
#endif

#ifdef LAYER
/// x - mean, and 0 in the padding.
fn centred(value: vec4<f32>, mean: f32, i: u32) -> vec4<f32> {
  let inside = vec4(i, i + 1u, i + 2u, i + 3u) < vec4(params.k);
  return select(vec4(0.0), value - mean, inside);
}
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
#ifdef LAYER
  var elements = 0.0;
  for (var g = lane; g < groups; g += ${SG}u) {
#for j in 0..8
    elements += dot(x[start + g * 8u + ${j}u], vec4(1.0));
#end
  }
#ifdef SUBGROUP
  let mean = subgroupAdd(elements) / f32(params.k);
#else
  let mean = sum_of_lanes(lane, elements) / f32(params.k);
#endif
#endif
#ifdef NORMS
#ifndef FOLDED
  var sum = 0.0;
  for (var g = lane; g < groups; g += ${SG}u) {
#for j in 0..8
#ifdef LAYER
    let v${j} = centred(x[start + g * 8u + ${j}u], mean, g * 32u + ${j * 4}u);
#else
    let v${j} = x[start + g * 8u + ${j}u];
#endif
    sum += dot(v${j}, v${j});
#end
  }
#ifdef SUBGROUP
  let total = subgroupAdd(sum);
#else
  let total = sum_of_lanes(lane, sum);
#endif
  let scale = inverseSqrt(total / f32(params.k) + params.eps);
#endif
#endif
  for (var g = lane; g < groups; g += ${SG}u) {
#ifdef FOLDED
    var squares = 0.0;
#endif
#for j in 0..8
#ifdef FOLDED
    let x${j} = x[start + g * 8u + ${j}u];
    squares += dot(x${j}, x${j});
    let v${j} = x${j} * gain[g * 8u + ${j}u];
#else
#ifdef RMS
    let v${j} = x[start + g * 8u + ${j}u] * scale * gain[g * 8u + ${j}u];
#endif
#endif
#ifdef LAYER
#ifdef BIAS
    let v${j} = centred(x[start + g * 8u + ${j}u], mean, g * 32u + ${j * 4}u) * scale * gain[g * 8u + ${j}u] + shift[g * 8u + ${j}u];
#else
    let v${j} = centred(x[start + g * 8u + ${j}u], mean, g * 32u + ${j * 4}u) * scale * gain[g * 8u + ${j}u];
#endif
#endif
#ifndef NORMS
    let v${j} = x[start + g * 8u + ${j}u];
#endif
#end
#ifdef I8
    let q = quantise_group(v0, v1, v2, v3, v4, v5, v6, v7);
    let at = row * groups + g;
    yq[at * 2u] = q.low;
    yq[at * 2u + 1u] = q.high;
    ys[at] = q.scales;
#ifdef FOLDED
    ys[params.squares_at + at] = vec2(squares, 0.0);
#endif
#else
#for j in 0..8
#ifdef ADD
    y[(row * groups + g) * 8u + ${j}u] += params.scale * v${j};
#else
    y[(row * groups + g) * 8u + ${j}u] = v${j};
#endif
#end
#endif
  }
}
