// The KV canary: each slot of the cache carries a mark of what was written to it; see batch/canary.rs.
//
// CHECK, before the step writes: every mark of a row's earlier keys must have its position and follow from the mark
// before it, and the last one must be the row's own. The first key that fails is told as its complement (0: none).
// Grid: rows * ceil(most_keys / 64) workgroups, lane = key. Blocks that a window left behind (block 0) are passed over.
// Otherwise: writes the marks of the step's tokens. Grid: ceil(rows / 64) workgroups, lane = row.
#import grid
#import step

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
#ifdef CHECK
@group(0) @binding(1) var<storage, read> marks: array<vec4<u32>>; // [num_blocks, block_size]: token, position, chain, 0
@group(0) @binding(2) var<storage, read_write> faults: array<atomic<u32>>; // [num_rows]
#else
@group(0) @binding(1) var<storage, read_write> marks: array<vec4<u32>>; // [num_blocks, block_size]: token, position, chain, 0
#endif

const START: u32 = 0x4b566173u;

fn link(chain: u32, token: u32, position: u32) -> u32 {
  var x = chain ^ (token * 0x9e3779b1u) ^ (position * 0x85ebca77u);
  x = (x ^ (x >> 16u)) * 0x21f0aaadu;
  x = (x ^ (x >> 15u)) * 0x735a2d97u;
  return x ^ (x >> 15u);
}

#ifdef CHECK
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let chunks = max((most_keys() + 63u) / 64u, 1u);
  let workgroup = linear_workgroup(group);
  let row = workgroup / chunks;
  let key = (workgroup % chunks) * 64u + lane;
  if row >= num_rows() {
    return;
  }
  let keys = position(row_start(row));
  if key >= keys {
    return;
  }
  let size = block_size();
  let table = block_table_start(row);
  let block = block_table(table + key / size);
  if block == 0u {
    return;
  }
  let mark = marks[block * size + key % size];
  var is_good = mark.y == key;
  let before_block = block_table(table + max(key, 1u) / size - select(0u, 1u, key > 0u && key % size == 0u));
  if key == 0u {
    is_good = is_good && mark.z == link(START, mark.x, key);
  } else if before_block != 0u {
    is_good = is_good && mark.z == link(marks[before_block * size + (key - 1u) % size].z, mark.x, key);
  }
  if key + 1u == keys {
    is_good = is_good && mark.z == row_chain(row);
  }
  if !is_good {
    atomicMax(&faults[row], ~key);
  }
}
#else
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = linear_workgroup(group) * 64u + lane;
  if row >= num_rows() {
    return;
  }
  var chain = row_chain(row);
  let end = row_start(row + 1u);
  for (var token = row_start(row); token < end; token++) {
    chain = link(chain, token_id(token), position(token));
    marks[kv_slot(token)] = vec4(token_id(token), position(token), chain, 0u);
  }
}
#endif
