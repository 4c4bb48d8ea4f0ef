// Blocks of K and V copied within their pools, before a row writes into a block that others see. No copy of a step reads
// or writes what another one writes, so all are done at once. A lane copies one word in each of BUFFERS pools.
// Grid: ceil(num_copies * words / 64) workgroups.
//
// Defines: BUFFERS, pools that are copied together.
#import grid
#import step

struct Params {
  words: u32, // of a block, in each pool
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#for b in 0..BUFFERS
@group(0) @binding(${b + 1}) var<storage, read_write> pool_${b}: array<u32>; // [num_blocks, words]
#end
@group(0) @binding(${BUFFERS + 1}) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let item = linear_workgroup(group) * 64u + lane;
  let copy = item / params.words;
  if copy >= num_copies() {
    return;
  }
  let word = item % params.words;
  let blocks = block_copy(copy);
  let to = blocks.y * params.words + word;
  let source = blocks.x * params.words + word;
#for b in 0..BUFFERS
  pool_${b}[to] = pool_${b}[source];
#end
}
