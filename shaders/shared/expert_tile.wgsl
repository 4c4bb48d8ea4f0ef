// GROUPED: products in which each row of x has an expert whose weights it meets. A workgroup takes a tile of the work list
// that expert_pairs.wgsl wrote; the kernel file declares work and params.

/// Tiles of the step.
fn num_expert_tiles() -> u32 {
  return work[0];
}

/// (expert, first slot, slots)
fn expert_tile(tile: u32) -> vec3<u32> {
  return vec3(work[4u + tile * 4u], work[5u + tile * 4u], work[6u + tile * 4u]);
}

/// The pair of (token, expert) in a slot: its row of y.
fn pair_of_slot(slot: u32) -> u32 {
  return work[params.slots + slot];
}

/// The row of x of a slot.
fn x_row(slot: u32) -> u32 {
  return pair_of_slot(slot) / params.pairs_per_row;
}
