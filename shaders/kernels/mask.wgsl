// Logits of tokens that a row may not draw fall far below all others, in place; rows without a mask stay as they are.
// Recorded only for steps that have masks. Grid: num_logits workgroups.
#import grid
#import step

struct Params {
  vocab: u32,
  stride: u32,
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>; // [num_logits, stride]
@group(0) @binding(2) var<uniform> params: Params;

/// Finite, so that the row still counts as sound, and too low for any draw.
const MASKED: f32 = -1e30;

@compute @workgroup_size(${WG})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = linear_workgroup(group);
  if row >= num_logits() {
    return;
  }
  let start = mask_start(row);
  if start == 0xffffffffu {
    return;
  }
  let source = row * params.stride;
  for (var token = lane; token < params.vocab; token += ${WG}u) {
    if ((mask_word(start + token / 32u) >> (token % 32u)) & 1u) == 0u {
      logits[source + token] = MASKED;
    }
  }
}
