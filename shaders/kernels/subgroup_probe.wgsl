// What the adapter's subgroups really are: a driver may report one size and run another.
// Grid: 2 workgroups.
//
// Defines: SG, the reported size; SUBGROUP.

@group(0) @binding(0) var<storage, read_write> seen: array<vec4<u32>>; // [2 * SG], (size, lane, lanes, last lane's index)

@compute @workgroup_size(${SG})
fn main(
  @builtin(workgroup_id) group_id: vec3<u32>,
  @builtin(local_invocation_index) idx: u32,
  @builtin(subgroup_size) size: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  seen[group_id.x * ${SG}u + idx] = vec4(size, lane, subgroupAdd(1u), subgroupBroadcast(idx, ${SG - 1}u));
}
