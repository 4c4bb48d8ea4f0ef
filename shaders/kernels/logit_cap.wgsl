// logits *= scale, then cap * tanh(logits / cap) where there is a cap (gemma2), in place. A lane takes four logits.
// Grid: ceil(num_logits * stride / 4 / WG) workgroups.
#import grid
#import step

struct Params {
  stride: u32, // elements from row to row, a multiple of 4
  scale: f32,
  cap: f32,    // 0 is none
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read_write> logits: array<vec4<f32>>; // [num_logits, stride / 4]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let item = linear_workgroup(group) * ${WG}u + lane;
  if item >= num_logits() * (params.stride / 4u) {
    return;
  }
  var x = logits[item] * params.scale;
  if params.cap > 0.0 {
    // tanh(u) = 1 - 2 / (exp(2u) + 1), without overflow.
    let e = exp(clamp(2.0 * x / params.cap, vec4(-80.0), vec4(80.0)));
    x = params.cap * (vec4(1.0) - vec4(2.0) / (e + vec4(1.0)));
  }
  logits[item] = x;
}
