// Writes one value into the first `count` words of a buffer.
// Grid: ceil(count / 64) workgroups.
#import grid

struct Params {
  count: u32,
  value: u32,
}

@group(0) @binding(0) var<storage, read_write> words: array<u32>; // [count]
@group(0) @binding(1) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let idx = linear_workgroup(group) * 64u + lane;
  if idx >= params.count {
    return;
  }
  words[idx] = params.value;
}
