// Workgroups counted in one line, though a dispatch holds at most 65535 of them in each dimension.

/// Width of a row of workgroups when a dispatch needs more than one row; equals recording.rs.
const GRID_ROW: u32 = 32768u;

fn linear_workgroup(id: vec3<u32>) -> u32 {
  return id.x + id.y * GRID_ROW;
}
