// y[t] += scale * (sum over i of shares[t, i] * parts[t, i] + shared[t]): what experts computed joins the hidden state,
// in the order in which they were chosen. SHARED: an expert that all tokens passed; MIX: times the sigmoid of a logit.
// A lane takes four elements.
// Grid: ceil(num_tokens * stride / 4 / SG) workgroups.
//
// Defines: SHARED, MIX (with SHARED); SG, SUBGROUP (not used: no lane looks at another).
#import grid
#import step

struct Params {
  num_active: u32,
  stride: u32, // elements from row to row of y, parts and shared, a multiple of 4
  scale: f32,
  logits_stride: u32,
  mix_at: u32, // element of a row of logits
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> shares: array<f32>; // [num_tokens, num_active]
@group(0) @binding(2) var<storage, read> parts: array<vec4<f32>>; // [num_tokens, num_active, stride / 4]
#ifdef SHARED
@group(0) @binding(3) var<storage, read> shared_part: array<vec4<f32>>; // [num_tokens, stride / 4]
#endif
#ifdef MIX
@group(0) @binding(4) var<storage, read> logits: array<f32>; // [num_tokens, logits_stride]
#endif
@group(0) @binding(5) var<storage, read_write> y: array<vec4<f32>>; // [num_tokens, stride / 4]
@group(0) @binding(6) var<uniform> params: Params;

@compute @workgroup_size(${SG})
fn main(@builtin(workgroup_id) group_id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let quads = params.stride / 4u;
  let item = linear_workgroup(group_id) * ${SG}u + lane;
  let token = item / quads;
  if token >= num_tokens() {
    return;
  }
  var sum = vec4(0.0);
  for (var i = 0u; i < params.num_active; i++) {
    let pair = token * params.num_active + i;
    sum = fma(vec4(shares[pair]), parts[pair * quads + item % quads], sum);
  }
#ifdef SHARED
#ifdef MIX
  let mix = 1.0 / (1.0 + exp(min(-logits[token * params.logits_stride + params.mix_at], 80.0)));
  sum = fma(vec4(mix), shared_part[item], sum);
#else
  sum += shared_part[item];
#endif
#endif
  y[item] = fma(vec4(params.scale), sum, y[item]);
}
